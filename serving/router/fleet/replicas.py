# SPDX-License-Identifier: Apache-2.0
"""The replicas: their list, their health, and their models."""

import asyncio
import enum
import functools
import logging
import math
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any
from urllib.parse import urlsplit

from serving.kv_cache.speed import Speed
from serving.router.fleet.circuit_breaker import CircuitBreaker, longest_still
from serving.router.fleet.facts import Facts
from serving.router.forecast.first_token import Accuracy
from serving.router.http.upstream import IdleConnections, Upstream, connect
from serving.router.policy.candidates import EXACT, Board, Candidates, Homes
from serving.router.policy.replica_load import PREFILL_RATE, Load, Share
from serving.router.policy.tiers import Capacity

log = logging.getLogger(__name__)

IDLE_S = 60.0
"""Lifetime of an idle connection; servers close theirs after 75 s, or earlier."""
COUNTED_S = 600.0
"""Lifetime of a removed replica's series: its last requests must still be scraped, and counting
continues if it returns.
"""

FADES = 0.7
"""The factor of a measured speed's weight at the next measurement, which comes every 30 s."""
FIRST_BYTES = 200
"""Answers whose times to the first byte are kept."""
MOST_KINDS = 250
"""Kinds of requests whose candidates are kept, by the models and adapters that they name."""


class State(enum.StrEnum):
    """The answer of a replica's /ping, or its absence."""

    UNKNOWN = "unknown"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    DOWN = "down"


_READY = State.READY  # in Python 3.11 a member takes a call of an enumeration


class Replica(Load):
    """One server, as the router knows it."""

    def __init__(self, url: str, copy: int | None = None) -> None:
        """copy: its number, for a copy of this container."""
        super().__init__(url)
        self.copy = copy
        parts = urlsplit(url)
        # connections to it
        self.host = parts.hostname or ""
        self.port = parts.port or 80
        self.encrypted = parts.scheme == "https"
        self.authority = parts.netloc.encode()
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.endpoint = f"{host}:{self.port}"
        """Its name for gateways."""
        self.idle = IdleConnections()
        self.prefills: set[asyncio.Future[str]] = set()
        """The prompts that it computes for others; each future gets the outcome."""
        self.breaker = CircuitBreaker()
        self.answered_at = 0.0
        """When it last began an answer that shows that it works."""
        # its facts about itself
        self.state = State.UNKNOWN
        self.detail = ""
        self.called = ""
        """The name that identities are signed for, after its proof of the secret; "" without a
        proof.
        """
        self.model = ""
        """The model's name in its answers."""
        self.models: frozenset[str] = frozenset()
        """The model names that requests may use; empty if unknown."""
        self.adapters: frozenset[str] = frozenset()
        """The adapters among them."""
        self.capacity = Capacity()
        """The facts about its KV caches, as far as known."""
        self.chunk = 0
        self.tenant_header: str | None = None
        self.role = "both"
        self.transfer = ""
        """All as its Facts have them."""
        self._born: bytes | None = None
        # its repeated reports of its work
        self.kv_usage: float | None = None
        """As its Facts have it."""
        self._computed = 0.0, 0.0
        self._speed = Speed(FADES)
        # the router's other processes
        self._peer_load: Share = (0, 0, 0)

    @property
    def facts(self) -> dict[str, Any]:
        """Its name for lines of the log."""
        return {"replica": self.name} | ({} if self.copy is None else {"copy": self.copy})

    @property
    def own_load(self) -> Share:
        """The part of its load that is this process's."""
        in_flight, queued, context = self._peer_load
        return self.in_flight - in_flight, self.queued - queued, self.context - context

    def set_peer_load(self, load: Share) -> None:
        """Set the share of the load that the router's other processes have at this replica."""
        own, self._peer_load = self.own_load, load
        self.in_flight, self.queued, self.context = map(sum, zip(own, load, strict=True))
        if self.board:
            self.board.lighten(self)

    def hands_over_to(self, other: "Replica", *, fetching: bool) -> bool:
        """Whether another can get KV that this one has computed. fetching: also if it needs the
        address of the KV.
        """
        store = self.capacity.store
        fetched = fetching and self.transfer and self.transfer == other.transfer
        return bool(fetched or (store and store == other.capacity.store))

    def meet(self, facts: Facts) -> bool:
        """It has become ready. Whether it has restarted since it was last ready."""
        before, self._born = self._born, facts.born
        self.capacity = facts.capacity
        self.chunk, self.tenant_header = facts.chunk, facts.tenant_header
        self.adapter_slots, self.slots = facts.adapter_slots, facts.slots
        self.role, self.transfer = facts.role, facts.transfer
        self.breaker = self.breaker.anew()
        self._computed = 0.0, 0.0
        self.measure(facts)
        return not before or before != facts.born

    def measure(self, facts: Facts) -> None:
        """Record the replica's report of its speed and its cache usage."""
        self.prices, self.kv_usage = facts.prices, facts.kv_usage
        tokens, seconds = (
            now - before for now, before in zip(facts.computed, self._computed, strict=True)
        )
        self._computed = facts.computed
        if tokens > 0 and seconds > 0:
            self._speed.add(tokens, seconds)
        if measured := self.seconds_per_token:
            self.prefill_rate = 1 / measured

    @property
    def seconds_per_token(self) -> float:
        """The seconds that its engine takes for a prompt token, measured under its load; 0 while
        unknown.
        """
        return self._speed.seconds_per_unit

    def list_models(self, names: Sequence[str], adapters: frozenset[str]) -> None:
        """Record the names of its models, its own first. adapters: the names that are adapters'."""
        self.model = next((name for name in names if name not in adapters), "")
        self.models, self.adapters = frozenset(names), adapters

    def enter(self, state: State, detail: str, now: float) -> bool:
        """It was probed. Whether its state is another than before."""
        before, self.state, self.detail = self.state, state, detail
        self.settle(now)
        self.refuse(False)
        self.idle.drop(IDLE_S)
        return state is not before

    async def connect(
        self, tls: ssl.SSLContext, idle: IdleConnections | None, *, decoding: bool = False
    ) -> Upstream:
        """A new connection. tls: for encrypted replicas. idle, decoding: as Upstream has them.
        Raises OSError, TimeoutError.
        """
        secured = tls if self.encrypted else None
        return await connect(self.host, self.port, secured, idle, decoding=decoding)

    def abandon_prefills(self) -> None:
        """Mark it down; waits for prompts that it computes for others end."""
        for end in self.prefills:
            if not end.done():
                end.set_result("down")


