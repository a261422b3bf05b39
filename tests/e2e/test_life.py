# SPDX-License-Identifier: Apache-2.0
"""Start, stop and death of real servers."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.collector import collecting
from tests.e2e.conftest import START_S, serving
from tests.support.harness.process import STOP_S
from tests.support.harness.wait import until


def lines(log):
    """The lines of the log. All are JSON, whichever process wrote them; those of scripts/serve come
    first.
    """
    told = log.read_text().splitlines()
    return [json.loads(line) for line in told[told.index(first_line(told)) :]]


def first_line(told):
    return next(line for line in told if line.startswith("{"))


def last_line(log):
    found = lines(log)
    assert [line["message"] for line in found if line["message"] in ("stopped", "failed")] == [
        found[-1]["message"]
    ]
    return found[-1]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The default model, served as the README says."""
    with serving(tmp_path_factory.mktemp("default") / "log", "scripts/serve") as it:
        yield it


def test_ping_answers_from_the_first_second_on(served):
    began = time.monotonic()
    first = None
    details: list[str] = []
    while True:
        asked = time.monotonic()
        assert asked - began < START_S, served.log.read_text()[-5000:]
        try:
            answer = served.client.get("/ping")
        except httpx.ConnectError:
            assert first is None, "a connection was refused after an answer"
            time.sleep(0.1)
            continue
        first = first or asked
        if answer.status_code == 200:
            break
        assert answer.status_code == 503
        assert answer.json()["status"] == "starting"
        if details[-1:] != [answer.json()["detail"]]:
            details.append(answer.json()["detail"])
        time.sleep(0.1)
    assert details[0] in ("beginning", "importing vLLM")
    assert "loading the model" in details
    assert [details.index(detail) for detail in details] == list(range(len(details)))
    served.ready()


def test_the_default_model_knows_the_capital_of_france(served):
    parameters = {"max_new_tokens": 12, "do_sample": False}
    body = {"inputs": "The capital of France is", "parameters": parameters}
    assert "Paris" in served.invoke(body).json()["generated_text"]
    answer = served.openai.chat.completions.create(
        model="SmolLM2-135M-Instruct",
        messages=[{"role": "user", "content": "Name the capital of France."}],
        max_tokens=20,
        temperature=0,
    )
    assert "Paris" in answer.choices[0].message.content


TOKENS = 20  # a slow machine generates 25 tokens a second, and requests in flight have 23 s


def test_sigterm_under_load_loses_nothing(served):
    def whole(number):
        body = {"prompt": f"Story {number}", "max_tokens": TOKENS, "ignore_eos": True}
        return served.client.post("/v1/completions", json=body)

    def stream(number):
        parameters = {"max_new_tokens": TOKENS, "ignore_eos_token": True}
        return served.lines({"inputs": f"Tale {number}", "parameters": parameters, "stream": True})

    with ThreadPoolExecutor(8) as pool:
        with served.held():
            wholes = [pool.submit(whole, number) for number in range(4)]
            streams = [pool.submit(stream, number) for number in range(4)]
            until(lambda: served.metric("slipway_requests_in_flight") == 8)
            served.process.send_signal(signal.SIGTERM)
            until(lambda: served.client.get("/ping").status_code != 200)
            assert served.client.get("/ping").json()["status"] == "draining"
            assert served.invoke({"inputs": "late"}).status_code == 503
        engines = served.children("VLLM::EngineCore")
        for answer in wholes:
            assert answer.result().json()["usage"]["completion_tokens"] == TOKENS
        for told in streams:
            assert len(told.result()) == TOKENS
            assert told.result()[-1]["generated_text"]
    assert served.process.wait(STOP_S) == 0
    assert engines
    assert not any(it.is_running() for it in engines)  # the server has waited for their ends
    assert served.left_behind() == []
    last = last_line(served.log)
    assert (last["message"], last["stage"]) == ("stopped", "draining")
    (ready,) = [line for line in lines(served.log) if line["message"] == "ready"]
    assert {"planning", "importing", "loading", "preparing", "warming_up"} <= ready["steps"].keys()
    assert ready["elapsed_s"] == pytest.approx(sum(ready["steps"].values()), abs=0.5)


@pytest.fixture(scope="module")
def collector():
    with collecting() as it:
        yield it


@pytest.fixture(scope="module")
def parallel(tiny_options, tmp_path_factory, collector):
    """The tiny model on two ranks, which sends traces."""
    log = tmp_path_factory.mktemp("parallel") / "log"
    environ = {
        "OPTION_TENSOR_PARALLEL_DEGREE": "2",
        **collector.environ(),
        "OPTION_SLO_TTFT_MS": "60000",
        "OPTION_SLO_ITL_MS": "60000",
        "SOME_API_KEY": "very-secret-key",
        "OPTION_LOG_LEVEL": "debug",
    }
    with serving(log, **tiny_options, **environ) as it:
        it.ready()
        yield it


def test_tensor_parallel(parallel):
    assert len(parallel.children("VLLM::Worker")) == 2
    body = {"inputs": "An import", "parameters": {"max_new_tokens": 8, "do_sample": False}}
    answer = parallel.invoke(body).json()
    assert answer["generated_text"]
    assert (
        parallel.lines({**body, "stream": True})[-1]["generated_text"] == answer["generated_text"]
    )


