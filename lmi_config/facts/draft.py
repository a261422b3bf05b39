# SPDX-License-Identifier: Apache-2.0
"""A draft for speculative decoding: its kind, and the reasons why it cannot work with a model.

vLLM 0.32 refuses some drafts when it loads them, and others only at the first request. The facts
here follow vllm/config/speculative.py and the loaders in vllm/model_executor/models (llama_eagle,
llama_eagle3, qwen3_eagle3, medusa). These loaders leave a missing tensor as uninitialised memory.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lmi_config.facts.model import (
    Checkpoint,
    Config,
    ModelError,
    ModelFacts,
    configuration,
    facts,
    tensors,
    weight_files,
)

MOST_TOKENS = 32
"""More drafted tokens than this do not pay: hardly any draft has this many accepted in a row."""

# speculators_model_type → vLLM's method, and entries that vLLM needs to read it.
_SPECULATORS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "dflash": ("dflash", ("aux_hidden_state_layer_ids", "mask_token_id")),
    "dflash2": ("dflash", ("aux_hidden_state_layer_ids", "mask_token_id")),
    "dspark": ("dspark", ("aux_hidden_state_layer_ids",)),
    "eagle3": ("eagle3", ()),
    "peagle": ("eagle3", ("mask_token_id",)),
}
_SPECULATORS_EAGLE3 = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}

# vLLM's classes for EAGLE drafts. vLLM adds the prefix to a draft's class if it is missing.
_EAGLE = (
    "EagleCohereForCausalLM",
    "EagleDeepSeekMTPModel",
    "EagleLlama4ForCausalLM",
    "EagleLlamaForCausalLM",
    "EagleMiniCPMForCausalLM",
    "EagleMistralForCausalLM",
    "EagleMistralLarge3ForCausalLM",
)
_LLAMA_EAGLE3 = (
    "Eagle3LlamaForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "LlamaForCausalLMEagle3",
)
_QWEN_EAGLE3 = "Eagle3Qwen3ForCausalLM"
_EAGLE3 = (
    *_LLAMA_EAGLE3,
    _QWEN_EAGLE3,
    "Eagle3DeepseekV2ForCausalLM",
    "Eagle3DeepseekV3ForCausalLM",
)

_SEES = "ForConditionalGeneration"
"""The suffix of most architectures with vision or audio."""
SEEING_WITH_EAGLE3 = (
    *("CohereCompass", "Cosmos3", "Emu3", "Exaone4_5_", "Gemma4"),
    *("Gemma4Unified", "HunYuanVL", "InternS1Pro", "InternS2Mobius", "InternS2Preview"),
    *("KimiK25", "LightOnOCR", "Llama4", "Llava", "MiniCPMV4_6"),
    *("MiniCPMV4_7", "Mistral3", "MuseGlimmer", "OpenCUA", "Pixtral"),
    *("Qwen2_5_VL", "Qwen3ASR", "Qwen3OmniMoe", "Qwen3VL", "Qwen3VLMoe"),
    *("Qwen3_5", "Qwen3_5Moe", "VibeVoiceAsr"),
)
"""Architectures that vLLM runs with an EAGLE-3 draft (SupportsEagle3), without their suffix."""
SEEING_WITHOUT_EAGLE = ("Idefics3", "SmolVLM")
"""Architectures that crash vLLM with any EAGLE draft: vLLM reads `image_token_index`, which their
configuration lacks, and a `model` of get_language_model()'s result
(vllm/v1/spec_decode/llm_base_proposer.py).
"""

# Drafts that vLLM always runs as multi-token prediction layers.
_MTP_TYPES = re.compile(
    r".*_mtp|mtp|bailing_hybrid|deepseek_v(3|32|4|41)|dots3_note|ernie4_5_moe|exaone_moe|exaone4_5.*"
    r"|gemma4(_unified)?_assistant|glm5_next|glm_moe_dsa|hy_v[34]|inkling(_mm)?_model|interns2_mobius"
    r"|intern_s2_preview|kimi_k3|longcat_flash|minimax_m3_vl|pangu_ultra_moe|qwen3_5(_moe)?(_text)?"
    r"|qwen3_next|qwen4_exp(_text)?|step3p[57]"
)
_MTP_CLASSES = re.compile(
    r"BailingMoeV(2_5|3|3VL)For.*|Glm4Moe(Lite)?ForCausalLM|GlmOcrForConditionalGeneration"
    r"|MiMo(V2|V2Omni|V2Flash)?ForCausalLM|MiniMaxM3.*|Step3p[57]For.*"
)
_ONE_LAYER = ("gemma4", "mimo_v2", "MiMoV2")  # vLLM only runs one of their layers

_MOST_LAYERS = 64  # a configuration may claim any number

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

# Parts of a path that make vLLM treat any model as a draft of this kind.
_MISLEADING = re.compile(r"eagle-|eagle3|dflash|dspark")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """A draft, by its own files.

    method, parallel: for vLLM's speculative_config, as `method` and `parallel_drafting`. tokens:
    the number of tokens that it was trained to draft, or None if its files do not say. vLLM does
    not always read it, so the plan passes it on. architecture: vLLM's class for an EAGLE draft, if
    known. shapes: shapes of its tensors; empty for formats other than safetensors.
    """

    method: str
    facts: ModelFacts
    where: str
    config: Config
    shapes: Mapping[str, tuple[int, ...]]
    tokens: int | None = None
    parallel: bool = False
    architecture: str | None = None


def look(checkpoint: Checkpoint) -> Draft:
    """Read a draft's files. Raises ModelError if no model can use them."""
    config = configuration(checkpoint)
    about = facts(config, weight_files(checkpoint))
    shapes = {name: tensor.shape for name, tensor in tensors(checkpoint).items()}
    kind = config.top.get("speculators_model_type")
    if kind is not None:
        method = _speculators(config, kind)
    else:
        method = _method(about, config, shapes, checkpoint.where)
    return Draft(
        method=method,
        facts=about,
        where=checkpoint.where,
        config=config,
        shapes=shapes,
        tokens=_tokens(method, about, config),
        parallel=kind == "peagle",
        architecture=_architecture(method, about, config),
    )


