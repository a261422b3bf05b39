# SPDX-License-Identifier: Apache-2.0
"""The command line, the environment and files → Settings, or one error with all faults.

The order of precedence is: the command line, and then, as in LMI, SAGEMAKER_* variables, files,
HF_*, OPTION_*, and the other names.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Literal

from lmi_config.options import engines, option_files, spelling
from lmi_config.options.declared import (
    MODEL_STORE,
    OPTIONS,
    PREFIX,
    VLLM_PREFIX,
    Option,
    Settings,
    flag,
    is_switch,
    vllm_options,
)
from lmi_config.options.ignored import REFUSED, REMOVED, UNUSED
from lmi_config.options.option_files import FileFault, Given
from lmi_config.options.parsers import UNKNOWN_TASK, Reader, any_task, boolean
from lmi_config.options.redaction import escaped, masked, no_text, secret

_VLLMS = "VLLM_"
_FAMILIES = (PREFIX, "SERVING_", "SAGEMAKER_", VLLM_PREFIX, _VLLMS)
_PREFIXES = ("SERVING_", "SAGEMAKER_", "TENSOR_", "PIPELINE_")
_LETTER = 0.85  # one wrong letter, or two; excludes Kubernetes' SERVING_SERVICE_HOST
_PLATFORM = {"SAGEMAKER_SECURE_MODE", "SAGEMAKER_SECURITY_CONTROLS", "SAGEMAKER_UNTRUSTED_CHANNELS"}
_TRACES, _SIGNALS = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
_CONFIG = "SM_VLLM_CONFIG"
_CONFIGS = ("OPTION_CONFIG_FILE", "OPTION_CONFIG", _CONFIG)
_MULTI_MODEL = "SAGEMAKER_MULTI_MODEL"
_MODEL_PY = "model.py"
_LENIENT = "SAGEMAKER_MAX_PAYLOAD_IN_MB"
"""An invalid value of this variable is ignored, as in LMI."""
_MODELS = ("HF_MODEL_ID", "OPTION_MODEL_ID", "OPTION_MODEL", "SM_VLLM_MODEL")


class SettingsError(ValueError):
    """Options cannot be used. `faults` has a sentence for each fault."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        count = "1 option" if len(self.faults) == 1 else f"{len(self.faults)} options"
        super().__init__(
            f"{count} cannot be used:" + "".join(f"\n  {escaped(f)}" for f in self.faults)
        )


_NOTHING: Mapping[str, Given] = {}
_OWN = (PREFIX, VLLM_PREFIX, "SERVING_", "SAGEMAKER_", "LMCACHE_")
"""The prefixes of options; the environment also has other variables."""


def read(
    environ: Mapping[str, str], argued: Mapping[str, Given] = _NOTHING, *, within: bool = False
) -> Settings:
    """Read the settings from environment variables and the files that they or the model bring.

    argued: the command line's options (`arguments.read`), which take precedence. within: whether
    these are the settings of one of several models; the file's list of models is then left out.

    Empty variables count as not set, except vLLM's switches under their SM_VLLM_ names. Raises
    SettingsError with all faults at once: values that cannot be read, contradictory names of one
    option, files that cannot be read, and unknown names, as far as OPTION_STRICT refuses them.
    Raises ModuleNotFoundError if a file's parser is not installed yet.
    """
    given = _traced(_affirmed(from_environ(_switched_on(environ))))
    known = {**_without(given, argued), **argued}
    _require_text(known, set(argued))
    named = next((Path(known[name].text) for name in _MODELS if name in known), None)
    store = known.get("SERVING_MODEL_STORE", Given(MODEL_STORE, ""))
    config = next((known[name] for name in _CONFIGS if name in known), Given("", ""))
    try:
        folder, several = None, None
        try:
            folder = option_files.model_folder(Path(store.text), named)
        except FileFault as fault:
            several = fault
        found = _entered(_placed(option_files.read(folder, config.text)), folder)
        if several and not {option_files.MODELS, _MULTI_MODEL} & {*known, *found}:
            raise several
        given = _entered(given, folder)
        _require_no_models(found, config.text)
        if within:
            found.pop(option_files.MODELS, None)
    except FileFault as fault:
        raise SettingsError([str(fault)]) from None
    except OSError as error:
        raise SettingsError([f"{error.filename}: {error.strerror}"]) from None
    if config.name == _CONFIG:
        # AWS's container turns variables into flags, and vLLM's flags precede its file.
        after = {name for name, it in found.items() if it.file == Path(config.text)}
        left = _without(found, given)
        found = {name: it for name, it in found.items() if name in left or name not in after}
    return merged(given, found, folder, argued)


