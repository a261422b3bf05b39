# SPDX-License-Identifier: Apache-2.0
"""The models that a container may run, with their plans. Starts nothing."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmi_config.facts import machine
from lmi_config.facts.machine import HELPERS, Machine
from lmi_config.options import settings
from lmi_config.options.declared import OPTIONS, PREFIX, Section, Settings
from lmi_config.options.option_files import Given
from lmi_config.options.parsers import boolean
from lmi_config.options.settings import SettingsError
from lmi_config.plan import memory
from lmi_config.plan.kv_tiers import Tiers, format_size
from lmi_config.plan.memory import Footprint
from serving.access.access import Access
from serving.server.prepare import LOOPBACK, Deployment, prepare

PORTS = HELPERS + 1
"""Ports of each model: its cache server's, and its own."""
PINNED = "pinned"
"""The key of a model that never makes room."""
_OF_A_MODEL = (
    *(Section.MODEL, Section.DEVICES, Section.BATCHING, Section.KV_TIERS),
    *(Section.SPECULATION, Section.LORA),
)
_MORE = frozenset(
    (
        *("job_queue_size", "predict_timeout", "model_loading_timeout", "slo_ttft_ms"),
        *("slo_itl_ms", "default_accept", "allowed_media_domains", "max_audio_seconds"),
        *("formatter_timeout", "formatter_memory", "enable_tokenize"),
    )
)
"""Further options that may differ between models."""
_WHOLE = frozenset(
    ("models", "multi_model", "models_memory", "model_roots", "copies", "copies_least")
)
"""Options of these sections that are about the container."""
_NAMED_ELSEWHERE = (
    *("HF_MODEL_ID", "OPTION_MODEL_ID", "OPTION_MODEL", "SM_VLLM_MODEL", "SERVING_MODEL_STORE"),
    *("OPTION_MODELS", "SAGEMAKER_MULTI_MODEL", "SM_VLLM_SERVED_MODEL_NAME"),
    *("OPTION_SERVED_MODEL_NAME", "OPTION_ENDPOINT_NAME"),
)
"""Variables of the container that name one model, or all."""
_NOWHERE = "/dev/null/model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offer:
    """One model. url: where it comes from, as the operator or SageMaker names it. given: its own
    options, whose secrets must not reach a log. awake: its memory while it runs. asleep: its memory
    while its engine sleeps; None if it can only be stopped. pinned: whether it never makes room.
    """

    name: str
    url: str
    given: Mapping[str, Given] = dataclasses.field(repr=False)
    deployment: Deployment
    awake: Footprint
    asleep: Footprint | None
    pinned: bool

    @property
    def port(self) -> int:
        return self.deployment.plan.settings.port

    @property
    def ports(self) -> tuple[int, ...]:
        """All its ports."""
        return (*self.deployment.plan.machine.ports, self.port)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offers:
    """All models of a container. environ, argued: the options that they share. machine: as it was
    before any model ran. room: the memory for all of them.
    """

    settings: Settings
    environ: Mapping[str, str]
    argued: Mapping[str, Given]
    machine: Machine
    room: Footprint
    models: tuple[Offer, ...]

    @property
    def dynamic(self) -> bool:
        """Whether calls load and unload models."""
        return self.settings.multi_model

    def loaded(self, name: str, url: str, ports: tuple[int, ...]) -> Offer:
        """Plan a model of SageMaker's call. It stays in memory until it is unloaded. ports: PORTS
        free ones. Raises SettingsError.
        """
        found = folder(url, self.settings.model_roots)
        given = {"SERVING_MODEL_STORE": Given(str(found), "url")}
        return _offer(self, name, url, given, ports, pinned=True)


