# SPDX-License-Identifier: Apache-2.0
"""Adapters with the names that training tools write today, and weights that vLLM would not
apply.
"""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lmi_config.facts.adapter import names
from lmi_config.facts.model import Tensor
from serving.lora.adapter_files import AdapterFiles
from serving.lora.adapter_registry import AdapterRegistry
from tools.generate import vllm_adapters

pytestmark = pytest.mark.anyio

WIDE, OUT, VOCABULARY, EXPERTS = 8, 16, 32, 4


def model(*modules, **more):
    """A model's tensors."""
    found = {f"{it}.weight": Tensor("BF16", (OUT, WIDE)) for it in modules}
    found |= {"norm.weight": Tensor("BF16", (WIDE,)), "more.weight": Tensor("BF16", (WIDE,))}
    return found | {name: Tensor("BF16", shape) for name, shape in more.items()}


def pair(module, rank=2, wide=WIDE, out=OUT):
    name = f"base_model.model.{module}"
    return {f"{name}.lora_A.weight": (rank, wide), f"{name}.lora_B.weight": (out, rank)}


def embedding(module, rank=2, out=WIDE):
    name = f"base_model.model.{module}.lora_embedding"
    return {f"{name}_A": (rank, VOCABULARY), f"{name}_B": (out, rank)}


def write(folder: Path, shapes, **config) -> Path:
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    weights = len(text).to_bytes(8, "little") + text + bytes(end)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
async def register(shared, tmp_path):
    """Registers an adapter with a server of this model. Returns the answer's status and message."""

    async def answer(architecture, base, shapes, engine=(), pooling=False, **config):
        root = tmp_path / "adapters"
        files = AdapterFiles((root.resolve(),), (), tmp_path / "store", 20_000)
        rules = names([architecture], dict(engine), pooling)
        given = (shared.engine, files, base, 16, 2, 2, 100, None, shared.engine.names)
        shared.pipeline.adapters = AdapterRegistry(*given, names=rules)
        src = write(root / "one", shapes, **config)
        found = await shared.client.post("/adapters", params={"name": "one", "src": str(src)})
        return found.status_code, found.json().get("message")

    yield answer
    shared.pipeline.adapters = None


ATTENTION = "layers.0.self_attn.q_proj"
SEEING = {
    # As published, and as transformers has named the modules since 4.52.
    "Qwen2VLForConditionalGeneration": ("model", "visual.blocks.0.attn.qkv"),
    "Qwen2_5_VLForConditionalGeneration": ("model", "visual.blocks.0.attn.qkv"),
    "Gemma3ForConditionalGeneration": (
        "language_model.model",
        "vision_tower.vision_model.x.q_proj",
    ),
    "LlavaForConditionalGeneration": ("language_model.model", "vision_tower.vision_model.x.q_proj"),
    "LlavaNextForConditionalGeneration": ("language_model.model", "vision_tower.vision_model.x.q"),
    "Mistral3ForConditionalGeneration": ("language_model.model", "vision_tower.x.q_proj"),
    "PaliGemmaForConditionalGeneration": ("language_model.model", "vision_tower.vision_model.x.q"),
}


@pytest.mark.parametrize("architecture", SEEING)
@pytest.mark.parametrize("part", ["today", "published", "seeing", "published seeing", "head"])
async def test_models_that_see(register, architecture, part):
    language, seeing = SEEING[architecture]
    head = f"{language.rpartition('model')[0]}lm_head"
    base = model(f"{language}.{ATTENTION}", seeing, head)
    module = {
        "today": f"model.language_model.{ATTENTION}",
        "published": f"{language}.{ATTENTION}",
        "seeing": f"model.{seeing}",
        "published seeing": seeing,
        "head": "lm_head",
    }[part]
    assert await register(architecture, base, pair(module)) == (200, None)


async def test_a_checkpoint_with_todays_names_takes_the_old_ones(register):
    base = model(f"model.language_model.{ATTENTION}")
    shapes = pair(f"model.{ATTENTION}")
    assert await register("Qwen2_5_VLForConditionalGeneration", base, shapes) == (200, None)


