# SPDX-License-Identifier: Apache-2.0
"""Whether another replica than the answering one computes a prompt, and which one."""

from collections.abc import Sequence

from serving.router.policy.policies import Choice, Policy
from serving.router.policy.replica_load import Load
from serving.router.policy.routing_request import RoutingRequest

LONGER = 2.0
"""How many times what an idle replica takes to compute the prompt it may wait at a replica that
prefills, beyond its wait at the one that answers.
"""


def prefills(
    policy: Policy,
    request: RoutingRequest,
    decoding: Choice,
    prefilling: Sequence[Load],
    now: float,
) -> Choice | None:
    """The replica to compute the prompt first, of those that prefill, at least one. None where the
    one that answers would be done so much sooner that it had better compute it itself. decoding:
    that one.
    """
    choice = policy.choose(request, prefilling, now)
    uncached = request.tokens - decoding.held.tokens
    if choice.replica.queued - decoding.replica.queued > LONGER * uncached:
        return None
    return choice
