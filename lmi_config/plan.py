"""What `serve` will do here, and why: decided once, from what is known, and told in one screen."""

import dataclasses
import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from lmi_config import budget, draft, kv_tiers, preflight, vllm_args
from lmi_config.budget import Budget, GpuBudget
from lmi_config.draft import Draft
from lmi_config.kv_tiers import DOCUMENT, Tiers, told
from lmi_config.machine import Machine
from lmi_config.model import ModelError, ModelFacts
from lmi_config.options import OPTIONS, Settings
from lmi_config.settings import SettingsError, secret

SPECULATIVE_TOKENS = 3
"""Tokens that a draft proposes where neither the operator nor the draft says how many."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that was decided. `make()` makes it.

    environment: variables for this process before vLLM is imported. cache_server: the command line
    of `lmcache`, or None; cache_environment: its further variables, with what is secret.
    findings: what the operator should know, a sentence each.
    """

    settings: Settings
    machine: Machine
    model: ModelFacts
    draft: Draft | None
    memory: Budget
    gpu: GpuBudget | None
    tiers: Tiers | None
    environment: Mapping[str, str]
    cache_server: tuple[str, ...] | None
    cache_environment: Mapping[str, str] = dataclasses.field(repr=False)
    findings: tuple[str, ...]

    def engine(self, model: str, draft: str | None, tiers: bool = True) -> dict[str, Any]:
        """vLLM's options by its names, when the model and its draft are in these folders.

        tiers: whether the cache server that was planned is there.
        """
        derived: dict[str, Any] = {}
        if self.memory.kv is not None:
            derived["kv_cache_memory_bytes"] = self.memory.kv
        if tiers and self.tiers and self.tiers.l1:
            derived["kv_transfer_config"] = kv_tiers.connector(self.tiers, self.machine)
        if speculation := _speculation(self.settings, self.draft, draft):
            derived["speculative_config"] = speculation
        return vllm_args.options(self.settings, self.machine, model, derived)


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
    lmcache_file: Mapping[str, object] | None = None,
    to_fetch: int = 0,
) -> Plan:
    """Decide.

    lmcache_file: the content of OPTION_LMCACHE_CONFIG_FILE. to_fetch: bytes of models that have yet
    to be downloaded.

    Raises SettingsError where it cannot work.
    """
    count = vllm_args.ranks(settings, machine)
    faults = kv_tiers.faults(settings) + _speculation_faults(settings, model, drafted)
    if faults:
        raise SettingsError(faults)
    cached = kv_tiers.wanted(settings)
    if cached and len(machine.ports) < 3:
        raise SettingsError(
            [
                f"SAGEMAKER_SAFE_PORT_RANGE={environ.get('SAGEMAKER_SAFE_PORT_RANGE')!r}: KV cache "
                f"tiers need three free ports, and there are {len(machine.ports)}"
            ]
        )
    draft_facts = drafted.facts if drafted else None
    memory = budget.memory(settings, machine, model, draft_facts, cached)
    gpu = budget.gpu(settings, machine, model, draft_facts)
    tiers = None
    if cached:
        region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
        tiers = kv_tiers.plan(
            settings, machine, model, memory, count, lmcache_file, to_fetch, region
        )
    running = tiers is not None and tiers.l1 > 0
    return Plan(
        settings=settings,
        machine=machine,
        model=model,
        draft=drafted,
        memory=memory,
        gpu=gpu,
        tiers=tiers,
        environment=vllm_args.environment(settings, machine, environ),
        cache_server=(
            tuple(kv_tiers.server_arguments(tiers, machine)) if tiers and running else None
        ),
        cache_environment=tiers.shared.env if tiers and tiers.shared else {},
        findings=tuple(preflight.findings(settings, machine, model, memory, gpu, tiers)),
    )


def _speculation(
    settings: Settings, drafted: Draft | None, path: str | None
) -> dict[str, Any] | None:
    """vLLM's speculative_config, from the operator's or from the draft alone."""
    config = dict(settings.speculative_config or {})
    if path:
        config["model"] = path
    if settings.num_speculative_tokens:
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