def asked(draft: Draft, method: object) -> Draft:
    """Return the draft with the operator's method, which vLLM prefers to that in its files."""
    own = draft.config.top.get("speculators_model_type") is not None
    if own or draft.method == method or method not in ("eagle", "eagle3", "medusa"):
        return draft
    if draft.method not in ("draft_model", "eagle", "eagle3"):
        return draft
    architecture = _architecture(method, draft.facts, draft.config)
    return dataclasses.replace(draft, method=method, architecture=architecture)


def _speculators(config: Config, kind: Any) -> str:
    """Return the method of a draft in the speculators library's format."""
    if not isinstance(kind, str) or kind not in _SPECULATORS:
        wanted = f"one of {', '.join(_SPECULATORS)} for vLLM 0.32"
        raise config.fault("speculators_model_type", kind, wanted, "use another draft")
    method, needed = _SPECULATORS[kind]
    for name in ("speculators_config", "transformer_layer_config", *needed):
        if config.top.get(name) is None:
            raise ModelError(f"{config.file}: there is no {name} in it; fetch the draft again")
    model_type = config.text.get("model_type", "llama")
    known = isinstance(model_type, str) and model_type in _SPECULATORS_EAGLE3
    if method == "eagle3" and not known:
        raise config.fault(
            "transformer_layer_config.model_type",
            model_type,
            f"{' or '.join(_SPECULATORS_EAGLE3)} for vLLM 0.32",
            "use another draft",
        )
    return method


def _method(
    about: ModelFacts, config: Config, shapes: Mapping[str, tuple[int, ...]], where: str
) -> str:
    names = about.architectures
    if about.model_type == "mlp_speculator":
        return "mlp_speculator"
    if about.model_type == "medusa" or "MedusaModel" in names or "medusa_num_heads" in config.top:
        return "medusa"
    if any("DSpark" in name for name in names):
        return "dspark"
    if any("DFlash" in name for name in names) or names in (
        ("LiLiCorrDraftModel",),
        ("MuseGlimmerAssistantModel",),
    ):
        return "dflash"
    if (
        any(name.startswith("Eagle3") or name.endswith("Eagle3") for name in names)
        or any(config.text.get(name) for name in ("draft_vocab_size", "eagle_config", _LAYER_IDS))
        or any("midlayer." in name or ".hidden_norm." in name for name in shapes)
    ):
        return "eagle3"
    if (
        about.model_type == "eagle"
        or any(name in _EAGLE for name in names)
        or {"fc.weight", "model.fc.weight"} & shapes.keys()
    ):
        return "eagle"
    if _mtp(about):
        return "mtp"
    if not shapes and "eagle3" in where.lower():
        return "eagle3"
    if not shapes and "eagle-" in where.lower():
        return "eagle"
    return "draft_model"


def _mtp(about: ModelFacts) -> bool:
    return bool(
        _MTP_TYPES.fullmatch(about.model_type or "")
        or any(_MTP_CLASSES.fullmatch(name) for name in about.architectures)
    )


