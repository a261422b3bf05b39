# SPDX-License-Identifier: Apache-2.0
"""SageMaker's secure mode: the allowed contents and effects of untrusted files.

The platform sets the controls (SAGEMAKER_SECURITY_CONTROLS) and the untrusted folders
(SAGEMAKER_UNTRUSTED_CHANNELS). LMI checks the same in its plugin `secure-mode`. In addition,
Slipway refuses links that lead out of a folder, finds templates in every file that transformers
reads them from, and applies all checks to adapters. The environment is trusted, except for options
that a control forbids by name.
"""

import functools
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from lmi_config.facts.model import Checkpoint
from lmi_config.options.declared import (
    OPTIONS,
    PICKLE_FILES,
    REMOTE_CODE,
    REQUIREMENTS,
    SCRIPTS,
    TEMPLATE,
    VLLM_UNTRUSTED,
    Settings,
)

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_TEMPLATES = (".jinja", ".jinja2", ".j2")
_WITH_TEMPLATES = (
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "chat_template.json",
)
LARGEST = 16 * 2**20
"""Maximum bytes of such a file; a longer one cannot be checked for a template."""
_TOLD = 3  # most files of one kind that a fault names

_MODELS = ("model_id", "speculative_draft_model")
"""A file in an untrusted channel may set these if they lead into an untrusted channel, which is
checked.
"""

_FILES = {
    "chat_template": TEMPLATE,
    "tool_parser_plugin": SCRIPTS,
    "reasoning_parser_plugin": SCRIPTS,
}
"""Options that name a file. It must not be in an untrusted channel under these controls."""


class File(NamedTuple):
    """A file, folder or link. name: within its folder, with "/" between folders.

    outside: a link that leads out of the folder. template: it is JSON with a chat template in it.
    """

    name: str
    outside: bool = False
    template: bool = False


def look(folder: Path) -> list[File]:
    """Return all entries of a folder, at any depth. Raises OSError for unreadable files."""

    def fail(error: OSError) -> None:
        raise error

    root = folder.resolve()
    found = []
    for where, folders, files in os.walk(root, onerror=fail):
        for entry in (*folders, *files):
            path = Path(where, entry)
            name = path.relative_to(root).as_posix()
            target = path.resolve()
            if path.is_symlink() and not target.is_relative_to(root):
                found.append(File(name, outside=True))
            else:
                read = functools.partial(_content, path)
                found.append(File(name, template=path.is_file() and _templated(name, read)))
    return found


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(LARGEST + 1)


def listed(checkpoint: Checkpoint) -> list[File]:
    """Return the same for a checkpoint that may be remote. Raises ModelError."""
    return [
        File(name, template=_templated(name, functools.partial(checkpoint.head, name, LARGEST + 1)))
        for name in checkpoint.sizes
    ]


def _templated(name: str, read: Callable[[], bytes]) -> bool:
    if PurePosixPath(name).name not in _WITH_TEMPLATES:
        return False
    content = read()
    try:
        found = json.loads(content) if len(content) <= LARGEST else None
    except (ValueError, RecursionError):
        return True  # it may have a template
    return not isinstance(found, dict) or found.get("chat_template") is not None


def faults(
    settings: Settings,
    channels: Mapping[str, Collection[File] | None],
    own: Mapping[str, Collection[File]],
) -> list[str]:
    """Return why the deployment is forbidden, a sentence each.

    channels: the result of look() for each untrusted channel; None if there is no such folder. own:
    the top-level names of the folders whose model.py would run, at any place.
    """
    if not settings.secure_mode:
        return []
    controls = settings.security_controls
    found = []
    if not controls:
        found.append(
            "SAGEMAKER_SECURE_MODE=true: SAGEMAKER_SECURITY_CONTROLS is not set; list the "
            "controls in it, comma-separated"
        )
    for channel, files in channels.items():
        if files is None:
            found.append(f"SAGEMAKER_UNTRUSTED_CHANNELS: {channel!r} is no folder; check its path")
        else:
            found += file_faults(controls, channel, files)
    for folder, files in own.items():
        if not _untrusted(settings, Path(folder)):
            found += file_faults({SCRIPTS, REQUIREMENTS} & {*controls}, folder, files)
    if settings.trust_remote_code and REMOTE_CODE in controls:
        found.append(f"{settings.origins['trust_remote_code']} is true; {REMOTE_CODE} forbids it")
    if settings.entry_point == "model.py" and SCRIPTS in controls:
        found.append(f"{settings.origins['entry_point']} is model.py; {SCRIPTS} forbids it")
    return found + _option_faults(settings)


