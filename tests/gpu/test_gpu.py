# SPDX-License-Identifier: Apache-2.0
"""The properties that a GPU must show before other measurements on it are worthwhile."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lmi_config.facts.machine import KV
from tests.e2e.conftest import ROOT
from tests.e2e.test_kv_tiers import LMCACHE, ask, prompt
from tests.e2e.test_speculative import HEADER
from tests.gpu.conftest import FOUND, ON_CPU, shared, start
from tests.support.harness.wait import until
from tests.support.models import tiny, tiny_draft, tiny_lora
from tools.rehearsal.shapes import MODELS

PROMPTS = ["The import statement", "An object", "for value in", "class"]
TOKENS = 24
COMPLETIONS = "/v1/completions"
FILLING = 80
"""Prompts that need more than the memory tier's room."""
LARGE = {"fp8": 9, "mistral": 15, "deepseek": 32, "qwen3_moe": 61}
"""Shapes of tools/rehearsal, with the GB of their weights."""
BENCHES = {
    "overhead": (["--rounds=3", "--scale=0.3"], ["--rounds=1", "--scale=0.05"]),
    "long_documents": (
        ["--model=tiny", "--published", "--arms", "none", "l1", "disk"],
        ["--model=tiny", "--documents=3", "--length=600", "--arms", "none", "l1"],
    ),
}
"""Arguments on a GPU, and on the CPU, which tries the suite itself."""


