# SPDX-License-Identifier: Apache-2.0
"""Two copies of the model in one container, each with the real engine: one start for all tests."""

import contextlib
import json
import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.e2e.conftest import ROOT, START_S, serving
from tests.support.harness import metrics
from tests.support.harness.wait import until
from tests.support.models import tiny_lora

PATHS = yaml.safe_load((ROOT / "docs/reference/openapi.yaml").read_text())["paths"]
METHODS = ("get", "post", "put", "delete")
HAS_NOT = ("adapters", "kv_sessions")
"""The session's server has neither adapters nor tiers."""
EACH = [
    (path, method)
    for path in PATHS
    for method in METHODS
    if method in PATHS[path] and not any(it in path for it in HAS_NOT)
]
TOKENS = 3
PROMPT = {"prompt": "Hi", "max_tokens": TOKENS, "temperature": 0, "seed": 1}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
LMI = {"inputs": "Hi", "parameters": {"max_new_tokens": 3}}
BODIES = {
    **dict.fromkeys(("/invocations", "/predictions", "/predictions/{model}"), LMI),
    "/models/{model}/invoke": LMI,
    "/v1/completions": PROMPT,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/v1/messages": {"model": "lmi", **CHAT},
    "/v1/messages/count_tokens": {"model": "lmi", "messages": CHAT["messages"]},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
}
OWN = ("/metrics", "/server/metrics", "/ui/status", "/ping", "/health")
"""Paths whose bodies are about the router and its copies."""
LONG = " ".join(f"word{n}" for n in range(200))


