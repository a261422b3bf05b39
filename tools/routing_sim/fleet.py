# SPDX-License-Identifier: Apache-2.0
"""A simulated fleet: the router, its replicas, and a run of one case through them."""

import math
import random
from collections.abc import Callable
from functools import partial

from serving.router.forecast.first_token import Accuracy, Awaited
from serving.router.policy import phases
from serving.router.policy.candidates import Candidates
from serving.router.policy.kv_index import BlockRemoved, BlockStored, KvIndex
from serving.router.policy.policies import Choice, Policy
from serving.router.policy.prefix_index import PrefixIndex
from serving.router.policy.replica_load import PER_REQUEST, Load
from serving.router.policy.tiers import DEFAULT_PRICES, Capacity, Prices
from serving.waiting.held import HeldQueue, Waiter
from tools.routing_sim.engine import Engine, Events, Run
from tools.routing_sim.model import BLOCK, Case, Prompt, Request, chain
from tools.routing_sim.rivals import ARMS, WITH_EVENTS
from tools.routing_sim.tiers import Shared, Tiers

EVENTS_S = 0.005
"""How old KV events are when they arrive."""
HANDOVER_S = 2.0
"""Time limit for a handed-over prompt's KV."""
WARM_UP, DRAIN_S, DOWN_S = 1 / 3, 60.0, 20.0
"""The share of a run that only fills caches; seconds for requests to end after the last one has
come; seconds that a lost replica is away.
"""


