# SPDX-License-Identifier: Apache-2.0
"""Health checks: replicas are asked again and again whether they can serve, and what."""

import asyncio
import contextlib
import logging
import random
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import NamedTuple

import aiohttp
import msgspec

from serving.access.access import Access
from serving.follow import count, kept
from serving.protocol import HEALTH, METRICS, MODELS, PING
from serving.router.fleet import facts
from serving.router.fleet.facts import Facts
from serving.router.fleet.replicas import Replica, ReplicaPool, State
from serving.router.http.questions import Questions, Told

log = logging.getLogger(__name__)

PING_S = 1.0
"""Between two probes of a replica, in a fleet of up to PROBES of them. A replica
that has answered a request in the meantime is asked after LISTED pauses at the latest.
"""
PROBES = 100
"""Probes in a second, of all replicas: each of a larger fleet is asked less often."""
PULSES = 10
"""Beginnings of probes in the time of PING_S: those that are due by then begin together, because a
router that wakes up pays more for that than for a probe.
"""
JITTER = 0.1
"""Pauses are longer or shorter by up to this share, so that probes do not come all at once."""
TOLD = 2.5
"""A report of the router's probing process about a replica is valid for this number of pauses."""
PING_TIMEOUT_S = 5.0
SILENT = 2
"""Pings without an answer, one after the other, after which a replica is down. A replica that
refuses connections is down at once.
"""
LISTED = 5
"""Pauses between two looks at a replica's models and adapters."""
SPEEDS_S = 30.0
"""Between two looks at how fast it computes prompts and loads from its tiers, and at its cache."""
LOOK_S = 0.2
"""Seconds between probes of replicas that are not ready, while requests find no ready one."""
LOOKING_S = 3.0
"""Maximum time that such a request waits for their answers."""

LARGEST = 2**20
"""Bytes of an answer that are read, but of /metrics ..."""
LARGEST_METRICS = 2**23
"""... which has series for each adapter."""
DETAIL = 500
"""Maximum characters kept of a replica's state."""

READINESS = (PING, HEALTH, MODELS)
"""Paths that report readiness. The router uses the first one that a server has: Slipway's and
SageMaker's, then the path of vLLM's Rust front end and most others, then a path of every server
with OpenAI's API.
"""
_ABSENT = frozenset((404, 405, 501))
"""Answers of servers that do not have a path."""


class Seen(msgspec.Struct, tag=4, array_like=True):
    """The report of the router's probing process about a replica. models: a hash of their names."""

    replica: str
    state: State
    detail: str
    called: str
    models: int


class Asking(NamedTuple):
    """How the router itself asks replicas."""

    access: Access
    """By which it may."""
    tls: ssl.SSLContext
    """Knows the authorities of encrypted ones."""

    def headers(self, replica: Replica, path: str) -> Mapping[str, str]:
        """By which it may ask a replica for this path."""
        return self.access.own_headers(replica.called, path)

    def session(self) -> aiohttp.ClientSession:
        """A client for as many replicas as there are."""
        timeout = aiohttp.ClientTimeout(total=PING_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0, ssl=self.tls)
        # A decompressed answer could be a thousand times as large as the received bytes.
        return aiohttp.ClientSession(
            timeout=timeout,
            connector=connector,
            auto_decompress=False,
            headers={"accept-encoding": "identity"},
        )

    def questions(self, replica: Replica) -> Questions:
        """The same for one replica that is asked often."""
        return Questions(replica.name, self.tls)


def pause(replicas: int) -> float:
    """Seconds between two probes of a replica in a fleet of this size."""
    return max(PING_S, replicas / PROBES)


async def read(answer: aiohttp.ClientResponse, most: int = LARGEST) -> bytes:
    """An answer's body. Raises ClientPayloadError if that has too many bytes."""
    body = bytearray()
    async for data in answer.content.iter_any():
        body += data
        if len(body) > most:
            answer.close()
            raise aiohttp.ClientPayloadError(f"its answer has more than {most:,} bytes")
    return bytes(body)


async def has_ended(asking: Asking, replica: Replica) -> bool:
    """Ask a replica whether it has stopped serving until its next start. One without /ping has not
    the words for it.
    """
    questions = asking.questions(replica)
    try:
        status, _, body = await questions.get(PING, {}, LARGEST, PING_TIMEOUT_S)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    finally:
        questions.close()
    state, _ = _read_ping(status, body)
    return status not in _ABSENT and state in (State.DRAINING, State.FAILED)


