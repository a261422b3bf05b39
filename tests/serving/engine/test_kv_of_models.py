# SPDX-License-Identifier: Apache-2.0
"""Compares a plan's KV cache for published models with vLLM's own reading of the same files.

vLLM's own converters read them, and the sizes are those of its KV cache specs. The test lists the
specs of a model's layers, because they are in the models' code, which needs their weights.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from vllm.config.model import MODEL_ARCH_CONFIG_CONVERTORS, ModelArchConfigConvertorBase
from vllm.transformers_utils.config import get_config, get_hf_text_config
from vllm.utils.torch_utils import (
    STR_DTYPE_TO_TORCH_DTYPE,
    kv_cache_dtype_str_to_dtype,
    resolve_kv_cache_dtype_string,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from lmi_config.facts.kv import KvShape
from lmi_config.facts.model import Folder, look

BLOCK = 64
COMMON = {"torch_dtype": "bfloat16", "vocab_size": 32_000, "max_position_embeddings": 32_768}
LLAMA_8B = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
QWEN2_5_72B = LLAMA_70B | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3_VL_8B = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {
        **COMMON,
        "model_type": "qwen3_vl_text",
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
    },
    "vision_config": {"model_type": "qwen3_vl", "depth": 27, "hidden_size": 1152},
}
GPT_OSS_20B = {
    **COMMON,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
GEMMA3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model"},
}
DEEPSEEK_V3 = {
    **COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEEPSEEK_V32 = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
MINISTRAL3_8B = {
    "dim": 4096,
    "n_layers": 34,
    "head_dim": 128,
    "hidden_dim": 14_336,
    "n_heads": 32,
    "n_kv_heads": 8,
    "vocab_size": 131_072,
    "max_position_embeddings": 262_144,
    "norm_eps": 1e-05,
}
MISTRAL_LARGE_3 = MINISTRAL3_8B | {
    "dim": 7168,
    "n_layers": 61,
    "n_heads": 128,
    "n_kv_heads": 128,
    "hidden_dim": 16_384,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1},
    "moe": {
        "expert_parallel": 1,
        "expert_model_parallel": 1,
        "route_every_n": 1,
        "first_k_dense_replace": 3,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "num_expert_groups": 1,
        "num_expert_groups_per_tok": 1,
        "routed_scale": 1.0,
        "expert_hidden_dim": 4096,
        "num_shared_experts": 1,
    },
}
FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}
MODELOPT = {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}
OLD_MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
}


def folder_of(tmp_path, config, quantized=None):
    name = "params.json" if "dim" in config else "config.json"
    (tmp_path / name).write_text(json.dumps(config))
    if quantized:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantized))
    return tmp_path


def vllms(folder, cache_dtype):
    """Bytes per token by vLLM's own reading and specs."""
    config_format = "mistral" if (folder / "params.json").exists() else "hf"
    whole = get_config(folder, trust_remote_code=False, config_format=config_format)
    text = get_hf_text_config(whole)
    convertor = MODEL_ARCH_CONFIG_CONVERTORS.get(whole.model_type, ModelArchConfigConvertorBase)
    read = convertor(whole, text).convert()
    model = SimpleNamespace(hf_config=whole, dtype=torch.bfloat16)
    found = resolve_kv_cache_dtype_string(cache_dtype, model)
    shape = {"block_size": BLOCK, "dtype": kv_cache_dtype_str_to_dtype(found, model)}
    layers, sparse = read.total_num_hidden_layers, hasattr(text, "index_topk")
    if read.is_deepseek_mla:
        packed = 656 if sparse and found != "auto" else None  # FLASHMLA_SPARSE, on a Hopper GPU
        size = text.kv_lora_rank + text.qk_rope_head_dim
        spec = MLAAttentionSpec(**shape, num_kv_heads=1, head_size=size, state_content_bytes=packed)
    else:
        heads, size = read.total_num_kv_heads, read.head_size
        spec = FullAttentionSpec(**shape, num_kv_heads=heads, head_size=size)
    pages = layers * spec.page_size_bytes
    if sparse:
        size = text.index_head_dim + text.index_head_dim // 128 * 4
        shape = {"block_size": BLOCK, "dtype": torch.uint8}
        pages += layers * MLAAttentionSpec(**shape, num_kv_heads=1, head_size=size).page_size_bytes
    return pages // BLOCK


TABLE = [
    ("Llama 3.1 8B", LLAMA_8B, None, "auto", 128 * 1024),
    ("Llama 3.1 8B, fp8 cache", LLAMA_8B, None, "fp8", 64 * 1024),
    ("Llama 3.3 70B", LLAMA_70B, None, "auto", 320 * 1024),
    (
        "Llama 8B FP8 by ModelOpt",
        LLAMA_8B | {"quantization_config": FP8},
        None,
        "auto",
        131_072,
    ),
    (
        "its KV cache too",
        LLAMA_8B | {"quantization_config": FP8 | MODELOPT},
        None,
        "auto",
        65_536,
    ),
    ("an earlier ModelOpt", LLAMA_8B, OLD_MODELOPT, "auto", 65_536),
    ("what is asked for comes first", LLAMA_8B, OLD_MODELOPT, "bfloat16", 131_072),
    ("Qwen2.5 72B", QWEN2_5_72B, None, "auto", 320 * 1024),
    ("Qwen3-VL 8B", QWEN3_VL_8B, None, "auto", 144 * 1024),
    ("gpt-oss 20B", GPT_OSS_20B, None, "auto", 48 * 1024),
    ("Gemma 3 27B", GEMMA3_27B, None, "auto", 507_904),
    ("Ministral 3 8B", MINISTRAL3_8B, None, "auto", 136 * 1024),
    ("Mistral Large 3", MISTRAL_LARGE_3, None, "auto", 61 * 576 * 2),
    ("DeepSeek V3", DEEPSEEK_V3, None, "auto", 61 * 576 * 2),
    ("DeepSeek V3, fp8 cache", DEEPSEEK_V3, None, "fp8", 61 * 576),
    ("DeepSeek V3.2", DEEPSEEK_V32, None, "auto", 61 * (576 * 2 + 132)),
    ("DeepSeek V3.2, fp8 cache", DEEPSEEK_V32, None, "fp8_ds_mla", 61 * (656 + 132)),
    ("DeepSeek V3.2, fp8 cache by LMI's name", DEEPSEEK_V32, None, "fp8", 61 * (656 + 132)),
]


@pytest.mark.parametrize(
    ("config", "quantized", "cache", "size"),
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_bytes_of_a_token_are_vllms(tmp_path, config, quantized, cache, size):
    folder = folder_of(tmp_path, config, quantized)
    kv = look(Folder(folder), weights=False).kv
    assert kv
    assert kv.bytes_per_token(cache, "bfloat16") == size
    assert vllms(folder, cache) == size


def test_formats_that_vllm_has_are_as_wide_here():
    kv = KvShape(heads=1, full=16)
    for name, dtype in STR_DTYPE_TO_TORCH_DTYPE.items():
        if name.startswith(("fp8", "float", "bfloat", "half")) and "mla" not in name:
            assert kv.bytes_per_token(name, None) == 16 * dtype.itemsize, name