class Fleet:
    """The router, its replicas, and a run of one workload through them."""

    def __init__(
        self,
        case: Case,
        arm: str,
        seed: int,
        prices: Prices = DEFAULT_PRICES,
        policy: Callable[[PrefixIndex], Policy] | None = None,
    ) -> None:
        """policy: makes another one than the arm's."""
        random.seed(seed)  # the strategies'
        self.case, self._prices = case, prices
        self.clock = Events()
        self.requests: list[Request] = []
        self._coming = case.requests(random.Random(seed), case.load)
        self._index, self._blocks = PrefixIndex(), KvIndex()
        self._policy = policy(self._index) if policy else ARMS[arm](self._index, self._blocks)
        self._listens = arm in WITH_EVENTS
        self._engines: dict[str, Engine] = {}
        self._up: list[Load] = []
        self._runs: dict[Run, Awaited] = {}
        self._accuracy = Accuracy()
        self.ratios: list[tuple[float, float]] = []
        """Each forecast ÷ measured time to a first token, behind the time that it came."""
        self._l2 = Shared(case.l2) if case.l2 else None
        self._held = HeldQueue(10**9, 10**9, lambda: self.clock.now) if case.slots else None
        self._prefilling: list[Load] = []
        self._prefills: dict[Run, Request] = {}
        for number in range(case.replicas):
            self._add(f"replica{number}", 1 if number else case.slow)
        if case.apart:
            self._prefilling = [self._up.pop() for _ in range(case.apart.replicas)]
            self._candidates = Candidates([*self._up])
        if case.restart:
            self.clock.at(case.seconds * (1 + WARM_UP) / 2, self._restart)

    def run(self) -> None:
        self._come()
        self.clock.run(self.case.seconds + DRAIN_S)

    def _add(self, name: str, slow: float = 1.0) -> None:
        it, l1, l2 = self.case.profile, self.case.l1, self.case.l2
        tiers = Tiers(l1, self._l2, it) if l1 else None
        self._engines[name] = Engine(
            name, it, self.clock, self, slow, tiers, self.case.adapter_slots
        )
        load = Load(name, prices=self._prices, adapter_slots=self.case.adapter_slots)
        load.slots = self.case.slots
        self._up.append(load)
        capacity = Capacity(
            engine=it.kv_tokens,
            memory=l1.tokens if l1 else 0,
            shared=l2.tokens if l2 else None,
            store="l2" if l2 else "",
        )
        self._candidates = Candidates([*self._up])
        self._index.resize(name, capacity)
        self._blocks.followed.add(name)

    def _come(self) -> None:
        request = next(self._coming, None)
        if request and request.at < self.case.seconds:
            self.clock.at(request.at, partial(self._arrive, request))
            self.clock.at(request.at, self._come)

    def _arrive(self, request: Request) -> None:
        self.requests.append(request)
        if self._held is not None and (self._held.waits_for("") or not self._has_room()):
            self._hold(request)
        else:
            self._send(request)

    def _has_room(self) -> bool:
        return self._candidates.has_room(1)

    def _hold(self, request: Request) -> None:
        """As the router does; the cached part of a prompt is charged as well here."""
        assert self._held is not None
        waiter = Waiter(
            kind="",
            ready=self._has_room,
            lane=request.tenant,
            band=0,
            cost=PER_REQUEST + request.tokens,
            size=0,
            until=math.inf,
            go=lambda waited: self._send(request),
            fail=lambda reason, error: None,
        )
        self._held.add(waiter)

    def _send(self, request: Request, divisible: bool = True) -> None:
        now = self.clock.now
        answer = (-request.parts[-1][0], request.output)
        links = chain((*request.parts, answer), BLOCK, request.adapter)
        within = self.case.within if self._accuracy.trusted else None
        prompt = Prompt.of(request, links, self._listens, within)
        choice = self._policy.choose(prompt, self._candidates, now)
        apart = self.case.apart
        first = None
        if divisible and apart and prompt.tokens - choice.held.tokens >= apart.least:
            first = phases.prefills(self._policy, prompt, choice, self._prefilling, now)
        if first:
            # A second token, as an engine's run has one that is decoded: one short step.
            run = self._run(Request(now, request.parts, 2), prompt, links, first, now)
            self._prefills[run] = request
            return
        request.replica, request.sent = choice.replica.name, now
        self._run(request, prompt, links, choice, now)

    def _run(
        self, request: Request, prompt: Prompt, links: list[int], choice: Choice, now: float
    ) -> Run:
        load, held = choice
        self._policy.learn(prompt, load.name, now)
        work = load.begin(prompt.tokens, held, streamed=True, now=now)
        engine = self._engines[load.name]
        run = Run(request, prompt.tokens, links, engine, load, work)
        self._runs[run] = load.first_token.awaited(load.queued, now)
        self.clock.at(now + self.case.profile.overhead_s, partial(engine.receive, run))
        return run

    def first(self, run: Run) -> None:
        """The answer's first byte."""
        run.load.computed(run.work)
        run.request.first = self.clock.now
        ratio = run.load.first_token.learn(self._runs[run], self.clock.now)
        if ratio is not None:
            self._accuracy.add(ratio)
            self.ratios.append((self.clock.now, ratio))

    def ended(self, run: Run) -> None:
        run.load.end(run.work)
        run.request.end = self.clock.now
        del self._runs[run]
        if self._held is not None:
            self._held.wake()
        if request := self._prefills.pop(run, None):
            stored = self._l2.stored_at(run.links, run.tokens) if self._l2 else 0.0
            at = min(max(stored, self.clock.now), self.clock.now + HANDOVER_S)
            self.clock.at(at, partial(self._send, request, divisible=False))
            return
        follows = run.request.after and run.request.after(self.clock.now)
        if follows and follows.at < self.case.seconds:
            self.clock.at(follows.at, partial(self._arrive, follows))

    def published(self, engine: Engine, events: list[BlockStored | BlockRemoved]) -> None:
        if events and self._listens:
            self.clock.at(self.clock.now + EVENTS_S, partial(self._apply, engine, events))

    def _apply(self, engine: Engine, events: list[BlockStored | BlockRemoved]) -> None:
        if self._engines.get(engine.name) is engine:
            for event in events:
                self._blocks.apply(engine.name, 0, event)

    def _restart(self) -> None:
        """The last replica is lost; its requests in flight go to others. It comes back empty."""
        down = self._up.pop()
        self._candidates = Candidates([*self._up])
        self._engines.pop(down.name).restart()
        for memory in (self._policy, self._index, self._blocks):
            memory.forget(down.name)
        self.clock.at(self.clock.now + DOWN_S, partial(self._add, down.name))
        for run in [run for run in self._runs if run.load is down]:
            run.lost = True
            del self._runs[run]
            self._send(run.request)
