# SPDX-License-Identifier: Apache-2.0
"""The router in front of two real engines: everything that a client does with one server, and the
functions that need several.
"""

import contextlib
import json
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_parser,
)
from prometheus_client.parser import text_string_to_metric_families as text_parser

from tests import agents
from tests.collector import collecting
from tests.e2e.conftest import Served, serving
from tests.support.harness import ports
from tests.support.harness.wait import until
from tests.support.models import tiny, tiny_lora

WORDS = "".join(f"import statement {n}. " for n in range(60))  # two blocks


@pytest.fixture(scope="module")
def engines(tiny_options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("router")
    tiny_lora.write(folder / "one", 1)
    with ExitStack() as stack:
        running = [stack.enter_context(it) for it in started(folder, tiny_options)]
        for it in running:
            it.ready()
        yield running


def started(folder, tiny_options):
    for n in range(2):
        environ = {
            **tiny_options,
            "OPTION_KV_EVENTS": "true",
            "OPTION_KV_EVENTS_PORT": str(ports.free(2)),
            "OPTION_ENABLE_LORA": "true",
            "OPTION_ADAPTER_ROOTS": str(folder),
        }
        yield serving(folder / f"log-{n}", **environ)


@pytest.fixture
def routed(engines, tmp_path, request):
    """A router with the test's strategy."""
    strategy = getattr(request, "param", "kvaware")
    with routing(engines, tmp_path / "log", strategy) as it:
        yield it


def routing(engines: list[Served], log, strategy: str, **environ: str):
    options = {
        "OPTION_ROUTER_REPLICAS": ",".join(it.url for it in engines),
        "OPTION_ROUTING_STRATEGY": strategy,
        "OPTION_MODEL_ID": str(tiny.make()),
    }
    return serving(log, "./entrypoint.sh", "route", **{**options, **environ})


def ready(routed: Served) -> None:
    routed.ready()
    until(lambda: all(it["state"] == "ready" for it in replicas(routed)))


def replicas(routed: Served):
    return routed.client.get("/replicas").json()["replicas"]


def total(engines: list[Served], series: str) -> float:
    for it in engines:
        it.counted()
    return sum(it.total(series) for it in engines)


@pytest.mark.parametrize("routed", ["prefixaware", "session", "roundrobin"], indirect=True)
def test_the_apis_are_those_of_one_server(routed, tiny_options):
    ready(routed)
    assert routed.invoke({"inputs": "Hi", "parameters": {"max_new_tokens": 3}}).json()
    lines = routed.lines({"inputs": "Hi", "parameters": {"max_new_tokens": 3}, "stream": True})
    assert len(lines) == 3
    models = [it.id for it in routed.openai.models.list()]
    assert models[0] == "tiny-llama-1"
    message = {"role": "user", "content": "Hi"}
    for name in ("lmi", tiny_options["OPTION_MODEL_ID"]):
        chunks = routed.openai.chat.completions.create(
            model=name, messages=[message], max_tokens=4, stream=True
        )
        assert list(chunks)[-1].choices[0].finish_reason == "length"
    assert routed.invoke({"inputs": 5}).status_code == 424


def test_kv_aware_finds_what_engines_have_also_after_a_restart(engines, tmp_path):
    """Prompts in every format go to the engines directly first, and later through the router."""
    texts = [f"{n} {WORDS}" for n in range(6)]
    hits = "vllm:prefix_cache_hits_total"

    def asks(client, text):
        message = {"role": "user", "content": text}
        asked = {"messages": [message], "max_tokens": 1}
        before = total(engines, hits)
        for path, body in (
            ("/v1/completions", {"prompt": "a " + text, "max_tokens": 1}),
            ("/v1/chat/completions", asked),
            ("/invocations", {"inputs": "b " + text, "parameters": {"max_new_tokens": 1}}),
            ("/v1/responses", {"input": "c " + text, "max_output_tokens": 1}),
            ("/v1/messages", {"model": "lmi", "system": "d " + text, **asked}),
        ):
            assert client.post(path, json=body).status_code == 200
        return total(engines, hits) - before

    for n, text in enumerate(texts):
        asks(engines[n % 2].client, text)
    all_of_it = sum(asks(engines[n % 2].client, text) for n, text in enumerate(texts))
    assert all_of_it > len(texts) * 5 * BLOCK
    for attempt in ("first", "again"):
        with routing(engines, tmp_path / attempt, "kvaware") as routed:
            ready(routed)
            until(lambda it=routed: all(row["kv_cache_known"] for row in replicas(it)))
            found = sum(asks(routed.client, text) for text in texts)
            # On a busy machine, tokens may come too late to be routed by.
            series = 'slipway_router_fallbacks_total{reason="time"} '
            lines = routed.client.get("/metrics").text.splitlines()
            late = sum(float(line.split()[-1]) for line in lines if line.startswith(series))
            assert all_of_it - late * 3 * BLOCK <= found <= all_of_it
            assert "knows no more" not in routed.log.read_text()


@pytest.mark.parametrize("routed", ["prefixaware", "kvaware"], indirect=True)
def test_an_agent_goes_on_where_it_began(routed, engines):
    """With either strategy, turns would otherwise alternate between the replicas."""
    ready(routed)
    until(lambda: all(row.get("kv_cache_known", True) for row in replicas(routed)))
    said: dict[str, Any] = {"stream": False, "tools": []}
    call = {"id": "1", "call_id": "1", "name": "look", "input": {}, "arguments": "{}"}
    for n in range(4):
        task = f"{routed.port} {n} {WORDS}"  # a task that no engine has seen
        further = agents.codex_goes_on(call, WORDS)
        first = agents.codex(task, **said, max_output_tokens=1)
        second = agents.codex(task, *further, **said, max_output_tokens=1)
        answers = [asked_by(routed, "/v1/responses", body) for body in (first, second)]
        usages = [answer["usage"] for _, answer in answers]
        assert answers[0][0] == answers[1][0]
        cached = usages[1]["input_tokens_details"]["cached_tokens"]
        assert cached >= usages[0]["input_tokens"] // BLOCK * BLOCK
        further = agents.claude_goes_on(call, WORDS)
        first = agents.claude(task, bill=f"{n}a", **said, max_tokens=1)
        second = agents.claude(task, *further, bill=f"{n}b", **said, max_tokens=1)
        answers = [asked_by(routed, agents.CLAUDE_PATH, body) for body in (first, second)]
        assert answers[0][0] == answers[1][0]
        assert answers[1][1]["usage"]["cache_read_input_tokens"] >= 2 * BLOCK


def asked_by(routed: Served, path: str, body: object) -> tuple[str, dict[str, Any]]:
    """The replica that answers an agent, and its answer."""
    answer = routed.client.post(path, json=body, headers={"X-Slipway-Route": "1"})
    assert answer.status_code == 200, answer.text
    return answer.headers["x-slipway-route"].split()[1], answer.json()


DOCUMENTS = 20
BLOCK, CHUNK = 128, 256
TOKEN = 4096
"""Bytes of a token's KV in the tiny model."""


@pytest.fixture(scope="module")
def collector():
    with collecting() as it:
        yield it


@pytest.fixture(scope="module")
def engines_with_memory(tiny_options, tmp_path_factory, collector):
    """Two engines whose caches hold three documents of 1,280 tokens, and whose L1 holds thirty."""
    folder = tmp_path_factory.mktemp("memory")
    tiny_lora.write(folder / "one", 1)
    (folder / "lmcache.yaml").write_text("max_local_cpu_size: 0.16\n")
    environ = {
        **tiny_options,
        "OPTION_DTYPE": "float32",  # in 16 bits, the rest of a batch decides between near ties
        "OPTION_MAX_MODEL_LEN": "2048",
        "OPTION_KV_CACHE_MEMORY_BYTES": str(34 * BLOCK * TOKEN),
        "OPTION_LMCACHE_CONFIG_FILE": str(folder / "lmcache.yaml"),
        "OPTION_KV_EVENTS": "true",
        "OPTION_ENABLE_LORA": "true",
        "OPTION_ADAPTER_ROOTS": str(folder),
        **collector.environ(),
    }
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                serving(folder / f"log-{n}", **environ, OPTION_KV_EVENTS_PORT=str(ports.free(2)))
            )
            for n in range(2)
        ]
        for it in running:
            it.ready()
        yield running


