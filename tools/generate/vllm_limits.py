# SPDX-License-Identifier: Apache-2.0
"""Write vllm.json of lmi_config/plan/refusals: the words and limits that the pinned vLLM checks
options against, as far as the plan needs them without importing vLLM. Run whenever the pin moves; a
test fails when the file is stale.
"""

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

PATH = Path(__file__).parent.parent.parent / "lmi_config" / "plan" / "refusals" / "vllm.json"


def _quantization() -> dict[str, dict[str, object]]:
    """Method → its requirements.

    capability: least compute capability of a GPU, as 75 for 7.5. dtypes: of the model. files: at
    least one of them must exist if config.json does not name the method. plain: whether the method
    takes weights that are not quantised.
    """
    from vllm.config.quantization import _ONLINE_SHORTHANDS
    from vllm.model_executor.layers import quantization

    def without_files(made: type, method: str) -> bool:
        try:
            made()
        except TypeError:
            return method == "fp8" or method in _ONLINE_SHORTHANDS
        return True

    found: dict[str, dict[str, object]] = {}
    for method in quantization.QUANTIZATION_METHODS:
        made: Any = quantization.get_quantization_config(method)
        try:
            dtypes = made.get_supported_act_dtypes()
        except TypeError:  # of an object, not of the class
            dtypes = made.get_supported_act_dtypes(made.__new__(made))
        files = made.get_config_filenames()
        found[method] = {
            "capability": made.get_min_capability(),
            "dtypes": sorted(str(it).removeprefix("torch.") for it in dtypes),
            "files": files,
            "plain": method in _ONLINE_SHORTHANDS or (not files and without_files(made, method)),
        }
    return found


def _configurations(hint: Any) -> Iterator[type]:
    """The dataclasses in a type."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        yield hint
    elif get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from _configurations(part)


def _hints(made: type) -> dict[str, Any]:
    """The types of a class's fields; what only type checkers import counts as no dataclass."""
    from vllm import config
    from vllm.config.quantization import QuantizationConfigArgs

    known = {**vars(config), "QuantizationConfigArgs": QuantizationConfigArgs}
    while True:
        try:
            return get_type_hints(made, localns=known)
        except NameError as error:
            known[error.name] = object


def _fields(configuration: type) -> dict[str, object]:
    """Field → the fields of its type, in the same form, or None."""
    hints = _hints(configuration)
    found: dict[str, object] = {}
    for field in dataclasses.fields(configuration):
        inner = next(_configurations(hints[field.name]), None)
        found[field.name] = _fields(inner) if inner else None
    return dict(sorted(found.items()))


def _keys() -> dict[str, object]:
    """Option in JSON → the keys that it may have."""
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

    hints = _hints(EngineArgs)
    found: dict[str, object] = {}
    for name in sorted(hints):
        if inner := next(_configurations(hints[name]), None):
            found[name] = _fields(inner)
    known = _fields(SpeculativeConfig)
    found["speculative_config"] = dict.fromkeys(known)
    return found


def limits() -> dict[str, object]:
    from vllm.config import engram, model, quantization, speculative
    from vllm.config.pooler import SEQ_POOLING_TYPES, TOK_POOLING_TYPES
    from vllm.model_executor.layers import quantization as layers
    from vllm.model_executor.models import registry
    from vllm.v1.kv_cache_interface import KVCacheSpecKind
    from vllm.v1.metrics.buckets import BUCKET_FAMILY_KEYS

    return {
        "attention": sorted(it.value for it in KVCacheSpecKind),
        "deprecated_quantization": sorted(layers.DEPRECATED_QUANTIZATION_METHODS),
        "engram": sorted(engram._NGRAM_LAYER_FIELDS),
        "histograms": sorted(BUCKET_FAMILY_KEYS),
        "keys": _keys(),
        "mtp": sorted(get_args(speculative.MTPModelTypes)),
        "multimodal": sorted(registry._MULTIMODAL_MODELS),
        "no_float16": sorted(model._FLOAT16_NOT_SUPPORTED_MODELS),
        "online_quantization": {
            name: [it for it in ("linear", "moe") if getattr(args, it) is not None]
            for name, args in sorted(quantization._ONLINE_SHORTHANDS.items())
        },
        "pooling": sorted((*SEQ_POOLING_TYPES, *TOK_POOLING_TYPES)),
        "quantization": dict(sorted(_quantization().items())),
        "quantization_keys": sorted(quantization.QUANT_KEY_NAMES),
    }


def text() -> str:
    return json.dumps(limits(), indent=1) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    PATH.write_text(text())
