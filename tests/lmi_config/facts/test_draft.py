# SPDX-License-Identifier: Apache-2.0
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_config.facts.draft import asked, faults, look
from lmi_config.facts.model import Folder, ModelError, ModelFacts, facts
from lmi_config.facts.model import look as look_at_model
from tests.lmi_config.examples import GGUF


class Memory:
    """A checkpoint that exists only in memory: a configuration, and tensors or other weights."""

    def __init__(self, config, shapes=None, where="org/draft", other="pytorch_model.bin"):
        self.where = where
        weights = {other: b"0"} if shapes is None else {"model.safetensors": safetensors(shapes)}
        self.files = {"config.json": json.dumps(config).encode(), **weights}
        self.sizes = {name: len(content) for name, content in self.files.items()}
        if shapes is not None:
            self.sizes["model.safetensors"] += 2 * sum(map(math.prod, shapes.values()))

    def head(self, name: str, length: int) -> bytes:
        return self.files[name][:length]


def safetensors(shapes) -> bytes:
    """The header of a file with these BF16 tensors; name → shape."""
    header = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


def target(**config) -> ModelFacts:
    return look_at_model(Memory(LLAMA | config), weights=False)


def layer(prefix, hidden, times=1, heads=(4, 2, 16), inner=128):
    """The matrices of a layer, whose attention reads `times` the hidden size."""
    queries, keys, size = heads
    return {
        f"{prefix}self_attn.q_proj.weight": [queries * size, times * hidden],
        f"{prefix}self_attn.k_proj.weight": [keys * size, times * hidden],
        f"{prefix}self_attn.v_proj.weight": [keys * size, times * hidden],
        f"{prefix}self_attn.o_proj.weight": [hidden, queries * size],
        f"{prefix}mlp.gate_proj.weight": [inner, hidden],
        f"{prefix}mlp.up_proj.weight": [inner, hidden],
        f"{prefix}mlp.down_proj.weight": [hidden, inner],
        f"{prefix}post_attention_layernorm.weight": [hidden],
    }


def without(names, *parts):
    """The tensors, or the configuration, without those that have one of these parts in a name."""
    return {name: value for name, value in names.items() if not any(part in name for part in parts)}


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
EAGLE = LLAMA | {"num_hidden_layers": 1}
EAGLE_TENSORS = {
    "fc.weight": [64, 128],
    "embed_tokens.weight": [256, 64],
    **layer("layers.0.", 64),
}
IDS = "eagle_aux_hidden_state_layer_ids"
EAGLE3 = EAGLE | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32}
EAGLE3_TENSORS = {
    "fc.weight": [64, 192],
    "norm.weight": [64],
    "lm_head.weight": [32, 64],
    "d2t": [32],
    "t2d": [256],
    "midlayer.input_layernorm.weight": [64],
    "midlayer.hidden_norm.weight": [64],
    **layer("midlayer.", 64, times=2),
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.1.0",
    "draft_vocab_size": 32,
    "norm_before_residual": False,
    "target_hidden_size": None,
    "transformer_layer_config": EAGLE,
    "speculators_config": {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "verifier": {"name_or_path": "org/model", "architectures": ["LlamaForCausalLM"]},
    },
}
SPECULATORS_TENSORS = {
    name.replace("midlayer.", "layers.0."): shape for name, shape in EAGLE3_TENSORS.items()
}
MEDUSA = {"model_type": "medusa", "hidden_size": 64, "num_heads": 4, "vocab_size": 256}
FULL = {"model.embed_tokens.weight": [256, 64], "lm_head.weight": [256, 64]}