@pytest.fixture(scope="module")
def copies(tiny_options, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("copies")
    tiny_lora.write(folder / "one", 1)
    environ = {
        **tiny_options,
        "OPTION_COPIES": "2",
        "OPTION_DTYPE": "float32",
        "OPTION_ENABLE_LORA": "true",
        "OPTION_ADAPTER_ROOTS": str(folder),
        "OPTION_LMCACHE_AUTO_CONFIG": "true",
        "OPTION_KV_L1_SIZE": "512M",
        "OPTION_KV_DISK_SIZE": "0",
        "OPTION_SESSIONS_PATH": str(folder / "sessions"),
        "OPTION_BATCH_FOLDER": str(folder / "batches"),
    }
    with serving(folder / "log", "./entrypoint.sh", "serve", **environ) as it:
        it.folder = folder  # type: ignore[attr-defined]
        request.getfixturevalue("server")  # which starts meanwhile
        it.ready()
        yield it


@pytest.fixture(scope="module")
def one(copies, request):
    """The session's server, with one copy."""
    return request.getfixturevalue("server")


def lines(served):
    return [json.loads(it) for it in served.logged().splitlines() if it.startswith("{")]


def parts(served):
    """The children by their ports."""
    found = {}
    own = psutil.Process(served.process.pid)
    for child in own.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "serving.copies" in " ".join(child.cmdline()):
                ports = {it.laddr.port for it in child.net_connections() if it.status == "LISTEN"}
                found[min(ports, default=0)] = child
    return found


def ports_of(served):
    replicas = served.client.get("/replicas").json()["replicas"]
    return [int(it["replica"].rpartition(":")[2]) for it in replicas]


def shape(value):
    """The keys and kinds of an answer, without its values."""
    if isinstance(value, dict):
        return {name: shape(it) for name, it in value.items()}
    if isinstance(value, list):
        return [shape(it) for it in value[:1]]
    return type(value).__name__


def answered(client, path, method, body=None):
    url = path.replace("{model}", "lmi").replace("{id}", "missing").replace("{name}", "missing")
    answer = client.request(method, url, json=body)
    kind = answer.headers.get("content-type", "")
    found = shape(answer.json()) if kind.startswith("application/json") else kind
    return answer.status_code, kind.partition(";")[0], found


@pytest.mark.parametrize(("path", "method"), EACH)
def test_every_path_answers_as_one_server_does(one, copies, path, method):
    for body in (BODIES.get(path), {"inputs": 5, "messages": 5, "prompt": {}}):
        if method == "get" and body:
            continue
        right = answered(one.client, path, method, body)
        found = answered(copies.client, path, method, body)
        assert found[:2] == right[:2]
        assert path in OWN or found == right or path.startswith(("/v1/files", "/v1/batches"))


@pytest.mark.parametrize(
    ("path", "method"),
    [("/nothing", "GET"), ("/v1/completions", "PUT"), ("/invocations", "OPTIONS")],
)
def test_what_is_refused_is_refused_as_by_one_server(one, copies, path, method):
    assert answered(copies.client, path, method) == answered(one.client, path, method)


def test_the_apis_are_those_of_one_server(one, copies):
    parameters = {"max_new_tokens": 5, "do_sample": False}
    asked = {"inputs": "The capital", "parameters": parameters}
    right, found = one.invoke(asked), copies.invoke(asked)
    assert (found.status_code, found.json()) == (200, right.json())
    stream = copies.lines(asked | {"stream": True})
    assert len(stream) == 5
    chunks = copies.openai.chat.completions.create(
        model="lmi", messages=CHAT["messages"], max_tokens=4, stream=True
    )
    assert list(chunks)[-1].choices[0].finish_reason == "length"


def test_one_server_has_no_router_and_no_supervisor(one):
    below = psutil.Process(one.process.pid).children(recursive=True)
    assert not any("serving" in " ".join(it.cmdline()) for it in below)


def test_requests_go_to_both_copies_and_a_client_sees_one_server(copies):
    seen = {
        copies.invoke({**LMI, "inputs": f"{n} {LONG}"}, **{"X-Slipway-Route": "1"})
        .headers["x-slipway-route"]
        .split()[1]
        for n in range(8)
    }
    assert len(seen) == 2


def test_the_router_knows_the_tiers_and_lines_have_the_copy(copies):
    rows = copies.client.get("/replicas").json()["replicas"]
    assert [row["copy"] for row in rows] == [0, 1]
    assert all(row["kv_tier_tokens"]["memory"] > 1000 for row in rows)
    assert {row["kv_chunk_tokens"] for row in rows} != {0}
    found = {(it.get("process", "").partition("_")[0], it.get("copy")) for it in lines(copies)}
    assert {("EngineCore", 0), ("EngineCore", 1)} <= found
    served = [it for it in lines(copies) if it["logger"] == "serving.access"]
    assert {it["copy"] for it in served} == {0, 1}


def test_both_copies_answer_the_lines_of_a_batch(copies):
    requests = [
        {"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": PROMPT}
        for n in range(24)
    ]
    content = "\n".join(json.dumps(it) for it in requests)
    before = tokens_of(copies)
    file = copies.openai.files.create(file=("in.jsonl", content.encode()), purpose="batch")
    batch = copies.openai.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    until(lambda: copies.openai.batches.retrieve(batch.id).status == "completed", 60)
    done = copies.openai.batches.retrieve(batch.id)
    assert (done.request_counts.completed, done.request_counts.failed) == (24, 0)
    answers = copies.openai.files.content(done.output_file_id).text.splitlines()
    texts = {json.loads(it)["response"]["body"]["choices"][0]["text"] for it in answers}
    assert texts == {copies.openai.completions.create(model="lmi", **PROMPT).choices[0].text}
    more = {copy: count - before[copy] for copy, count in tokens_of(copies).items()}
    assert sum(more.values()) == 25 * TOKENS
    assert min(more.values()) > TOKENS


def tokens_of(served):
    """Generated tokens, by the copy."""
    found = {"0": 0.0, "1": 0.0}
    for it in metrics.samples(served.client.get("/metrics").text, "slipway_tokens_total"):
        if it.labels["direction"] == "output":
            found[it.labels["copy"]] += it.value
    return found


def test_what_one_copy_has_computed_another_loads(copies):
    """The copy that has computed a prompt is suspended. The other one loads it from the tiers."""
    prompt = " ".join(f"shared{n}" for n in range(700))
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    first = copies.client.post("/v1/completions", json=body, headers={"X-Slipway-Route": "1"})
    usage = first.json()["usage"]
    at = first.headers["x-slipway-route"].split()[1]
    stored = "lmcache_mp_l1_write_chunks_total"
    until(lambda: stored in copies.client.get("/metrics").text, 30)
    victim = parts(copies)[int(at.rpartition(":")[2])]
    victim.suspend()  # its copy of the KV cannot be used, and the router asks the other
    try:
        until(lambda: copies.ready_replicas() == 1, 60)
        second = copies.client.post("/v1/completions", json=body)
    finally:
        victim.resume()
    until(lambda: copies.ready_replicas() == 2, 60)
    assert second.json()["choices"][0]["text"] == first.json()["choices"][0]["text"]
    cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    whole = usage["prompt_tokens"] // 128 * 128  # tokens of whole chunks
    assert cached >= 0.95 * whole


def a_copy(served):
    """One copy's process, and the other processes."""
    found = parts(served)
    victim = found.pop(ports_of(served)[0])
    return victim, [*found.values()]


def test_a_copy_that_is_killed_comes_back_with_its_adapters_and_the_other_serves_meanwhile(copies):
    body = {"name": "one", "src": str(copies.folder / "one")}
    assert copies.client.post("/adapters", json=body).status_code == 200
    victim, survivors = a_copy(copies)
    below = victim.children(recursive=True)
    victim.kill()
    statuses = []

    def back():
        statuses.append(copies.invoke({**LMI, "inputs": f"{len(statuses)}"}).status_code)
        return "is started again" in copies.logged() and copies.ready_replicas() == 2

    until(back, START_S)
    assert {*statuses} == {200}
    assert not any(it.is_running() and it.status() != "zombie" for it in below)
    assert all(it.is_running() for it in survivors)
    assert copies.client.get("/ping").status_code == 200
    told = [it for it in lines(copies) if "is started again" in it["message"]]
    assert told[-1]["copy"] in (0, 1)
    for n in range(6):
        asked = {**LMI, "inputs": f"{n} {LONG}", "adapters": "one"}
        assert copies.invoke(asked).status_code == 200


def test_a_router_that_is_killed_comes_back(copies):
    router = parts(copies)[copies.port]
    router.kill()
    # New connections wait in the socket, which the supervisor also has.
    assert httpx.get(f"{copies.url}/ping", timeout=60).status_code in (200, 503)
    until(lambda: httpx.get(f"{copies.url}/ping").status_code == 200, 60)
    copies.client.close()  # its connections are those of the old router
    copies.client = httpx.Client(base_url=copies.url, timeout=120)
    assert copies.invoke(LMI).status_code == 200


def test_sigterm_lets_requests_finish(copies):
    """The last test of this file: it stops the copies."""
    asked = {"inputs": "Hi", "parameters": {"max_new_tokens": 400}, "stream": True}
    with copies.client.stream("POST", "/invocations", json=asked) as answer:
        got = answer.iter_lines()
        next(got)
        os.kill(copies.process.pid, signal.SIGTERM)
        rest = sum(1 for line in got if line)
    assert rest == 399
    assert copies.process.wait(30) == 0
    assert lines(copies)[-1]["message"] == "stopped"
    assert not Path(f"/proc/{copies.process.pid}").exists()
