# SPDX-License-Identifier: Apache-2.0
"""vLLM's options, as vLLM will get them, accessed by the paths of their values."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmi_config.facts.draft import Draft
from lmi_config.facts.machine import Machine
from lmi_config.facts.model import ModelFacts
from lmi_config.options.declared import OPTIONS, Settings

_FIELDS = {option.vllm: field for field, option in OPTIONS.items() if option.vllm}


@functools.cache
def limits() -> Mapping[str, Any]:
    """Limits in vLLM's own source, from tools/generate/vllm_limits.py."""
    found: Mapping[str, Any] = json.loads((Path(__file__).parent / "vllm.json").read_text())
    return found


class Given:
    """The options, and the model and machine that they must fit. A path is vLLM's name of an
    option, optionally with keys in its JSON after it, separated by dots.
    """

    def __init__(
        self,
        settings: Settings,
        options: Mapping[str, Any],
        machine: Machine,
        model: ModelFacts,
        draft: Draft | None,
        environ: Mapping[str, str],
    ) -> None:
        self.settings, self.machine, self.model, self.draft = settings, machine, model, draft
        self.environ = environ
        self.gpus = bool(machine.gpus)
        self._options = options
        self._read: dict[str, Mapping[str, Any]] = {}

    def get(self, path: str) -> Any:
        """Return the value; None if it is missing or not the expected JSON."""
        name, *keys = path.split(".")
        value = self._options.get(name)
        if keys:
            value = self.parsed(name)
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def parsed(self, name: str) -> Mapping[str, Any]:
        """Return the JSON object in an option; empty if there is none."""
        if name not in self._read:
            value = self._options.get(name)
            if isinstance(value, str):
                try:
                    value = json.loads(value)
                except (ValueError, RecursionError):
                    value = None
            found = dict(value) if isinstance(value, Mapping) else {}
            if name == "speculative_config":  # as create_speculative_config reads it
                found = {key.replace("-", "_"): it for key, it in found.items()}
            if name == "compilation_config" and isinstance(value, int):
                found = {"mode": value}
            self._read[name] = found
        return self._read[name]

    def on(self, path: str) -> bool:
        """Whether it is set, and neither false nor empty nor 0."""
        return bool(self.get(path))

    def has(self, path: str) -> bool:
        return self.get(path) is not None

    def number(self, path: str, otherwise: float = 0) -> float:
        """Return the number, or `otherwise`."""
        value = self.get(path)
        return value if isinstance(value, int | float) else otherwise

    def below(self, path: str, least: float) -> bool:
        """Whether it is a number below `least`."""
        value = self.get(path)
        return isinstance(value, int | float) and value < least

    def texts(self, path: str) -> tuple[str, ...]:
        """Return the strings of a list; a single word is a list of one."""
        value = self.get(path)
        words = (value,) if isinstance(value, str) else value
        return tuple(it for it in words or () if isinstance(it, str)) if _listed(words) else ()

    def numbers(self, path: str) -> tuple[float, ...]:
        """Return the numbers of a list, also of a list of texts."""
        value = self.get(path)
        found = []
        for it in value if _listed(value) else ():
            if isinstance(it, str) and it.lstrip("-").isdigit():
                found.append(float(it))
            elif isinstance(it, int | float) and not isinstance(it, bool):
                found.append(it)
        return tuple(found)

    def connectors(self, name: str) -> int:
        """Return the number of KV connectors with this name, also of nested ones."""
        found = self.parsed("kv_transfer_config")
        inner = found.get("kv_connector_extra_config")
        within = inner.get("connectors") if isinstance(inner, Mapping) else None
        each = [found, *(within if isinstance(within, list) else ())]
        return sum(isinstance(it, Mapping) and it.get("kv_connector") == name for it in each)

    def called(self, path: str) -> str:
        """Return the operator's name of the option, with the keys in it."""
        name, *keys = path.split(".")
        field = _FIELDS.get(name, name)
        return " ".join([self.settings.named(field), *([f'"{".".join(keys)}"'] if keys else [])])

    def shown(self, path: str) -> str:
        """Return the option and its value, shortened; objects are left out, because they may
        contain secrets.
        """
        value = self.get(path)
        if value is None or isinstance(value, Mapping):
            return self.called(path)
        return f"{self.called(path)}={_short(value)}"


def _listed(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)[:60]
    try:
        return json.dumps(value)[:60]
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__
