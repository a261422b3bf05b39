# SPDX-License-Identifier: Apache-2.0
"""In LMCache's server: an LRU eviction that knows which conversations go on.

A conversation's chunks are leased until its lifetime ends, and count as if they were used then.
Chunks are evicted in this order:

1. chunks of ended conversations, of turns that the client has edited or compacted away, and of
   requests that are worth less than others, as long as no other request used them. A shorter prompt
   that begins otherwise is no turn of its conversation, and ends nothing;
2. all other chunks, the least recently used first, as in LMCache's LRU.

A lease is never a promise: it refuses no store, and leases above the budget count as none.
"""

import collections
import heapq
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.eviction_policy.lru import LRUEvictionPolicy
from lmcache.v1.distributed.internal_api import EvictionAction
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from serving.kv_cache import retention_hint
from serving.kv_cache.retention_hint import RetentionHint

SHARE_ALONE = 0.9
SHARE = 0.6
SHARE_OF_A_TENANT = 0.3
"""The parts of a tier's chunks that leases protect: if all chunks are one tenant's; otherwise those
of all tenants together, and those of each.
"""
SESSIONS = 10_000
OF_A_TENANT = 1_000
"""Most conversations with a lease, of all and of one tenant."""
CHUNKS = 500_000
"""Most chunks of all leases together, about 300 bytes each."""

_ANYONE = ""


class _Use:
    """The last use of some chunks of a tier.

    user: the conversation, or _ANYONE for several users and for requests without a conversation.
    at, until: when the use was and when its lease ends, by the clock. until is 0 without a lease.
    keys: the chunks of the request, in order; () without a lease. chunks: how many of the tier's
    chunks have this use.
    """

    __slots__ = ("at", "chunks", "keys", "tenant", "until", "user")

    def __init__(
        self, user: str, tenant: str, at: float, until: float = 0, keys: Sequence[ObjectKey] = ()
    ) -> None:
        self.user, self.tenant, self.at, self.until, self.keys = user, tenant, at, until, keys
        self.chunks = 0


class _Session(NamedTuple):
    """A conversation with a lease: its uses in all tiers, and its last prompt's chunks."""

    tenant: str
    until: float
    uses: Sequence[_Use]
    keys: Sequence[ObjectKey]


class Lease(NamedTuple):
    """A conversation's lease: its last prompt's chunks, in order, and the seconds until its end."""

    keys: Sequence[ObjectKey]
    seconds: float


