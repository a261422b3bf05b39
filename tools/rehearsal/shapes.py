# SPDX-License-Identifier: Apache-2.0
"""Models as their config.json alone, made on the spot: the shapes of published families, without
weights. vLLM judges them as it would the models (load_format=dummy).
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_LLAMA_8B = {
    **_LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    # SmolLM2-135M: 9 heads are divided by 1, 3 and 9 only
    "nine_heads": {
        **_LLAMA,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
    "llama_70b": {
        **_LLAMA_8B,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
    },
    # Qwen3-30B-A3B
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
    },
    # DeepSeek-V2-Lite: latent attention
    "deepseek": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "dtype": "bfloat16",
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    # gpt-oss-20b: every second layer has a window
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "dtype": "bfloat16",
        "attention_bias": True,
        "head_dim": 64,
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "quantization_config": {"quant_method": "mxfp4"},
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "vocab_size": 201088,
    },
    # Gemma 3 1B: of six layers one attends to everything; one KV head
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "bfloat16",
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    # Qwen3-VL-8B
    "qwen3_vl": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "dtype": "bfloat16",
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_position_embeddings": 262144,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
            },
            "rope_theta": 5000000,
            "vocab_size": 151936,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "deepstack_visual_indexes": [8, 16, 24],
            "depth": 27,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "in_channels": 3,
            "intermediate_size": 4304,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
    "fp8": {
        **_LLAMA_8B,
        "quantization_config": {"activation_scheme": "dynamic", "quant_method": "fp8"},
    },
    # Qwen2.5-7B-Instruct-AWQ: 28 heads, 4 of KV, and columns in groups of 128
    "awq": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": "float16",
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "quantization_config": {
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": None,
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        },
        "rms_norm_eps": 1e-6,
        "vocab_size": 152064,
    },
    # Mistral-7B-v0.1: every layer has a window
    "mistral": {
        **_LLAMA_8B,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "vocab_size": 32000,
    },
}


def draft(target: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of an EAGLE-3 draft that was trained for the target."""
    text = target.get("text_config", target)
    layers = text["num_hidden_layers"]
    return {
        **_LLAMA,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": text["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [2, layers // 2, layers - 3],
        "head_dim": 64,
        "hidden_size": text["hidden_size"],
        "intermediate_size": 4 * text["hidden_size"],
        "max_position_embeddings": text["max_position_embeddings"],
        "num_attention_heads": text["hidden_size"] // 64,
        "num_hidden_layers": 1,
        "num_key_value_heads": text["hidden_size"] // 64,
        "vocab_size": text["vocab_size"],
    }


def make(folder: Path) -> None:
    """Write every model, and its draft as NAME_draft, into folders of their names."""
    for name, config in MODELS.items():
        for place, content in ((name, config), (f"{name}_draft", draft(config))):
            (folder / place).mkdir(parents=True, exist_ok=True)
            (folder / place / "config.json").write_text(json.dumps(content))
        _write_tensors(folder / f"{name}_draft" / "model.safetensors", draft(config))


def _write_tensors(file: Path, config: Mapping[str, Any]) -> None:
    """A draft's weights: their names and shapes, and a hole for the numbers."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    layer = "midlayer."
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
        "norm.weight": (hidden,),
        **{f"{layer}{it}.weight": (hidden,) for it in ("hidden_norm", "input_layernorm")},
        f"{layer}post_attention_layernorm.weight": (hidden,),
        **{f"{layer}self_attn.{it}_proj.weight": (hidden, 2 * hidden) for it in "qkv"},
        f"{layer}self_attn.o_proj.weight": (hidden, hidden),
        f"{layer}mlp.gate_proj.weight": (inner, hidden),
        f"{layer}mlp.up_proj.weight": (inner, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, inner),
    }
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + end)
