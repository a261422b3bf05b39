# SPDX-License-Identifier: Apache-2.0
"""The faults of chaos, one after the other, and the time to recover."""

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence

import psutil

from tests.support.harness.process import Program
from tools.chaos.ledger import Fault, Ledger
from tools.chaos.parts import STOP_S, Server
from tools.chaos.traffic import CUT, ERRORS
from tools.chaos.world import World, say, until

HELD_S = 8.0
"""How long a fault lasts that does not end by itself."""
RECOVERY_S = 150.0
NOTICED_S = 3.0
"""After which a router knows that a server has ended."""


class Faults:
    """Faults of one world, in a random order."""

    def __init__(self, world: World, ledger: Ledger, seed: int) -> None:
        self.world = world
        self.ledger = ledger
        self.random = random.Random(seed)

    async def run(self, names: Sequence[str], minutes: float) -> None:
        """As many as there is time for, each of them before any comes again."""
        ended = time.monotonic() + 60 * minutes
        order: list[str] = []
        while time.monotonic() < ended:
            if not order:
                order = [*names]
                self.random.shuffle(order)
            name = order.pop()
            began = time.monotonic()
            await (OF_COPIES if self.world.copies else FAULTS)[name][0](self, name)
            took = self.ledger.faults[-1].recovered
            say(f"{name}: {'not recovered' if took is None else f'recovered in {took} s'}", began)
            await asyncio.sleep(2)
        done = {it.name.partition(" ")[0] for it in self.ledger.faults}
        if missing := [it for it in names if it not in done]:
            say(f"there was no time for: {', '.join(missing)}")

    async def _recovered(
        self, fault: Fault, holds: Callable[[], Awaitable[bool]], began: float
    ) -> None:
        if await until(holds, RECOVERY_S):
            fault.recovered = round(time.monotonic() - began, 1)
        else:
            self.ledger.problems.append(f"no recovery from: {fault.name}")
        fault.over = time.monotonic()

    async def engine(self, name: str) -> None:
        """Kill one of a server's engine processes. The server ends, and is started again."""
        server = self.random.choice(self.world.servers)
        victim = self.random.choice(server.children("VLLM::"))
        fault = self.ledger.fault(name, ERRORS, forgets=True)
        await self._ends(fault, server, 1, victim.kill)

    async def stopped(self, name: str) -> None:
        """Ask one server to stop, as a rolling update does."""
        server = self.random.choice(self.world.servers)
        fault = self.ledger.fault(name, forgets=True)
        await self._ends(fault, server, 0, lambda: server.kill(signal.SIGTERM))

    # copies of one container

    def _parts(self) -> tuple[list[psutil.Process], list[psutil.Process]]:
        """The container's router, if it is there, and its copies."""
        server = self.world.servers[0]
        routers: list[psutil.Process] = []
        copies: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for it in server.own.children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "serving.copies" in " ".join(it.cmdline()):
                        (routers if _listens(it, server.port) else copies).append(it)
        return routers, copies

    async def copy(self, name: str) -> None:
        """Kill a copy. The others serve, and it is started again."""
        victim = self.random.choice(self._parts()[1])
        fault = self.ledger.fault(name, ERRORS)
        victim.kill()
        await self._replaced(fault, victim)

    async def copy_engine(self, name: str) -> None:
        """Kill one of a copy's engine processes. The copy ends, and is started again."""
        copy = self.random.choice(self._parts()[1])
        engine = [it for it in copy.children(recursive=True) if "VLLM::" in " ".join(it.cmdline())]
        fault = self.ledger.fault(name, ERRORS)
        self.random.choice(engine).kill()
        await self._replaced(fault, copy)

    async def copy_hangs(self, name: str) -> None:
        victim = self.random.choice(self._parts()[1])
        fault = self.ledger.fault(name, ERRORS)
        victim.suspend()
        await asyncio.sleep(HELD_S)
        victim.resume()
        await self._recovered(fault, self.world.well, time.monotonic())

    async def own_router(self, name: str) -> None:
        """Kill the container's router: connections are cut, new ones wait."""
        ((router,), _) = self._parts()
        fault = self.ledger.fault(name, ERRORS | {CUT})
        router.kill()
        await self._replaced(fault, router)

    async def container(self, name: str) -> None:
        """Kill all of it, as a container is killed."""
        server = self.world.servers[0]
        fault = self.ledger.fault(name, ERRORS | {CUT}, forgets=True)
        await self._ends(fault, server, -signal.SIGKILL, lambda: Program.end(server))

    async def _replaced(self, fault: Fault, victim: psutil.Process) -> None:
        """Wait until a new process has replaced the victim, and all copies serve."""

        async def anew() -> bool:
            routers, copies = self._parts()
            there = victim not in (*routers, *copies) and len(copies) == self.world.copies
            return there and time.monotonic() > fault.began + NOTICED_S and await self.world.well()

        await self._recovered(fault, anew, fault.began)

    async def _ends(self, fault: Fault, server: Server, code: int, act: Callable[[], None]) -> None:
        """Have a server end with this exit code, and wait until it serves again."""
        process, server.exits = server.process, code
        act()

        async def ended() -> bool:
            return process.poll() is not None

        if not await until(ended, STOP_S):
            self.ledger.problems.append(f"{server.name} did not end within {STOP_S:.0f} s")

        async def anew() -> bool:
            serves = server.process is not process and await self.world.serves(server)
            return serves and await self.world.well()

        await self._recovered(fault, anew, fault.began)

    async def cache_server(self, name: str) -> None:
        await self._cache_server(name, psutil.Process.kill)

    async def cache_server_hangs(self, name: str) -> None:
        await self._cache_server(name, psutil.Process.suspend)

    async def _cache_server(self, name: str, act: Callable[[psutil.Process], None]) -> None:
        server = self.random.choice(self.world.servers)
        old = server.children("kv_cache.lmcache")
        fault = self.ledger.fault(name)
        for it in old:
            act(it)

        async def back() -> bool:
            found = server.children("kv_cache.lmcache")
            up = await self.world.metric(server, "slipway_kv_cache_server_up")
            return up == 1 and any(it not in old for it in found)

        await self._recovered(fault, back, fault.began)

    async def store_killed(self, name: str) -> None:
        fault = self.ledger.fault(name)
        server = self.world.store.server
        server.kill()
        await asyncio.sleep(HELD_S)
        server.start()
        await self._used_again(fault)

    async def store_hangs(self, name: str) -> None:
        await self._stands(name, self.world.store.server)

    async def store_lies(self, name: str) -> None:
        """Have tiered storage answer with other places. No load of it may then be believed."""
        fault = self.ledger.fault(name)
        server = self.world.store.server
        server.kill(signal.SIGUSR1)
        await asyncio.sleep(HELD_S)
        server.kill(signal.SIGUSR1)
        await self._used_again(fault)

    async def network_hangs(self, name: str) -> None:
        await self._stands(name, self.world.store.link)

    async def _stands(self, name: str, program: Program) -> None:
        fault = self.ledger.fault(name)
        program.kill(signal.SIGSTOP)
        await asyncio.sleep(HELD_S)
        program.kill(signal.SIGCONT)
        await self._used_again(fault)

    async def _used_again(self, fault: Fault) -> None:
        """Wait until caches are stored in the shared store again."""
        began = time.monotonic()
        before: int | None = None

        async def used() -> bool:
            nonlocal before
            now = await self.world.store.received()
            before = now if before is None else before
            return now - before > 1 << 20

        await self._recovered(fault, used, began)

    async def disk_full(self, name: str) -> None:
        server = self.random.choice(self.world.servers)
        disk, writers = server.disk, server.children("kv_cache.lmcache")
        kind = "ENOSPC" if disk.mounted else "writes limited"
        fault = self.ledger.fault(f"{name} ({kind})")
        disk.fill(writers)
        await asyncio.sleep(HELD_S)
        disk.free(writers)
        began, freed = time.monotonic(), time.time()

        async def stored() -> bool:
            return disk.newest() > freed

        await self._recovered(fault, stored, began)


