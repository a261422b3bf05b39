# SPDX-License-Identifier: Apache-2.0
"""Blocking work beside the event loop."""

import _thread
import asyncio
import threading
import time

from serving.aio import in_thread


def test_a_thread_that_ends_after_its_loop():
    begun, go_on, before = threading.Event(), threading.Event(), _thread._count()

    def work():
        begun.set()
        go_on.wait()

    def loop():
        async def start():
            task = asyncio.create_task(in_thread(work))
            await asyncio.sleep(0)
            task.cancel()

        asyncio.run(start())

    outer = threading.Thread(target=loop)
    outer.start()
    outer.join()
    begun.wait()
    go_on.set()  # pytest fails for an exception in a thread
    while _thread._count() > before:
        time.sleep(0.01)