@pytest.mark.parametrize(
    ("config", "shapes", "method", "tokens", "parallel"),
    [
        (EAGLE, EAGLE_TENSORS, "eagle", None, False),
        (EAGLE | {"architectures": ["EagleLlamaForCausalLM"]}, {}, "eagle", None, False),
        ({"model_type": "eagle", "architectures": ["EAGLEModel"]}, {}, "eagle", None, False),
        (EAGLE3, EAGLE3_TENSORS, "eagle3", None, False),
        (EAGLE | {"architectures": ["Eagle3LlamaForCausalLM"]}, {}, "eagle3", None, False),
        (EAGLE | {"draft_vocab_size": 32}, None, "eagle3", None, False),
        (EAGLE, without(EAGLE3_TENSORS, "d2t", "t2d"), "eagle3", None, False),
        (SPECULATORS, SPECULATORS_TENSORS, "eagle3", 5, False),
        (
            SPECULATORS | {"speculators_model_type": "peagle", "mask_token_id": 1},
            {},
            "eagle3",
            5,
            True,
        ),
        (
            SPECULATORS
            | {
                "speculators_model_type": "dflash2",
                "mask_token_id": 1,
                "aux_hidden_state_layer_ids": [2],
            },
            {},
            "dflash",
            5,
            False,
        ),
        (
            SPECULATORS | {"speculators_model_type": "dspark", "aux_hidden_state_layer_ids": [2]},
            {},
            "dspark",
            5,
            False,
        ),
        ({"architectures": ["DFlashDraftModel"]}, {}, "dflash", None, False),
        ({"architectures": ["Qwen3DSparkModel"], "block_size": 7}, {}, "dspark", 7, False),
        (MEDUSA, {}, "medusa", 4, False),
        ({"medusa_num_heads": 3, "medusa_num_layers": 1}, None, "medusa", 3, False),
        ({"model_type": "medusa"}, None, "medusa", 5, False),
        ({"model_type": "mlp_speculator", "n_predict": 3}, {}, "mlp_speculator", None, False),
        (
            {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1},
            {},
            "mtp",
            1,
            False,
        ),
        (
            {"model_type": "qwen3_5", "text_config": {"mtp_num_hidden_layers": 2}},
            {},
            "mtp",
            2,
            False,
        ),
        ({"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}, {}, "mtp", None, False),
        ({"model_type": "mimo_v2_mtp", "num_nextn_predict_layers": 3}, {}, "mtp", 1, False),
        (LLAMA, FULL, "draft_model", None, False),
        (LLAMA, None, "draft_model", None, False),
    ],
)
def test_the_kind_is_in_the_drafts_own_files(config, shapes, method, tokens, parallel):
    draft = look(Memory(config, shapes))
    assert (draft.method, draft.tokens, draft.parallel) == (method, tokens, parallel)


@pytest.mark.parametrize(
    ("where", "shapes", "method"),
    [
        ("yuhuili/EAGLE-LLaMA3-Instruct-8B", None, "eagle"),
        ("org/EAGLE3-model", None, "eagle3"),
        ("org/regal", None, "draft_model"),
        # Its tensors say more than its name.
        ("org/EAGLE-model", FULL, "draft_model"),
    ],
)
def test_a_draft_without_safetensors_goes_by_its_name_as_in_vllm(where, shapes, method):
    assert look(Memory(EAGLE, shapes, where)).method == method


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            SPECULATORS | {"speculators_model_type": "eagle"},
            "speculators_model_type is 'eagle', but must be one of dflash, dflash2, dspark, "
            "eagle3, peagle for vLLM 0.32; use another draft",
        ),
        (SPECULATORS | {"speculators_model_type": ["eagle3"]}, "speculators_model_type is list"),
        (SPECULATORS | {"speculators_config": None}, "there is no speculators_config in it; fetch"),
        (SPECULATORS | {"speculators_model_type": "peagle"}, "there is no mask_token_id in it"),
        (
            SPECULATORS | {"transformer_layer_config": {"model_type": "gpt_oss"}},
            "transformer_layer_config.model_type is 'gpt_oss', but must be llama or qwen3 for "
            "vLLM 0.32; use another draft",
        ),
    ],
)
def test_speculators_that_vllm_cannot_read_are_refused(config, message):
    with pytest.raises(ModelError) as raised:
        look(Memory(config, SPECULATORS_TENSORS))
    assert message in str(raised.value)


