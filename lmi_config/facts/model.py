# SPDX-License-Identifier: Apache-2.0
"""Facts from a model's own files, read without torch and without the weights themselves.

The rules are vLLM 0.32's (which files it loads, the length of a prompt, the KV per token), so that
a plan agrees with the later start.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from lmi_config.facts import kv
from lmi_config.facts.handler import FILE
from lmi_config.facts.kv import KvShape
from lmi_config.facts.layers import UNTOLD, KvLayers, coded

QUANTIZED = "hf_quant_config.json"
_DESCRIBING = ("quantize_config.json", "quant_config.json", "quantization_config.json")
"""Suffixes of the files with vLLM's quantisation settings (get_config_filenames)."""
SENTENCES = "modules.json"
"""A model with this file is an embedding model in vLLM (get_pooling_config)."""
CONFIGS = ("config.json", "params.json")
"""A model's configuration: Hugging Face's, Mistral's."""

# In vLLM's order: vLLM loads the files of the first pattern with a match. GGUF needs a plugin. If
# there is an index, only the files that it names count.
_SAFE, _INDEX = "*.safetensors", "model.safetensors.index.json"
_HEAD = "lm_head.weight"
"""vLLM reads the headers of all files for this name (checkpoint_has_lm_head), unless config.json
says that the output layer is not tied to the embeddings."""
_WEIGHTS = (
    ("consolidated*.safetensors", "consolidated.safetensors.index.json"),
    (_SAFE, _INDEX),
    ("*.bin", None),
    ("*.pt", None),
    ("*.gguf", None),
)
_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")

NO_OVERRIDES: Mapping[str, Any] = MappingProxyType({})
LONGEST_HEADER = 100_000_000  # the limit of the safetensors library
LONGEST_JSON = 32 * 2**20  # several times the index of the largest models
MOST_NESTED = 100_000
_FIRST_READ = 128 * 1024  # holds nearly every header; a longer one takes a second request
_LARGEST = 2**48  # of all numbers a model could mean; JSON knows no limit

_FETCH_AGAIN = "fetch it again"


class ModelError(ValueError):
    """A model cannot be used. The message names the file and the fix."""


class Checkpoint(Protocol):
    """A model's files, wherever they are."""

    @property
    def where(self) -> str:
        """A folder, hub id or URL, for messages."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """All files → bytes. Names are relative to the model's root, with "/" between folders."""

    def head(self, name: str, length: int) -> bytes:
        """Return the first `length` bytes of a file, or all of a shorter file."""


class Folder:
    """The checkpoint in a local folder: the files at its top level; vLLM only loads these.

    Raises ModelError if the folder or a file in it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._path = path
        try:
            self.sizes = {
                entry.name: entry.stat().st_size for entry in path.iterdir() if entry.is_file()
            }
        except OSError as error:
            raise _unreadable(self.where, error) from None

    def head(self, name: str, length: int) -> bytes:
        path = self._path / name
        try:
            with path.open("rb") as file:
                return file.read(length)
        except OSError as error:
            raise _unreadable(str(path), error) from None


class Checks(NamedTuple):
    """Facts that vLLM checks before it loads a model. None: the files do not say.

    longest: the highest value of max_model_len. quantised: the files at the top level that describe
    quantised weights beside config.json. coded: whether only its own code can read its
    configuration. experts: the most experts of a layer; 0 without any.
    """

    longest: int | None = None
    quantised: frozenset[str] | None = None
    coded: bool = False
    experts: int | None = None


UNCHECKED = Checks()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts from a model's files. None: they do not say.

    weight_bytes, largest_file: of the files that vLLM loads; 0 if they were not read. max_length:
    vLLM's default length in tokens. layers: of the decoder. attention_heads: tensor parallelism
    divides them among the ranks. latent: whether vLLM runs it with latent attention (MLA). heard:
    for models like Whisper, the encoder's tokens for one window of audio. kept: its layers, by the
    state that vLLM keeps of a request. parts: parts of the weights, if safetensors files tell.
    shards: the files of the weights, if there are several with an index. checks: facts that vLLM
    checks first.
    """

    architectures: tuple[str, ...]
    model_type: str | None
    weight_bytes: int
    largest_file: int
    dtype: str | None
    quantization: str | None
    max_length: int | None
    vocabulary: int | None
    hidden_size: int | None
    layers: int | None
    kv: KvShape | None
    attention_heads: int | None = None
    latent: bool = False
    heard: int | None = None
    kept: KvLayers = UNTOLD
    parts: "WeightParts | None" = None
    shards: "Shards | None" = None
    checks: Checks = UNCHECKED


