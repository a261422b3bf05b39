"""More requests than the engine works on: who waits, who is refused, whose turn it is."""

import asyncio
import json
import math
import os
import re
import signal
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_config import options
from serving import retries
from serving.bodies import read_said
from serving.errors import Overloaded
from serving.invocations import AHEAD
from serving.threads import in_thread
from serving.turns import Turn, Turns
from tests.fuzzing import examples
from tests.serving.conftest import running
from tests.serving.test_adapters import register, registry, write
from tests.serving.test_app import JSONL, lines, until
from tests.serving.test_user_code import using

pytestmark = pytest.mark.anyio

ID = "X-Amzn-SageMaker-Inference-Id"
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
    async with asyncio.timeout(5):
        while await metric(served, "slipway_requests_queued") != count:
            await asyncio.sleep(0.01)


async def filled(served, waiting=0, **more):
    """Requests that fill the engine, and these more behind them."""
    inside = [ask(served, WAIT | more) for _ in range(SHARE)]
    await until(lambda: served.engine.running == SHARE)
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
        await until(lambda: served.engine.running == SHARE)
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


async def test_overload_told_as_429():
    async with running(throttle_error_http_code=429, job_queue_size=1) as served:
        inside, behind = await filled(served, waiting=1)
        for path in ("/invocations", "/v1/completions"):
            answer = await served.post(path, {"prompt": "b"})
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert '"code":429' in answer.text
        served.engine.gate.set()
        for it in (*inside, *behind):
            assert (await it).status_code == 200


@pytest.mark.parametrize(
    ("option", "status", "body"),
    [
        ("bad_request_http_code", 400, {"inputs": 5}),
        ("bad_request_http_code", 422, {"inputs": "refuse"}),
        ("server_error_http_code", 502, {"inputs": "break"}),
        ("timeout_http_code", 408, {"inputs": "wait"}),
    ],
)
async def test_statuses_of_the_operators_choice(option, status, body):
    async with running(**{option: status}, predict_timeout=1) as served:
        answer = await served.invoke(body)
        assert (answer.status_code, answer.json()["code"]) == (status, status)
        answer = await served.invoke(
            f"{json.dumps(body)}\n{json.dumps(body)}".encode(), headers={"content-type": JSONL}
        )
        assert [line["code"] for line in lines(answer)] == [status] * 2


