# SPDX-License-Identifier: Apache-2.0
"""Why a request ends before it has been answered. The first cause wins, and everybody hears it."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from starlette.types import Receive

from serving.errors import ServingError, TimedOut


class ClientLeft(Exception):
    """The client left; nobody waits for an answer any more."""


Cause = ServingError | ClientLeft


class Cancellation:
    """A request's early end: its client left, its deadline is over, or the server stops.

    Whatever the request awaits is awaited within raising(). An engine that does not do so is told
    by heard(), since it frees what it works on only when it believes that the client has gone.

    began: when the request did, by the event loop's clock; now, where it is not given.
    """

    def __init__(self, began: float | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.began = self._loop.time() if began is None else began
        self.cause: Cause | None = None
        self._listeners: dict[Callable[[], object], None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def cancel(self, cause: Cause) -> None:
        """End the request, unless it is being ended already. A task that calls this within its own
        raising() has to await something there before it leaves, which is when it is interrupted.
        """
        if self.cause is None:
            self.cause = cause
            for listener in list(self._listeners):
                listener()

    def end_after(self, timeout: int | None) -> None:
        """End the request `timeout` seconds after it began. Takes the place of an earlier deadline;
        None is for none.
        """
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if timeout:
            error = TimedOut(timeout)
            self._timer = self._loop.call_at(self.began + timeout, self.cancel, error)

    def end_after_now(self, timeout: int | None) -> None:
        """The same, as if it began now."""
        self.began = self._loop.time()
        self.end_after(timeout)

    def time_left(self, timeout: int | None) -> float | None:
        """Seconds of `timeout` that are left; None where there is none."""
        return self.began + timeout - self._loop.time() if timeout else None

    async def heard(self) -> None:
        """Wait until there is a cause."""
        if self.cause is None:
            # A future by hand: every request waits here, and an Event costs more.
            over = self._loop.create_future()

            def hear() -> None:
                if not over.done():
                    over.set_result(None)

            self.listen(hear)
            try:
                await over
            finally:
                self.ignore(hear)

    def raising(self) -> "_Raising":
        """Raise the cause at whatever this task awaits within, which is cancelled."""
        return _Raising(self)

    @contextlib.contextmanager
    def part(self) -> Iterator["Cancellation"]:
        """One for a part of the request, which begins now, may end before it, and ends with it."""
        part = Cancellation()
        if self.cause:
            part.cancel(self.cause)

        def end() -> None:
            assert self.cause
            part.cancel(self.cause)

        self.listen(end)
        try:
            yield part
        finally:
            self.ignore(end)
            part.end_after(None)

    @contextlib.contextmanager
    def watching(self, receive: Receive) -> Iterator[None]:
        """Hear that the client leaves. Its body has to have been read."""

        async def watch() -> None:
            await receive()
            self.cancel(ClientLeft())

        watching = self._loop.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()

    def listen(self, listener: Callable[[], object]) -> None:
        """Have a function called when there is a cause."""
        self._listeners[listener] = None

    def ignore(self, listener: Callable[[], object]) -> None:
        """Have it called no more."""
        del self._listeners[listener]


class _Raising:
    """As asyncio.timeout() does it: the task is cancelled, and its CancelledError becomes the
    cause, unless others have cancelled it as well. A class, since each request enters several.
    """

    __slots__ = ("_before", "_cancellation", "_interrupted", "_task")

    def __init__(self, cancellation: Cancellation) -> None:
        task = asyncio.current_task()
        assert task
        self._cancellation = cancellation
        self._task = task
        self._before = task.cancelling()
        self._interrupted = False

    def __enter__(self) -> None:
        if self._cancellation.cause:
            raise self._cancellation.cause
        self._cancellation.listen(self._interrupt)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self._cancellation.ignore(self._interrupt)
        if self._interrupted:
            others = self._task.uncancel() > self._before
            if isinstance(error, asyncio.CancelledError) and not others:
                assert self._cancellation.cause
                raise self._cancellation.cause from None

    def _interrupt(self) -> None:
        self._interrupted = True
        self._task.cancel()
