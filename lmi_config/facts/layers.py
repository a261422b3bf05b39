# SPDX-License-Identifier: Apache-2.0
"""A model's kinds of layers, by the state that vLLM 0.32 keeps of a request for each: the groups of
its KV cache (vllm/v1/core/kv_cache_utils.py, get_kv_cache_groups), by a model's configuration.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class Numbers(Protocol):
    """A model's configuration. top: as it is written. text: the configuration of the language
    model.
    """

    @property
    def top(self) -> Mapping[str, Any]: ...

    @property
    def text(self) -> Mapping[str, Any]: ...

    def whole(self, *names: str) -> int | None:
        """The first of these that is set."""

    def words(self, name: str) -> tuple[str, ...]:
        """A list of strings at the top level, or empty."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvLayers:
    """A model's layers, by the state that vLLM keeps of a request for them.

    full: layers that keep all tokens. windowed: layers that keep the last `windows` tokens; there
    is a size for each kind. chunked: layers that keep the tokens of the last chunk (Llama 4);
    `windows` also has its size. latent: whether `full` have latent attention (MLA). indexed:
    whether some layers also keep an index (sparse attention).
    state: whether layers keep a state of fixed size (Mamba, linear attention, convolutions).
    cross: whether layers attend to the output of an encoder.
    pooled: whether vLLM runs it for embeddings or scores, by its architecture, or because its
    tokens attend to later ones; many of those keep nothing at all.
    shapes: KV heads and head size of each kind of layer; empty where unknown.
    foreign: the reason why vLLM may run it with an unknown class; unknown: the reason why the
    fields above are incomplete; otherwise empty.
    """

    full: int = 0
    windowed: int = 0
    chunked: int = 0
    windows: frozenset[int] = frozenset()
    latent: bool = False
    indexed: bool = False
    state: bool = False
    cross: bool = False
    pooled: bool = False
    shapes: frozenset[tuple[int, int]] = frozenset()
    foreign: str = ""
    unknown: str = ""

    def plus(self, draft: "KvLayers") -> "KvLayers":
        """The layers of a model and of its draft."""
        unknown = self.unknown
        if not unknown and (draft.unknown or draft.foreign):
            unknown = f"of the draft: {draft.unknown or draft.foreign}"
        if not unknown and not (self.shapes and draft.shapes):
            unknown = "the draft's KV heads, or the model's"
        return dataclasses.replace(
            self,
            full=self.full + draft.full,
            windowed=self.windowed + draft.windowed,
            chunked=self.chunked + draft.chunked,
            windows=self.windows | draft.windows,
            state=self.state or draft.state,
            shapes=self.shapes | draft.shapes,
            unknown=unknown,
        )

    def __str__(self) -> str:
        """The kept state, for people to read."""
        sizes = " or ".join(f"{size:,}" for size in sorted(self.windows))
        told = {
            f"{self.full} keep all tokens": self.full,
            f"{self.windowed} the last {sizes}": self.windowed,
            f"{self.chunked} the last chunk of {sizes}": self.chunked,
            "others a state": self.state,
            "an index beside it": self.indexed,
            "what an encoder made": self.cross,
        }
        return ", ".join(text for text, there in told.items() if there)

    def without_windows(self) -> "KvLayers":
        """The same layers with vLLM's windows disabled."""
        return dataclasses.replace(
            self, full=self.full + self.windowed, windowed=0, windows=frozenset()
        )


UNTOLD = KvLayers(unknown="its files do not describe its layers")


class Attention(NamedTuple):
    """The number of layers that attend to everything, to a window and to a chunk, and the size of
    the window or chunk in tokens. unread: an entry that may decide otherwise, and is not read here.

    Unknown layers count as the first kind, which needs most memory.
    """

    full: int
    windowed: int = 0
    chunked: int = 0
    window: int = 0
    unread: str = ""


