# SPDX-License-Identifier: Apache-2.0
"""Values of the simulation: engines' profiles, requests, what strategies know of them, cases."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from serving.router.policy import kv_index
from serving.router.policy.prefix_index import BYTES_PER_TOKEN, CHUNK, covered, within
from serving.router.policy.routing_request import RoutingRequest

REPLICAS = 7
BLOCK = CHUNK // BYTES_PER_TOKEN
"""Tokens of one of the first links of the router's chains; the simulated engines' blocks are as
large.
"""
_TOKEN = (1 << 31) - 1


def block_tokens(links: Sequence[int]) -> list[int]:
    """The tokens of blocks, for KV events: each block repeats one, the lower bits of its hash."""
    return [link & _TOKEN for link in links for _ in range(BLOCK)]


@dataclass(frozen=True)
class Profile:
    """An engine.

    rate: tokens/s of prompts. step_s: seconds of a step. context_s: seconds for each token of
    context that a step reads. overhead_s: seconds for each request. kv_tokens: tokens that its KV
    cache holds. kv_bytes: bytes of a token's KV.
    """

    rate: float
    step_s: float
    context_s: float
    overhead_s: float
    kv_tokens: int
    kv_bytes: int


B32 = Profile(15_926, 0.010, 0.28e-3 / 7000, 0.045, 307_000, 256 * 1024)
B70 = Profile(25_000, 0.010, 0.12e-3 / 7000, 0.045, 500_000, 320 * 1024)


@dataclass(frozen=True)
class Tier:
    """tokens: that it keeps. rate: bytes/s of a link, each way. latency_s: of a load. one_link:
    whether all replicas share one link, or each has its own.
    """

    tokens: int
    rate: float
    latency_s: float
    one_link: bool = False


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


def graduated(links: Sequence[int]) -> list[int]:
    """The links of a prompt's blocks at the places of the links in the router's chain."""
    return [links[covered(n) // BLOCK - 1] for n in range(1, within(len(links) * BLOCK) + 1)]


@dataclass(slots=True, eq=False)
class Request:
    """A client's request and its result. after: the request that follows its end, and when.
    cached, of_l1, of_l2: prompt tokens from the engine's cache and from each tier. tenant: whose it
    is. sent: when the router sent it to a replica.
    """

    at: float
    parts: Parts
    output: int
    session: str = ""
    tenant: str = ""
    adapter: int = 0
    after: "Callable[[float], Request | None] | None" = None
    sent: float = math.inf
    first: float = math.inf
    end: float = math.inf
    cached: int = 0
    adapter_loads: int = 0
    of_l1: int = 0
    of_l2: int = 0
    replica: str = ""

    @property
    def tokens(self) -> int:
        return sum(length for _, length in self.parts)


class Prompt(RoutingRequest, frozen=True, kw_only=True, dict=True):
    """The facts that strategies know of a request; the rivals also know its text."""

    parts: Parts

    @classmethod
    def of(
        cls,
        request: Request,
        links: Sequence[int],
        tokenized: bool,
        within: float | None = None,
    ) -> "Prompt":
        """links: a chain of the request and its answer."""
        tokens = request.tokens
        links = links[: tokens // BLOCK]
        keys = block_tokens(links) if tokenized else ()
        return cls(
            tokens=tokens,
            chain=graduated(links),
            blocks={BLOCK: kv_index.chain(keys, BLOCK, kv_index.seed())} if tokenized else None,
            plain=True,
            adapter=f"adapter{request.adapter}" if request.adapter else "",
            session=request.session,
            within=within,
            parts=request.parts,
        )

    @cached_property
    def fine(self) -> list[int]:
        """A chain with links of 128 characters."""
        return chain(self.parts, 128 // BYTES_PER_TOKEN)


@dataclass(frozen=True)
class Apart:
    """replicas: that only prefill, of all. least: uncached tokens of prompts that they compute."""

    replicas: int
    least: int


@dataclass(frozen=True)
class Case:
    """A workload at a load, which is requests/s or users. slow: how many times as long the first
    replica takes. restart: whether one is lost in the middle of the measurement. replicas: how many
    there are; adapter_slots: adapters that each keeps. l1: memory behind each engine's cache;
    l2: the store behind all of them. apart: prefill and decode apart. slots: if a replica has this
    number of requests, the router holds the next ones; 0 for no limit. within: the objective for
    the first token, in seconds.
    """

    name: str
    profile: Profile
    requests: Callable[[random.Random, float], Iterator[Request]]
    load: float
    seconds: float
    slow: float = 1.0
    restart: bool = False
    replicas: int = REPLICAS
    adapter_slots: int = 8
    l1: Tier | None = None
    l2: Tier | None = None
    apart: Apart | None = None
    slots: int = 0
    within: float | None = None
