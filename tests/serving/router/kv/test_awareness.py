# SPDX-License-Identifier: Apache-2.0
"""The behaviour of the strategy kvaware if it lacks something. tests/e2e/test_router.py runs it
with real engines.
"""

import asyncio
import json
import re
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import msgspec
import pytest
from transformers import AutoTokenizer

from serving.router.kv import awareness
from serving.router.kv.tokenizer import fetch
from serving.router.policy.kv_index import BlockStored
from tests.serving.router.conftest import FakeReplica, routing, whole
from tests.serving.router.kv.test_events import Publisher, publishing
from tests.serving.router.kv.test_tokenizer import working
from tests.support.harness.wait import until_async
from tests.support.models import tiny

pytestmark = pytest.mark.anyio

LATE_S = 180.0  # for the load of the tokenizer on busy machines
MISSING = "kvaware knows no more than prefixaware"


@pytest.fixture(scope="module")
async def workers(anyio_backend, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    fetch(str(tiny.make()), {}, folder)
    async with working(folder) as it:
        yield it.workers


@pytest.fixture
def loaded(workers, monkeypatch):
    """The tokenizer's processes, shared by all routers: their start takes many seconds."""

    async def run(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    running = SimpleNamespace(ready=workers.ready, tokens=workers.tokens, run=run)
    monkeypatch.setattr(awareness, "TokenWorkers", lambda: running)


def told(caplog) -> list[str]:
    return [it.getMessage() for it in caplog.records if MISSING in it.getMessage()]


async def test_without_a_tokenizer_it_is_prefixaware_and_says_so_once(caplog):
    async with routing(2, routing_strategy="kvaware", model_id="/nowhere") as it:
        await until_async(lambda: bool(told(caplog)))
        long = {"prompt": "word " * 1000}
        chosen = {(await it.post(long)).json()["replica"] for _ in range(5)}
        assert len(chosen) == 1
        assert len(told(caplog)) == 1
        assert "OPTION_MODEL_ID" in told(caplog)[0]
        assert "/nowhere" in told(caplog)[0]


async def test_without_events_it_is_prefixaware_and_says_so_once(caplog, loaded):
    model = str(tiny.make())
    async with routing(2, routing_strategy="kvaware", model_id=model) as it:
        await until_async(lambda: bool(told(caplog)), LATE_S)
        long = {"prompt": "word " * 1000}
        chosen = {(await it.post(long)).json()["replica"] for _ in range(5)}
        assert len(chosen) == 1
        assert len(told(caplog)) == 1
        assert "OPTION_KV_EVENTS" in told(caplog)[0]
        series = (await it.client.get("/metrics")).text
        assert 'slipway_router_fallbacks_total{reason="events"}' in series
        rows = (await it.client.get("/replicas")).json()["replicas"]
        assert [row["kv_cache_known"] for row in rows] == [False, False]


async def test_event_sources_that_make_no_sense_are_told(caplog, loaded):
    async def answer(replica: FakeReplica, asked, writer):
        sources = {"0": {"endpoint": "nonsense", "replay_endpoint": "nonsense"}}
        writer.write(whole(200, json.dumps(sources).encode()))

    async with routing(1, wait=False, routing_strategy="kvaware", model_id=str(tiny.make())) as it:
        it.fleet[0].answer = answer
        await until_async(lambda: "following its KV events failed" in caplog.text, LATE_S)
        assert (await it.post({"prompt": "Hi"})).status_code == 200
        assert not told(caplog)


def publishes(publisher: Publisher):
    """The answer of a replica that publishes at this address."""

    async def answer(replica: FakeReplica, asked, writer):
        if asked.target == "/kv_event_sources":
            writer.write(
                whole(200, json.dumps({"0": msgspec.to_builtins(publisher.source)}).encode())
            )
        else:
            writer.write(whole(200, b"{}"))

    return answer


async def fallbacks(it) -> dict[str, float]:
    """How often kvaware knew no more than prefixaware, by reason."""
    series = (await it.client.get("/metrics")).text
    found = re.findall(r'router_fallbacks_total\{reason="(\w+)"\} (\S+)', series)
    return {reason: float(count) for reason, count in found}


def followed(it) -> bool:
    """Whether the only replica's cache is known."""
    assert it.router.kvaware
    return bool(it.router.kvaware.follows(it.router.pool.replicas[0]))


@asynccontextmanager
async def knowing(model):
    """A router that knows the requests' tokens and the cache of its only replica."""
    async with (
        publishing() as publisher,
        routing(1, wait=False, routing_strategy="kvaware", model_id=str(model)) as it,
    ):
        it.fleet[0].answer = publishes(publisher)
        await publisher.publish(BlockStored([1], None, [*range(16)], 16))
        await it.ready()
        await until_async(lambda: followed(it), LATE_S)
        yield it


async def test_a_follower_that_fails_follows_again(caplog, monkeypatch, loaded):
    monkeypatch.setattr(awareness, "FIRST_PAUSE_S", 0.05)

    async def nonsense(replica: FakeReplica, asked, writer):
        sources = {"0": {"endpoint": "nonsense", "replay_endpoint": "nonsense"}}
        writer.write(whole(200, json.dumps(sources).encode()))

    async with (
        publishing() as publisher,
        routing(1, wait=False, routing_strategy="kvaware", model_id=str(tiny.make())) as it,
    ):
        it.fleet[0].answer = nonsense
        await it.ready()
        await until_async(lambda: "no TCP port of its own" in caplog.text, LATE_S)
        it.fleet[0].answer = publishes(publisher)
        await until_async(lambda: followed(it), LATE_S)
        assert not told(caplog)


HANGS = (
    "{% if messages[0].content == 'hang' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
)
FOR_EVER = HANGS.replace("messages[0].content", "'hang'")


def chat(text, **more):
    return {"messages": [{"role": "user", "content": text}], **more}


async def until_tokenised(it):
    """Wait until requests are tokenised: a busy machine's workers are too slow at first."""
    async with asyncio.timeout(LATE_S):
        while True:
            before = await fallbacks(it)
            assert (await it.post(chat("a"), "/v1/chat/completions")).status_code == 200
            if before == await fallbacks(it):
                return
            await asyncio.sleep(0.2)


async def test_a_template_of_a_clients_is_not_rendered(loaded):
    async with knowing(tiny.make()) as it:
        await until_tokenised(it)
        given = {"chat_template_kwargs": {"chat_template": FOR_EVER}}
        began = time.monotonic()
        asked = [it.post(chat("a", **given), "/v1/chat/completions") for _ in range(3)]
        asked.append(it.post(chat("a"), "/v1/chat/completions"))
        answers = await asyncio.gather(*asked)
        assert [answer.status_code for answer in answers] == [200] * 4
        assert time.monotonic() - began < 60  # the templates would never end
        found = await fallbacks(it)
        assert found["request"] >= 3  # the engine refuses them


async def test_requests_go_on_without_tokens_where_tokenising_takes_too_long(tmp_path):
    own = AutoTokenizer.from_pretrained(tiny.make())
    own.chat_template = HANGS
    own.save_pretrained(tmp_path)
    tiny_config = tiny.make() / "config.json"
    (tmp_path / "config.json").write_bytes(tiny_config.read_bytes())
    async with knowing(tmp_path) as it:
        asked = [it.post(chat("hang"), "/v1/chat/completions") for _ in range(3)]
        answers = await asyncio.gather(*asked)
        assert [answer.status_code for answer in answers] == [200] * 3
        assert (await fallbacks(it))["time"] >= 3
        await until_tokenised(it)