@pytest.mark.parametrize("strategy", ["prefixaware", "kvaware"])
def test_each_document_is_computed_on_one_replica(engines_with_memory, tmp_path, strategy):
    """Two rounds in random order: a prefix that an engine has evicted is loaded from its memory
    tier.
    """
    engines = engines_with_memory
    draw, computed = random.Random(strategy), "vllm:request_prefill_kv_computed_tokens_sum"
    homes: list[set[str]] = [set() for _ in range(DOCUMENTS)]
    counts = []
    with routing(engines, tmp_path / "log", strategy) as routed:
        ready(routed)
        until(lambda: all(row.get("kv_cache_known", True) for row in replicas(routed)))
        for _ in range(2):
            before = total(engines, computed)
            for n in draw.sample(range(DOCUMENTS), DOCUMENTS):
                home, tokens = ask_for(routed, strategy, n)
                if tokens > CHUNK:  # a document's end is in no chunk
                    homes[n].add(home)
            counts.append(total(engines, computed) - before)
        until(lambda: reported(replicas(routed), strategy))
    assert [len(it) for it in homes] == [1] * DOCUMENTS
    first, second = counts
    assert first > DOCUMENTS * 5 * CHUNK
    assert second < 0.1 * first
    # Under the names in HyperPod's documentation.
    for it in engines:
        for name in ("lmcache:num_lookup_hits_total", "lmcache:num_hit_tokens_total"):
            until(lambda it=it, name=name: it.metric(name) >= 5 * CHUNK)