EAGLE3_8B = {  # as published for Llama-3.1-8B-Instruct
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
    "max_position_embeddings": 2048,
}
EAGLE3_8B_TENSORS = {
    "d2t": [32000],
    "t2d": [128256],
    "fc.weight": [4096, 12288],
    "lm_head.weight": [32000, 4096],
    "midlayer.hidden_norm.weight": [4096],
    "midlayer.input_layernorm.weight": [4096],
    "norm.weight": [4096],
    **layer("midlayer.", 4096, times=2, heads=(32, 8, 128), inner=14336),
}
LLAMA_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128256}
FULL_VOCABULARY = without(EAGLE3, "draft_vocab_size")
QWEN3 = SPECULATORS | {"transformer_layer_config": EAGLE | {"model_type": "qwen3"}}
FUSED = without(EAGLE_TENSORS, "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") | {
    "layers.0.self_attn.qkv_proj.weight": [128, 64],
    "layers.0.mlp.gate_up_proj.weight": [256, 64],
}
NARROW = {"hidden_size": 32, "target_hidden_size": 64, "draft_vocab_size": 256}
NARROW_TENSORS = {
    "fc.weight": [32, 192],
    "embed_tokens.weight": [256, 32],
    "lm_head.weight": [256, 32],
    **layer("midlayer.", 32, times=2, heads=(4, 2, 8)),
}


@pytest.mark.parametrize(
    ("config", "shapes", "of"),
    [
        (EAGLE, EAGLE_TENSORS, {}),
        (EAGLE, FUSED, {}),
        (EAGLE, without(EAGLE_TENSORS, "embed_tokens"), {}),
        (EAGLE, EAGLE_TENSORS | {"fc.bias": [64], "layers.0.rotary_emb.inv_freq": [8]}, {}),
        # Weights that were packed have other names and shapes.
        (
            EAGLE | {"quantization_config": {"quant_method": "gptq"}},
            without(EAGLE_TENSORS, "fc.", "q_proj")
            | {"fc.qweight": [16, 64], "layers.0.self_attn.q_proj.qweight": [8, 64]},
            {},
        ),
        # The target's padded vocabulary ends in numbers that are no tokens.
        (EAGLE, without(EAGLE_TENSORS, "embed_tokens"), {"vocab_size": 320}),
        (EAGLE | {"vocab_size": 320}, EAGLE_TENSORS | {"embed_tokens.weight": [320, 64]}, {}),
        (EAGLE | {"architectures": ["MistralForCausalLM"]}, {"fc.weight": [1, 1]}, {}),
        (EAGLE, None, {}),
        (EAGLE3, EAGLE3_TENSORS, {}),
        (EAGLE3 | {"norm_before_residual": True}, EAGLE3_TENSORS, {}),
        (EAGLE3 | {"architectures": ["Eagle3LlamaForCausalLM"]}, EAGLE3_TENSORS, {}),
        (EAGLE3 | {IDS: [1, 2, 3]}, EAGLE3_TENSORS, {"num_hidden_layers": 4}),
        (EAGLE3, EAGLE3_TENSORS, {"num_hidden_layers": 7}),
        (EAGLE3 | {IDS: [0, 4, 8]}, EAGLE3_TENSORS, {}),
        (EAGLE3 | {"eagle_config": {IDS: [1, 2, 3]}}, EAGLE3_TENSORS, {"num_hidden_layers": 4}),
        (
            EAGLE3 | {IDS: [1, 2], "num_aux_hidden_states": 2},
            EAGLE3_TENSORS | {"fc.weight": [64, 128]},
            {},
        ),
        # A repeated id counts as one, if the draft takes that many.
        (
            EAGLE3 | {IDS: [1, 2, 2], "num_aux_hidden_states": 2},
            EAGLE3_TENSORS | {"fc.weight": [64, 128]},
            {},
        ),
        (
            EAGLE3 | {"eagle_config": {"use_aux_hidden_state": False}},
            without(EAGLE3_TENSORS, "fc."),
            {"num_hidden_layers": 4},
        ),
        (FULL_VOCABULARY, without(EAGLE3_TENSORS, "d2t", "t2d", "lm_head"), {}),
        (FULL_VOCABULARY | {"draft_vocab_size": None}, without(EAGLE3_TENSORS, "d2", "head"), {}),
        (EAGLE3 | NARROW, NARROW_TENSORS, {}),
        (EAGLE3_8B, EAGLE3_8B_TENSORS, LLAMA_8B),
        (SPECULATORS, SPECULATORS_TENSORS, {}),
        (SPECULATORS | {"target_hidden_size": 64}, SPECULATORS_TENSORS, {}),
        (QWEN3 | {IDS: [1, 2]}, SPECULATORS_TENSORS | {"fc.weight": [64, 128]}, {}),
        (
            SPECULATORS | {"speculators_model_type": "peagle", "mask_token_id": 1},
            SPECULATORS_TENSORS | {"mask_hidden": [1, 192]},
            {},
        ),
        (EAGLE3, EAGLE3_TENSORS, {"architectures": ["Qwen3VLForConditionalGeneration"]}),
        (MEDUSA, {}, {}),
        ({"architectures": ["DFlashDraftModel"], "hidden_size": 32}, {}, {}),
        ({"model_type": "qwen3_5", "mtp_num_hidden_layers": 3, "vocab_size": 1}, {}, {}),
        (LLAMA, FULL, {}),
        (LLAMA | {"hidden_size": 32}, FULL, {}),
    ],
)
def test_what_vllm_runs_has_no_faults(config, shapes, of):
    assert faults(look(Memory(config, shapes)), target(**of), 3) == []


