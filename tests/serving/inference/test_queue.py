# SPDX-License-Identifier: Apache-2.0
"""More requests than the engine works on: which wait, which are refused, and their order."""

import asyncio
import itertools
import math
import os
import re
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_config.options import declared
from serving.access.caller import Caller
from serving.errors import Overloaded
from serving.inference.pipeline import AHEAD
from serving.inference.queue import FairQueue, Ticket
from tests.fuzzing import examples
from tests.serving.access.test_access import SECRET, identity_for
from tests.serving.api.test_app import JSONL, lines
from tests.serving.conftest import running
from tests.serving.lora.test_registry import register, registry, write
from tests.serving.test_user_code import using
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
SHARE = 4 + math.ceil(4 * AHEAD)
WAIT = {"inputs": "wait a"}
STOPPING = {"code": 503, "error": "the server is stopping"}


async def metric(served, name):
    found = re.search(
        rf"^{re.escape(name)} (\S+)$", (await served.client.get("/metrics")).text, re.M
    )
    return float(found[1]) if found else 0.0


def ask(served, body=None, path="/invocations", **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return asyncio.create_task(served.post(path, body or WAIT, headers=named))


async def queued(served, count):
    async with asyncio.timeout(15):
        while await metric(served, "slipway_requests_queued") != count:
            await asyncio.sleep(0.01)


async def filled(served, waiting=0, **more):
    """Requests that fill the engine, and this number of requests behind them."""
    inside = [ask(served, WAIT | more) for _ in range(SHARE)]
    await until_async(lambda: served.engine.running == SHARE)
    behind = [ask(served, {"inputs": f"wait behind{n}"}) for n in range(waiting)]
    await queued(served, waiting)
    return inside, behind


def prompts(served):
    return [str(body["prompt"]) for body in served.engine.bodies]


async def test_what_the_engine_does_not_work_on_waits_and_the_rest_is_refused():
    async with running(job_queue_size=3) as served:
        refused = 'slipway_requests_refused_total{reason="queue_full"}'
        before = await metric(served, refused)
        waited = await metric(served, "slipway_request_wait_seconds_count")
        chat = {"messages": [{"role": "user", "content": "wait c"}]}
        asked = [
            ask(served),
            ask(served, WAIT | {"stream": True}),
            ask(served, {"prompt": "wait b"}, "/v1/completions"),
            ask(served, {"prompt": "wait b", "stream": True}, "/v1/completions"),
            ask(served, chat, "/v1/chat/completions"),
        ]
        await until_async(lambda: served.engine.running == SHARE)
        asked += [ask(served), ask(served, WAIT | {"stream": True}), ask(served, chat)]
        await queued(served, 3)
        assert await metric(served, "slipway_requests_in_flight") == SHARE
        told = "3 requests are waiting; SERVING_JOB_QUEUE_SIZE sets the limit"
        answer = await served.invoke({"inputs": "b"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json() == {"code": 503, "error": told}
        answer = await served.post("/v1/completions", {"prompt": "b", "stream": True})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["message"] == told
        answer = await served.invoke(b'{"inputs": "a"}\n' * 2, headers={"content-type": JSONL})
        assert answer.status_code == 503
        assert await metric(served, refused) == before + 3
        served.engine.gate.set()
        assert [(await it).status_code for it in asked] == [200] * 8
        assert served.engine.most == SHARE
        assert (await served.invoke({"inputs": "b"})).status_code == 200
        assert await metric(served, "slipway_requests_in_flight") == 0
        assert await metric(served, "slipway_request_wait_seconds_count") == waited + 3


async def test_a_list_of_inputs_counts_as_many_requests_but_half_of_the_room_at_most():
    async with running() as served:
        served.engine.concurrency = 8  # so there is room for 10
        half = [ask(served, {"inputs": ["wait a"] * count}) for count in (4, 20)]
        await until_async(lambda: served.engine.running == 2)
        one, large, more = ask(served), ask(served, {"inputs": ["wait b"] * 20}), ask(served)
        await queued(served, 2)
        assert served.engine.running == 3
        served.engine.gate.set()
        for asked in (*half, one, large, more):
            assert (await asked).status_code == 200


async def test_lines_wait_one_at_a_time_and_none_is_lost():
    async with running(job_queue_size=2) as served:
        inside, _ = await filled(served)
        body = b"\n".join(b'{"inputs": "a%d"}' % n for n in range(20))
        asked = [
            asyncio.create_task(served.invoke(body, headers={"content-type": JSONL}))
            for _ in range(2)
        ]
        await queued(served, 2)
        served.engine.gate.set()
        for answer in asked:
            told = [{"generated_text": f"a{n}"} for n in range(20)]
            assert lines(await answer) == told
        for it in inside:
            assert (await it).status_code == 200
        assert served.engine.most == SHARE


async def test_no_more_go_to_a_custom_handler_than_may_wait():
    async with running(job_queue_size=1) as served, using(served, "handler_stream"):
        held = ask(served, {"count": 2, "wait": "x"})
        await until_async(lambda: served.pipeline.admission.in_flight)
        answer = await served.invoke({"count": 1})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        held.cancel()
        await until_async(lambda: not served.pipeline.admission.in_flight)
        assert lines(await served.invoke({"count": 1})) == [{"number": 0}]


async def test_adapters_take_turns(tmp_path):
    async with running() as served:
        engine = served.engine
        engine.concurrency = 1
        served.pipeline.adapters = registry(engine, tmp_path / "adapters", slots=(4, 4))
        for number, name in enumerate(("one", "two")):
            await register(
                served, name, write(tmp_path / "adapters" / name, number), preload="true"
            )
        first = [ask(served, {"inputs": "step first"}) for _ in range(2)]
        await until_async(lambda: engine.running == 2)
        asked = []
        names = ["one"] * 4 + ["two", "", "two"]
        for place, name in enumerate(names):
            body = {"inputs": f"step {name}{place}", "adapters": name}
            asked.append(ask(served, body))
            await queued(served, place + 1)
        for done in range(len(names)):
            engine.steps.release()
            await until_async(lambda n=done: len(prompts(served)) == 3 + n)
        for _ in range(2):
            engine.steps.release()
        for it in [*first, *asked]:
            assert (await it).status_code == 200
        order = [prompt.removeprefix("step ") for prompt in prompts(served)[2:]]
        assert order == ["one0", "two4", "5", "one1", "two6", "one2", "one3"]
        assert engine.most == 2


async def test_who_waits_for_a_place_takes_no_room(tmp_path):
    async with running(job_queue_size=8) as served:
        engine = served.engine
        served.pipeline.adapters = registry(engine, tmp_path / "adapters", slots=(1, 1))
        for number, name in enumerate(("one", "two")):
            await register(served, name, write(tmp_path / "adapters" / name, number))
        held = ask(served, WAIT | {"adapters": "one"})
        await until_async(lambda: engine.running == 1)
        asked = [ask(served, {"inputs": "a", "adapters": "two"}) for _ in range(8)]
        await until_async(lambda: len(served.pipeline.admission.in_flight) == 9)
        assert (await served.invoke({"inputs": "b"})).status_code == 200
        refused = await served.invoke({"inputs": "a", "adapters": "two"})
        assert refused.status_code == 503
        engine.gate.set()
        assert [(await it).status_code for it in (held, *asked)] == [200] * 9


async def test_a_request_is_told_that_its_time_is_over_while_it_waits(monkeypatch):
    monkeypatch.setattr(declared, "SAGEMAKER_WHOLE_S", 1)
    async with running(interactive=True) as served:
        inside, (behind,) = await filled(served, waiting=1, stream=True)
        told = "the request took longer than 1 s; OPTION_PREDICT_TIMEOUT sets the limit"
        assert ((await behind).status_code, (await behind).json()["error"]) == (504, told)
        assert len(prompts(served)) == SHARE  # which are streams, and have more time
        assert await metric(served, "slipway_requests_queued") == 0
        served.engine.gate.set()
        assert [(await it).status_code for it in inside] == [200] * SHARE


async def test_a_stream_is_told_so_within_it(monkeypatch):
    monkeypatch.setattr(declared, "SAGEMAKER_STREAM_S", 1)
    async with running(interactive=True) as served:
        answer = await served.invoke({"inputs": "wait a", "stream": True})
        assert answer.status_code == 200
        first, error = lines(answer)
        assert first["token"]["text"] == "a"
        assert error["code"] == 504


async def test_who_cannot_be_answered_in_time_is_refused_at_once():
    async with running(predict_timeout=1) as served:
        served.engine.concurrency = 1
        first = await asyncio.gather(*(served.invoke(WAIT) for _ in range(2)))
        assert [it.status_code for it in first] == [504] * 2
        asked = [asyncio.create_task(served.invoke({"inputs": f"wait {n}"})) for n in range(8)]
        refused = [it for it in await asyncio.gather(*asked) if it.status_code == 503]
        assert refused
        for answer in refused:
            assert 1 <= int(answer.headers["retry-after"]) <= 30
            assert "OPTION_PREDICT_TIMEOUT leaves it 1 s" in answer.json()["error"]
        assert await metric(served, 'slipway_requests_refused_total{reason="too_late"}') >= 1


async def test_the_expected_wait():
    now = 0.0
    queue = FairQueue(lambda: 2, lambda: now)
    first = [queue.join("a", within=1) for _ in range(2)]
    for _ in range(3):
        queue.join("a", within=1)  # no duration is known yet
    now = 10.0
    queue.leave(first[0])
    # Requests take 10 s, two at a time: 5 s each for two of lane a, and for itself.
    assert queue.waiting == 2
    with pytest.raises(Overloaded, match="about 15 s, and OPTION_PREDICT_TIMEOUT leaves it 14 s"):
        queue.join("a", within=14)
    assert queue.join("a", within=15).called
    # Another lane's next turn comes after one of lane a's.
    with pytest.raises(Overloaded, match="about 10 s"):
        queue.join("b", within=9)
    assert queue.join("b", within=10).called
    assert queue.join("a").called


async def test_a_client_that_leaves_while_it_waits():
    async with running() as served:
        inside, (first, gone, last) = await filled(served, waiting=3)
        gone.cancel()
        await queued(served, 2)
        served.engine.gate.set()
        for it in (*inside, first, last):
            assert (await it).status_code == 200
        assert [it for it in prompts(served) if "behind" in it] == ["wait behind0", "wait behind2"]
        assert await served.pipeline.admission.drained(60)


@pytest.mark.parametrize("twice", [False, True])
async def test_what_waits_finishes_before_the_server_stops_or_is_told(served, twice):
    inside, behind = await filled(served, waiting=3)
    os.kill(os.getpid(), signal.SIGTERM)
    await until_async(lambda: served.server.lifecycle.stage == "draining")
    if twice:
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        served.engine.gate.set()
    for it in (*inside, *behind):
        answer = await it
        assert answer.status_code == (503 if twice else 200)
        if twice:
            assert answer.json() == STOPPING
            assert answer.headers["retry-after"] == "1"
    assert (await asyncio.wait_for(served.task, 15)).code == 0
    assert len(prompts(served)) == (SHARE if twice else SHARE + 3)


async def test_what_waits_for_an_engine_that_dies_is_told(served):
    inside, behind = await filled(served, waiting=3)
    served.engine.failure = "an engine process ended"
    served.engine.gate.set()
    for it in inside:
        await it
    for it in behind:
        answer = await it
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert len(prompts(served)) == SHARE


ARRIVE = st.tuples(st.just("arrive"), st.sampled_from("abc"), st.integers(1, 6), st.just(0))
OTHER = st.tuples(st.sampled_from(["end", "leave"]), st.just(""), st.just(0), st.integers(0, 99))


@examples(300)
@given(
    st.lists(ARRIVE | OTHER, max_size=60),
    st.integers(1, 5),
)
def test_tickets_at_random(steps, share):
    async def walk():
        queue = FairQueue(lambda: share, clock=itertools.count().__next__)
        inside: list[Ticket] = []
        waiting: list[Ticket] = []
        passed: dict[str, dict[str, int]] = {}  # waiting lanes: how often others came first

        def look():
            """Move the admitted requests from waiting to inside. No lane may come twice while
            another one waits.
            """
            for ticket in sorted((it for it in waiting if it.in_flight), key=lambda it: it.began):
                assert ticket.called
                assert ticket.called.done()
                waiting.remove(ticket)
                inside.append(ticket)
                passed.pop(ticket.lane, None)
                for lane in {it.lane for it in waiting} - {ticket.lane}:
                    times = passed.setdefault(lane, {})
                    times[ticket.lane] = times.get(ticket.lane, 0) + 1
                    assert times[ticket.lane] <= 1
            for lane in [*passed]:
                if lane not in {it.lane for it in waiting}:
                    del passed[lane]
            assert len(inside) == queue.in_flight
            counted = sum(it.sequences for it in inside)
            assert all(it.sequences <= max(share // 2, 1) for it in inside)
            assert counted < share + max(share // 2, 1)
            assert queue.room == max(share - counted, 0)
            assert len(waiting) == queue.waiting
            assert not waiting or not queue.room

        for step, lane, sequences, which in steps:
            if step == "arrive":
                ticket = queue.join(lane, sequences)
                (waiting if ticket.called else inside).append(ticket)
                assert ticket.in_flight == (ticket.called is None)
            elif step == "end" and inside:
                queue.leave(inside.pop(which % len(inside)))
            elif step == "leave" and waiting:
                # It gives up first, and ends when it notices that.
                ticket = waiting.pop(which % len(waiting))
                assert ticket.called
                ticket.called.set_result(None)
                if inside and which % 2:
                    queue.leave(inside.pop(0))
                    assert not ticket.in_flight
                queue.leave(ticket)
            look()
        while inside:
            queue.leave(inside.pop())
            look()
        assert (queue.in_flight, queue.waiting, queue.sequences, queue.lanes) == (0, 0, 0, {})

    asyncio.run(walk())


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
async def test_what_may_be_shed_is_refused_where_the_engine_has_no_room(policy):
    """This also holds if the engine gets all waiting requests."""

    sheddable = Caller(priority=10, sheddable=True, counted=True)
    engine = {"scheduling_policy": policy}
    async with running(router_secret=SECRET, engine=engine) as served:
        named = {"x_slipway_identity": await identity_for(served, sheddable)}
        inside = [ask(served, WAIT, **named) for _ in range(4)]
        await until_async(lambda: served.engine.running == 4)
        for path, body in (("/invocations", WAIT), ("/v1/completions", {"prompt": "wait a"})):
            answer = await ask(served, body, path, **named)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert "requests of a negative priority do not wait" in answer.text
        others = {"x_slipway_identity": await identity_for(served, Caller(counted=True))}
        inside.append(ask(served, WAIT, **others))
        await until_async(lambda: served.engine.running == 5)
        served.engine.gate.set()
        assert {(await it).status_code for it in inside} == {200}
        got = {body.get("priority") for body in served.engine.bodies}
        assert got == ({None, 10} if policy == "priority" else {None})
