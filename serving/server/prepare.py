# SPDX-License-Identifier: Apache-2.0
"""The environment → a Deployment. Reads options, files and the machine. Starts nothing."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmi_config.facts import chat, draft, handler, machine, model
from lmi_config.facts.machine import Machine, Place
from lmi_config.facts.model import Checkpoint, Folder, ModelError, ModelFacts
from lmi_config.options import secure, settings
from lmi_config.options.declared import Settings, vllm_knows
from lmi_config.options.option_files import Given
from lmi_config.options.settings import SettingsError
from lmi_config.plan import compile_cache, kv_tiers, plan, speculation
from lmi_config.plan.compile_cache import CompileCache
from lmi_config.plan.plan import EngineParts, Plan
from lmi_config.plan.refusals import named_files
from serving import folders
from serving.access.access import Access
from serving.batch.objects import OtherCopies
from serving.http.tls import ServerTls
from serving.sources.locate import locate
from serving.sources.source import Source, SourceError

PARTS = EngineParts(
    connector="serving.engine.kv_connector.FaultTolerantConnector",
    transferring="serving.engine.nixl_connector.NixlConnector",
    disk_store="serving.kv_cache.lmcache.disk_store.ChecksummedFiles",
)
"""Names of classes that are not imported here: planning works without vLLM and LMCache."""
LOOPBACK = "127.0.0.1"
LARGEST = 4 * 2**20
"""Most bytes of a template."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    """The work that a supervisor has done once for all of its copies. folder, draft: the folders of
    the model and its draft. name: the model's folder as the cache server knows it. without_tiers:
    the reason why the copy is served without KV cache tiers, or empty. others: the other copies,
    for lines of batches.
    """

    folder: Path
    draft: Path | None
    name: Path
    without_tiers: str
    others: OtherCopies | None = None


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A deployment to serve: a plan, and the sources of the model and its draft. shared: a
    supervisor's work if this is one of several copies; the copy then listens on loopback only.
    """

    plan: Plan
    model: Source
    draft: Source | None
    shared: Shared | None = None


_NOTHING: Mapping[str, Given] = {}


def prepare(
    environ: Mapping[str, str],
    argued: Mapping[str, Given] = _NOTHING,
    share: Machine | None = None,
) -> Deployment:
    """Read everything once and plan the deployment. Raises SettingsError with all faults.

    argued: the command line's options. share: for one of several models, the machine without them.
    """
    options = settings.read(environ, argued, within=share is not None)
    if share is None and (options.models or options.multi_model):
        named = options.named("models" if options.models else "multi_model")
        raise SettingsError([f"{named}: only serve and plan know several models; leave it out"])
    _require_secure(options)
    Access(options)  # reads the keys file
    ServerTls(options)  # reads the certificates
    with _blaming(options, "model_id", "OPTION_MODEL_ID"):
        source = _locate(options.model_id, options, environ, options.revision).listed()
        checkpoint = source.checkpoint()
        facts = _facts(options, checkpoint)
        formats = chat.look(checkpoint, facts.model_type, _chat_template(options))
        to_fetch, place = _to_fetch(checkpoint, facts), _place(checkpoint)
    draft_source, drafted = None, None
    with _blaming(options, "speculative_draft_model", "OPTION_SPECULATIVE_CONFIG"):
        if draft_id := speculation.draft_id(options):
            revision = (options.speculative_config or {}).get("revision")
            draft_source = _locate(draft_id, options, environ, revision).listed()
            checkpoint = draft_source.checkpoint()
            drafted = draft.look(checkpoint)
            to_fetch += _to_fetch(checkpoint, drafted.facts)
    lmcache = _lmcache_file(options)
    servers = 0 if options.copies == "auto" else options.copies
    disk = kv_tiers.disk_path(options, environ, lmcache)
    here = share or machine.look(environ, disk, servers=servers)
    room = source.room()
    made = plan.make(
        *(options, here, facts, drafted, environ, PARTS, lmcache, to_fetch, room),
        chat=formats,
        alone=_alone(options),
        compile_cache=_compile_cache(options, environ, here),
        place=place,
    )
    if faults := named_files.faults(made.settings, made.options, made.model, made.lora_modules):
        raise SettingsError(faults)
    return Deployment(made, source, draft_source)


def _compile_cache(
    options: Settings, environ: Mapping[str, str], here: Machine
) -> CompileCache | None:
    """The folder for compiled files, or None if they are not kept."""
    downloads = {
        options.origins.get("download_dir", ""): options.download_dir,
        "HF_HOME": environ.get("HF_HOME"),
    }
    named = {name: path for name, path in downloads.items() if path}
    folder, option = options.cache_folder, "cache_folder"
    if not folder and options.cache_source:
        folder, option = str(folders.place("compiled")), "cache_source"
    return compile_cache.look(folder, named, here.gpus, options.origins.get(option, ""))


