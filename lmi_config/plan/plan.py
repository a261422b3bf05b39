"""What `serve` will do here, decided once, from what is known."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lmi_config.facts import draft
from lmi_config.facts.draft import Draft
from lmi_config.facts.machine import Machine
from lmi_config.facts.model import ModelError, ModelFacts
from lmi_config.options.declared import Settings
from lmi_config.options.settings import SettingsError
from lmi_config.plan import kv_tiers, memory, preflight, vllm
from lmi_config.plan.kv_tiers import Tiers
from lmi_config.plan.memory import Budget, GpuBudget

SPECULATIVE_TOKENS = 3
"""Tokens that a draft proposes where neither the operator nor the draft says how many."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineParts:
    """Slipway's classes that vLLM and LMCache load, each by its path, as `module.Class`.

    connector: vLLM's, to LMCache's server. disk_store: LMCache's, for the files of the disk tier.
    cpu_lora: what vLLM's workers are extended with where adapters run without a GPU.
    """

    connector: str
    disk_store: str
    cpu_lora: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that was decided. `make()` makes it.

    environment: variables for this process before vLLM is imported. cache_environment: further ones
    for the cache server, with what is secret. options: vLLM's, by its names, in which the model and
    its draft are named as the operator names them.
    findings: what the operator should know, a sentence each.
    """

    settings: Settings
    machine: Machine
    parts: EngineParts
    model: ModelFacts
    draft: Draft | None
    memory: Budget
    gpu: GpuBudget | None
    tiers: Tiers | None
    environment: Mapping[str, str]
    cache_environment: Mapping[str, str] = dataclasses.field(repr=False)
    options: Mapping[str, Any] = dataclasses.field(repr=False)
    findings: tuple[str, ...]

    def engine(self, model: str, draft: str | None, tiers: bool = True) -> dict[str, Any]:
        """The options, with the folders that the model and its draft are in.

        tiers: whether the cache server that was planned is there.
        """
        options = {**self.options, "model": model}
        if draft:
            options["speculative_config"] = {**options["speculative_config"], "model": draft}
        if not tiers and self.tiers and self.tiers.l1:
            del options["kv_transfer_config"]
            if self.settings.kv_transfer_config:
                options["kv_transfer_config"] = self.settings.kv_transfer_config
        return options

    @property
    def cache_server(self) -> list[str] | None:
        """The command line of `lmcache`, or None where there are no tiers."""
        return self.cache_command(self.tiers) if self.tiers and self.tiers.l1 else None

    def cache_command(self, tiers: Tiers) -> list[str]:
        """The command line of `lmcache` for these tiers: as planned, or as they came to be."""
        return kv_tiers.server_arguments(tiers, self.machine, self.parts.disk_store)


def draft_id(settings: Settings) -> str | None:
    """What is named as the draft: a folder, an S3 prefix, a hub id; None where there is none."""
    config = settings.speculative_config or {}
    model = settings.speculative_draft_model or config.get("model")
    return model if isinstance(model, str) and model else None


def make(
    settings: Settings,
    machine: Machine,
    model: ModelFacts,
    drafted: Draft | None,
    environ: Mapping[str, str],
    parts: EngineParts,
    lmcache_file: Mapping[str, object] | None = None,
    to_fetch: int = 0,
    room: int = 0,
) -> Plan:
    """Decide.

    lmcache_file: the content of OPTION_LMCACHE_CONFIG_FILE. to_fetch: bytes of models that have yet
    to be downloaded; room: bytes that are free where they go.

    Raises SettingsError where it cannot work.
    """
    settings = memory.settled(settings, machine, environ)
    count = vllm.ranks(settings, machine)
    faults = (
        kv_tiers.faults(settings)
        + vllm.kv_events_faults(settings)
        + _speculation_faults(settings, model, drafted)
    )
    if faults:
        raise SettingsError(faults)
    cached = kv_tiers.wanted(settings)
    if cached and len(machine.ports) < len(kv_tiers.Ports._fields):
        raise SettingsError(
            [
                f"SAGEMAKER_SAFE_PORT_RANGE={environ.get('SAGEMAKER_SAFE_PORT_RANGE')!r}: KV cache "
                f"tiers need three free ports, and there are {len(machine.ports)}"
            ]
        )
    draft_facts = drafted.facts if drafted else None
    if draft_facts and draft_facts.kv and model.kv:
        # A draft keeps KV of its own for every token, in the engine's memory and in all tiers.
        model = dataclasses.replace(model, kv=model.kv.plus(draft_facts.kv))
    budget = memory.budget(settings, machine, model, draft_facts, cached)
    gpu = memory.gpu_budget(settings, machine, model, draft_facts)
    tiers = None
    if cached:
        region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
        tiers = kv_tiers.plan(
            settings, machine, model, budget, count, lmcache_file, to_fetch, region
        )
    running = tiers is not None and tiers.l1 > 0
    if cached and not running:
        budget = memory.budget(settings, machine, model, draft_facts, cached=False)
    derived: dict[str, Any] = {}
    if budget.kv is not None:
        derived["kv_cache_memory_bytes"] = budget.kv
    if tiers and running:
        derived["kv_transfer_config"] = kv_tiers.connector(tiers, machine, parts.connector)
    if settings.kv_events:
        derived["kv_events_config"] = vllm.kv_events(settings)
    if speculation := _speculation(settings, drafted):
        derived["speculative_config"] = speculation
    return Plan(
        settings=settings,
        machine=machine,
        parts=parts,
        model=model,
        draft=drafted,
        memory=budget,
        gpu=gpu,
        tiers=tiers,
        environment=vllm.environment(settings, machine, environ),
        cache_environment=kv_tiers.server_environment(tiers) if tiers else {},
        options=vllm.options(settings, machine, settings.model_id, derived, parts.cpu_lora),
        findings=(
            *preflight.findings(settings, machine, model, budget, gpu, tiers),
            *preflight.downloads(to_fetch, room),
        ),
    )


def _speculation(settings: Settings, drafted: Draft | None) -> dict[str, Any] | None:
    """vLLM's speculative_config, from the operator's or from the draft alone."""
    config = dict(settings.speculative_config or {})
    if model := draft_id(settings):
        config["model"] = model
    if settings.num_speculative_tokens is not None:
        config["num_speculative_tokens"] = settings.num_speculative_tokens
    if drafted:
        if drafted.method:
            config.setdefault("method", drafted.method)
        config.setdefault("num_speculative_tokens", drafted.tokens or SPECULATIVE_TOKENS)
        if drafted.parallel:
            config.setdefault("parallel_drafting", True)
    return config or None


def _speculation_faults(settings: Settings, model: ModelFacts, drafted: Draft | None) -> list[str]:
    config = settings.speculative_config or {}
    name = "OPTION_SPECULATIVE_DRAFT_MODEL"
    found = []
    for option, key, value in (
        (name, "model", settings.speculative_draft_model),
        (
            "OPTION_NUM_SPECULATIVE_TOKENS",
            "num_speculative_tokens",
            settings.num_speculative_tokens,
        ),
    ):
        if value is not None and config.get(key, value) != value:
            found.append(f"{option} and the {key} in OPTION_SPECULATIVE_CONFIG differ; keep one")
    tokens = settings.num_speculative_tokens
    if tokens is None:
        tokens = config.get("num_speculative_tokens")
    if tokens is not None and drafted is None and not config:
        found.append(f"OPTION_NUM_SPECULATIVE_TOKENS={tokens}: there is no draft; set {name}")
    if tokens is not None and not isinstance(tokens, int):
        found.append(f"num_speculative_tokens={tokens!r}: should be a whole number, like 3")
        tokens = None
    checked = config.get("method") in (None, drafted and drafted.method)
    if drafted and checked and not config.get("use_heterogeneous_vocab"):
        wanted = tokens if tokens is not None else drafted.tokens or SPECULATIVE_TOKENS
        try:
            reasons = draft.faults(drafted, model, wanted)
        except ModelError as error:
            reasons = [str(error)]
        found += [f"{draft_id(settings)}: {reason}" for reason in reasons]
    return found
