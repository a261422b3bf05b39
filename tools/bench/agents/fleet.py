# SPDX-License-Identifier: Apache-2.0
"""A fleet of stand-in engines under the router's own strategies: no model, no HTTP, no clock.

An engine keeps the chunks that were used last, or those that the eviction of the KV cache tiers
keeps. A prompt costs the time to compute what the engine has not. Sessions wait for their answers,
and then pause.
"""

import heapq
import itertools
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import prometheus_client

from serving.cache_hints.intent import CONVERSATION_S, CacheIntent
from serving.kv_cache import retention_hint
from serving.router.policy.conversations import Conversations
from serving.router.policy.policies import Policy, PrefixAware, RoundRobin
from serving.router.policy.policies import Session as SessionPolicy
from serving.router.policy.prefix_index import PrefixIndex
from serving.router.policy.replica_load import Load
from serving.router.policy.routing_request import RoutingRequest
from serving.router.policy.tiers import Capacity
from tools.bench.agents.sessions import CHUNK, Maker, Session, Turn, ideal, known_first
from tools.routing_sim.model import graduated

REPLICAS = 3
RATE = 25_000.0
"""Prompt tokens that an engine computes in a second, at full size."""
TOKEN_S = 0.02
"""Seconds for a token of an answer."""


@dataclass(frozen=True)
class Arm:
    """strategy: as OPTION_ROUTING_STRATEGY has it. hinted: whether requests name their
    conversations. size: of each engine's cache, in live working sets. one_shots: their
    tokens, in new tokens of the agents. shared: whether there is a store that all engines share.
    retains: whether the caches evict paused conversations last.
    """

    strategy: str
    hinted: bool
    size: float
    one_shots: float
    shared: bool = False
    retains: bool = False


@dataclass
class Found:
    """The results of an arm. Tokens are the agents' own, not those of one-shots."""

    tokens: int = 0
    hit: int = 0
    turns: int = 0
    repeated: list[int] = field(default_factory=list)
    """For each turn after the first: tokens of the turn before that were computed again."""
    moves: int = 0
    decisions_s: list[float] = field(default_factory=list)
    of_the_killed: list[float] = field(default_factory=list)
    """For the next turn of each conversation of the killed engine: the share computed again."""
    last: dict[str, tuple[str, Sequence[int]]] = field(default_factory=dict)
    """By conversation: the engine of its last turn, and the turn's chunks."""
    orphans: set[str] = field(default_factory=set)
    """Conversations of the killed engine that had no turn since."""

    def count(self, turn: Turn, conversation: str, engine: str, hit: int) -> int:
        """Count a turn. hit: its tokens that were cached. Returns the number of its tokens that are
        new to the conversation.
        """
        self.turns += 1
        self.tokens += turn.tokens
        self.hit += hit
        before, chain = self.last.get(conversation, ("", ()))
        same = CHUNK * known_first(turn.chain, dict.fromkeys(chain))
        if before:
            again = max(same - hit, 0)
            self.repeated.append(again)
            self.moves += engine != before
            if conversation in self.orphans and same:
                self.orphans.discard(conversation)
                self.of_the_killed.append(again / same)
        self.last[conversation] = (engine, turn.chain)
        if turn.ends:
            del self.last[conversation]
        return max(turn.tokens - same, 0)

    def figures(self, sessions: Sequence[Session], scale: int) -> "Figures":
        """sessions: all that were run. scale: divided their tokens."""
        hits = self.hit / self.tokens
        repeated = sorted(self.repeated)
        return Figures(
            hits,
            hits / ideal(sessions),
            scale * (self.tokens - self.hit) / self.turns,
            scale * statistics.fmean(repeated),
            scale * repeated[int(0.9 * len(repeated))],
            self.moves / len(repeated),
            1e6 * statistics.median(self.decisions_s or [0.0]),
            statistics.fmean(self.of_the_killed or [0.0]),
        )


class Figures(NamedTuple):
    """The figures of an arm with one seed. Tokens are those of a turn, at full size. The last three
    are those of real engines: times to the first token, and the share of the prompts' tokens that
    came from the KV cache tier.
    """

    hits: float
    of_ideal: float
    computed: float
    repeated: float
    repeated_p90: float
    moves: float
    decision_us: float
    of_the_killed: float
    ttft_p50_ms: float = 0.0
    ttft_p90_ms: float = 0.0
    of_tiers: float = 0.0


class Engine:
    """Keeps the chunks that were used last."""

    def __init__(self, name: str, room: int) -> None:
        self.load = Load(name)
        self._room = room
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def take(self, chain: Sequence[int], intent: CacheIntent) -> int:
        """Compute a prompt. Returns how many of its first chunks were there."""
        known = known_first(chain, self._chunks)
        for link in reversed(chain):  # the last chunks are the first to go
            self._chunks[link] = None
            self._chunks.move_to_end(link)
        while len(self._chunks) > self._room:
            self._chunks.popitem(last=False)
        return known

    def clear(self) -> None:
        self._chunks.clear()