UNKNOWN = ModelFacts(
    architectures=(),
    model_type=None,
    weight_bytes=0,
    largest_file=0,
    dtype=None,
    quantization=None,
    max_length=None,
    vocabulary=None,
    hidden_size=None,
    layers=None,
    kv=None,
)
"""The facts of a model that vLLM does not serve."""


class Tensor(NamedTuple):
    """dtype: in the words of safetensors, like BF16."""

    dtype: str
    shape: tuple[int, ...]


class Shards(NamedTuple):
    """Weights in several safetensors files with an index.

    sizes: name → bytes, in vLLM's order. unsettled: the reason why
    something else reads the files before vLLM loads them, or "".
    """

    sizes: Mapping[str, int]
    unsettled: str = ""


class WeightParts(NamedTuple):
    """Bytes of the weights' files in special parts.

    experts: mixture-of-experts weights, which all copies of the model share. single: 32-bit
    numbers. outer: the vocabulary's matrices, which vLLM does not quantise during loading.
    """

    experts: int
    single: int
    outer: int


_OF_EXPERTS = re.compile(r"\.experts\.|block_sparse_moe\.(in|out)put_linear")
_OF_VOCABULARY = re.compile(r"(^|[._])(embed\w*|lm_head|wte|tok_embeddings|output)\.weight$")


