# SPDX-License-Identifier: Apache-2.0
"""A simulated engine: its scheduler, its KV cache, and the clock that drives them."""

import heapq
import itertools
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from serving.router.policy.kv_index import BlockRemoved, BlockStored
from serving.router.policy.replica_load import Load, Work
from tools.routing_sim.model import BLOCK, Profile, Request, block_tokens
from tools.routing_sim.tiers import Tiers

BUDGET, SEATS = 8192, 256
"""Prompt tokens of a step, and sequences that run at once, at most."""
LORA_LOAD_S = 0.2


@dataclass(slots=True, eq=False)
class Run:
    """A request at an engine. done: prompt tokens computed; own: blocks that are only its own;
    held: those that others may use; work: what the router has noted of it.
    """

    request: Request
    tokens: int
    links: Sequence[int]
    engine: "Engine"
    load: Load
    work: Work
    done: int = 0
    own: int = 0
    held: list[int] = field(default_factory=list)
    lost: bool = False


class Clock(Protocol):
    """Time as an engine sees it, simulated or real."""

    @property
    def now(self) -> float: ...

    def at(self, time: float, do: Callable[[], None]) -> None: ...


class Events:
    """The events of a simulation, in order of time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, time: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._count), do))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, do = heapq.heappop(self._events)
            do()


class Blocks:
    """An engine's KV cache: blocks in use, and the others from the least recently used on."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._users: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict()
        self.events: list[BlockStored | BlockRemoved] = []

    def admit(self, run: Run) -> bool:
        """Take blocks for all of the request, if they fit. Its last token is always computed."""
        users, links = self._users, run.links[: (run.tokens - 1) // BLOCK]
        hits = next((n for n, link in enumerate(links) if link not in users), len(links))
        need = -(-(run.tokens + run.request.output) // BLOCK) - hits
        revived = sum(not users[link] for link in links[:hits])
        if self.used + revived + need > self.capacity:
            return False
        for link in links[:hits]:
            self._free.pop(link, None)
            users[link] += 1
        run.held, run.own, run.done = list(links[:hits]), need, hits * BLOCK
        self.used += revived + need
        removed = []
        while self.used + len(self._free) > self.capacity:
            link, _ = self._free.popitem(last=False)
            del users[link]
            removed.append(link)
        if removed:
            self.events.append(BlockRemoved([*removed]))
        return True

    def store(self, run: Run, start: int, end: int) -> None:
        """The blocks between these tokens of the request are computed."""
        # Those that another has computed at the same time are doubles: nobody else gets them.
        links, users = run.links, self._users
        new = [place for place in range(start // BLOCK, end // BLOCK) if links[place] not in users]
        # Of places in a row, as an event has one parent.
        for _, row in itertools.groupby(enumerate(new), lambda it: it[1] - it[0]):
            places = [place for _, place in row]
            stored = links[places[0] : places[-1] + 1]
            parent = links[places[0] - 1] if places[0] else None
            users.update(dict.fromkeys(stored, 1))
            run.held += stored
            run.own -= len(stored)
            self.events.append(BlockStored([*stored], parent, block_tokens(stored), BLOCK))

    def release(self, run: Run) -> None:
        self.used -= run.own
        for link in reversed(run.held):
            self._users[link] -= 1
            if not self._users[link]:
                self._free[link] = None
                self.used -= 1


class Listener(Protocol):
    """The fleet that an engine reports to."""

    def first(self, run: Run) -> None: ...

    def ended(self, run: Run) -> None: ...

    def published(self, engine: "Engine", events: list[BlockStored | BlockRemoved]) -> None: ...


class Engine:
    """One replica. slow: how many times as long computing takes. tiers: behind its cache.
    adapter_slots: adapters that it keeps.
    """

    def __init__(
        self,
        name: str,
        profile: Profile,
        clock: Clock,
        fleet: Listener,
        slow: float = 1.0,
        tiers: Tiers | None = None,
        adapter_slots: int = 8,
    ) -> None:
        self.name, self.profile, self.slow = name, profile, slow
        self._tiers = tiers
        self._adapter_slots = adapter_slots
        self._clock, self._fleet = clock, fleet
        self._version = 0
        self.restart()

    def restart(self) -> None:
        """Empty again. Requests in flight do not finish."""
        self._version += 1
        self._blocks = Blocks(self.profile.kv_tokens // BLOCK)
        self._waiting: deque[Run] = deque()
        self._prefilling: list[Run] = []
        self._decoding: list[tuple[int, int, Run]] = []  # a heap, by the step that ends it
        self._context = 0
        self._steps = 0
        self._leap = 0  # steps until the next event; 0: idle
        self._since = 0.0
        self._adapters: OrderedDict[int, None] = OrderedDict()
        self._order = itertools.count()

    def receive(self, run: Run) -> None:
        if run.lost:
            return
        self._waiting.append(run)
        self._wake()

    def _wake(self) -> None:
        if not self._leap:
            self._begin()
        elif self._leap > 1:
            self._cut()

    def _begin(self) -> None:
        self._loading = 0.0
        prefill = self._schedule()
        self._leap = 1 if prefill else self._decoding[0][0] - self._steps if self._decoding else 0
        self._since = self._clock.now
        if self._leap:
            self._until(self._took(self._leap, prefill) + self._loading)

    def _until(self, seconds: float) -> None:
        self._version += 1
        self._clock.at(self._since + seconds, partial(self._stepped, self._version))

    def _took(self, steps: int, prefill: int) -> float:
        """Seconds of this many steps; each step adds a token of context to each sequence."""
        it = self.profile
        context = steps * self._context + len(self._decoding) * steps * (steps - 1) / 2
        return self.slow * (steps * it.step_s + prefill / it.rate + it.context_s * context)

    def _cut(self) -> None:
        """End the leap with the step that is under way now: somebody waits."""
        elapsed = self._clock.now - self._since
        steps = bisect_left(
            range(self._leap + 1), elapsed, lo=1, key=lambda steps: self._took(steps, 0)
        )
        if steps < self._leap:
            self._leap = steps
            self._until(self._took(steps, 0))

    def _schedule(self) -> int:
        """Decide on the next step's prompt tokens, and count them: those begun, then the next."""
        budget = BUDGET - len(self._decoding)
        left = budget
        for run in self._prefilling:
            left -= self._compute(run, left)
        while (
            left > 0
            and self._waiting
            and len(self._decoding) + len(self._prefilling) < SEATS
            and self._blocks.admit(self._waiting[0])
        ):
            run = self._waiting.popleft()
            run.request.cached = run.done
            self._load_adapter(run.request)
            if self._load(run):
                continue
            self._prefilling.append(run)
            left -= self._compute(run, left)
        return budget - left

    def _load(self, run: Run) -> bool:
        """Whether tiers have some of it, which is then on its way; the others go on meanwhile."""
        request = run.request
        request.of_l1 = request.of_l2 = 0
        if self._tiers is None:
            return False
        loaded = self._tiers.load(run.links, run.done, run.tokens, self._clock.now)
        if loaded is None:
            return False
        request.of_l1, request.of_l2 = loaded.l1, loaded.l2
        self._clock.at(loaded.at, partial(self._loaded, run))
        return True

    def _loaded(self, run: Run) -> None:
        if run.lost:
            return
        start, run.done = run.done, run.done + run.request.of_l1 + run.request.of_l2
        self._blocks.store(run, start, run.done)
        self._prefilling.append(run)
        self._wake()

    def _compute(self, run: Run, most: int) -> int:
        start, run.done = run.done, min(run.tokens, run.done + most)
        self._blocks.store(run, start, run.done)
        return run.done - start

    def _load_adapter(self, request: Request) -> None:
        adapter = request.adapter
        if not adapter:
            return
        if adapter not in self._adapters:
            self._loading += LORA_LOAD_S
            request.adapter_loads += 1
        self._adapters[adapter] = None
        self._adapters.move_to_end(adapter)
        if len(self._adapters) > self._adapter_slots:
            self._adapters.popitem(last=False)

    def _stepped(self, version: int) -> None:
        if version != self._version:
            return
        self._steps += self._leap
        self._context += self._leap * len(self._decoding)
        while self._decoding and self._decoding[0][0] <= self._steps:
            run = heapq.heappop(self._decoding)[2]
            self._context -= run.tokens + run.request.output
            self._finish(run)
        prefilling, self._prefilling = self._prefilling, []
        for run in prefilling:
            if run.done < run.tokens:
                self._prefilling.append(run)
                continue
            self._fleet.first(run)
            if self._tiers:
                self._tiers.store(run.links, run.tokens, self._clock.now)
            self._context += run.tokens + 1
            last = self._steps + run.request.output - 1
            heapq.heappush(self._decoding, (last, next(self._order), run))
        self._fleet.published(self, self._blocks.events)
        self._blocks.events = []
        self._begin()

    def _finish(self, run: Run) -> None:
        self._blocks.store(run, run.tokens // BLOCK * BLOCK, run.tokens + run.request.output)
        self._blocks.release(run)
        self._fleet.ended(run)
