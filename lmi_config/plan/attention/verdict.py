# SPDX-License-Identifier: Apache-2.0
"""Whether KV cache tiers are correct for a model, by the state that its layers keep of a request.

The rules are those of vLLM 0.32 and LMCache 0.5.6. Tiers hold pages of the engine's KV cache. A
page is found again by the tokens before it. That is correct for layers that keep a page for every
token. If a layer frees the tokens outside of its window or chunk, vLLM uses the null block (number
0) for them. A page of a recurrent state only holds one moment. Without a GPU, LMCache copies one
group of equal layers (worker_transfer.py); with GPUs it copies any number of groups
(lmcache_driven_transfer.py).
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from lmi_config.facts.kv import KvShape
from lmi_config.facts.layers import KvLayers
from lmi_config.options.declared import Settings

HYBRID = "disable_hybrid_kv_cache_manager"
"""vLLM's option that makes layers with a window keep all tokens, if other layers do."""
EMBEDDINGS = "enable_prompt_embeds"
WINDOWS_ONLY = "windows_only"
"""The kind of models whose layers all have a window, or attend in chunks."""
CHUNKED = "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE"
"""vLLM's variable; if it is 0, layers with chunked attention keep all tokens."""

SMALLEST_BLOCK = {False: 32, True: 16}
"""Whether there are GPUs → tokens. Blocks are multiples of them (get_supported_kernel_block_sizes
in vllm/v1/attention/backends/cpu_attn.py and flash_attn.py).
"""

_FORMATS = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")
"""Formats of the cache whose pages only have numbers, or whole tokens (fp8_ds_mla)."""
_WITHOUT_KV = ("medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix")
WITH_DRAFT = ("draft_model", "eagle", "eagle3")
"""Methods of speculation: those without KV, and those with a draft's KV."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """kind: the kind of attention, a word for metrics. against: the reason against tiers, a clause;
    empty if tiers are possible. instead: the nearest working alternative. whole: whether the engine
    must keep all tokens in layers with a window, for the tiers. unguarded: why LMCache's connectors
    would be incorrect although Slipway's is correct. tell: a further note for the operator.
    """

    kind: str
    against: str = ""
    instead: str = "leave the options for KV cache tiers out"
    whole: bool = False
    unguarded: str = ""
    tell: tuple[str, ...] = ()


def decide(
    settings: Settings,
    kept: KvLayers,
    kv: KvShape | None,
    *,
    method: str | None = None,
    pools: bool = False,
    gpus: bool,
    longest: int | None,
) -> Verdict:
    """Decide.

    kept: the layers of the model and its draft; kv: their sizes. method: of speculation. pools:
    whether it is served for embeddings or scores. gpus: whether there are any. longest: tokens of
    the longest request, None if unknown.
    """
    if pools:
        return Verdict(kind="pooling", against="it is served for embeddings or scores")
    if settings.engine.get("disable_sliding_window"):
        kept = kept.without_windows()  # vLLM then refuses requests longer than the window
    verdict = (
        _by_kind(kept)
        or _by_options(settings)
        or _by_speculation(method, kept)
        or _by_format(settings, kv)
        or _by_windows(settings, kept, gpus, longest)
        or Verdict(kind="latent" if kept.latent else "full")
    )
    if not gpus and not verdict.against and (kept.indexed or len(kept.shapes) > 1):
        return Verdict(
            kind="layers_differ",
            against="its layers keep KV of several shapes, and without a GPU LMCache copies one",
        )
    if not gpus and not verdict.against and kept.latent:
        return Verdict(
            kind="latent",
            against="without a GPU vLLM computes a prompt with latent attention (MLA) as a whole, "
            "and does not look at KV that is there already",
        )
    if settings.engine.get(EMBEDDINGS) and not verdict.against:
        told = "requests with prompt embeddings neither use the KV cache tiers nor fill them"
        unguarded = f"it takes all prompt embeddings ({settings.named(EMBEDDINGS)}) for one prompt"
        tell = (*verdict.tell, told)
        return dataclasses.replace(verdict, unguarded=unguarded, tell=tell)
    return verdict


def _by_options(settings: Settings) -> Verdict | None:
    """Return a verdict against options that make vLLM run another model than the files describe, or
    in an unchecked way.
    """
    given = settings.engine
    for name, plain in (
        ("hf_config_path", ()),
        ("model_class_overrides", ()),
        ("model_impl", ("auto", "vllm")),
        ("kv_cache_dtype_skip_layers", ()),
    ):
        if given.get(name) and given[name] not in plain:
            option = settings.named(name)
            return Verdict(
                kind="unknown",
                against=f"the state of the layers is not known with {option}",
                instead=f"leave {option} out, or the options for KV cache tiers",
            )
    attention = given.get("attention_config")
    if isinstance(attention, str):
        attention = _json(attention)
    if isinstance(attention, dict) and attention.get("hisparse_config"):
        option = settings.named("attention_config")
        return Verdict(
            kind="unknown",
            against=f"HiSparse ({option}) keeps a part of the KV cache in separate memory",
            instead="leave hisparse_config out, or the options for KV cache tiers",
        )
    return None


def _by_speculation(method: str | None, kept: KvLayers) -> Verdict | None:
    """Return a verdict against drafts whose state is unknown."""
    if not method or method in (*_WITHOUT_KV, *WITH_DRAFT):
        return None
    if method.endswith("mtp") and not (kept.windowed and not kept.full):
        return None  # one more layer like the model's own
    return Verdict(
        kind="unknown", against=f"what a draft of the method {method!r:.40} keeps is not known"
    )


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def vllms_own(
    settings: Settings, kept: KvLayers, method: str | None, environ: Mapping[str, str]
) -> Settings:
    """Return the settings with HYBRID if vLLM sets it itself (vllm/config/vllm.py)."""
    off = kept.chunked and (method in ("eagle", "eagle3") or environ.get(CHUNKED) == "0")
    if not off or HYBRID in settings.engine:
        return settings
    return whole(settings)


def block_faults(settings: Settings, kept: KvLayers, block: int, gpus: bool) -> list[str]:
    """Return a fault if attention cannot use the KV cache's block size, which is `block` tokens."""
    least, name = SMALLEST_BLOCK[gpus], settings.named("block_size")
    # Hybrids get a block size of vLLM's own. Models for embeddings may have no KV cache at all.
    if not gpus and block % least and not kept.state and not kept.pooled:
        fits = math.ceil(block / least) * least
        return [f"{name}={block}: attention on CPUs needs a multiple of {least} tokens; set {fits}"]
    return _chunk_faults(name, kept, block, least)