async def test_the_status_of_a_server_that_is_not_ready():
    async with running(wait=False, wlm_error_http_code=429) as served:
        served.may_start.clear()
        answer = await served.invoke({"inputs": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        served.may_start.set()


@pytest.mark.parametrize(
    ("body", "sequences"),
    [
        ({"inputs": "a"}, 1),
        ({"inputs": ["a", "b", "c"]}, 3),
        ({"inputs": ["a", "b"], "parameters": {"n": 3}}, 6),
        ({"inputs": "a", "parameters": {"n": "x"}}, 1),
        ({"inputs": "a", "parameters": 5}, 1),
        ({"inputs": "a", "parameters": {"n": [2]}}, 1),
        ({"prompt": ["a", "b"], "n": 2}, 4),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": []}, 1),
        ({"messages": [{}, {}], "n": 4}, 4),
        ({"input": ["a", "b"]}, 2),
        ({}, 1),
    ],
)
async def test_how_many_sequences_a_request_is(body, sequences):
    assert read_said(json.dumps(body, indent=1).encode()).asked(None).sequences == sequences


async def test_a_list_of_inputs_counts_as_many_requests():
    async with running() as served:
        several = ask(served, {"inputs": ["wait a"] * (SHARE - 1)})
        await until(lambda: served.engine.running == 1)
        one, more = ask(served), ask(served)
        await queued(served, 1)
        # What is more than the engine's share goes alone.
        large = ask(served, {"inputs": ["wait large"] * SHARE * 2})
        await queued(served, 2)
        assert served.engine.running == 2
        served.engine.gate.set()
        for asked in (several, one, more, large):
            assert (await asked).status_code == 200
        assert prompts(served)[-1] == str(["wait large"] * SHARE * 2)


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
        await until(lambda: served.server.front._under_way)
        answer = await served.invoke({"count": 1})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        held.cancel()
        await until(lambda: not served.server.front._under_way)
        assert lines(await served.invoke({"count": 1})) == [{"number": 0}]


async def test_lines_that_have_begun_are_told_that_the_server_stops(served):
    body = b'{"inputs": "wait"}\n' * (SHARE + 3)
    asked = asyncio.create_task(served.invoke(body, headers={"content-type": JSONL}))
    await until(lambda: served.engine.running == served.engine.concurrency)
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: served.server.lifecycle.stage == "draining")
    served.engine.gate.set()
    told = lines(await asked)
    assert len(told) == SHARE + 3
    assert told[:4] == [{"generated_text": "wait"}] * 4
    assert told[-1]["code"] == 503


async def test_adapters_take_turns(tmp_path):
    async with running() as served:
        engine = served.engine
        engine.concurrency = 1
        engine.adapters = registry(engine, tmp_path / "adapters", slots=(4, 4))
        for number, name in enumerate(("one", "two")):
            await register(
                served, name, write(tmp_path / "adapters" / name, number), preload="true"
            )
        first = [ask(served, {"inputs": "step first"}) for _ in range(2)]
        await until(lambda: engine.running == 2)
        asked = []
        names = ["one"] * 4 + ["two", "", "two"]
        for place, name in enumerate(names):
            body = {"inputs": f"step {name}{place}", "adapters": name}
            asked.append(ask(served, body))
            await queued(served, place + 1)
        for done in range(len(names)):
            engine.steps.release()
            await until(lambda n=done: len(prompts(served)) == 3 + n)
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
        engine.adapters = registry(engine, tmp_path / "adapters", slots=(1, 1))
        for number, name in enumerate(("one", "two")):
            await register(served, name, write(tmp_path / "adapters" / name, number))
        held = ask(served, WAIT | {"adapters": "one"})
        await until(lambda: engine.running == 1)
        asked = [ask(served, {"inputs": "a", "adapters": "two"}) for _ in range(8)]
        await until(lambda: len(served.server.front._under_way) == 9)
        assert (await served.invoke({"inputs": "b"})).status_code == 200
        refused = await served.invoke({"inputs": "a", "adapters": "two"})
        assert refused.status_code == 503
        engine.gate.set()
        assert [(await it).status_code for it in (held, *asked)] == [200] * 9


async def test_a_request_is_told_that_its_time_is_over_while_it_waits(monkeypatch):
    monkeypatch.setattr(options, "SAGEMAKER_WHOLE_S", 1)
    async with running(interactive=True) as served:
        inside, (behind,) = await filled(served, waiting=1, stream=True)
        told = "the request took longer than 1 s; OPTION_PREDICT_TIMEOUT sets the limit"
        assert ((await behind).status_code, (await behind).json()["error"]) == (504, told)
        assert len(prompts(served)) == SHARE  # which are streams, and have more time
        assert await metric(served, "slipway_requests_queued") == 0
        served.engine.gate.set()
        assert [(await it).status_code for it in inside] == [200] * SHARE


async def test_a_stream_is_told_so_within_it(monkeypatch):
    monkeypatch.setattr(options, "SAGEMAKER_STREAM_S", 1)
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
    turns = Turns(lambda: 2, 100, lambda: now)
    first = [turns.ask("a", within=1) for _ in range(2)]
    for _ in range(3):
        turns.ask("a", within=1)  # nothing is known yet
    now = 10.0
    turns.end(first[0])
    # Requests take 10 s, two at a time: 5 s for each before, two of lane a, and itself.
    assert turns.waiting == 2
    with pytest.raises(Overloaded, match="about 15 s, and OPTION_PREDICT_TIMEOUT leaves it 14 s"):
        turns.ask("a", within=14)
    assert turns.ask("a", within=15).came
    # Another lane's next turn comes after one of lane a's.
    with pytest.raises(Overloaded, match="about 10 s"):
        turns.ask("b", within=9)
    assert turns.ask("b", within=10).came
    assert turns.ask("a").came
    assert turns.ask("a", within=1, refusable=False).came


async def test_a_client_that_leaves_while_it_waits():
    async with running() as served:
        inside, (first, gone, last) = await filled(served, waiting=3)
        gone.cancel()
        await queued(served, 2)
        served.engine.gate.set()
        for it in (*inside, first, last):
            assert (await it).status_code == 200
        assert [it for it in prompts(served) if "behind" in it] == ["wait behind0", "wait behind2"]
        assert await served.server.front.drained(1)


@pytest.mark.parametrize("twice", [False, True])
async def test_what_waits_finishes_before_the_server_stops_or_is_told(served, twice):
    inside, behind = await filled(served, waiting=3)
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: served.server.lifecycle.stage == "draining")
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
    assert await asyncio.wait_for(served.task, 5) == 0
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


