# SPDX-License-Identifier: Apache-2.0
"""Whether another replica than the answering one computes a prompt, and which one."""

from collections.abc import Sequence

from serving.router.policy.policies import Choice, Policy
from serving.router.policy.replica_load import Load
from serving.router.policy.routing_request import RoutingRequest

LONGER = 2.0
"""Limit of the additional wait at a prefill replica, beyond the wait at the answering replica, as a
multiple of an idle replica's time to compute the prompt.
"""


def prefills(
    policy: Policy,
    request: RoutingRequest,
    decoding: Choice,
    prefilling: Sequence[Load],
    now: float,
) -> Choice | None:
    """The replica that computes the prompt first. None if the answering replica would be done much
    sooner. decoding: the answering replica. prefilling: prefill replicas, at least one.
    """
    choice = policy.choose(request, prefilling, now)
    uncached = request.tokens - decoding.held.tokens
    if choice.replica.queued - decoding.replica.queued > LONGER * uncached:
        return None
    return choice
