# SPDX-License-Identifier: Apache-2.0
"""Files and folders that options name. Without them the start would fail after minutes."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lmi_config.facts.model import ModelFacts
from lmi_config.options.declared import Settings
from lmi_config.plan.refusals.given import limits


class NamedFile(NamedTuple):
    """A required file. option: the operator's name of the option, with its value. fix: the fix if
    the file is missing.
    """

    option: str
    path: Path
    folder: bool
    fix: str


def needed(
    settings: Settings,
    options: Mapping[str, Any],
    model: ModelFacts,
    adapters: Iterable[tuple[str, str]],
) -> Iterator[NamedFile]:
    """Yield the required files, except those of models and drafts, which were checked before.

    options: vLLM's. adapters: names and places of adapters that options name.
    """
    for name, place in adapters:
        if "://" not in place:
            told = f"{settings.named('lora_modules')}: {name}={place}"
            yield NamedFile(told, Path(place), True, "name the folder with the adapter's files")
    if not {*model.architectures} & {*limits()["multimodal"]}:
        return
    for option, folder in (("scale_path", False), ("scale_save_path", True)):
        key = f"mm_encoder_fp8_{option}"
        if isinstance(path := options.get(key), str):
            where = Path(path).parent if folder else Path(path)
            yield NamedFile(f"{settings.named(key)}={path}", where, folder, "correct it")


def faults(
    settings: Settings,
    options: Mapping[str, Any],
    model: ModelFacts,
    adapters: Iterable[tuple[str, str]],
) -> list[str]:
    """Return a sentence for each missing file."""
    found = []
    for it in needed(settings, options, model, adapters):
        if not (it.path.is_dir() if it.folder else it.path.is_file()):
            kind = "folder" if it.folder else "file"
            found.append(f"{it.option}: there is no such {kind}; {it.fix}")
    return found
