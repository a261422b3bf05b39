# SPDX-License-Identifier: Apache-2.0
"""Which caches belong to a model: its fingerprint, and the path under which every server has it.

LMCache finds KV again by the path that vLLM was given and the tokens' hash. So a path is shown to
vLLM that is the same in every instance that serves the same model, and differs for all others.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lmi_config.facts.machine import Machine
from lmi_config.facts.model import LONGEST_JSON, Folder, ModelError, weight_files
from lmi_config.options.parsers import AUTO
from serving import folders
from serving.kv_cache.harmless import ELSEWHERE, HARMLESS
from serving.sources.digests import of_model

SCHEMA = 2
"""Of what the tiers hold. 1: null blocks and prompts of embeddings may be among it."""

_AUTO = ("dtype", "kv_cache_dtype", "load_format")  # whose "auto" is vLLM's default
_OTHER_CONFIG = ("hf_overrides", "hf_config_path", "config_format", "model_class_overrides")
_LONG_ROPES = ("longrope", "su")
_BY_LENGTH = ("llama4", "minimax_m2", "cohere_compass", "plamo3")  # beginnings of model types
_ENVIRONMENT = (
    "VLLM_KV_CACHE_LAYOUT",
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE",
    "LMCACHE_MP_TRANSFER_MODE",
)
_TRANSFER_MODE = "lmcache.mp.mp_transfer_mode"

# Of the files beside the weights, these make tokens or samples, and index what is there.
_NOT_KV = {
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "chat_template.json",
    "generation_config.json",
    "trainer_state.json",
    "training_args.json",
    "all_results.json",
    "train_results.json",
    "eval_results.json",
    "model.py",  # the operator's
}


def fingerprint(
    folder: Path,
    options: Mapping[str, Any],
    chunk_size: int,
    whole: bool = True,
    *,
    machine: Machine | None = None,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """16 hex digits that differ when the KV of the same tokens may differ, or its form.

    options: vLLM's, by its names, all that the plan has. Each counts that is not known to be
    harmless; the length where the model's positions depend on it. chunk_size: tokens; what was
    stored in chunks of another size is never found again, and is to take no room on the disk.
    whole: whether all bytes are read, as far as of_model() does; samples are enough where no cache
    outlives the server. machine: the kind of its GPUs decides about numbers' formats. environ: some
    variables of vLLM's and LMCache's decide about the form of KV, too.

    Raises OSError where a file cannot be read.
    """
    counted = {
        name: value
        for name, value in options.items()
        if name not in HARMLESS | ELSEWHERE
        and value is not None
        and not (name in _AUTO and value == "auto")
    }
    if options.get("load_format") == "dummy":
        counted["seed"] = options.get("seed")  # weights are random
    extra = (options.get("kv_transfer_config") or {}).get("kv_connector_extra_config") or {}
    parts = {
        "schema": SCHEMA,
        "options": counted,
        "length": _length(folder, options),
        "chunk_size": chunk_size,
        "transfer": extra.get(_TRANSFER_MODE),
        "environment": {name: environ.get(name) for name in _ENVIRONMENT},
        "device": _device(machine) if machine else None,
        "versions": [metadata.version(name) for name in ("vllm", "lmcache")],
    }
    names = sorted(_files(Folder(folder)))
    files = {name: folder / name for name in names}
    facts = json.dumps(parts, sort_keys=True, default=str).encode()
    return of_model(files, facts, whole=whole)


def _files(checkpoint: Folder) -> Iterator[str]:
    """The files that KV depends on: weights, configurations, processors of media, code."""
    with contextlib.suppress(ModelError):  # there need not be weights with load_format=dummy
        yield from weight_files(checkpoint)
    for name in checkpoint.sizes:
        code = name.endswith((".json", ".py")) and not name.startswith(".")
        if code and not name.endswith(".index.json") and name not in _NOT_KV:
            yield name


def _length(folder: Path, options: Mapping[str, Any]) -> object:
    """What of max_model_len changes positions, as vLLM (0.32) computes them.

    LongRoPE takes its long factors above the original length. Llama 4 scales queries above 32k.
    Where a configuration is not the folder's own, or has code, nothing is known.
    """
    length = options.get("max_model_len")
    try:
        with (folder / "config.json").open("rb") as file:
            config = json.loads(file.read(LONGEST_JSON))  # what is longer is cut, and no JSON
    except (OSError, ValueError, RecursionError):
        config = None
    known = isinstance(config, dict) and not any(options.get(name) for name in _OTHER_CONFIG)
    if known and not any(_entries(config, "auto_map")):
        kinds = {*_entries(config, "rope_type"), *_entries(config, "type")}
        originals = [*_entries(config, "original_max_position_embeddings")]
        if not any(str(it).startswith(_BY_LENGTH) for it in _entries(config, "model_type")):
            if not any(it in _LONG_ROPES for it in kinds):
                return None
            if all(isinstance(it, int) for it in originals) and len({*originals}) == 1:
                return length is not None and length > originals[0]
    # vLLM takes what fits into memory, which may differ at each start.
    return secrets.token_hex(8) if length == AUTO else length


def _entries(config: object, name: str) -> Iterator[Any]:
    """The values of a key, wherever it is in a configuration."""
    if isinstance(config, dict):
        if name in config:
            yield config[name]
        for value in config.values():
            yield from _entries(value, name)
    elif isinstance(config, list):
        for value in config:
            yield from _entries(value, name)


def _device(machine: Machine) -> str:
    """What of a machine decides which formats of numbers vLLM takes where none is named."""
    if not machine.gpus:
        return "cpu"
    oldest = min(it.capability or (0, 0) for it in machine.gpus)
    return "gpu" if oldest >= (8, 0) else f"gpu {oldest[0]}.{oldest[1]}"  # 8.0 has bfloat16


def store_name(place: Mapping[str, object], fingerprint: str) -> str:
    """16 hex digits: what a model's part of a shared store is called among servers. place: of the
    store, without what is secret.
    """
    parts = json.dumps([place, fingerprint], sort_keys=True, default=str)
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def served_path(folder: Path, fingerprint: str) -> Path:
    """A link to the model's folder, by its fingerprint. Raises OSError where none can be made."""
    links = folders.make(folders.place("served"))
    link = links / f".{fingerprint}-{secrets.token_hex(8)}"
    link.symlink_to(folder.absolute(), target_is_directory=True)
    return link.replace(links / fingerprint)


def steady_path(folder: Path) -> Path:
    """A link to the model's folder with the same path wherever the same model is. vLLM's compile
    cache has the path in its keys.

    The link is named after the configuration and the files' sizes, which another model may share.
    Returns the folder itself if the link leads to such a model that another server uses, or if
    there can be no link. This process keeps the link's lock until it ends.
    """
    with contextlib.suppress(OSError):
        names = sorted(_files(Folder(folder)))
        facts = [(name, (folder / name).stat().st_size) for name in names]
        digest = hashlib.sha256(json.dumps(facts).encode())
        with contextlib.suppress(FileNotFoundError), (folder / "config.json").open("rb") as file:
            digest.update(file.read(LONGEST_JSON))
        link = folders.make(folders.place("served")) / f"model-{digest.hexdigest()[:16]}"
        lock = os.open(f"{link}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            served_path(folder, link.name)
        fcntl.flock(lock, fcntl.LOCK_SH)
        if link.samefile(folder):
            return link
        os.close(lock)
    return folder
