# SPDX-License-Identifier: Apache-2.0
"""Files and folders that options name, without which the start would fail after minutes."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lmi_config.plan.plan import Plan
from lmi_config.plan.refusals.given import limits
from lmi_config.plan.vllm import LORA_MODULES


class Needed(NamedTuple):
    """option: as the operator calls it, with its value. fix: what to do where it is not there."""

    option: str
    path: Path
    folder: bool
    fix: str


def needed(plan: Plan) -> Iterator[Needed]:
    """What has to be there. Models and drafts are looked at before a plan is made."""
    settings, options = plan.settings, plan.options
    name = settings.named(LORA_MODULES)
    for module in plan.lora_modules:
        if "://" not in module.src:
            told = f"{name}: {module.name}={module.src}"
            yield Needed(told, Path(module.src), True, "name the folder with the adapter's files")
    if not {*plan.model.architectures} & {*limits()["multimodal"]}:
        return
    for option, folder in (("scale_path", False), ("scale_save_path", True)):
        key = f"mm_encoder_fp8_{option}"
        if isinstance(path := options.get(key), str):
            place = Path(path).parent if folder else Path(path)
            yield Needed(f"{settings.named(key)}={path}", place, folder, "correct it")


def faults(plan: Plan) -> list[str]:
    """A sentence for each that is not there."""
    found = []
    for it in needed(plan):
        if not (it.path.is_dir() if it.folder else it.path.is_file()):
            kind = "folder" if it.folder else "file"
            found.append(f"{it.option}: there is no such {kind}; {it.fix}")
    return found
