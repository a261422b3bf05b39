"""The environment → a Plan, with all that has to be looked at on the way. Starts nothing."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lmi_config import draft, machine, model, plan, secure, settings
from lmi_config.model import Checkpoint, Folder, ModelError, ModelFacts
from lmi_config.options import Settings
from lmi_config.plan import Plan
from lmi_config.settings import SettingsError
from serving import sources
from serving.sources import Source, SourceError


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A plan, and where the model and its draft come from."""

    plan: Plan
    model: Source
    draft: Source | None


def prepare(environ: Mapping[str, str]) -> Prepared:
    """Look at everything once and decide. Raises SettingsError with what is wrong."""
    asked = settings.read(environ)
    _require_secure(asked)
    here = machine.look(environ, asked.kv_disk_path)
    drafted = None
    with _told(asked, "model_id", "OPTION_MODEL_ID"):
        source = _located(asked.model_id, asked, environ, asked.revision)
        checkpoint = source.checkpoint()
        facts = model.look(checkpoint, weights=asked.load_format != "dummy")
        to_fetch = _to_fetch(checkpoint, facts)
    draft_source = None
    with _told(asked, "speculative_draft_model", "OPTION_SPECULATIVE_CONFIG"):
        if named := plan.draft_id(asked):
            revision = (asked.speculative_config or {}).get("revision")
            draft_source = _located(named, asked, environ, revision)
            checkpoint = draft_source.checkpoint()
            drafted = draft.look(checkpoint)
            to_fetch += _to_fetch(checkpoint, drafted.facts)
    decided = plan.make(
        asked, here, facts, drafted, environ, _lmcache_file(asked), to_fetch, source.room()
    )
    return Prepared(decided, source, draft_source)


def _require_secure(asked: Settings) -> None:
    """Raise SettingsError for what secure mode forbids."""
    if not asked.secure_mode:
        return
    channels: dict[str, list[secure.File] | None] = {}
    own: dict[str, list[secure.File]] = {}
    try:
        for channel in asked.untrusted_channels:
            folder = Path(channel)
            channels[channel] = secure.look(folder) if folder.is_dir() else None
        for place in (asked.model_folder, Path(asked.model_id)):
            if place and place.is_dir():
                own[str(place)] = [secure.File(entry.name) for entry in place.iterdir()]
    except OSError as error:
        raise SettingsError([f"secure mode: {error.filename}: {error.strerror}"]) from None
    if faults := secure.faults(asked, channels, own):
        raise SettingsError(faults)


def _to_fetch(checkpoint: Checkpoint, facts: ModelFacts) -> int:
    """Bytes of weights that are not here yet."""
    return 0 if isinstance(checkpoint, Folder) else facts.weight_bytes


def _located(
    name: str, asked: Settings, environ: Mapping[str, str], revision: str | None
) -> Source:
    return sources.locate(name, environ, revision=revision, downloads=asked.download_dir)


@contextmanager
def _told(asked: Settings, field: str, otherwise: str) -> Iterator[None]:
    """Raise what is wrong with a model as a fault of the option that names it."""
    try:
        yield
    except SourceError as error:
        raise SettingsError([f"{asked.origins.get(field, otherwise)}={error}"]) from None
    except ModelError as error:
        raise SettingsError([f"{asked.origins.get(field, otherwise)}: {error}"]) from None


def _lmcache_file(asked: Settings) -> Mapping[str, object] | None:
    """The content of LMCache's own configuration file. A relative name is in the model's folder."""
    import yaml

    if not asked.lmcache_config_file:
        return None
    path = (asked.model_folder or Path()) / asked.lmcache_config_file
    name = asked.origins["lmcache_config_file"]
    try:
        found = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError([f"{name}={str(path)!r}: {error.strerror}"]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise SettingsError([f"{name}={str(path)!r}: not YAML: {problem}"]) from None
    if not isinstance(found, dict):
        raise SettingsError([f"{name}={str(path)!r}: should have lines like `chunk_size: 256`"])
    return found
