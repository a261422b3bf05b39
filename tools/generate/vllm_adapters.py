# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.generate.vllm_adapters [--check]`: write vllm_adapters.json, or check that it is
fresh. The file has the pinned vLLM's names for the modules of each architecture.

The names are attributes of vLLM's classes, which are imported. Packages that only single models
need are replaced by empty ones, so the command runs in a separate process. Run it whenever the pin
moves; a test fails when the file is stale.
"""

import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.generate import vllm_models
from tools.generate.files import written

PATH = vllm_models.PATH.with_name("vllm_adapters.json")

_ABSENT = {"torchvision", "torchaudio", "terratorch", "timm"}
"""Modules that single models import and the CPU engine lacks."""
_CUDA_ONLY = {"Dots3NoteForCausalLM", "Dots3NoteMTPModel"}
"""Architectures whose modules cannot be imported without CUDA."""
_AT_START = re.compile(r"self\.hf_to_vllm_mapper\s*\|?=")
"""How a class sets its names when it is made, by its configuration."""


class _Nothing(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class Nothing(metaclass=_Nothing):
    """Stands for whatever is imported from an absent package."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *given: Any, **_: Any) -> Any:
        return given[0] if given else self


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in _ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def _renames(mapper: Any) -> dict[str, dict[str, str]]:
    """The renamings of vLLM's WeightsMapper, in its order."""
    renames = mapper.get_rename_mapper()
    if renames.orig_to_new_renaming:
        raise ValueError("renamings of transformers are not written here yet")
    found = {
        "regex": {it.pattern: new for it, new in renames.orig_to_new_regex.items()},
        "substr": dict(renames.orig_to_new_substr),
        "prefix": dict(renames.orig_to_new_prefix),
        "suffix": dict(renames.orig_to_new_suffix),
    }
    for pattern in found["regex"]:
        re.compile(pattern)  # vLLM's come from another package with more of them
    return {kind: names for kind, names in found.items() if names}


def _set_at_start(model: type) -> bool:
    """Whether a model's names depend on its configuration."""
    models = [it for it in model.__mro__ if it.__module__.startswith("vllm.")]
    return any(_AT_START.search(inspect.getsource(it)) for it in models)


def adapters() -> dict[str, Any]:
    """renames: architecture → kind of a rename → old → new, in vLLM's order. untold: architectures
    whose names depend on their configurations. fused_experts: those that take adapters of experts
    as one tensor for all of a layer.
    """
    importlib.import_module("transformers")  # which asks what is installed, before there is more
    sys.meta_path.append(_Finder())
    renames: dict[str, dict[str, dict[str, str]]] = {}
    untold, fused = {*_CUDA_ONLY}, set()
    for architecture, (module, name) in vllm_models.classes().items():
        if architecture in _CUDA_ONLY:
            continue
        where = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
        model = getattr(importlib.import_module(where), name)
        if getattr(model, "is_3d_moe_weight", False):
            fused.add(architecture)
        if _set_at_start(model):
            untold.add(architecture)
        elif (mapper := getattr(model, "hf_to_vllm_mapper", None)) and (found := _renames(mapper)):
            renames[architecture] = found
    return {"renames": renames, "untold": sorted(untold), "fused_experts": sorted(fused)}


def main(*, check: bool) -> int:
    text = json.dumps(adapters(), indent=1) + "\n"
    return written({Path(PATH): text.encode()}, check=check)


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv))