def ask_for(routed: Served, strategy: str, n: int) -> tuple[str, int]:
    """Ask about a document. Returns the answering replica, and how many tokens it computed."""
    text = (
        f"{strategy}, document {n:02}: "
        + "The import statement is one of many that bind names. " * 116
    )
    answer = routed.client.post(
        "/v1/completions",
        json={"prompt": text, "max_tokens": 1},
        headers={"X-Slipway-Route": "1"},
    )
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return answer.headers["x-slipway-route"].split()[1], usage["prompt_tokens"] - cached


def reported(rows: list[dict[str, Any]], strategy: str) -> bool:
    """Whether the router knows the size of the memory tiers and their contents."""
    known = sum(row["kv_tokens_reported"]["memory"] for row in rows if strategy == "kvaware")
    return all(row["kv_tier_tokens"]["memory"] > 30 * 5 * CHUNK for row in rows) and (
        strategy != "kvaware" or known >= DOCUMENTS * 5 * CHUNK
    )


@contextlib.contextmanager
def refusing(engine: Served):
    """A replica that mirrors this one's state, and refuses every request for lack of room."""

    class Busy(BaseHTTPRequestHandler):
        def do_GET(self):
            answer = httpx.get(engine.url + self.path)
            self.answer(answer.status_code, answer.content)

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.answer(503, b"{}")

        def answer(self, status, body):
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.05])
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def whole(collector, trace, parent):
    """The spans of a trace, once the engine's spans and all parents have arrived."""

    def complete():
        found = collector.of(trace)
        parents = {it.parent for it in found} - {it.id for it in found}
        return {"llm_request", "kv_cache_lookup"} <= {it.name for it in found} and (
            parents == {parent}
        )

    until(complete)
    return collector.of(trace)