def test_what_is_not_known_is_left_to_vllm():
    for config, shapes in ((EAGLE, EAGLE_TENSORS), (EAGLE3, EAGLE3_TENSORS), (LLAMA, FULL)):
        assert faults(look(Memory(config, shapes)), GGUF, 3) == []


FOUR = (
    f"vLLM counts 3 of the model's layers whose states it reads, and {IDS} names 4, as many as it "
    'was made for; set "num_aux_hidden_states": 4 in org/draft/config.json'
)
OTHER_WIDTH = (
    "it is made for a hidden size of {}, and the model has {}; use a draft that was trained for "
    "this model"
)
INCOMPLETE = (
    "there are no tensors for {}; use a complete draft, with as many layers as num_hidden_layers "
    "says"
)
UNEXPECTED = (
    "vLLM's loader stops at {}; remove tensors that it does not use, and let names begin without "
    '"model."'
)
MISSHAPEN = (
    "its {} is {}, but must be {} by its configuration; use a draft whose files belong together"
)
LAYERS = (
    "it reads the states of 3 of the model's layers, but {}, makes {} from 0 to {}; name 3 "
    "different ones as eagle_aux_hidden_state_layer_ids in org/draft/config.json"
)
CHOSEN = "the choice of vLLM, {}"


@pytest.mark.parametrize(
    ("config", "shapes", "of", "expected"),
    [
        (EAGLE, EAGLE_TENSORS, {"hidden_size": 128}, OTHER_WIDTH.format(64, 128)),
        (
            EAGLE,
            EAGLE_TENSORS,
            {"vocab_size": 320},
            "it has embeddings for 256 tokens, and the model has 320; use a draft that was "
            "trained for this model",
        ),
        (
            EAGLE,
            without(EAGLE_TENSORS, "q_proj", "down_proj"),
            {},
            INCOMPLETE.format("layers.0.self_attn.q_proj, layers.0.mlp.down_proj"),
        ),
        (
            EAGLE | {"num_hidden_layers": 2},
            EAGLE_TENSORS,
            {},
            INCOMPLETE.format(
                "layers.1.self_attn.q_proj, layers.1.self_attn.k_proj, "
                "layers.1.self_attn.v_proj and 4 more"
            ),
        ),
        (
            EAGLE | {"architectures": ["EagleLlamaForCausalLM"]},
            without(EAGLE_TENSORS, "fc."),
            {},
            INCOMPLETE.format("fc"),
        ),
        (
            EAGLE,
            EAGLE_TENSORS | {"fc.weight": [64, 64]},
            {},
            MISSHAPEN.format("fc.weight", [64, 64], [64, 128]),
        ),
        (
            EAGLE,
            EAGLE_TENSORS | {"lm_head.weight": [256, 64], "layers.0.input_layernorm.weight": [64]},
            {},
            UNEXPECTED.format("lm_head.weight, layers.0.input_layernorm.weight"),
        ),
        (
            EAGLE,
            EAGLE_TENSORS | layer("layers.1.", 64),
            {},
            UNEXPECTED.format(
                "layers.1.self_attn.q_proj.weight, layers.1.self_attn.k_proj.weight, "
                "layers.1.self_attn.v_proj.weight and 5 more"
            ),
        ),
        (
            EAGLE,
            {f"model.{name}": shape for name, shape in EAGLE_TENSORS.items()},
            {},
            UNEXPECTED.format(
                "model.fc.weight, model.embed_tokens.weight, "
                "model.layers.0.self_attn.q_proj.weight and 7 more"
            ),
        ),
        (
            EAGLE | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
            EAGLE_TENSORS,
            {},
            "vLLM 0.32 has no EagleQwen2ForCausalLM to run it with; use a draft with the "
            "architecture of Llama, as most have",
        ),
        (
            EAGLE3 | {"architectures": ["Qwen2ForCausalLM"]},
            EAGLE3_TENSORS,
            {},
            "vLLM 0.32 has no Eagle3Qwen2ForCausalLM to run it with; use a draft with the "
            "architecture of Llama, as most have",
        ),
        (EAGLE3, EAGLE3_TENSORS, {"hidden_size": 128}, OTHER_WIDTH.format(64, 128)),
        (
            EAGLE3 | {"target_hidden_size": 32},
            EAGLE3_TENSORS | {"fc.weight": [64, 96]},
            {},
            OTHER_WIDTH.format(32, 64),
        ),
        (
            EAGLE3 | NARROW,
            without(NARROW_TENSORS, "embed_tokens", "lm_head"),
            {},
            INCOMPLETE.format("embed_tokens, lm_head"),
        ),
        (
            EAGLE3,
            EAGLE3_TENSORS,
            {"num_hidden_layers": 4},
            LAYERS.format(CHOSEN.format([2, 2, 1]), 2, 4),
        ),
        (
            EAGLE3,
            EAGLE3_TENSORS,
            {"num_hidden_layers": 6},
            LAYERS.format(CHOSEN.format([2, 3, 3]), 2, 6),
        ),
        (
            EAGLE3,
            EAGLE3_TENSORS,
            {"num_hidden_layers": 1},
            LAYERS.format(CHOSEN.format([2, 0, -2]), 1, 1),
        ),
        (
            EAGLE3 | {IDS: [1, 2, 9]},
            EAGLE3_TENSORS,
            {},
            LAYERS.format(f"{IDS}, [1, 2, 9]", 2, 8),
        ),
        (
            EAGLE3 | {IDS: [1, 2, 2]},
            EAGLE3_TENSORS,
            {},
            LAYERS.format(f"{IDS}, [1, 2, 2]", 2, 8),
        ),
        # vLLM's class for Llama goes on to take three.
        (EAGLE3, without(EAGLE3_TENSORS, "fc."), {}, INCOMPLETE.format("fc")),
        (EAGLE3, without(EAGLE3_TENSORS, "lm_head"), {}, INCOMPLETE.format("lm_head")),
        (
            EAGLE3,
            without(EAGLE3_TENSORS, "d2t"),
            {},
            "its draft_vocab_size 32 is below its vocab_size 256, and there is no tensor d2t "
            "to tell which tokens these are; use a draft that has it",
        ),
        (
            EAGLE3 | {"draft_vocab_size": 256},
            EAGLE3_TENSORS | {"lm_head.weight": [256, 64], "d2t": [256]},
            {},
            "its draft_vocab_size is the model's whole vocabulary; remove the tensor d2t",
        ),
        (
            EAGLE3,
            EAGLE3_TENSORS | {"foo.weight": [1]},
            {},
            UNEXPECTED.format("foo.weight"),
        ),
        (
            SPECULATORS | {"speculators_model_type": "peagle", "mask_token_id": 1},
            SPECULATORS_TENSORS,
            {},
            "there is no tensor mask_hidden to guess in parallel with; use a draft that has it",
        ),
        (
            EAGLE3,
            EAGLE3_TENSORS,
            {"architectures": ("Idefics3ForConditionalGeneration",)},
            "vLLM 0.32 does not run Idefics3ForConditionalGeneration with an EAGLE-3 draft; leave "
            "it out, or let n-grams of the prompt guess (OPTION_SPECULATIVE_CONFIG="
            '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4})',
        ),
        (
            EAGLE,
            EAGLE_TENSORS,
            {"architectures": ("Idefics3ForConditionalGeneration",)},
            "vLLM 0.32 does not run Idefics3ForConditionalGeneration with an EAGLE draft; leave "
            "it out, or let n-grams of the prompt guess (OPTION_SPECULATIVE_CONFIG="
            '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4})',
        ),
        (EAGLE3 | {IDS: [1, 2, 4, 6]}, EAGLE3_TENSORS | {"fc.weight": [64, 256]}, {}, FOUR),
        (EAGLE3 | {IDS: [1, 2, 4, 6]}, None, {}, FOUR),
        (MEDUSA, {}, {"hidden_size": 32}, OTHER_WIDTH.format(64, 32)),
        (without(MEDUSA, "hidden_size"), {}, {}, OTHER_WIDTH.format(4096, 64)),
        (
            {"model_type": "mlp_speculator"},
            {},
            {},
            "vLLM 0.32 has no MLP speculators any more; use an EAGLE-3 draft",
        ),
        (
            LLAMA,
            FULL,
            {"vocab_size": 320},
            "its vocabulary has 256 tokens and the model's 320; use a draft of the same "
            "family, with the same vocab_size",
        ),
    ],
)
def test_what_cannot_work_is_told_with_the_fix(config, shapes, of, expected):
    assert faults(look(Memory(config, shapes)), target(**of), 3) == [expected]


