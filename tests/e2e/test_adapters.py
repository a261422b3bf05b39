# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters on the real engine: SageMaker's calls, lazy loading, versions, mixed batches."""

import json
import random
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import engine_bodies
from tests.e2e.conftest import serving
from tests.e2e.test_kv_tiers import LMCACHE, prompt
from tests.support.harness.wait import until
from tests.support.models import tiny, tiny_lora

HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
QUESTION = "The import statement"
ALL = ("one", "two", "three", "four")
TEXTS = ("The import statement binds a name", "One two three", "a")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(ALL, 1):
        tiny_lora.write(folder / name, seed)
    return folder


@pytest.fixture(scope="module")
def served(tiny_options, root, tmp_path_factory):
    """Two adapters in a batch, three in the engine, and tiers for long prompts."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "lmcache.yaml").write_text(LMCACHE.format(folder=folder, l1=0.5))
    environ = {
        **tiny_options,
        "OPTION_ENABLE_LORA": "true",
        "OPTION_MAX_LORAS": "2",
        "OPTION_MAX_CPU_LORAS": "3",
        "OPTION_ADAPTER_ROOTS": str(root),
        "OPTION_LMCACHE_CONFIG_FILE": str(folder / "lmcache.yaml"),
        "OPTION_DTYPE": "float32",
        "OPTION_LORA_MODULES": f"four={root / 'four'}",
    }
    with serving(folder / "log", **environ) as it:
        it.ready()
        for name in ALL[:3]:
            register(it, name, root / name)
        yield it


def register(served, name, src, **more):
    """Registers as SageMaker does: the parameters in the query, an empty body."""
    found = served.client.post("/adapters", params={"name": name, "src": str(src), **more})
    assert found.status_code == 200, found.text
    assert found.json() == {"status": f"Adapter {name} registered"}


def ask(served, adapter=None, text=QUESTION):
    """The text, and how many of the prompt's tokens were cached."""
    body = {"prompt": text, "max_tokens": 12, "temperature": 0}
    headers = {HEADER.lower(): adapter} if adapter else {}
    found = served.client.post("/invocations", json=body, headers=headers)
    assert found.status_code == 200, found.text
    answer = found.json()
    assert answer["model"] == (adapter or "tiny-llama-1")
    details = answer["usage"]["prompt_tokens_details"]
    return answer["choices"][0]["text"], (details or {}).get("cached_tokens") or 0


@pytest.fixture(scope="module")
def alone(served):
    """The answer of each adapter when it is alone."""
    return {name: ask(served, name)[0] for name in (None, *ALL)}


def test_each_adapter_answers_in_its_own_way(alone):
    assert len({*alone.values()}) == 5


def test_embeddings_and_the_head_of_a_language_model(served, alone, root):
    """The adapters have the copies of the model's own weights that PEFT saves beside them."""
    import torch

    copy = torch.zeros(tiny.VOCABULARY, 256)
    for name, sides in (
        ("model.embed_tokens", (tiny.VOCABULARY, 256)),
        ("lm_head", (256, tiny.VOCABULARY)),
    ):
        more = {f"base_model.model.{name}.base_layer.weight": copy}
        src = tiny_lora.write_modules(root / name, {name: sides}, 1, more=more)
        register(served, name, src)
        assert ask(served, name)[0] not in alone.values()
        assert served.client.delete(f"/adapters/{name}").status_code == 200
    assert ask(served)[0] == alone[None]


def test_they_take_turns_in_the_slots(served, alone):
    for name in (*ALL, None) * 3:
        assert ask(served, name)[0] == alone[name]


def test_in_one_batch_each_has_its_own_weights(served, alone):
    names = [None, "one", None, "two", None, "one", "two", None] * 3
    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda name: ask(served, name)[0], names)]
    assert answers == [alone[name] for name in names]