class Retention:
    """The leases of a cache server, for all of its tiers. Threads may share it."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # least recently used first
        self._of_tenants = collections.Counter[str]()
        self._chunks = 0
        self._policies: list[RetainingLRU] = []
        self.evicted = Counter(
            "slipway_kv_evicted_chunks",
            "Chunks that a tier chose to evict, by what they were kept for.",
            ["state"],
            registry=registry,
        )
        sessions = Gauge(
            "slipway_kv_leases", "Conversations whose KV is leased.", registry=registry
        )
        sessions.set_function(lambda: len(self._sessions))

    def policy(self) -> "RetainingLRU":
        """Return the eviction policy of one more tier."""
        made = RetainingLRU(self)
        self._policies.append(made)
        return made

    def on_request_end(
        self, configs: Mapping[str, object] | None, keys: Sequence[ObjectKey]
    ) -> None:
        """Take the news that a request has ended. configs: LMCache's `request_configs` of it. keys:
        its prompt's chunks, in order.
        """
        if not keys:
            return
        hint = retention_hint.read(configs) or RetentionHint()
        if hint.low:
            self._discard(keys, None)
            return
        now = self.clock()
        user = hint.session
        if user and not hint.final and self._is_beside(user, keys, now):
            user = ""
        if not user and hint.seconds:  # a prompt of its own, with which the next turn begins
            user = f"{hint.tenant}/{keys[-1].chunk_hash.hex()}"
        until = now + hint.seconds if hint.seconds and not hint.final else 0
        leased = keys if until else ()
        uses = [it.use(keys, _Use(user, hint.tenant, now, until, leased)) for it in self._policies]
        if not user:
            return
        with self._lock:
            before = self._forget(user)
            if until:
                self._lease(user, _Session(hint.tenant, until, uses, keys))
            self._end_leases(now)
        if hint.final:
            self._discard((*before, *keys), user)
        elif before and before[0] == keys[0]:
            still = {*keys}
            self._discard([key for key in before if key not in still], user)

    def _is_beside(self, session: str, keys: Sequence[ObjectKey], now: float) -> bool:
        """Whether a request is none of its conversation's turns, by the first chunk of its prompt
        and by its length. Claude Code (2.1.332) asks for a title with another system prompt.
        """
        with self._lock:
            last = self._sessions.get(session)
        if last is None or last.until <= now:
            return False
        return keys[0] != last.keys[0] and len(keys) < len(last.keys)

    def lease(self, session: str) -> Lease | None:
        """Return a conversation's lease, None if it has none."""
        with self._lock:
            found = self._sessions.get(session)
        left = found.until - self.clock() if found else 0
        return Lease(found.keys, left) if found and left > 0 else None

    def end(self, session: str) -> Sequence[ObjectKey]:
        """End a conversation, as its last turn does. Returns its last prompt's chunks."""
        with self._lock:
            keys = self._forget(session)
        self._discard(keys, session)
        return keys

    def own(self, session: str) -> Sequence[ObjectKey]:
        """Return the chunks of a conversation's last prompt, without those that another
        conversation has used, as far as a tier knows.
        """
        with self._lock:
            found = self._sessions.get(session)
        keys = found.keys if found else ()
        others = {it for policy in self._policies for it in policy.of_others(keys, session)}
        return [key for key in keys if key not in others]

    def _lease(self, name: str, session: _Session) -> None:
        self._sessions[name] = session
        self._of_tenants[session.tenant] += 1
        self._chunks += len(session.keys)
        if self._of_tenants[session.tenant] > OF_A_TENANT:
            self._forget(next(n for n, it in self._sessions.items() if it.tenant == session.tenant))
        while len(self._sessions) > SESSIONS or (self._chunks > CHUNKS and len(self._sessions) > 1):
            self._forget(next(iter(self._sessions)))

    def _end_leases(self, now: float) -> None:
        """Forget the conversations that rested longest, while their leases are over."""
        while self._sessions:
            name, session = next(iter(self._sessions.items()))
            if session.until > now:
                return
            self._forget(name)

    def _forget(self, name: str) -> Sequence[ObjectKey]:
        """End a conversation's lease, and return its last prompt's chunks."""
        if not (session := self._sessions.pop(name, None)):
            return ()
        self._of_tenants[session.tenant] -= 1
        if not self._of_tenants[session.tenant]:
            del self._of_tenants[session.tenant]
        self._chunks -= len(session.keys)
        for use in session.uses:
            use.until, use.keys = 0, ()
        return session.keys

    def _discard(self, keys: Sequence[ObjectKey], user: str | None) -> None:
        for policy in self._policies:
            policy.discard(keys, user)


