# SPDX-License-Identifier: Apache-2.0
"""How vLLM loads the weights: whether it starts while they are still fetched."""

import dataclasses
from collections.abc import Mapping

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
    """arriving: the files that vLLM waits for, one after the other, while they are fetched: name →
    bytes, in vLLM's order. Empty if they are there first. reason: why, for people.
    """

    arriving: Mapping[str, int] = dataclasses.field(default_factory=dict)
    reason: str = ""


THERE = Loading()
"""The files are on the disk, and vLLM maps them into memory."""


def decide(
    settings: Settings,
    spread: Parallelism,
    model: ModelFacts,
    *,
    to_fetch: int,
    drafted: bool,
    fingerprinted: bool,
    coded: bool,
    pools: bool,
) -> Loading:
    """Decide the loading. A fetch overlaps with the start only if vLLM's loader alone reads the
    weights, and if it reads them file by file.

    to_fetch: bytes of weights that are not here yet. drafted: whether there is a draft.
    fingerprinted: whether the KV caches need the digest of all weights. coded: whether there is a
    model.py. pools: whether the model answers with embeddings or scores.
    """
    if not to_fetch:
        return THERE
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