def test_caches_are_never_shared(served):
    names = (None, "one", "two")
    first = [ask(served, name, prompt("adapters")) for name in names]
    assert [cached for _, cached in first] == [0, 0, 0]
    assert len({text for text, _ in first}) == 3
    again = [ask(served, name, prompt("adapters")) for name in names]
    assert [text for text, _ in again] == [text for text, _ in first]
    assert all(cached >= 1024 for _, cached in again)


def test_it_is_chosen_by_model_and_in_lmis_body(served, alone):
    chosen = served.openai.completions.create(
        model="one", prompt=QUESTION, max_tokens=12, temperature=0
    )
    assert (chosen.model, chosen.choices[0].text) == ("one", alone["one"])
    stream = served.openai.completions.create(
        model="two", prompt=QUESTION, max_tokens=12, temperature=0, stream=True
    )
    chunks = [*stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == alone["two"]
    assert {chunk.model for chunk in chunks} == {"two"}
    parameters = {"max_new_tokens": 12, "do_sample": False}
    for adapter, expected in (("three", alone["three"]), ("", alone[None])):
        body = {"inputs": QUESTION, "parameters": parameters, "adapters": adapter}
        assert served.invoke(body).json() == {"generated_text": expected}


def test_series_have_the_names_that_requests_have(served):
    """Gateways route by these names, and versions mean nothing to them."""
    body = {"model": "one", "prompt": QUESTION, "max_tokens": 200, "ignore_eos": True}
    assert served.client.post("/v1/completions", json=body).status_code == 200

    def series():
        return served.client.get("/metrics").text

    until(
        lambda: re.search('^vllm:lora_requests_info{.*running_lora_adapters="one"', series(), re.M)
    )
    assert re.search('^slipway_adapter_requests_total{adapter="one"}', series(), re.M)
    assert re.search('^slipway_tokens_total{adapter="one"', series(), re.M)
    assert not re.search(r'"[^"]*\b(one|two|three|four)@', series())


def test_an_unknown_one_is_an_error_and_never_the_base(served):
    body = {"prompt": QUESTION, "max_tokens": 2}
    found = served.client.post("/invocations", json=body, headers={HEADER: "nobody"})
    assert found.status_code == 424
    assert found.json()["error"] == "adapter 'nobody' is not registered"
    found = served.client.post("/v1/completions", json={**body, "model": "nobody"})
    assert found.status_code == 404


def test_those_of_lora_modules_are_as_all_others(served, root, alone):
    def models():
        return {it["id"] for it in served.client.get("/v1/models").json()["data"]}

    def asked():
        body = {"model": "four", "prompt": QUESTION, "max_tokens": 12, "temperature": 0}
        return served.client.post("/v1/completions", json=body)

    assert {*ALL} <= models()
    assert asked().json()["choices"][0]["text"] == alone["four"]
    assert served.client.delete("/adapters/four").status_code == 200
    assert "four" not in models()
    assert asked().status_code == 404
    register(served, "four", root / "four")
    assert asked().json()["choices"][0]["text"] == alone["four"]


def test_another_version_forgets_the_one_before(served, root, alone):
    tiny_lora.write(root / "changing", 11)
    register(served, "changing", root / "changing")
    text, _ = ask(served, "changing", prompt("version"))
    tiny_lora.write(root / "changed", 12)
    assert served.client.delete("/adapters/changing").json() == {
        "status": "Adapter changing unregistered"
    }
    register(served, "changing", root / "changed", preload="true")
    other, cached = ask(served, "changing", prompt("version"))
    assert (other != text, cached) == (True, 0)
    found = served.client.post("/adapters/changing/update", params={"src": str(root / "changing")})
    assert found.json() == {"status": "Adapter changing updated"}
    assert ask(served, "changing", prompt("version"))[0] == text
    assert ask(served)[0] == alone[None]


def test_a_source_that_has_gone_is_told_and_can_come_back(served, root, alone):
    register(served, "gone", tiny_lora.write(root / "gone", 13))
    shutil.move(root / "gone", root / "elsewhere")
    body = {"prompt": QUESTION, "max_tokens": 2}
    found = served.client.post("/invocations", json=body, headers={HEADER: "gone"})
    assert found.status_code == 424
    assert "gone" in found.json()["error"]
    shutil.move(root / "elsewhere", root / "gone")
    assert ask(served, "gone")[0] not in alone.values()
    assert ask(served)[0] == alone[None]


def test_a_hundred_first_uses_are_one_load(served, root):
    register(served, "crowd", tiny_lora.write(root / "crowd", 14))
    before = served.log.read_text().count("Loaded new LoRA adapter: name 'crowd@")
    with ThreadPoolExecutor(100) as pool:
        answers = {*pool.map(lambda _: ask(served, "crowd")[0], range(100))}
    assert len(answers) == 1
    assert served.log.read_text().count("Loaded new LoRA adapter: name 'crowd@") == before + 1


def test_a_list_of_inputs_with_adapters_of_their_own(served, alone):
    names = ["one", "", "two", "three"]
    parameters = {"max_new_tokens": 12, "do_sample": False}
    body = {"inputs": [QUESTION] * 4, "adapters": names, "parameters": parameters}
    expected = [{"generated_text": alone[name or None]} for name in names]
    assert served.invoke(body).json() == expected


def test_pinned_or_not_more_than_a_batch_takes_have_their_turns(served, root, alone):
    names = [*ALL, None] * 6
    for pin in ("false", "true"):
        served.client.delete("/adapters/one")
        register(served, "one", root / "one", pin=pin)
        with ThreadPoolExecutor(15) as pool:
            answers = [*pool.map(lambda name: ask(served, name)[0], names)]
        assert answers == [alone[name] for name in names]


def answered(served, adapter, asked):
    """A body must be answered, or refused with a reason. Returns the fault, or an empty string."""
    headers = {"content-type": "application/json"} | ({HEADER: adapter} if adapter else {})
    body = {"model": adapter or "lmi", **asked.body} if asked.path != "/invocations" else asked.body
    found = served.client.post(asked.path, content=json.dumps(body), headers=headers)
    if found.status_code == 200:
        return ""
    told = found.json().get("error")
    message = told.get("message") if isinstance(told, dict) else told
    fine = found.status_code in (400, 404, 424) and not (message or " is not valid").endswith(
        " is not valid"
    )
    return "" if fine and found.elapsed.total_seconds() < 20 else f"{asked}: {found.text:.300}"


@pytest.mark.parametrize("share", [12, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("adapter", [None, "one"])
def test_no_body_ends_the_engine_alone(served, alone, adapter, share):
    for asked in [*engine_bodies.bodies()][::share]:
        assert answered(served, adapter, asked) == ""
    assert ask(served, adapter)[0] == alone[adapter]


@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.nightly)])
def test_no_body_ends_the_engine_beside_others(served, alone, share):
    draw = random.Random(0)
    asked = [(draw.choice((None, *ALL[:2])), it) for it in engine_bodies.bodies()]
    draw.shuffle(asked)
    del asked[len(asked) // share :]
    with ThreadPoolExecutor(16) as pool:
        wrong = [it for it in pool.map(lambda it: answered(served, *it), asked) if it]
    assert wrong == []
    assert ask(served, "one")[0] == alone["one"]


def test_a_prompts_log_probabilities_are_those_of_its_own_adapter(served):
    """The log probabilities of a mixed batch are those of each adapter alone."""
    body = {"prompt": TEXTS[0], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}

    def of(adapter, text):
        headers = {HEADER: adapter} if adapter else {}
        found = served.client.post("/v1/completions", json=body | {"prompt": text}, headers=headers)
        first = [
            next(iter(it.values())) for it in found.json()["choices"][0]["prompt_logprobs"][1:]
        ]
        return [it["logprob"] for it in first]

    pairs = [(adapter, text) for adapter in (None, "one", "two") for text in TEXTS]
    alone = [of(*pair) for pair in pairs]
    with ThreadPoolExecutor(len(pairs)) as pool:
        for _ in range(3):
            for expected, found in zip(alone, pool.map(lambda it: of(*it), pairs), strict=True):
                assert found == pytest.approx(expected, abs=0.01)
