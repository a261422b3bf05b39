# SPDX-License-Identifier: Apache-2.0
"""What vLLM 0.32 keeps of each token for attention, by a model's configuration."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

_PACKED = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Formats of latent attention with its scales → bytes of a layer (MLAAttention.get_kv_cache_spec).
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvShape:
    """What vLLM keeps of each token for attention, in one copy of the model.

    full: numbers kept by the layers that attend to the whole sequence; windowed: by those that
    attend to the last `window` tokens only. heads: KV heads that can be spread over ranks.

    A layer keeps 2 * KV heads * head size numbers; with latent attention (MLA, as in DeepSeek) it
    keeps KV rank + rotary size, which every rank needs whole, so that counts as one head. Linear
    attention and Mamba layers keep a state per sequence and nothing per token. These are the sizes
    of vllm/v1/kv_cache_interface.py, without what a draft adds.

    latent: layers with latent attention. index: bytes of a sparse attention's index (DeepSeek V3.2)
    in all layers, whatever the cache's format. own: the cache's format where none is asked for.
    """

    heads: int
    full: int
    windowed: int = 0
    window: int = 0
    latent: int = 0
    index: int = 0
    own: str = "auto"

    def bytes_per_token(self, cache_dtype: str, model_dtype: str | None) -> int:
        """Bytes of one token in all layers.

        cache_dtype: vLLM's kv_cache_dtype, where "auto" is the model's own; model_dtype: what the
        model runs in, 16 bits where that is None. Formats below 8 bits count as 8, for
        their scales.
        """
        return self._bytes(1, 1, cache_dtype, model_dtype)

    def bytes_per_request(
        self, tokens: int, in_flight: int, cache_dtype: str, model_dtype: str | None
    ) -> int:
        """Bytes that vLLM sets aside for a request of so many tokens, prompt and answer together.

        in_flight: tokens that it may be computing at the same time; what has left a window is freed
        only after them (SlidingWindowSpec in vllm/v1/kv_cache_interface.py). Blocks are not rounded
        up.
        """
        kept = min(tokens, self.window - 1 + in_flight)
        return self._in_groups()._bytes(tokens, kept, cache_dtype, model_dtype)

    def _in_groups(self) -> "KvShape":
        """With what vLLM wastes where layers with and without a window make groups of one size.

        As _get_kv_cache_groups_uniform_page_size in vllm/v1/core/kv_cache_utils.py, for layers that
        all keep as much: of 22 with a window and 4 without it makes 7 groups of 4.
        """
        few, many = sorted((self.full, self.windowed))
        if not few:
            return self
        group = many if many < few * 1.5 else few
        full, windowed = (-(-kept // group) * group for kept in (self.full, self.windowed))
        return dataclasses.replace(self, full=full, windowed=windowed)

    def _bytes(self, full: int, kept: int, cache_dtype: str, model_dtype: str | None) -> int:
        """Bytes of so many tokens in the layers without a window, and in those with one."""
        found = self.own if cache_dtype == "auto" else cache_dtype
        width = _width(found, model_dtype)
        packed = _PACKED.get(found)
        if self.latent and self.index and width == 1:
            packed = packed or _PACKED["fp8_ds_mla"]  # on a Hopper GPU, where it is largest
        if self.latent and packed:
            return full * (self.latent * packed + self.index)
        return full * (self.full * width + self.index) + kept * self.windowed * width

    def without_windows(self) -> "KvShape":
        """The same where vLLM treats layers with a window as those without, if there are both."""
        if not self.full:
            return self
        return dataclasses.replace(self, full=self.full + self.windowed, windowed=0, window=0)

    def plus(self, draft: "KvShape") -> "KvShape":
        """What is kept of each token for a model and its draft."""
        return dataclasses.replace(
            self,
            heads=min(self.heads, draft.heads),
            full=self.full + draft.full,
            windowed=self.windowed + draft.windowed,
            window=max(self.window, draft.window),
        )

    def copies(self, ranks: int) -> int:
        """How many times tensor-parallel ranks store each token's KV, all together.

        Once while every rank has heads of its own; with more ranks than heads, several hold the
        same one.
        """
        return -(-ranks // self.heads)


class Numbers(Protocol):
    """A model's configuration. text: what it says of the language model."""

    @property
    def text(self) -> Mapping[str, Any]: ...

    def whole(self, *names: str) -> int | None:
        """The first of these that is set."""


# model_type of those that vLLM runs with latent attention (is_deepseek_mla), as far as they keep
# nothing else per token.
_LATENT = (
    "axk1",
    "deepseek_mtp",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_k2",
    "kimi_linear",
    "pangu_ultra_moe",
)
# Signs of layers whose KV differs in ways that are not read here.
_VARIED = ("block_configs", "compress_ratios", "hybrid_layer_pattern", "is_encoder_decoder")


def latent(config: Numbers) -> bool:
    """Whether vLLM runs it with latent attention."""
    return config.whole("kv_lora_rank") is not None and config.text.get("model_type") in _LATENT


