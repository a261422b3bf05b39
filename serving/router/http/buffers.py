# SPDX-License-Identifier: Apache-2.0
"""The memory that all clients' requests take, and its limits."""

MAX_BODY = 4 * 1024**2
"""Bytes of a body that are awaited before its replica is chosen. The rest is streamed, and such a
request is not sent to a second replica.
"""
MAX_BODIES = 512 * 1024**2
"""Bytes of bodies that are held at once, for all clients; beyond, all are streamed."""
MOST_HELD = 4096
"""Requests of a process that wait for a replica at once."""
MOST_HELD_BYTES = MAX_BODIES // 2
"""Bytes of their bodies; the rest is for requests in flight."""
MAX_HEADS = 256 * 1024**2
"""Bytes of memory that all requests' heads may take; beyond, requests are refused."""


class Buffers:
    """Counts the memory that requests hold. Each request adds itself, and takes itself off."""

    def __init__(self) -> None:
        self.bodies = 0
        """Bytes of bodies that have come and are not sent on yet."""
        self.heads = 0
        """Bytes that heads take, about."""

    def add(self, body: bytes) -> bool:
        """Hold more of a body. Whether there was room for it: it is held in any case."""
        room = self.bodies <= MAX_BODIES
        self.bodies += len(body)
        return room

    @property
    def heads_full(self) -> bool:
        return self.heads > MAX_HEADS
