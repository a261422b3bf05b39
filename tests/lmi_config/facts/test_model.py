# SPDX-License-Identifier: Apache-2.0
import contextlib
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_config.facts.kv import KvShape
from lmi_config.facts.layers import KvLayers
from lmi_config.facts.model import (
    Checks,
    Folder,
    ModelError,
    ModelFacts,
    Tensor,
    WeightParts,
    look,
    tensors,
    weight_parts,
)
from tests.lmi_config.examples import GGUF

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_scaling": LLAMA3,
    "torch_dtype": "bfloat16",
}
LLAMA_70B = LLAMA_8B | {"hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80}
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "sliding_window": None,
    "use_sliding_window": False,
    "rope_scaling": None,
}
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
}
GEMMA3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_hidden_layers": 62,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}
GEMMA3_4B = GEMMA3_27B | {  # as published: the class of transformers has the missing values
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
}
GEMMA4 = {
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "hidden_size": 2560,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 42,
        "num_kv_shared_layers": 18,
        "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
    },
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    "quantization_config": {"quant_method": "mxfp4"},
}
MISTRAL_V01 = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "sliding_window": 4096,
    "max_position_embeddings": 32768,
}
MISTRAL_PARAMS = {
    "dim": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "head_dim": 256,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
}
HYBRID = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
}
JAMBA = HYBRID | {"attn_layer_period": 8, "attn_layer_offset": 4}
QWEN_WINDOW = QWEN3_8B | {
    "use_sliding_window": True,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


class Memory:
    """A checkpoint that exists only in memory."""

    where = "org/model"

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files
        self.sizes = {name: len(content) for name, content in files.items()}

    def head(self, name: str, length: int) -> bytes:
        return self.files[name][:length]


def model(config, weights=True, **files):
    """A checkpoint with this config.json and, unless `weights` is false, a whole weight file."""
    weight = {"model.safetensors": safetensors({"a": ("BF16", [2, 3])})} if weights else {}
    return Memory({"config.json": encoded(config), **weight, **files})


def encoded(value) -> bytes:
    return json.dumps(value).encode()


def safetensors(tensors, metadata=None) -> bytes:
    """A file of zeros. tensors: name → dtype, shape; each number takes two bytes."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + 2 * shape[0] * shape[1]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    return framed(encoded(header)) + bytes(end)


def framed(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def test_the_parts_of_the_weights():
    mixed = {
        "model.embed_tokens.weight": ("BF16", [8, 4]),
        "lm_head.weight": ("F32", [8, 2]),
        "model.layers.0.mlp.experts.0.up_proj.weight": ("BF16", [4, 4]),
        "model.layers.0.mlp.shared_experts.up_proj.weight": ("BF16", [4, 4]),
        "model.layers.0.mlp.experts.down_proj_blocks": ("F8_E4M3", [4, 2]),
    }
    found = {name: Tensor(kind, (*sizes,)) for name, (kind, sizes) in mixed.items()}
    assert weight_parts(found) == WeightParts(experts=40, single=64, outer=128)


def test_all_facts_of_a_model():
    assert look(model(LLAMA_8B)) == ModelFacts(
        architectures=("LlamaForCausalLM",),
        model_type="llama",
        weight_bytes=len(safetensors({"a": ("BF16", [2, 3])})),
        largest_file=len(safetensors({"a": ("BF16", [2, 3])})),
        dtype="bfloat16",
        quantization=None,
        max_length=131072,
        vocabulary=128256,
        hidden_size=4096,
        layers=32,
        kv=KvShape(heads=8, full=32 * 2 * 8 * 128),
        attention_heads=32,
        kept=KvLayers(full=32, shapes=frozenset({(8, 128)})),
        parts=WeightParts(experts=0, single=0, outer=0),
        checks=Checks(longest=131072, quantised=frozenset(), experts=0),
    )


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (LLAMA_8B, 128 * 1024),
        (LLAMA_70B, 320 * 1024),
        (QWEN3_8B, 144 * 1024),
        (SMOLLM2, 23_040),
        (DEEPSEEK_V3, 70_272),
        (GEMMA3_27B, 507_904),
        (GEMMA3_4B, 34 * 2 * 4 * 256 * 2),
        (GEMMA4, (20 * 2 * 2 * 256 + 4 * 2 * 2 * 512) * 2),
        (GPT_OSS_20B, 48 * 1024),
        (MISTRAL_V01, 128 * 1024),
        (QWEN3_NEXT, 12 * 2 * 2 * 256 * 2),
        (JAMBA, 4 * 2 * 8 * 128 * 2),
        (HYBRID | {"attn_layer_indices": [9, 18, 27]}, 3 * 2 * 8 * 128 * 2),  # Bamba
        (HYBRID | {"hybrid_override_pattern": "M-M*-M*-"}, 2 * 2 * 8 * 128 * 2),  # Nemotron-H
        (HYBRID | {"attn_type_list": [0, 0, 1] * 2}, 2 * 2 * 8 * 128 * 2),  # MiniMax
        (HYBRID | {"layer_types": ["mamba", "attention"]}, 2 * 8 * 128 * 2),  # Granite
        (HYBRID | {"layers_block_type": ["mamba", "hybrid"]}, 2 * 8 * 128 * 2),  # Zamba
        (
            DEEPSEEK_V3
            | {"model_type": "kimi_linear", "linear_attn_config": {"full_attn_layers": [4, 8]}},
            2 * 576 * 2,
        ),
        ({"n_embd": 768, "n_head": 12, "n_layer": 12}, 12 * 2 * 768 * 2),  # GPT-2
        (HYBRID | {"multi_query": True}, 32 * 2 * 1 * 128 * 2),  # Falcon 7B
        (HYBRID | {"attn_config": {"kv_n_heads": 4}}, 32 * 2 * 4 * 128 * 2),  # DBRX
    ],
)
def test_bytes_of_a_token(config, size):
    kv = look(model(config)).kv
    assert kv is not None
    assert kv.bytes_per_token("auto", "bfloat16") == size


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_hidden_layers": 12, "hidden_size": 768},
        HYBRID | {"num_hidden_layers": 0},
        HYBRID | {"num_attention_heads": 0, "num_key_value_heads": None},
        HYBRID | {"num_hidden_layers": [1, 2]},
        HYBRID | {"is_encoder_decoder": True},
        HYBRID | {"block_configs": [{"attention": {"no_op": True}}]},
        DEEPSEEK_V3 | {"model_type": "minicpm3"},  # vLLM computes it without latent attention
        DEEPSEEK_V3 | {"qk_rope_head_dim": None},
    ],
)
def test_kv_is_unknown_where_the_config_does_not_tell(config):
    assert look(model(config)).kv is None


@pytest.mark.parametrize(
    ("config", "kv"),
    [
        (MISTRAL_V01, KvShape(heads=8, full=0, windowed=65536, window=4096)),
        (GPT_OSS_20B, KvShape(heads=8, full=12288, windowed=12288, window=128)),
        (
            {name: value for name, value in GPT_OSS_20B.items() if name != "layer_types"},
            KvShape(heads=8, full=12288, windowed=12288, window=128),
        ),
        (GEMMA3_4B, KvShape(heads=4, full=5 * 2048, windowed=29 * 2048, window=1024)),
        (QWEN_WINDOW, KvShape(heads=8, full=28 * 2048, windowed=8 * 2048, window=4096)),
        (QWEN3_8B | {"sliding_window": 4096}, KvShape(heads=8, full=36 * 2048)),
        # The plan cannot read this rule, and assumes the maximum, the whole sequence.
        (MISTRAL_V01 | {"sliding_window_pattern": "LLLG"}, KvShape(heads=8, full=65536)),
        (HYBRID | {"attention_chunk_size": 8192}, KvShape(heads=8, full=65536)),
        (
            HYBRID | {"attention_chunk_size": 8192, "layer_types": ["chunked_attention", "new"]},
            KvShape(heads=8, full=2048, windowed=2048, window=8193),
        ),
        (
            HYBRID | {"attention_chunk_size": 8192, "model_type": "llama4_text"},
            KvShape(heads=8, full=8 * 2048, windowed=24 * 2048, window=8193),
        ),
        (DEEPSEEK_V3, KvShape(heads=1, full=61 * 576, latent=61)),
    ],
)
def test_layers_with_a_window_count_apart(config, kv):
    assert look(model(config)).kv == kv


@pytest.mark.parametrize(
    ("cache", "dtype", "width"),
    [
        ("auto", "bfloat16", 2),
        ("auto", "float32", 4),
        ("auto", None, 2),
        ("bfloat16", "float32", 2),
        ("float16", "float32", 2),
        ("float32", "bfloat16", 4),
        ("fp8", "bfloat16", 1),
        ("fp8_e5m2", "bfloat16", 1),
        ("int8_per_token_head", "bfloat16", 1),
        ("nvfp4", "bfloat16", 1),
    ],
)
def test_numbers_are_as_wide_as_the_cache_has_them(cache, dtype, width):
    assert KvShape(heads=1, full=100).bytes_per_token(cache, dtype) == 100 * width


@pytest.mark.parametrize(
    ("heads", "ranks", "copies"),
    [(8, 1, 1), (8, 4, 1), (8, 8, 1), (8, 16, 2), (1, 8, 8), (2, 8, 4)],
)
def test_ranks_without_heads_of_their_own_keep_copies(heads, ranks, copies):
    assert KvShape(heads=heads, full=1).copies(ranks) == copies


LENGTH = {"max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, None),
        (LENGTH, 4096),
        ({"n_positions": 1024}, 1024),
        ({"seq_length": 32768}, 32768),
        (LENGTH | {"max_seq_len": 2048}, 2048),
        (LENGTH | {"model_max_length": 131072}, 131072),
        (LENGTH | {"rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        (LENGTH | {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, 8192),
        (LENGTH | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, 4096),
        (LENGTH | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, 4096),
        (LENGTH | {"rope_scaling": {"type": "linear", "factor": None}}, 4096),
        (LENGTH | {"rope_scaling": {"type": "linear", "factor": 1e300}}, 4096),
        # max_position_embeddings is the length after scaling.
        (LENGTH | {"rope_scaling": LLAMA3}, 4096),
        (DEEPSEEK_V3, 163840),
        (GPT_OSS_20B, 131072),
        (GEMMA3_4B, 131072),
        # vLLM's default: Phi-3's quality is best below it.
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", "long_factor": [1.0]},
            },
            4096,
        ),
    ],
)
def test_the_length_is_what_vllm_derives(config, length):
    assert look(model(config)).max_length == length


@pytest.mark.parametrize(
    ("config", "dtype", "quantization"),
    [
        ({}, None, None),
        ({"dtype": "float16"}, "float16", None),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16", None),
        ({"text_config": {"torch_dtype": "float16"}}, "float16", None),
        (GPT_OSS_20B, None, "mxfp4"),
        (
            {"compression_config": {"quant_method": "compressed-tensors"}},
            None,
            "compressed-tensors",
        ),
        ({"text_config": {"quantization_config": {"quant_method": "AWQ"}}}, None, "awq"),
    ],
)
def test_dtype_and_quantization(config, dtype, quantization):
    facts = look(model(config))
    assert (facts.dtype, facts.quantization) == (dtype, quantization)


@pytest.mark.parametrize(
    "nested",
    [
        lambda text: {"text_config": text},
        lambda text: {"llm_config": text},
        lambda text: {"language_config": text},
        lambda text: {"thinker_config": {"audio_config": {}, "text_config": text}},
    ],
)
def test_the_numbers_are_the_language_models(nested):
    facts = look(model({"architectures": ["Omni"], "hidden_size": 1, **nested(SMOLLM2)}))
    assert (facts.architectures, facts.hidden_size, facts.layers) == (("Omni",), 576, 30)
    assert facts.kv == KvShape(heads=3, full=11520)


def test_mistrals_own_format():
    files = {
        "params.json": encoded(MISTRAL_PARAMS),
        "consolidated.safetensors": safetensors({}),
        "tekken.json": b"{}",
    }
    facts = look(Memory(files))
    assert (facts.weight_bytes, facts.layers) == (10, 32)
    assert facts.kv == KvShape(heads=8, full=65536)


def test_little_is_known_of_gguf():
    assert look(Memory({"model-Q4_K_M.gguf": b"GGUF"})) == GGUF


EMPTY = safetensors({})
SMALL = safetensors({"a": ("BF16", [1, 1])})
LARGE = safetensors({"b": ("BF16", [100, 100])})
INDEX = "model.safetensors.index.json"


def index(*files):
    return encoded({"weight_map": {f"tensor{number}": file for number, file in enumerate(files)}})


@pytest.mark.parametrize(
    ("files", "counted"),
    [
        ({"model.safetensors": SMALL}, [SMALL]),
        ({"model-1.safetensors": SMALL, "model-2.safetensors": LARGE}, [SMALL, LARGE]),
        ({"model.safetensors": SMALL, "pytorch_model.bin": b"12345"}, [SMALL]),
        ({"pytorch_model.bin": b"12345", "training_args.bin": b"1", "a.pt": b"1"}, [b"12345"]),
        ({"medusa_lm_head.pt": b"123", "optimizer.pt": b"1"}, [b"123"]),
        # Files that the index does not name are not loaded.
        ({"a.safetensors": SMALL, "b.safetensors": LARGE, INDEX: index("a.safetensors")}, [SMALL]),
        # An index of files that were not fetched, beside others that were.
        ({"pytorch_model.bin": b"12345", INDEX: index("a.safetensors")}, [b"12345"]),
        # vLLM 0.32 prefers Mistral's format where it finds both.
        ({"consolidated.safetensors": LARGE, "model.safetensors": SMALL}, [LARGE]),
        # Not the model's: adapters, other formats of the same, what macOS leaves.
        (
            {
                "model.safetensors": SMALL,
                "adapters/a/adapter_model.safetensors": LARGE,
                "original/consolidated.00.pth": LARGE,
                "._model.safetensors": b"x",
            },
            [SMALL],
        ),
    ],
)
def test_weights_are_the_files_that_vllm_loads(files, counted):
    facts = look(model({}, weights=False, **files))
    assert facts.weight_bytes == sum(len(content) for content in counted)
    assert facts.largest_file == max(len(content) for content in counted)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"readme.md": b""},
            "org/model: there is no config.json, params.json or *.gguf in it (readme.md); give the "
            "folder that holds the model's own files",
        ),
        ({}, "it is empty"),
        ({"config.json": b""}, "org/model/config.json is not JSON"),
        ({"config.json": b"\xff\xfe\xfd"}, "org/model/config.json is not JSON"),
        ({"config.json": b"[" * 100_000}, "org/model/config.json is nested too deeply"),
        ({"config.json": b"[]"}, "org/model/config.json must contain a JSON object"),
        (
            {"config.json": b"{}", "a.pth": b"", "b.txt": b"", "c": b"", "d": b"", "e": b""},
            "org/model: there are no weights that vLLM loads (*.safetensors, *.bin, *.pt or "
            "*.gguf) in it (a.pth, b.txt, c, config.json and 2 more); fetch them, or set "
            "OPTION_LOAD_FORMAT=dummy to serve random ones",
        ),
        (
            {
                "config.json": b"{}",
                "a.safetensors": EMPTY,
                INDEX: index("a.safetensors", "b.safetensors"),
            },
            f"org/model/{INDEX} names files that are not there (b.safetensors); fetch the model",
        ),
        (
            {"config.json": b"{}", "a.safetensors": EMPTY, INDEX: b'{"weight_map": [1]}'},
            f"org/model/{INDEX}: weight_map must be an object of tensor → file; fetch it again",
        ),
    ],
)
def test_a_model_that_cannot_be_used_is_told_with_the_fix(files, message):
    with pytest.raises(ModelError) as raised:
        look(Memory(files))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32', but must be a whole number"),
        ({"hidden_size": 1.5}, "hidden_size is 1.5, but must be a whole number"),
        ({"vocab_size": {}}, "vocab_size is dict, but must be a whole number"),
        ({"max_position_embeddings": True}, "max_position_embeddings is True, but must be a"),
        ({"architectures": "A"}, "architectures is 'A', but must be a list of names"),
        ({"torch_dtype": 16}, "torch_dtype is 16, but must be a name"),
        ({"text_config": "a"}, "text_config is 'a', but must be a JSON object"),
    ],
)
def test_a_value_of_the_wrong_type_is_told(config, message):
    with pytest.raises(ModelError) as raised:
        look(model(config))
    assert str(raised.value).startswith(f"org/model/config.json: {message}")
    assert str(raised.value).endswith("; correct it")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is cut short after 0 bytes; fetch it again"),
        (b"1234567", "is cut short after 7 bytes; fetch it again"),
        (LARGE[:30], "is cut short after 30 bytes; fetch it again"),
        (LARGE[:-1], f"has {len(LARGE) - 1} bytes, but by its header {len(LARGE)}; fetch it again"),
        (LARGE + b"1", f"has {len(LARGE) + 1} bytes, but by its header {len(LARGE)}; fetch it"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 100\n",
            "is a Git LFS pointer, not the weights; run git lfs pull",
        ),
        (framed(b"{"), "is not JSON"),
        (framed(b"[" * 100_000), "is nested too deeply"),
        (framed(b"[]"), "must contain a JSON object"),
        (framed(b'{"a": 1}'), "what its header says of a is no tensor"),
        (framed(b'{"a": {"dtype": "BF16", "shape": [1.0], "data_offsets": [0, 0]}}'), "of a is no"),
        (framed(b'{"a": {"dtype": "BF16", "shape": [-1], "data_offsets": [0, 0]}}'), "of a is no"),
        (framed(b'{"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0]}}'), "of a is no"),
    ],
)
def test_weights_that_are_not_whole_are_refused(content, message):
    with pytest.raises(ModelError) as raised:
        look(model({}, weights=False, **{"model.safetensors": content}))
    assert str(raised.value).startswith("org/model/model.safetensors")
    assert message in str(raised.value)


def entry(dtype="F32", shape=(1,), begin=0, end=4) -> dict[str, object]:
    return {"dtype": dtype, "shape": [*shape], "data_offsets": [begin, end]}


HEADERS = [
    ({}, 0, None),
    ({"a": entry(), "b": entry(begin=4, end=8)}, 8, None),
    ({"b": entry(begin=4, end=8), "a": entry()}, 8, None),
    ({"a": entry(shape=())}, 4, None),
    ({"a": entry(shape=(0,), end=0), "b": entry()}, 4, None),
    ({"a": entry("F4", (2,), 0, 1), "b": entry("F6_E2M3", (4,), 1, 4)}, 4, None),
    ({"a": entry("BOOL", (3,), 0, 3)}, 3, None),
    ({"__metadata__": None, "a": entry() | {"other": 1}}, 4, None),
    ({"a": entry(begin=4, end=8)}, 8, "a begins at byte 4, but the data before it ends at 0"),
    ({"a": entry(), "b": entry()}, 4, "b begins at byte 0, but the data before it ends at 4"),
    ({"a": entry(), "b": entry(begin=8, end=12)}, 12, "b begins at byte 8"),
    ({"a": entry(begin=4, end=0)}, 4, "does not fit its -4 bytes"),
    ({"a": entry(shape=(2,))}, 4, "a is F32 of shape [2], which does not fit its 4 bytes"),
    ({"a": entry("F4", (1,), 0, 1)}, 1, "does not fit"),
    ({"a": entry(shape=(2**40, 2**40, 0), end=0)}, 0, "does not fit"),
    ({"a": entry(shape=[2**62] * 50_000, end=0)}, 0, "does not fit"),
    ({"a": entry(shape=(True,))}, 4, "is no tensor"),
    ({"a": entry(begin=False)}, 4, "is no tensor"),
    ({"a": entry(end=2**64)}, 4, "is no tensor"),
    ({"__metadata__": {"a": 1}}, 0, "must be an object of texts"),
    ({"__metadata__": []}, 0, "must be an object of texts"),
    ("{}\0\0", 0, "is not JSON"),
    ("{}".encode("utf-16-le"), 0, "is not JSON"),
    (b'{"\xff": 1}', 0, "is not JSON"),
    ({"__metadata__": {"a": "1", "shape": "[[", 'b"\\': "\u20ac"}, 'a"\n': entry()}, 4, None),
    ({"__metadata__": {}, "a": entry()}, 4, None),
    ('{ \n"a" :\t{ "shape":[ 1 ] ,"data_offsets":[0,4],"dtype":"F32" } } ', 4, None),
    ('{"\\u0061": {"shape": [1], "data_offsets": [0, 4], "dtype": "F32"}}', 4, None),
    ('{"a": {"dtype": "F32"},}', 0, "is no tensor"),
    ('{"__metadata__": {"a": "b"},}', 0, "is not JSON"),
    ('{"__metadata__": {"a": "b",}}', 0, "must be an object of texts"),
    ('{"__metadata__": {"a": {}}}', 0, "must be an object of texts"),
    ('{"a": {"shape": [[]], "data_offsets": [0, 0], "dtype": "F32"}}', 0, "is no tensor"),
    ('{"a": {"shape": [1,], "data_offsets": [0, 4], "dtype": "F32"}}', 4, "is not JSON"),
    ('{"a": [' + "[]," * 1000 + "[]]}", 0, "of a is no tensor"),
    ('{"a": ' + "[" * 10_000 + "]" * 10_000 + "}", 0, "of a is no tensor"),
    ('{"a": {"a": ' * 10_000 + "1" + "}" * 20_000, 0, "of a is no tensor"),
    ('{"a": {}' * 2, 0, "is no tensor"),
    ('{"a' + "a" * 10**6, 0, "is not JSON"),
]


HOSTILE = ["[],", '"a":{},', '"a":[],', "{", "[", '"', "\\", " ", "1,", '"a":"a",', "null,", "\n"]


@pytest.mark.parametrize("end", ["", "]}", "}}"])
@pytest.mark.parametrize("begin", ["", '{"a":', '{"a":[', '{"a":{"shape":[', '{"__metadata__":{'])
@pytest.mark.parametrize("unit", HOSTILE)
def test_no_header_takes_much(unit, begin, end):
    """4 MB; as Python's objects, lists within lists would take 90 MB."""
    content = framed(f"{begin}{unit * (4_000_000 // len(unit))}{end}".encode())
    tracemalloc.start()
    begun = time.process_time()
    with contextlib.suppress(ModelError):  # blanks count as an empty value
        look(model({}, weights=False, **{"model.safetensors": content}))
    took, (_, peak) = time.process_time() - begun, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 3
    assert peak < 40_000_000


@pytest.mark.parametrize(("content", "size", "message"), HEADERS)
def test_headers_are_read_as_safetensors_reads_them(content, size, message, tmp_path):
    if isinstance(content, dict):
        content = json.dumps(content)
    file = framed(content if isinstance(content, bytes) else content.encode()) + bytes(size)
    outcome = None
    try:
        look(model({}, weights=False, **{"model.safetensors": file}))
    except ModelError as error:
        outcome = str(error)
    assert message in (outcome or "") if message else outcome is None
    library = pytest.importorskip("safetensors")
    (tmp_path / "file").write_bytes(file)
    try:
        library.safe_open(tmp_path / "file", "np")
    except library.SafetensorError:
        assert message
    else:
        assert not message


def test_a_header_beyond_reason_is_not_read():
    class Huge(Memory):
        def head(self, name: str, length: int) -> bytes:
            assert length < 10**6
            return super().head(name, length)

    files = {"config.json": b"{}", "model.safetensors": (10**9).to_bytes(8, "little")}
    huge = Huge(files)
    huge.sizes["model.safetensors"] = 10**10
    with pytest.raises(ModelError, match="a header of 1000000000 bytes is longer than"):
        look(huge)


def test_a_long_header_takes_a_second_read():
    many = {f"layers.{number}.weight": ("BF16", [1, 1]) for number in range(3000)}
    content = safetensors(many)
    assert len(tensors(model({}, weights=False, **{"model.safetensors": content}))) == 3000


def test_no_weights_are_needed_for_dummy_ones():
    facts = look(model(SMOLLM2, weights=False), weights=False)
    assert (facts.weight_bytes, facts.largest_file, facts.layers) == (0, 0, 30)


def test_tensors_of_all_files():
    files = {
        "model-1.safetensors": safetensors({"a": ("BF16", [2, 3])}, {"format": "pt"}),
        "model-2.safetensors": safetensors({"b": ("F16", [4, 1])}),
    }
    assert tensors(model({}, weights=False, **files)) == {
        "a": ("BF16", (2, 3)),
        "b": ("F16", (4, 1)),
    }
    assert tensors(model({}, weights=False, **{"pytorch_model.bin": b"1"})) == {}


def test_a_folder_counts_what_is_at_its_top(tmp_path):
    (tmp_path / "config.json").write_bytes(encoded(SMOLLM2))
    (tmp_path / "model.safetensors").write_bytes(SMALL)
    for name in ("adapters", "original"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(LARGE)
    folder = Folder(tmp_path)
    assert folder.sizes == {
        "config.json": len(encoded(SMOLLM2)),
        "model.safetensors": len(SMALL),
    }
    assert folder.head("config.json", 1) == b"{"
    assert look(folder).weight_bytes == len(SMALL)


def test_a_folder_that_cannot_be_read_is_told(tmp_path):
    with pytest.raises(ModelError) as raised:
        Folder(tmp_path / "gone")
    reason = "cannot be read (No such file or directory); check its path and permissions"
    assert str(raised.value) == f"{tmp_path}/gone {reason}"
    with pytest.raises(ModelError) as raised:
        Folder(tmp_path).head("file", 1)
    assert str(raised.value) == f"{tmp_path}/file {reason}"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["yarn", "longrope", "full_attention", "gemma3_text", "deepseek_v3", ""]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
KEYS = sorted(
    {name for config in (LLAMA_8B, QWEN3_8B, DEEPSEEK_V3, GPT_OSS_20B, JAMBA) for name in config}
    | set(GEMMA4["text_config"])
    | {"text_config", "thinker_config", "full_attention_interval", "hybrid_override_pattern"}
    | {"attn_config", "linear_attn_config", "attn_layer_indices", "sliding_window_pattern", "dtype"}
    | {"rope_parameters", "multi_query", "compression_config", "attention_chunk_size"}
)


@given(st.dictionaries(st.sampled_from(KEYS), json_values, max_size=8), st.booleans())
def test_any_config_is_read_or_refused(config, over_a_model):
    try:
        facts = look(model(LLAMA_8B | config if over_a_model else config))
    except ModelError:
        return
    if facts.kv:
        assert facts.kv.copies(8) >= 1
        assert facts.kv.bytes_per_token("auto", facts.dtype) >= 0


@pytest.mark.parametrize(
    ("config", "heard"),
    [
        ({"is_encoder_decoder": True, "max_source_positions": 1500}, 1500),
        ({"is_encoder_decoder": True}, None),
        ({"max_source_positions": 1500}, None),
    ],
)
def test_what_an_encoder_hears_at_once(config, heard):
    assert look(model(config)).heard == heard


@given(json_values | st.dictionaries(st.sampled_from(["a", "__metadata__"]), json_values))
def test_any_header_is_read_or_refused(header):
    files = {"model.safetensors": framed(encoded(header)), INDEX: encoded(header)}
    for name, content in files.items():
        try:
            look(model({}, **{name: content}))
        except ModelError:
            continue


@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(content):
    for name in ("config.json", "model.safetensors", INDEX):
        try:
            look(Memory(model({}).files | {name: content}))
        except ModelError:
            continue


def test_reading_a_model_loads_no_large_packages():
    program = (
        "import lmi_config.facts.draft, sys\n"
        "print(*{'torch', 'vllm', 'safetensors'} & {*sys.modules})"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.strip() == ""
