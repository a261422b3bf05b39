"""What strategy kvaware says and does where something is missing for it. With real engines it is in
tests/e2e/test_router.py.
"""

import json

import pytest
import tiny_model

from tests.serving.router.conftest import FakeReplica, routing, until, whole

pytestmark = pytest.mark.anyio

MISSING = "kvaware knows no more than prefixaware"


def told(caplog) -> list[str]:
    return [it.getMessage() for it in caplog.records if MISSING in it.getMessage()]


async def test_without_a_tokenizer_it_is_prefixaware_and_says_so_once(caplog):
    async with routing(2, routing_strategy="kvaware", model_id="/nowhere") as it:
        await until(lambda: bool(told(caplog)))
        long = {"prompt": "word " * 1000}
        chosen = {(await it.post(long)).json()["replica"] for _ in range(5)}
        assert len(chosen) == 1
        assert len(told(caplog)) == 1
        assert "OPTION_MODEL_ID" in told(caplog)[0]
        assert "/nowhere" in told(caplog)[0]


async def test_without_events_it_is_prefixaware_and_says_so_once(caplog):
    model = str(tiny_model.make())
    async with routing(2, routing_strategy="kvaware", model_id=model) as it:
        await until(lambda: bool(told(caplog)), 30)
        long = {"prompt": "word " * 1000}
        chosen = {(await it.post(long)).json()["replica"] for _ in range(5)}
        assert len(chosen) == 1
        assert len(told(caplog)) == 1
        assert "OPTION_KV_EVENTS" in told(caplog)[0]
        series = (await it.client.get("/metrics")).text
        assert 'slipway_router_fallbacks_total{reason="events"}' in series
        rows = (await it.client.get("/replicas")).json()["replicas"]
        assert [row["kv_cache_known"] for row in rows] == [False, False]


async def test_event_sources_that_make_no_sense_are_told(caplog):
    async def answer(replica: FakeReplica, asked, writer):
        sources = {"0": {"endpoint": "nonsense", "replay_endpoint": "nonsense"}}
        writer.write(whole(200, json.dumps(sources).encode()))

    async with routing(
        1, wait=False, routing_strategy="kvaware", model_id=str(tiny_model.make())
    ) as it:
        it.fleet[0].answer = answer
        await until(lambda: "cannot be followed" in caplog.text, 30)
        assert (await it.post({"prompt": "Hi"})).status_code == 200
