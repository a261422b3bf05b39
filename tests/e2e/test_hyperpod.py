# SPDX-License-Identifier: Apache-2.0
"""The endpoint of HyperPod's documentation, applied to the stand-in for the operator: two replicas
of the tiny model, the router, and the stand-in for tiered storage.
"""

import dataclasses
import signal
from types import SimpleNamespace

import httpx
import pytest

from tests.applied import kept
from tests.e2e.conftest import PYTHON, ROOT, Warm
from tests.support.harness import metrics
from tests.support.harness.wait import until
from tests.support.models import tiny
from tools.hyperpod_local import manifest
from tools.hyperpod_local.operator import Operator, running

PROMPT = "The import statement is one of many that bind names. " * 100
MORE = (
    *("--max-model-len", "4096", "--tensor-parallel-size", "1", "--dtype", "float32"),
    *("--kv-cache-memory-bytes", "64M", "--no-enable-prefix-caching"),
)
"""Options that a tiny model needs on a machine without GPUs. Hits come from the tiers alone."""
PATIENCE_S = 300


@pytest.fixture(scope="module")
def applied(tmp_path_factory):
    endpoint = manifest.read(ROOT / "examples/hyperpod/endpoint.yaml")
    two = dataclasses.replace(endpoint, replicas=2)
    operator = Operator(
        two,
        model=str(tiny.make()),
        port=0,
        folder=tmp_path_factory.mktemp("pods"),
        more=MORE,
        l1_gib=0.25,
        image=PYTHON,
        start=Warm,
    )
    with kept(operator, PATIENCE_S) as said:
        yield SimpleNamespace(operator=operator, said=said)


def ask(url: str, name: str) -> tuple[str, int]:
    """The text of a chat's answer, and how many of its prompt's tokens were cached."""
    body = {
        "model": "/opt/ml/model",
        "messages": [{"role": "user", "content": f"{name}: {PROMPT}"}],
        "max_tokens": 16,
        "temperature": 0,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    details = found["usage"]["prompt_tokens_details"] or {}
    return found["choices"][0]["message"]["content"], details.get("cached_tokens") or 0


def series(url: str, name: str) -> float:
    return metrics.total(httpx.get(f"{url}/metrics").text, name)


def stored(applied) -> int:
    found = httpx.get(f"{applied.operator.store.url}/stats").json()
    return int(found.get("stored", 0))


def test_a_repeat_is_served_from_the_tiers_and_on_each_replica(applied):
    """Two requests through the router, then one to each replica; one of the replicas computed none
    of it.
    """
    router, *urls = applied.operator.url, *(it.program.url for it in applied.operator.pods)

    def total(name: str) -> float:
        return sum(series(url, name) for url in urls)

    text, cached = ask(router, "one")
    assert cached == 0
    until(lambda: stored(applied) >= 8)
    again, cached = ask(router, "one")
    assert again == text
    assert cached >= 1024
    until(lambda: total("lmcache:num_hit_tokens_total") >= 1024)
    looked_up = "lmcache:num_lookup_tokens_total", "lmcache:num_lookup_hits_total"
    until(lambda: total(looked_up[0]) > total(looked_up[1]) > 0)
    found = {url: ask(url, "one") for url in urls}
    assert {it for it, _ in found.values()} == {text}
    assert min(cached for _, cached in found.values()) >= 1024
    until(lambda: total("lmcache_mp_lookup_hit_l2_tokens_total") >= 1024)
    until(lambda: total("vllm:external_prefix_cache_hits_total") >= 3 * 1024)


def test_what_runs_is_shown(applied):
    def shown():
        (found,) = (it for it in running() if it["endpoint"]["NAME"] == "demo")
        return found

    until(lambda: shown()["endpoint"]["STATE"] == "DeploymentComplete")
    found = shown()
    assert found["endpoint"]["URL"] == applied.operator.url
    assert [(it["NAME"], it["READY"], it["STATUS"], it["RESTARTS"]) for it in found["pods"]] == [
        ("demo-1", "1/1", "Running", 0),
        ("demo-2", "1/1", "Running", 0),
        ("demo-default-router", "1/1", "Running", 0),
    ]
    assert f"ask it: curl {applied.operator.url}/v1/chat/completions" in applied.said


@pytest.mark.parametrize("fault", ["stopped", "killed"])
def test_faults_of_the_daemon_fail_nothing_and_it_is_used_again(applied, fault):
    store, pod = applied.operator.store, applied.operator.pods[1]
    text, _ = ask(pod.program.url, fault)
    store.kill(signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)
    assert ask(pod.program.url, fault)[0] == text
    assert ask(pod.program.url, f"{fault}, another")[0]
    until(lambda: "left out until it answers" in pod.program.logged())
    if fault == "stopped":
        store.kill(signal.SIGCONT)
    else:
        store.start()  # with a new segment, and nothing in it
        until(store.listens)
    before, tries = stored(applied), iter(range(1000))
    until(lambda: ask(pod.program.url, f"{fault} {next(tries)}") and stored(applied) > before, 120)
    assert ask(pod.program.url, fault)[0] == text


def test_a_replica_that_is_killed_comes_back_and_finds_its_caches_in_tiered_storage(applied):
    pod = applied.operator.pods[0]
    before = stored(applied)
    text, _ = ask(pod.program.url, "two")
    until(lambda: stored(applied) >= before + 8)
    pod.program.end()
    until(lambda: pod.restarts == 1, PATIENCE_S)
    until(lambda: applied.operator.complete, PATIENCE_S)
    until(lambda: "the shared KV store is used" in pod.program.logged().rpartition("listening")[2])
    assert ask(pod.program.url, "two")[0] == text
    until(lambda: series(pod.program.url, "lmcache_mp_lookup_hit_l2_tokens_total") >= 1024)


def test_a_long_prompt_is_computed_by_the_prefill_pod(tmp_path):
    """HyperPod's `pdSpec`, with a threshold that the tiny model's prompts can exceed."""
    endpoint = manifest.read(ROOT / "examples/hyperpod/prefill_decode.yaml")
    operator = Operator(
        dataclasses.replace(endpoint, threshold=500),
        model=str(tiny.make()),
        port=0,
        folder=tmp_path,
        more=MORE,
        l1_gib=0.25,
        image=PYTHON,
        start=Warm,
    )

    def handed_over() -> float:
        ended = metrics.samples(
            httpx.get(f"{operator.url}/metrics").text, "slipway_router_prefills_total"
        )
        return sum(it.value for it in ended if it.labels["end"] == "handed_over")

    def ready() -> bool:
        """Whether both pods can serve, not only the one that answers short prompts."""
        rows = httpx.get(f"{operator.url}/replicas").json()["replicas"]
        return [it["state"] for it in rows] == ["ready"] * 2

    with kept(operator, PATIENCE_S):
        until(ready)
        assert handed_over() == 0
        text, cached = ask(operator.url, "long")
        assert cached >= 1024
        assert handed_over() == 1
        assert ask(operator.url, "long")[0] == text
        assert handed_over() == 1  # the decode pod has it by now
