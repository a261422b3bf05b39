# SPDX-License-Identifier: Apache-2.0
"""What each replica was sent before: hashes of prompts, about as many as its KV cache holds."""

from collections import OrderedDict
from collections.abc import Sequence

from serving.router.policy.hash_chain import leading, links

CHUNK = 512
"""Bytes of a prompt in one link of a chain, some 128 tokens."""
BYTES_PER_TOKEN = 4
"""Of text and its JSON, roughly, for tokenizers of present models."""
TTL_S = 1800.0
"""A prompt that was not sent for so long is taken for evicted."""
DEFAULT_TOKENS = 500_000
"""What a replica is taken to keep in its KV cache where it does not say."""


def chain(prompt: bytes, seed: object) -> list[int]:
    """A link for each whole chunk of the prompt. seed: what else has to be equal."""
    return links(prompt, CHUNK, hash(seed))


class PrefixIndex:
    """The prompts that each replica was sent, and most likely still has in its cache.

    It keeps for each replica the links of at most as many tokens as its KV cache holds, and drops
    the least recently used first.
    """

    def __init__(self) -> None:
        self._links: dict[str, OrderedDict[int, float]] = {}
        self._capacity: dict[str, int] = {}

    def matched(self, replica: str, chain: Sequence[int], now: float) -> int:
        """How many of the chain's first links the replica was sent."""
        until = self._links.get(replica)
        if not until:
            return 0
        # A link's predecessors are always used no earlier than itself, so that whatever is there
        # is there with all before it.
        return leading(chain, lambda link: until.get(link, 0.0) <= now)

    def insert(self, replica: str, chain: Sequence[int], now: float) -> None:
        """The replica is sent a prompt with this chain now (seconds of any one clock)."""
        known = self._links.setdefault(replica, OrderedDict())
        until = now + TTL_S
        for link in reversed(chain):
            known[link] = until
            known.move_to_end(link)
        capacity = self._capacity.get(replica, DEFAULT_TOKENS) * BYTES_PER_TOKEN // CHUNK
        while len(known) > capacity:
            known.popitem(last=False)

    def resize(self, replica: str, tokens: int) -> None:
        """The replica's KV cache holds so many tokens."""
        self._capacity[replica] = tokens

    def forget(self, replica: str) -> None:
        """The replica has started anew, or is gone."""
        self._links.pop(replica, None)
        self._capacity.pop(replica, None)