def _architecture(method: str, about: ModelFacts, config: Config) -> str | None:
    """vLLM's class for an EAGLE draft; None if the files do not name exactly one."""
    if method not in ("eagle", "eagle3"):
        return None
    if config.top.get("speculators_model_type") is not None:
        return _SPECULATORS_EAGLE3[config.text.get("model_type", "llama")]
    if about.model_type == "eagle" or _mtp(about) or not about.architectures:
        return None
    name = about.architectures[0]
    if method == "eagle":
        return name if name.startswith("Eagle") else f"Eagle{name}"
    return name if name.startswith("Eagle3") or name.endswith("Eagle3") else f"Eagle3{name}"


def _tokens(method: str, about: ModelFacts, config: Config) -> int | None:
    """Return the number of tokens that the draft was trained to draft at once, or None."""
    match config.top.get("speculators_config"):
        case {"proposal_methods": [{"speculative_tokens": int(tokens)}, *_]}:
            return tokens
    if method == "medusa":
        return config.whole("medusa_num_heads", "num_heads") or 5
    if method == "dspark":
        return config.whole("block_size", "dspark_block_size")
    if method == "mtp":
        told = (about.model_type or "", *about.architectures)
        if any(name.startswith(_ONE_LAYER) for name in told):
            return 1
        names = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_modules")
        return config.whole(*names) or None
    return None


def faults(draft: Draft, target: ModelFacts, tokens: int | None) -> list[str]:
    """Return the reasons why the draft cannot work with the target, each with the fix.

    tokens: num_speculative_tokens, or None. Unknown facts about either model are left to vLLM.
    Raises ModelError if a value in the draft's configuration has the wrong type.
    """
    found = [*_token_faults(draft, tokens)]
    match draft.method:
        case "eagle" | "eagle3":
            found += _eagle_faults(draft, target)
        case "draft_model":
            found += _vocabulary_faults(draft, target)
        case "medusa":
            found += _width_faults(draft.config.whole("hidden_size") or 4096, target)
        case "mlp_speculator":
            found.append("vLLM 0.32 has no MLP speculators any more; use an EAGLE-3 draft")
    misleading = _MISLEADING.search(draft.where.lower())
    if misleading and draft.method in ("draft_model", "medusa", "mtp") and "://" not in draft.where:
        found.append(
            f'vLLM takes it for another kind of draft, because of "{misleading[0]}" in its path; '
            "rename the folder"
        )
    return found


def _token_faults(draft: Draft, tokens: int | None) -> Iterator[str]:
    guessed = draft.tokens if tokens is None else tokens
    if guessed is None:
        yield "it does not say how many tokens to guess at once; set num_speculative_tokens, like 3"
        return
    if not 1 <= guessed <= MOST_TOKENS:
        yield (
            f"num_speculative_tokens is {guessed}, but must be from 1 to {MOST_TOKENS}, as no "
            "draft is right for longer; try 3"
        )
    made = draft.tokens or guessed
    if draft.method == "medusa" and guessed > made:
        yield f"num_speculative_tokens is {guessed}, but it has {made} heads; set at most {made}"
    if draft.method == "mtp" and guessed > made and guessed % made:
        yield f"num_speculative_tokens is {guessed}, but must be a multiple of {made} or less"


def _vocabulary_faults(draft: Draft, target: ModelFacts) -> Iterator[str]:
    own, wanted = draft.facts.vocabulary, target.vocabulary
    if own is not None and wanted is not None and own != wanted:
        yield (
            f"its vocabulary has {own} tokens and the model's {wanted}; use a draft of the same "
            "family, with the same vocab_size"
        )


def _width_faults(width: int | None, target: ModelFacts) -> Iterator[str]:
    if width and target.hidden_size and width != target.hidden_size:
        yield (
            f"it is made for a hidden size of {width}, and the model has {target.hidden_size}; use "
            "a draft that was trained for this model"
        )


