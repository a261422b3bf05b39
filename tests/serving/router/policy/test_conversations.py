# SPDX-License-Identifier: Apache-2.0
"""Turns of conversations and of sub-agents, and the replicas that they go to."""

import json

import pytest

from serving.cache_hints.intent import digest
from serving.router.policy import conversations, policies
from serving.router.policy.conversations import Conversations
from serving.router.policy.policies import PrefixAware, RoundRobin, Session
from serving.router.policy.prefix_index import PrefixIndex, covered, within
from serving.router.policy.replica_load import Load
from serving.router.policy.routing_request import RequestReader
from serving.router.policy.tiers import Capacity

read = RequestReader("prefixaware", None, ()).read


class Fleet:
    """Replicas, a strategy, and the conversations."""

    def __init__(self, policy=None):
        self.loads = [Load(f"replica-{number}") for number in range(4)]
        self.policy = policy or PrefixAware(PrefixIndex())
        self.conversations = Conversations()
        self.now = 0.0
        for load in self.loads:
            if isinstance(self.policy, PrefixAware):
                self.policy.index.resize(load.name, Capacity())

    def ask(self, text, among=None, **headers):
        """The choice for a prompt. The prompt then counts as sent there."""
        self.now += 1
        names = {name.replace("_", "-").encode(): it.encode() for name, it in headers.items()}
        body = json.dumps({"prompt": text}).encode()
        request = read(names, body)
        chosen = self.conversations.choose(self.policy, request, among or self.loads, self.now)
        self.repeated = self.conversations.repeated(request)
        self.policy.learn(request, chosen.replica.name, self.now)
        self.conversations.learn(request, chosen.replica.name)
        return chosen.replica


LONG = "word " * 2000


def test_a_turn_follows_the_last_one_even_where_the_prompt_is_another():
    fleet = Fleet()
    first = fleet.ask(LONG, x_session_id="s")
    for number in range(8):
        fleet.ask(f"{number} {LONG}", x_session_id=f"other-{number}")
        assert fleet.ask(f"compacted {number} {LONG}", x_session_id="s") is first


def test_a_sub_agent_is_placed_beside_its_parent():
    fleet = Fleet()
    parent = fleet.ask(LONG, x_claude_code_session_id="s")
    for number in range(8):
        headers = {"x_claude_code_session_id": "s", "x_claude_code_agent_id": f"a{number}"}
        assert fleet.ask(f"agent {number} {LONG}", **headers) is parent


def test_a_busy_replica_gets_neither_turns_nor_sub_agents():
    """Conversations only decide ties."""
    fleet = Fleet()
    first = fleet.ask("short", x_dynamo_session_id="s")
    first.queued = 10 * policies.NEAR
    assert fleet.ask("short too", x_dynamo_session_id="s") is not first
    fleet = Fleet()
    first = fleet.ask(LONG, x_dynamo_session_id="s")
    first.queued = 10 * policies.NEAR
    child = {"x_dynamo_session_id": "c", "x_dynamo_parent_session_id": "s"}
    assert fleet.ask(f"child {LONG}", **child) is not first


def test_a_replica_that_drains_or_dies_is_not_chosen_and_forgotten():
    fleet = Fleet()
    first = fleet.ask(LONG, x_session_id="s")
    others = [it for it in fleet.loads if it is not first]
    second = fleet.ask(LONG, among=others, x_session_id="s")
    assert second in others
    assert fleet.conversations.replica(digest(None, "s")) == second.name
    fleet.policy.forget(second.name)
    fleet.conversations.forget(second.name)
    assert fleet.conversations.replica(digest(None, "s")) == ""
    assert fleet.ask(LONG, x_session_id="s") is first
    assert fleet.repeated == covered(within(len(LONG) // 4))


def test_prompts_of_one_key_go_to_one_replica_while_none_has_them():
    fleet = Fleet()
    chosen = set()
    for number in range(12):
        body = json.dumps({"prompt": f"{number} {LONG}", "prompt_cache_key": "team"}).encode()
        request = read({}, body)
        chosen.add(fleet.conversations.choose(fleet.policy, request, fleet.loads, 0).replica.name)
    assert len(chosen) == 1


@pytest.mark.parametrize("policy", [RoundRobin(), Session()])
def test_other_strategies_choose_as_ever(policy):
    fleet = Fleet(policy)
    chosen = {fleet.ask("short", x_session_id="s").name for _ in range(8)}
    assert len(chosen) == (4 if isinstance(policy, RoundRobin) else 1)


def test_the_prefix_that_a_turn_shares_with_the_last_one():
    fleet = Fleet()

    def repeated(text, session="s"):
        fleet.ask(text, x_session_id=session)
        return fleet.repeated

    assert repeated(LONG) is None
    assert repeated(f"{LONG} and more {LONG}") == covered(within(len(LONG) // 4))
    assert 0 < repeated(f"{LONG} and something else") <= len(LONG) // 4
    assert repeated(f"compacted {LONG}") == 0
    assert repeated(LONG, "other") is None


def test_an_ended_conversation_is_forgotten_and_so_are_the_oldest(monkeypatch):
    monkeypatch.setattr(conversations, "LIMIT", 3)
    fleet = Fleet()
    fleet.ask(LONG, x_session_id="s")
    fleet.ask(LONG, x_session_id="s", x_slipway_session_final="true")
    assert fleet.conversations.replica(digest(None, "s")) == ""
    for number in range(5):
        fleet.ask(LONG, x_session_id=str(number))
    known = [bool(fleet.conversations.replica(digest(None, str(it)))) for it in range(5)]
    assert known == [False, False, True, True, True]
    fleet.ask(LONG, x_session_id="2")
    fleet.ask(LONG, x_session_id="5")
    known = [bool(fleet.conversations.replica(digest(None, str(it)))) for it in range(6)]
    assert known == [False, False, True, False, True, True]


def test_the_replica_of_the_last_turn_is_taken_with_what_it_holds(monkeypatch):
    """No second choice is made for it."""
    fleet = Fleet()
    first = fleet.ask(LONG, x_session_id="s")
    other = next(it for it in fleet.loads if it is not first)
    monkeypatch.setattr(fleet.policy, "choose", lambda *_: policies.Choice(other))
    request = read({b"x-session-id": b"s"}, json.dumps({"prompt": LONG}).encode())
    found = fleet.conversations.choose(fleet.policy, request, fleet.loads, fleet.now)
    assert found.replica is first
    assert found.held.tokens == covered(within(len(LONG) // 4))