@pytest.fixture
async def deduplicated(served):
    before = await metric(served, "slipway_requests_deduplicated_total")

    async def count():
        return await metric(served, "slipway_requests_deduplicated_total") - before

    return count


async def leave(served, request):
    request.cancel()
    left = served.server.front._retries._abandoned
    before = len(left)
    await until(lambda: len(left) > before)


async def test_a_retry_gets_the_answer_of_the_first(served, deduplicated):
    for path in ("/invocations", "/v1/completions"):
        served.engine.gate.clear()
        asked = [ask(served, {"prompt": f"wait {path}"}, path, **{ID: "1"})]
        await until(lambda: served.engine.running == 1)
        for number in range(2):
            asked.append(ask(served, {"prompt": f"wait {path}"}, path, **{ID: "1"}))
            await until(lambda n=number: served.server.front._retries._following == n + 1)
        served.engine.gate.set()
        for it in asked:
            assert (await it).json()["choices"][0]["text"] == f"{path} wait"
    assert len(served.engine.bodies) == 2
    assert await deduplicated() == 4
    # What has been answered is forgotten.
    assert (await ask(served, **{ID: "1"})).status_code == 200
    assert (await ask(served, **{ID: "1"})).status_code == 200
    assert len(served.engine.bodies) == 4
    assert not served.server.front._retries._shared


@pytest.mark.parametrize("finished", [False, True])
async def test_a_retry_of_a_client_that_left(served, deduplicated, finished):
    first = ask(served, **{ID: "1"})
    await until(lambda: served.engine.running == 1)
    await leave(served, first)
    if finished:
        served.engine.gate.set()
        await until(lambda: served.engine.running == 0)
    retry = ask(served, **{ID: "1"})
    if not finished:
        await until(lambda: served.server.front._retries._following == 1)
        served.engine.gate.set()
    assert (await retry).json() == {"generated_text": "a wait"}
    assert len(served.engine.bodies) == 1
    assert await deduplicated() == 1
    assert not served.server.front._retries._shared


async def test_retries_share_errors_too(served):
    inside, _ = await filled(served)
    waits = ask(served, {"inputs": "refuse"}, **{ID: "1"})
    await queued(served, 1)
    retry = ask(served, {"inputs": "refuse"}, **{ID: "1"})
    await until(lambda: served.server.front._retries._following == 1)
    served.engine.gate.set()
    assert (await waits).json() == (await retry).json() == {"code": 424, "error": "not like this"}
    assert len(prompts(served)) == SHARE + 1
    for it in inside:
        await it


async def test_a_client_that_does_not_come_back(served, monkeypatch):
    monkeypatch.setattr(retries, "GRACE_S", 0.05)
    first = ask(served, **{ID: "1"})
    await until(lambda: served.engine.running == 1)
    first.cancel()
    await until(lambda: served.engine.running == 0)
    assert not served.server.front._retries._shared
    assert await served.server.front.drained(1)


async def test_what_is_kept_for_clients_that_left_is_bounded(served, monkeypatch):
    monkeypatch.setattr(retries, "ABANDONED", 2)
    monkeypatch.setattr(retries, "LARGEST", 20)
    asked = []
    for number in range(4):
        asked.append(ask(served, {"inputs": f"wait {number}"}, **{ID: "1"}))
        await until(lambda n=number: served.engine.running == n + 1)
    for number, it in enumerate(asked):
        it.cancel()
        if number < 2:
            await until(lambda n=number: len(served.server.front._retries._abandoned) == n + 1)
        else:
            await until(lambda n=number: served.engine.running == 5 - n)
    served.engine.gate.set()
    await until(lambda: not served.server.front._retries._shared)  # too large to be kept


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"inputs": "wait b"}, {}),
        (WAIT, {ID: "2"}),
        (WAIT, {ID: "1" * 65}),
        (WAIT, {ADAPTER: "one"}),
        (WAIT, {"X-Tenant": "other"}),
        (WAIT, {"accept": "text/plain"}),
        (WAIT | {"stream": True}, {}),
    ],
)
async def test_what_is_not_the_same_is_not_shared(body, headers, tmp_path):
    async with running(cache_salt_header="X-Tenant") as served:
        engine = served.engine
        engine.adapters = registry(engine, tmp_path / "adapters", slots=(4, 4))
        await register(served, "one", write(tmp_path / "adapters" / "one"))
        common = {ID: "1", "X-Tenant": "mine"}
        asked = [ask(served, **common), ask(served, body, **common | headers)]
        if body.get("stream") or len(headers.get(ID, "")) > 64:
            asked.append(ask(served, body, **common | headers))
        await until(lambda: engine.running == len(asked))
        engine.gate.set()
        assert [(await it).status_code for it in asked] == [200] * len(asked)