def _tell(replica: Replica, reason: str) -> None:
    """Log that a replica is ejected, or readmitted."""
    if reason:
        log.warning("a replica is ejected", extra={"facts": replica.facts | {"detail": reason}})
    else:
        log.info("a replica is readmitted", extra={"facts": replica.facts})


class ReplicaPool:
    """All replicas."""

    def __init__(
        self,
        on_ready: Callable[[Replica, bool], None],
        on_gone: Callable[[Replica], None],
        copies: Sequence[str] = (),
    ) -> None:
        """on_ready: called with a replica that has become ready, and whether it has restarted.
        on_gone: with one that is down, or no longer in the pool. copies: the URLs of this
        container's copies, in the order of their numbers.
        """
        self.replicas: list[Replica] = []
        self.named: dict[str, Replica] = {}
        """The same by their names."""
        self.adapters: set[str] = set()
        """The names of adapters that any of them has."""
        self.apart: set[str] = set()
        """Names of models, not of adapters, that some of them serve and others do not."""
        self.first_bytes: deque[float] = deque(maxlen=FIRST_BYTES)
        """Seconds that the latest answers took to begin."""
        self.accuracy = Accuracy()
        """The accuracy of forecasts of the time to the first token."""
        self._closed: frozenset[str] = frozenset()
        """The names of replicas that get no more requests, because they make room for others."""
        self.probed = asyncio.Event()
        """Set once each of the first ones has said whether it can serve."""
        self._on_ready = on_ready
        self._on_gone = on_gone
        self._numbers = {url: number for number, url in enumerate(copies)}
        self._gone: dict[str, float] = {}  # since when
        self._seconds_per_token = 1 / PREFILL_RATE  # the last mean
        # the candidates of each kind of request, while no replica changes
        self._kept: dict[tuple[str, str], Sequence[Candidates[Replica]]] = {}
        self._lists: dict[tuple[Replica, ...], Candidates[Replica]] = {}
        self._roles: dict[str, list[Replica]] = {}
        self._prefilling: dict[tuple[str, str, str, str, bool], Candidates[Replica]] = {}
        self._until = math.inf  # when one that is ejected may be tried
        self._homes = Homes(())
        self._board: Board | None = None

    @property
    def seconds_per_token(self) -> float:
        """Mean time, over the replicas, to compute one prompt token, in seconds. After the last
        replica has left, the last mean stays; before the first is known, a default applies.
        """
        known = [it.seconds_per_token for it in self.replicas if it.seconds_per_token]
        if known:
            self._seconds_per_token = sum(known) / len(known)
        return self._seconds_per_token

    def close(self, names: Set[str]) -> None:
        """Give these replicas no requests from now on, and all others again."""
        self._closed = frozenset(names)
        self._changed()

    # for requests

    @property
    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.state is _READY]

    def candidates(
        self,
        model: str,
        adapter: str,
        tried: Sequence[Replica],
        now: float,
        among: Set[str] | None = None,
    ) -> Candidates[Replica]:
        """The replicas that a request can go to, without those it was tried on.

        model: the one of `apart` that it names, or "". among: the allowed endpoints; None for all.
        Prefill replicas are included only if there are no others.
        """
        if now >= self._until:
            self._changed()
        kind = model, adapter if adapter in self.adapters else ""
        groups = self._kept.get(kind) if among is None else None
        if groups is None:
            groups = self._groups(*kind, now, among)
            if among is None:
                self._kept[kind] = groups
        for group in groups:
            if left := group.without(tried) if tried else group:
                return left
        return left

    def _groups(
        self, model: str, adapter: str, now: float, among: Set[str] | None
    ) -> Sequence[Candidates[Replica]]:
        """The candidates, and then further groups for the case that all of them were tried."""
        ready = self._ready_for(model, adapter, among)
        # Where all are in doubt, trying is better than giving up.
        lists = []
        for able in (self._allowed(ready, now), ready):
            lists += [tuple(it for it in able if it.role != "prefill"), tuple(able)]
        if among is not None:
            return [self._candidates(it) for it in dict.fromkeys(lists)]
        if len(self._kept) >= MOST_KINDS:
            self._kept.clear()
            self._lists.clear()
        return [self._listed(it) for it in dict.fromkeys(lists)]

    def _allowed(self, ready: Sequence[Replica], now: float) -> list[Replica]:
        """The replicas that are not ejected."""
        self._until = min([self._until, *(it.breaker.allows_at(now) for it in ready)])
        return [it for it in ready if it.breaker.allows(now)]

    def _listed(self, replicas: tuple[Replica, ...]) -> Candidates[Replica]:
        """They as candidates, for all kinds of requests the same."""
        if replicas not in self._lists:
            self._lists[replicas] = self._candidates(replicas)
        return self._lists[replicas]

    def _candidates(self, replicas: Sequence[Replica]) -> Candidates[Replica]:
        if self._board is None and len(self.replicas) > EXACT:
            self._board = Board(self.ready)
        return Candidates(replicas, self._homes, self._board)

    def _changed(self) -> None:
        """Another replica can, or cannot, take some kind of request."""
        self._kept.clear()
        self._lists.clear()
        self._prefilling.clear()
        self._roles.clear()
        self._until = math.inf
        if self._board:
            self._board = None
            for replica in self.replicas:
                replica.board = None

    def of_role(self, role: str) -> Sequence[Replica]:
        """The ready replicas of this role."""
        if not self._roles:
            for replica in self.ready:
                self._roles.setdefault(replica.role, []).append(replica)
        return self._roles.get(role, ())

    def prefilling(
        self, model: str, adapter: str, answers: Replica, now: float, *, fetching: bool
    ) -> Candidates[Replica]:
        """The replicas that can compute a prompt for one that answers. fetching: as
        hands_over_to() has it.
        """
        if now >= self._until:
            self._changed()
        adapter = adapter if adapter in self.adapters else ""
        kind = model, adapter, answers.capacity.store, answers.transfer, fetching
        if kind not in self._prefilling:
            if len(self._prefilling) >= MOST_KINDS:
                self._prefilling.clear()
            able = [
                it
                for it in self._allowed(self._ready_for(model, adapter, None), now)
                if it.role == "prefill"
                and it.called
                and it.hands_over_to(answers, fetching=fetching)
            ]
            self._prefilling[kind] = self._candidates(able)
        return self._prefilling[kind]

    def _ready_for(self, model: str, adapter: str, among: Set[str] | None) -> list[Replica]:
        ready = self.ready
        if self._closed:
            ready = [replica for replica in ready if replica.name not in self._closed]
        if model:
            ready = [replica for replica in ready if model in replica.models]
        if among is not None:
            ready = [replica for replica in ready if replica.endpoint in among]
        if adapter and (having := [it for it in ready if adapter in it.adapters]):
            ready = having  # the others would only say that they do not have it
        return ready

    def trouble(self, model: str = "") -> str:
        """Why there is none for a request. model: as candidates() has it."""
        if not self.replicas:
            return "there are no replicas; OPTION_ROUTER_REPLICAS names them"
        states = [it.state for it in self.replicas if not model or model in it.models]
        counts = ", ".join(f"{states.count(state)} {state}" for state in State if state in states)
        return f"no replica{f' of {model}' * bool(model)} can take the request: {counts}"

    def counted(self) -> set[str]:
        """The names of replicas that there are, or were until a while ago."""
        return {*self._gone, *(replica.name for replica in self.replicas)}

    def forget_gone(self) -> list[str]:
        """Count replicas no more that are gone for long. Returns their names."""
        now = time.monotonic()
        names = [name for name, since in self._gone.items() if now - since > COUNTED_S]
        for name in names:
            del self._gone[name]
        return names

    # for discovery and health checks

    def update(self, urls: Set[str]) -> None:
        """Set the replicas: those with these URLs, and no others."""
        for replica in [it for it in self.replicas if it.name not in urls]:
            log.info("a replica is gone", extra={"facts": replica.facts})
            # Its requests in flight go on; a pod that ends still answers them.
            self.replicas.remove(replica)
            del self.named[replica.name]
            replica.idle.close()
            self._on_gone(replica)
            self._gone[replica.name] = time.monotonic()
        added = urls - {replica.name for replica in self.replicas}
        for url in sorted(added, key=lambda it: (self._numbers.get(it, -1), it)):
            replica = Replica(url, self._numbers.get(url))
            replica.breaker = CircuitBreaker(
                functools.partial(self._peers, replica),
                functools.partial(_tell, replica),
                self._changed,
            )
            self.replicas.append(replica)
            self.named[url] = replica
            self._gone.pop(url, None)
        self._homes = Homes([*self.named])
        self._changed()
        self._list_names()
        self._check_probed()

    def enter(self, replica: Replica, state: State, detail: str, *, anew: bool) -> None:
        """A replica was probed. anew: whether the replica has restarted since it was last ready."""
        known = self.named.get(replica.name) is replica
        if not known or not replica.enter(state, detail, time.monotonic()):
            return
        self._changed()
        facts = replica.facts | {"state": state} | ({"detail": detail} if detail else {})
        level = logging.WARNING if state in (State.DOWN, State.FAILED) else logging.INFO
        log.log(level, "replica", extra={"facts": facts})
        if state is State.READY:
            self._on_ready(replica, anew)
        elif state in (State.DOWN, State.FAILED):
            replica.idle.drop()
            replica.abandon_prefills()
            self._on_gone(replica)
        self._check_probed()

    def call(self, replica: Replica, name: str) -> None:
        """A replica has proved that it has the secret and this name; "" without a proof."""
        if replica.called != name:
            replica.called = name
            self._changed()

    def list_models(self, replica: Replica, names: Sequence[str], adapters: frozenset[str]) -> None:
        """Record the names of a replica's models, its own first. adapters: the names that are
        adapters'.
        """
        before = replica.model, replica.models, replica.adapters
        replica.list_models(names, adapters)
        if before != (replica.model, replica.models, replica.adapters):
            self._changed()
            self._list_names()

    def look(self, now: float, waiting: Iterable[tuple[Replica, float]]) -> None:
        """Eject replicas that stand still. waiting: for each request that waits for its replica,
        since when.
        """
        still = longest_still(self.first_bytes)
        for replica in self.ready:
            replica.settle(now)
        standing = Counter(replica for replica, since in waiting if now - since > still)
        for replica in self.ready:
            replica.breaker.look(now, standing[replica], still)

    def _peers(self, replica: Replica) -> list[CircuitBreaker]:
        """The other replicas that could answer a replica's requests. Any replica can replace a
        prefill replica.
        """
        served = replica.models - replica.adapters
        return [
            other.breaker
            for other in self.replicas
            if other is not replica
            and other.state is _READY
            and other.models - other.adapters == served
            and (other.role != "prefill" or replica.role == "prefill")
        ]

    def _check_probed(self) -> None:
        if not any(replica.state is State.UNKNOWN for replica in self.replicas):
            self.probed.set()

    def _list_names(self) -> None:
        self.adapters.clear()
        self.apart.clear()
        listed = {(it.models, it.adapters) for it in self.replicas}
        self.adapters.update(*(adapters for _, adapters in listed))
        if served := [models - adapters for models, adapters in listed if models]:
            self.apart |= frozenset.union(*served) - frozenset.intersection(*served)
