# SPDX-License-Identifier: Apache-2.0
"""The world of chaos: two servers or more, the store that they share, and the router."""

import asyncio
import contextlib
import json
import os
import random
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path

import aiohttp
import psutil

from serving.router.policy.prefix_index import DEFAULT_SHARED_TOKENS
from tests.support.harness import metrics, ports
from tests.support.harness.process import START_S, Program
from tests.support.harness.wait import until_async
from tests.support.models.tiny import VOCABULARY
from tools.chaos.hostile.gate import Gate
from tools.chaos.ledger import Ledger, Sample
from tools.chaos.parts import Disk, Kept, Server, Store, model
from tools.chaos.traffic import Client

CHUNK = 32  # tokens
"""The fewest of vLLM on a CPU, so that a cache server soon keeps all chunks that it can."""
LMCACHE = """
chunk_size: {chunk}
max_local_cpu_size: 0.1
local_disk: {disk}
max_local_disk_size: {gib}
extra_config: {{use_odirect: true}}
"""
FILLING = 512  # tokens
"""The length of prompts that fill the tiers. Longer ones would be slower, by their attention."""
EVENTS_OF = 65_536
"""Chunks whose tokens LMCache's server keeps at most, for its events."""
UNFORESEEN = "a request failed unexpectedly"  # as serving/errors.py logs it
NO_PREFIX_CACHE = {"OPTION_ENABLE_PREFIX_CACHING": "false"}  # so that hits come from the tiers
ADMIN = "the-operators"
OPERATOR = {"authorization": f"Bearer {ADMIN}"}
PREFILL_TOKENS = "500"  # fewer than long and fresh prompts have
PROCESSES = {  # of a server, and what their command lines have
    "cache server": "kv_cache.lmcache",
    "engine core": "VLLM::EngineCore",
    "engine worker": "VLLM::Worker",
}


