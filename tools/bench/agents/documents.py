# SPDX-License-Identifier: Apache-2.0
"""The cost of documents in different orders: the share of their tokens that an engine computes.

A request has some of a store's documents. Popularity is Zipf's, and lengths are log-normal. The
engine is a set of prompts' beginnings that were used last, in whole documents; it has no model.

"random" is the order of a client that keeps none. "canonical" is the server's (document_order).
"popular" has the most popular document first: what a client reaches that knows the popularity.
"Together": the documents of a request are always requested together, in any order. "More each
turn": a request is a turn of a conversation, with one document more than the turn before. There
"random" is the order of the turns.
"""

import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from serving.cache_hints import documents
from serving.protocol import CHAT_COMPLETIONS
from tests.support.harness.stats import spread

REQUESTS, SEEDS = 4000, 5
TOKENS = (600, 0.6)
"""The median and the sigma of a document's tokens."""
TURNS, LIVE = 6, 24
"""Turns of a conversation, and conversations at a time."""


class Scenario(NamedTuple):
    """some: documents of a request, or of a first turn. of: documents of the store. zipf: the
    exponent of their popularity. size: of the cache, in tokens of all documents; 0 is endless.
    kind: "together", "more each turn", or "".
    """

    some: int
    of: int
    zipf: float = 1.0
    size: float = 0
    kind: str = ""

    def __str__(self) -> str:
        named = f"{self.some} of {self.of:,}, Zipf {self.zipf:g}"
        return f"{named}, {self.kind}" if self.kind else named


SCENARIOS = (
    *(Scenario(some, of) for some, of in ((3, 50), (5, 200), (10, 200))),
    Scenario(5, 1000, 0.8),
    *(Scenario(some, of, size=2) for some, of in ((3, 50), (5, 200), (10, 200))),
    *(Scenario(5, 200, size=size, kind="together") for size in (0, 2)),
    *(Scenario(3, 200, size=size, kind="more each turn") for size in (0, 2)),
)


class Cache:
    """The beginnings of prompts that were used last. room: tokens that it holds, or None."""

    def __init__(self, tokens: Sequence[int], room: float | None) -> None:
        self._tokens = tokens
        self._room = room
        self._kept: OrderedDict[int, int] = OrderedDict()  # a beginning's hash → its last tokens
        self._used = 0

    def computed(self, prompt: Sequence[int]) -> int:
        """Return the tokens of a prompt's documents that are computed, and keep the prompt."""
        chain = [*itertools.accumulate(prompt, lambda so_far, it: hash((so_far, it)), initial=0)]
        computed, hit = 0, True
        for link, document in zip(chain[1:], prompt, strict=True):
            hit = hit and link in self._kept
            if not hit:
                computed += self._tokens[document]
            if link not in self._kept:
                self._kept[link] = self._tokens[document]
                self._used += self._tokens[document]
        for link in reversed(chain[1:]):  # the end of a prompt is evicted before its beginning
            self._kept.move_to_end(link)
        while self._room is not None and self._used > self._room:
            self._used -= self._kept.popitem(last=False)[1]
        return computed


def canonical(prompt: Sequence[int]) -> list[int]:
    body = {"documents": [{"text": f"document {it}"} for it in prompt]}
    named = documents.order(CHAT_COMPLETIONS, body, 0)
    return [prompt[int(at)] for at in named.split(",")]


ORDERS: dict[str, Callable[[Sequence[int]], Sequence[int]]] = {
    "random": lambda prompt: prompt,
    "canonical": canonical,
    "popular": sorted,  # a document's number is its rank
}


def requests(it: Scenario, rng: random.Random, count: int) -> Iterator[list[int]]:
    """Yield the documents of each request, by their ranks, in random order."""
    sets = it.of // it.some if it.kind == "together" else it.of
    weights = [*itertools.accumulate((rank + 1) ** -it.zipf for rank in range(sets))]

    def drawn(some: int) -> list[int]:
        found: dict[int, None] = {}
        while len(found) < some:
            one = rng.choices(range(sets), cum_weights=weights)[0]
            found |= dict.fromkeys(range(one, it.of, sets) if it.kind == "together" else [one])
        return rng.sample([*found], some)

    live = [(drawn(it.some + TURNS - 1), rng.randrange(TURNS)) for _ in range(LIVE)]
    for _ in range(count):
        if it.kind != "more each turn":
            yield drawn(it.some)
            continue
        at = rng.randrange(LIVE)
        found, turn = live[at]
        yield found[: it.some + turn]
        again = turn + 1 == TURNS
        live[at] = (drawn(it.some + TURNS - 1), 0) if again else (found, turn + 1)


def shares(it: Scenario, seed: int, count: int) -> list[float]:
    """Return the share of the documents' tokens that is computed, for each of ORDERS."""
    rng = random.Random(seed)
    middle, sigma = TOKENS
    tokens = [max(int(middle * rng.lognormvariate(0, sigma)), 1) for _ in range(it.of)]
    sent = [*requests(it, rng, count)]
    total = sum(tokens[document] for prompt in sent for document in prompt)
    room = it.size * sum(tokens) if it.size else None
    caches = [Cache(tokens, room) for _ in ORDERS]
    return [
        sum(cache.computed(order(prompt)) for prompt in sent) / total
        for cache, order in zip(caches, ORDERS.values(), strict=True)
    ]


def main(count: int = REQUESTS) -> None:
    names = " | ".join(ORDERS)
    print(f"| documents | cache | {names} | canonical ÷ random |\n|{'---|' * (len(ORDERS) + 3)}")
    for it in SCENARIOS:
        found = [shares(it, seed, count) for seed in range(SEEDS)]
        columns = [spread(values, ".2f") for values in zip(*found, strict=True)]
        ratio = spread([second / first for first, second, *_ in found], ".2f")
        print(f"| {it} | {it.size or 'endless'} | {' | '.join(columns)} | {ratio} |", flush=True)