def _listens(process: psutil.Process, port: int) -> bool:
    listening = psutil.CONN_LISTEN
    return any(it.status == listening and it.laddr.port == port for it in process.net_connections())


FAULTS: dict[str, tuple[Callable[[Faults, str], Awaitable[None]], str]] = {
    "engine": (Faults.engine, "an engine process is killed"),
    "stop": (Faults.stopped, "a server is asked to stop"),
    "cache-server": (Faults.cache_server, "the cache server is killed"),
    "cache-server-hangs": (Faults.cache_server_hangs, "the cache server hangs"),
    "store": (Faults.store_killed, "the shared store is killed"),
    "store-hangs": (Faults.store_hangs, "the shared store hangs"),
    "store-lies": (Faults.store_lies, "tiered storage answers with other places in memory"),
    "network": (Faults.network_hangs, "the network to the shared store hangs"),
    "disk": (Faults.disk_full, "the disk is full"),
}
OF_COPIES: dict[str, tuple[Callable[[Faults, str], Awaitable[None]], str]] = {
    "copy": (Faults.copy, "a copy is killed"),
    "copy-engine": (Faults.copy_engine, "an engine process of a copy is killed"),
    "copy-hangs": (Faults.copy_hangs, "a copy hangs"),
    "own-router": (Faults.own_router, "the container's router is killed"),
    "container": (Faults.container, "the whole container is killed"),
    **{name: it for name, it in FAULTS.items() if name not in ("engine", "stop")},
}
