# SPDX-License-Identifier: Apache-2.0
"""Waiting until a condition holds."""

import asyncio
import inspect
import time
from collections.abc import Callable


def until(holds: Callable[..., object], seconds: float = 240, every: float = 0.05) -> None:
    """Raises TimeoutError, after longer than a busy machine takes for anything that tests await."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s")
        time.sleep(every)


async def until_async(
    holds: Callable[..., object], seconds: float = 240, every: float = 0.005
) -> None:
    """The same for coroutines. holds: may be a coroutine function. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while True:
            found = holds()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(every)


async def turns(count: int = 20) -> None:
    """Let the event loop turn for a while, so that tasks of this process get on. While the machine
    stalls, no turn is counted, unlike a single sleep, which may end before anything else runs.
    """
    for _ in range(count):
        await asyncio.sleep(0.005)
