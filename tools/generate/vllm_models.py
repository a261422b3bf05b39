# SPDX-License-Identifier: Apache-2.0
"""Write vllm_models.json of lmi_config/facts: the architectures that the pinned vLLM serves, which
of them keep something else of a request than a KV cache for causal attention, and whose
configurations are read without code from elsewhere.

Read from vLLM's source, because many of its models cannot be imported without packages that only
they need. Run whenever the pin moves; a test fails when the file is stale.
"""

import ast
import importlib.util
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PATH = Path(__file__).parent.parent.parent / "lmi_config" / "facts" / "vllm_models.json"

_POOLING = (
    "_EMBEDDING_MODELS",
    "_LATE_INTERACTION_MODELS",
    "_REWARD_MODELS",
    "_TOKEN_CLASSIFICATION_MODELS",
    "_SEQUENCE_CLASSIFICATION_MODELS",
)
_GENERATING = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_SPECULATIVE_DECODING_MODELS")
_BACKEND = ("_TRANSFORMERS_SUPPORTED_MODELS", "_TRANSFORMERS_BACKEND_MODELS")
"""Names of vLLM's tables of architectures (vllm/model_executor/models/registry.py)."""

_STATE = {"IsHybrid", "IsAttentionFree"}
"""vLLM's interfaces of models with layers that keep a state (models/interfaces.py)."""
_CROSS = "CrossAttention"  # how the names of such layers end
_UNLIKE = {"StaticSinkAttention", "PrefillPrefixLMAttention"}
"""Attention that keeps a KV cache unlike others' (vllm/model_executor/layers/attention)."""
_UNLIKE_MODULES = {"whisper_causal", "extract_hidden_states", "unlimited_ocr"}
"""Modules that make such attention themselves, or set the window of R-SWA (models/config.py)."""
_UNLIKE_MODULES |= {"iquest_loopcoder", "step3p5"}
"""Modules that give layers a window which their configuration may not name."""
_LIKE = {"deepseek_v32", "kimi_k3"}
"""Folders of vllm/models with latent attention, with an index or beside states. The other folders
there have other kinds of attention.
"""


def _package() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec
    assert spec.origin
    return Path(spec.origin).parent


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _tables() -> dict[str, dict[str, tuple[str, str]]]:
    """Name of a table → architecture → module and class."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    wanted = {*_POOLING, *_GENERATING, *_BACKEND}
    for node in _tree(_package() / "model_executor" / "models" / "registry.py").body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in wanted:
                code = compile(ast.Expression(value), "registry.py", "eval")
                found[name] = eval(code, {}, found)  # the installed vLLM's own
    return found


def _files(module: str) -> list[Path]:
    """The files of a model: one, or a folder's, with variants for kinds of devices."""
    if module.startswith("vllm."):
        folder = _package().joinpath(*module.split(".")[1:])
        return sorted(folder.rglob("*.py")) or [folder.with_suffix(".py")]
    file = _package() / "model_executor" / "models" / module
    return [file.with_suffix(".py")] if file.with_suffix(".py").is_file() else [file / "base.py"]


def _imported(file: Path) -> Iterator[tuple[str, str]]:
    """Module and name of each import in a file."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, name.name) for name in node.names)


@cache
def _bases() -> dict[str, set[str]]:
    """Class → its bases and theirs, by names, in all of vLLM's models."""
    direct: dict[str, set[str]] = {}
    for folder in (_package() / "model_executor" / "models", _package() / "models"):
        for file in folder.rglob("*.py"):
            for node in ast.walk(_tree(file)):
                if isinstance(node, ast.ClassDef):
                    names = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                    direct.setdefault(node.name, set()).update(names)

    found: dict[str, set[str]] = {}
    for name in direct:
        reached, new = {name}, {name}
        while new:
            new = set().union(*(direct.get(it, set()) for it in new)) - reached
            reached |= new
        found[name] = reached
    return found


def _kind(module: str, name: str) -> str:
    files = _files(module)
    if _STATE & _bases().get(name, set()):
        return "state"
    used = [it for file in files for it in _imported(file)]
    of_layers = {it for where, it in used if where.startswith("vllm.model_executor.")}
    if any(it.endswith(_CROSS) for it in of_layers):
        return "cross"
    near = {where.rpartition(".")[2] for where, _ in used} | {module}
    folder = module.removeprefix("vllm.models.").partition(".")[0]
    if (
        _UNLIKE & of_layers
        or _UNLIKE_MODULES & near
        or (module.startswith("vllm.models.") and folder not in _LIKE)
    ):
        return "unlike"
    return "plain"


def _configurations() -> list[str]:
    """Values of model_type that have a configuration class in transformers or vLLM."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    found = {*CONFIG_MAPPING_NAMES}
    for node in ast.walk(_tree(_package() / "transformers_utils" / "config.py")):
        match node:
            case ast.Call(func=ast.Name(id="LazyConfigDict"), keywords=keywords):
                found |= {keyword.arg for keyword in keywords if keyword.arg}
    return sorted(found)


def classes() -> dict[str, tuple[str, str]]:
    """Architecture → the module and the class of vLLM's that serve it, sorted."""
    every = {arch: it for table in _tables().values() for arch, it in table.items()}
    return dict(sorted(every.items()))


def models() -> dict[str, list[str]]:
    """Kind → architectures. "known" has all of them, "pooling" those that do not generate, and
    "configurations" values of model_type.
    """
    tables, every = _tables(), classes()
    found: dict[str, list[str]] = {"known": sorted(every)}
    for kind in ("state", "cross", "unlike"):
        found[kind] = sorted(arch for arch, it in every.items() if _kind(*it) == kind)
    found["configurations"] = _configurations()
    generating = {arch for name in _GENERATING for arch in tables[name]}
    found["pooling"] = sorted({arch for name in _POOLING for arch in tables[name]} - generating)
    return found


def text() -> str:
    return json.dumps(models(), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