class HealthChecks:
    """Keeps a pool up to date with discovery and with the replicas' own facts."""

    def __init__(
        self,
        pool: ReplicaPool,
        asking: Asking,
        together: Callable[[], str] = str,
        tell: Callable[[Seen], None] = lambda seen: None,
    ) -> None:
        """together: the series of tiers that all replicas have together. tell: tells the router's
        other processes, if this is the one that probes.
        """
        self._pool = pool
        self._asking = asking
        self._together = together
        self._tell = tell
        self._probes: dict[str, Probe] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # looks at those that are not ready
        self._looks: set[asyncio.Task[None]] = set()
        self._next_look: asyncio.Task[None] | None = None  # the one that has not begun
        self._looked_at = 0.0  # when the last one has

    async def run(self, sets: Callable[[], AsyncGenerator[frozenset[str]]]) -> None:
        """Check until cancelled. sets: yields the replicas' URLs, each time they change."""

        async def follow() -> None:
            async with aclosing(sets()) as found:
                async for urls in found:
                    self._update(urls)

        try:
            await kept("replicas", follow)
            await asyncio.Event().wait()
        finally:
            tasks = [*self._tasks.values(), *self._looks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for probe in self._probes.values():
                probe.close()
            self._tasks.clear()
            self._probes.clear()

    async def look(self) -> None:
        """Find out which replicas can serve by now: probe those that could not.

        Another process of the router, or the starter of a replica, may have seen earlier that it is
        ready.
        """
        if not self._next_look or self._next_look.done():
            self._next_look = asyncio.create_task(self._look())
            self._looks.add(self._next_look)
            self._next_look.add_done_callback(self._looks.discard)
        await asyncio.wait([self._next_look])

    async def _look(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOKING_S):
                await self._pool.probed.wait()
                await asyncio.sleep(self._looked_at + LOOK_S - time.monotonic())
                self._next_look, self._looked_at = None, time.monotonic()
                ready = {it.name for it in self._pool.ready}
                late = [probe for name, probe in self._probes.items() if name not in ready]
                await asyncio.gather(*(it.check() for it in late))

    def expire_models(self, replicas: Iterable[Replica]) -> None:
        """The models of these replicas may have changed: look at once."""
        for replica in replicas:
            if probe := self._probes.get(replica.name):
                probe.expire_models()

    def on_seen(self, seen: Seen) -> None:
        """Another process of the router has probed a replica."""
        if probe := self._probes.get(seen.replica):
            probe.on_seen(seen)

    def _update(self, urls: frozenset[str]) -> None:
        for url in self._tasks.keys() - urls:
            self._tasks.pop(url).cancel()
            self._probes.pop(url).close()
        self._pool.update(urls)
        for replica in self._pool.replicas:
            if replica.name not in self._tasks:
                probe = self._probes[replica.name] = Probe(
                    *(self._pool, replica, self._asking, self._together, self._tell)
                )
                self._tasks[replica.name] = asyncio.create_task(kept("health", probe.run))


class Probe:
    """The health check of one replica."""

    def __init__(
        self,
        pool: ReplicaPool,
        replica: Replica,
        asking: Asking,
        together: Callable[[], str],
        tell: Callable[[Seen], None],
    ) -> None:
        self._asking = asking
        self._together = together
        self._tell = tell
        self._pool = pool
        self._replica = replica
        self._questions = asking.questions(replica)
        self._silent = 0  # pings in a row that had no answer
        self._path: str | None = None  # the one of READINESS that it has, while it answers
        self._models_at = 0.0  # when its models were asked for
        self._speeds_at = 0.0
        self._checked_at = self._told_at = 0.0  # by this process, and by the one that probes
        self._hurries = False
        self._pause: asyncio.Future[None] | None = None
        self._checking = asyncio.Lock()

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            seconds = pause(len(self._pool.replicas))
            if self._hurries or self._is_due(time.monotonic(), seconds):
                self._hurries = False
                await self.check()
                self._tell(self._seen())
            if not self._hurries:
                await self._rest(seconds * random.uniform(1 - JITTER, 1 + JITTER))

    async def _rest(self, seconds: float) -> None:
        """Wait until the pulse nearest to that time, or until a check is urgent."""
        loop = asyncio.get_running_loop()
        self._pause = loop.create_future()
        pulse = PING_S / PULSES
        timer = loop.call_at(round((loop.time() + seconds) / pulse) * pulse, self._go_on)
        try:
            await self._pause
        finally:
            timer.cancel()

    def _go_on(self) -> None:
        if self._pause and not self._pause.done():
            self._pause.set_result(None)

    def close(self) -> None:
        """Close its connection."""
        self._questions.close()

    def _is_due(self, now: float, seconds: float) -> bool:
        """Whether the replica must be asked. seconds: of a pause."""
        replica = self._replica
        if now - self._told_at < TOLD * seconds:
            return replica.state is State.READY and now - self._speeds_at > SPEEDS_S
        answers = replica.state is State.READY and now - replica.answered_at < PING_S
        return not (answers and now - self._checked_at < LISTED * seconds)

    def on_seen(self, seen: Seen) -> None:
        """The router's process that probes has seen this of the replica."""
        if seen == self._seen():
            self._told_at = time.monotonic()
            self._pool.enter(self._replica, seen.state, seen.detail, anew=False)
        else:  # each process finds out the consequences of a change itself
            self.expire_models()

    def _seen(self) -> Seen:
        """The state of the replica. All processes of a router hash equally."""
        replica = self._replica
        models = hash((replica.model, replica.models, replica.adapters))
        return Seen(replica.name, replica.state, replica.detail, replica.called, models)

    async def check(self) -> None:
        """Probe the replica's state. With every answer, the probe is repeated."""
        replica = self._replica
        async with self._checking:
            self._checked_at = time.monotonic()
            try:
                await self._check()
            except Exception as error:
                detail = f"looking at it failed: {error}"
                if replica.detail != detail:
                    log.exception("%s: looking at it failed", replica.name)
                count("health")
                self._pool.enter(replica, State.FAILED, detail, anew=False)

    def expire_models(self) -> None:
        """Its models may have changed: look at once."""
        self._models_at = self._told_at = 0.0
        self._hurries = True
        self._go_on()

    async def _check(self) -> None:
        replica = self._replica
        state, detail = await self._ping()
        anew = False
        try:
            if state is State.READY and not self._silent:
                if replica.state is not State.READY:
                    anew = await self._meet()
                else:
                    await self._look_again(time.monotonic())
        except OSError:
            state, detail = replica.state, "it does not answer"
        self._pool.enter(replica, state, detail, anew=anew)

    async def _look_again(self, now: float) -> None:
        """Read the models and facts of a ready replica again, when they are due."""
        told = now - self._told_at < TOLD * (seconds := pause(len(self._pool.replicas)))
        if now - self._models_at > LISTED * seconds and not told:
            await self._list_models()
        if now - self._speeds_at > SPEEDS_S:
            self._replica.measure(await self._facts())

    async def _ping(self) -> tuple[State, str]:
        """Its state, from the first path that it has."""
        try:
            for path in (self._path,) if self._path else READINESS:
                status, answer = await self._ask(path)
                if status not in _ABSENT:
                    break
        except OSError as error:
            self._path = None
            self._silent += 1
            lost = self._silent >= SILENT or not isinstance(error, TimeoutError)
            state = State.DOWN if lost else self._replica.state
            return state, str(error) or "it does not answer"
        self._silent = 0
        if status not in _ABSENT:
            self._path = path
            return _read_ping(status, answer, path)
        if self._path:  # another server may have its address by now
            self._path = None
            return await self._ping()
        return State.FAILED, f"it has neither {' nor '.join(READINESS)}"

    async def _ask(self, path: str) -> tuple[int, bytes]:
        """Ask whether it can serve."""
        headers: Mapping[str, str]
        if path == PING:
            headers = self._asking.access.challenge()
        else:
            self._pool.call(self._replica, "")
            headers = self._asking.headers(self._replica, path) if path == MODELS else {}
        status, lines, answer = await self._told(path, headers)
        if path == PING:  # again with each answer: another server may have its address by now
            self._pool.call(self._replica, self._asking.access.name_of(headers, lines))
        return status, answer

    async def _meet(self) -> bool:
        """Read the facts of a replica that has become ready. Whether it has restarted."""
        anew = self._replica.meet(await self._facts())
        await self._list_models()
        return anew

    async def _facts(self) -> Facts:
        self._speeds_at = time.monotonic()
        _, answer = await self._get(METRICS)
        return facts.read(answer, self._together().encode())

    async def _list_models(self) -> None:
        self._models_at = time.monotonic()
        status, answer = await self._get(MODELS)
        if status != 200:
            return
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            models = _read_models(answer).data
            names = [model.id for model in models]
            adapters = frozenset(model.id for model in models if model.parent)
            self._pool.list_models(self._replica, names, adapters)

    async def _get(self, path: str) -> tuple[int, bytes]:
        status, _, answer = await self._told(path, self._asking.headers(self._replica, path))
        return status, answer

    async def _told(self, path: str, headers: Mapping[str, str]) -> Told:
        most = LARGEST_METRICS if path == METRICS else LARGEST
        return await self._questions.get(path, headers, most, PING_TIMEOUT_S)


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_read_models = msgspec.json.Decoder(_Models).decode


class _Ping(msgspec.Struct):
    status: str = ""
    detail: str = ""


def _read_ping(status: int, answer: bytes, path: str = PING) -> tuple[State, str]:
    """A server's state and its detail, by the answer of a path of READINESS. Servers other than
    Slipway report only a status code.
    """
    try:
        ping = msgspec.json.decode(answer, type=_Ping)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        ping = _Ping()
    detail = ping.detail[:DETAIL]
    if 200 <= status < 300:
        return State.READY, detail
    if ping.status in ("draining", "stopped"):
        return State.DRAINING, detail
    if ping.status == "starting":
        return State.STARTING, detail
    if path == MODELS and status in (401, 403):
        detail = f"{path} answered {status}; OPTION_ROUTER_REPLICA_KEY is for servers' keys"
    return State.FAILED, detail or f"{path} answered {status}"