def options(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Each option: its name, its value for a person, and where it was given.

    What follows from other things is "derived", by vLLM's names; the rest is "default".
    """
    settings = plan.settings
    for name, origin in settings.origins.items():
        value = settings.engine[name] if name in settings.engine else getattr(settings, name)
        yield name, _shown(name, value), origin
    given = {OPTIONS[name].vllm if name in OPTIONS else name for name in settings.origins}
    derived = _engine(plan)
    for name, value in derived.items():
        if name not in given:
            yield name, _shown(name, value), "derived"
    for name, option in OPTIONS.items():
        if name not in settings.origins and option.vllm not in derived:
            yield name, _shown(name, option.default), "default"


def _engine(plan: Plan) -> dict[str, Any]:
    """vLLM's options, with what is secret hidden."""
    found = plan.engine(plan.settings.model_id, draft_id(plan.settings))
    return {name: _safe(name, value) for name, value in found.items()}


def _safe(name: str, value: Any) -> Any:
    """The value, with what is secret in it hidden."""
    if value and secret(name):
        return "(hidden)"
    if isinstance(value, Mapping):
        return {key: _safe(str(key), item) for key, item in value.items()}
    if isinstance(value, str) and value.startswith("{"):
        return _safe(name, json.loads(value))
    return value


def _shown(name: str, value: Any) -> str:
    """A value for a person, with what is secret in it hidden."""
    value = _safe(name, value)
    if isinstance(value, Mapping):
        return json.dumps(value)
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _tokens(size: int, each: int) -> str:
    """How much KV fits into so many bytes."""
    tokens = size // each
    return f"{tokens:,} tokens, {tokens // DOCUMENT:,} documents of {DOCUMENT // 1000}k"


def rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """The plan as a table: what, how much, and why or what that means. A name of "" goes on."""
    settings, machine, model = plan.settings, plan.machine, plan.model
    each = budget.kv_per_token(settings, model)
    about = [settings.model_id, *model.architectures[:1], model.dtype, model.quantization]
    yield "model", told(model.weight_bytes), ", ".join(part for part in about if part)
    if each:
        yield "KV per token", f"{each / 1024:g} KiB", f"{model.layers or '?'} layers"
    longest = settings.max_model_len or model.max_length
    if longest:
        origin = settings.origins.get("max_model_len", "the model's own")
        yield "longest request", f"{longest:,} tokens", origin
    if plan.draft:
        method = (settings.speculative_config or {}).get("method") or plan.draft.method
        size = told(plan.draft.facts.weight_bytes)
        yield "draft", size, f"{draft_id(settings)}, {method}"
    yield from _devices(plan)
    kind = "the container's limit" if machine.limited else "the host's"
    yield "memory", told(machine.memory), f"{kind}; {told(machine.memory_free)} free"
    for share in plan.memory.shares:
        yield f"  {share.name}", told(share.size), share.reason
    left = plan.memory.free - (plan.tiers.l1 if plan.tiers else 0)
    if plan.tiers and plan.tiers.l1:
        yield "  KV tier L1", told(plan.tiers.l1), "below"
    yield "  left", told(left), ""
    yield from _tiers(plan, each)
    yield "port", str(settings.port), settings.origins.get("port", "default")


def _devices(plan: Plan) -> Iterator[tuple[str, str, str]]:
    settings, machine = plan.settings, plan.machine
    degree = vllm_args.tensor_parallel(settings, machine)
    given = settings.origins.get("tensor_parallel_degree", "default: max")
    if not machine.gpus:
        quota = f", {machine.cpu_quota:g} by quota" if machine.cpu_quota else ""
        yield "devices", f"{len(machine.cpus)} CPUs{quota}", f"tensor parallel {degree} ({given})"
        return
    names = ", ".join(sorted({gpu.name for gpu in machine.gpus}))
    yield "devices", f"{len(machine.gpus)} x {names}", f"tensor parallel {degree} ({given})"
    if plan.gpu:
        tokens = preflight.kv_tokens(settings, machine, plan.model, plan.gpu)
        yield "each GPU", told(plan.gpu.total), f"vLLM may use {told(plan.gpu.usable)}"
        yield "  weights", told(plan.gpu.weights), "the rank's part, and the draft's"
        yield "  overhead", told(plan.gpu.overhead), "context, activations, graphs; an estimate"
        amount = f"about {tokens:,} tokens in all" if tokens is not None else "unknown"
        yield "  KV cache", told(max(plan.gpu.kv, 0)), amount


def _tiers(plan: Plan, each: int | None) -> Iterator[tuple[str, str, str]]:
    tiers = plan.tiers
    if not tiers:
        yield "KV cache tiers", "none", "OPTION_LMCACHE_AUTO_CONFIG=true makes some"
        return
    for name, size, reason in (
        ("L1", tiers.l1, tiers.reasons["l1"]),
        ("disk", tiers.disk, tiers.reasons["disk"]),
    ):
        yield f"KV tier {name}", told(size) if size else "none", reason
        if size and each:
            yield "", "", _tokens(size, each)
    if tiers.disk:
        yield "", "", f"in {tiers.path}"
    if tiers.shared:
        yield "KV tier shared", "", tiers.shared.shown
    if tiers.l1:
        yield "KV chunk", f"{tiers.chunk_size} tokens", tiers.reasons["chunk_size"]


def commands(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """What will run: a name, and arguments with what is secret hidden."""
    yield "vLLM, in this process", vllm_args.arguments(_engine(plan))
    if plan.cache_server and plan.tiers:
        shared = plan.tiers.shared
        tiers = dataclasses.replace(
            plan.tiers, shared=shared and dataclasses.replace(shared, adapter=shared.masked)
        )
        yield "lmcache", kv_tiers.server_arguments(tiers, plan.machine)


def as_text(plan: Plan) -> str:
    """The plan for a person."""
    table = list(rows(plan))
    widths = [max(len(row[column]) for row in table) for column in (0, 1)]
    lines = [f"{name:{widths[0]}}  {size:{widths[1]}}  {why}".rstrip() for name, size, why in table]
    given = [
        (f"{name} = {value if len(value) <= 40 else value[:36] + '...'}", origin)
        for name, value, origin in options(plan)
        if origin != "default"
    ]
    width = max(len(assigned) for assigned, _ in given)
    lines += ["", "options:", *(f"  {assigned:{width}}  {origin}" for assigned, origin in given)]
    for name, arguments in commands(plan):
        lines += ["", f"{name}:", f"  {shlex.join(arguments)}"]
    if plan.environment:
        pairs = (f"{name}={shlex.quote(value)}" for name, value in plan.environment.items())
        lines += ["", "environment:", f"  {' '.join(pairs)}"]
    if plan.findings:
        lines += ["", "to know:", *(f"  - {finding}" for finding in plan.findings)]
    return "\n".join(lines)


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan for a program: sizes in bytes, nothing secret."""
    tiers = plan.tiers
    each = budget.kv_per_token(plan.settings, plan.model)
    return {
        "model": {
            "id": plan.settings.model_id,
            "architectures": list(plan.model.architectures),
            "weight_bytes": plan.model.weight_bytes,
            "dtype": plan.model.dtype,
            "quantization": plan.model.quantization,
            "kv_bytes_per_token": each,
            "max_length": plan.model.max_length,
        },
        "draft": (
            {
                "id": draft_id(plan.settings),
                "method": plan.draft.method,
                "weight_bytes": plan.draft.facts.weight_bytes,
            }
            if plan.draft
            else None
        ),
        "machine": dataclasses.asdict(plan.machine),
        "memory": {
            "shares": [dataclasses.asdict(share) for share in plan.memory.shares],
            "free": plan.memory.free,
        },
        "gpu": {**dataclasses.asdict(plan.gpu), "kv": plan.gpu.kv} if plan.gpu else None,
        "tiers": (
            {
                "l1_bytes": tiers.l1,
                "l1_tokens": tiers.l1 // each if each else None,
                "disk_bytes": tiers.disk,
                "disk_tokens": tiers.disk // each if each else None,
                "disk_path": tiers.path,
                "disk_direct": tiers.direct,
                "shared": tiers.shared.shown if tiers.shared else None,
                "chunk_size": tiers.chunk_size,
                "reasons": dict(tiers.reasons),
            }
            if tiers
            else None
        ),
        "options": [
            {"name": name, "value": value, "origin": origin}
            for name, value, origin in options(plan)
        ],
        "commands": dict(commands(plan)),
        "environment": dict(plan.environment),
        "findings": list(plan.findings),
    }
