# SPDX-License-Identifier: Apache-2.0
"""A plan as a table that fits one screen, and as JSON. Both are without secrets."""

import contextlib
import dataclasses
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from lmi_config.facts import handler
from lmi_config.options.declared import OPTIONS
from lmi_config.options.parsers import AUTO
from lmi_config.options.redaction import escaped, masked, secret
from lmi_config.plan import memory, preflight, vllm
from lmi_config.plan.devices.copies import Copy
from lmi_config.plan.kv_tiers import DOCUMENT, NoTiers, Tiers, format_size
from lmi_config.plan.plan import Plan
from lmi_config.plan.speculation import draft_id


def options(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yield each option: its name, its value for people, and where it was set.

    Derived options are "derived", under vLLM's names; unset options are "default".
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
    """vLLM's options, with secrets masked."""
    return {name: _safe(name, value) for name, value in plan.options.items()}


_CONFIGURATIONS = frozenset(
    (
        *("attention_config", "compilation_config", "default_chat_template_kwargs"),
        *("hf_overrides", "limit_mm_per_prompt", "mm_processor_kwargs"),
        *("override_generation_config", "pooler_config", "quantization_config"),
        *("reasoning_config", "speculative_config", "structured_outputs_config"),
    )
)
"""vLLM's options whose keys are a model's fields, like pad_token_id, num_key_value_heads and
classifier_from_token. These only look like names of secrets."""


def _safe(name: str, value: Any) -> Any:
    """The value, with secrets masked."""
    if name in _CONFIGURATIONS:
        return _masked(value)
    if value and secret(name):
        return "(hidden)"
    if isinstance(value, Mapping):
        return {key: _safe(str(key), item) for key, item in value.items()}
    if isinstance(value, str):
        with contextlib.suppress(ValueError):  # no JSON, like a chat template
            if isinstance(found := json.loads(value), dict):
                return _safe(name, found)
        return masked(value)
    return tuple(map(masked, value)) if isinstance(value, tuple) else value


def _masked(value: Any) -> Any:
    """The value, with secrets masked by their shape, and passwords by their names."""
    if isinstance(value, Mapping):
        return {
            key: "(hidden)" if isinstance(it, str) and _NO_FIELD.search(str(key)) else _masked(it)
            for key, it in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(map(_masked, value))
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            if isinstance(found := json.loads(value), dict):
                return _masked(found)
        return masked(value)
    return value


_NO_FIELD = re.compile(
    r"passw|passphrase|secret|credential|(api|access|auth|bearer|hf)_?(key|token)", re.IGNORECASE
)


def _shown(name: str, value: Any) -> str:
    """Return a value for people, with secrets masked."""
    value = _safe(name, value)
    if isinstance(value, Mapping):
        return json.dumps(value)
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _tokens(size: int, each: int) -> str:
    """Return the amount of KV that fits into this many bytes, as text."""
    tokens = size // each
    return f"{tokens:,} tokens, {tokens // DOCUMENT:,} documents of {DOCUMENT // 1000}k"


def rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yield the plan's rows: label, amount, and reason or meaning. The label "" continues a row."""
    settings, machine, model = plan.settings, plan.machine, plan.model
    each = memory.kv_per_token(settings, model)
    about = [settings.model_id, *model.architectures[:1], model.dtype, model.quantization]
    yield "model", format_size(model.weight_bytes), ", ".join(part for part in about if part)
    if plan.loading.reason:
        files = len(plan.loading.arriving)
        amount = f"{files} files" if files else plan.loading.format
        yield "weights", amount, plan.loading.reason
    if each:
        drafted = " and the draft's" if plan.draft and plan.draft.facts.kv else ""
        layers = f"{model.layers or '?'} layers{drafted}"
        if model.kv and model.kv.windowed:
            part = model.kv.windowed / (model.kv.full + model.kv.windowed)
            layers += f"; {part:.0%} of it for the last {model.kv.window:,} tokens only"
        yield "KV per token", f"{each / 1024:g} KiB", layers
    if (kept := str(model.kept)) and plan.verdict.kind not in ("full", "latent"):
        yield "layers", plan.verdict.kind.replace("_", " "), f"of the KV cache: {kept}"
    longest = settings.max_model_len or model.max_length
    if longest == AUTO:
        yield "longest request", "auto", "as much as fits the KV cache; vLLM decides"
    elif longest:
        origin = settings.origins.get("max_model_len", "the model's own")
        yield "longest request", f"{longest:,} tokens", origin
    if plan.draft:
        method = (settings.speculative_config or {}).get("method") or plan.draft.method
        size = format_size(plan.draft.facts.weight_bytes)
        yield "draft", size, f"{draft_id(settings)}, {method}"
    yield from _chat(plan)
    if settings.model_folder and (settings.model_folder / handler.FILE).is_file():
        service = _service(plan)
        yield handler.FILE, "", f"{settings.model_folder}, run in a separate process"
        if service:
            yield "", "", service
        if service is handler.Service.ITS_OWN and (names := settings.for_engine):
            yield "", "", f"vLLM's, which only the handle may read: {', '.join(names)}"
    yield from _devices(plan)
    kind = "the container's limit" if machine.limited else "the host's"
    yield "memory", format_size(machine.memory), f"{kind}; {format_size(machine.memory_free)} free"
    for share in plan.memory.shares:
        yield f"  {share.name}", format_size(share.size), share.reason
    left = plan.memory.free
    if isinstance(plan.tiers, Tiers):
        left -= plan.tiers.l1
        yield "  KV tier L1", format_size(plan.tiers.l1), "below"
    yield "  left", format_size(left), ""
    yield from _tiers(plan, each)
    if cache := plan.compile_cache:
        size = format_size(cache.size) if cache.seen else "empty"
        text = "a start like this one has finished before" if cache.seen else "the first start"
        yield "compile cache", size, f"{cache.part} ({cache.origin}); {text}"
    else:
        yield "compile cache", "none", "OPTION_CACHE_FOLDER keeps it on a volume for the next start"
    yield "port", str(settings.port), settings.origins.get("port", "default")
    if settings.kv_events:
        events, log = vllm.kv_event_ports(settings, plan.parallelism.copies)
        yield "KV events", f"ports {events}, {log}", "events and their log; prompts are in them"


def _service(plan: Plan) -> handler.Service | None:
    """Whether vLLM or a model.py is the service, if the deployment has a model.py."""
    folder = plan.settings.model_folder
    return handler.look(folder, plan.settings.entry_point) if folder else None


def _chat(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """The parsers of the model's output."""
    if not vllm.generates(plan.settings):
        return
    titles = {"tool_call_parser": "tool calls", "reasoning_parser": "reasoning"}
    for name, kind in vllm.PARSERS.items():
        option = f"OPTION_{name.upper()}"
        known = getattr(plan.chat, kind)
        if name in plan.settings.engine:
            why = plan.settings.origins.get(name, "")
        elif known and name in plan.options:
            why = f"{known.reason}; {option} overrides"
        else:
            why = f"unknown for this model; {option} names one"
        yield titles[name], str(plan.options.get(name, vllm.NO_PARSER)), why


def _devices(plan: Plan) -> Iterator[tuple[str, str, str]]:
    settings, machine = plan.settings, plan.machine
    degree = plan.parallelism.tensor
    given = settings.origins.get("tensor_parallel_degree", "default: max")
    if not machine.gpus:
        quota = f", {machine.cpu_quota:g} by quota" if machine.cpu_quota else ""
        yield "devices", f"{len(machine.cpus)} CPUs{quota}", f"tensor parallel {degree} ({given})"
        yield from _copies(plan)
        return
    names = ", ".join(sorted({gpu.name for gpu in machine.gpus}))
    count = len(machine.gpus) + (len(machine.slices) if plan.copies else 0)
    yield "devices", f"{count} x {names}", f"tensor parallel {degree} ({given})"
    yield from _copies(plan)
    if plan.gpu:
        tokens = _engine_tokens(plan)
        yield (
            "each GPU",
            format_size(plan.gpu.total),
            f"vLLM may use {format_size(plan.gpu.usable)}",
        )
        yield "  weights", format_size(plan.gpu.weights), "the rank's part, and the draft's"
        yield (
            "  overhead",
            format_size(plan.gpu.overhead),
            "context, activations, graphs; an estimate",
        )
        amount = "unknown" if tokens is None else f"about {tokens:,} tokens in all"
        yield "  KV cache", format_size(max(plan.gpu.kv, 0)), amount


def _copies(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """The copies of the model with their devices; nothing for a single copy."""
    if not plan.copies:
        return
    origin = plan.settings.origins.get("copies", "default: auto")
    yield "copies", str(len(plan.copies)), f"servers behind a router in this container ({origin})"
    for copy in plan.copies:
        if plan.machine.gpus:
            has = f"{len(copy.machine.gpus)} GPU{'s' * (len(copy.machine.gpus) > 1)}"
            which = ", ".join(gpu.uuid or "unnamed" for gpu in copy.machine.gpus)
        else:
            has = f"{len(copy.machine.cpus)} CPU{'s' * (len(copy.machine.cpus) > 1)}"
            which = f"CPU {', '.join(map(str, copy.machine.cpus))}"
        where = "" if copy.node is None else f"NUMA node {copy.node}; "
        yield f"  copy {copy.number}", has, f"{where}{which}; port {copy.port}"


def _engine_tokens(plan: Plan) -> int | None:
    """The tokens whose KV the engine's cache holds, None if unknown."""
    cache = preflight.engine_cache(
        plan.settings, plan.machine, plan.parallelism, plan.model, plan.memory, plan.gpu
    )
    length = preflight.longest_request(plan.settings, plan.model) or 1
    return cache and cache.tokens(length)


def _tiers(plan: Plan, each: int | None) -> Iterator[tuple[str, str, str]]:
    tiers = plan.tiers
    if isinstance(tiers, NoTiers):
        yield "KV cache tiers", "none", tiers.reason
        return
    for name, size, reason in (
        ("L1", tiers.l1, tiers.reasons["l1"]),
        ("disk", tiers.disk.size if tiers.disk else 0, tiers.reasons["disk"]),
    ):
        yield f"KV tier {name}", format_size(size) if size else "none", reason
        if size and each:
            yield "", "", _tokens(size, each)
    if tiers.disk:
        yield "", "", f"in {tiers.disk.path}"
    if tiers.shared:
        yield "KV tier shared", "", tiers.shared.shown
    yield "KV chunk", f"{tiers.chunk_size} tokens", tiers.reasons["chunk_size"]
    if tokens := _engine_tokens(plan):
        yield "KV tiers pay", "", f"above {tokens:,} tokens in use, the engine's capacity"


def commands(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """The programs that will run: a name, and arguments with secrets masked."""
    if _service(plan) is handler.Service.ITS_OWN:
        return
    where = "in each copy" if plan.copies else "in this process"
    yield f"vLLM, {where}", vllm.arguments(_engine(plan))
    if isinstance(plan.tiers, Tiers):
        shared = plan.tiers.shared
        tiers = dataclasses.replace(
            plan.tiers, shared=shared and dataclasses.replace(shared, adapter=shared.masked)
        )
        yield "lmcache", plan.cache_command(tiers)


def _own(plan: Plan, copy: Copy) -> dict[str, str]:
    """The variables of a copy that are not those of all."""
    shared = plan.environment.items()
    return {name: value for name, value in copy.environment.items() if (name, value) not in shared}


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
    for copy in plan.copies:
        pairs = (f"{name}={shlex.quote(value)}" for name, value in _own(plan, copy).items())
        lines += [f"  copy {copy.number}: {' '.join(pairs)}"]
    if plan.findings:
        lines += ["", "to know:", *(f"  - {finding}" for finding in plan.findings)]
    return "\n".join(map(escaped, lines))


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan for a program: sizes in bytes, nothing secret."""
    each = memory.kv_per_token(plan.settings, plan.model)
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
        "copies": [
            {
                "number": copy.number,
                "gpus": [gpu.uuid for gpu in copy.machine.gpus],
                "cpus": list(copy.machine.cpus),
                "numa_node": copy.node,
                "port": copy.port,
                "environment": _own(plan, copy),
            }
            for copy in plan.copies
        ],
        "memory": {
            "shares": [dataclasses.asdict(share) for share in plan.memory.shares],
            "free": plan.memory.free,
        },
        "gpu": {**dataclasses.asdict(plan.gpu), "kv": plan.gpu.kv} if plan.gpu else None,
        "tiers": (
            _tiers_as_json(plan.tiers, each, _engine_tokens(plan))
            if isinstance(plan.tiers, Tiers)
            else None
        ),
        "attention": plan.verdict.kind,
        "no_tiers": plan.tiers.reason if isinstance(plan.tiers, NoTiers) else None,
        "kv_events": (
            dict(
                zip(
                    ("port", "log_port"),
                    vllm.kv_event_ports(plan.settings, plan.parallelism.copies),
                    strict=True,
                )
            )
            if plan.settings.kv_events
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


def summary(plan: Plan) -> dict[str, Any]:
    """Return the plan for the page: as_text()'s table, set and derived options, and findings."""
    return {
        "rows": [list(row) for row in rows(plan)],
        "options": [list(row) for row in options(plan) if row[2] != "default"],
        "findings": list(plan.findings),
    }


def _tiers_as_json(tiers: Tiers, each: int | None, engine: int | None) -> dict[str, Any]:
    disk, size = tiers.disk, tiers.disk.size if tiers.disk else 0
    return {
        "l1_bytes": tiers.l1,
        "l1_tokens": tiers.l1 // each if each else None,
        "disk_bytes": size,
        "disk_tokens": size // each if each else None,
        "disk_path": disk.path if disk else "",
        "disk_direct": bool(disk and disk.direct),
        "shared": tiers.shared.shown if tiers.shared else None,
        "chunk_size": tiers.chunk_size,
        "engine_tokens": engine,
        "reasons": dict(tiers.reasons),
    }