def weight_parts(found: Mapping[str, Tensor]) -> WeightParts | None:
    """Return the parts of these tensors, or None."""
    sizes = {name: math.prod(it.shape) * _BITS.get(it.dtype, 8) // 8 for name, it in found.items()}
    experts = sum(size for name, size in sizes.items() if _OF_EXPERTS.search(name))
    single = sum(size for name, size in sizes.items() if found[name].dtype == "F32")
    outer = sum(size for name, size in sizes.items() if _OF_VOCABULARY.search(name))
    return WeightParts(experts, single, outer) if found else None


def look(
    checkpoint: Checkpoint, weights: bool = True, overrides: Mapping[str, Any] = NO_OVERRIDES
) -> ModelFacts:
    """Read a model's files. weights: whether it needs weights; load_format=dummy does not.
    overrides: vLLM's hf_overrides.

    Raises ModelError if vLLM could not use it: its configuration is missing or unreadable, it has
    no weights, or a safetensors file is incomplete.
    """
    config = configuration(checkpoint, overrides)
    files: Mapping[str, int] = {}
    parts, shards = None, None
    try:
        files = weight_files(checkpoint)
    except ModelError:
        if weights:
            raise
    else:
        there = tensors(checkpoint)
        parts, shards = weight_parts(there), _shards(checkpoint, config, files, there)
    found = dataclasses.replace(facts(config, files), parts=parts, shards=shards)
    kept = found.kept
    if SENTENCES in checkpoint.sizes:
        kept = dataclasses.replace(kept, pooled=True)
    both = {*CONFIGS} <= checkpoint.sizes.keys()
    mistrals = both and any(fnmatchcase(name, _WEIGHTS[0][0]) for name in _top(checkpoint))
    if mistrals and _kept_by(kept) != _kept_by(_mistrals_own(checkpoint)):
        kept = dataclasses.replace(
            kept, unknown=f"{' and '.join(CONFIGS)} describe different layers"
        )
    described = frozenset(it for it in _top(checkpoint) if it.endswith(_DESCRIBING))
    checks = found.checks._replace(quantised=described)
    if mistrals or any(it.startswith("sentence_") for it in _top(checkpoint)):
        checks = checks._replace(longest=None)  # vLLM reads it from another file
    return dataclasses.replace(found, kept=kept, checks=checks)


def _shards(
    checkpoint: Checkpoint,
    config: "Config",
    files: Mapping[str, int],
    there: Mapping[str, Tensor],
) -> Shards | None:
    """The files of the weights, if vLLM's default loader finds them by _INDEX. there: the tensors
    in them.
    """
    top = _top(checkpoint)
    safe = {name for name in top if fnmatchcase(name, _SAFE)}
    mistrals = any(fnmatchcase(name, _WEIGHTS[0][0]) for name in safe)
    if len(files) < 2 or _INDEX not in top or files.keys() != safe or mistrals:
        return None
    unsettled = ""
    if FILE in checkpoint.sizes:
        unsettled = f"its {FILE} may read them"
    elif _dtype(config) is None:
        unsettled = "config.json has no dtype, which vLLM then takes from all of them"
    elif config.top.get("tie_word_embeddings") is not False and any(
        name.endswith(_HEAD) for name in there
    ):
        unsettled = f"vLLM looks for {_HEAD} in them, as config.json does not say that it is untied"
    return Shards({name: files[name] for name in sorted(files, key=_natural)}, unsettled)


def _natural(name: str) -> list[Any]:
    """vLLM's key for the order of files (_natural_sort_key in weight_utils.py)."""
    return [int(part) if at % 2 else part for at, part in enumerate(re.split(r"(\d+)", name))]


def _mistrals_own(checkpoint: Checkpoint) -> KvLayers:
    """Return the layers in params.json, which vLLM reads if Mistral's own weights also exist."""
    file = CONFIGS[1]
    top = _of_mistral(json_object(checkpoint, file))
    return facts(Config(f"{checkpoint.where}/{file}", top, top), {}).kept


def _kept_by(kept: KvLayers) -> tuple[object, ...]:
    return kept.full, kept.windowed, kept.chunked, kept.windows, kept.latent


@dataclasses.dataclass(frozen=True)
class Config:
    """A model's configuration. Its methods raise ModelError if a value has the wrong type.

    file: its full name, for messages. top: the configuration itself. text: the same, overridden by
    the nested configuration of the language model. vLLM reads numbers from there.
    """

    file: str
    top: Mapping[str, Any]
    text: Mapping[str, Any]

    def whole(self, *names: str) -> int | None:
        """Return the first of these numbers that is set, or None.

        Lists with a number for each layer, and negative or absurd values, count as unset. Published
        models have both, and vLLM ignores them.
        """
        for name in names:
            value = self.text.get(name)
            if value is None or isinstance(value, list):
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise self.fault(name, value, "a whole number")
            if 0 <= value <= _LARGEST:
                return value
        return None

    def words(self, name: str) -> tuple[str, ...]:
        """Return a list of strings at the top level, or an empty one."""
        value = self.top.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.fault(name, value, "a list of names")
        return tuple(value)

    def fault(self, name: str, value: Any, wanted: str, fix: str = "correct it") -> ModelError:
        # The value is cut before it is formatted, because a list may have any length and depth.
        told = repr(value)[:40] if isinstance(value, str | int | float) else type(value).__name__
        return ModelError(f"{self.file}: {name} is {told}, but must be {wanted}; {fix}")


_NESTED = (
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
    "transformer_layer_config",  # a draft in the speculators format
)

# Defaults of transformers' configuration classes for models that are published without them. A
# nested language model without its own type has the type of the whole model.
_QWEN = {"use_sliding_window": False, "max_window_layers": 28, "sliding_window": 4096}


def _windows(size: int, pattern: int, **more: Any) -> Mapping[str, Any]:
    """Return a window in all layers, except one layer of each `pattern`."""
    return {"sliding_window": size, "sliding_window_pattern": pattern, **more}


_LLAMA4 = {"attention_chunk_size": 8192}
_MISTRAL = {"sliding_window": 4096}
_GEMMA3 = {
    **_windows(4096, 6),
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262_208,
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "afmoe": _windows(1024, 4),
    "aya_vision": _windows(4096, 4),
    "cohere2": _windows(4096, 4),
    "cohere2_moe": _windows(4096, 4),
    "cohere2_vision": _windows(4096, 4),
    "cwm": _windows(8192, 4, full_attention_first=True),
    "dots1": {"max_window_layers": 62, "sliding_window": 4096},
    **dict.fromkeys(("exaone4", "exaone4_5"), _windows(4096, 4)),
    "gemma2": _windows(4096, 2),
    **dict.fromkeys(("gemma3", "gemma3_text"), _GEMMA3),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _windows(512, 5)),
    **dict.fromkeys(("gemma4", "gemma4_text"), _windows(512, 6, global_head_dim=512)),
    **dict.fromkeys(
        ("gemma4_unified", "gemma4_unified_text"), _windows(1024, 6, global_head_dim=512)
    ),
    "gpt_oss": _windows(128, 2),
    "granite_swa": _windows(128, 4, full_attention_first=True),
    "granitemoe_swa": _windows(128, 4, full_attention_first=True),
    **dict.fromkeys(("llama4", "llama4_text"), _LLAMA4),
    **dict.fromkeys(("idefics2", "ministral", "mistral", "mistral3"), _MISTRAL),
    **dict.fromkeys(("muse_glimmer", "muse_glimmer_text"), _windows(2048, 4)),
    "olmo3": _windows(4096, 4),
    "vaultgemma": _windows(4096, 2),
    **dict.fromkeys(
        ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _QWEN
    ),
    **dict.fromkeys(("qwen2_5_omni_text", "qwen3", "qwen3_moe", "smollm3"), _QWEN),
}


