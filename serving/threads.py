"""Blocking work beside the event loop."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: object) -> T:
    """Run a function in a thread that does not keep the process alive, unlike an executor's."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(setter: Callable[[Any], None], value: object) -> None:
        if not done.done():
            setter(value)

    def run() -> None:
        try:
            result = function(*args)
        except BaseException as error:
            loop.call_soon_threadsafe(tell, done.set_exception, error)
        else:
            loop.call_soon_threadsafe(tell, done.set_result, result)

    threading.Thread(target=run, name=function.__name__, daemon=True).start()
    return await done
