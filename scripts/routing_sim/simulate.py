"""What the router's strategies win: the classes that route in production, before simulated engines.

Discrete events, no real time: an engine step is an event, and steps that only decode are one event
together. A step takes `step_s` + prompt tokens computed ÷ `rate` + tokens of context x
`context_s`; prompts are computed in chunks, up to 8,192 tokens a step, at most 256 sequences run,
one waits until its blocks fit, and the least recently used blocks that nobody runs on are evicted.
The constants are Qwen3-32B's on two H100 (llm-d's calibration) and, an assumption, those of a 70B
model on eight. For llm-d's benchmark (8 pods, 6,000 shared + 1,200 tokens in, 1,000 out) at 3
requests/s it finds a mean TTFT of 0.42 s with round-robin and 0.15 s with kvaware, published are
0.415 and 0.155; at 10 requests/s round-robin is past its limit here, and not there. So ratios below
saturation are to be believed, absolute loads are not.

Arms: our four strategies as they are in serving/router; random; least requests; and the rules of
others as they publish them, on the same engines:

    their prefixaware  production-stack's (HyperPod's default): any replica that was ever sent the
                       longest known prefix, in 128 characters; no load, no eviction
    their kvaware      production-stack's: who has the first 256 tokens, if all but 2,000 are known
    cache_aware        vllm-router's and SGLang's: the longest prefix if it is over 0.3 of the
                       prompt, else the smallest tree; the shortest queue if the longest has 64
                       requests more and 1.5 times as many
    product            vllm-router's kv_aware: (uncached + queued tokens) x (requests + 1), the
                       first among equals
    loadaware          production-stack's newest: share that is cached - load over mean

All arms get the same requests (open loop, Poisson; chat: users who wait for answers). The first
third of a run only fills caches. Requests without an end 60 s after the last one came are failures:
they count as the slowest. Percentiles are over all requests of all seeds. "hit": prompt tokens from
an engine's cache ÷ prompt tokens; "hot": replicas x the largest share of requests that one got;
"gap": seconds between the tokens of an answer.

Targets for documents are at round-robin's knee, the highest load with its TTFT P90 within 2.5 times
what an idle replica takes with nothing cached; tokens/s are compared at each one's own knee.
"""

import argparse
import heapq
import itertools
import math
import random
import statistics
import sys
from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from serving.router.policy import kv_index, policies
from serving.router.policy.kv_index import BlockRemoved, BlockStored, KvIndex
from serving.router.policy.policies import Choice, Load, Policy, Session, Work
from serving.router.policy.prefix_index import BYTES_PER_TOKEN, CHUNK, PrefixIndex
from serving.router.policy.request import RoutingRequest

REPLICAS = 7
BLOCK = CHUNK // BYTES_PER_TOKEN
"""Tokens of one link of our chains; here the engines' blocks are as large."""
BUDGET, SEATS = 8192, 256
LORA_SLOTS, LORA_LOAD_S = 8, 0.2
EVENTS_S = 0.005
"""How old KV events are when they come."""
TOKEN = (1 << 31) - 1
"""KV events bring tokens. Here a block has one, which is of its hash what fits one."""
WARM_UP, DRAIN_S, DOWN_S = 1 / 3, 60.0, 20.0


@dataclass(frozen=True)
class Profile:
    """Of an engine: tokens/s of prompts, seconds of a step, seconds for each token of context that
    a step reads, seconds for each request, tokens that its KV cache holds.
    """

    rate: float
    step_s: float
    context_s: float
    overhead_s: float
    kv_tokens: int


B32 = Profile(15_926, 0.010, 0.28e-3 / 7000, 0.045, 307_000)
B70 = Profile(25_000, 0.010, 0.12e-3 / 7000, 0.045, 500_000)

Parts = tuple[tuple[int, int], ...]