async def test_sessions_are_not_mixed(served):
    new = {"X_Amzn_SageMaker_Session_Id": "NEW_SESSION"}
    asked = [ask(served, **{ID: "1"}, **new) for _ in range(2)]
    await until(lambda: served.engine.running == 2)
    served.engine.gate.set()
    sessions = [(await it).headers["x-amzn-sagemaker-session-id"].partition(";")[0] for it in asked]
    assert len(set(sessions)) == 2
    served.engine.gate.clear()
    asked = [ask(served, **{ID: "1"}, X_Amzn_SageMaker_Session_Id=it) for it in sessions]
    await until(lambda: served.engine.running == 2)
    served.engine.gate.set()
    assert [(await it).status_code for it in asked] == [200] * 2


async def test_a_stream_whose_client_leaves_ends_whatever_its_id(served):
    request = ask(served, WAIT | {"stream": True}, **{ID: "1"})
    await until(lambda: served.engine.running == 1)
    request.cancel()
    await until(lambda: served.engine.running == 0)


ARRIVE = st.tuples(
    st.just("arrive"), st.sampled_from("abc"), st.integers(1, 6), st.booleans(), st.just(0)
)
OTHER = st.tuples(
    st.sampled_from(["end", "leave"]), st.just(""), st.just(0), st.just(True), st.integers(0, 99)
)


@examples(300)
@given(
    st.lists(ARRIVE | OTHER, max_size=60),
    st.integers(1, 5),
    st.integers(1, 6),
)
def test_turns_at_random(steps, share, limit):
    async def walk():
        turns = Turns(lambda: share, limit)
        inside: list[Turn] = []
        waiting: list[Turn] = []
        passed: dict[str, dict[str, int]] = {}  # lanes that wait: how often others came before

        def look():
            """What has come in is inside now; no lane has come twice while another one waited."""
            for turn in [it for it in waiting if it.going]:
                assert turn.came
                assert turn.came.done()
                waiting.remove(turn)
                inside.append(turn)
                passed.pop(turn.lane, None)
                for lane in {it.lane for it in waiting} - {turn.lane}:
                    times = passed.setdefault(lane, {})
                    times[turn.lane] = times.get(turn.lane, 0) + 1
                    assert times[turn.lane] <= 1
            for lane in [*passed]:
                if lane not in {it.lane for it in waiting}:
                    del passed[lane]
            assert len(inside) == turns.going
            assert sum(it.sequences for it in inside) <= share or len(inside) == 1
            assert len(waiting) == turns.waiting
            assert not waiting or inside, "nobody would end the wait"

        for step, lane, sequences, refusable, which in steps:
            if step == "arrive":
                try:
                    turn = turns.ask(lane, sequences, refusable=refusable)
                except Overloaded:
                    assert refusable
                    assert len(waiting) >= limit
                    continue
                (waiting if turn.came else inside).append(turn)
                assert turn.going == (turn.came is None)
            elif step == "end" and inside:
                turns.end(inside.pop(which % len(inside)))
            elif step == "leave" and waiting:
                # It gives up first, and is ended when it notices.
                turn = waiting.pop(which % len(waiting))
                assert turn.came
                turn.came.set_result(None)
                if inside and which % 2:
                    turns.end(inside.pop(0))
                    assert not turn.going
                turns.end(turn)
            look()
        while inside:
            turns.end(inside.pop())
            look()
        assert (turns.going, turns.waiting, turns._sequences, turns._lanes) == (0, 0, 0, {})

    asyncio.run(walk())


async def test_a_thread_that_ends_after_its_loop():
    begun, go_on = threading.Event(), threading.Event()

    def work():
        begun.set()
        go_on.wait()

    def loop():
        async def start():
            task = asyncio.create_task(in_thread(work))
            await asyncio.sleep(0)
            task.cancel()

        asyncio.run(start())

    outer = threading.Thread(target=loop)
    outer.start()
    outer.join()
    begun.wait()
    go_on.set()  # pytest makes an error of what a thread raises
    for thread in threading.enumerate():
        if thread.name == "work":
            thread.join()
