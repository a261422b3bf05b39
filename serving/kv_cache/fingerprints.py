# SPDX-License-Identifier: Apache-2.0
"""The identity of a model's caches: its fingerprint, and a path that is equal on every server.

LMCache's keys consist of vLLM's model path and the tokens' hash. So vLLM gets a path that is the
same on every server with the same model, and differs for all other models.
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
from serving.kv_cache.neutral_options import ELSEWHERE, HARMLESS
from serving.sources.digests import State, of_model, state_of

SCHEMA = 2
"""The version of the tiers' content. Version 1 may have null blocks and prompts of embeddings."""

_AUTO = ("dtype", "kv_cache_dtype", "load_format")  # options whose default in vLLM is "auto"
_OTHER_LOADERS = ("fastsafetensors", "instanttensor")  # which read the same files
_OTHER_CONFIG = ("hf_overrides", "hf_config_path", "config_format", "model_class_overrides")
_LONG_ROPES = ("longrope", "su")
_BY_LENGTH = ("llama4", "minimax_m2", "cohere_compass", "plamo3")  # prefixes of model types
_ENVIRONMENT = (
    "VLLM_KV_CACHE_LAYOUT",
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE",
    "LMCACHE_MP_TRANSFER_MODE",
)
_TRANSFER_MODE = "lmcache.mp.mp_transfer_mode"

# Files that KV does not depend on: they concern tokens, sampling or training.
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
    """Return 16 hex digits that differ if the KV of the same tokens may differ in value or form.

    options: all of the plan's options for vLLM, by vLLM's names. Each one counts, unless it is
    known to be harmless. The length only counts if the model's positions depend on it. chunk_size:
    in tokens. KV in chunks of another size is never found again, and must not take room on the
    disk. whole: whether all bytes are read, within of_model()'s limit; samples suffice if no cache
    outlives the server. machine: the kind of its GPUs decides about formats of numbers. environ:
    some variables of vLLM's and LMCache's also decide about the form of KV.

    Raises OSError if a file cannot be read.
    """
    counted = {
        name: value
        for name, value in options.items()
        if name not in HARMLESS | ELSEWHERE
        and value is not None
        and not (name in _AUTO and value == "auto")
        and not (name == "load_format" and value in _OTHER_LOADERS)
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


def states(folder: Path) -> dict[str, State]:
    """Return the states of the files that KV depends on. Raises OSError."""
    return {name: state_of((folder / name).stat()) for name in _files(Folder(folder))}


def _files(checkpoint: Folder) -> Iterator[str]:
    """Yield the files that KV depends on: weights, configurations, processors of media, code."""
    with contextlib.suppress(ModelError):  # load_format=dummy needs no weights
        yield from weight_files(checkpoint)
    for name in checkpoint.sizes:
        code = name.endswith((".json", ".py")) and not name.startswith(".")
        if code and not name.endswith(".index.json") and name not in _NOT_KV:
            yield name


def _length(folder: Path, options: Mapping[str, Any]) -> object:
    """Return the part of max_model_len that affects positions in vLLM (0.32).

    LongRoPE uses its long factors above the original length. Llama 4 scales queries above 32k. The
    whole length counts if the configuration comes from elsewhere, or has code.
    """
    length = options.get("max_model_len")
    try:
        with (folder / "config.json").open("rb") as file:
            config = json.loads(file.read(LONGEST_JSON))  # a longer file is cut, and so invalid
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
    # With "auto", vLLM chooses the length by free memory, which may differ at each start.
    return secrets.token_hex(8) if length == AUTO else length


def _entries(config: object, name: str) -> Iterator[Any]:
    """Yield the values of a key at any depth of a configuration."""
    if isinstance(config, dict):
        if name in config:
            yield config[name]
        for value in config.values():
            yield from _entries(value, name)
    elif isinstance(config, list):
        for value in config:
            yield from _entries(value, name)


def _device(machine: Machine) -> str:
    """Return the kind of device. vLLM chooses default formats of numbers by it."""
    if not machine.gpus:
        return "cpu"
    oldest = min(it.capability or (0, 0) for it in machine.gpus)
    return "gpu" if oldest >= (8, 0) else f"gpu {oldest[0]}.{oldest[1]}"  # 8.0 has bfloat16


def store_name(place: Mapping[str, object], fingerprint: str) -> str:
    """Return 16 hex digits that name a model's part of a shared store among servers. place: the
    store's, without secrets.
    """
    parts = json.dumps([place, fingerprint], sort_keys=True, default=str)
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def served_path(folder: Path, fingerprint: str) -> Path:
    """Make a link to the model's folder, named by its fingerprint. Returns the link. Raises
    OSError.
    """
    links = folders.make(folders.place("served"))
    link = links / f".{fingerprint}-{secrets.token_hex(8)}"
    link.symlink_to(folder.absolute(), target_is_directory=True)
    return link.replace(links / fingerprint)


def steady_path(folder: Path, arriving: Mapping[str, int] = MappingProxyType({})) -> Path:
    """A link to the model's folder with the same path wherever the same model is. vLLM's compile
    cache has the path in its keys. arriving: files that are still fetched: name → bytes.

    The link is named after the configuration and the files' sizes, which another model may share.
    Returns the folder itself if the link leads to such a model that another server uses, or if
    there can be no link. This process keeps the link's lock until it ends.
    """
    with contextlib.suppress(OSError):
        files = Folder(folder)
        files.sizes |= arriving
        facts = [(name, files.sizes[name]) for name in sorted(_files(files))]
        digest = hashlib.sha256(json.dumps(facts).encode())
        with contextlib.suppress(FileNotFoundError), (folder / "config.json").open("rb") as file:
            digest.update(file.read(LONGEST_JSON))
        link = folders.make(folders.place("served")) / f"model-{digest.hexdigest()[:16]}"
        with contextlib.ExitStack() as stack:
            lock = os.open(f"{link}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            stack.callback(os.close, lock)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                served_path(folder, link.name)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if link.samefile(folder):
                stack.pop_all()  # this process keeps the lock
                return link
    return folder
