# SPDX-License-Identifier: Apache-2.0
"""Hash chains, which compare a request's prompt with the caches of replicas.

They use Python's own hash: it is fast, and hashes never leave the router's processes, which are
forked from one and therefore hash equally.
"""

import bisect
import struct
from collections.abc import Callable, Sequence


def links(content: bytes | memoryview, width: int, start: int) -> list[int]:
    """A hash for each whole piece of `width` bytes, which covers all before it, and the start."""
    chain = []
    whole = memoryview(content)[: len(content) // width * width]
    for (piece,) in struct.iter_unpack(f"{width}s", whole):
        start = hash((start, piece))
        chain.append(start)
    return chain


def leading(chain: Sequence[int], missing: Callable[[int], bool]) -> int:
    """How many of the chain's first links are not missing. No link is there without all before it,
    so that bisection finds the first that is missing.
    """
    return bisect.bisect_left(chain, True, key=missing)
