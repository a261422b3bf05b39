# SPDX-License-Identifier: Apache-2.0
"""The early end of a request. The first cause wins, and all listeners get it."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from starlette.types import Receive

from serving.errors import ServingError, TimedOut


class ClientLeft(Exception):
    """The client disconnected and needs no answer."""


Cause = ServingError | ClientLeft


class Cancellation:
    """A request's early end: its client disconnected, its deadline passed, or the server stops.

    A request awaits everything within raising(). An engine that does not must wait for heard(): it
    only frees a request's resources when it believes that the client has disconnected.

    began: when the request began, by the event loop's clock; None for now.
    """

    def __init__(self, began: float | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.began = self._loop.time() if began is None else began
        self.cause: Cause | None = None
        self._listeners: dict[Callable[[], object], None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def cancel(self, cause: Cause) -> None:
        """End the request, unless it already has a cause. A task that calls this within its own
        raising() must await something there before it leaves, because that await is interrupted.
        """
        if self.cause is None:
            self.cause = cause
            for listener in list(self._listeners):
                listener()

    def end_after(self, timeout: int | None) -> None:
        """End the request `timeout` seconds after it began. This replaces an earlier deadline; None
        removes it.
        """
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if timeout:
            error = TimedOut(timeout)
            self._timer = self._loop.call_at(self.began + timeout, self.cancel, error)

    def end_after_now(self, timeout: int | None) -> None:
        """Do the same, but count from now."""
        self.began = self._loop.time()
        self.end_after(timeout)

    def time_left(self, timeout: int | None) -> float | None:
        """Return the seconds that are left of `timeout`; None without a timeout."""
        return self.began + timeout - self._loop.time() if timeout else None

    async def heard(self) -> None:
        """Wait until there is a cause."""
        if self.cause is None:
            # A future instead of an Event, which costs more: every request waits here.
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
        """Return a context manager: the cause interrupts this task's await in it, and is raised."""
        return _Raising(self)

    @contextlib.contextmanager
    def part(self) -> Iterator["Cancellation"]:
        """Yield the cancellation of a part of the request. The part begins now, may end earlier,
        and ends with the request.
        """
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
        """Cancel the request when its client disconnects. Its body must have been read."""

        async def watch() -> None:
            await receive()
            self.cancel(ClientLeft())

        watching = self._loop.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()

    def listen(self, listener: Callable[[], object]) -> None:
        """Add a listener, which is called when there is a cause."""
        self._listeners[listener] = None

    def ignore(self, listener: Callable[[], object]) -> None:
        """Remove a listener."""
        del self._listeners[listener]


class _Raising:
    """Works like asyncio.timeout(): it cancels the task, and turns its CancelledError into the
    cause, unless other code has also cancelled the task. It is a class because each request enters
    several, and a generator costs more.
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
