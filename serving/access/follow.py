# SPDX-License-Identifier: Apache-2.0
"""Files that are read anew when they change."""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from serving.aio import in_thread

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 0.5
"""Between two looks."""


async def follow(read: Callable[[], T], apply: Callable[[T], None], what: str) -> None:
    """Look at something until cancelled, and apply it each time it is another than before.

    read: is called in a thread. apply: raises ValueError for what cannot be used; then what was
    there stays, and the log says why. What is being written may be seen cut off, so two looks have
    to agree. As the router's file of replicas, it is read again rather than watched.
    """
    applied: T | None = None
    seen: T | None = None
    trouble = ""
    while True:
        try:
            found = await in_thread(read)
            if found != applied and found == seen:
                apply(found)
                if applied is not None:
                    log.info("%s was read anew", what)
                applied, trouble = found, ""
            seen = found
        except (OSError, ValueError) as error:
            reason = str(error)
            if reason != trouble:
                log.error("%s stays as it was: %s", what, reason)
            trouble = reason
        await asyncio.sleep(LOOK_S)
