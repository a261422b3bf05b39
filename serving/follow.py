# SPDX-License-Identifier: Apache-2.0
"""Polling of sources: files, lists, stores, issuers, APIs, processes.

A failed poll is logged and counted. It leaves everything as it was, and polling continues. No
failure of a source ends the process.
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
"""Seconds between two polls of a file."""
AGAIN_S = 1.0
"""Seconds until work that ended in an exception is started again."""
LONGEST_PAUSE_S = 120.0
"""The longest of the doubling pauses, in seconds."""
LARGEST = 4 * 2**20
"""Most bytes of a polled file."""

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
    "memory",
    "models",
    "objectives",
    "peers",
    "processes",
    "read_ahead",
    "replicas",
    "shared_store",
    "time_outs",
    "tokenizer",
]
"""The source that is polled, as the label of the series."""


@functools.cache
def _failures() -> "Counter":
    from prometheus_client import Counter  # a router sets its environment before this is imported

    return Counter(
        "slipway_follow_failures", "Looks at what is followed that have failed.", ["what"]
    )


def count(what: What, failures: int = 1) -> None:
    """Count failed polls. `failures=0` creates the series."""
    _failures().labels(what).inc(failures)


async def kept(what: What, work: Callable[[], Awaitable[object]]) -> None:
    """Run work, again after each exception, until it returns or is cancelled."""
    count(what, 0)
    while True:
        try:
            await work()
            return
        except Exception:
            _ended(what)
        await asyncio.sleep(AGAIN_S)


def kept_in_thread(what: What, work: Callable[[], object]) -> None:
    """Do the same for blocking work, in the calling thread."""
    count(what, 0)
    while True:
        try:
            work()
            return
        except Exception:
            _ended(what)
        time.sleep(AGAIN_S)


def _ended(what: What) -> None:
    log.exception("polling of %s has failed, and starts again in %g s", what, AGAIN_S)
    count(what)


def pauses(first: float, longest: float = LONGEST_PAUSE_S) -> Iterator[float]:
    """Yield the seconds to wait after consecutive failures. They double up to `longest`."""
    while True:
        yield first
        first = min(first * 2, longest)


class FaultLog:
    """Logs why a source cannot be read: each reason once, until the source can be read again.

    Counts every failed poll.
    """

    def __init__(self, what: str, source: object, label: What) -> None:
        """what: the data that are read, in the plural. source: the source's name in the log."""
        self._what = what
        self._source = source
        self._label = label
        self._reason: str | None = None
        count(label, 0)

    def failed(self, error: Exception | str) -> None:
        """Log why the source could not be read. Any error but OSError and ValueError is logged with
        its traceback.
        """
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
        """Log that the source could be read again."""
        if self._reason:
            log.warning("%s are read from %s again", self._what, self._source)
        self._reason = None


def content(path: Path) -> bytes:
    """Return the content of a polled file. Raises OSError, and ValueError above LARGEST bytes."""
    with path.open("rb") as file:
        found = file.read(LARGEST + 1)
    if len(found) > LARGEST:
        raise ValueError(f"{path} has more than {LARGEST} bytes")
    return found


async def changes(
    read: Callable[[], C], parse: Callable[[C], T], faults: FaultLog, known: C | None = None
) -> AsyncGenerator[T]:
    """Poll a source. Yields the parsed content at first, and after each change. Never ends.

    read: called in a thread. parse: raises ValueError with the reason if the content cannot be
    used; this is not a change. known: the content that was read before, which is not a change
    either.

    It polls instead of using inotify, for two reasons. inotify follows the first file and not the
    path, but Kubernetes swaps a link two folders up, and editors replace the file. And inotify
    reports no changes on network file systems.
    """
    used = seen = known
    refused: tuple[C, Exception] | None = None
    while True:
        try:
            found = await in_thread(read)
            # A file that is being written may look empty or cut off, but rarely in two polls.
            if found == used:
                faults.recovered()
            elif refused and found == refused[0]:  # refused content is not parsed twice
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
