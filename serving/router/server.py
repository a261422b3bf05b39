"""`route`: one port in front of several servers."""

import asyncio
import ctypes
import logging
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import aiohttp
import uvloop
from prometheus_client.multiprocess import mark_process_dead

from lmi_config.options import Settings
from serving import errors, logs
from serving.errors import MethodNotAllowed, NotFound, NotReady, ReplicaFailed, ServingError
from serving.last_words import Ending
from serving.lifecycle import DIED, DRAIN_S, START_FAILED
from serving.router import page
from serving.router.asked import reader
from serving.router.client import Client
from serving.router.discovery import discovered
from serving.router.exchange import Exchange, RetryBudget
from serving.router.kv_index import KvIndex
from serving.router.kvaware import KvAwareness
from serving.router.metrics import Tally
from serving.router.policies import Asked, KvAware, Policy, PrefixAware, RoundRobin, Session
from serving.router.prefix_index import PrefixIndex
from serving.router.replicas import Fleet, Replica, State
from serving.router.request import REQUEST_ID, Request
from serving.router.sessions import Sessions
from serving.router.siblings import Link, Siblings

log = logging.getLogger(__name__)

FAREWELL_S = 1.0
SWEEP_S = 1.0
CLIENT_IDLE_S = 75.0
AGAIN_S = 1.0  # before a process that has died is started again


class Limits(NamedTuple):
    """Seconds that a replica may take to begin its answer, and between two pieces of it."""

    first_byte: int
    idle: int