def test_a_trace_goes_on_where_the_client_began_it(parallel, collector):
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    headers = {"traceparent": f"00-{trace}-{parent}-01"}
    assert parallel.invoke({"inputs": "traced"}, **headers).status_code == 200
    until(lambda: len(collector.of(trace)) >= 4)
    found = collector.of(trace)
    assert [it.name for it in found] == [
        *("POST /invocations", "queue", "text_completion tiny-llama-1", "llm_request")
    ]
    root, _, engine, _ = found
    assert [it.parent for it in found] == [parent, root.id, root.id, engine.id]
    assert {it.service for it in found} == {"slipway"}


def test_a_request_meets_its_objectives(parallel):
    counted = "slipway_slo_requests_total"
    before = parallel.total(counted)
    for body in ({"inputs": "quick"}, {"inputs": "quick", "stream": True}):
        assert parallel.invoke(body).status_code == 200
    until(lambda: parallel.total(counted) == before + 2 * 3)  # ttft, itl, all
    assert 'result="missed"} 0.0' in parallel.client.get("/metrics").text


def test_a_requests_id_is_in_our_lines_and_the_engines(parallel):
    body = {"prompt": "An import very-secret-key", "max_tokens": 4}
    answer = parallel.client.post(
        "/invocations", json=body, headers={"X-Amzn-SageMaker-Inference-Id": "the-one"}
    )
    assert answer.headers["x-request-id"] == "the-one"
    assert answer.json()["id"] == "cmpl-the-one"

    def told():
        return [it for it in lines(parallel.log) if it.get("request_id") == "the-one"]

    until(told)  # the line is written after the answer
    (line,) = told()
    assert (line["path"], line["status"], line["completion_tokens"]) == ("/invocations", 200, 4)
    assert "very-secret" not in parallel.log.read_text()
    assert "An import" not in parallel.log.read_text()
    assert [line for line in lines(parallel.log) if line["level"] == "debug"]


def test_the_death_of_the_engine_is_told_and_ends_the_server(parallel):
    body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}

    def ask(stream):
        return parallel.client.post("/invocations", json=body | {"stream": stream}, timeout=30)

    with ThreadPoolExecutor(2) as pool:
        whole, stream = (pool.submit(ask, it) for it in (False, True))
        until(lambda: parallel.metric("vllm:num_requests_running") == 2)
        (engine,) = parallel.children("VLLM::EngineCore")
        engine.kill()
        try:
            while (ping := parallel.client.get("/ping")).status_code == 200:
                pass
            assert ping.status_code == 500
            assert ping.json()["status"] == "failed"
        except httpx.TransportError:
            pass  # it has ended already
        assert whole.result().status_code == 500
        assert json.loads(stream.result().text.splitlines()[-1])["code"] == 500
    assert parallel.process.wait(STOP_S) == 1
    assert parallel.left_behind() == []
    last = last_line(parallel.log)
    assert (last["message"], last["stage"]) == ("failed", "serving")
    assert last["reason"] == "an engine process ended unexpectedly: exit code -9"
    assert "more memory" in last["fix"]


def test_the_death_of_a_worker_is_told(tiny_options, tmp_path):
    own = {"OPTION_DISTRIBUTED_EXECUTOR_BACKEND": "mp"}
    with serving(tmp_path / "log", **tiny_options, **own) as it:
        it.ready()
        (worker,) = it.children("VLLM::Worker")
        worker.kill()
        assert it.process.wait(STOP_S) == 1
        assert it.left_behind() == []
    last = last_line(it.log)
    assert (last["message"], last["stage"]) == ("failed", "serving")
    assert "VllmWorker-0 died unexpectedly" in last["reason"]
    assert "more memory" in last["fix"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        # The engine's own process finds it: one byte less than 4,096 tokens need. If no option
        # names the cache's format, the plan finds it.
        (
            {"OPTION_KV_CACHE_MEMORY_BYTES": "8388607", "OPTION_KV_CACHE_DTYPE": "auto"},
            "KV cache is needed, which is larger than",
        ),
    ],
)
def test_a_start_that_fails_tells_the_root_cause(tiny_options, tmp_path, options, reason):
    with serving(tmp_path / "log", **tiny_options | options) as it:
        assert it.process.wait(120) == 3
    last = last_line(it.log)
    assert (last["message"], last["stage"]) == ("failed", "start")
    assert reason in last["reason"]
    assert last["fix"].startswith("lower OPTION_MAX_MODEL_LEN")


def test_sigterm_while_the_engine_loads_leaves_nothing_behind(tiny_options, tmp_path):
    with serving(tmp_path / "log", **tiny_options) as it:
        until(lambda: it.children("VLLM::EngineCore"), 120)
        it.process.send_signal(signal.SIGTERM)
        assert it.process.wait(STOP_S) == 0
        assert it.left_behind() == []
    last = last_line(it.log)
    assert (last["message"], last["stage"]) == ("stopped", "start")


def test_ctrl_c_reaches_the_whole_group_and_still_loses_nothing(tiny_options, tmp_path):
    with serving(tmp_path / "log", **tiny_options) as it:
        it.ready()
        body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(it.client.post, "/v1/completions", json=body)
            until(lambda: it.metric("vllm:num_requests_running") == 1)
            os.killpg(it.process.pid, signal.SIGINT)
            assert asking.result().json()["usage"]["completion_tokens"] == 500
        assert it.process.wait(STOP_S) == 0


def test_vllms_options_are_the_listed_ones():
    from tools.generate import vllm_options

    assert vllm_options.PATH.read_text() == vllm_options.text()
    assert json.loads(vllm_options.ENVIRONMENT.read_text()) == vllm_options.variables()


def test_vllms_words_are_the_listed_ones():
    from tools.generate import vllm_words

    assert vllm_words.PATH.read_text() == vllm_words.text()


def test_every_patch_is_in_place(server):
    assert "patches left out" not in server.logged()