def offers(environ: Mapping[str, str], argued: Mapping[str, Given]) -> Offers | None:
    """Plan several models; None if the options are about a single one. Raises SettingsError."""
    options = settings.read(environ, argued)
    if not options.models and not options.multi_model:
        return None
    if faults := [*_faults(options)]:
        raise SettingsError(faults)
    # It has the container's own limits: a router checks them for all models.
    Access(
        dataclasses.replace(options, router_secret=options.router_secret or "0" * 32), routes=True
    )
    listed = options.models or {}
    here = machine.look(environ, servers=PORTS * len(listed) - HELPERS if listed else 0)
    found = Offers(
        settings=options,
        environ={name: it for name, it in environ.items() if name not in _NAMED_ELSEWHERE},
        argued={name: it for name, it in argued.items() if name not in _NAMED_ELSEWHERE},
        machine=here,
        room=memory.room(options, here),
        models=(),
    )
    if listed and len(here.ports) < PORTS * len(listed):
        raise SettingsError(
            [
                f"SAGEMAKER_SAFE_PORT_RANGE: {len(listed)} models need {PORTS * len(listed)} free "
                f"ports, and there are {len(here.ports)}; widen it, or list fewer models"
            ]
        )
    models = []
    for number, (name, given) in enumerate(listed.items()):
        ports = here.ports[number * PORTS : (number + 1) * PORTS]
        models.append(_listed(found, name, given, ports))
    if faults := [*_too_large(models, found.room)]:
        raise SettingsError(faults)
    return dataclasses.replace(found, models=tuple(models))


def _faults(options: Settings) -> Iterator[str]:
    """Yield what does not go together with several models, a sentence each."""
    several = options.named("models" if options.models else "multi_model")
    if options.models and options.multi_model:
        name = options.named("multi_model")
        yield f"{name} and {several}: calls load models, or a list names them; keep one"
    if options.copies not in ("auto", 1):
        name = options.named("copies")
        yield f"{name}={options.copies}: each of several models has one copy; leave {name} out"
    if options.router_processes > 1:
        name = options.named("router_processes")
        yield f"{name}={options.router_processes}: {several} needs one process of the router"
    if options.server_role != "both":
        name = options.named("server_role")
        yield f"{name}={options.server_role}: a server with a role has one model; leave it out"
    for field in ("batch_folder", "cors_allowed_origin"):
        if getattr(options, field):
            yield f"{options.named(field)} works with one model only; leave it out"


def _listed(found: Offers, name: str, given: Mapping[str, str], ports: tuple[int, ...]) -> Offer:
    place = f"{found.settings.origins['models']}: {name}"
    options, faults = {}, []
    pinned = False
    for key, text in given.items():
        if key == PINNED:
            try:
                pinned = boolean(text)
            except ValueError as error:
                faults.append(f"{place}: {key}: should be {error}")
            continue
        variable = PREFIX + key.removeprefix("option.").replace("-", "_").upper()
        field = settings.option(variable)
        option = OPTIONS.get(field)
        if option and (field in _WHOLE or not (option.section in _OF_A_MODEL or field in _MORE)):
            faults.append(f"{place}: {key}: is the whole container's; set it beside `models`")
        elif text:
            options[variable] = Given(text, f"{place}: {key}")
    if "OPTION_MODEL_ID" not in options and "OPTION_MODEL" not in options:
        faults.append(f"{place}: `model_id` is missing: a folder, an s3:// prefix or a hub id")
    if faults:
        raise SettingsError(faults)
    url = options.get("OPTION_MODEL_ID", options.get("OPTION_MODEL", Given("", ""))).text
    options["SERVING_MODEL_STORE"] = Given(_NOWHERE, place)
    return _offer(found, name, url, options, ports, pinned=pinned)