def _chunk_faults(name: str, kept: KvLayers, block: int, least: int) -> list[str]:
    """Return a fault if blocks do not divide the layers' chunks of attention. The engine would
    crash at its first request (make_local_attention_virtual_batches in
    vllm/v1/attention/backends/utils.py).
    """
    chunk = max(kept.windows, default=0)
    if not kept.chunked or not chunk % block:
        return []
    fits = next((it for it in range(block - block % least, 0, -least) if not chunk % it), None)
    fix = f"set {name}={fits}" if fits else f"no block divides them (of {least} tokens or more)"
    return [
        f"{name}: the model's layers attend in chunks of {chunk:,} tokens, which a block of "
        f"{block} does not divide; {fix}"
    ]


def whole(settings: Settings) -> Settings:
    """Return the settings that make layers with a window keep all tokens."""
    return dataclasses.replace(settings, engine={**settings.engine, HYBRID: True})


def as_given(settings: Settings) -> Settings:
    """Return the settings without the additions of whole()."""
    engine = {name: value for name, value in settings.engine.items() if name != HYBRID}
    return dataclasses.replace(settings, engine=engine)


def _by_kind(kept: KvLayers) -> Verdict | None:
    """Return a verdict against models that cannot have correct tiers of any size."""
    if kept.cross:
        return Verdict(
            kind="encoder_decoder",
            against="its decoder attends to an encoder's output, which LMCache does not keep",
        )
    if kept.state:
        return Verdict(
            kind="state",
            against="layers keep a state (Mamba, linear attention, convolutions), and its page "
            "holds one moment and not a token's KV",
        )
    if kept.foreign or kept.unknown:
        return Verdict(
            kind="unknown",
            against="the state of its layers is not known: " + (kept.foreign or kept.unknown),
        )
    return None


def _by_format(settings: Settings, kv: KvShape | None) -> Verdict | None:
    """Return a verdict against formats whose pages hold scales or partial numbers."""
    asked = settings.engine.get("kv_cache_dtype", "auto")
    found = kv.own if kv and asked == "auto" else asked
    if found in _FORMATS:
        return None
    name = settings.named("kv_cache_dtype")
    return Verdict(
        kind="format",
        against=f"tiers are untested with a KV cache of the format {found}",
        instead=f"set {name}=fp8, or leave the options for KV cache tiers out",
    )


def _by_windows(
    settings: Settings, kept: KvLayers, gpus: bool, longest: int | None
) -> Verdict | None:
    """Return a verdict on models whose layers free the tokens outside of a window or a chunk."""
    local = kept.windowed + kept.chunked
    if not local:
        return None
    if len(kept.windows) != 1 or (kept.windowed and kept.chunked):
        return Verdict(
            kind="windows_differ",
            against="its layers have windows of several sizes, which vLLM cannot combine",
        )
    (window,) = kept.windows
    if kept.full:
        if settings.engine.get(HYBRID) is False:
            option = settings.named(HYBRID)
            return Verdict(
                kind="windows_and_full",
                against=f"{option}=false frees tokens that have left a window, and the tiers would "
                "find nothing where it was",
                instead=f"leave {option} out, or the options for KV cache tiers",
            )
        return Verdict(kind="windows_and_full", whole=True)
    if kept.windowed and longest and longest <= window:
        return Verdict(kind=WINDOWS_ONLY)  # no request is longer than the window
    if gpus or kept.chunked:
        limit = f"set OPTION_MAX_MODEL_LEN={window} at most, or leave the options for tiers out"
        return Verdict(
            kind=WINDOWS_ONLY,
            against=f"all its layers have a window of {window:,} tokens; on GPUs vLLM may use "
            "memory that has left it for other tokens while LMCache still copies it",
            instead=limit,
        )
    return Verdict(
        kind=WINDOWS_ONLY,
        unguarded="it stores memory that has left a window as a prompt's KV",
        tell=(
            f"all layers have a window of {window:,} tokens: of a prompt that is longer, the tiers "
            "get what was computed while it was in the window",
        ),
    )