@pytest.mark.parametrize(
    ("method", "config"),
    [("eagle", EAGLE), ("eagle3", EAGLE), ("medusa", EAGLE), ("eagle", EAGLE3), ("eagle3", EAGLE3)],
)
def test_a_draft_is_checked_as_the_operator_calls_it(method, config):
    """Independent of the name in its files, and even if their format shows no shapes."""
    draft = look(Memory(config | {"hidden_size": 32}))
    called = asked(draft, method)
    assert called.method == method
    assert OTHER_WIDTH.format(32, 64) in faults(called, target(), 3)


def test_all_faults_are_told_at_once():
    draft = look(
        Memory(SPECULATORS | {IDS: [1, 2]}, SPECULATORS_TENSORS | {"fc.weight": [64, 128]})
    )
    assert faults(draft, target(), 3) == [
        LAYERS.format(f"{IDS}, [1, 2]", 2, 8),
        MISSHAPEN.format("fc.weight", [64, 128], [64, 192]),
    ]
    draft = look(Memory(EAGLE3 | {"draft_vocab_size": 64}, EAGLE3_TENSORS))
    assert faults(draft, target(), 3) == [
        MISSHAPEN.format("lm_head.weight", [32, 64], [64, 64]),
        MISSHAPEN.format("d2t", [32], [64]),
    ]


