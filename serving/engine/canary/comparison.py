# SPDX-License-Identifier: Apache-2.0
"""Whether KV that was loaded from the tiers gives other answers than KV that was computed: pure."""

import dataclasses
from collections import deque
from collections.abc import Mapping

WITHOUT_TIERS = "slipway_without_tiers"
"""The key of a request's kv_transfer_params that has it neither looked up in the tiers nor stored.
"""

MOST_DIFFERENT = 3
OF_COMPARED = 20


@dataclasses.dataclass(frozen=True)
class Verification:
    """every: one hit of this many is verified. top, any: differences of log probabilities (of base
    e) that count. tiers: the tiers' names, for logs and metrics.
    """

    every: int
    top: float
    any: float
    tiers: str


Candidates = Mapping[int, float]
"""Token → its log probability, of the most probable ones."""


def differs(loaded: Candidates, computed: Candidates, top: float, any: float) -> bool:
    """Whether two first tokens are different: the most probable token is another and its log
    probability differs by more than `top`, or that of any token by more than `any`.

    A token that only one side has counts with the least log probability that it can have lost.
    """
    if not loaded or not computed:
        return loaded != computed
    before, after = (max(it, key=it.__getitem__) for it in (loaded, computed))
    if before != after and max(_apart(loaded, computed, it) for it in (before, after)) > top:
        return True
    return any_apart(loaded, computed) > any


def any_apart(loaded: Candidates, computed: Candidates) -> float:
    """The largest difference of a token's log probabilities, as far as it is known."""
    return max(_apart(loaded, computed, it) for it in {*loaded, *computed})


def _apart(one: Candidates, other: Candidates, token: int) -> float:
    if token in one and token in other:
        return abs(one[token] - other[token])
    known, unknown = (one, other) if token in one else (other, one)
    return max(known[token] - min(unknown.values()), 0)


class Tally:
    """The results of the latest comparisons."""

    def __init__(self) -> None:
        self._last: deque[bool] = deque(maxlen=OF_COMPARED)
        self.off = False
        """Whether the tiers are off; they stay off until a restart."""

    def add(self, different: bool) -> None:
        self._last.append(different)
        self.off = self.off or sum(self._last) >= MOST_DIFFERENT