def shape(config: Numbers, layers: int | None) -> KvShape | None:
    """What is kept of each token, or None where the configuration does not tell.

    layers: of the decoder.
    """
    if not layers or any(config.text.get(name) for name in _VARIED):
        return None
    own = max(layers - (config.whole("num_kv_shared_layers") or 0), 0)
    full, windowed, window = _attention(config, own)
    rank = config.whole("kv_lora_rank")
    if rank is not None:
        rotary = config.whole("qk_rope_head_dim")
        if rotary is None or not latent(config):
            return None
        attending = full + windowed
        return KvShape(
            heads=1,
            full=attending * (rank + rotary),
            latent=attending,
            index=_index(config, attending),
            own=_own_format(config),
        )
    attention_heads = config.whole("num_attention_heads", "n_head", "n_heads", "num_heads")
    heads = _kv_heads(config, attention_heads)
    size = config.whole("head_dim", "hidden_size_per_head", "attention_head_dim")
    hidden = config.whole("hidden_size", "n_embd", "d_model", "dim")
    if not size and hidden and attention_heads:
        size = hidden // attention_heads
    if not heads or not size:
        return None
    # Gemma 4 has other heads in the layers that attend to everything.
    full_heads = config.whole("num_global_key_value_heads") or heads
    full_size = config.whole("global_head_dim") or size
    return KvShape(
        heads=min(heads, full_heads),
        full=full * 2 * full_heads * full_size,
        windowed=windowed * 2 * heads * size,
        window=window,
        own=_own_format(config),
    )


def _index(config: Numbers, layers: int) -> int:
    """Bytes of a token in the index of sparse attention: keys of 8 bits and a scale for each 128.

    Not all layers have one where they share it (GLM 5's IndexCache). As DeepseekV2DecoderLayer and
    Indexer in vllm/model_executor/models/deepseek_v2.py.
    """
    size = config.whole("index_head_dim")
    if not size or config.whole("index_topk") is None or layers > 10_000:
        return 0
    pattern = config.text.get("index_topk_pattern")
    every = config.whole("index_topk_freq") or 1
    offset = config.whole("index_skip_topk_offset")
    begin = 2 if offset is None else offset
    if isinstance(pattern, str | list):
        shared = list(pattern[:layers]).count("S")
    else:
        shared = sum(max(layer - begin + 1, 0) % every != 0 for layer in range(layers))
    return (layers - shared) * (size + size // 128 * 4)


def _own_format(config: Numbers) -> str:
    """The format of the cache that ModelOpt's checkpoints ask for, or "auto".

    As get_kv_cache_quant_algo_string in vllm/utils/torch_utils.py.
    """
    found = config.text.get("quantization_config")
    if not isinstance(found, dict) or not str(found.get("quant_method")).startswith("modelopt"):
        return "auto"
    nested = found.get("quantization")
    inner = nested if isinstance(nested, dict) else found
    names = ("kv_cache_scheme", "kv_cache_quant_algo")
    asked = next((it[name] for name in names for it in (inner, found) if it.get(name)), None)
    match asked:
        case {"dynamic": False, "num_bits": 8, "type": "float"}:
            return "fp8_e4m3"
        case {"num_bits": 4, "type": "float"}:
            return "nvfp4"
        case str():
            return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(asked.lower(), "auto")
    return "auto"


def _kv_heads(config: Numbers, attention_heads: int | None) -> int | None:
    if config.text.get("multi_query") is True and not config.text.get("new_decoder_architecture"):
        return 1
    inner = config.text.get("attn_config")
    if isinstance(inner, dict) and "kv_n_heads" in inner:  # DBRX
        found = inner["kv_n_heads"]
        return found if isinstance(found, int) and found > 0 else None
    names = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "n_kv_heads")
    found = config.whole(*names, "multi_query_group_num", "num_attention_groups")
    return attention_heads if found is None else found


_STATEFUL = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe", "mlp")


def _attention(config: Numbers, layers: int) -> tuple[int, int, int]:
    """How many layers attend to everything, how many to a window, and its size in tokens.

    Layers of a kind that is not known count as the first, which needs most; so do those that attend
    in chunks (Llama 4), for which vLLM keeps whole sequences.
    """
    text = config.text
    window = config.whole("sliding_window") or 0
    named = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(named, list):
        kinds = [kind for kind in named[:layers] if kind not in _STATEFUL]
        windowed = kinds.count("sliding_attention") if window else 0
        return len(kinds) - windowed, windowed, window if windowed else 0
    return _hybrid(config, layers) or _sliding(config, layers, window)


def _hybrid(config: Numbers, layers: int) -> tuple[int, int, int] | None:
    """The layers that attend, in models where others keep a state; each family says it its way."""
    text = config.text
    inner = text.get("linear_attn_config")
    full: int | None = None
    if isinstance(pattern := text.get("hybrid_override_pattern"), str):  # Nemotron-H
        full = pattern.count("*")
    elif isinstance(indices := text.get("attn_layer_indices"), list):  # Bamba
        full = len(indices)
    elif isinstance(kinds := text.get("attn_type_list"), list):  # MiniMax
        full = kinds.count(1)
    elif isinstance(inner, dict) and isinstance(inner.get("full_attn_layers"), list):  # Kimi
        full = len(inner["full_attn_layers"])
    elif interval := config.whole("full_attention_interval"):  # Qwen3-Next
        full = layers // interval
    elif period := config.whole("attn_layer_period"):  # Jamba
        offset = config.whole("attn_layer_offset") or 0
        full = len(range(offset, layers, period))
    return None if full is None else (full, 0, 0)


def _sliding(config: Numbers, layers: int, window: int) -> tuple[int, int, int]:
    """Models that say by a rule which layers have the window."""
    text = config.text
    if not window or text.get("use_sliding_window") is False:
        return layers, 0, 0
    pattern = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 0:  # every so many layers, one attends to everything
        full = layers // pattern
    elif text.get("use_sliding_window") and (first := config.whole("max_window_layers")):
        full = min(first, layers)
    elif pattern:  # a rule that is not read: EXAONE
        return layers, 0, 0
    else:
        full = 0
    return full, layers - full, window


def _width(cache_dtype: str, model_dtype: str | None) -> int:
    """Bytes of a number in the KV cache."""
    if cache_dtype == "auto":
        return 4 if model_dtype in ("float32", "float") else 2
    return {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}.get(cache_dtype, 1)