def _alone(options: Settings) -> str:
    """Return why a router could not check keys and limits like a single server, or ""."""
    secret = options.router_secret or "0" * 32
    try:
        Access(dataclasses.replace(options, router_secret=secret), routes=True)
    except SettingsError as error:
        return "; ".join(error.faults)
    return ""


def _facts(options: Settings, checkpoint: Checkpoint) -> ModelFacts:
    """Return the facts in the model's files. Returns UNKNOWN if they cannot be read, but the
    model's own handler serves it without vLLM. Raises ModelError.
    """
    try:
        overrides = _overrides(options)
        return model.look(checkpoint, options.load_format != "dummy", overrides)
    except ModelError as error:
        folder = options.model_folder
        service = handler.look(folder, options.entry_point) if folder else None
        if service is handler.Service.ITS_OWN:
            return model.UNKNOWN
        if service is handler.Service.EITHER:
            say = f"if {handler.FILE} has its own engine, set OPTION_ENTRYPOINT={handler.FILE}"
            raise ModelError(f"{error}; {say}") from None
        raise


def _overrides(options: Settings) -> Mapping[str, Any]:
    """Return the values that override the model's configuration. vLLM refuses a text that is not a
    JSON object.
    """
    given = options.engine.get("hf_overrides")
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else model.NO_OVERRIDES


def _require_secure(options: Settings) -> None:
    """Raise SettingsError for options and files that secure mode forbids."""
    if not options.secure_mode:
        return
    channels: dict[str, list[secure.File] | None] = {}
    own: dict[str, list[secure.File]] = {}
    try:
        for channel in options.untrusted_channels:
            folder = Path(channel)
            channels[channel] = secure.look(folder) if folder.is_dir() else None
        for place in (options.model_folder, Path(options.model_id)):
            if place and place.is_dir():
                own[str(place)] = [secure.File(entry.name) for entry in place.iterdir()]
    except OSError as error:
        raise SettingsError([f"secure mode: {error.filename}: {error.strerror}"]) from None
    if faults := secure.faults(options, channels, own):
        raise SettingsError(faults)


def _to_fetch(checkpoint: Checkpoint, facts: ModelFacts) -> int:
    """Return the bytes of weights that must be fetched."""
    return 0 if isinstance(checkpoint, Folder) else facts.weight_bytes


def _place(checkpoint: Checkpoint) -> Place | None:
    """Return the place of a folder's weights, or None."""
    sizes = {name: size for name, size in checkpoint.sizes.items() if name.endswith(".safetensors")}
    if not isinstance(checkpoint, Folder) or not sizes:
        return None
    return machine.place_of(Path(checkpoint.where) / max(sizes, key=lambda name: sizes[name]))


def _locate(
    name: str, options: Settings, environ: Mapping[str, str], revision: str | None
) -> Source:
    return locate(name, environ, revision=revision, downloads=options.download_dir)


@contextmanager
def _blaming(options: Settings, field: str, otherwise: str) -> Iterator[None]:
    """Raise the faults of a model as faults of the option that names it."""
    option = options.origins.get(field, otherwise)
    try:
        yield
    except SourceError as error:
        raise SettingsError([f"{option}={error}"]) from None
    except ModelError as error:
        raise SettingsError([f"{option}: {error}"]) from None


def _chat_template(options: Settings) -> str | None:
    """Return the template that replaces the model's own: a file's content, or the option's text.

    A template is distinguished from a file's name as in vLLM (_load_chat_template). Raises
    SettingsError.
    """
    given = options.engine.get("chat_template")
    if not isinstance(given, str):
        return None
    try:
        with Path(given).open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ValueError(f"the file has more than {LARGEST} bytes")
        return content.decode()
    except (OSError, ValueError) as error:
        if {*given} & {*"{}\n"} or given in vllm_knows("chat_template"):
            return given
        reason = error.strerror if isinstance(error, OSError) else error
        where = f"{options.named('chat_template')}={given!r}"
        raise SettingsError([f"{where}: {reason}; give a file's path or the template"]) from None


def _lmcache_file(options: Settings) -> Mapping[str, object] | None:
    """Return the content of LMCache's configuration file, or None. A relative name is in the
    model's folder. Raises SettingsError.
    """
    if not options.lmcache_config_file:
        return None
    from lmi_config.facts import strict_yaml

    path = (options.model_folder or Path()) / options.lmcache_config_file
    where = f"{options.origins['lmcache_config_file']}={str(path)!r}"
    try:
        content = strict_yaml.read_file(path)
    except OSError as error:
        raise SettingsError([f"{where}: {error.strerror}"]) from None
    except strict_yaml.NotYAML as error:
        raise SettingsError([f"{where}: {error}"]) from None
    if not isinstance(content, dict):
        raise SettingsError([f"{where}: should have lines like `chunk_size: 256`"])
    return content