def test_a_trace_goes_from_the_client_into_the_engine(engines_with_memory, collector, tmp_path):
    """The request is refused by one replica; the other replica loads its adapter."""
    engine, parent, id_ = engines_with_memory[0], "7" * 16, "sk-proj-" + "x" * 48
    source = {"name": "one", "src": str(engine.log.parent / "one")}
    body = {"model": "one", "prompt": f"my own words {WORDS}", "max_tokens": 4}
    trace, found = "", []
    log = tmp_path / "log"
    with refusing(engine) as busy:
        options = collector.environ() | {"OPTION_ROUTING_STRATEGY": "roundrobin"}
        options["OPTION_ROUTER_REPLICAS"] = f"{busy},{engine.url}"
        with serving(log, "./entrypoint.sh", "route", **options) as routed:
            ready(routed)
            for n in range(1, 3):  # one of them goes to the busy one first
                assert engine.client.post("/adapters", params=source).status_code == 200
                trace = f"{n}" * 32
                headers = {"traceparent": f"00-{trace}-{parent}-01", "x-request-id": id_}
                answer = routed.client.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                assert engine.client.delete("/adapters/one").status_code == 200
                found = whole(collector, trace, parent)
                if any(it.failed for it in found):
                    break
    by_id = {it.id: it for it in found}
    edges = [(it.service, it.name, getattr(by_id.get(it.parent), "name", "")) for it in found]
    api, engines_own = "POST /v1/completions", "text_completion one"
    assert sorted(edges) == sorted(
        [
            ("slipway-router", api, ""),
            *[("slipway-router", "choose", api), ("slipway-router", "POST", api)] * 2,
            ("slipway", api, "POST"),
            ("slipway", "adapter", api),
            ("slipway", "queue", api),
            ("slipway", engines_own, api),
            ("slipway", "llm_request", engines_own),
            ("slipway", "kv_cache_lookup", engines_own),
        ]
    )
    for it in found:
        if outer := by_id.get(it.parent):
            assert outer.span.start_time_unix_nano <= it.span.start_time_unix_nano
            if it.service == outer.service:  # else the last byte may be there before it is written
                assert it.span.end_time_unix_nano <= outer.span.end_time_unix_nano
    (adapter,) = [it for it in found if it.name == "adapter"]
    assert adapter.attributes == {"slipway.adapter": "one", "slipway.adapter.loaded": False}
    assert "my own words" not in str([it.span for it in found])
    for file, fact in ((log, "attempts"), (engine.log, "adapter")):
        (line,) = [it for it in file.read_text().splitlines() if f'"trace_id":"{trace}"' in it]
        assert json.loads(line)[fact] == {"attempts": 2, "adapter": "one"}[fact]
        assert json.loads(line)["status"] == 200
        assert id_ not in line


STREAMS = 50


