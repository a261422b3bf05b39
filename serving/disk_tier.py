"""The folder of the disk tier: one for each model, so that no cache is ever read by another.

LMCache finds files again by the model's path and the tokens' hash, and counts only what it stored
since its start. So each model has a folder named by its fingerprint, and what earlier servers left
is brought within the tier's size before it starts.
"""

import dataclasses
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from lmi_config import machine
from lmi_config.kv_tiers import Tiers
from lmi_config.model import Folder, weight_files
from serving.digests import sampled

log = logging.getLogger(__name__)

NAMES = Path("/tmp/slipway/served")

# What vLLM makes of the same files, as far as it shows in the KV cache.
_OPTIONS = ("dtype", "hf_overrides", "kv_cache_dtype", "load_format", "quantization")


def fingerprint(folder: Path, options: Mapping[str, Any]) -> str:
    """16 hex digits that differ when a model's weights do, or what vLLM makes of them.

    options: vLLM's, by its names.
    """
    found = {name: str(options[name]) for name in _OPTIONS if name in options}
    found |= {name: metadata.version(name) for name in ("vllm", "lmcache")}
    checkpoint = Folder(folder)
    names = sorted({*weight_files(checkpoint), "config.json"} & checkpoint.sizes.keys())
    return sampled((folder / name for name in names), json.dumps(found, sort_keys=True).encode())


def named(folder: Path, fingerprint: str) -> Path:
    """A name for the folder that is the same in every instance that serves the same model.

    LMCache's keys begin with the path that vLLM was given.
    """
    NAMES.mkdir(parents=True, exist_ok=True)
    new = NAMES / f".{fingerprint}-{os.getpid()}"
    new.unlink(missing_ok=True)
    new.symlink_to(folder.absolute(), target_is_directory=True)
    return new.replace(NAMES / fingerprint)


def claim(tiers: Tiers, fingerprint: str) -> Tiers:
    """Make this model's folder, hold it until the process ends, and make room for it.

    Folders of other models that no server holds are removed; of this model's files the newest are
    kept, up to half of the tier. What LMCache may add is the rest.
    """
    root = Path(tiers.path)
    folder = root / fingerprint
    folder.mkdir(parents=True, exist_ok=True)
    for other in root.iterdir():
        if other != folder and other.is_dir() and not machine.held(other):
            log.info("removing the KV cache of another model or version: %s", other)
            shutil.rmtree(other, ignore_errors=True)
    lock = os.open(folder / machine.LOCK, os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_SH)  # never closed: it is held until the process ends
    kept = 0
    files = sorted(folder.glob("*.data"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        size = file.stat().st_blocks * 512
        if kept + size > tiers.disk // 2:
            file.unlink()
        else:
            kept += size
    if files:
        log.info("disk tier: kept %.1f GiB of an earlier run", kept / (1 << 30))
    return dataclasses.replace(tiers, path=str(folder), disk=tiers.disk - kept)
