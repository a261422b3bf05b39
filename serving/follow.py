# SPDX-License-Identifier: Apache-2.0
"""Files that are read anew when they change, and what the log says while they cannot be."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from serving.aio import in_thread

log = logging.getLogger(__name__)

C = TypeVar("C")
T = TypeVar("T")

LOOK_S = 0.5
"""Between two looks."""


class FaultLog:
    """Logs what keeps something from being read: each reason once, until it can be read again."""

    def __init__(self, what: str, source: object) -> None:
        """what: is read, in the plural. source: from where, as the log calls it."""
        self._what = what
        self._source = source
        self._reason: str | None = None

    def failed(self, reason: str) -> None:
        """It could not be read."""
        if reason != self._reason:
            log.error("%s stay as they were, %s: %s", self._what, self._source, reason)
        self._reason = reason

    def recovered(self) -> None:
        """It could be read."""
        if self._reason:
            log.warning("%s are read from %s again", self._what, self._source)
        self._reason = None


async def changes(
    read: Callable[[], C], parse: Callable[[C], T], faults: FaultLog, known: C | None = None
) -> AsyncGenerator[T]:
    """What is read, parsed, now and each time that it is another than before. Does not end.

    read: is called in a thread. parse: raises ValueError for what cannot be used; then there is no
    change. known: what was read before, which is no change either.

    It is read again and again rather than watched by inotify, which follows the file that was there
    at first, not the path, where Kubernetes swaps a link two folders up and editors put a new file
    in place; and which says nothing of file systems on a network.
    """
    used = seen = known
    while True:
        try:
            found = await in_thread(read)
            # What is being written may be seen empty or cut off. Two looks agree on it less often.
            if found == used:
                faults.recovered()
            elif used is None or found == seen:
                parsed = parse(found)
                faults.recovered()
                used = found
                yield parsed
            seen = found
        except (OSError, ValueError) as error:
            faults.failed(str(error))
        await asyncio.sleep(LOOK_S)