@pytest.mark.parametrize(
    ("architecture", "base", "module"),
    [
        # vLLM's module names for a vision model have no `model.layers`.
        ("Qwen3VLForConditionalGeneration", "model.language_model", "model"),
        ("Gemma3ForConditionalGeneration", "language_model.model", "model"),
        ("LlamaForCausalLM", "model", "model.language_model"),
        ("LlamaForCausalLM", "model", "language_model.model"),
        ("LlamaForCausalLM", "model", ""),
        ("GptOssForCausalLM", "model", "model.language_model"),
        ("Idefics3ForConditionalGeneration", "model.text_model", "model.language_model"),
    ],
)
async def test_what_would_change_nothing_is_refused(register, architecture, base, module):
    shapes = pair(f"{module}.{ATTENTION}".removeprefix("."))
    status, message = await register(architecture, model(f"{base}.{ATTENTION}"), shapes)
    assert status == 424
    assert "which the model does not have" in message


async def test_shapes_are_compared_under_the_models_names(register):
    base = model(f"model.{ATTENTION}")
    shapes = pair(f"model.language_model.{ATTENTION}", wide=WIDE + 1)
    status, message = await register("Qwen2_5_VLForConditionalGeneration", base, shapes)
    assert status == 424
    assert "is made for 16 x 9 and the model's is 16 x 8" in message


@pytest.mark.parametrize(
    ("architecture", "engine"),
    [
        ("SmolLM3ForCausalLM", {}),  # which transformers runs
        ("OurOwnForCausalLM", {}),  # which vLLM learns from a package
        ("LlamaForCausalLM", {"model_impl": "transformers"}),
        ("LlamaForCausalLM", {"model_class_overrides": {"LlamaForCausalLM": "ours:Llama"}}),
    ],
)
async def test_names_that_only_the_engine_knows_are_left_to_it(register, architecture, engine):
    shapes = pair(f"model.language_model.{ATTENTION}")
    answer = await register(architecture, model(f"model.{ATTENTION}"), shapes, engine)
    assert answer == (200, None)


async def test_names_without_pefts_prefix(register):
    shapes = {
        name.removeprefix("base_model.model."): shape
        for name, shape in pair(f"model.{ATTENTION}").items()
    }
    assert await register("LlamaForCausalLM", model(f"model.{ATTENTION}"), shapes) == (200, None)


@pytest.mark.parametrize(("prefix", "other"), [("model.", ""), ("", "model."), ("", "")])
async def test_models_that_do_not_generate_are_named_with_and_without_model(
    register, prefix, other
):
    base, shapes = model(f"{prefix}{ATTENTION}"), pair(f"{other}{ATTENTION}")
    assert await register("Qwen3ForCausalLM", base, shapes, pooling=True) == (200, None)


EMBEDDINGS = {"model.embed_tokens.weight": (VOCABULARY, WIDE)}
HEAD = {"lm_head.weight": (VOCABULARY, WIDE)}
LM_HEAD = pair("lm_head", out=VOCABULARY)
COPY = "base_model.model.{}.base_layer.weight"