_STATEFUL = ("linear_attention", "mamba", "mamba2", "conv", "recurrent")
_NOTHING = ("moe", "mlp")
_FULL = ("full_attention", "attention", "indexed_attention", "hybrid")
_WINDOWED = ("sliding_attention",)
_CHUNKED = ("chunked_attention",)
"""Words of layer_types. A layer that is "hybrid" attends, and keeps a state as well."""

_GPT_OSS = ["sliding_attention", "full_attention"]
"""In vLLM, every second layer of gpt-oss has a window, whatever layer_types says (gpt_oss.py)."""

# Models whose classes in transformers read the number of layers that attend to everything.
_PATTERNED = (
    *("afmoe", "aya_vision", "cohere2", "cwm", "exaone", "gemma", "gpt_oss", "granite"),
    *("llama4", "muse_glimmer", "olmo3", "vaultgemma"),
)
# Models whose classes in transformers and vLLM drop the window if use_sliding_window is false.
_SWITCHED = ("deepseek_ocr", "got_ocr", "muse_glimmer", "qwen", "smollm3")


def attention(config: Numbers, layers: int) -> Attention:
    """Return the layers with attention. layers: of the decoder."""
    text = config.text
    window = config.whole("sliding_window") or 0
    if chunks := _chunked(config, layers):
        return chunks
    named = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(named, list):
        kinds = [kind for kind in named[:layers] if kind not in (*_STATEFUL, *_NOTHING)]
        windowed = sum(kind in _WINDOWED for kind in kinds) if window else 0
        chunk = config.whole("attention_chunk_size") or 0
        chunked = sum(kind in _CHUNKED for kind in kinds) if chunk else 0
        odd = next((it for it in kinds if it not in (*_FULL, *_WINDOWED, *_CHUNKED)), None)
        unread = "" if odd is None else f"layer_types has {odd!r:.40}"
        if windowed and chunked:
            unread = "layer_types has both windows and chunks"
        if text.get("model_type") == "gpt_oss" and named != (_GPT_OSS * layers)[: len(named)]:
            unread = "layer_types, which vLLM does not read of gpt-oss"
        size = window if windowed else chunk if chunked else 0
        return Attention(len(kinds) - windowed - chunked, windowed, chunked, size, unread)
    return _hybrid(config, layers) or _sliding(config, layers, window)


def _hybrid(config: Numbers, layers: int) -> Attention | None:
    """Return the layers with attention in models whose other layers keep a state, or None. Each
    family has a different entry for it.
    """
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
    return None if full is None else Attention(full)


def _chunked(config: Numbers, layers: int) -> Attention | None:
    """Llama 4: layers with a rotary embedding attend in chunks, others to everything, whatever
    layer_types says.
    """
    chunk = config.whole("attention_chunk_size")
    if not chunk or config.text.get("model_type") not in ("llama4", "llama4_text"):
        return None
    rotary = config.text.get("no_rope_layers")
    if isinstance(rotary, list) and rotary:
        chunked = sum(bool(each) for each in rotary[:layers])
    else:
        chunked = layers - layers // (config.whole("no_rope_layer_interval") or 4)
    return Attention(layers - chunked, 0, chunked, chunk)


