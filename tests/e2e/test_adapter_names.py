# SPDX-License-Identifier: Apache-2.0
"""On the real engine, adapters with each of the module names that training tools write: the
adapter's answer differs from the base's, or the adapter is refused.
"""

from typing import Any

import pytest

from tests.e2e.conftest import serving
from tests.e2e.test_adapters import HEADER, QUESTION, register
from tests.support.models import tiny, tiny_lora, tiny_vision

LORA = {"OPTION_ENABLE_LORA": "true", "OPTION_MAX_LORAS": "1", "OPTION_DTYPE": "float32"}
ATTENTION = {"layers.0.self_attn.q_proj": (256, 256), "layers.1.self_attn.v_proj": (256, 128)}
SEES = {"encoder.layers.0.self_attn.q_proj": (64, 64)}


def under(prefix, modules=ATTENTION):
    return {f"{prefix}.{name}": sides for name, sides in modules.items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def seeing(tiny_options, root, tmp_path_factory):
    """A model whose files, transformers and vLLM each name the modules differently."""
    environ = {
        **tiny_options,
        **LORA,
        "OPTION_MODEL_ID": str(tiny_vision.make_renamed()),
        # Its image processor needs torchvision, which the engine for CPUs lacks.
        "OPTION_LIMIT_MM_PER_PROMPT": '{"image": 0}',
        "OPTION_MAX_MODEL_LEN": "1024",
        "OPTION_ADAPTER_ROOTS": str(root),
    }
    with serving(tmp_path_factory.mktemp("seeing") / "log", **environ) as it:
        it.ready()
        yield it


@pytest.fixture(scope="module")
def classifying(tiny_options, root, tmp_path_factory):
    """A language model that classifies."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    folder = tmp_path_factory.mktemp("classifying")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        num_labels=2,
        initializer_range=0.3,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(tiny.make()).save_pretrained(folder / "model")
    environ = {
        **tiny_options,
        **LORA,
        "OPTION_MODEL_ID": str(folder / "model"),
        "OPTION_MAX_MODEL_LEN": "1024",
        "OPTION_ADAPTER_ROOTS": str(root),
    }
    with serving(folder / "log", **environ) as it:
        it.ready()
        yield it


def answer(served, adapter=None):
    body = {"prompt": QUESTION, "max_tokens": 12, "temperature": 0, "logprobs": 1}
    found = served.client.post(
        "/invocations", json=body, headers={HEADER: adapter} if adapter else {}
    )
    assert found.status_code == 200, found.text
    choice = found.json()["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def probabilities(served, adapter=None):
    body = {"input": QUESTION, **({"model": adapter} if adapter else {})}
    found = served.client.post("/classify", json=body)
    assert found.status_code == 200, found.text
    return found.json()["data"][0]["probs"]


def refusal(served, name, src, **more):
    found = served.client.post("/adapters", params={"name": name, "src": str(src), **more})
    assert found.status_code == 424, found.text
    return found.json()["message"]


def test_a_model_that_sees_is_changed_under_each_of_its_names(seeing, root):
    base = answer(seeing)
    found = {}
    for name, prefix in (
        ("today", "model.language_model"),
        ("published", "language_model.model"),
    ):
        register(seeing, name, tiny_lora.write_modules(root / name, under(prefix), 1))
        found[name] = answer(seeing, name)
    assert found["today"] == found["published"]
    assert found["today"] != base
    assert answer(seeing) == base


def test_what_would_change_nothing_is_refused(seeing, root):
    text = tiny_lora.write_modules(root / "text", under("model"), 1)
    assert "which the model does not have" in refusal(seeing, "text", text)
    # Its files have these modules, and vLLM would leave them out.
    both = under("model.language_model") | under("model.vision_tower", SEES)
    for name, modules in (("both", both), ("seen", under("vision_tower", SEES))):
        src = tiny_lora.write_modules(root / name, modules, 1)
        told = refusal(seeing, name, src, preload="true")
        assert "which vLLM does not apply to this model" in told
        assert "OPTION_ENABLE_TOWER_CONNECTOR_LORA=true" in told
    assert answer(seeing)


def test_a_head_that_an_adapter_brings_whole(classifying, root):
    import torch

    base = probabilities(classifying)
    score = {"base_model.model.score.weight": torch.randn(2, 256)}
    found = {}
    for name, prefix in (("with", "model"), ("without", "")):
        modules = {it.removeprefix("."): sides for it, sides in under(prefix).items()}
        more: Any = {"modules_to_save": ["classifier", "score"], "task_type": "SEQ_CLS"}
        src = tiny_lora.write_modules(root / name, modules, 1, more=score, **more)
        register(classifying, name, src)
        found[name] = probabilities(classifying, name)
    assert found["with"] == pytest.approx(found["without"])
    assert found["with"] != pytest.approx(base, abs=1e-3)
    assert probabilities(classifying) == base


def test_embeddings_of_a_model_that_classifies(classifying, root):
    modules = {"model.embed_tokens": (tiny.VOCABULARY, 256)}
    register(classifying, "embeds", tiny_lora.write_modules(root / "embeds", modules, 1))
    changed, base = probabilities(classifying, "embeds"), probabilities(classifying)
    assert len(changed) == 2
    assert changed != pytest.approx(base, abs=1e-3)