def configuration(checkpoint: Checkpoint, overrides: Mapping[str, Any] = NO_OVERRIDES) -> Config:
    """Read a model's configuration; it is empty if there are only GGUF files. overrides: values
    that replace those in the file (_apply_dict_overrides in vllm/config/model.py).

    Raises ModelError if it is missing or not a JSON object.
    """
    name = next((name for name in CONFIGS if name in checkpoint.sizes), None)
    if name is None:
        if any(fnmatchcase(file, "*.gguf") for file in _top(checkpoint)):
            return Config(checkpoint.where, {}, {})
        raise ModelError(
            f"{checkpoint.where}: there is no {', '.join(CONFIGS)} or *.gguf in it "
            f"({_listed(_top(checkpoint))}); give the folder that holds the model's own files"
        )
    top = json_object(checkpoint, name)
    if name == "params.json":
        top = _of_mistral(top)
    # The place in ModelOpt before 0.31.
    if QUANTIZED in checkpoint.sizes and top.get("quantization_config") is None:
        top["quantization_config"] = _of_modelopt(json_object(checkpoint, QUANTIZED))
    for key, value in overrides.items():
        within = key in _NESTED and isinstance(value, dict)
        top[key] = _updated(top.get(key), value) if within else value
    config = Config(f"{checkpoint.where}/{name}", top, top)
    text = inner = top
    while nested := next((name for name in _NESTED if inner.get(name)), None):
        inner = inner[nested]
        if not isinstance(inner, dict):
            raise config.fault(nested, inner, "a JSON object")
        text = text | inner
    model_type = text.get("model_type")
    if isinstance(model_type, str):
        text = {**_DEFAULTS.get(model_type, {}), **text}
    return dataclasses.replace(config, text=text)


