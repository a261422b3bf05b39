# SPDX-License-Identifier: Apache-2.0
"""The workloads: streams of requests, and the cases that are made of them."""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from tools.routing_sim.model import B32, B70, REPLICAS, Case, Parts, Request


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


def readers(rng: random.Random, load: float, *, length: int, number: int) -> Iterator[Request]:
    """Users who ask one question after the other about documents, Zipf(1)."""
    weights = list(itertools.accumulate(1 / rank for rank in range(1, number + 1)))

    def ask(drawn: random.Random, now: float) -> Request:
        (document,) = drawn.choices(range(1, number + 1), cum_weights=weights)
        name = _name(drawn)
        parts = ((document, length), (name, 200))
        return Request(now, parts, 200, session=str(name), after=partial(ask, drawn))

    for at in sorted(rng.uniform(0, 5) for _ in range(round(load))):
        yield ask(random.Random(rng.random()), at)


def chat(rng: random.Random, load: float) -> Iterator[Request]:
    """Users of one application: 8 turns, then a new conversation."""
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


def unshared_case(load: float, count: int, system: int = 0) -> Case:
    shared = f"the same {4 * system:,} characters before each; " if system else ""
    requests = partial(unshared, system=system)
    return Case(f"unshared prompts; {shared}32B", B32, requests, load, count / load)


def adapters_case(
    adapters: int, slots: int, load: float, count: int, replicas: int = REPLICAS
) -> Case:
    """slots: adapters that each replica keeps."""
    name = f"{adapters:,} LoRA adapters, {slots} fit on each of {replicas}; unshared prompts; 32B"
    requests = partial(unshared, adapters=adapters)
    return Case(*(name, B32, requests, load, count / load), replicas=replicas, adapter_slots=slots)


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
        "adapters": [
            adapters_case(20, 8, 60, few),
            adapters_case(2_000, 64, 12, few, replicas=3),
            adapters_case(2_000, 700, 12, many, replicas=3),
        ],
    }
