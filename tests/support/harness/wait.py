# SPDX-License-Identifier: Apache-2.0
"""Waiting until a condition holds.

A look may cost a request. So the pause between two looks grows with the wait, to a twentieth of it.
"""

import asyncio
import inspect
import time
from collections.abc import Callable

LONGEST_S = 0.5
"""Longest pause between two looks, in seconds."""


def until(holds: Callable[..., object], seconds: float = 240, every: float = 0.05) -> None:
    """Raises TimeoutError, after longer than a busy machine takes for anything that tests await."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"not within {seconds:g} s")
        time.sleep(_pause(began, every))


async def until_async(
    holds: Callable[..., object], seconds: float = 240, every: float = 0.005
) -> None:
    """The same for coroutines. holds: may be a coroutine function. Raises TimeoutError."""
    began = time.monotonic()
    async with asyncio.timeout(seconds):
        while True:
            found = holds()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(_pause(began, every))


def _pause(began: float, every: float) -> float:
    return max(every, min((time.monotonic() - began) / 20, LONGEST_S))


async def turns(count: int = 20) -> None:
    """Let the event loop turn for a while, so that tasks of this process get on. While the machine
    stalls, no turn is counted, unlike a single sleep, which may end before anything else runs.
    """
    for _ in range(count):
        await asyncio.sleep(0.005)
