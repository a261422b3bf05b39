# SPDX-License-Identifier: Apache-2.0
"""Files of a model that are still fetched by one process while others wait for them.

The fetch gives a file its name once the file is complete, so a waiting process only looks for the
name. A `Sign` is a file beside them: its time changes while bytes arrive, and it gets the reason if
the fetch fails.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

STILL_S = 900.0
"""The longest time without progress, in seconds. A fetch gives up earlier: after 8 attempts of up
to 60 s each."""
POLL_S = 0.05
LONGEST = 4096  # bytes of a reason


class Unfetched(RuntimeError):
    """A file does not arrive. The text says why."""


class Early(NamedTuple):
    """A use of a model that begins before all of its files are there.

    last: the names of the files that it waits for, in its order. begin: called with the folder,
    once all other files are in it.
    """

    last: Sequence[str]
    begin: Callable[[Path], None]


class Sign:
    """The file that shows how the fetch goes."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be written."""
        self.path = path
        path.write_bytes(b"")

    def move(self) -> None:
        """Bytes have arrived."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def fail(self, reason: str) -> None:
        """The fetch has failed. Raises OSError if the file cannot be written."""
        new = self.path.with_suffix(".new")
        new.write_bytes(reason.encode()[:LONGEST])
        new.replace(self.path)


def wait(
    file: Path,
    size: int,
    sign: Path,
    still_s: float = STILL_S,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Wait until a file is there. size: its bytes. sign: the path of the fetch's Sign.

    Raises Unfetched if the file has another size, if the fetch has failed, or after `still_s`
    seconds without progress.
    """
    seen, since = -1, clock()
    while True:
        with contextlib.suppress(FileNotFoundError):
            if (found := file.stat().st_size) != size:
                raise Unfetched(f"{file} has {found} bytes instead of {size}; start again")
            return
        try:
            with sign.open("rb") as content:
                reason = content.read(LONGEST).decode(errors="replace")
                moved = os.fstat(content.fileno()).st_mtime_ns
        except OSError as error:
            raise Unfetched(f"{file} is not there, and {sign} cannot be read: {error}") from None
        if reason:
            raise Unfetched(reason)
        if moved != seen:
            seen, since = moved, clock()
        elif clock() - since > still_s:
            raise Unfetched(
                f"{file} is not there, and nothing has arrived for {still_s:g} s; start again"
            )
        pause(POLL_S)