class RetainingLRU(LRUEvictionPolicy):  # type: ignore[misc]  # not type-checked
    """The eviction policy of one tier.

    LMCache's LRU keeps the tier's chunks in `_order`, the least recently used first and the last
    chunk of a request before its others. It has no values there; here the value is a chunk's _Use,
    and None until the first request that used it has ended.
    """

    _order: OrderedDict[ObjectKey, _Use | None]
    _lock: threading.Lock

    def __init__(self, retention: Retention) -> None:
        super().__init__()
        self._retention = retention
        self._unwanted = _Use(_ANYONE, "", 0)
        self._leases: dict[_Use, None] = {}
        self._of_tenants = collections.Counter[str]()

    def use(self, keys: Sequence[ObjectKey], use: _Use) -> _Use:
        """Take the news that a request has used the chunks, and return its use."""
        shared = _Use(_ANYONE, use.tenant, use.at, use.until)
        with self._lock:
            for key in keys:
                if key in self._order:
                    before = self._order[key]
                    if before in (None, self._unwanted) or before.user == use.user != _ANYONE:
                        self._put(key, use)
                    else:
                        shared.until = max(shared.until, before.until)
                        self._put(key, shared)
            if shared.until:
                shared.keys = keys
            self._leases.update({it: None for it in (use, shared) if it.chunks and it.until})
        return use

    def discard(self, keys: Iterable[ObjectKey], user: str | None) -> None:
        """Evict those of the chunks first that only this user has used; None is nobody."""
        with self._lock:
            for key in keys:
                if key in self._order:
                    use = self._order[key]
                    if (use.user if use else None) == user:
                        self._put(key, self._unwanted)

    def of_others(self, keys: Iterable[ObjectKey], user: str) -> Iterator[ObjectKey]:
        """Yield those of the chunks whose last use was not by this user alone."""
        with self._lock:
            uses = {key: self._order.get(key) for key in keys}
        for key, use in uses.items():
            if use and use is not self._unwanted and use.user != user:
                yield key

    def on_keys_removed(self, keys: list[ObjectKey]) -> None:
        """Forget the chunks."""
        with self._lock:
            for key in keys:
                if self._order.get(key):
                    self._put(key, None)
        super().on_keys_removed(keys)

    def _put(self, key: ObjectKey, use: _Use | None) -> None:
        for it, count in ((self._order[key], -1), (use, 1)):
            if it:
                it.chunks += count
            if it and it is not self._unwanted:
                self._of_tenants[it.tenant] += count
        self._order[key] = use

    def get_eviction_actions(
        self,
        expected_ratio: float,
        key_eligible_filter: Callable[[ObjectKey], bool] | None = None,
        cache_salt: str | None = None,
    ) -> list[EvictionAction]:
        """Return the chunks to evict, as many as LRUEvictionPolicy does."""
        with self._lock:
            count = max(int(len(self._order) * min(expected_ratio, 1.0)), 1)
            found: dict[ObjectKey, None] = {}
            states = collections.Counter[str]()
            for state, key in self._by_worth():
                if key in found or (key_eligible_filter and not key_eligible_filter(key)):
                    continue
                found[key] = None
                states[state] += 1
                if len(found) == count:
                    break
            for state, times in states.items():
                self._retention.evicted.labels(state).inc(times)
            destination = (self._destinations or [self._default_destination])[0]
        return [EvictionAction(keys=[*found], destination=destination)] if found else []

    def _by_worth(self) -> Iterator[tuple[str, ObjectKey]]:
        """Yield the chunks in the order of their eviction, each with the reason to keep it."""
        if self._unwanted.chunks:
            for key, use in self._order.items():
                if use is self._unwanted:
                    yield "unwanted", key
        beyond = self._beyond_budget()
        for _, state, key in heapq.merge(
            self._plain(beyond), self._leased(beyond), key=itemgetter(0)
        ):
            yield state, key

    def _plain(self, beyond: dict[_Use, int]) -> Iterator[tuple[float, str, ObjectKey]]:
        """Yield chunks without a lease and those beyond the budget, with the time of their use."""
        at = 0.0
        for key, use in self._order.items():
            if use is self._unwanted:
                continue
            if use:
                at = use.at
                if use in beyond:
                    if not beyond[use]:
                        continue
                    beyond[use] -= 1
            yield at, "plain", key

    def _leased(self, uses: Iterable[_Use]) -> Iterator[tuple[float, str, ObjectKey]]:
        """Yield chunks with a lease, and the time of its end; a prompt's last chunks first."""
        now = self._retention.clock()
        for use in sorted(uses, key=lambda use: use.until):
            state = "leased" if use.until > now else "plain"
            for key in reversed(use.keys):
                if self._order.get(key) is use:
                    yield use.until, state, key

    def _beyond_budget(self) -> dict[_Use, int]:
        """Return the uses with a lease, each with the number of its chunks beyond the budget, which
        the uses that rested longest exceed first.
        """
        self._leases = {it: None for it in self._leases if it.chunks and it.until}
        self._of_tenants = +self._of_tenants
        shares = len(self._of_tenants) > 1
        left = int((SHARE if shares else SHARE_ALONE) * len(self._order))
        most = int(SHARE_OF_A_TENANT * len(self._order)) if shares else left
        of_tenants = defaultdict[str, int](lambda: most)
        beyond: dict[_Use, int] = {}
        for use in sorted(self._leases, key=lambda use: -use.at):
            kept = min(use.chunks, left, of_tenants[use.tenant])
            left -= kept
            of_tenants[use.tenant] -= kept
            beyond[use] = use.chunks - kept
        return beyond