def route(settings: Settings, environ: Mapping[str, str]) -> Ending:
    """Route until SIGTERM or SIGINT, or until something has failed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # two for each request
    try:
        listener = _listener(settings.port)
    except OSError as error:
        reason = f"cannot listen on port {settings.port}: {error.strerror}"
        return Ending(START_FAILED, "start", reason)
    with listener:
        if settings.router_processes == 1:
            code = uvloop.run(Router(settings, environ).run(listener))
        else:
            code = _several(settings, environ, listener.getsockname()[1])
    return Ending(code, "routing", f"a router process ended with exit code {code}" if code else "")


def _several(settings: Settings, environ: Mapping[str, str], port: int) -> int:
    """Route in several processes, each of which listens on the port for itself."""
    forked = multiprocessing.get_context("fork")
    link = Link(settings.router_processes)
    parent = os.getpid()
    processes: dict[int, Any] = {}
    stopping = False

    def work(number: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the parent's, until it has its own
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent passes it on
        _die_with(parent)
        with _listener(port) as listener:
            router = Router(settings, environ, link.of(number))
            sys.exit(uvloop.run(router.run(listener)))

    def start(number: int) -> None:
        process = forked.Process(target=work, args=(number,))
        process.start()
        processes[number] = process
        if stopping:  # it was asked for in the meantime
            process.terminate()

    def on_signal(number: int, frame: object) -> None:
        nonlocal stopping
        stopping = True
        for process in processes.values():
            process.terminate()

    for it in (signal.SIGTERM, signal.SIGINT):
        signal.signal(it, on_signal)
    for number in range(settings.router_processes):
        start(number)
    code = 0
    while processes:
        multiprocessing.connection.wait([it.sentinel for it in processes.values()])
        for number, process in [*processes.items()]:
            if process.exitcode is None:
                continue
            del processes[number]
            mark_process_dead(process.pid)  # type: ignore[no-untyped-call]
            if stopping:
                code = max(code, process.exitcode)
                continue
            log.error("a process died, and is started again: exit code %d", process.exitcode)
            time.sleep(AGAIN_S)
            if not stopping:
                start(number)
    return code


def _die_with(parent: int) -> None:
    """End, as asked to, when the parent has ended."""
    pr_set_pdeathsig = 1  # prctl(2)
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(DIED)


def _listener(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("0.0.0.0", port))
    return listener


class Router:
    """One process's router.

    buffered: bytes of request bodies that are held.
    """

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        link: tuple[socket.socket, list[socket.socket]] | None = None,
    ) -> None:
        self._settings = settings
        self.max_request_size = settings.max_request_size
        self.limits = Limits(settings.router_first_byte_timeout, settings.router_idle_timeout)
        self.clients: set[Client] = set()
        self.exchanges: set[Exchange] = set()
        self.buffered = 0
        self.budget = RetryBudget()
        self.tally = Tally()
        self.sessions = Sessions()
        self.fleet = Fleet(self._came, self._went)
        self.read = reader(
            settings.routing_strategy,
            settings.session_key,
            settings.cache_salt_header,
            self.fleet.adapters,
        )
        self.kvaware: KvAwareness | None = None
        self.policy = self._policy(environ)
        self.others = RoundRobin()
        self.siblings = Siblings(
            lambda: self.fleet.replicas, self._learned, self.sessions.bind, link
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self.draining = False
        self._asked, self._hurried = asyncio.Event(), asyncio.Event()
        self._idle = asyncio.Event()

    def _policy(self, environ: Mapping[str, str]) -> Policy:
        match self._settings.routing_strategy:
            case "roundrobin":
                return RoundRobin()
            case "session":
                return Session()
            case "kvaware":
                index = KvIndex()
                self.kvaware = KvAwareness(index, self._settings, environ)
                return KvAware(PrefixIndex(), index)
        return PrefixAware(PrefixIndex())

    # its life

    async def run(self, listener: socket.socket) -> int:
        """From listening to the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGUSR1, logs.shift_level, -1)
        loop.add_signal_handler(signal.SIGUSR2, logs.shift_level, 1)
        server = await loop.create_server(lambda: Client(self), sock=listener, backlog=2048)
        port = listener.getsockname()[1]
        strategy = self._settings.routing_strategy
        log.info("routing", extra={"facts": {"port": port, "strategy": strategy}})
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self.fleet.run(discovered(self._settings.router_replicas or ""))),
            asyncio.create_task(self.siblings.run()),
            asyncio.create_task(self._sweep()),
        ]
        if self.kvaware:
            tasks.append(asyncio.create_task(self.kvaware.run()))
        stop = asyncio.create_task(self._asked.wait())
        await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
        code = 0
        for task in tasks:
            if task.done():
                log.error("the router's own work failed", exc_info=task.exception())
                code = DIED
        log.info("draining")
        self.draining = True
        self.finished()
        ends = [asyncio.create_task(it.wait()) for it in (self._hurried, self._idle)]
        await asyncio.wait(ends, timeout=DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
        server.close()
        for client in [*self.clients]:
            client.transport.close()  # once what was written is sent
        ended = time.monotonic() + FAREWELL_S
        while self.clients and time.monotonic() < ended:
            await asyncio.sleep(0.05)
        left = [*tasks, stop, *ends, *self._tasks]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        return code

    def stop(self) -> None:
        """Stop; when it is called again, without waiting for requests."""
        (self._hurried if self._asked.is_set() else self._asked).set()

    def finished(self) -> None:
        """A request is over."""
        if self.draining and not self.exchanges and not self._tasks:
            self._idle.set()

    async def _sweep(self) -> None:
        """Look for what has waited too long: cheaper than a timer for each."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.tally.flush()
            now = time.monotonic()
            for exchange in [*self.exchanges]:
                exchange.overdue(now)
            for client in [*self.clients]:
                client.overdue(now, CLIENT_IDLE_S)

    def _came(self, replica: Replica, anew: bool) -> None:
        if anew:
            self.policy.forget(replica.name)
        if isinstance(self.policy, PrefixAware) and replica.tokens:
            self.policy.index.resize(replica.name, replica.tokens)
        if self.kvaware:
            self.kvaware.came(replica)

    def _went(self, replica: Replica) -> None:
        if self.kvaware:
            self.kvaware.went(replica)
        if replica not in self.fleet.replicas:
            self.policy.forget(replica.name)
            return
        for exchange in [it for it in self.exchanges if it.replica is replica]:
            exchange.abandon()

    def _learned(self, asked: Asked, replica: str) -> None:
        self.policy.learn(asked, replica, time.monotonic())

    # requests that no single replica answers

    def answer(self, client: Client, request: Request) -> None:
        """Answer what is not passed on to a replica. Raises ServingError."""
        reads = request.method in (b"GET", b"HEAD")
        match request.path:
            case "/ping" if reads:
                ready = any(it.state is State.READY for it in self.fleet.replicas)
                status = 200 if ready and not self.draining else 503
                client.whole(status, *page.ping(self.fleet, self.draining))
            case "/metrics" if reads:
                self.tally.flush()
                client.whole(200, *page.metrics())
            case "/replicas" if reads:
                client.whole(
                    200, *page.replicas(self.fleet, self.kvaware, request.named.get(b"accept", b""))
                )
            case "/ping" | "/metrics" | "/replicas":
                raise MethodNotAllowed(request.path, request.method.decode(), ["GET", "HEAD"])
            case _ if request.for_all:
                task = asyncio.create_task(self._to_all(client, request))
                self._tasks.add(task)
                task.add_done_callback(self._told_all)
            case path if request.allowed:
                raise MethodNotAllowed(path, request.method.decode(), request.allowed)
            case path:
                raise NotFound(f"there is nothing at {path}")

    def _told_all(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.finished()

    async def _to_all(self, client: Client, request: Request) -> None:
        """Have all replicas answer, and pass on the answer that is worst."""
        try:
            ready = [it for it in self.fleet.replicas if it.state is State.READY]
            if not ready:
                raise NotReady(self.fleet.trouble())
            answers = await asyncio.gather(*(self._told(it, request) for it in ready))
            for replica in ready:
                replica.looked = 0.0  # its adapters are others now
            counted = [it for it in answers if it]
            if not counted:
                raise NotReady("the replicas ended before they took the change")
            client.whole(*max(counted, key=lambda answer: answer[0]))
        except ServingError as error:
            client.fail(error)
        except Exception:
            client.fail(errors.unforeseen())

    async def _told(
        self, replica: Replica, request: Request
    ) -> tuple[int, bytes, bytes, *tuple[bytes, ...]] | None:
        """A replica's answer, as Client.whole() takes it; None where it serves no more.

        Such a one does not count: when it starts anew, it has none of the adapters that it was told
        of before.
        """
        passed = (b"content-type", b"x-amzn-sagemaker-adapter-alias", REQUEST_ID)
        try:
            async with self.fleet.session.request(
                request.method.decode(),
                replica.name + request.target.decode("latin-1"),
                data=bytes(request.body),
                headers={
                    name.decode(): value.decode("latin-1")
                    for name, value in request.headers
                    if name in passed
                },
                timeout=aiohttp.ClientTimeout(total=self.limits.first_byte),
            ) as answer:
                kind = answer.headers.get("content-type", "application/json")
                later = answer.headers.get("retry-after")
                more = (f"retry-after: {later}".encode(),) if later else ()
                found = answer.status, kind.encode(), await answer.read(), *more
            return None if found[0] == 503 and await self.fleet.ended(replica) else found
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if await self.fleet.ended(replica):
                return None
            raise ReplicaFailed(f"a replica did not take the change: {error}") from None