def _updated(found: Any, updates: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with values replaced, recursively in nested objects."""
    updated = dict(found) if isinstance(found, dict) else {}
    for key, value in updates.items():
        inner = isinstance(value, dict) and isinstance(updated.get(key), dict)
        updated[key] = _updated(updated[key], value) if inner else value
    return updated


def _of_mistral(params: dict[str, Any]) -> dict[str, Any]:
    """Return Mistral's own configuration in vLLM's terms
    (vllm/transformers_utils/configs/mistral.py): its latent attention is DeepSeek's, and it has a
    window for each layer of a period.
    """
    found = {**params, "architectures": [_mistrals(params)]}
    experts = params.get("moe") or {"num_shared_experts": 1}
    if params.get("qk_nope_head_dim") and isinstance(experts, dict):
        found["model_type"] = "deepseek_v3" if experts.get("num_shared_experts") else "mixtral"
    windows, layers = params.get("sliding_window"), params.get("n_layers")
    if isinstance(windows, list) and windows and type(layers) is int and 0 < layers < 10_000:
        kinds = ["full_attention" if it is None else "sliding_attention" for it in windows]
        found["layer_types"] = kinds * (layers // len(windows))
        found["sliding_window"] = next((it for it in windows if it), None)
    return found


def _mistrals(params: Mapping[str, Any]) -> str:
    """Return vLLM's architecture for a model with Mistral's own configuration."""
    several, experts = params.get("multimodal"), params.get("moe")
    inner = several if isinstance(several, dict) else {}
    if inner.get("whisper_model_args"):
        return "VoxtralForConditionalGeneration"
    if inner.get("vision_encoder_args") or params.get("vision_encoder"):
        return "PixtralForConditionalGeneration"
    if params.get("model_type") == "mamba":
        return "Mamba2ForCausalLM"
    if isinstance(experts, dict) and experts:
        large = experts.get("num_shared_experts")
        return "MistralLarge3ForCausalLM" if large else "MixtralForCausalLM"
    return "MistralForCausalLM"


def _of_modelopt(found: dict[str, Any]) -> dict[str, Any]:
    """Return hf_quant_config.json with the quant_method that vLLM derives from it."""
    inner = found.get("quantization")
    algorithm = inner.get("quant_algo") if isinstance(inner, dict) else None
    return {"quant_method": "modelopt_fp4" if algorithm == "NVFP4" else "modelopt", **found}


def weight_files(checkpoint: Checkpoint) -> Mapping[str, int]:
    """Return the files of the weights by the rules of vLLM's default loader: name → bytes.

    Raises ModelError if there are none, or if one that an index names is missing.
    """
    present = _top(checkpoint)
    for pattern, index in _WEIGHTS:
        found = {
            name: size
            for name, size in present.items()
            if fnmatchcase(name, pattern) and name not in _TRAINING
        }
        if found and index in present:
            wanted = _indexed(checkpoint, index)
            if missing := sorted(wanted - found.keys()):
                raise ModelError(
                    f"{checkpoint.where}/{index} names files that are not there ("
                    f"{_listed(missing)}); fetch the model again"
                )
            return {name: size for name, size in found.items() if name in wanted}
        if found:
            return found
    raise ModelError(
        f"{checkpoint.where}: there are no weights that vLLM loads (*.safetensors, *.bin, *.pt or "
        f"*.gguf) in it ({_listed(present)}); fetch them, or set OPTION_LOAD_FORMAT=dummy to serve "
        "random ones"
    )


def tensors(checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    """Return all tensors in the safetensors files that vLLM loads; none for other formats.

    The format: 8 bytes with the length of the header, little-endian; the header, a JSON object of
    name → dtype, shape and offsets; the data. The offsets count from the start of the data.

    Raises ModelError if a file is incomplete, or has an invalid header.
    """
    found: dict[str, Tensor] = {}
    for name, size in weight_files(checkpoint).items():
        if name.endswith(".safetensors"):
            found |= header(checkpoint, name, size)
    return found


def facts(config: Config, files: Mapping[str, int]) -> ModelFacts:
    """Return the facts from a configuration and from the sizes of the weights' files.

    Raises ModelError if a value of the configuration has the wrong type.
    """
    shape, kept = kv.look(config, _layers(config))
    return ModelFacts(
        architectures=config.words("architectures"),
        model_type=_text(config, config.top, "model_type"),
        weight_bytes=sum(files.values()),
        largest_file=max(files.values(), default=0),
        dtype=_dtype(config),
        quantization=_quantization(config),
        max_length=_max_length(config),
        vocabulary=config.whole("vocab_size", "padded_vocab_size"),
        hidden_size=config.whole("hidden_size", "n_embd", "d_model", "dim"),
        layers=_layers(config),
        kv=shape,
        attention_heads=config.whole("num_attention_heads", "n_heads"),
        latent=kv.latent(config),
        heard=config.whole("max_source_positions")
        if config.top.get("is_encoder_decoder")
        else None,
        kept=kept,
        checks=Checks(longest=_longest(config), coded=coded(config), experts=_experts(config)),
    )


def _text(config: Config, entries: Mapping[str, Any], *names: str) -> str | None:
    for name in names:
        value = entries.get(name)
        if value is not None and not isinstance(value, str):
            raise config.fault(name, value, "a name")
        if value:
            return value
    return None


def _dtype(config: Config) -> str | None:
    # The language model's dtype only counts if the whole model has none.
    for entries in (config.top, config.text):
        if found := _text(config, entries, "dtype", "torch_dtype"):
            return found.removeprefix("torch.")
    return None


def _quantization(config: Config) -> str | None:
    for name in ("quantization_config", "compression_config"):
        value = config.text.get(name)
        if isinstance(value, dict) and isinstance(value.get("quant_method"), str):
            return value["quant_method"].lower() or None
    return None


_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# RoPE variants whose max_position_embeddings is the length after scaling.
_SCALED = ("llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


def _max_length(config: Config) -> int | None:
    """Return the tokens that _get_and_verify_max_len in vllm/config/model.py derives, or None."""
    lengths = [length for name in _LENGTHS if (length := config.whole(name)) is not None]
    length = config.whole("model_max_length") or min(lengths, default=None)
    if length is None:
        return None
    model_type = config.text.get("model_type")
    if isinstance(model_type, str) and "gemma3" in model_type:
        return length
    factor: Any = 1
    for scaling in _scalings(config.text):
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind in ("longrope", "su"):
            return config.whole("original_max_position_embeddings") or length
        if kind not in _SCALED:
            factor = scaling.get("factor", factor)
    if isinstance(factor, int | float) and 0 < factor < _LARGEST:
        return int(length * factor)
    return length


def _longest(config: Config) -> int | None:
    """Return vLLM's highest value of max_model_len (_get_and_verify_max_len), or None."""
    nested = config.text is not config.top and any(config.top.get(it) for it in _NESTED)
    lengths = {name: config.whole(name) for name in (*_LENGTHS, "model_max_length")}
    known = {name: length for name, length in lengths.items() if length is not None}
    elsewhere = nested and known.keys() & config.top.keys()  # vLLM only reads the language model's
    if not known or elsewhere or config.file.endswith(CONFIGS[1]):
        return None
    own = known.get("model_max_length")
    length = own or min(known.values())
    factor: Any = 1
    if "gemma3" not in str(config.text.get("model_type")):
        for scaling in _scalings(config.text):
            kind = scaling.get("rope_type", scaling.get("type"))
            if kind not in (*_SCALED, "longrope", "su"):
                factor = scaling.get("factor", factor)
    if not isinstance(factor, int | float) or not 0 < factor < _LARGEST:
        factor = 1
    return max(int(length * factor), own or 0)


_EXPERT_COUNTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")


def _experts(config: Config) -> int | None:
    """Return the routed experts of a layer (get_num_experts in model_arch_config_convertor.py);
    None if the configuration may have them elsewhere.
    """
    counts = [count for name in _EXPERT_COUNTS if (count := config.whole(name)) is not None]
    told = (*config.text, *config.words("architectures"), str(config.text.get("model_type")))
    if counts:
        return max(counts)
    return (
        None
        if not told[:-1] or any(re.search("moe|expert|block_configs", it.lower()) for it in told)
        else 0
    )


def _scalings(entries: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the RoPE parameters: one set, or one for each kind of layer with its own set."""
    found = entries.get("rope_parameters") or entries.get("rope_scaling")
    if not isinstance(found, dict):
        return []
    each = [value for value in found.values() if isinstance(value, dict)]
    return each or [found]


def _layers(config: Config) -> int | None:
    return config.whole("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def _top(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the files that vLLM sees: those at the top level that are not hidden."""
    return {
        name: size
        for name, size in checkpoint.sizes.items()
        if "/" not in name and not name.startswith(".")
    }


def _indexed(checkpoint: Checkpoint, index: str) -> set[str]:
    listed = json_object(checkpoint, index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ModelError(
            f"{checkpoint.where}/{index}: weight_map must be an object of tensor → file; "
            + _FETCH_AGAIN
        )
    return set(listed.values())


def header(
    checkpoint: Checkpoint,
    name: str,
    size: int,
    longest: int = LONGEST_HEADER,
    most: int | None = None,
) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file of `size` bytes. longest: most bytes of its header.
    most: the limit on the number of tensors, or None.

    Raises ModelError for files that the safetensors library (0.8) refuses: with tensors that
    overlap, leave gaps, or do not have the size of their type and shape. The size of unknown types
    is not checked.
    """
    file = f"{checkpoint.where}/{name}"
    start = checkpoint.head(name, _FIRST_READ) if size else b""
    if start.startswith(b"version "):
        raise ModelError(f"{file} is a Git LFS pointer, not the weights; run git lfs pull")
    length = int.from_bytes(start[:8], "little")
    if size < 8 or 8 + length > size:
        raise ModelError(f"{file} is cut short after {size} bytes; {_FETCH_AGAIN}")
    if length > longest:
        raise ModelError(
            f"{file}: a header of {length} bytes is longer than {longest}; {_FETCH_AGAIN}"
        )
    if 8 + length > len(start):
        start = checkpoint.head(name, 8 + length)
    found: dict[str, Tensor] = {}
    places: dict[str, tuple[int, int, str]] = {}
    for tensor, entry in _entries(file, start[8 : 8 + length]):
        found[tensor], begin, end = _tensor(file, tensor, entry)
        places[tensor] = begin, end, tensor
        if most is not None and len(found) > most:
            raise ModelError(f"{file} has more than {most} tensors: is it of another model?")
    reached = 0
    for begin, end, tensor in sorted(places.values()):
        if begin != reached:
            raise ModelError(
                f"{file}: {tensor:.80} begins at byte {begin}, but the data before it ends at "
                f"{reached}; {_FETCH_AGAIN}"
            )
        reached = end
    if 8 + length + reached != size:
        raise ModelError(
            f"{file} has {size} bytes, but by its header {8 + length + reached}; {_FETCH_AGAIN}"
        )
    return found


_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits of a number, by the names of safetensors' types."""


def _tensor(file: str, name: str, entry: object) -> tuple[Tensor, int, int]:
    """Return a tensor, and its beginning and end in the data."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]} if all(
            type(each) is int and 0 <= each < 2**64 for each in (*shape, begin, end)
        ):
            bits = _BITS.get(dtype)
            if bits and _product(bits, shape) != 8 * (end - begin):
                raise ModelError(
                    f"{file}: {name:.80} is {dtype} of shape {shape!s:.80}, which does not fit "
                    f"its {end - begin} bytes; {_FETCH_AGAIN}"
                )
            return Tensor(dtype, tuple(shape)), begin, end
    raise _no_tensor(file, name)


def _product(bits: int, shape: Iterable[int]) -> int | None:
    """Return the bits of a tensor, or None if the product exceeds 64 bits at any step."""
    numbers = 1
    for each in shape:
        numbers *= each
        if numbers >= 2**64:
            return None
    return numbers * bits


def json_object(
    checkpoint: Checkpoint, name: str, longest: int = LONGEST_JSON, nested: int = MOST_NESTED
) -> dict[str, Any]:
    """Return the object in a JSON file of limited size. nested: the most lists and objects in it;
    an empty one takes two bytes in the file and 56 in memory. Raises ModelError if there is no
    object.
    """
    file, size = f"{checkpoint.where}/{name}", checkpoint.sizes[name]
    if size > longest:
        raise ModelError(f"{file} has {size} bytes, more than {longest}; {_FETCH_AGAIN}")
    content = checkpoint.head(name, size) if size else b""
    if content.count(b"[") + content.count(b"{") > nested:
        raise ModelError(f"{file} has more than {nested} lists and objects; {_FETCH_AGAIN}")
    return _object(file, content)


_BLANK = r"[ \t\n\r]*+"
_TEXT = r'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+"'
_NAME = re.compile(rf"{_BLANK}(?P<name>{_TEXT}){_BLANK}:{_BLANK}")
_TEXTS = re.compile(
    rf"\{{{_BLANK}(?:{_TEXT}{_BLANK}:{_BLANK}{_TEXT}{_BLANK}(?:,{_BLANK}(?!}})|(?=}})))*+}}"
)
_FLAT = re.compile(rf"\{{(?:[^][{{}}\"]|{_TEXT}|\[[^][{{}}\"]*+\])*+}}")
_NEXT = re.compile(rf"{_BLANK}(?:,|(?P<end>}}{_BLANK}\Z))")
_NULL = re.compile("null")
_LONGEST_ENTRY = 2 * 1024 * 1024  # characters of a tensor's entry in a header


def _entries(file: str, content: bytes) -> Iterator[tuple[str, object]]:
    """Yield the entry of each tensor in a safetensors header, without the header's metadata.

    The values are decoded one by one, and only if they have the form of a tensor's entry. As
    arbitrary objects, a header would take thirty times its bytes and block all other threads.
    """
    try:
        text = content.decode()
    except ValueError as error:
        raise _no_json(file, error) from None
    if not (begun := re.match(rf"{_BLANK}{{{_BLANK}(?P<end>}}{_BLANK}\Z)?", text)):
        _object(file, content[:_FIRST_READ])
        raise ModelError(f"{file} must contain a JSON object; correct it, or {_FETCH_AGAIN}")
    at = begun.end()
    end = begun["end"]
    while end is None:
        name = _NAME.match(text, at)
        if not name:
            raise _no_json(file, f"character {at} does not begin a tensor's name")
        tensor = json.loads(name["name"])
        if tensor == "__metadata__":
            value = _TEXTS.match(text, name.end()) or _NULL.match(text, name.end())
            if not value:
                raise ModelError(f"{file}: __metadata__ must be an object of texts; {_FETCH_AGAIN}")
        else:
            value = _FLAT.match(text, name.end(), name.end() + _LONGEST_ENTRY)
            if not value:
                raise _no_tensor(file, tensor)
            try:
                entry = json.loads(value[0])
            except ValueError as error:
                raise _no_json(file, error) from None
            yield tensor, entry
        after = _NEXT.match(text, value.end())
        if not after:
            raise _no_json(file, f"character {value.end()} does not go on after {tensor:.80}")
        at, end = after.end(), after["end"]


def _no_tensor(file: str, name: str) -> ModelError:
    return ModelError(f"{file}: what its header says of {name:.80} is no tensor; {_FETCH_AGAIN}")


def _no_json(file: str, error: object) -> ModelError:
    return ModelError(f"{file} is not JSON ({error}); correct it, or {_FETCH_AGAIN}")


def _object(file: str, content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except RecursionError:
        raise ModelError(f"{file} is nested too deeply; {_FETCH_AGAIN}") from None
    except ValueError as error:
        raise _no_json(file, error) from None
    if not isinstance(found, dict):
        raise ModelError(f"{file} must contain a JSON object; correct it, or {_FETCH_AGAIN}")
    return found


def _unreadable(what: str, error: OSError) -> ModelError:
    return ModelError(f"{what} cannot be read ({error.strerror}); check its path and permissions")


def _listed(names: Iterable[str]) -> str:
    """Return some of the names, as a short text."""
    some = sorted(names)
    more = f" and {len(some) - 4} more" if len(some) > 4 else ""
    return (", ".join(some[:4]) + more) or "it is empty"