def _require_no_models(found: Mapping[str, Given], config: str) -> None:
    """Raise FileFault if the file of one model lists several. config: the operator's own file."""
    several = found.get(option_files.MODELS)
    if several and several.file != Path(config):
        raise FileFault(
            f"{several.file}: `models` in the file of one model; several models may only be listed "
            "in the file that OPTION_CONFIG_FILE names"
        )


def _require_text(given: Mapping[str, Given], ours: Set[str]) -> None:
    """Raise SettingsError for values that cannot be passed to a program. ours: names that are
    certainly for us; many other variables of the environment are not.
    """
    faults = [
        f"{it.name}: it has {fault}, which no text has; remove it"
        for name, it in sorted(given.items())
        if (name in ours or name in _NAMES or name.startswith(_OWN))
        and (fault := no_text(it.text) or no_text(it.name))
    ]
    if faults:
        raise SettingsError(faults)


def _entered(given: Mapping[str, Given], folder: Path | None) -> dict[str, Given]:
    """Return the same, with the path of the deployment's own model.py replaced by that name."""
    found = dict(given)
    for name in _ENTRY_POINT:
        if folder and (it := given.get(name)):
            named = os.path.normpath(folder / it.text.removeprefix("file://"))
            if named == os.path.normpath(folder / _MODEL_PY):
                found[name] = it._replace(text=_MODEL_PY)
    return found


def _own(given: Mapping[str, Given]) -> dict[str, str]:
    """Return options that neither Slipway nor vLLM has, under the names of LMI's handlers: as
    written in serving.properties, otherwise in lower case.
    """
    found = {}
    for name, it in given.items():
        bare = name.removeprefix(PREFIX).lower()
        if name.startswith(PREFIX) and name not in _NAMES and bare not in vllm_options():
            written = it.name.partition("option.")[2] if it.file else ""
            found[written or bare] = it.text
    return found


def _without(given: Mapping[str, Given], argued: Mapping[str, Given]) -> dict[str, Given]:
    """Return the given options, without those that the command line sets under any name."""
    options = set(map(option, argued))
    return {name: it for name, it in given.items() if option(name) not in options}


def option(name: str) -> str:
    """Return the option that a variable sets, by any spelling: a field, or a name of vLLM's."""
    return _FIELDS.get(name) or name.replace(VLLM_PREFIX, PREFIX, 1)


def from_environ(environ: Mapping[str, str]) -> dict[str, Given]:
    """Return the given options. Their names are normalised as in LMI and AWS's vLLM container.

    Raises SettingsError if two spellings of one name have different values.
    """
    found: dict[str, Given] = {}
    faults = []
    for name, value in environ.items():
        if not (text := value.strip()):
            continue
        given = found.setdefault(_spelled(name), Given(text, name))
        if given.text != text:
            faults.append(f"{given.name} and {name} set one option to different values; keep one")
    if faults:
        raise SettingsError(faults)
    return found


_CAMEL = ("entryPoint", "pythonExecutable")
"""The options that LMI spells like this; all others have small letters and "_"."""


def _spelled(name: str) -> str:
    """Return a variable's normalised name. LMI keeps lower-case letters of OPTION_X, so it only
    knows its own spelling; AWS's container accepts any case.
    """
    if name.startswith(PREFIX):
        typed = name.removeprefix(PREFIX)
        upper = PREFIX + typed.upper()
        return upper if upper in _known() and (typed.islower() or typed in _CAMEL) else name
    if name.startswith(VLLM_PREFIX):
        upper = name.upper()
        ours = upper.replace(VLLM_PREFIX, PREFIX, 1)
        bare = ours.removeprefix(PREFIX).lower()
        of_vllm = upper in _NAMES or bare in vllm_options() or bare in REFUSED
        return ours if not of_vllm and ours in _NAMES | UNUSED.keys() else upper
    return name