@pytest.mark.parametrize(
    ("base", "shapes", "fault"),
    [
        (HEAD, {**LM_HEAD, COPY.format("lm_head"): (VOCABULARY, WIDE)}, None),
        (EMBEDDINGS, LM_HEAD, None),  # both are one tensor
        (EMBEDDINGS, pair("lm_head", out=VOCABULARY + 1), "lm_head is made for 33 x 8"),
        (EMBEDDINGS, embedding("model.embed_tokens"), None),
        (
            EMBEDDINGS,
            {
                **embedding("model.embed_tokens"),
                COPY.format("model.embed_tokens"): (VOCABULARY, WIDE),
            },
            None,
        ),
        (
            EMBEDDINGS,
            {
                **embedding("model.embed_tokens"),
                COPY.format("model.embed_tokens"): (VOCABULARY + 1, WIDE),
            },
            "its model.embed_tokens.weight has the shape 33 x 8 and the model's has 32 x 8",
        ),
        (EMBEDDINGS, embedding("model.embed_tokens", out=9), "embed_tokens is made for 9 x 32"),
        (EMBEDDINGS, embedding("model.embed"), "which the model does not have"),
        (
            HEAD,
            {**LM_HEAD, "base_model.model.lm_head.weight": (VOCABULARY, WIDE)},
            "base_model.model.lm_head.weight is not a LoRA weight",
        ),
        (
            {},
            pair(f"model.{ATTENTION}") | {COPY.format(f"model.{ATTENTION}"): (OUT, WIDE)},
            "q_proj.base_layer.weight is not a LoRA weight",
        ),
        ({}, {COPY.format("lm_head"): (VOCABULARY, WIDE)}, "has no tensors of LoRA"),
        (
            {},
            {
                name.replace(".weight", ".default.weight"): shape
                for name, shape in pair(f"model.{ATTENTION}").items()
            },
            "is not a LoRA weight",
        ),
    ],
)
async def test_embeddings_and_heads_of_language_models(register, base, shapes, fault):
    status, message = await register(
        "LlamaForCausalLM", model(f"model.{ATTENTION}", **base), shapes
    )
    assert (status, bool(fault)) in ((200, False), (424, True))
    assert (fault or "") in (message or "")


EXPERT = "model.layers.0.mlp.experts"
STACKED = {
    f"{EXPERT}.gate_up_proj": (EXPERTS, WIDE, 2 * OUT),
    f"{EXPERT}.down_proj": (EXPERTS, OUT, WIDE),
}
BLOCKS = {
    f"{EXPERT}.gate_up_proj_blocks": (EXPERTS, 2 * OUT, 1, 16),
    f"{EXPERT}.down_proj_blocks": (EXPERTS, WIDE, 1, 16),
}
SINGLE = {f"{EXPERT}.{number}.up_proj.weight": (OUT, WIDE) for number in range(EXPERTS)}
UP = pair(f"{EXPERT}.base_layer", 2 * EXPERTS, WIDE, 2 * OUT)
DOWN = pair(EXPERT, 2 * EXPERTS, OUT, WIDE)
EACH = {
    name: shape
    for number in range(EXPERTS)
    for name, shape in pair(f"{EXPERT}.{number}.up_proj").items()
}
MIXED = {"enable_mixed_moe_lora_format": True}
TARGETS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.parametrize("base", [STACKED, BLOCKS])
async def test_experts_of_gpt_oss(register, base):
    attention = f"model.{ATTENTION}"
    shapes = UP | DOWN | pair(attention)
    answer = await register("GptOssForCausalLM", model(attention, **base), shapes, **TARGETS)
    assert answer == (200, None)


@pytest.mark.parametrize(
    ("architecture", "base", "shapes", "engine", "fault"),
    [
        ("GptOssForCausalLM", STACKED, UP, {}, "vLLM needs both gate_up_proj and down_proj"),
        ("GptOssForCausalLM", STACKED, DOWN, {}, "vLLM needs both gate_up_proj and down_proj"),
        (
            "GptOssForCausalLM",
            STACKED,
            UP | pair(EXPERT, 2 * EXPERTS + 1, OUT, WIDE),
            {},
            "has 9 rows, not a rank for each of 4 experts",
        ),
        (
            "GptOssForCausalLM",
            STACKED,
            UP | pair(EXPERT, 2 * EXPERTS, OUT + 1, WIDE),
            {},
            "its model.layers.0.mlp.experts is made for 8 x 17",
        ),
        (
            "GptOssForCausalLM",
            STACKED,
            UP | pair(EXPERT, 32 * EXPERTS, OUT, WIDE),
            {},
            "the rank of its model.layers.0.mlp.experts is 32 and OPTION_MAX_LORA_RANK=16",
        ),
        ("GptOssForCausalLM", STACKED, EACH, {}, "ENABLE_MIXED_MOE_LORA_FORMAT=true"),
        ("Qwen3MoeForCausalLM", SINGLE, UP | DOWN, {}, "ENABLE_MIXED_MOE_LORA_FORMAT=true"),
        ("Qwen3MoeForCausalLM", SINGLE, UP | DOWN, MIXED, None),
        ("Qwen3MoeForCausalLM", SINGLE, EACH, {}, None),
        ("Qwen3MoeForCausalLM", SINGLE, EACH, MIXED, None),
        (
            "Qwen3MoeForCausalLM",
            SINGLE,
            pair(f"{EXPERT}.4.up_proj"),
            {},
            "which the model does not have",
        ),
        (
            "LlamaForCausalLM",
            {},
            UP | DOWN,
            MIXED,
            "changes model.layers.0.mlp.experts, which the model does not have",
        ),
    ],
)
async def test_experts(register, architecture, base, shapes, engine, fault):
    status, message = await register(
        architecture, model(f"model.{ATTENTION}", **base), shapes, engine
    )
    assert (status, bool(fault)) in ((200, False), (424, True)), message
    assert (fault or "") in (message or "")


