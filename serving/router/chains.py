"""Hash chains: how what replicas have is compared with what a request brings.

Python's own hash: it is fast, and what is hashed never leaves the router's processes, which are
forked from one and so hash alike.
"""

import bisect
from collections.abc import Callable, Sequence


def links(content: bytes, width: int, start: int) -> list[int]:
    """A hash for each whole piece of so many bytes, which covers all before it, and the start."""
    found = []
    for place in range(0, len(content) - width + 1, width):
        start = hash((start, content[place : place + width]))
        found.append(start)
    return found


def leading(chain: Sequence[int], missing: Callable[[int], bool]) -> int:
    """How many of the chain's first links are there, where none is without all before it: so that
    halving finds the first that is missing.
    """
    return bisect.bisect_left(chain, True, key=missing)
