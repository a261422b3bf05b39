"""The environment → Settings, or one error that tells every fault in it."""

import difflib
import re
import warnings
from collections.abc import Mapping
from typing import Any

from lmi_config.options import OPTIONS, PREFIX, REFUSED, Option, Reader, Settings, vllm_options

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")


class SettingsError(ValueError):
    """Options that cannot be used. `faults` has a sentence for each."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = tuple(faults)
        count = "1 option" if len(faults) == 1 else f"{len(faults)} options"
        super().__init__(f"{count} cannot be used:" + "".join(f"\n  {fault}" for fault in faults))


def read(environ: Mapping[str, str]) -> Settings:
    """Read the settings from environment variables; empty ones count as not set.

    Raises SettingsError with all faults at once: values that cannot be read, two names that set one
    option to different values, and (unless OPTION_STRICT is false) unknown OPTION_* names.
    """
    given = {name: value.strip() for name, value in environ.items() if value.strip()}
    faults: list[str] = []
    values = {field: _declared(option, given, faults) for field, option in OPTIONS.items()}
    values = {field: value for field, value in values.items() if value is not None}
    others = sorted(name for name in given if name.startswith(PREFIX) and name not in _names())
    engine: dict[str, Any] = {}
    for name in others:
        option = name.removeprefix(PREFIX).lower()
        if reader := vllm_options().get(option):
            if (value := _value(name, given, reader, faults)) is not None:
                engine[option] = value
        elif option in REFUSED:
            faults.append(f"{name}: vLLM has this option, but {REFUSED[option]}")
        elif values.get("strict", True):
            faults.append(f"{_unknown(name)} (OPTION_STRICT=false ignores unknown options)")
        else:
            warnings.warn(f"{_unknown(name)}; ignored", stacklevel=2)
    if faults:
        raise SettingsError(faults)
    return Settings(**values, engine=engine)


def _declared(option: Option, given: Mapping[str, str], faults: list[str]) -> Any:
    """The value of one declared option, or None where it is not set or cannot be read."""
    first = next((name for name in option.names if name in given), None)
    found = _value(first, given, option.read, faults) if first else None
    same = f"{PREFIX}{option.vllm.upper()}" if option.vllm else None
    if same is None or same in option.names or same not in given:
        return found
    other = _value(same, given, option.read, faults)
    if first and None not in (found, other) and found != other:
        faults.append(
            f"{first}={given[first]!r} and {same}={given[same]!r} set the same option to "
            "different values; keep one"
        )
    return other if found is None else found


def _value(name: str, given: Mapping[str, str], read: Reader, faults: list[str]) -> Any:
    try:
        return read(given[name])
    except ValueError as error:
        shown = "(hidden)" if _SECRET.search(name) else repr(given[name])
        faults.append(f"{name}={shown}: should be {error}")
        return None


def _names() -> set[str]:
    names = {name for option in OPTIONS.values() for name in option.names}
    return names | {f"{PREFIX}{option.vllm.upper()}" for option in OPTIONS.values() if option.vllm}


def _unknown(name: str) -> str:
    known = _names() | {f"{PREFIX}{option.upper()}" for option in vllm_options()}
    near = difflib.get_close_matches(name.upper(), sorted(known), n=1, cutoff=0.75)
    return f"{name}: no such option" + (f"; did you mean {near[0]}?" if near else "")
