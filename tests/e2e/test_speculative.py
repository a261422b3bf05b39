# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding on the real engine: a draft changes the speed of an answer, never
its text.
"""

import json
from typing import Any

import pytest

from tests.e2e.conftest import serving
from tests.e2e.test_kv_tiers import LMCACHE, prompt
from tests.support.harness.wait import until
from tests.support.models import tiny, tiny_draft, tiny_lora

HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
PROMPTS = ["The import statement", "An object", "for value in", "class"]
TOKENS = 24
ADAPTERS = (None, "one", "two")


@pytest.fixture(scope="module")
def options(tiny_options, tmp_path_factory):
    """Two adapters, in float32: in 16 bits, which tokens share a step decides between near ties."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two"), 1):
        tiny_lora.write(root / name, seed)
    return {
        **tiny_options,
        "OPTION_ENABLE_LORA": "true",
        "OPTION_MAX_LORAS": "2",
        "OPTION_ADAPTER_ROOTS": str(root),
        "OPTION_DTYPE": "float32",
    }


def register(served, options):
    for name in ("one", "two"):
        src = f"{options['OPTION_ADAPTER_ROOTS']}/{name}"
        found = served.client.post("/adapters", params={"name": name, "src": src})
        assert found.status_code == 200, found.text


def ask(served, text, adapter=None, tokens=TOKENS):
    parameters = {"max_new_tokens": tokens, "do_sample": False, "ignore_eos_token": True}
    body = {"inputs": text, "parameters": parameters | {"details": True}}
    found = served.invoke(body, **({HEADER: adapter} if adapter else {}))
    assert found.status_code == 200, found.text
    return found.json()


@pytest.fixture(scope="module")
def plain(options, tmp_path_factory):
    """The answer of each adapter to each prompt without speculation."""
    with serving(tmp_path_factory.mktemp("plain") / "log", **options) as it:
        it.ready()
        register(it, options)
        return {
            (text, adapter): ask(it, text, adapter)["generated_text"]
            for text in PROMPTS
            for adapter in ADAPTERS
        }


def drafted(method: str) -> dict[str, str]:
    """The options for a method, with a draft if it needs one."""
    if method == "ngram":
        config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
        return {"OPTION_SPECULATIVE_CONFIG": json.dumps(config)}
    if method == "draft model":
        return {"OPTION_SPECULATIVE_DRAFT_MODEL": str(tiny.make())}
    # As the library speculators saves heads: tests/tools/test_tiny_draft.py compares them.
    more = {"vocabulary": 1024, "speculators": True} if method == "speculators" else {}
    return eagle("eagle" if method == "eagle" else "eagle3", **more)


def eagle(kind: str, **more: Any) -> dict[str, str]:
    return {"OPTION_SPECULATIVE_DRAFT_MODEL": str(tiny_draft.make(kind, **more))}


OF_OURS = pytest.param("eagle3", marks=pytest.mark.nightly)  # as speculators', in another format


@pytest.fixture(scope="module", params=["ngram", "draft model", "eagle", OF_OURS, "speculators"])
def speculating(request, options, tmp_path_factory):
    more = drafted(request.param)
    with serving(tmp_path_factory.mktemp("speculating") / "log", **options, **more) as it:
        it.ready()
        register(it, options)
        yield it


def accepted(served):
    return served.metric("vllm:spec_decode_num_accepted_tokens_total")


def test_the_answers_are_those_without_it(speculating, plain):
    before = accepted(speculating)
    for (text, adapter), expected in plain.items():
        answer = ask(speculating, text, adapter)
        assert answer["generated_text"] == expected
        assert answer["details"]["generated_tokens"] == TOKENS
        assert len(answer["details"]["tokens"]) == TOKENS
    until(lambda: accepted(speculating) > before)


def test_a_stream_has_a_line_for_every_token(speculating, plain):
    parameters = {"max_new_tokens": TOKENS, "do_sample": False, "ignore_eos_token": True}
    body = {"inputs": PROMPTS[0], "parameters": parameters | {"details": True}, "stream": True}
    lines = speculating.lines(body)
    assert len(lines) == TOKENS
    assert lines[-1]["generated_text"] == plain[PROMPTS[0], None]
    assert lines[-1]["details"]["generated_tokens"] == TOKENS
    assert "".join(line["token"]["text"] for line in lines) == lines[-1]["generated_text"]


def test_all_together(options, tmp_path):
    """Two ranks, a draft, two adapters and two tiers: for all three a hit answers as a miss
    does.
    """
    (tmp_path / "lmcache.yaml").write_text(LMCACHE.format(folder=tmp_path, l1=0.3))
    more = {
        "OPTION_TENSOR_PARALLEL_DEGREE": "2",
        **eagle("eagle"),
        "OPTION_LMCACHE_CONFIG_FILE": str(tmp_path / "lmcache.yaml"),
    }
    with serving(tmp_path / "log", **options, **more) as it:
        it.ready()
        register(it, options)
        assert len(it.children("VLLM::Worker")) == 2
        text = prompt("together")

        def completed(adapter):
            body = {"prompt": text, "max_tokens": 12, "temperature": 0}
            answer = it.invoke(body, **({HEADER: adapter} if adapter else {})).json()
            details = answer["usage"]["prompt_tokens_details"] or {}
            return answer["choices"][0]["text"], details.get("cached_tokens") or 0

        misses = {adapter: completed(adapter) for adapter in ADAPTERS}
        hits = {adapter: completed(adapter) for adapter in ADAPTERS}
        assert [cached for _, cached in misses.values()] == [0, 0, 0]
        assert all(cached > 0 for _, cached in hits.values())
        texts = {adapter: text for adapter, (text, _) in misses.items()}
        assert {adapter: text for adapter, (text, _) in hits.items()} == texts
        assert len({*texts.values()}) == 3
        until(lambda: it.metric("vllm:spec_decode_num_draft_tokens_total") > 0)