SCORE = "base_model.model.score"
PATTERN = {"rank_pattern": {"q_proj": 32}}


@pytest.mark.parametrize(
    ("shapes", "config", "fault"),
    [
        ({f"{SCORE}.weight": (3, WIDE)}, {"modules_to_save": ["classifier", "score"]}, None),
        (
            {f"{SCORE}.weight": (3, WIDE), f"{SCORE}.bias": (3,)},
            {"modules_to_save": ["score"]},
            None,
        ),
        ({}, {"modules_to_save": []}, None),
        ({}, {"modules_to_save": None}, None),
        ({}, {"modules_to_save": ["score"]}, "has no weight of modules_to_save=['score']"),
        (
            {f"{SCORE}.weight": (3, WIDE), f"{SCORE}.bias": (2,)},
            {"modules_to_save": ["score"]},
            "a bias as long as its first one or none",
        ),
        (
            {f"{SCORE}.bias": (3,)},
            {"modules_to_save": ["score"]},
            "score should have a weight of two sides",
        ),
        (
            {f"{SCORE}.weight": (3, WIDE), "base_model.model.classifier.weight": (3, WIDE)},
            {"modules_to_save": ["classifier", "score"]},
            "has classifier and score; vLLM accepts only one of them",
        ),
        ({f"{SCORE}.weight": (3, WIDE)}, {}, "base_model.model.score.weight is not a LoRA weight"),
        (
            {f"{SCORE}.weight": (3, WIDE + 1)},
            {"modules_to_save": ["score"]},
            "its score.weight has the shape 3 x 9 and the model's has 2 x 8",
        ),
        ({}, {"modules_to_save": ["embed_tokens"]}, "vLLM supports classifier and score"),
        ({}, {"modules_to_save": "score"}, "vLLM supports classifier and score"),
        ({}, PATTERN, "its rank is 32 and OPTION_MAX_LORA_RANK=16"),
        ({}, {"rank_pattern": {"q_proj": "many"}}, "and should have a whole number, at least 1"),
        ({}, {"rank_pattern": {"q_proj": True}}, "and should have a whole number, at least 1"),
        ({}, {"rank_pattern": []}, "and should have a whole number, at least 1"),
    ],
)
async def test_modules_to_save_and_ranks(register, shapes, config, fault):
    base = model(f"model.{ATTENTION}", **{"score.weight": (2, WIDE)})
    shapes = pair(f"model.{ATTENTION}") | shapes
    status, message = await register(
        "Qwen3ForSequenceClassification", base, shapes, pooling=True, **config
    )
    assert (status, bool(fault)) in ((200, False), (424, True)), message
    assert (fault or "") in (message or "")


@pytest.mark.nightly
def test_names_are_those_of_the_pinned_vllm(capfd):
    # In a separate process, where packages that are not installed are replaced.
    command = [sys.executable, "-m", "tools.generate.vllm_adapters", "--check"]
    assert subprocess.run(command, check=False).returncode == 0, capfd.readouterr().out


def test_every_pattern_is_one_of_pythons():
    """vLLM's own patterns use a package with a richer syntax."""
    for rules in json.loads(vllm_adapters.PATH.read_text())["renames"].values():
        for old, new in rules.get("regex", {}).items():
            re.compile(old).sub(new, "")
