# SPDX-License-Identifier: Apache-2.0
"""The plan: all decisions of `serve` on this machine, made once from the known facts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lmi_config.facts import handler
from lmi_config.facts.chat import Chat
from lmi_config.facts.draft import Draft
from lmi_config.facts.machine import HELPERS, Machine, Place
from lmi_config.facts.model import ModelFacts
from lmi_config.options.declared import Settings
from lmi_config.options.settings import SettingsError
from lmi_config.plan import kv_tiers, lmcache, memory, preflight, speculation, vllm
from lmi_config.plan.attention import verdict as attention
from lmi_config.plan.attention.verdict import Verdict
from lmi_config.plan.compile_cache import CompileCache
from lmi_config.plan.devices import copies
from lmi_config.plan.devices.copies import Copy
from lmi_config.plan.devices.parallelism import Parallelism
from lmi_config.plan.kv_tiers import NoTiers, Tiers
from lmi_config.plan.memory import Budget, GpuBudget
from lmi_config.plan.refusals import rules as refusals
from lmi_config.plan.refusals.given import Given
from lmi_config.plan.weights import loading
from lmi_config.plan.weights.loading import Loading


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineParts:
    """Slipway's classes that vLLM and LMCache load, by their paths, as `module.Class`.

    connector: vLLM's connector to LMCache's server. transferring: vLLM's NixlConnector, with the
    same class name. disk_store: LMCache's store for the files of the disk tier.
    """

    connector: str
    transferring: str
    disk_store: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """All decisions. `make()` makes them.

    environment: variables for this process before vLLM is imported. cache_environment: further
    variables for the cache server, with secrets. options: vLLM's options under vLLM's names, with
    the operator's names of the model and its draft. lora_modules: adapters to register. verdict:
    whether tiers are correct for this model. copies: the servers on this machine; empty for a
    single one. memory: of all copies together. gpu: a GPU of any copy. findings: notes for the
    operator, a sentence each. loading: how vLLM gets the weights.
    """

    settings: Settings
    machine: Machine
    parts: EngineParts
    parallelism: Parallelism
    model: ModelFacts
    chat: Chat
    draft: Draft | None
    memory: Budget
    gpu: GpuBudget | None
    tiers: Tiers | NoTiers
    verdict: Verdict
    environment: Mapping[str, str]
    cache_environment: Mapping[str, str] = dataclasses.field(repr=False)
    options: Mapping[str, Any] = dataclasses.field(repr=False)
    lora_modules: tuple[vllm.LoraModule, ...]
    copies: tuple[Copy, ...]
    findings: tuple[str, ...]
    compile_cache: CompileCache | None = None
    loading: Loading = loading.THERE

    @property
    def hindrance(self) -> str | None:
        """The reason why vLLM cannot start here with any model; findings also has it."""
        return preflight.hindrance(self.machine)

    def engine(self, model: str, draft: str | None) -> dict[str, Any]:
        """Return the options with the local folders of the model and its draft."""
        options = {**self.options, "model": model}
        if draft:
            options["speculative_config"] = {**options["speculative_config"], "model": draft}
        return options

    def of_copy(self, copy: Copy) -> "Plan":
        """Return the plan of one copy among several: with its devices, and their consequences."""
        environment = {**self.environment, **copy.environment}
        return dataclasses.replace(
            self, machine=copy.machine, environment=environment, copies=(), findings=()
        )

    def without_tiers(self, reason: str) -> "Plan":
        """Return the plan after the cache server failed to start."""
        if isinstance(self.tiers, NoTiers):
            return self
        options = dict(self.options)
        del options["kv_transfer_config"]
        settings = self.settings
        if self.verdict.whole and attention.HYBRID not in settings.origins:
            settings = attention.as_given(settings)
            del options[attention.HYBRID]
        if own := self.settings.kv_transfer_config:
            options["kv_transfer_config"] = own
        tiers = NoTiers(reason, "failed")
        return dataclasses.replace(self, tiers=tiers, settings=settings, options=options)

    @property
    def cache_server(self) -> list[str] | None:
        """The command line of `lmcache`, or None without tiers."""
        return None if isinstance(self.tiers, NoTiers) else self.cache_command(self.tiers)

    def cache_command(self, tiers: Tiers) -> list[str]:
        """Return the command line of `lmcache` for these tiers: the planned or the actual ones."""
        return kv_tiers.server_arguments(
            *(tiers, self.machine, self.parts.disk_store),
            servers=self.parallelism.servers,
            events="kv_events_config" in self.options,
        )


_UNKNOWN = Chat()


def make(
    settings: Settings,
    machine: Machine,
    model: ModelFacts,
    draft: Draft | None,
    environ: Mapping[str, str],
    parts: EngineParts,
    lmcache_file: Mapping[str, object] | None = None,
    to_fetch: int = 0,
    room: int = 0,
    chat: Chat = _UNKNOWN,
    alone: str = "",
    compile_cache: CompileCache | None = None,
    place: Place | None = None,
) -> Plan:
    """Make the plan.

    lmcache_file: the content of OPTION_LMCACHE_CONFIG_FILE. to_fetch: bytes of models that must
    still be downloaded; room: free bytes of that disk. chat: the formats of the model's answers.
    alone: why there can be no router for several copies, if the caller knows a reason, or "".
    compile_cache: the folder for generated files. place: where the weights are.

    Raises SettingsError if the settings cannot work here.
    """
    settings = memory.settled(settings, machine, environ)
    service = None
    if settings.model_folder:
        service = handler.look(settings.model_folder, settings.entry_point)
    wanted = kv_tiers.wanted(settings)
    alone = alone or memory.fixed_ports(settings, wanted)
    about = (settings, machine, model, draft, service, environ)
    number = copies.decide(*about, tiers=wanted, alone=alone)
    spread, whole = number.spread, machine
    divided = copies.divide(
        *(machine, number, environ),
        lambda share: vllm.environment(settings, share, spread, environ),
    )
    if divided:
        machine = divided[0].machine
    else:
        machine = whole = dataclasses.replace(machine, ports=machine.ports[:HELPERS])
    mistyped, noted = lmcache.mistyped(environ, settings.strict)
    faults = (
        mistyped
        + kv_tiers.faults(settings)
        + memory.offload_faults(settings, machine, spread, wanted)
        + vllm.kv_events_faults(settings, spread.copies)
        + vllm.quantization_faults(settings, machine, model)
        + speculation.faults(settings, model, draft)
        + attention.block_faults(
            settings, model.kept, kv_tiers.block_size(settings, machine), bool(machine.gpus)
        )
    )
    if faults:
        raise SettingsError(faults)
    method = (speculation.config(settings, draft) or {}).get("method")
    kept = model.kept
    if draft and method in attention.WITH_DRAFT:
        kept = kept.plus(speculation.kept(draft))
    settings = attention.vllms_own(settings, kept, method, environ)
    draft_facts = draft.facts if draft else None
    if draft_facts and draft_facts.kv and model.kv:
        # A draft keeps its own KV for every token, in the engine's memory and in all tiers.
        model = dataclasses.replace(model, kv=model.kv.plus(draft_facts.kv))
    budget = memory.budget(settings, machine, spread, model, draft_facts)
    gpu = memory.gpu_budget(settings, machine, spread, model, draft_facts)
    if faults := [*preflight.too_small(settings, machine, spread, model, budget, gpu)]:
        raise SettingsError(faults)
    cached = budget.with_cache_server()
    verdict = attention.decide(
        settings,
        kept,
        model.kv,
        method=method,
        pools=vllm.pools(settings, model),
        gpus=bool(machine.gpus),
        longest=preflight.longest_request(settings, model),
    )
    if verdict.whole:
        verdict = preflight.priced(verdict, settings, machine, spread, model, budget, gpu)
    tiers = kv_tiers.plan(
        settings, machine, spread, model, cached, environ, lmcache_file, to_fetch, verdict
    )
    own = kv_tiers.lmcaches_own(settings)
    faults = kv_tiers.handover_faults(settings, tiers)
    if own and (reason := verdict.against or verdict.unguarded):
        name = settings.named("kv_transfer_config")
        faults.append(f"{name}: no connector of LMCache's: {reason}; {verdict.instead}")
    if faults:
        raise SettingsError(faults)
    if verdict.whole and (own or isinstance(tiers, Tiers)):
        settings = attention.whole(settings)
    derived: dict[str, Any] = vllm.parsers(settings, chat)
    derived |= vllm.batch(settings, machine, model)
    derived |= vllm.reuse(settings, machine, model)
    cache_environment: dict[str, str] = {}
    if budget.kv is not None:
        derived["kv_cache_memory_bytes"] = budget.kv
    if isinstance(tiers, Tiers):
        budget = cached
        cache_environment = kv_tiers.server_environment(tiers)
        derived["kv_transfer_config"] = kv_tiers.connector(tiers, machine, parts.connector)
    elif kv_tiers.transfers(settings):
        derived["kv_transfer_config"] = kv_tiers.transferring(settings, parts.transferring)
    if settings.kv_events:
        derived["kv_events_config"] = vllm.kv_events(settings, spread.copies)
    if speculative := speculation.config(settings, draft):
        derived["speculative_config"] = speculative
    if to_fetch:
        decided = loading.while_fetched(
            *(settings, spread, model),
            drafted=draft is not None,
            fingerprinted=isinstance(tiers, Tiers) or kv_tiers.transfers(settings),
            coded=handler.there(settings.model_folder, settings.entry_point),
            pools=vllm.pools(settings, model),
        )
    else:
        decided = loading.from_disk(
            *(settings, machine, spread, model),
            room=gpu.left if gpu else 0,
            place=place,
            drafted=draft is not None,
        )
    if decided.format:
        derived["load_format"] = decided.format
    options = vllm.options(settings, machine, spread, derived)
    if faults := refusals.faults(Given(settings, options, machine, model, draft, environ)):
        raise SettingsError(faults)
    return Plan(
        settings=settings,
        machine=whole,
        parts=parts,
        parallelism=spread,
        model=model,
        chat=chat,
        draft=draft,
        memory=budget,
        gpu=gpu,
        tiers=tiers,
        verdict=verdict,
        environment=vllm.environment(settings, machine, spread, environ, compile_cache),
        cache_environment=cache_environment,
        options=options,
        lora_modules=vllm.lora_modules(settings),
        copies=divided,
        findings=(
            *number.notes,
            *preflight.findings(settings, whole, spread, model, budget, gpu, tiers),
            *noted,
            *preflight.downloads(to_fetch, room),
            *kv_tiers.transfer_findings(settings, environ),
        ),
        compile_cache=compile_cache,
        loading=decided,
    )