def file_faults(controls: Collection[str], folder: str, files: Iterable[File]) -> list[str]:
    """Return the violations of a folder or an adapter, one sentence for each kind."""
    named = [(file, PurePosixPath(file.name).name.lower()) for file in files]
    found = []
    for control, is_it, why in _FORBIDDEN:
        names = [f"{folder}/{file.name}" for file, name in named if is_it(file, name)]
        if names and (control is None or control in controls):
            more = f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
            found.append(f"{', '.join(names[:_TOLD])}{more}: {why}")
    return found


# A control, or None for rules that always apply; the files that it forbids; the words for them.
_FORBIDDEN: tuple[tuple[str | None, Callable[[File, str], bool], str], ...] = (
    (None, lambda file, _: file.outside, "links must not lead out of a folder in secure mode"),
    (REQUIREMENTS, lambda _, name: name == "requirements.txt", f"{REQUIREMENTS} forbids it"),
    (
        PICKLE_FILES,
        lambda _, name: name.endswith(_PICKLES),
        f"a pickle can run code, and {PICKLE_FILES} forbids it; save it as safetensors",
    ),
    (SCRIPTS, lambda _, name: name == "model.py", f"{SCRIPTS} forbids it"),
    (
        TEMPLATE,  # GGUF files have templates in their heads
        lambda file, name: file.template or name.endswith((*_TEMPLATES, ".gguf")),
        f"{TEMPLATE} forbids the chat template in it",
    ),
)


def _option_faults(settings: Settings) -> list[str]:
    """Options with a forbidden source or a forbidden target."""
    found = []
    given = {**dict.fromkeys(settings.lmcache), **settings.engine}
    given |= {field: getattr(settings, field) for field in OPTIONS}
    for option, file in settings.files.items():
        value = given[option]
        if _may_be_set(option) or not _untrusted(settings, file):
            continue
        if option in OPTIONS and value == OPTIONS[option].default:
            continue
        if option in _MODELS and _untrusted(settings, Path(value)):
            continue
        found.append(
            f"{settings.origins.get(option, option)}: {file} is in an untrusted channel and may "
            "not set it in secure mode; take it out, and set it in the environment"
        )
    for option, control in _FILES.items():
        value = given.get(option)
        if value and control in settings.security_controls and _untrusted(settings, Path(value)):
            name = settings.origins[option]
            found.append(f"{name}: {value} is in an untrusted channel; {control} forbids it")
    lmcache = (settings.model_folder or Path()) / (settings.lmcache_config_file or "/")
    if settings.lmcache_config_file and _untrusted(settings, lmcache):
        found.append(
            f"{settings.origins['lmcache_config_file']}: {lmcache} is in an untrusted channel and "
            "may not configure LMCache in secure mode; set LMCACHE_* in the environment"
        )
    return found


def _may_be_set(option: str) -> bool:
    """Whether a file in an untrusted channel may set an option: a field, or one of vLLM's own."""
    return OPTIONS[option].untrusted if option in OPTIONS else option in VLLM_UNTRUSTED


def _untrusted(settings: Settings, path: Path) -> bool:
    """Whether a path leads into an untrusted channel."""
    try:
        path = path.resolve()
    except ValueError:  # a NUL
        return False
    return any(path.is_relative_to(Path(it).resolve()) for it in settings.untrusted_channels)
