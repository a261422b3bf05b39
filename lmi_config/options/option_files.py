# SPDX-License-Identifier: Apache-2.0
"""Options in files: LMI's serving.properties, and YAML for values that no variable can hold."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from lmi_config.options.declared import PREFIX

PROPERTIES = "serving.properties"
LARGEST = 2**20
"""Most bytes of a file."""
YAML = "slipway.yaml"
MODELS = f"{PREFIX}MODELS"
"""Several models. Only the file of OPTION_CONFIG_FILE and the environment may list them."""

_ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".mar")
_VARIABLES = (PREFIX, "SERVING_", "SAGEMAKER_", "HF_", "LMCACHE_")


class Given(NamedTuple):
    """An option as it was set. name: the operator's spelling, and its place. file: its file, or
    None.
    """

    text: str
    name: str
    file: Path | None = None


class FileFault(ValueError):
    """A file with options cannot be used. The message has the file and the reason."""


def model_folder(store: Path, model: Path | None) -> Path | None:
    """Return the folder of the deployment's files, or None.

    store: the folder that SageMaker fills; model: the local folder of a named model. The store
    takes precedence, as in LMI, unless only the model's folder has options.

    Raises FileFault if the store has several models and the model is not named.
    """
    found = _unwrapped(store, model is None)
    if model and model.is_dir():
        names = (PROPERTIES, YAML)
        if not found or not any((found / name).is_file() for name in names):
            return model
    return found


def _unwrapped(store: Path, must_be_one: bool) -> Path | None:
    """Return the store, or the only model folder in it.

    LMI's rule: if the store contains only folders and archives, each is a separate model; one plain
    file or hidden name makes the whole store one model.
    """
    entries = sorted(store.iterdir()) if store.is_dir() else []
    folders = [entry for entry in entries if entry.is_dir() and any(entry.iterdir())]
    archives = [entry for entry in entries if entry.name.endswith(_ARCHIVES)]
    hidden = any(entry.name.startswith(".") for entry in entries)
    if not entries:
        return None
    if hidden or len(archives) + sum(entry.is_dir() for entry in entries) < len(entries):
        return store
    if [folder.name for folder in folders] == ["adapters"]:
        return store
    if len(folders) == 1 and not archives:
        return _unwrapped(folders[0], must_be_one) or folders[0]
    if not must_be_one:
        return None
    if archives and not folders:
        raise FileFault(f"{archives[0]}: a model must be a folder; unpack the archive")
    names = ", ".join(entry.name for entry in folders + archives)
    raise FileFault(
        f"{store} holds several models ({names}); name one with OPTION_MODEL_ID, like "
        f"{(folders or archives)[0]}, or all with {MODELS}"
    )


def read(folder: Path | None, config_file: str | None) -> dict[str, Given]:
    """Return the options in the files of a model folder: variable's name → value.

    The YAML file takes precedence over serving.properties.

    Raises FileFault if a file cannot be read, and ModuleNotFoundError if the parser of an existing
    file is not installed yet.
    """
    found: dict[str, Given] = {}
    if folder and (folder / PROPERTIES).is_file():
        found |= _properties(folder / PROPERTIES)
    yaml = Path(config_file) if config_file else folder / YAML if folder else None
    if yaml and (config_file or yaml.is_file()):
        found |= _yaml(yaml)
    return found


def _properties(path: Path) -> dict[str, Given]:
    """Read Java properties: `option.x` is OPTION_X, anything else is SERVING_X.

    PowerShell begins files with a byte order mark.
    """
    import javaproperties

    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise FileFault(f"{path}: is longer than {LARGEST} bytes")
        pairs = javaproperties.loads(content.decode("utf-8-sig"), object_pairs_hook=list)
    except FileFault:
        raise
    except (OSError, ValueError) as error:
        raise FileFault(f"{path}: {error}") from None
    return _unique(path, pairs)


def _yaml(path: Path) -> dict[str, Given]:
    """Read a YAML mapping: `x` is OPTION_X. A value may also be a mapping or a list."""
    from lmi_config.facts import strict_yaml

    try:
        found = strict_yaml.read_file(path)
    except OSError as error:
        raise FileFault(f"{path}: {error.strerror}") from None
    except strict_yaml.NotYAML as error:
        raise FileFault(f"{path}: {error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise FileFault(f"{path}: should have lines like `max_model_len: 8192`")
    try:
        pairs = [(name, _text(value)) for name, value in found.items()]
    except (TypeError, ValueError, RecursionError):
        raise FileFault(
            f"{path}: has a value that JSON cannot hold, like a date; put it in quotes"
        ) from None
    return _unique(path, pairs)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value)


def _unique(path: Path, pairs: list[tuple[str, str]]) -> dict[str, Given]:
    found: dict[str, Given] = {}
    for name, text in pairs:
        variable = _variable(name, path.name == PROPERTIES)
        given = Given(text.strip(), f"{path.name}: {name}", path)
        before = found.setdefault(variable, given)
        if before.text != given.text:
            raise FileFault(f"{path}: {name} is given twice, with different values; keep one")
    return found


def _variable(name: str, properties: bool) -> str:
    """Return the environment variable of a name."""
    if properties and not name.startswith("option."):
        return "SERVING_" + re.sub(r"(?<=[a-z])(?=[A-Z])|\.|-", "_", name).upper()
    if name.startswith(_VARIABLES):
        return name
    return PREFIX + name.removeprefix("option.").replace("-", "_").upper()
