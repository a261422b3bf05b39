# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.32's KV per token, by a model's configuration."""

import dataclasses

from lmi_config.facts import layers as of_layers
from lmi_config.facts.layers import KvLayers, Numbers

_PACKED = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Formats of latent attention with its scales → bytes of a layer (MLAAttention.get_kv_cache_spec).
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvShape:
    """vLLM's KV per token, in one copy of the model.

    full: numbers kept by the layers that attend to the whole sequence; windowed: by those that
    attend to the last `window` tokens only. heads: KV heads that can be spread over ranks.

    A layer keeps 2 * KV heads * head size numbers; with latent attention (MLA, as in DeepSeek) it
    keeps KV rank + rotary size, which every rank needs whole, so that counts as one head. Linear
    attention and Mamba layers keep a state per sequence and nothing per token. These are the sizes
    of vllm/v1/kv_cache_interface.py, without what a draft adds.

    latent: layers with latent attention. index: bytes of a sparse attention's index (DeepSeek V3.2)
    in all layers, whatever the cache's format. own: the default format of the cache.
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

        cache_dtype: vLLM's kv_cache_dtype, "auto" is the model's own; model_dtype: the data type of
        the model, 16 bits if None. Formats below 8 bits count as 8, for their scales.
        """
        return self._bytes(1, 1, cache_dtype, model_dtype)

    def bytes_per_request(
        self, tokens: int, in_flight: int, cache_dtype: str, model_dtype: str | None
    ) -> int:
        """Bytes that vLLM reserves for a request of this many tokens, prompt and answer together.

        in_flight: tokens that it may be computing at the same time; tokens that have left a window
        are freed only after them (SlidingWindowSpec in vllm/v1/kv_cache_interface.py). Blocks are
        not rounded up.
        """
        kept = min(tokens, self.window - 1 + in_flight)
        return self._in_groups()._bytes(tokens, kept, cache_dtype, model_dtype)

    def _in_groups(self) -> "KvShape":
        """Return the shape with vLLM's padding: layers with and without a window form equal groups.

        This is _get_kv_cache_groups_uniform_page_size in vllm/v1/core/kv_cache_utils.py, for layers
        that all keep the same number of bytes: 22 layers with a window and 4 without form 7 groups
        of 4.
        """
        few, many = sorted((self.full, self.windowed))
        if not few:
            return self
        group = many if many < few * 1.5 else few
        full, windowed = (-(-kept // group) * group for kept in (self.full, self.windowed))
        return dataclasses.replace(self, full=full, windowed=windowed)

    def _bytes(self, full: int, kept: int, cache_dtype: str, model_dtype: str | None) -> int:
        """Bytes of this many tokens in the layers without a window, and in those with one."""
        found = self.own if cache_dtype == "auto" else cache_dtype
        width = _width(found, model_dtype)
        packed = _PACKED.get(found)
        if self.latent and self.index and width == 1:
            packed = packed or _PACKED["fp8_ds_mla"]  # on a Hopper GPU, where it is largest
        if self.latent and packed:
            return full * (self.latent * packed + self.index)
        return full * (self.full * width + self.index) + kept * self.windowed * width

    def without_windows(self) -> "KvShape":
        """Return the same if vLLM treats layers with a window like those without, if there are
        both.
        """
        if not self.full:
            return self
        return dataclasses.replace(self, full=self.full + self.windowed, windowed=0, window=0)

    def plus(self, draft: "KvShape") -> "KvShape":
        """The KV per token for a model and its draft."""
        return dataclasses.replace(
            self,
            heads=min(self.heads, draft.heads),
            full=self.full + draft.full,
            windowed=self.windowed + draft.windowed,
            window=max(self.window, draft.window),
        )

    def copies(self, ranks: int) -> int:
        """Return how many times all tensor-parallel ranks together store each token's KV.

        Each head is on one rank. If there are more ranks than heads, several ranks hold the same
        head.
        """
        return -(-ranks // self.heads)


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


def latent(config: Numbers) -> bool:
    """Whether vLLM runs it with latent attention."""
    return config.whole("kv_lora_rank") is not None and config.text.get("model_type") in _LATENT


def look(config: Numbers, layers: int | None) -> tuple[KvShape | None, KvLayers]:
    """Return the KV per token, or None if the configuration does not tell, and the layers.

    layers: of the decoder.
    """
    own = max((layers or 0) - (config.whole("num_kv_shared_layers") or 0), 0)
    found = of_layers.attention(config, own)
    shape = _shape(config, found) if layers else None
    shapes = _latent_size(config) if latent(config) else _sizes(config, found)
    kept = of_layers.look(config, layers, found, shapes)
    kept = dataclasses.replace(
        kept, latent=latent(config), indexed=config.whole("index_topk") is not None
    )
    varied = any(config.text.get(name) for name in _NOT_COUNTED)
    return None if varied else shape, kept


_NOT_COUNTED = ("block_configs", "compress_ratios", "hybrid_layer_pattern", "is_encoder_decoder")
"""Signs of layers whose KV differs in ways that are not read here."""


def _shape(config: Numbers, found: of_layers.Attention) -> KvShape | None:
    attending = found.full + found.windowed + found.chunked
    own = _own_format(config)
    if config.whole("kv_lora_rank") is not None:
        one = _latent_size(config)
        if not one or not latent(config):
            return None
        return KvShape(
            heads=1,
            full=attending * one[0][1],
            latent=attending,
            index=_index(config, attending),
            own=own,
        )
    sizes = _sizes(config, found)
    if not sizes:
        return None
    (heads, size), (full_heads, full_size) = sizes[0], sizes[-1]
    return KvShape(
        heads=min(heads, full_heads),
        full=found.full * 2 * full_heads * full_size,
        windowed=(found.windowed + found.chunked) * 2 * heads * size,
        # A chunk is kept like a window with one more token (ChunkedLocalAttentionSpec).
        window=found.window + bool(found.chunked),
        own=own,
    )


def _latent_size(config: Numbers) -> list[tuple[int, int]]:
    """The one head of latent attention, and its size."""
    rank, rotary = config.whole("kv_lora_rank"), config.whole("qk_rope_head_dim")
    return [] if rank is None or rotary is None else [(1, rank + rotary)]


def _sizes(config: Numbers, found: of_layers.Attention) -> list[tuple[int, int]]:
    """KV heads and head size of layers with a window, and of those without where they differ."""
    attention_heads = config.whole("num_attention_heads", "n_head", "n_heads", "num_heads")
    heads = _kv_heads(config, attention_heads)
    size = config.whole("head_dim", "hidden_size_per_head", "attention_head_dim")
    hidden = config.whole("hidden_size", "n_embd", "d_model", "dim")
    if not size and hidden and attention_heads:
        size = hidden // attention_heads
    if not heads or not size:
        return []
    # Gemma 4 has other heads in the layers that attend to everything.
    full_heads = config.whole("num_global_key_value_heads") or heads
    full_size = config.whole("global_head_dim") or size
    if (full_heads, full_size) == (heads, size) or not found.full:
        return [(heads, size)]
    return [(heads, size), (full_heads, full_size)] if found.windowed else [(full_heads, full_size)]


def _index(config: Numbers, layers: int) -> int:
    """Return a token's bytes in the index of sparse attention: 8-bit keys, and a scale for each
    128.

    If layers share an index (GLM 5's IndexCache), not all have one. See DeepseekV2DecoderLayer and
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
    """Return the format of the cache that ModelOpt's checkpoints request, or "auto".

    See get_kv_cache_quant_algo_string in vllm/utils/torch_utils.py.
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


def _width(cache_dtype: str, model_dtype: str | None) -> int:
    """Bytes of a number in the KV cache."""
    if cache_dtype == "auto":
        return 4 if model_dtype in ("float32", "float") else 2
    return {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}.get(cache_dtype, 1)