@pytest.mark.parametrize(
    ("config", "tokens", "expected"),
    [
        (LLAMA, 1, []),
        (LLAMA, 32, []),
        (SPECULATORS, None, []),
        (MEDUSA, None, []),
        (MEDUSA, 2, []),
        (
            LLAMA,
            None,
            [
                "it does not say how many tokens to guess at once; set num_speculative_tokens, "
                "like 3"
            ],
        ),
        (
            LLAMA,
            0,
            [
                "num_speculative_tokens is 0, but must be from 1 to 32, as no draft is right for "
                "longer; try 3"
            ],
        ),
        (
            SPECULATORS,
            33,
            [
                "num_speculative_tokens is 33, but must be from 1 to 32, as no draft is right "
                "for longer; try 3"
            ],
        ),
        (MEDUSA, 5, ["num_speculative_tokens is 5, but it has 4 heads; set at most 4"]),
        ({"model_type": "qwen3_next_mtp", "num_nextn_predict_layers": 1}, 5, []),
        ({"model_type": "glm4_moe_mtp", "num_nextn_predict_layers": 2}, 1, []),
        ({"model_type": "glm4_moe_mtp", "num_nextn_predict_layers": 2}, 4, []),
        (
            {"model_type": "glm4_moe_mtp", "num_nextn_predict_layers": 2},
            3,
            ["num_speculative_tokens is 3, but must be a multiple of 2 or less"],
        ),
    ],
)
def test_how_many_tokens_can_be_guessed(config, tokens, expected):
    assert faults(look(Memory(config)), target(), tokens) == expected