def _eagle_faults(draft: Draft, target: ModelFacts) -> Iterator[str]:
    known = _EAGLE if draft.method == "eagle" else _EAGLE3
    if draft.architecture and draft.architecture not in known:
        yield (
            f"vLLM 0.32 has no {draft.architecture} to run it with; use a draft with the "
            "architecture of Llama, as most have"
        )
    sees = next((it for it in target.architectures if it.endswith(_SEES)), None)
    kind = sees and sees.removesuffix(_SEES)
    known_not = kind in SEEING_WITHOUT_EAGLE
    if draft.method == "eagle3":
        known_not = bool(kind) and kind not in SEEING_WITH_EAGLE3
    if known_not:
        name = "EAGLE" if draft.method == "eagle" else "EAGLE-3"
        yield (
            f"vLLM 0.32 does not run {sees} with an {name} draft; leave it out, or let n-grams of "
            'the prompt guess (OPTION_SPECULATIVE_CONFIG={"method":"ngram",'
            '"num_speculative_tokens":3,"prompt_lookup_max":4})'
        )
    aux = _aux(draft) if draft.method == "eagle3" else None
    yield from _width_faults(aux.width if aux else draft.facts.hidden_size, target)
    own, wanted = draft.facts.vocabulary, target.vocabulary
    if own and wanted and own < wanted and _brings(draft, "embed_tokens"):
        yield (
            f"it has embeddings for {own} tokens, and the model has {wanted}; use a draft that was "
            "trained for this model"
        )
    if aux and target.layers:
        yield from _layer_faults(aux, target.layers, draft.config.file)
    if draft.shapes and draft.architecture == "EagleLlamaForCausalLM":
        yield from _eagle1_tensors(draft)
    if draft.shapes and draft.architecture in (*_LLAMA_EAGLE3, _QWEN_EAGLE3):
        yield from _eagle3_tensors(draft, target, aux)


@dataclasses.dataclass(frozen=True)
class _Aux:
    """The target's layers whose hidden states an EAGLE-3 draft reads.

    ids: the layers that its configuration names, if any. count, width: the number of states that
    vLLM passes to its fc, and the width of each. read: the number of states that it was trained
    for, if that differs.
    """

    ids: tuple[int, ...]
    count: int
    width: int | None
    read: int | None = None


def _aux(draft: Draft) -> _Aux | None:
    """Return the target's layers that an EAGLE-3 draft reads; None if only the last state."""
    config = draft.config
    inner = config.text.get("eagle_config") or {}
    if not isinstance(inner, dict):
        raise config.fault("eagle_config", inner, "a JSON object")
    if not inner.get("use_aux_hidden_state", True):
        return None
    outer_ids = _ids(config, config.text.get(_LAYER_IDS))
    inner_ids = _ids(config, inner.get(_LAYER_IDS))
    if draft.architecture == _QWEN_EAGLE3:
        count = config.whole("num_aux_layers", "num_aux_hidden_states")
        count = len(outer_ids or inner_ids) if count is None else count
    else:  # does not count the ids outside
        count = config.whole("num_aux_hidden_states")
        count = len(inner_ids) if count is None else count
    width = config.whole("target_hidden_size") or draft.facts.hidden_size
    return _Aux(outer_ids or inner_ids, count or 3, width, _read(draft, width, count, outer_ids))


def _read(draft: Draft, width: int | None, count: int | None, ids: tuple[int, ...]) -> int | None:
    """Return the number of states that an fc takes, by its shape, or else by the ids."""
    shape = draft.shapes.get("fc.weight")
    if draft.config.top.get("speculators_model_type") is not None:
        return None  # vLLM reads fewer entries of that format
    if shape and len(shape) == 2 and width:
        found = shape[1] // width if shape[1] % width == 0 else None
    else:
        found = len(ids) if not count else None
    return found if found != (count or 3) else None


def _ids(config: Config, value: Any) -> tuple[int, ...]:
    if not value:
        return ()
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise config.fault(_LAYER_IDS, value, "a list of whole numbers")
    return tuple(value)