def chain(parts: Parts, size: int, seed: int = 0) -> list[int]:
    """A hash for each `size` tokens of a text that is made of (name, tokens) parts, as
    prefix_index.chain() makes them of bytes.
    """
    links: list[int] = []
    pieces: list[int] = []
    link, room = seed, size
    for name, length in parts:
        at = 0
        while length - at >= room:
            link = hash((link, *pieces, name, at, room))
            links.append(link)
            at += room
            pieces, room = [], size
        if at < length:
            pieces += [name, at, length - at]
            room -= length - at
    return links


@dataclass(slots=True, eq=False)
class Request:
    """What a client wants, and what it got. after: the request that follows its end, and when."""

    at: float
    parts: Parts
    output: int
    session: str = ""
    adapter: int = 0
    after: "Callable[[float], Request | None] | None" = None
    first: float = math.inf
    end: float = math.inf
    cached: int = 0
    replica: str = ""

    @property
    def tokens(self) -> int:
        return sum(length for _, length in self.parts)


class Prompt(RoutingRequest, frozen=True, kw_only=True, dict=True):
    """What strategies know of a request, and for those of others its text as well."""

    parts: Parts

    @classmethod
    def of(cls, request: Request, links: Sequence[int], tokenized: bool) -> "Prompt":
        """links: a chain of the request and its answer."""
        tokens = request.tokens
        links = links[: tokens // BLOCK]
        keys = [link & TOKEN for link in links] if tokenized else []
        return cls(
            tokens=tokens,
            chain=links,
            blocks=kv_index.chain(keys, 1, kv_index.seed()) if tokenized else None,
            block_size=BLOCK,
            adapter=f"adapter{request.adapter}" if request.adapter else "",
            session=request.session,
            parts=request.parts,
        )

    @cached_property
    def fine(self) -> list[int]:
        """A chain with links of 128 characters."""
        return chain(self.parts, 128 // BYTES_PER_TOKEN)


# --- Engines ---


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


class Clock:
    """What happens when, in order."""

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
            tokens = [link & TOKEN for link in stored]
            self.events.append(BlockStored([*stored], parent, tokens, 1))

    def release(self, run: Run) -> None:
        self.used -= run.own
        for link in reversed(run.held):
            self._users[link] -= 1
            if not self._users[link]:
                self._free[link] = None
                self.used -= 1


class Engine:
    """One replica. slow: how many times as long everything takes."""

    def __init__(self, name: str, fleet: "Fleet", slow: float = 1.0) -> None:
        self.name, self.fleet, self.slow = name, fleet, slow
        self.profile = fleet.case.profile
        self._version = 0
        self.restart()

    def restart(self) -> None:
        """Empty again. Nothing of what was under way comes to an end."""
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
        if not self._leap:
            self._begin()
        elif self._leap > 1:
            self._cut()

    def _begin(self) -> None:
        self._loading = 0.0
        prefill = self._schedule()
        self._leap = 1 if prefill else self._decoding[0][0] - self._steps if self._decoding else 0
        self._since = self.fleet.clock.now
        if self._leap:
            self._until(self._took(self._leap, prefill) + self._loading)

    def _until(self, seconds: float) -> None:
        self._version += 1
        self.fleet.clock.at(self._since + seconds, partial(self._stepped, self._version))

    def _took(self, steps: int, prefill: int) -> float:
        """Seconds of so many steps: each adds a token of context for each sequence."""
        it = self.profile
        context = steps * self._context + len(self._decoding) * steps * (steps - 1) / 2
        return self.slow * (steps * it.step_s + prefill / it.rate + it.context_s * context)

    def _cut(self) -> None:
        """End the leap with the step that is under way now: somebody waits."""
        elapsed = self.fleet.clock.now - self._since
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
            self._load_adapter(run.request.adapter)
            self._prefilling.append(run)
            left -= self._compute(run, left)
        return budget - left

    def _compute(self, run: Run, most: int) -> int:
        start, run.done = run.done, min(run.tokens, run.done + most)
        self._blocks.store(run, start, run.done)
        return run.done - start

    def _load_adapter(self, adapter: int) -> None:
        if not adapter:
            return
        if adapter not in self._adapters:
            self._loading += LORA_LOAD_S
        self._adapters[adapter] = None
        self._adapters.move_to_end(adapter)
        if len(self._adapters) > LORA_SLOTS:
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
            self.fleet.first(run)
            self._context += run.tokens + 1
            last = self._steps + run.request.output - 1
            heapq.heappush(self._decoding, (last, next(self._order), run))
        self.fleet.published(self, self._blocks.events)
        self._blocks.events = []
        self._begin()

    def _finish(self, run: Run) -> None:
        self._blocks.store(run, run.tokens // BLOCK * BLOCK, run.tokens + run.request.output)
        self._blocks.release(run)
        self.fleet.ended(run)


# --- The router, and what others would do in its place ---


class Plain:
    """A strategy that remembers nothing: the one measure of a replica, random among equals."""

    def measure(self, request: Prompt, replica: Load, now: float) -> float:
        return 0.0

    def choose(self, request: RoutingRequest, replicas: Sequence[Load], now: float) -> Choice:
        assert isinstance(request, Prompt)
        measures = [self.measure(request, replica, now) for replica in replicas]
        least = min(measures)
        equals = [it for it, measure in zip(replicas, measures, strict=True) if measure == least]
        return Choice(random.choice(equals), 0)

    def learn(self, request: RoutingRequest, replica: str, now: float) -> None:
        pass

    def forget(self, replica: str) -> None:
        pass


class LeastRequests(Plain):
    def measure(self, request: Prompt, replica: Load, now: float) -> float:
        return replica.in_flight


class Indexed(Plain):
    """With our index in the place of theirs: their trees differ little in what they find."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index

    def cached(self, request: RoutingRequest, replica: Load, now: float) -> int:
        return self.index.matched(replica.name, request.chain, now) * BLOCK

    def learn(self, request: RoutingRequest, replica: str, now: float) -> None:
        self.index.insert(replica, request.chain, now)

    def forget(self, replica: str) -> None:
        self.index.forget(replica)


class LoadAware(Indexed):
    def choose(self, request: RoutingRequest, replicas: Sequence[Load], now: float) -> Choice:
        self._mean = sum(replica.in_flight for replica in replicas) / len(replicas)
        return super().choose(request, replicas, now)

    def measure(self, request: Prompt, replica: Load, now: float) -> float:
        load = (replica.in_flight - self._mean) / max(1.0, self._mean)
        return load - self.cached(request, replica, now) / request.tokens


class Product(Indexed):
    def choose(self, request: RoutingRequest, replicas: Sequence[Load], now: float) -> Choice:
        def measure(replica: Load) -> int:
            uncached = request.tokens - self.cached(request, replica, now)
            return (uncached + replica.queued) * (replica.in_flight + 1)

        best = min(replicas, key=measure)
        return Choice(best, self.cached(request, best, now))


class CacheAware(Indexed):
    def __init__(self, index: PrefixIndex) -> None:
        super().__init__(index)
        self._inserted: Counter[str] = Counter()

    def choose(self, request: RoutingRequest, replicas: Sequence[Load], now: float) -> Choice:
        least = min(replicas, key=lambda replica: replica.in_flight)
        most = max(replica.in_flight for replica in replicas)
        if most - least.in_flight > 64 and most > 1.5 * least.in_flight:
            return Choice(least, 0)
        best = max(replicas, key=lambda replica: self.cached(request, replica, now))
        if self.cached(request, best, now) > 0.3 * request.tokens:
            return Choice(best, 0)
        return Choice(min(replicas, key=lambda replica: self._inserted[replica.name]), 0)

    def learn(self, request: RoutingRequest, replica: str, now: float) -> None:
        known = self.index.matched(replica, request.chain, now)
        self._inserted[replica] += len(request.chain) - known
        super().learn(request, replica, now)


class TheirPrefixAware(Plain):
    """A trie of text, as a set of replicas for each hash of all up to there."""

    def __init__(self) -> None:
        self._sent: dict[int, set[str]] = defaultdict(set)

    def choose(self, request: RoutingRequest, replicas: Sequence[Load], now: float) -> Choice:
        assert isinstance(request, Prompt)
        last = list(replicas)
        for link in request.fine:
            sent = self._sent.get(link, ())
            found = [replica for replica in last if replica.name in sent]
            if not found:
                break
            last = found
        return Choice(random.choice(last), 0)

    def learn(self, request: RoutingRequest, replica: str, now: float) -> None:
        assert isinstance(request, Prompt)
        for link in request.fine:
            self._sent[link].add(replica)


class TheirKvAware(Plain):
    """Falls back to their session ring, or to the fewest requests of the last 60 s. What engines
    hold stands for what LMCache holds.
    """

    def __init__(self, index: KvIndex) -> None:
        self._index = index
        self._sent: dict[str, deque[float]] = defaultdict(deque)
        self._ring = Session()

    def choose(self, request: RoutingRequest, replicas: Sequence[Load], now: float) -> Choice:
        owner, matched = None, 0
        for replica in replicas:
            blocks = self._index.matched(replica.name, request.blocks or (), now)
            if blocks * BLOCK >= 256:  # their chunk; the first who has one is all they look at
                owner, matched = replica, blocks * BLOCK // 256 * 256
                break
        if owner and matched >= request.tokens - 2000:
            return Choice(owner, 0)
        if request.session:
            still = [Load(replica.name) for replica in replicas]  # a ring does not look at load
            name = self._ring.choose(request, still, now).replica.name
            return Choice(next(replica for replica in replicas if replica.name == name), 0)
        return Choice(min(replicas, key=lambda replica: self._recent(replica.name, now)), 0)

    def _recent(self, replica: str, now: float) -> int:
        sent = self._sent[replica]
        while sent and sent[0] < now - 60:
            sent.popleft()
        return len(sent)

    def learn(self, request: RoutingRequest, replica: str, now: float) -> None:
        self._sent[replica].append(now)


ARMS: dict[str, Callable[[PrefixIndex, KvIndex], Policy]] = {
    "roundrobin": lambda index, blocks: policies.RoundRobin(),
    "session": lambda index, blocks: policies.Session(),
    "prefixaware": lambda index, blocks: policies.PrefixAware(index),
    "kvaware": policies.KvAware,
    "random": lambda index, blocks: Plain(),
    "least requests": lambda index, blocks: LeastRequests(),
    "their prefixaware": lambda index, blocks: TheirPrefixAware(),
    "their kvaware": lambda index, blocks: TheirKvAware(blocks),
    "cache_aware": lambda index, blocks: CacheAware(index),
    "product": lambda index, blocks: Product(index),
    "loadaware": lambda index, blocks: LoadAware(index),
}
BASE, OURS = "roundrobin", ("prefixaware", "kvaware")
WITH_EVENTS = ("kvaware", "their kvaware")


class Fleet:
    """The router, its replicas, and a run of one workload through them."""

    def __init__(self, case: "Case", arm: str, seed: int) -> None:
        random.seed(seed)  # the strategies'
        self.case = case
        self.clock = Clock()
        self.requests: list[Request] = []
        self._coming = case.requests(random.Random(seed), case.load)
        self._index, self._blocks = PrefixIndex(), KvIndex()
        self._policy = ARMS[arm](self._index, self._blocks)
        self._listens = arm in WITH_EVENTS
        self._engines: dict[str, Engine] = {}
        self._up: list[Load] = []
        self._runs: dict[Run, None] = {}
        for number in range(REPLICAS):
            self._add(f"replica{number}", 1 if number else case.slow)
        if case.restart:
            self.clock.at(case.seconds * (1 + WARM_UP) / 2, self._restart)

    def run(self) -> None:
        self._come()
        self.clock.run(self.case.seconds + DRAIN_S)

    def _add(self, name: str, slow: float = 1.0) -> None:
        self._engines[name] = Engine(name, self, slow)
        self._up.append(Load(name))
        self._index.resize(name, self.case.profile.kv_tokens)
        self._blocks.followed.add(name)

    def _come(self) -> None:
        request = next(self._coming, None)
        if request and request.at < self.case.seconds:
            self.clock.at(request.at, partial(self._arrive, request))
            self.clock.at(request.at, self._come)

    def _arrive(self, request: Request) -> None:
        self.requests.append(request)
        self._send(request)

    def _send(self, request: Request) -> None:
        now = self.clock.now
        answer = (-request.parts[-1][0], request.output)
        links = chain((*request.parts, answer), BLOCK, request.adapter)
        prompt = Prompt.of(request, links, self._listens)
        load, cached = self._policy.choose(prompt, self._up, now)
        self._policy.learn(prompt, load.name, now)
        work = load.begin(prompt.tokens, cached, streamed=True, now=now)
        request.replica = load.name
        engine = self._engines[load.name]
        run = Run(request, prompt.tokens, links, engine, load, work)
        self._runs[run] = None
        self.clock.at(now + self.case.profile.overhead_s, partial(engine.receive, run))

    def first(self, run: Run) -> None:
        """The answer's first byte."""
        run.load.computed(run.work)
        run.request.first = self.clock.now

    def ended(self, run: Run) -> None:
        run.load.end(run.work)
        run.request.end = self.clock.now
        del self._runs[run]
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
        """The last replica is lost; what it had under way goes elsewhere. It comes back empty."""
        down = self._up.pop()
        self._engines.pop(down.name).restart()
        for memory in (self._policy, self._index, self._blocks):
            memory.forget(down.name)
        self.clock.at(self.clock.now + DOWN_S, partial(self._add, down.name))
        for run in [run for run in self._runs if run.load is down]:
            run.lost = True
            del self._runs[run]
            self._send(run.request)


# --- Workloads ---


@dataclass(frozen=True)
class Case:
    """A workload at a load, which is requests/s or users. slow: how many times as long the first
    replica takes. restart: whether one is lost in the middle of what is measured.
    """

    name: str
    profile: Profile
    requests: Callable[[random.Random, float], Iterator[Request]]
    load: float
    seconds: float
    slow: float = 1.0
    restart: bool = False


def _name(rng: random.Random) -> int:
    return rng.getrandbits(48) + 1000  # those below are for what is shared


def documents(
    rng: random.Random, load: float, *, length: int, number: int, hot: float = 0.0
) -> Iterator[Request]:
    """Questions of 200 tokens about documents, Zipf(1); `hot`: a share more about the first."""
    weights = list(itertools.accumulate(1 / rank for rank in range(1, number + 1)))
    now = 0.0
    while True:
        now += rng.expovariate(load)
        (document,) = rng.choices(range(1, number + 1), cum_weights=weights)
        if rng.random() < hot:
            document = 1
        name = _name(rng)
        yield Request(now, ((document, length), (name, 200)), 200, session=str(name))


def chat(rng: random.Random, load: float) -> Iterator[Request]:
    """Users of one application: 8 turns, then anew."""
    for at in sorted(rng.uniform(0, 80) for _ in range(round(load))):
        yield _turn(random.Random(rng.random()), at, ((1, 600),), 0, "")


def _turn(rng: random.Random, at: float, said: Parts, turn: int, session: str) -> Request:
    name = _name(rng)
    session = session or str(name)
    parts = (*said, (name, 150 if turn else 900))

    def after(now: float) -> Request:
        later = now + rng.expovariate(1 / 8)
        if turn == 7:
            return _turn(rng, later, ((1, 600),), 0, "")
        return _turn(rng, later, (*parts, (-name, 250)), turn + 1, session)

    return Request(at, parts, 250, session, after=after)


def unshared(
    rng: random.Random, load: float, *, system: int = 0, adapters: int = 0
) -> Iterator[Request]:
    """Lengths as ShareGPT's, about: 240 tokens in, 210 out on average. system: tokens before each
    prompt, the same for all. adapters: LoRA adapters, Zipf(1).
    """
    weights = list(itertools.accumulate(1 / rank for rank in range(1, adapters + 1)))
    now = 0.0
    while True:
        now += rng.expovariate(load)
        name = _name(rng)
        prompt = (name, min(8000, 4 + int(rng.lognormvariate(math.log(130), 1.1))))
        output = min(2000, 2 + int(rng.lognormvariate(math.log(150), 0.8)))
        parts = ((1, system), prompt) if system else (prompt,)
        adapter = rng.choices(range(1, adapters + 1), cum_weights=weights)[0] if adapters else 0
        yield Request(now, parts, output, session=str(name), adapter=adapter)


def document_case(length: int, times: float, load: float, count: int, hot: float = 0.0) -> Case:
    """times: what all documents together are, of one replica's cache."""
    number = round(times * B70.kv_tokens / length)
    name = (
        f"{number} documents of {length:,} tokens: {times:g} x one replica's cache, "
        f"{times / REPLICAS:.2g} x all; {f'{hot:.0%} about one; ' if hot else ''}70B"
    )
    requests = partial(documents, length=length, number=number, hot=hot)
    return Case(name, B70, requests, load, count / load)


def unshared_case(load: float, count: int, system: int = 0, adapters: int = 0) -> Case:
    shared = f"the same {4 * system:,} characters before each; " if system else ""
    loras = f"{adapters} LoRA adapters, {LORA_SLOTS} fit; " if adapters else ""
    requests = partial(unshared, system=system, adapters=adapters)
    return Case(f"unshared prompts; {shared}{loras}32B", B32, requests, load, count / load)


FEW = ("least requests", "their prefixaware", "cache_aware", "loadaware")
SWEPT = ("8k", "64k", "unshared", "system")
ALL_ARMS = ("chat", "hot", "faults", "adapters")
QUICK = ("8k", "64k", "system")
LOADS_8K = (14, 20, 26, 28, 30, 35, 40, 50, 60)
LOADS_64K = (1, 2, 2.4, 2.6, 4, 5, 7)


def workloads(quick: bool) -> dict[str, list[Case]]:
    few, many = (900, 3000) if quick else (3000, 12_000)
    eight = partial(document_case, 8000, count=few)
    sixty_four = partial(document_case, 64_000, count=few * 3 // 8)
    restart, slow = eight(10, 20), eight(10, 20)
    return {
        "8k": [eight(10, load) for load in ((14, 28, 45) if quick else LOADS_8K)],
        "64k": [sixty_four(10, load) for load in ((1, 2.4, 5) if quick else LOADS_64K)],
        "sizes": [
            *(eight(times, 25) for times in (0.5, 1, 3, 21)),
            *(sixty_four(times, 2) for times in (0.5, 1, 3, 21)),
        ],
        "chat": [Case("chat; 32B", B32, chat, users, 240) for users in (420, 700)],
        "unshared": [unshared_case(load, many) for load in (100, 200, 250)],
        "system": [unshared_case(150, many, system=tokens) for tokens in (100, 600)],
        "hot": [eight(10, 60, hot=0.5), sixty_four(10, 8, hot=0.5)],
        "faults": [
            replace(restart, name=f"a replica restarts; {restart.name}", restart=True),
            replace(slow, name=f"a replica is half as fast; {slow.name}", slow=2.0),
        ],
        "adapters": [unshared_case(60, few, adapters=20)],
    }


# --- What is found ---


@dataclass
class Outcome:
    """ttfts, gaps: seconds to the first token, and between tokens, of each request, in order;
    math.inf: failed. rate: output tokens/s.
    """

    ttfts: list[float]
    gaps: list[float]
    rate: float
    hit: float
    hot: float

    @property
    def failed(self) -> float:
        return sum(map(math.isinf, self.ttfts)) / len(self.ttfts)

    def ttft(self, share: float) -> float:
        return percentile(self.ttfts, share)


def percentile(values: list[float], share: float) -> float:
    """values: in order."""
    return values[min(len(values) - 1, int(share * len(values)))]


def simulate(case: Case, arm: str, seeds: Iterable[int]) -> Outcome:
    """Percentiles are of all seeds' requests, the other figures means."""
    ttfts, gaps, rates, hots = [], [], [], []
    cached = prompt = 0
    began = case.seconds * WARM_UP
    for seed in seeds:
        fleet = Fleet(case, arm, seed)
        fleet.run()
        counted = [it for it in fleet.requests if it.at >= began]
        for it in counted:
            cached += it.cached
            prompt += it.tokens
            failed = math.isinf(it.end)
            ttfts.append(math.inf if failed else it.first - it.at)
            gaps.append(math.inf if failed else (it.end - it.first) / (it.output - 1))
        output = sum(it.output for it in fleet.requests if began <= it.end <= case.seconds)
        rates.append(output / (case.seconds - began))
        most = max(Counter(it.replica for it in counted).values())
        hots.append(REPLICAS * most / len(counted))
    rate, hot = statistics.mean(rates), statistics.mean(hots)
    return Outcome(sorted(ttfts), sorted(gaps), rate, cached / prompt, hot)


COLUMNS = ("", "TTFT P50", "P90", "P99", "gap P90", "tokens/s", "hit", "hot", "failed")


def cells(arm: str, it: Outcome) -> list[str]:
    ttfts = [f"{it.ttft(share):.3f}" for share in (0.5, 0.9, 0.99)]
    gap = f"{percentile(it.gaps, 0.9) * 1e3:.0f} ms"
    failed = f"{it.failed:.1%}" if it.failed else "-"
    return [arm, *ttfts, gap, f"{it.rate:,.0f}", f"{it.hit:.2f}", f"{it.hot:.2f}", failed]


def line(row: Sequence[str]) -> str:
    return f"{row[0]:18}" + "".join(f"{cell:>10}" for cell in row[1:])


Found = list[dict[str, Outcome]]
"""For each case, by arm."""


def run(cases: Sequence[Case], arms: Sequence[str], seeds: int) -> Found:
    """What each arm makes of each case; printed as it comes."""
    found: Found = []
    for case in cases:
        users = case.requests is chat
        print(f"\n{case.name}; {case.load:g} {'users' if users else 'requests/s'}")
        print(line(COLUMNS), flush=True)
        found.append({})
        for arm in arms:
            outcome = simulate(case, arm, range(seeds))
            found[-1][arm] = outcome
            print(line(cells(arm, outcome)), flush=True)
    return found


# --- Targets ---


class Target(NamedTuple):
    """What is wanted of each of our arms, and what was found; changes are against round-robin."""

    what: str
    wanted: float
    arm: str
    found: float
    unit: str = "%"

    @property
    def met(self) -> bool:
        more_is_better = "tokens/s" in self.what
        return self.found >= self.wanted if more_is_better else self.found <= self.wanted

    def row(self) -> str:
        form = "{:+.1%}" if self.unit == "%" else "{:.2f}"
        found, wanted = form.format(self.found), form.format(self.wanted)
        return f"{self.what:64}{self.arm:14}{wanted:>9}{found:>9}  {'met' if self.met else 'NOT'}"


def limit(case: Case) -> float:
    """Seconds for the first token: 2.5 times what an idle replica takes that has nothing cached."""
    request = next(case.requests(random.Random(0), case.load))
    it = case.profile
    steps = -(-request.tokens // BUDGET)
    return 2.5 * (it.overhead_s + steps * it.step_s + request.tokens / it.rate)


def knee(cases: Sequence[Case], found: Found, arm: str) -> int:
    """The last case in which nine of ten requests of the arm have their first token in time."""
    within = [it[arm].ttft(0.9) <= limit(case) for case, it in zip(cases, found, strict=True)]
    return max(0, [*within, False].index(False) - 1)


def of_documents(
    size: str, cases: Sequence[Case], found: Found, wanted: tuple[float, float, float]
) -> Iterator[Target]:
    """TTFT at round-robin's knee; tokens/s at each one's own."""
    at = knee(cases, found, BASE)
    base = found[at][BASE]
    for arm in OURS:
        for share, most in zip((0.5, 0.9), wanted, strict=False):
            what = f"{size}, {cases[at].load:g} requests/s: TTFT P{share * 100:.0f}"
            change = found[at][arm].ttft(share) / base.ttft(share) - 1
            yield Target(what, most, arm, change)
        own = knee(cases, found, arm)
        loads = f"{cases[own].load:g} : {cases[at].load:g} requests/s"
        what = f"{size}, most tokens/s with P90 <= {limit(cases[0]):.1f} s ({loads})"
        yield Target(what, wanted[2], arm, found[own][arm].rate / base.rate - 1)


def targets(cases: dict[str, list[Case]], found: dict[str, Found]) -> Iterator[Target]:
    """The figures that are published of HyperPod's routing, and two limits on harm."""
    if "8k" in found:
        yield from of_documents("8k", cases["8k"], found["8k"], (-0.72, -0.40, 0.24))
    if "64k" in found:
        yield from of_documents("64k", cases["64k"], found["64k"], (-0.94, -0.35, 0.38))
    for arm in OURS:
        for case, it in zip(cases["unshared"], found.get("unshared", ()), strict=False):
            base, ours = it[BASE], it[arm]
            worse = {
                "TTFT P50": ours.ttft(0.5) / base.ttft(0.5) - 1,
                "TTFT P90": ours.ttft(0.9) / base.ttft(0.9) - 1,
                "seconds for each token": base.rate / ours.rate - 1,
            }
            for what, change in worse.items():
                yield Target(f"unshared, {case.load:g} requests/s: {what}", 0.02, arm, change)
        for case, it in zip(cases["system"], found.get("system", ()), strict=False):
            shared = case.name.split("; ")[1]
            yield Target(f"{shared}: hot", 1.1, arm, it[arm].hot, "")


def plot(cases: dict[str, list[Case]], found: dict[str, Found], file: Path) -> None:
    """TTFT P50 (solid) and P90 (dashed) by offered load."""
    figure = Figure(figsize=(11, 4))
    sizes = [size for size in ("8k", "64k") if size in found]
    for place, size in enumerate(sizes, start=1):
        axes = figure.add_subplot(1, len(sizes), place)
        loads = [case.load for case in cases[size]]
        for colour, arm in enumerate(found[size][0]):
            for share, style in ((0.5, "-"), (0.9, "--")):
                ttfts = [it[arm].ttft(share) for it in found[size]]
                label = arm if style == "-" else None
                axes.plot(loads, ttfts, style, color=f"C{colour}", label=label)
        axes.set_yscale("log")
        axes.set_ylim(0.05, 60)
        axes.set_title(f"documents of {size} tokens")
        axes.set_xlabel("requests/s")
        axes.set_ylabel("TTFT in s: P50, and P90 dashed")
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", nargs="+", choices=workloads(quick=False))
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="round-robin and ours come too")
    parser.add_argument("--seeds", type=int, help="runs of each (default: 3)")
    parser.add_argument("--quick", action="store_true", help="a few seconds: less of everything")
    parser.add_argument("--plot", type=Path, help="a file for TTFT by load, like routing.png")
    options = parser.parse_args()
    cases = workloads(options.quick)
    seeds = options.seeds or (1 if options.quick else 3)
    print(f"{REPLICAS} replicas, {seeds} seeds; times in s")
    found: dict[str, Found] = {}
    for name in options.workload or (QUICK if options.quick else cases):
        fewer = FEW if options.quick or name in SWEPT else ("cache_aware",)
        arms = options.arms or (ARMS if name in ALL_ARMS and not options.quick else fewer)
        found[name] = run(cases[name], [it for it in ARMS if it in (BASE, *OURS, *arms)], seeds)
    print("\nTargets, against round-robin with the same requests: wanted, found")
    reached = [*targets(cases, found)]
    for target in reached:
        print(target.row())
    if options.plot:
        plot(cases, found, options.plot)
    missed = sum(not target.met for target in reached)
    if missed and not options.quick:  # which is too short for such figures
        sys.exit(f"{missed} of {len(reached)} targets not met")


if __name__ == "__main__":
    main()