@pytest.mark.parametrize(
    ("config", "where", "told"),
    [
        (LLAMA, "/models/eagle-nest/small", ["eagle-"]),
        (MEDUSA, "/models/DFlash", ["dflash"]),
        (LLAMA, "/models/beagles", []),
        (LLAMA, "s3://eagle-nest/small", []),  # it gets another path
        (EAGLE, "/models/eagle3/draft", []),  # a method that vLLM does not replace by a guess
    ],
)
def test_a_path_that_misleads_vllm_is_told(config, where, told):
    shapes = EAGLE_TENSORS if config is EAGLE else FULL
    assert faults(look(Memory(config, shapes, where)), target(), 3) == [
        f'vLLM takes it for another kind of draft, because of "{part}" in its path; rename the '
        "folder"
        for part in told
    ]


def test_a_draft_in_a_folder(tmp_path):
    memory = Memory(EAGLE3, EAGLE3_TENSORS)
    for name, content in memory.files.items():
        with (tmp_path / name).open("wb") as file:
            file.write(content)
            file.truncate(memory.sizes[name])
    draft = look(Folder(tmp_path))
    assert draft.facts == facts(draft.config, {"model.safetensors": draft.facts.weight_bytes})
    assert draft.shapes == {name: tuple(shape) for name, shape in EAGLE3_TENSORS.items()}
    assert faults(draft, target(), 3) == []
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="there are no weights that vLLM loads"):
        look(Folder(tmp_path))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["llama", "eagle3"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
KEYS = sorted(
    {*EAGLE3, *SPECULATORS, *MEDUSA, IDS, "eagle_config", "num_aux_layers", "block_size"}
    | {"num_nextn_predict_layers", "num_aux_hidden_states", "mask_token_id", "medusa_num_heads"}
)


@given(
    st.sampled_from([{}, EAGLE, EAGLE3, SPECULATORS, MEDUSA, LLAMA]),
    st.dictionaries(st.sampled_from(KEYS), json_values, max_size=5),
    st.dictionaries(
        st.sampled_from([*EAGLE3_TENSORS, *EAGLE_TENSORS, "layers.²", ""]), st.just([1])
    ),
    st.none() | st.integers(),
)
def test_any_draft_is_read_or_refused(base, config, shapes, tokens):
    try:
        found = faults(look(Memory(base | config, shapes)), target(), tokens)
    except ModelError:
        return
    assert all(found)
