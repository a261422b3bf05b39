# SPDX-License-Identifier: Apache-2.0
"""The router's bench with prefix caches: its stand-in replica, in this process, and its figures."""

import dataclasses
import json

import httpx
import pytest
import uvloop

from tests.support.harness import ports
from tests.support.harness.metrics import total
from tools.bench.router import caching_replica
from tools.bench.router.caches import ONE_SHOTS, OUTPUT, RATE, Conversation, Load, conversations
from tools.bench.router.caching_replica import CachingConnection, CachingReplica, text_of, token_ids
from tools.routing_sim.model import BLOCK


def one_shot(name):
    return Conversation(0.0, "", [name * 2000], [0.0])


def answered(*one_after_the_other, tokens=60_000, then=None):
    """The answered requests of conversations, at a replica with room for a number of tokens."""

    async def run():
        port = ports.free()
        profile = dataclasses.replace(caching_replica.PROFILE, kv_tokens=tokens)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(caching_replica, "PROFILE", profile)
            replica = CachingReplica(port)
        server = await replica.loop.create_server(
            lambda: CachingConnection(replica), "127.0.0.1", port
        )
        url = f"http://127.0.0.1:{port}"
        load = Load(url, 60)
        async with server, httpx.AsyncClient(base_url=url) as client:
            for it in one_after_the_other:
                await load.run([it])
            return load.sent, (await then(client) if then else None)

    return uvloop.run(run())


def test_a_turn_finds_the_turns_before_it_in_the_cache():
    (first, second), _ = answered(Conversation(0.0, "s" * 4000, ["a" * 800, "b" * 800], [0, 0]))
    assert (first.cached, first.again) == (0, 0)
    known = len(text_of([{"role": "system", "content": "s" * 4000}])) // 4
    assert second.cached == (first.prompt + OUTPUT) // BLOCK * BLOCK > known
    assert (second.prompt, second.again) == (first.prompt + OUTPUT + (800 + 17) // 4, 0)


def test_a_prompt_that_was_evicted_is_computed_again():
    sent, _ = answered(*map(one_shot, ("aaaa", "bbbb", "aaaa", "aaaa")), tokens=3000)
    assert sent[2].cached < 0.5 * sent[2].prompt < 0.95 * sent[2].prompt < sent[3].cached
    assert [it.again for it in sent] == [0, 0, sent[3].cached - sent[2].cached, 0]


def test_the_replica_renders_and_counts_it():
    """Equal beginnings of chats have equal tokens, also behind an answer."""
    asked = [{"role": "user", "content": "question"}]
    more = [*asked, {"role": "assistant", "content": " tok" * 3}, {"role": "user", "content": "2"}]

    async def render(client):
        bodies = [{"model": "stub", "messages": it} for it in (asked, more)]
        found = [await client.post(caching_replica.RENDER, json=it) for it in bodies]
        metrics = (await client.get("/metrics")).text
        return [it.json()["token_ids"] for it in found], total(metrics, "stub_renders_total")

    _, ((short, long), renders) = answered(then=render)
    assert renders == 2
    assert long[: len(short)] == short == token_ids(text_of(asked))
    assert (
        json.loads(json.dumps(long))[: len(short) + 2]
        == token_ids(text_of(asked, 3))[: len(short) + 2]
    )


def test_rounds_have_their_own_conversations_and_arms_the_same():
    some = conversations(1, 30)
    assert some == conversations(1, 30) != conversations(2, 30)
    turns = [len(it.asked) for it in some]
    assert sum(turns) == pytest.approx(RATE * 30, rel=0.2)
    assert turns.count(1) == pytest.approx(ONE_SHOTS * sum(turns), rel=0.25)
    assert len({it.system for it in some if len(it.asked) > 1}) == 8
