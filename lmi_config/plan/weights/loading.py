# SPDX-License-Identifier: Apache-2.0
"""How vLLM loads the weights: its loader, and whether it starts while they are still fetched."""

import dataclasses
from collections.abc import Mapping

from lmi_config.facts.machine import Machine, Place
from lmi_config.facts.model import ModelFacts
from lmi_config.options.declared import Settings
from lmi_config.plan.devices.parallelism import Parallelism

_READ_BY_OPTIONS = (
    *("config_format", "hf_config_path", "hf_overrides", "mm_encoder_only"),
    *("model_loader_extra_config", "safetensors_load_strategy"),
)
"""vLLM's options that decide which files of the model are read, and how."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loading:
    """format: vLLM's load_format, or "" for its default. arriving: the files that vLLM waits for,
    one after the other, while they are fetched: name → bytes, in vLLM's order. Empty if they are
    there first. reason: why, for people.
    """

    format: str = ""
    arriving: Mapping[str, int] = dataclasses.field(default_factory=dict)
    reason: str = ""


THERE = Loading()
"""The files are on the disk, and vLLM maps them into memory."""
LARGE = 8 * 10**9
"""The least bytes of weights for another loader. An assumption."""
IN_MEMORY = ("tmpfs", "ramfs")
LOCAL = ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "xfs", "zfs")


def while_fetched(
    settings: Settings,
    spread: Parallelism,
    model: ModelFacts,
    *,
    drafted: bool,
    fingerprinted: bool,
    coded: bool,
    pools: bool,
) -> Loading:
    """Decide the loading of weights that are not all here yet. The fetch overlaps with the start
    only if vLLM's loader alone reads the weights, and if it reads them file by file.

    drafted: whether there is a draft. fingerprinted: whether the KV caches need the digest of all
    weights. coded: whether there is a model.py. pools: whether the model answers with embeddings or
    scores.
    """
    shards = model.shards
    given = next((name for name in _READ_BY_OPTIONS if name in settings.engine), "")
    several = spread.copies > 1 or spread.servers > 1 or spread.machines > 1
    reasons = (
        (shards is None, "there is one file, or no index"),
        (several, "several servers use one fetch"),
        (fingerprinted, "KV caches are named after all of the weights"),
        (coded, "a model.py may read the weights"),
        ("load_format" in settings.origins, f"{settings.named('load_format')} is set"),
        (given, f"{settings.named(given)} is set"),
        (settings.trust_remote_code, "code of the model may read the weights"),
        (drafted or settings.speculative_config, "a draft is loaded as well"),
        (model.quantization or settings.quantize, "the weights are quantised"),
        (pools, "the model answers with embeddings or scores"),
        (shards and shards.unsettled, shards.unsettled if shards else ""),
    )
    against = next((reason for holds, reason in reasons if holds), "")
    if shards is None or against:
        return Loading(reason=f"fetched before vLLM starts: {against}")
    reason = "fetched while vLLM starts; it reads each file once the file is complete"
    return Loading(arriving=shards.sizes, reason=reason)


def from_disk(
    settings: Settings,
    machine: Machine,
    spread: Parallelism,
    model: ModelFacts,
    *,
    room: int,
    place: Place | None,
    drafted: bool,
) -> Loading:
    """Decide the loader of files on the disk. room: bytes of a GPU beside the weights. place: of
    the weights; None if unknown. drafted: whether there is a draft.

    The others read large files of a local disk faster, according to their authors. They read past
    the page cache, and files in it are faster still. fastsafetensors has a whole file on the GPU,
    instanttensor has a few tensors (vLLM 0.32).
    """
    given = "load_format" in settings.origins or settings.engine.keys() & {*_READ_BY_OPTIONS}
    if given or not machine.gpus or place is None:
        return THERE
    several = spread.pipeline > 1 or spread.copies > 1 or spread.machines > 1
    tight = spread.tensor > 1 or model.largest_file > room
    wanted = "instanttensor" if tight else "fastsafetensors"
    reasons = (
        (model.shards is None, "they are not several safetensors files with an index"),
        (drafted, "a draft is loaded as well"),
        (model.weight_bytes < LARGE, f"they have less than {LARGE / 1e9:g} GB"),
        (place.cached or place.kind in IN_MEMORY, "they are in memory already"),
        (place.kind not in LOCAL, f"they are on {place.kind}"),
        (several, f"{wanted} has not been tried with several stages or ranks of data"),
        (wanted in machine.missing, f"{wanted} is not installed"),
    )
    if against := next((reason for holds, reason in reasons if holds), ""):
        return Loading(reason=f"vLLM's own loader: {against}")
    reason = f"reads the files on {place.kind}; OPTION_LOAD_FORMAT=auto for vLLM's own loader"
    return Loading(format=wanted, reason=reason)
