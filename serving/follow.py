# SPDX-License-Identifier: Apache-2.0
"""Whatever is looked at again and again: files, lists, stores, issuers, APIs, processes.

A look that fails is logged and counted, leaves everything as it was, and is followed by another
look. Nothing that is followed ends the process.
"""

import asyncio
import functools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from serving.aio import in_thread

if TYPE_CHECKING:
    from prometheus_client import Counter

log = logging.getLogger(__name__)

C = TypeVar("C")
T = TypeVar("T")

LOOK_S = 0.5
"""Between two looks at a file."""
AGAIN_S = 1.0
"""After which what has ended unforeseen begins anew."""
LONGEST_PAUSE_S = 120.0
"""Of pauses that double."""
LARGEST = 4 * 2**20
"""Bytes of a file that is followed."""

What = Literal[
    "adapters",
    "batches",
    "cache_server",
    "certificate",
    "copies",
    "endpoint_picker",
    "health",
    "issuer",
    "keys",
    "kv_events",
    "limits",
    "objectives",
    "peers",
    "processes",
    "replicas",
    "shared_store",
    "time_outs",
    "tokenizer",
]
"""What is followed, as the label of the series."""


@functools.cache
def _failures() -> "Counter":
    from prometheus_client import Counter  # a router sets its environment before this is imported

    return Counter(
        "slipway_follow_failures", "Looks at what is followed that have failed.", ["what"]
    )


def count(what: What, failures: int = 1) -> None:
    """Count looks that have failed. With 0 the series is there from then on."""
    _failures().labels(what).inc(failures)


async def kept(what: What, work: Callable[[], Awaitable[object]]) -> None:
    """Have work done, anew whenever it ends in an exception; until it returns or is cancelled."""
    count(what, 0)
    while True:
        try:
            await work()
            return
        except Exception:
            _ended(what)
        await asyncio.sleep(AGAIN_S)


def kept_in_thread(what: What, work: Callable[[], object]) -> None:
    """The same of work that blocks, in the thread that calls."""
    count(what, 0)
    while True:
        try:
            work()
            return
        except Exception:
            _ended(what)
        time.sleep(AGAIN_S)


def _ended(what: What) -> None:
    log.exception("following of %s has ended, and begins anew in %g s", what, AGAIN_S)
    count(what)


def pauses(first: float, longest: float = LONGEST_PAUSE_S) -> Iterator[float]:
    """Seconds to wait after each failure in a row: twice as many each time."""
    while True:
        yield first
        first = min(first * 2, longest)


class FaultLog:
    """Logs what keeps something from being read: each reason once, until it can be read again.

    Counts every look that fails.
    """

    def __init__(self, what: str, source: object, label: What) -> None:
        """what: is read, in the plural. source: from where, as the log calls it."""
        self._what = what
        self._source = source
        self._label = label
        self._reason: str | None = None
        count(label, 0)

    def failed(self, error: Exception | str) -> None:
        """It could not be read. What is neither OSError nor ValueError is told with its trace."""
        count(self._label)
        reason = str(error) or type(error).__name__
        if reason != self._reason:
            unforeseen = isinstance(error, Exception) and not isinstance(
                error, (OSError, ValueError)
            )
            log.error(
                "%s stay as they were, %s: %s",
                self._what,
                self._source,
                reason,
                exc_info=error if unforeseen and isinstance(error, Exception) else None,
            )
        self._reason = reason

    def recovered(self) -> None:
        """It could be read."""
        if self._reason:
            log.warning("%s are read from %s again", self._what, self._source)
        self._reason = None


def content(path: Path) -> bytes:
    """A file that is followed. Raises OSError, and ValueError where it is larger than LARGEST."""
    with path.open("rb") as file:
        found = file.read(LARGEST + 1)
    if len(found) > LARGEST:
        raise ValueError(f"{path} has more than {LARGEST} bytes")
    return found


async def changes(
    read: Callable[[], C], parse: Callable[[C], T], faults: FaultLog, known: C | None = None
) -> AsyncGenerator[T]:
    """What is read, parsed, now and each time that it is another than before. Does not end.

    read: is called in a thread. parse: raises for what cannot be used, ValueError with the reason;
    then there is no change. known: what was read before, which is no change either.

    It is read again and again rather than watched by inotify, which follows the file that was there
    at first, not the path, where Kubernetes swaps a link two folders up and editors put a new file
    in place; and which says nothing of file systems on a network.
    """
    used = seen = known
    refused: tuple[C, Exception] | None = None
    while True:
        try:
            found = await in_thread(read)
            # What is being written may be seen empty or cut off. Two looks agree on it less often.
            if found == used:
                faults.recovered()
            elif refused and found == refused[0]:  # what cannot be used is not parsed twice
                faults.failed(refused[1])
            elif used is None or found == seen:
                refused = None
                try:
                    parsed = parse(found)
                except Exception as error:
                    refused = found, error
                    raise
                faults.recovered()
                used = found
                yield parsed
            seen = found
        except Exception as error:
            faults.failed(error)
        await asyncio.sleep(LOOK_S)
