"""The replicas: which there are, whether they can serve, and what they serve."""

import asyncio
import contextlib
import enum
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from urllib.parse import urlsplit

import aiohttp
import msgspec

from serving.router import metrics
from serving.router.policies import Load, Share
from serving.router.upstream import Upstream

log = logging.getLogger(__name__)

PING_S = 1.0
"""Between two looks at a replica."""
PING_TIMEOUT_S = 5.0
SILENT = 2
"""Pings without an answer, one after the other, after which a replica is down. One that refuses
connections is down at once.
"""
MODELS_S = 5.0
"""Between two looks at a replica's models and adapters."""
IDLE_S = 60.0
"""An idle connection is kept for so long; servers drop theirs after 75 s, or earlier."""


class State(enum.StrEnum):
    """What a replica's /ping says, or that it says nothing."""

    UNKNOWN = "unknown"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    DOWN = "down"


class Breaker:
    """Keeps requests from a replica that cannot be reached, or whose answers are mostly errors.

    Slow answers are no reason. A replica that says it is busy (503, 429) is none either: such
    requests go elsewhere one by one.
    """

    UNREACHABLE = 3  # in a row
    WINDOW_S = 10.0
    ANSWERS = 20  # in a window, before their share of errors says anything
    ERRORS = 0.5
    FIRST_S, LONGEST_S = 1.0, 30.0

    def __init__(self) -> None:
        self.until = 0.0
        self._wait = self.FIRST_S
        self._unreachable = 0
        self._since = 0.0
        self._answers = self._errors = 0

    def open(self, now: float) -> bool:
        return now < self.until

    def unreachable(self, now: float) -> None:
        """It took no connection, or broke one off before it had answered."""
        self._unreachable += 1
        if self._unreachable >= self.UNREACHABLE and not self.open(now):
            self._open(now)

    def answered(self, status: int, now: float) -> None:
        self._unreachable = 0
        if now - self._since > self.WINDOW_S:
            self._since, self._answers, self._errors = now, 0, 0
        self._answers += 1
        if status >= 500 and status != 503:
            self._errors += 1
            enough = self._answers >= self.ANSWERS
            if enough and self._errors > self.ERRORS * self._answers and not self.open(now):
                self._open(now)
        else:
            self._wait = self.FIRST_S

    def _open(self, now: float) -> None:
        self.until = now + self._wait
        self._wait = min(self._wait * 2, self.LONGEST_S)
        self._since = 0.0


class Replica(Load):
    """One server. others: what of its load is other router processes'.

    idle: connections that wait for a request. models: what may be asked for by name; empty where it
    does not tell. tokens: what its KV cache holds, where it tells.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.port = parts.port or 80
        self.authority = parts.netloc.encode()
        self.others: Share = (0, 0, 0)
        self.idle: list[Upstream] = []
        self.breaker = Breaker()
        self.state = State.UNKNOWN
        self.detail = ""
        self.models: frozenset[str] = frozenset()
        self.adapters: frozenset[str] = frozenset()
        self.tokens: int | None = None
        self.born: bytes | None = None  # when its process started, as it tells
        self.looked = 0.0  # when its models were asked for

    @property
    def own(self) -> Share:
        """What of its load is this process's."""
        in_flight, queued, context = self.others
        return self.in_flight - in_flight, self.queued - queued, self.context - context

    def add_others(self, others: Share) -> None:
        """Other processes have this under way there now."""
        own, self.others = self.own, others
        self.in_flight, self.queued, self.context = map(sum, zip(own, others, strict=True))

    def close(self) -> None:
        for upstream in [*self.idle]:
            upstream.drop()