def _offer(
    found: Offers,
    name: str,
    url: str,
    given: Mapping[str, Given],
    ports: tuple[int, ...],
    *,
    pinned: bool,
) -> Offer:
    argued = {**found.argued, **given, "OPTION_COPIES": Given("1", "models")}
    share = dataclasses.replace(found.machine, ports=ports[:HELPERS])
    try:
        deployment = prepare(found.environ, argued, share)
    except SettingsError as error:
        raise SettingsError([f"model {name}: {fault}" for fault in error.faults]) from None
    plan = deployment.plan
    own = dataclasses.replace(
        plan.settings,
        host=LOOPBACK,
        port=ports[HELPERS],
        served_model_name=tuple(dict.fromkeys((name, *plan.settings.model_names))),
        endpoint_name=None,
    )
    options = {**plan.options, "served_model_name": own.model_names}
    own_plan = dataclasses.replace(plan, settings=own, options=options)
    tiers = plan.tiers.l1 if isinstance(plan.tiers, Tiers) else 0
    awake = memory.footprint(plan.memory, plan.gpu, found.machine, tiers)
    # A cache server has the GPU's KV cache mapped, which sleep would free under it.
    sleeps = plan.options.get("enable_sleep_mode") and not isinstance(plan.tiers, Tiers)
    return Offer(
        name=name,
        url=url,
        given=given,
        deployment=dataclasses.replace(deployment, plan=own_plan),
        awake=awake,
        asleep=memory.asleep(awake, plan.gpu, found.machine) if sleeps else None,
        pinned=pinned,
    )


def folder(url: str, roots: tuple[str, ...]) -> Path:
    """Return the folder of a call's model. Raises SettingsError if it may not be used."""
    try:
        path = Path(url.removeprefix("file://")).resolve()
    except (ValueError, OSError, RuntimeError):  # a NUL, a loop of links
        raise SettingsError([f"url={url!r:.500} should be a path"]) from None
    if not any(path.is_relative_to(Path(root).resolve()) for root in roots):
        raise SettingsError(
            [f"url={url!r:.500}: models may be under {', '.join(roots)} (OPTION_MODEL_ROOTS)"]
        )
    if not path.is_dir():
        raise SettingsError(
            [f"url={url!r:.500}: there is no such folder; name the one with the model's files"]
        )
    return path


def needs(offer: Offer, pinned: Footprint, room: Footprint) -> str:
    """Return why there can never be room for a model, or "". pinned: the memory of the models that
    make no room.
    """
    if (offer.awake + pinned).fits(room):
        return ""
    beside = f", beside {_shown(pinned)} of models that stay" if pinned != Footprint(0) else ""
    return (
        f"model {offer.name}: needs {_shown(offer.awake)}{beside}, and there is room for "
        f"{_shown(room)}; lower OPTION_KV_CACHE_MEMORY_BYTES or the KV cache tiers' sizes, or use "
        "a larger machine"
    )


def _too_large(models: list[Offer], room: Footprint) -> Iterator[str]:
    pinned = Footprint(0)
    for it in sorted(models, key=lambda it: not it.pinned):
        if fault := needs(it, pinned, room):
            yield fault
        if it.pinned:
            pinned += it.awake


def _shown(size: Footprint) -> str:
    gpu = f" and {format_size(size.gpu)} of each GPU" if size.gpu > 1 else ""
    return format_size(size.host) + gpu


def as_text(found: Offers) -> str:
    """Return the plan of several models, for people."""
    lines = [f"room for models: {_shown(found.room)}"]
    if found.dynamic:
        lines.append("models: loaded and unloaded by calls to /models")
    for it in found.models:
        pinned = ", pinned: it makes no room for others" if it.pinned else ""
        asleep = f", {_shown(it.asleep)} while it sleeps" if it.asleep else ""
        lines.append(f"{it.name}: {it.url}, {_shown(it.awake)} while it runs{asleep}{pinned}")
    if found.models:
        whole = sum((it.awake for it in found.models), Footprint(0))
        all_fit = "all fit" if whole.fits(found.room) else "they take turns"
        lines.append(f"all together: {_shown(whole)}; {all_fit}")
    return "\n".join(lines)


def as_json(found: Offers) -> dict[str, Any]:
    """Return the same, for programs: bytes."""
    return {
        "room": dataclasses.asdict(found.room),
        "models": {
            it.name: {
                "url": it.url,
                "awake": dataclasses.asdict(it.awake),
                "asleep": it.asleep and dataclasses.asdict(it.asleep),
                "pinned": it.pinned,
            }
            for it in found.models
        },
    }