def _sliding(config: Numbers, layers: int, window: int) -> Attention:
    """Return the layers of models that have a rule for the layers with the window."""
    text = config.text
    told = text.get("model_type")
    model_type = told if isinstance(told, str) else ""
    switched = model_type.startswith(_SWITCHED)
    if not window or (switched and text.get("use_sliding_window") is False):
        return Attention(layers)
    pattern = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern")
    if (
        isinstance(pattern, int) and pattern > 0 and model_type.startswith(_PATTERNED)
    ):  # one layer of each period attends to everything
        # Families only differ in the position of this layer.
        full = -(-layers // pattern) if text.get("full_attention_first") else layers // pattern
    elif pattern:
        return Attention(layers, unread="sliding_window_pattern")
    elif (first := config.whole("max_window_layers")) and (
        (switched and text.get("use_sliding_window")) or model_type == "dots1"
    ):
        full = min(first, layers)
    else:
        full = 0
    return Attention(full, layers - full, 0, window if full < layers else 0)


@cache
def vllm_models() -> Mapping[str, frozenset[str]]:
    """The architectures that vLLM serves, by their peculiarities; tools/generate writes the
    file.
    """
    file = Path(__file__).with_name("vllm_models.json")
    return {kind: frozenset(names) for kind, names in json.loads(file.read_text()).items()}


_VARIED = (
    *("attention_other_setting", "block_configs", "hybrid_layer_pattern", "per_layer_config"),
    *("compress_ratios", "interleaved_sliding_window", "sliding_windows", "swa_head_dim"),
    *("swa_num_key_value_heads", "num_attention_heads_per_layer", "rswa_window"),
    *("attn_window_size", "loop_window_size", "mtp_layer_types"),
)
"""Signs of layers that differ in ways that are not read here."""
_HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads"),
    *("n_head_kv", "num_kv_heads", "num_key_value_heads", "n_kv_heads", "head_dim"),
)
_LISTS = (*_HEADS, "sliding_window")
"""Numbers that some models list for each layer."""


def look(
    config: Numbers, layers: int | None, found: Attention, shapes: Iterable[tuple[int, int]]
) -> KvLayers:
    """The layers of a model. layers: of the decoder; found: those that attend; shapes: KV heads and
    head size, as far as they are known.
    """
    vllms, text = vllm_models(), config.text
    names = config.words("architectures")
    architecture = next((it for it in names if it in vllms["known"]), None)
    varied = next((it for it in _VARIED if text.get(it)), None) or next(
        (it for it in _LISTS if isinstance(text.get(it), list)), None
    )
    foreign, unknown = "", found.unread
    if architecture is None and layers:
        told = f"its architecture {names[0]!r:.60}" if names else "an unnamed architecture"
        foreign = f"{told} is not one of vLLM's own"
    model_type = config.top.get("model_type")
    if isinstance(model_type, str) and model_type not in vllms["configurations"]:
        foreign = foreign or f"its configuration ({model_type:.60}) needs the model's own code"
    if not layers:
        unknown = "its files do not describe its layers"
    elif architecture in vllms["unlike"]:
        unknown = f"vLLM keeps a special state for {architecture}"
    elif varied:
        unknown = f"its layers differ by {varied}"
    words = text.get("layer_types")
    both_ways = text.get("is_causal") is False or text.get("use_bidirectional_attention") in (
        True,
        "all",
    )
    attending = isinstance(words, list) and all(
        it in ("attention", "full_attention") for it in words
    )
    return KvLayers(
        full=found.full,
        windowed=found.windowed,
        chunked=found.chunked,
        windows=frozenset({found.window} if found.window else ()),
        state=architecture in vllms["state"] and not attending,
        cross=architecture in vllms["cross"] or bool(config.top.get("is_encoder_decoder")),
        pooled=both_ways or architecture in vllms["pooling"] or _pools(names),
        shapes=frozenset(shapes),
        foreign=foreign,
        unknown=unknown,
    )


def coded(config: Numbers) -> bool:
    """Whether only code that comes with the model can read its configuration."""
    model_type, classes = config.top.get("model_type"), config.top.get("auto_map")
    known = not isinstance(model_type, str) or model_type in vllm_models()["configurations"]
    return not known and isinstance(classes, dict) and "AutoConfig" in classes


_POOLING = (
    *("Model", "ForTextEncoding", "ForSequenceClassification", "ForTokenClassification"),
    *("ForAudioClassification", "ForImageClassification", "ForVideoClassification"),
    *("ForRewardModeling",),
)
_GENERATING = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")


def _pools(names: Iterable[str]) -> bool:
    """Whether vLLM treats it as a pooling model, by the suffix of its architecture
    (_SUFFIX_TO_DEFAULTS in vllm/config/model.py).
    """
    for name in names:
        if name not in vllm_models()["known"]:
            if name.endswith(_GENERATING):
                return False
            if name.endswith(_POOLING):
                return True
    return False