def generated(served, text, adapter=None, tokens=TOKENS):
    parameters = {"max_new_tokens": tokens, "do_sample": False, "ignore_eos_token": True}
    headers = {HEADER: adapter} if adapter else {}
    answer = served.invoke({"inputs": text, "parameters": parameters}, **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["generated_text"]


@pytest.fixture(scope="module")
def server(options, tmp_path_factory):
    with start(tmp_path_factory.mktemp("plain") / "log", **options) as served:
        served.ready()
        yield served


def test_greedy_answers_are_those_of_a_cpu(server):
    """The tiny model's greedy answers are those of transformers, computed on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.make())
    model = AutoModelForCausalLM.from_pretrained(tiny.make(), dtype=torch.float32)
    for text in PROMPTS:
        given = tokenizer(text, return_tensors="pt")
        found = model.generate(
            **given, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
        )
        new = found[0, given["input_ids"].shape[1] :]
        expected = tokenizer.decode(new, skip_special_tokens=True)
        # vLLM does not send an incomplete last character.
        assert generated(server, text) == expected.rstrip("\ufffd")


@pytest.mark.parametrize("clients", [1, 8])
def test_rate(server, clients, record_property):
    """Tokens a second of the tiny model, by one client and by eight: mostly overhead."""
    generated(server, "warm", tokens=8)
    each = 128
    began = time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        [*pool.map(lambda number: generated(server, f"{number}", tokens=each), range(clients))]
    rate = clients * each / (time.monotonic() - began)
    record_property("tokens_per_second", round(rate))


def test_sigterm_under_load_loses_nothing(options, tmp_path):
    """SIGTERM with eight requests running: each is answered whole, and the exit code is 0."""
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
    with start(tmp_path / "log", **options) as served, ThreadPoolExecutor(8) as pool:
        served.ready()
        asked = [pool.submit(served.client.post, COMPLETIONS, json=body) for _ in range(8)]
        until(lambda: served.metric("vllm:num_requests_running") > 0)
        served.process.send_signal(signal.SIGTERM)
        answered = [it.result() for it in asked]
        assert served.process.wait(40) == 0
        assert served.left_behind() == []
    done = [it.json()["usage"]["completion_tokens"] for it in answered if it.status_code == 200]
    refused = [it.status_code for it in answered if it.status_code != 200]
    assert done
    assert {*done} == {200}
    assert {*refused} <= {503}


def test_a_killed_engine_ends_the_server(options, tmp_path):
    """SIGKILL of the engine's core: the server ends with exit code 1 and leaves no process."""
    with start(tmp_path / "log", **options) as served:
        served.ready()
        (engine,) = served.children("VLLM::EngineCore")
        engine.kill()
        assert served.process.wait(60) == 1
        assert served.left_behind() == []


def test_adapters_beside_the_base(options, tmp_path):
    """Two LoRA adapters and the base in one batch answer as each does alone."""
    for seed, name in enumerate(("one", "two"), 1):
        tiny_lora.write(tmp_path / "adapters" / name, seed)
    more = {
        "OPTION_ENABLE_LORA": "true",
        "OPTION_MAX_LORAS": "2",
        "OPTION_ADAPTER_ROOTS": str(tmp_path / "adapters"),
    }
    with start(tmp_path / "log", **options, **more) as served:
        served.ready()
        for name in ("one", "two"):
            where = {"name": name, "src": str(tmp_path / "adapters" / name)}
            assert served.client.post("/adapters", params=where).status_code == 200
        asked = [(text, adapter) for text in PROMPTS for adapter in (None, "one", "two")]
        alone = [generated(served, *it) for it in asked]
        with ThreadPoolExecutor(len(asked)) as pool:
            together = [*pool.map(lambda it: generated(served, *it), asked)]
        assert together == alone
        assert len({*alone[:3]}) == 3


def test_tiers(options, tmp_path, record_property):
    """KV tiers in memory and on disk: a hit answers as the miss did, also after a restart."""
    (tmp_path / "lmcache.yaml").write_text(LMCACHE.format(folder=tmp_path, l1=0.3))
    more = {
        "OPTION_ENABLE_PREFIX_CACHING": "false",
        "OPTION_LMCACHE_CONFIG_FILE": str(tmp_path / "lmcache.yaml"),
    }
    with start(tmp_path / "log", **options, **more) as served:
        served.ready()
        text, cached = ask(served, prompt("one"))
        assert cached == 0
        again, cached = ask(served, prompt("one"))
        assert (again, cached > 0) == (text, True)
        record_property("cached_tokens", cached)
        # The memory is given to the GPU's driver, and has less room than is asked for.
        capacity = served.metric("slipway_kv_tier_capacity_bytes")
        for number in range(FILLING):
            ask(served, prompt(f"other {number}"))
        until(lambda: served.total("lmcache_mp_l1_memory_usage_bytes") > capacity / 2)
        assert served.total("lmcache_mp_l1_memory_usage_bytes") <= capacity
        assert served.metric("slipway_kv_cache_server_restarts_total") == 0
        until(lambda: [*(tmp_path / "kv" / KV).rglob("*.data")])
    with start(tmp_path / "log", **options, **more) as served:
        served.ready()
        again, cached = ask(served, prompt("one"))
        assert (again, cached > 0) == (text, True)


def test_eagle3(server, options, tmp_path):
    """An EAGLE-3 draft: some of its tokens are right, and the answers the same."""
    more = {"OPTION_SPECULATIVE_DRAFT_MODEL": str(tiny_draft.make("eagle3"))}
    with start(tmp_path / "log", **options, **more) as served:
        served.ready()
        for text in PROMPTS:
            assert generated(served, text) == generated(server, text)
        assert served.metric("vllm:spec_decode_num_accepted_tokens_total") > 0


def cache_tokens(served):
    """Tokens that the engine's KV cache has room for."""
    (found,) = set(
        re.findall('kv_cache_size_tokens="([0-9]+)"', served.client.get("/metrics").text)
    )
    return int(found)


def test_a_quantised_kv_cache(options, tmp_path, record_property):
    """KV in FP8 beside bfloat16: twice the tokens in the same memory; greedy answers repeat."""
    tokens = {}
    for kind in ("auto", "fp8"):
        more = {"OPTION_DTYPE": "bfloat16", "OPTION_KV_CACHE_DTYPE": kind}
        with start(tmp_path / kind, **{**options, **more}) as served:
            served.ready()
            tokens[kind] = cache_tokens(served)
            for text in PROMPTS:
                assert generated(served, text) == generated(served, text) != ""
    assert tokens["fp8"] == pytest.approx(2 * tokens["auto"], rel=0.02)
    record_property("tokens", tokens["fp8"])


@pytest.mark.skipif(ON_CPU, reason="without a GPU vLLM has no sleep mode")
def test_sleep_mode(server, options, tmp_path):
    """vLLM's own allocator, which supports sleep mode, has the weights and KV: the same answers."""
    with start(tmp_path / "log", **options, OPTION_ENABLE_SLEEP_MODE="true") as served:
        served.ready()
        for text in PROMPTS:
            assert generated(served, text) == generated(server, text)


@pytest.mark.parametrize("name", LARGE)
def test_large_shapes(name, tmp_path, record_property):
    """Published shapes with random weights: a long prompt and eight answers at a time."""
    if ON_CPU and name == "fp8":
        pytest.skip("the CPU engine has no FP8 weights")
    memory = min((gpu.memory or 0 for gpu in FOUND.shown), default=0)
    if not ON_CPU and memory < 1.4e9 * LARGE[name]:
        pytest.skip(f"its weights of {LARGE[name]} GB and their KV need a larger GPU")
    config = {**MODELS[name], "vocab_size": tiny.VOCABULARY}
    if ON_CPU:
        config |= {"num_hidden_layers": 2, "intermediate_size": 1024}
    folder = tmp_path / "model"
    shutil.copytree(tiny.make(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    asked = {
        "OPTION_MODEL_ID": str(folder),
        "OPTION_LOAD_FORMAT": "dummy",
        "OPTION_MAX_MODEL_LEN": "9k",
        "OPTION_TENSOR_PARALLEL_DEGREE": "1",
        # The module's server uses a part of the GPU.
        **({"OPTION_KV_CACHE_MEMORY_BYTES": "512M"} if ON_CPU else shared("0.85")),
    }
    with start(tmp_path / "log", **asked) as served:
        began = time.monotonic()
        served.ready()
        record_property("start_s", round(time.monotonic() - began))
        length = 500 if ON_CPU else 8000
        body = {"prompt": [*range(10, 110)] * (length // 100), "max_tokens": 1}
        began = time.monotonic()
        served.client.post(COMPLETIONS, json=body).raise_for_status()
        record_property("prefill_tokens_per_second", round(length / (time.monotonic() - began)))
        tokens = 16 if ON_CPU else 256
        body = {"prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True}
        with ThreadPoolExecutor(8) as pool:
            began = time.monotonic()
            for it in pool.map(lambda _: served.client.post(COMPLETIONS, json=body), range(8)):
                it.raise_for_status()
        record_property("tokens_per_second", round(8 * tokens / (time.monotonic() - began)))


@pytest.mark.parametrize("bench", BENCHES)
def test_benches(bench, record_property):
    """The costs of Slipway over plain vLLM at this GPU's rates, and the gain of KV cache tiers."""
    arguments, on_cpu = BENCHES[bench]
    command = (sys.executable, "-m", f"tools.bench.{bench}", *(on_cpu if ON_CPU else arguments))
    environ = {**os.environ, "OPTION_TENSOR_PARALLEL_DEGREE": "1", **shared()}
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    record_property("output", ended.stdout)


@pytest.mark.skipif(not ON_CPU and len(FOUND.shown) < 2, reason="there is only one GPU")
def test_two_ranks(options, tmp_path):
    """Tensor parallelism over two devices: both have a worker, and stream and whole agree."""
    with start(tmp_path / "log", **{**options, "OPTION_TENSOR_PARALLEL_DEGREE": "2"}) as served:
        served.ready()
        assert len(served.children("VLLM::Worker")) == 2
        parameters = {"max_new_tokens": 8, "do_sample": False}
        body = {"inputs": "An import", "parameters": parameters}
        whole = served.invoke(body).json()["generated_text"]
        assert served.lines({**body, "stream": True})[-1]["generated_text"] == whole