def _affirmed(given: dict[str, Given]) -> dict[str, Given]:
    """Replace SM_VLLM_NO_X by SM_VLLM_X; AWS's vLLM container turns it into the flag --no-x."""
    found = dict(given)
    for name, it in given.items():
        meant = name.replace(f"{VLLM_PREFIX}NO_", VLLM_PREFIX, 1)
        option = meant.removeprefix(VLLM_PREFIX).lower()
        if name != meant and (PREFIX + option.upper() in _NAMES or option in vllm_options()):
            with contextlib.suppress(ValueError):
                text = str(not boolean(it.text)).lower()
                found[meant] = it._replace(text=text)
                del found[name]
    return found


def _switched_on(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Replace SM_VLLM_X without a value by true if X is a switch. AWS's vLLM container turns it
    into the flag --x without a value.
    """
    on = {}
    for name, value in environ.items():
        if name.startswith(VLLM_PREFIX) and not value.strip():
            option = re.sub("^NO_", "", name.removeprefix(VLLM_PREFIX))
            if is_switch(PREFIX + option):
                on[name] = "true"
    return {**environ, **on}


def _traced(given: dict[str, Given]) -> dict[str, Given]:
    """Replace OpenTelemetry's variables for the endpoint of traces by a single one.

    Over HTTP, the endpoint for all signals is a base URL. (OpenTelemetry's specifications of
    environment variables and of the OTLP exporter.)
    """
    values = {name: it.text for name, it in given.items()}
    off = (
        values.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or values.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp"
    )
    if off:
        return {name: it for name, it in given.items() if name not in (_TRACES, _SIGNALS)}
    if _TRACES in given or _SIGNALS not in given:
        return given
    url = values[_SIGNALS]
    if traces_protocol(values) == "http/protobuf":
        url = f"{url.rstrip('/')}/v1/traces"
    return given | {_TRACES: Given(url, _SIGNALS)}


def traces_protocol(environ: Mapping[str, str]) -> str:
    """Return the protocol for traces; vLLM only reads the first of these variables."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    return next((environ[name] for name in names if environ.get(name)), "grpc")


def merged(
    given: Mapping[str, Given],
    found: Mapping[str, Given],
    folder: Path | None = None,
    argued: Mapping[str, Given] = _NOTHING,
) -> Settings:
    """Settings from the environment, files and the command line.

    Raises as `read` does.
    """
    found = {name: value for name, value in found.items() if value.text}
    everything = {**given, **found}
    left = _without(everything, argued)
    _require_text({**left, **argued}, {*found, *argued})
    resolved = _Resolver({**left, **argued}, frozenset(found.keys() & left.keys())).resolve()
    faults = [
        f"{found[name].name}: only the environment may set it"
        for name in sorted(_PLATFORM & found.keys())
    ]
    if faults := [*faults, *resolved.faults]:
        raise SettingsError(faults)
    overridden = [
        f"{name} is set, but {found[name].name} comes first"
        for name in sorted(found.keys() & given.keys() & left.keys())
        if found[name].text != given[name].text
    ]
    first = {option(name): it for name, it in argued.items()}
    overridden += [
        f"{it.name} is set, but {first[option(name)].name} comes first"
        for name, it in sorted(everything.items())
        if name not in left and it.text != first[option(name)].text
    ]
    values = dict(resolved.values)
    if folder:
        values.setdefault("model_id", str(folder))
    return Settings(
        **values,
        engine=resolved.engine,
        own=_own({**left, **argued}),
        model_folder=folder,
        lmcache={
            name: value.text
            for name, value in {**left, **argued}.items()
            if name.startswith("LMCACHE_") and name != "LMCACHE_CONFIG_FILE"
        },
        origins=resolved.origins,
        files=resolved.files,
        notes=(*overridden, *resolved.notes),
        interactive=_interactive(given),
    )


def _interactive(given: Mapping[str, Given]) -> bool:
    """Whether this is a SageMaker endpoint, and not a batch transform job.

    SageMaker sets the range of allowed ports for containers with our image's label. It also sets a
    variable for jobs.
    """
    ports = given.keys() & {"SAGEMAKER_BIND_TO_PORT", "SAGEMAKER_SAFE_PORT_RANGE"}
    batch = "SAGEMAKER_BATCH" in given and given["SAGEMAKER_BATCH"].text.lower() == "true"
    return bool(ports) and not batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Resolved:
    """The parsed options. values: field → value; the other fields as in Settings."""

    values: Mapping[str, Any]
    engine: Mapping[str, Any]
    origins: Mapping[str, str]
    files: Mapping[str, Path]
    notes: tuple[str, ...]
    faults: tuple[str, ...]


class _Resolver:
    """One pass over the given options, which collects faults and notes."""

    def __init__(self, given: Mapping[str, Given], from_files: frozenset[str]) -> None:
        self.given = given
        self._from_files = from_files
        self._names: dict[str, str] = {}
        """Field, or name of a vLLM option → the variable that set it."""
        self._notes: list[str] = []
        self._faults: list[str] = []

    def resolve(self) -> _Resolved:
        self._other_engines()
        values = self._declared()
        engine = self._undeclared(self._strict(values))
        lmcache = {it: it for it in self.given.keys() - _NAMES if it.startswith("LMCACHE_")}
        return _Resolved(
            values=values,
            engine=engine,
            origins={field: self.given[name].name for field, name in self._names.items()},
            files={
                field: file
                for field, name in {**lmcache, **self._names}.items()
                if (file := self.given[name].file)
            },
            notes=(*self._notes, *self._without_effect()),
            faults=tuple(self._faults),
        )

    def _other_engines(self) -> None:
        for name, engine in engines.others({name: it.text for name, it in self.given.items()}):
            self._faults.append(
                f"{self._shown(name)}: chooses {engine}, but Slipway only runs vLLM; remove it to "
                f"serve the model with vLLM, or use LMI's container with {engine}"
            )

    def _declared(self) -> dict[str, Any]:
        """The declared options that are set: field → value."""
        values: dict[str, Any] = {}
        for field, option in OPTIONS.items():
            readers = {**dict.fromkeys(option.names, option.read), **option.converted}
            if field == "task" and self._own_handler():
                readers = dict.fromkeys(readers, any_task)
            found = self._first(field, sorted(readers, key=self._rank), readers)
            if option.vllm:
                found = self._agreed(field, option, found)
            if found is not None:
                values[field] = found
            if field == "task" and found == "auto" and not self._own_handler():
                self._task_is_the_models_own()
        return values

    def _task_is_the_models_own(self) -> None:
        given = self.given[self._names["task"]]
        if given.text.lower() != "auto":
            self._notes.append(f"{given.name}: {given.text!r:.80} is {UNKNOWN_TASK}")

    def _own_handler(self) -> bool:
        """Whether the operator names a model.py that answers requests, with its own engine or
        ours.
        """
        return any(it in self.given and self.given[it].text == _MODEL_PY for it in _ENTRY_POINT)

    def _strict(self, values: Mapping[str, Any]) -> bool | Literal["auto"]:
        """The unknown names to refuse: all, none, or by default those that are clearly mistyped."""
        strict: bool | Literal["auto"] = values.get("strict", "auto")
        return True if strict == "auto" and values.get("secure_mode") else strict

    def _undeclared(self, strict: bool | Literal["auto"]) -> dict[str, Any]:
        """Return vLLM's options that were set by their own names. Reports unknown names."""
        engine: dict[str, Any] = {}
        for name in sorted(self.given.keys() - _NAMES - UNUSED.keys()):
            if not name.startswith((PREFIX, VLLM_PREFIX)) and name not in self._from_files:
                self._look_twice(name, strict)
                continue
            if name.startswith("LMCACHE_"):
                continue
            option = name.removeprefix(VLLM_PREFIX).removeprefix(PREFIX).lower()
            written = self.given[name].name
            if name.startswith(PREFIX) and name != name.upper():
                self._unknown(name, strict)
                continue
            if reader := vllm_options().get(option):
                value = self._value(name, reader)
                if value is None:
                    continue
                if engine.setdefault(option, value) != value:
                    self._disagree(self._names[option], name)
                self._names.setdefault(option, name)
            elif option in REFUSED:
                self._faults.append(f"{written}: vLLM has this option, but {REFUSED[option]}")
            elif instead := REMOVED.get(PREFIX + option.upper()):
                self._notes.append(f"{written} has no effect here: {instead}")
            else:
                self._unknown(name, strict)
        return engine

    def _unknown(self, name: str, strict: bool | Literal["auto"]) -> None:
        """Refuse an unknown name, or note it.

        Names in LMI's own places may be for a newer LMI, or for a model.py. There only a typo stops
        the start. A command line and slipway.yaml are written for Slipway.
        """
        given = self.given[name]
        ours = given.name.startswith("-") or (given.file and given.file.suffix != ".properties")
        known = _meanings()
        sought = _bare(name.replace(VLLM_PREFIX, PREFIX, 1).upper())
        exact = sought if name != name.upper() and name.upper() in _known() else None
        meant = exact or spelling.mistyped(
            sought, {it: option(whole) for it, whole in known.items()}
        )
        near = meant or spelling.nearest(sought, known)
        shown = known[near] if near else ""
        hint = f"; did you mean {flag(shown) if given.name.startswith('-') else shown}?"
        typo = meant and shown not in UNUSED.keys() | REMOVED.keys()
        if strict is True or (strict == "auto" and (ours or typo)):
            self._faults.append(
                f"{given.name}: no such option{hint if near else ''} (OPTION_STRICT=false ignores "
                "unknown options)"
            )
        else:
            # An unknown flag may or may not have a value: the next word may be the model.
            took = given.name.startswith("-") and given.text != "true"
            whole = f"{given.name} and the word after it are" if took else f"{given.name} is"
            self._notes.append(
                f"{whole} not known: only a model.py can use it{hint if near else ''}"
            )

    def _without_effect(self) -> Iterator[str]:
        """The given options that have no effect, in one sentence."""
        unused: dict[str, list[str]] = {}
        for name in sorted(self.given.keys() & UNUSED.keys()):
            unused.setdefault(UNUSED[name], []).append(self.given[name].name)
        if reasons := "; ".join(f"{', '.join(names)} ({why})" for why, names in unused.items()):
            yield f"accepted, but without effect here: {reasons}"

    def _rank(self, name: str) -> int:
        if name.startswith("SAGEMAKER_"):
            return 0
        return 1 if name in self._from_files else 2

    def _first(self, field: str, names: list[str], readers: Mapping[str, Reader]) -> Any:
        """Return the value of the first name that is set."""
        given = [name for name in names if name in self.given]
        if _LENIENT in given and (why := self._wrong(_LENIENT, readers[_LENIENT])):
            self._notes.append(f"{why}; it is ignored")
            given.remove(_LENIENT)
        if not given:
            return None
        first = self._names[field] = given[0]
        self._notes += [
            f"{self.given[name].name} is set, but {self.given[first].name} comes first"
            for name in given[1:]
            if self.given[name].text != self.given[first].text
        ]
        return self._value(first, readers[first])

    def _agreed(self, field: str, option: Option, found: Any) -> Any:
        """Return the value. Adds a fault if vLLM's own names of the option have another value."""
        assert option.vllm
        for name in _vllm_names(option.vllm):
            if name in option.names or name not in self.given:
                continue
            other = self._value(name, option.read)
            if found is None:
                found = other
                self._names.setdefault(field, name)
            elif other is not None and found != other:
                self._disagree(self._names[field], name)
        return found

    def _value(self, name: str, read: Reader) -> Any:
        if why := self._wrong(name, read):
            self._faults.append(why)
            return None
        return read(self.given[name].text)

    def _wrong(self, name: str, read: Reader) -> str | None:
        """The reason why a value cannot be read, or None."""
        try:
            read(self.given[name].text)
        except (ValueError, RecursionError, OverflowError) as error:
            too_much = {RecursionError: "less deeply nested", OverflowError: "less"}
            should = too_much.get(type(error), error)
            return f"{self._shown(name)}: should be {should}"
        return None

    def _shown(self, name: str) -> str:
        """Return a name with its value, without secrets."""
        given = self.given[name]
        shown = "(hidden)" if secret(name) else masked(repr(given.text))
        return _assigned(given.name) + shown

    def _disagree(self, one: str, other: str) -> None:
        self._faults.append(
            f"{self._shown(one)} and {self._shown(other)} set the same option to different values; "
            "keep one"
        )

    def _look_twice(self, name: str, strict: bool | Literal["auto"]) -> None:
        """Note an unknown variable that nearly matches a known one; other programs use these
        prefixes as well.
        """
        if spelling.of_kubernetes(name, self.given[name].text):
            return
        if name.startswith(_VLLMS) and name not in vllm_environment():
            self._notes.append(_unread(name))
            return
        if meant := spelling.other_prefix(name, _FAMILIES, _known() | vllm_environment()):
            told = f"{name} is unknown and has no effect; did you mean {meant}?"
            if (
                strict is False
                or meant.startswith(_VLLMS)
                or meant in UNUSED.keys() | REMOVED.keys()
            ):
                self._notes.append(told)
            else:
                self._faults.append(f"{told} (OPTION_STRICT=false ignores unknown options)")
            return
        whole = _meanings().get(name, "")
        # A name of one or two words may belong to another program.
        if name.count("_") > 1 and whole and whole not in UNUSED.keys() | REMOVED.keys():
            self._notes += nearly(name, name, {name: whole})
        if not name.startswith(_PREFIXES) or len(_bare(name)) < spelling.SHORTEST:
            return
        known = {_bare(it): it for it in sorted(_NAMES | UNUSED.keys())}
        self._notes += nearly(name, _bare(name), known)


def _unread(name: str) -> str:
    """The note about a variable that this vLLM does not read."""
    option = PREFIX + name.removeprefix(_VLLMS)
    instead = f"set {option}" if option in _known() else ""
    if not instead and (near := spelling.nearest(name, vllm_environment(), _LETTER)):
        instead = f"did you mean {near}?"
    return f"{name}: this vLLM does not read this variable" + (f"; {instead}" if instead else "")


def _assigned(name: str) -> str:
    """Return the form of a name with its value: X='1' for a variable, `file: x = '1'` in a file."""
    return f"{name} = " if ": " in name else f"{name}="


def nearly(name: str, sought: str, known: Mapping[str, str]) -> Iterator[str]:
    """The note about a variable without effect that nearly matches a known one, or nothing.

    sought: the compared part of its name. known: the same part of known names → the names.
    """
    if near := spelling.nearest(sought, known, _LETTER):
        yield f"{name} is unknown and has no effect; did you mean {known[near]}?"


def _bare(name: str) -> str:
    """Return a name without its program's prefix."""
    return re.sub(r"^(SERVING|SAGEMAKER|OPTION|HF)_", "", name)


def _vllm_names(option: str) -> tuple[str, str]:
    return PREFIX + option.upper(), VLLM_PREFIX + option.upper()


_ENTRY_POINT = OPTIONS["entry_point"].names
_FIELDS = {
    name: field
    for field, option in OPTIONS.items()
    for name in (
        *option.all_names,
        *(_vllm_names(option.vllm) if option.vllm else ()),
    )
}
_NAMES = frozenset(_FIELDS)


@functools.cache
def _meanings() -> Mapping[str, str]:
    """Return all known names: without their prefix → the displayed name."""
    of_vllm = (PREFIX + option.upper() for option in vllm_options())
    declared = sorted(_NAMES, key=lambda name: name.startswith(PREFIX))
    return {_bare(name): name for name in (*UNUSED, *REMOVED, *of_vllm, *declared)}


@functools.cache
def _known() -> frozenset[str]:
    """Return all known names, also refused ones."""
    of_vllm = [option.upper() for option in (*vllm_options(), *REFUSED)]
    named = (prefix + option for option in of_vllm for prefix in (PREFIX, VLLM_PREFIX))
    return frozenset((*UNUSED, *REMOVED, *named, *_NAMES))


@functools.cache
def vllm_environment() -> frozenset[str]:
    """Return the variables that vLLM reads, and those with its prefix that Slipway reads."""
    listed = json.loads(Path(__file__).with_name("vllm_environment.json").read_text())
    return frozenset((*listed, *(name for name in _NAMES if name.startswith(_VLLMS))))


def _placed(found: Mapping[str, Given]) -> dict[str, Given]:
    """Return the options of files. A name may have the prefix of another place, because LMI's users
    confuse these.

    `normalize=false` in serving.properties is option.normalize, and option.job_queue_size is
    job_queue_size.
    """
    placed = dict(found)
    for name, given in found.items():
        for prefix, other in (("SERVING_", PREFIX), (PREFIX, "SERVING_")):
            meant = other + name.removeprefix(prefix)
            if name.startswith(prefix) and name not in _known() and meant in _known():
                del placed[name]
                placed.setdefault(meant, given)
    return placed
