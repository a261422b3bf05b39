# SPDX-License-Identifier: Apache-2.0
"""Hostile clients and neighbours, all at once, and the watch over /ping."""

import asyncio
import itertools
import random
import sys
import time
from collections.abc import Awaitable, Callable

import psutil

from tests.support.harness.process import Program
from tests.support.harness.wait import until_async
from tools.chaos.hostile.bombs import bombs, folders
from tools.chaos.hostile.clients import ATTACKS, Hostile
from tools.chaos.hostile.code import hostile_code
from tools.chaos.ledger import Ledger
from tools.chaos.users import Users
from tools.chaos.watch import Target, pings, watch
from tools.chaos.world import ADMIN, World, until

ATTACKERS = 4
"""Hostile clients at the same time, each with up to thousands of connections."""
GATE_USERS = 3
UNKNOWN = frozenset((401,))
"""Further statuses of a server that only answers its router, and of an operator: some attacks send
no key.
"""


class Assault:
    """Attacks on a world that has a gate. users: who know the right answers."""

    def __init__(self, world: World, users: Users, seed: int, ledger: Ledger) -> None:
        self._world = world
        self._users = users
        self._ledger = ledger
        self._drawn = random.Random(seed)
        self._deck: list[tuple[Callable[[Hostile], Awaitable[None]], Target]] = []
        sources = world.folder / "sources"
        self._archives = [*bombs(sources / "archives"), *folders(sources / "folders")]
        self._code = hostile_code(sources / "code")
        self._targets = [
            Target(
                it.name,
                it.port,
                it.own.rlimit(psutil.RLIMIT_NOFILE)[0],
                key=ADMIN if it in world.servers else "",
                answers=UNKNOWN if it in world.servers else frozenset(),
            )
            for it in (*world.servers, world.router)
        ]
        assert world.gate
        self._gate = world.gate
        self._targets.append(self._gate.target)
        self._answering = Program(sys.executable, "-m", watch.__module__, "answer", "{port}")
        self._bystander = Target("bystander", self._answering.port, 0)

    async def __aenter__(self) -> "Assault":
        self._answering.start()
        await until_async(self._answering.listens)
        if not await until(self._gate.well, 60):
            self._ledger.problems.append(f"the gate is not ready: {self._gate.last_line()}")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._answering.end()

    async def run(self, seconds: float) -> None:
        """Attack for this many seconds."""
        ends = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            meanwhile = [
                *(watch(it) for it in (*self._targets, self._bystander)),
                *self._gate.enemies(self._world.servers, self._world.listed),
                *(self._gate.ask(self._users.known, n) for n in range(GATE_USERS)),
            ]
            others = [tasks.create_task(it) for it in meanwhile]
            try:
                await asyncio.gather(*(self._attack(ends) for _ in range(ATTACKERS)))
            finally:
                for task in others:
                    task.cancel()

    def _next(self) -> tuple[Callable[[Hostile], Awaitable[None]], Target]:
        """Return the next attack and its target. All targets get all attacks before any gets one
        again, so that memory soon has its largest size.
        """
        if not self._deck:
            self._deck = [*itertools.product(ATTACKS, self._targets)]
            self._drawn.shuffle(self._deck)
        return self._deck.pop()

    async def _attack(self, ends: float) -> None:
        """Attack in a separate random order, until `ends` (monotonic)."""
        drawn = random.Random(self._drawn.random())
        while time.monotonic() < ends:
            attack, target = self._next()
            await attack(Hostile(target, drawn, self._ledger, self._archives, self._code))
            await asyncio.sleep(drawn.random() / 2)

    def text(self) -> str:
        """The answers of /ping as a table. Its faults are added to the ledger's problems."""
        text, problems = pings(self._targets, self._bystander)
        self._ledger.problems += problems
        return text
