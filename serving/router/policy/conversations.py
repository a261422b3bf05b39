# SPDX-License-Identifier: Apache-2.0
"""Conversations, and the replicas that computed their last turns.

A conversation's prompts grow, so a strategy that knows the caches follows its turns anyway. A
sub-agent's first prompt has nothing in common with its parent's. Among replicas whose costs are
taken for equal, such a prompt goes beside its parent. This is never a rule: one busy conversation
cannot pin a fleet.
"""

import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from serving.router.policy.candidates import Candidates
from serving.router.policy.policies import (
    NEAR,
    Choice,
    Policy,
    PrefixAware,
    cost_of,
    in_time,
)
from serving.router.policy.prefix_index import covered
from serving.router.policy.replica_load import Load
from serving.router.policy.routing_request import RoutingRequest

LIMIT = 50_000
"""Conversations that are remembered: those used last. Each takes up to 0.7 KB."""
PARTS = 4
"""Points of a prompt that are remembered, to find how much of it a later prompt begins with."""


class _Turn(NamedTuple):
    """The last turn of a conversation.

    replica: its name, "" if that has restarted. points: after how many links of its
    prompt's chain which link comes.
    """

    replica: str
    points: tuple[tuple[int, int], ...]


class Conversations:
    """Places requests near the last turns of their conversations."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, _Turn] = OrderedDict()

    def choose(
        self, policy: Policy, request: RoutingRequest, replicas: Sequence[Load], now: float
    ) -> Choice:
        """Return the policy's choice, or the replica near the request if that costs as much (NEAR).
        Only strategies by cost are corrected. As Policy.choose().
        """
        choice = policy.choose(request, replicas, now)
        if not isinstance(policy, PrefixAware):
            return choice
        near = self._near(request, replicas, choice)
        if near is None or near is choice.replica:
            return choice
        other = policy.at(request, near, now)
        dearer = cost_of(request, *other) - cost_of(request, *choice)
        late = not in_time(request, *other, now) and in_time(request, *choice, now)
        return choice if dearer > NEAR or late else other

    def _near(
        self, request: RoutingRequest, replicas: Sequence[Load], choice: Choice
    ) -> Load | None:
        """The replica of the conversation's last turn, or else of its parent's. For a prompt that
        is new to all replicas, the one that its `prompt_cache_key` belongs to.
        """
        intent, candidates = request.intent, Candidates.of(replicas)
        for conversation in (request.session, intent.parent):
            if conversation and (found := candidates.named(self.replica(conversation))):
                return found
        if intent.bucket and not choice.held.tokens:
            return next(candidates.order(intent.bucket), None)
        return None

    def replica(self, conversation: str) -> str:
        """The name of the replica that had the last turn, "" if it has restarted since."""
        turn = self._turns.get(conversation)
        return turn.replica if turn else ""

    def repeated(self, request: RoutingRequest) -> int | None:
        """About how many of the prompt's first tokens the conversation's last turn had as well.
        None if there was none, or if the strategy reads no prompts.
        """
        turn = self._turns.get(request.session)
        if not turn or not turn.points:
            return None
        chain = request.chain
        same = [n for n, link in turn.points if n <= len(chain) and chain[n - 1] == link]
        return covered(max(same, default=0))

    def learn(self, request: RoutingRequest, replica: str) -> None:
        """The request goes to the replica."""
        if not request.session:
            return
        if request.intent.final:
            self._turns.pop(request.session, None)
            return
        chain = request.chain
        points = tuple([(n, chain[n - 1]) for n in _lengths(len(chain))])
        self._turns[request.session] = _Turn(replica, points)
        self._turns.move_to_end(request.session)
        if len(self._turns) > LIMIT:
            self._turns.popitem(last=False)

    def forget(self, replica: str) -> None:
        """The replica has restarted, or is gone."""
        theirs = [it for it, turn in self._turns.items() if turn.replica == replica]
        for conversation in theirs:
            self._turns[conversation] = self._turns[conversation]._replace(replica="")


@functools.lru_cache(maxsize=1024)  # the longest chain that the router reads has fewer links
def _lengths(links: int) -> tuple[int, ...]:
    """The points of a chain with this number of links, as numbers of links."""
    return tuple(sorted({links * part // PARTS for part in range(1, PARTS + 1)} - {0}))
