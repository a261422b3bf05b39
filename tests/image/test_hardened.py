# SPDX-License-Identifier: Apache-2.0
"""One server with all restrictions and KV cache tiers: no network, no privileges, only /tmp
writable, little memory. The tests use it in this order; the last one stops it.
"""

import json
import time

import pytest

from tests.image.conftest import docker, running, told
from tests.image.test_image import TINY

LIMIT = 4608 << 20


@pytest.fixture(scope="module")
def served(model, serves):
    locked = ["--network=none", "--read-only", "--tmpfs=/tmp:exec,size=512m", "--cap-drop=ALL"]
    locked += ["--security-opt=no-new-privileges", "--pids-limit=1000"]
    memory = (f"--memory={LIMIT}", f"--memory-swap={LIMIT}", "--shm-size=1g")
    tiers = {"OPTION_LMCACHE_AUTO_CONFIG": "true", "OPTION_ENABLE_PREFIX_CACHING": "false"}
    wide = {"OPTION_DTYPE": "float32"}  # fewer tokens fill a tier
    with running(*locked, *memory, model, environ={**TINY, **tiers, **wide}) as container:
        container.ready()
        yield container


def test_it_serves(served):
    body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
    first, again = (served.ask("/v1/completions", body)[0] for _ in range(2))
    assert json.loads(first)["choices"] == json.loads(again)["choices"]
    for path in ("/opt/slipway/x", "/opt/ml/model/x", "/x"):
        ended = docker("exec", served.id, "touch", path)
        assert "Read-only file system" in ended.stderr


def test_the_tier_in_memory_is_sized_from_the_limit_and_fills(served):
    size = served.metric("slipway_kv_tier_capacity_bytes")
    assert LIMIT / 20 < size < LIMIT / 4
    chunk = 256 * 4096  # tokens, and bytes of each
    asked = 0
    while (written := chunk * served.metric("lmcache_mp_l1_write_chunks_total")) < 1.2 * size:
        assert asked < 2 * size / chunk / 15, f"{written} of {size} bytes are written"
        bodies = [prompt(asked + number) for number in range(4)]
        served.ask("/v1/completions", *bodies)
        asked += len(bodies)
    assert served.metric("lmcache_mp_l1_memory_usage_bytes") > size / 2
    assert served.metric("slipway_kv_cache_server_up") == 1
    assert served.metric("slipway_kv_cache_server_restarts_total") == 0
    usage = served.ask("/v1/completions", prompt(asked - 1))[0]
    assert json.loads(usage)["usage"]["prompt_tokens_details"]["cached_tokens"] > 3500
    # LMCache's name for the number of a machine
    assert docker("exec", served.id, "test", "-e", "/tmp/.config/lmcache").returncode == 1
    state = served.state()
    assert state["Running"]
    assert not state["OOMKilled"]


def prompt(number: int) -> dict[str, object]:
    """4,000 tokens of the tiny model's."""
    return {"prompt": [number + 10, *range(1000, 2000)] * 4, "max_tokens": 1, "model": "lmi"}


def test_a_router_beside_it(served):
    flags = (f"--network=container:{served.id}", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL")
    environ = {"OPTION_ROUTER_REPLICAS": "http://127.0.0.1:8080", "OPTION_PORT": "8081"}
    with running(*flags, verb="route", port=8081, environ=environ) as router:
        router.ready()
        (answer,) = router.ask("/v1/completions", {"prompt": "Hello", "max_tokens": 4})
        assert json.loads(answer)["usage"]["completion_tokens"] == 4
        assert router.stop() == 0


def test_what_others_leave_behind_is_reaped(served):
    states = ["sh", "-c", "cat /proc/[0-9]*/stat | cut -d' ' -f3"]
    served.run("sh", "-c", "for i in 1 2 3; do sleep 1 >/dev/null & done")
    deadline = time.monotonic() + 60
    time.sleep(2)
    assert "Z" in served.run(*states)
    while "Z" in served.run(*states):
        assert time.monotonic() < deadline
        time.sleep(2)


def test_sigterm_under_load_loses_nothing(served):
    slow = {"max_tokens": 300, "ignore_eos": True, "model": "lmi"}
    client = served.asking("/v1/completions", *({"prompt": f"Tale {n}", **slow} for n in range(8)))
    deadline = time.monotonic() + 30
    while served.metric("vllm:num_requests_running") < 8:
        assert time.monotonic() < deadline
    began = time.monotonic()
    code = served.stop()
    assert time.monotonic() - began < 30
    assert [json.loads(body)["usage"]["completion_tokens"] for body in told(client)] == [300] * 8
    assert code == 0
    assert not served.state()["OOMKilled"]