def stream(n: int) -> tuple[str, dict[str, Any]]:
    """The path and body of a stream: greedy ones, and some whose rest cannot be continued from
    tokens.
    """
    body: dict[str, Any] = {
        "max_tokens": 100,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if n % 5 == 3:
        body |= {"temperature": 1, "seed": n}
    if n % 5 == 4:
        body |= {"stop": ["no such text"]}
    if n % 2:
        text = {"role": "user", "content": f"The import statement {n}"}
        return "/v1/chat/completions", body | {"messages": [text]}
    return "/v1/completions", body | {"prompt": f"The import statement {n}"}


def read(served: Served, n: int, begun: Callable[[], object]) -> tuple[str, int, list[int]]:
    """A stream's text, its number of different ids, and its token counts."""
    path, body = stream(n)
    with served.client.stream("POST", path, json=body) as answer:
        lines = []
        for line in answer.iter_lines():
            lines.append(line)
            if len(lines) == 20:
                begun()
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    found = [json.loads(event) for event in events]
    choices = [choice for event in found for choice in event["choices"]]
    text = "".join(it["text"] if "text" in it else it["delta"]["content"] for it in choices)
    usage = found[-1]["usage"]
    counts = [usage[f"{what}_tokens"] for what in ("prompt", "completion", "total")]
    return text, len({event["id"] for event in found}), counts


def under_way(routed: Served) -> dict[str, int]:
    return {it["replica"]: it["requests_under_way"] for it in replicas(routed)}


def series(parser, text):
    """Names and labels, read by a parser that accepts only its own format."""
    return {
        (sample.name, frozenset(sample.labels.items()))
        for family in parser(text)
        for sample in family.samples
    }


def test_a_scraper_gets_the_same_series_in_openmetrics(engines_with_memory):
    it = engines_with_memory[0]
    traced = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    assert it.invoke({"inputs": "a"}, **traced).status_code == 200
    asks = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.2"}
    found = [""]

    def same():  # except for a request that has come in between
        found[:] = [it.client.get("/metrics", headers=headers).text for headers in (asks, {})]
        return series(openmetrics_parser, found[0]) == series(text_parser, found[1])

    until(same)
    assert "\nvllm:prompt_tokens_total{" in found[0]
    assert f'# {{trace_id="{"ab" * 16}"}}' in found[0]


def test_streams_outlive_their_replica(engines_with_memory, tmp_path):
    """The last test of these engines: it kills one while its streams are in flight."""
    victim, other = engines_with_memory
    environ = {"OPTION_ROUTER_CONTINUE_STREAMS": "true"}
    begun = threading.Semaphore(0)
    with (
        routing([victim, other], tmp_path / "log", "roundrobin", **environ) as routed,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        ready(routed)
        expected = [pool.submit(read, other, n, lambda: None) for n in range(STREAMS)]
        wanted = [it.result() for it in expected]
        with victim.held():
            streams = [pool.submit(read, routed, n, begun.release) for n in range(STREAMS)]
            until(lambda: under_way(routed)[victim.url] == STREAMS // 2)
        for _ in range(STREAMS // 2 + 1):  # one at least is the victim's
            begun.acquire(timeout=60)
        victim.end()
        found = [it.result() for it in streams]
        assert found == wanted
        assert {it[1] for it in found} == {1}
        assert routed.metric('slipway_router_retries_total{reason="stream"}') > 0


def test_adapters_are_registered_everywhere(engines, routed):
    ready(routed)
    source = {"name": "one", "src": str(engines[0].log.parent / "one")}
    assert routed.client.post("/adapters", params=source).status_code == 200
    for it in engines:
        assert it.client.get("/adapters/one").status_code == 200
    body = {"inputs": "Hi", "adapters": "one", "parameters": {"max_new_tokens": 2}}
    assert all(routed.invoke(body).status_code == 200 for _ in range(6))
    assert routed.client.delete("/adapters/one").status_code == 200
    for it in engines:
        assert it.client.get("/adapters/one").status_code == 404


def test_a_session_goes_where_it_began(engines, routed):
    ready(routed)
    for _ in range(4):
        answer = routed.client.post("/invocations", json={"requestType": "NEW_SESSION"})
        session = answer.headers["x-amzn-sagemaker-new-session-id"].partition(";")[0]
        header = {"X-Amzn-SageMaker-Session-Id": session}
        body = {"inputs": "Hi", "parameters": {"max_new_tokens": 1}}
        for _ in range(5):
            assert routed.client.post("/invocations", json=body, headers=header).status_code == 200


def test_an_engine_that_stops_or_dies_costs_no_answer(engines, routed):
    """The last test: it takes the engines down."""
    ready(routed)
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 30, "ignore_eos_token": True}}
    failures: list[httpx.Response] = []
    answers: list[httpx.Response] = []
    stop = threading.Event()

    def ask():
        while not stop.is_set():
            answer = routed.invoke(body)
            (answers if answer.status_code == 200 else failures).append(answer)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: len(answers) > 20)
    engines[0].process.send_signal(signal.SIGTERM)
    until(lambda: engines[0].process.poll() is not None)
    count = len(answers)
    until(lambda: len(answers) > count + 20)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures, failures[0].text
    wanted = {engines[0].url: "down", engines[1].url: "ready"}
    until(lambda: {it["replica"]: it["state"] for it in replicas(routed)} == wanted)
    engines[1].end()
    until(lambda: routed.client.get("/ping").status_code == 503)
    refused = routed.invoke(body)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
