# SPDX-License-Identifier: Apache-2.0
"""Flow control of a connection, the same towards clients and towards replicas."""

import asyncio
from typing import cast


class FlowControl(asyncio.Protocol):
    """A connection whose reading can be paused, and which knows whether its peer keeps up."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.paused = False
        """Whether reading from the peer is paused."""
        self.full = False
        """Whether the peer reads too slowly, so that writes pile up here."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def pause(self) -> None:
        """Read no more for now."""
        if not self.paused and not self.transport.is_closing():
            self.paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self.paused and not self.transport.is_closing():
            self.paused = False
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