class World:
    """All programs. store: the kind of the shared one. prefill: whether the first server computes
    long prompts for the others. hostile: whether clients attack them. copies: of the model, in a
    single server with its router; 0 for several servers behind a router.
    """

    def __init__(
        self,
        *,
        servers: int,
        copies: int,
        store: str,
        prefill: bool,
        hostile: bool,
        folder: Path,
        ledger: Ledger,
        closing: contextlib.ExitStack,
    ) -> None:
        self.folder = folder
        self._ledger = ledger
        self._closing = closing
        self._hostile = hostile
        self._prefill = prefill
        self.copies = copies
        self._secret = {"OPTION_ROUTER_SECRET": secrets.token_hex()} if prefill or hostile else {}
        self.store = Store(folder, store)
        path = model(folder)
        self.servers = [self._server(n, path) for n in range(1 if copies else servers)]
        environ = {
            "OPTION_ROUTER_REPLICAS": ",".join(it.url for it in self.servers),
            "OPTION_MODEL_ID": str(path),
            "OPTION_ROUTER_CONTINUE_STREAMS": "true",
            "OPTION_ROUTER_PREFILL_TOKENS": PREFILL_TOKENS,
            **self._secret,
        }
        if hostile:
            environ["OPTION_ROUTING_STRATEGY"] = "kvaware"
        self.router: Kept = self.servers[0]
        if not copies:
            self.router = Kept("router", ["./entrypoint.sh", "route"], environ, folder, ledger)
        self.listed = folder / "listed"
        self.listed.mkdir()
        urls = [it.url for it in self.servers]
        self.gate = Gate(folder, urls, path, self._secret, ledger) if hostile else None
        self.aside = Client(self.router.url, Ledger())  # not part of the traffic

    def _attacked(self) -> dict[str, str]:
        """KV events, so that the router reads prompts, which clients may have made to harm it, and
        a list of adapters.
        """
        return {
            "OPTION_KV_EVENTS": "true",
            "OPTION_KV_EVENTS_PORT": str(ports.free(2)),
            "OPTION_ADAPTER_LIST": str(self.folder / "listed"),
            "OPTION_FORMATTER_TIMEOUT": "5",
        }

    def _role(self, n: int) -> dict[str, str]:
        """The first one computes long prompts for the others, at the router's word alone."""
        role = "decode" if n else "prefill"
        return {"OPTION_SERVER_ROLE": role}

    def _server(self, n: int, path: Path) -> Server:
        disk = Disk(self.folder / f"disk-{n + 1}")
        self._closing.callback(disk.close)
        tiers = self.folder / f"lmcache-{n + 1}.yaml"
        gib = 0.3 / (self.copies or 1)
        tiers.write_text(LMCACHE.format(chunk=CHUNK, disk=disk.folder, gib=gib))
        environ = {
            "OPTION_MODEL_ID": str(path),
            "OPTION_DTYPE": "float32",
            "OPTION_MAX_MODEL_LEN": "4096",
            "OPTION_BLOCK_SIZE": str(CHUNK),
            "OPTION_KV_CACHE_MEMORY_BYTES": "256M",
            **(self._attacked() if self._hostile else NO_PREFIX_CACHE),
            "OPTION_ENABLE_LORA": "true",
            "OPTION_MAX_LORAS": "4",
            "OPTION_ADAPTER_ROOTS": str(self.folder / "sources"),
            "OPTION_ADAPTER_DISK": "200M",
            "OPTION_LMCACHE_CONFIG_FILE": str(tiers),
            "OPTION_KV_L2_URL": self.store.url,
            "OPTION_SESSIONS_PATH": str(self.folder / "sessions"),
            **(self._role(n) if self._prefill else {}),
            **({"OPTION_ADMIN_API_KEY": ADMIN, **self._secret} if self._secret else {}),
            **(self._several() if self.copies else _on_a_cpu(n)),
        }
        return Server(f"server {n + 1}", environ, self.folder, self._ledger, disk)

    def _several(self) -> dict[str, str]:
        return {"OPTION_COPIES": str(self.copies), "OPTION_ROUTER_CONTINUE_STREAMS": "true"}

    @property
    def programs(self) -> list[Kept]:
        """Without repetition: the router may be the server's own."""
        found = [*self.servers, self.router, *([self.gate] if self.gate else [])]
        return [*dict.fromkeys(found)]

    # its life

    async def start(self) -> None:
        """Start all programs. Exits if they do not get ready."""
        began = time.monotonic()
        parts: list[Store | Kept] = [self.store, *self.programs]
        for it in parts:
            it.start()
            self._closing.callback(it.end)

        async def settled() -> bool:
            return any(it.process.poll() is not None for it in self.programs) or await self.well()

        if not await until(settled, START_S) or not await until(self.well, 1):
            lines = [f"{it.name}: {it.last_line()}" for it in self.programs]
            sys.exit("they did not get ready\n" + "\n".join(lines))
        what = f"{self.copies} copies" if self.copies else f"{len(self.servers)} servers"
        say(f"{what} and the router are ready", began)

    async def fill(self) -> None:
        """Have as many chunks stored as the cache servers keep anything of, in memory, on disk or
        for events, and fill the router's index of prefixes, so that later growth is a leak.
        """
        began, drawn = time.monotonic(), random.Random(0)
        tokens = max(len(self.servers) * EVENTS_OF * CHUNK, DEFAULT_SHARED_TOKENS)
        left = iter(range(tokens // FILLING))

        async def ask() -> None:
            for _ in left:
                prompt = drawn.choices(range(3, VOCABULARY), k=FILLING + 1)
                body = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
                kind = {"content-type": "application/json"}
                found = await self.aside.send("POST", "/v1/completions", body, kind)
                if found.status != HTTPStatus.OK:
                    sys.exit(f"chunks are not stored: {found.failure or found.body!r}")

        await asyncio.gather(*(ask() for _ in range(16)))
        say("the cache servers and the router's index are full", began)

    def look_into_logs(self) -> None:
        for it in self.programs:
            if count := it.logged().count(UNFORESEEN):
                self._ledger.problems.append(f"{it.name} logged {count} unforeseen exceptions")

    # looking

    async def well(self) -> bool:
        """Whether the router has all servers."""
        found = await self.aside.send("GET", "/replicas")
        rows = json.loads(found.body)["replicas"]
        return len(rows) == (self.copies or len(self.servers)) and all(
            it["state"] == "ready" for it in rows
        )

    async def serves(self, server: Program) -> bool:
        async with aiohttp.ClientSession(server.url) as session, session.get("/ping") as answer:
            return answer.status == 200

    async def metric(self, server: Program, name: str) -> float:
        """The sum over a series of a server's."""
        return metrics.total(await self._metrics(server), name)

    async def prefills(self) -> dict[str, int]:
        """How often a server was asked for a prompt of another, by how that ended."""
        found = metrics.samples(await self._metrics(self.router), "slipway_router_prefills_total")
        return {it.labels["end"]: int(it.value) for it in found}

    async def _metrics(self, server: Program) -> str:
        async with (
            aiohttp.ClientSession(server.url, headers=OPERATOR) as session,
            session.get("/metrics") as answer,
        ):
            return await answer.text()

    async def idle(self) -> bool:
        """Whether no request is in flight anywhere."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        left = [await self.metric(it, name) for it in self.servers for name in names]
        found = await self.aside.send("GET", "/replicas")
        rows = json.loads(found.body)["replicas"]
        return not sum(left) and not sum(it["requests_under_way"] for it in rows)

    def samples(self) -> dict[str, Sample]:
        """Each process's sample; helper processes are left out."""
        found = {}
        tasks = {it.name: it.tasks() for it in self.programs}
        for it in self.programs:
            processes = {it.name: it.own}
            for kind, command in PROCESSES.items():
                for child in it.children(command):
                    processes[f"{kind} of {it.name}"] = child
            for name, process in processes.items():
                with contextlib.suppress(psutil.NoSuchProcess):
                    memory = process.memory_info()
                    own = (memory.rss - memory.shared) / (1 << 20)
                    found[name] = Sample(own, process.num_fds(), tasks.get(name, 0))
        return found


def _on_a_cpu(n: int) -> dict[str, str]:
    """Each server its own: on shared ones the engines' threads wait for each other."""
    return {"VLLM_CPU_OMP_THREADS_BIND": str(n % (os.cpu_count() or 1))}


async def until(holds: Callable[[], Awaitable[bool]], seconds: float) -> bool:
    """Whether the condition holds within this many seconds. A condition that cannot be checked does
    not hold.
    """

    async def holds_now() -> bool:
        with contextlib.suppress(OSError, aiohttp.ClientError, TimeoutError, ValueError):
            return await holds()
        return False

    with contextlib.suppress(TimeoutError):
        await until_async(holds_now, seconds, every=0.1)
        return True
    return False


def say(text: str, began: float | None = None) -> None:
    took = "" if began is None else f" ({time.monotonic() - began:.0f} s)"
    print(f"{time.strftime('%H:%M:%S', time.gmtime())} {text}{took}", flush=True)
