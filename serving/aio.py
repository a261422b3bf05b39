# SPDX-License-Identifier: Apache-2.0
"""Blocking work in threads, and waiting for events."""

import _thread
import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: object) -> T:
    """Run a function in a thread. Returns its result, or raises its exception. The thread does not
    keep the process alive, unlike an executor's.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def resolve(setter: Callable[[Any], None], value: object) -> None:
        if not done.done():
            setter(value)

    def run() -> None:
        setter: Callable[[Any], None] = done.set_result
        value: Any
        try:
            value = function(*args)
        except BaseException as error:
            setter, value = done.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop has closed: no one waits
            loop.call_soon_threadsafe(resolve, setter, value)

    _thread.start_new_thread(run, ())  # threading's start() waits for the thread to run
    return await done


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, at most this many seconds. Returns whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