class RetainingEngine(Engine):
    """Evicts by the policy of the KV cache tiers. clock: returns seconds."""

    def __init__(self, name: str, room: int, clock: Callable[[], float]) -> None:
        from serving.kv_cache.lmcache.retention import Retention  # imports LMCache

        super().__init__(name, room)
        self._retention = Retention(clock, prometheus_client.CollectorRegistry())
        self._eviction: Any = self._retention.policy()

    def take(self, chain: Sequence[int], intent: CacheIntent) -> int:
        kept = self._eviction._order
        known = known_first(chain, kept)
        self._eviction.on_keys_created(chain)
        self._retention.on_request_end(retention_hint.told(intent, None, CONVERSATION_S), chain)
        if (more := len(kept) - self._room) > 0:
            for action in self._eviction.get_eviction_actions((more + 0.5) / len(kept)):
                self._eviction.on_keys_removed(action.keys)
        return known

    def clear(self) -> None:
        self._eviction.on_keys_removed([*self._eviction._order])


class Fleet:
    """Runs sessions. killed: whether an engine loses its cache once half of the turns are over."""

    def __init__(
        self,
        arm: Arm,
        sessions: Sequence[Session],
        maker: Maker,
        *,
        live: int,
        room: int,
        scale: int,
        killed: bool,
    ) -> None:
        """live: sessions at a time. room: of each engine, in chunks. scale: divides tokens."""
        self._arm = arm
        self._maker = maker
        self._left = deque(sessions)
        self._live = live
        self._rate = RATE / scale
        self._token_s = TOKEN_S * scale
        names = [f"engine-{number}" for number in range(REPLICAS)]
        self._engines = [
            RetainingEngine(name, room, lambda: self._now) if arm.retains else Engine(name, room)
            for name in names
        ]
        self._store: set[int] = set()
        self._policy = _policy(arm.strategy)
        if isinstance(self._policy, PrefixAware):
            store = "store" if arm.shared else ""
            for engine in self._engines:
                capacity = Capacity(engine=room * CHUNK, store=store)
                self._policy.index.resize(engine.load.name, capacity)
        self._conversations = Conversations()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._owed = 0.0  # tokens of one-shots
        self._kill_at = sum(len(it.turns) for it in sessions) // 2 if killed else None
        self.found = Found()

    def run(self) -> Found:
        for _ in range(self._live):
            self._begin()
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        return self.found

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), act))

    def _begin(self) -> None:
        if self._left:
            session = self._left.popleft()
            self._next(session, iter(session.turns))

    def _next(self, session: Session, turns: Iterator[Turn]) -> None:
        if (turn := next(turns, None)) is None:
            self._begin()
            return
        self._at(self._now + turn.pause, lambda: self._ask(session, turn, turns))

    def _ask(self, session: Session, turn: Turn, turns: Iterator[Turn]) -> None:
        if self.found.turns == self._kill_at:
            self._kill()
        over = self._send(turn, turn.agent or session.name, session.name if turn.agent else "")
        self._at(over, lambda: self._next(session, turns))
        while self._owed > 0:
            shot = self._maker.one_shot()
            self._owed -= shot.tokens
            self._send(shot, "", "")

    def _send(self, turn: Turn, conversation: str, parent: str) -> float:
        """Send a request. Returns when its answer is over."""
        hinted = self._arm.hinted and conversation
        intent = CacheIntent(
            session=conversation if hinted else "",
            parent=parent if hinted else "",
            seconds=CONVERSATION_S if hinted else 0,
            final=turn.ends,
        )
        request = RoutingRequest(
            tokens=turn.tokens,
            chain=graduated(turn.chain),
            session=conversation if hinted or self._arm.strategy == "session" else "",
            intent=intent,
            streamed=True,
        )
        loads = [engine.load for engine in self._engines]
        began = time.perf_counter()
        choice = self._conversations.choose(self._policy, request, loads, self._now)
        self._policy.learn(request, choice.replica.name, self._now)
        if hinted:
            self._conversations.learn(request, choice.replica.name)
        self.found.decisions_s.append(time.perf_counter() - began)
        engine = next(it for it in self._engines if it.load is choice.replica)
        known = engine.take(turn.chain, intent)
        if self._arm.shared:
            known = max(known, known_first(turn.chain, self._store))
            self._store.update(turn.chain)
        work = engine.load.begin(turn.tokens, choice.held, True, self._now)
        computed = turn.tokens - known * CHUNK
        begins = self._now + computed / self._rate
        over = begins + turn.output * self._token_s
        self._at(begins, lambda: engine.load.computed(work))
        self._at(over, lambda: engine.load.end(work))
        if conversation:
            new = self.found.count(turn, conversation, engine.load.name, known * CHUNK)
            self._owed += self._arm.one_shots * new
        return over

    def _kill(self) -> None:
        engine = self._engines[0]
        engine.clear()
        self._policy.forget(engine.load.name)
        self._conversations.forget(engine.load.name)
        last = self.found.last
        self.found.orphans = {it for it, (where, _) in last.items() if where == engine.load.name}


def _policy(strategy: str) -> Policy:
    match strategy:
        case "roundrobin":
            return RoundRobin()
        case "session":
            return SessionPolicy()
    return PrefixAware(PrefixIndex())