class Fleet:
    """All replicas.

    adapters: the names of adapters that any of them has. session: to talk with them aside. known:
    set once each of the first ones has said whether it can serve.
    """

    session: aiohttp.ClientSession

    def __init__(
        self,
        came: Callable[[Replica, bool], None],
        went: Callable[[Replica], None],
    ) -> None:
        """came: a replica is ready now; whether it has started anew. went: it is down or gone."""
        self.replicas: list[Replica] = []
        self.adapters: set[str] = set()
        self.known = asyncio.Event()
        self._came = came
        self._went = went
        self._watching: dict[str, asyncio.Task[None]] = {}

    def able(self, adapter: str, tried: Sequence[Replica], now: float) -> list[Replica]:
        """The replicas that a request can go to, without those it was tried on."""
        ready = [it for it in self.replicas if it.state is State.READY]
        if adapter and (having := [it for it in ready if adapter in it.adapters]):
            ready = having  # the others would only say that they do not have it
        left = [it for it in ready if it not in tried] if tried else ready
        # Where all are in doubt, trying is better than giving up.
        return [it for it in left if not it.breaker.open(now)] or left

    async def ended(self, replica: Replica) -> bool:
        """Ask a replica whether it serves no more, nor will before it has started anew."""
        try:
            state, _ = _said(*await _get(self.session, replica.name + "/ping"))
        except aiohttp.ClientConnectorError as error:
            return isinstance(error.os_error, ConnectionRefusedError)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False
        return state in (State.DRAINING, State.FAILED)

    def trouble(self) -> str:
        """Why there is none for a request."""
        if not self.replicas:
            return "there are no replicas; OPTION_ROUTER_REPLICAS names them"
        states = [it.state for it in self.replicas]
        told = ", ".join(f"{states.count(state)} {state}" for state in State if state in states)
        return f"no replica can take the request: {told}"

    async def run(self, sets: AsyncIterator[frozenset[str]]) -> None:
        """Watch the replicas until cancelled. sets: their URLs, each time they change."""
        timeout = aiohttp.ClientTimeout(total=PING_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            self.session = session
            try:
                async for urls in sets:
                    self._set(urls, session)
                await asyncio.Event().wait()
            finally:
                for task in self._watching.values():
                    task.cancel()
                await asyncio.gather(*self._watching.values(), return_exceptions=True)

    def _set(self, urls: frozenset[str], session: aiohttp.ClientSession) -> None:
        for replica in [it for it in self.replicas if it.name not in urls]:
            log.info("a replica is gone", extra={"facts": {"replica": replica.name}})
            self._watching.pop(replica.name).cancel()
            # What it has under way goes on; a pod that ends answers it.
            self.replicas.remove(replica)
            replica.close()
            self._went(replica)
            for series in (metrics.READY, metrics.IN_FLIGHT):
                with contextlib.suppress(KeyError):
                    series.remove(replica.name)
        for url in sorted(urls - {it.name for it in self.replicas}):
            replica = Replica(url)
            self.replicas.append(replica)
            self._watching[url] = asyncio.create_task(self._watch(replica, session))
        self._list()
        self._look_back()

    async def _watch(self, replica: Replica, session: aiohttp.ClientSession) -> None:
        """Look after one replica until cancelled."""
        silent = 0
        while True:
            try:
                status, answer = await _get(session, replica.name + "/ping")
                silent = 0
                state, detail = _said(status, answer)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                silent += 1
                lost = silent >= SILENT or not isinstance(error, TimeoutError)
                state = State.DOWN if lost else replica.state
                detail = str(error) or "it does not answer"
            try:
                anew = False
                if state is State.READY and not silent:
                    if replica.state is not State.READY:
                        anew = await self._meet(replica, session)
                    elif time.monotonic() - replica.looked > MODELS_S:
                        await self._models(replica, session)
            except (aiohttp.ClientError, OSError, TimeoutError):
                state, detail = replica.state, "it does not answer"
            self._enter(replica, state, detail, anew)
            await asyncio.sleep(PING_S)

    def _enter(self, replica: Replica, state: State, detail: str, anew: bool) -> None:
        before, replica.state, replica.detail = replica.state, state, detail
        metrics.READY.labels(replica.name).set(state is State.READY)
        metrics.IN_FLIGHT.labels(replica.name).set(replica.own[0])
        now = time.monotonic()
        replica.settle(now)
        for upstream in [it for it in replica.idle if now - it.since > IDLE_S]:
            upstream.drop()
        if state is before:
            return
        facts = {"replica": replica.name, "state": state} | ({"detail": detail} if detail else {})
        log.log(
            logging.WARNING if state in (State.DOWN, State.FAILED) else logging.INFO,
            "replica",
            extra={"facts": facts},
        )
        if state is State.READY:
            self._came(replica, anew)
        elif state in (State.DOWN, State.FAILED):
            replica.close()
            self._went(replica)
        self._look_back()

    async def _meet(self, replica: Replica, session: aiohttp.ClientSession) -> bool:
        """Ask what is to be known of a replica that has become ready. Whether it started anew."""
        _, answer = await _get(session, replica.name + "/metrics")
        born = _BORN.search(answer)
        blocks, size = _BLOCKS.search(answer), _BLOCK_SIZE.search(answer)
        replica.tokens = int(blocks[1]) * int(size[1]) if blocks and size else None
        known, replica.born = replica.born, born[1] if born else None
        replica.breaker = Breaker()
        await self._models(replica, session)
        return not known or known != replica.born

    async def _models(self, replica: Replica, session: aiohttp.ClientSession) -> None:
        replica.looked = time.monotonic()
        status, answer = await _get(session, replica.name + "/v1/models")
        if status != 200:
            return
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            found = _read_models(answer).data
            replica.models = frozenset(it.id for it in found)
            replica.adapters = frozenset(it.id for it in found if it.parent)
            self._list()

    def _look_back(self) -> None:
        if not any(it.state is State.UNKNOWN for it in self.replicas):
            self.known.set()

    def _list(self) -> None:
        self.adapters.clear()
        for replica in self.replicas:
            self.adapters |= replica.adapters


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_read_models = msgspec.json.Decoder(_Models).decode

# Of /metrics: when the process started, and the size of the engine's KV cache.
_BORN = re.compile(rb"^process_start_time_seconds (\S+)", re.MULTILINE)
_BLOCKS = re.compile(rb'^vllm:cache_config_info\{.*num_gpu_blocks="(\d+)"', re.MULTILINE)
_BLOCK_SIZE = re.compile(rb'^vllm:cache_config_info\{.*block_size="(\d+)"', re.MULTILINE)


async def _get(session: aiohttp.ClientSession, url: str) -> tuple[int, bytes]:
    async with session.get(url, allow_redirects=False) as answer:
        return answer.status, await answer.read()


class _Ping(msgspec.Struct):
    status: str = ""
    detail: str = ""


def _said(status: int, answer: bytes) -> tuple[State, str]:
    """What an answer to /ping says; other servers than ours say it by the status alone."""
    try:
        said = msgspec.json.decode(answer, type=_Ping)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        said = _Ping()
    if status == 200:
        return State.READY, said.detail
    if said.status in ("draining", "stopped"):
        return State.DRAINING, said.detail
    if said.status == "starting":
        return State.STARTING, said.detail
    return State.FAILED, said.detail or f"/ping answered {status}"
