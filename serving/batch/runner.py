# SPDX-License-Identifier: Apache-2.0
"""Finds batches that no server runs, and runs them: those that are new, and those whose server has
ended.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from typing import BinaryIO

from lmi_config.options.declared import Settings
from serving.aio import in_thread, set_within
from serving.batch.lanes import Lanes
from serving.batch.objects import OtherCopies, OwnedBatch, Status
from serving.batch.run import Run
from serving.batch.store import Store, locked
from serving.follow import count, kept
from serving.inference.pipeline import Pipeline

log = logging.getLogger(__name__)

FIND_S = 5.0
"""Seconds between two searches for batches that other servers made, or no longer run."""
TURN_S = 1.0
"""Seconds between two searches by the copies of one container, and between two attempts to become
the copy that runs batches.
"""
SWEEP_S = 60.0
"""Seconds between two removals of expired files and batches."""
PAUSE_S = 10.0
"""Seconds until the retry of a batch that failed through no fault of its lines."""
BATCHES, ALL_BATCHES = 8, 32
"""Running batches of one owner, and of all; each reads its input, and keeps some 6 MB of digests of
its lines.
"""


class Runner:
    """Runs the batches of a folder. pipeline: answers their lines. others: copies of this
    container, which answer lines as well; one of them runs all batches.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        pipeline: Pipeline,
        others: OtherCopies | None = None,
    ) -> None:
        self._others = others
        self._store = store
        self._settings = settings
        self._pipeline = pipeline
        concurrency = settings.batch_concurrency or max(pipeline.engine.concurrency // 2, 1)
        self._lanes = Lanes(pipeline, concurrency, settings, others)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running = Counter[str | None]()  # by owner
        self._runs: set[Run] = set()
        self._stopping = asyncio.Event()
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """There is a batch to be begun."""
        self._wake.set()

    async def run(self) -> None:
        """Run batches until stop() is called."""
        with await self._turn():
            following = asyncio.create_task(kept("copies", self._lanes.follow))
            try:
                await self._find()
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def _turn(self) -> contextlib.AbstractContextManager[object]:
        """Wait until no other copy of this container runs batches, or until stop() is called."""
        while self._others and not self._stopping.is_set():
            if turn := await in_thread(locked, self._others.turn):
                return turn
            await set_within(self._stopping, TURN_S)
        return contextlib.nullcontext()

    async def _find(self) -> None:
        """Look for batches and begin them, until stop() is called."""
        loop = asyncio.get_running_loop()
        swept = -SWEEP_S
        every = TURN_S if self._others else FIND_S
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                if loop.time() >= swept + SWEEP_S:
                    swept = loop.time()
                    await in_thread(self._store.sweep)
                found = await in_thread(self._store.open_batches)
            except Exception as error:  # whatever it is, batches are looked for again
                trace = None if isinstance(error, OSError) else error
                log.error("OPTION_BATCH_FOLDER cannot be read: %s", error, exc_info=trace)
                count("batches")
                found = []
            for owned in found:
                if owned.batch.id not in self._tasks and self._may_run(owned):
                    await self._begin(owned)
            await set_within(self._wake, every)

    async def stop(self) -> None:
        """Leave the batches for another run."""
        self._stopping.set()
        self._wake.set()
        for run in self._runs:
            run.leave()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    def _may_run(self, owned: OwnedBatch) -> bool:
        """Whether to run it; a batch that must end always runs, however many its owner has. While
        others wait, the last places are for owners without a running batch.
        """
        if self._stopping.is_set() or self._running.total() >= 2 * ALL_BATCHES:
            return False
        mine = self._running[owned.owner]
        free = ALL_BATCHES - self._running.total()
        ends = owned.batch.status is Status.CANCELLING
        return ends or (mine < BATCHES and free > (0 if not mine else BATCHES))

    async def _begin(self, owned: OwnedBatch) -> None:
        """Run a batch, unless another server does."""
        name = owned.batch.id
        try:
            lock = await in_thread(self._store.lock, name)
        except OSError as error:
            log.error("%s cannot be locked: %s", name, error)
            count("batches")
            return
        if lock and self._stopping.is_set():
            lock.close()
        elif lock:
            self._running[owned.owner] += 1
            self._tasks[name] = asyncio.create_task(self._one(name, owned.owner, lock))

    async def _one(self, name: str, owner: str | None, lock: BinaryIO) -> None:
        try:
            with lock:
                owned = await in_thread(self._store.any_batch, name)
                if owned and owned.batch.status.open and not self._stopping.is_set():
                    await self._run(owned)
        except Exception as error:
            why = error if isinstance(error, OSError) else "the server failed on it"
            trace = None if isinstance(error, OSError) else error
            log.error("%s is tried again in %d s: %s", name, PAUSE_S, why, exc_info=trace)
            count("batches")
            await set_within(self._stopping, PAUSE_S)
        finally:
            del self._tasks[name]
            self._running[owner] -= 1
            self.wake()  # there may be one that had no room

    async def _run(self, owned: OwnedBatch) -> None:
        run = Run(owned, self._store, self._settings, self._pipeline, self._lanes)
        self._runs.add(run)
        try:
            await run.run()
        finally:
            self._runs.discard(run)