def _layer_faults(aux: _Aux, layers: int, file: str) -> Iterator[str]:
    """Yield faults of the named layers. vLLM passes each named layer once, and fails at the first
    request if they are too few.

    Layer 0 is the input of the first layer, and `layers` is the output of the last one.
    """
    ids = aux.ids or (2, layers // 2, layers - 3)
    taken = {layer for layer in ids if 0 <= layer <= layers}
    if aux.ids and len(taken) == len(aux.ids) == aux.read:
        yield (
            f"vLLM counts {aux.count} of the model's layers whose states it reads, and "
            f"{_LAYER_IDS} names {len(taken)}, as many as it was made for; set "
            f'"num_aux_hidden_states": {len(taken)} in {file}'
        )
    elif len(taken) != aux.count:
        yield (
            f"it reads the states of {aux.count} of the model's layers, but "
            f"{_LAYER_IDS if aux.ids else 'the choice of vLLM'}, {list(ids)}, makes "
            f"{len(taken)} from 0 to {layers}; name {aux.count} different ones as {_LAYER_IDS} in "
            f"{file}"
        )


def _eagle1_tensors(draft: Draft) -> Iterator[str]:
    """Yield faults for EagleLlamaForCausalLM: it uses the target's head, and has no norm at either
    end.
    """
    yield from _unexpected(draft, ("embed_tokens", "fc", "layers"), "layers.0.input_layernorm.")
    yield from _missing(draft, ["fc"])
    if hidden := draft.facts.hidden_size:
        yield from _misshapen(draft, "fc.weight", (hidden, 2 * hidden))


def _eagle3_tensors(draft: Draft, target: ModelFacts, aux: _Aux | None) -> Iterator[str]:
    hidden, own = draft.facts.hidden_size, draft.facts.vocabulary
    guessed = draft.config.whole("draft_vocab_size") or own
    needed = ["fc"] if aux else []
    if guessed and own and guessed < own:
        needed.append("lm_head")
        if not _brings(draft, "d2t"):
            yield (
                f"its draft_vocab_size {guessed} is below its vocab_size {own}, and there is no "
                "tensor d2t to tell which tokens these are; use a draft that has it"
            )
    if guessed and guessed == target.vocabulary and _brings(draft, "d2t"):
        yield "its draft_vocab_size is the model's whole vocabulary; remove the tensor d2t"
    if aux and aux.width == target.hidden_size != hidden:
        needed += ["embed_tokens", "lm_head"]  # the target's tensors have another width
    if draft.parallel and not _brings(draft, "mask_hidden"):
        yield "there is no tensor mask_hidden to guess in parallel with; use a draft that has it"
    yield from _unexpected(
        draft,
        ("embed_tokens", "fc", "fc_norm", "input_norm", "layers", "lm_head", "midlayer", "norm"),
    )
    yield from _missing(draft, needed)
    miscounted = aux and len({*aux.ids}) == aux.read  # reported elsewhere
    if hidden and aux and aux.width and not miscounted:
        yield from _misshapen(draft, "fc.weight", (hidden, aux.count * aux.width))
    if hidden and guessed:
        yield from _misshapen(draft, "lm_head.weight", (guessed, hidden))
        yield from _misshapen(draft, "d2t", (guessed,))


def _brings(draft: Draft, part: str) -> bool:
    """Whether a tensor has this part in its name, as vLLM checks. True if tensors are unknown."""
    return not draft.shapes or any(part in name for name in draft.shapes)


_IGNORED = re.compile(r".*\.bias|.*rotary_emb\..*|.*(d2t|t2d|mask_hidden).*")


def _unexpected(draft: Draft, parts: Iterable[str], unwanted: str | None = None) -> Iterator[str]:
    """Yield tensors that vLLM's loader does not know. It stops at them."""
    layers = {str(layer) for layer in _layers(draft)}
    names = []
    for name in draft.shapes:
        first, second, *_ = [*name.split("."), ""]
        known = first in parts and (first != "layers" or second in layers)
        if not _IGNORED.fullmatch(name) and (not known or (unwanted and name.startswith(unwanted))):
            names.append(name)
    if names:
        yield (
            f"vLLM's loader stops at {_some(names)}; remove tensors that it does not use, and let "
            'names begin without "model."'
        )


def _missing(draft: Draft, needed: Iterable[str]) -> Iterator[str]:
    """Yield parts without a tensor. vLLM would run them with uninitialised memory."""
    names = [name.removeprefix("model.").replace("midlayer.", "layers.0.") for name in draft.shapes]

    def has(part: str) -> bool:
        return any(name.startswith(f"{part}.") for name in names)

    missing = [part for part in needed if not has(part)]
    for layer in _layers(draft):
        for block, fused, split in (
            ("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("self_attn", "o_proj", ()),
            ("mlp", "gate_up_proj", ("gate_proj", "up_proj")),
            ("mlp", "down_proj", ()),
        ):
            start = f"layers.{layer}.{block}"
            if not has(f"{start}.{fused}"):
                missing += [
                    f"{start}.{part}" for part in split or [fused] if not has(f"{start}.{part}")
                ]
    if missing:
        yield (
            f"there are no tensors for {_some(missing)}; use a complete draft, with as many layers "
            "as num_hidden_layers says"
        )


def _layers(draft: Draft) -> range:
    return range(min(draft.facts.layers or 1, _MOST_LAYERS))


def _misshapen(draft: Draft, name: str, wanted: tuple[int, ...]) -> Iterator[str]:
    found = draft.shapes.get(name)
    if found is not None and found != wanted and not draft.facts.quantization:
        yield (
            f"its {name} is {list(found)}, but must be {list(wanted)} by its configuration; use "
            "a draft whose files belong together"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
