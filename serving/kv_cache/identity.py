# SPDX-License-Identifier: Apache-2.0
"""Which caches belong to a model: its fingerprint, and the path under which every server has it.

LMCache finds KV again by the path that vLLM was given and the tokens' hash. So a path is shown to
vLLM that is the same in every instance that serves the same model, and differs for all others.
"""

import hashlib
import json
import secrets
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from lmi_config.facts.model import Folder, weight_files
from serving import folders
from serving.sources.digests import of_model

# What vLLM makes of the same files, as far as it shows in the KV cache.
_OPTIONS = ("dtype", "hf_overrides", "kv_cache_dtype", "load_format", "quantization")


def fingerprint(
    folder: Path, options: Mapping[str, Any], chunk_size: int, whole: bool = True
) -> str:
    """16 hex digits that differ when a model's weights do, what vLLM makes of them, or the chunks.

    options: vLLM's, by its names. chunk_size: tokens; what was stored in chunks of another size is
    never found again, and is to take no room on the disk. whole: whether all bytes are read, as far
    as of_model() does; samples are enough where no cache outlives the server.
    """
    parts = {name: str(options[name]) for name in _OPTIONS if name in options}
    parts["chunk_size"] = str(chunk_size)
    parts |= {name: metadata.version(name) for name in ("vllm", "lmcache")}
    checkpoint = Folder(folder)
    names = sorted({*weight_files(checkpoint), "config.json"} & checkpoint.sizes.keys())
    files = {name: folder / name for name in names}
    return of_model(files, json.dumps(parts, sort_keys=True).encode(), whole=whole)


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
