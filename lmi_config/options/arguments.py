# SPDX-License-Identifier: Apache-2.0
"""The command line, `[MODEL] [--flag VALUE ...]` → options.

Every option is a flag with its name: OPTION_MAX_MODEL_LEN is --max-model-len, as in vLLM, and
SERVING_JOB_QUEUE_SIZE, which has no OPTION_ name, is --job-queue-size.
"""

import contextlib
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmi_config.options import settings
from lmi_config.options.declared import PREFIX, Option, flag, flags, sections, vllm_flags
from lmi_config.options.option_files import Given
from lmi_config.options.parsers import Reader, boolean, switch, text, words
from lmi_config.options.settings import SettingsError

AS_JSON = "--json"
"""The only argument of `plan` that is not an option."""
WORKLOAD, RESULTS = "--workload", "--results"
"""The arguments of `tune` that are not options; each has a value."""
_BOOLEANS = (boolean, switch)
_HELP = ("-h", "--help")
_MODELS = ("-m", "--models")
_SEVERAL = f"{PREFIX}MODELS"
_PYTHON = ("", "python", "mpi", "vllm")
"""LMI's engines that run vLLM."""
_ABOUT = {
    "serve": "Serve a model. MODEL is a local folder, an s3:// prefix or a Hugging Face hub id.",
    "warm": "Start as `serve` does, fill the folder of OPTION_CACHE_FOLDER, and end: for an init "
    "container\nor an image's build.",
    "plan": "Print what `serve` would do here, and why; starts nothing. --json is for programs.",
    "tune": "Measure configurations of `serve` under a workload, and write the best one's options: "
    "FILE has\noptions of AIPerf's, --slo-ttft-ms and --slo-itl-ms are the objectives, FOLDER gets "
    "slipway.yaml.",
    "route": "Route requests to servers. REPLICA is the address of one, like http://10.0.0.5:8080.",
}
_POSITIONAL = {
    "serve": "[MODEL]",
    "warm": "[MODEL]",
    "plan": "[MODEL] [--json]",
    "tune": "[MODEL] --workload FILE [--results FOLDER]",
    "route": "[REPLICA ...]",
}
_NOTE = """\
Each flag is also an environment variable: --max-model-len 8k is OPTION_MAX_MODEL_LEN=8k. What the
command line says comes before all else. Flags that are on or off need no value: --enable-lora,
--no-enable-prefix-caching. Every other option of vLLM's is a flag by its own name. LMI's
-m NAME=file:/FOLDER names the model and the folder that has it, or its serving.properties."""


VERBS = (*_ABOUT, "keys")
VLLM_PORT = 8000
"""The port of vLLM's image."""
_SERVER = ("-m", "vllm.entrypoints.openai.api_server")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


def _of_vllm(words: Sequence[str]) -> list[str] | None:
    """Return the command line of vLLM's server, without a verb of ours: it begins with a flag or a
    model, as in vLLM's image, or with vLLM's own names of its server. Returns None for any other,
    and for `--headless`: such a node only runs vLLM's engine for another server. entrypoint.sh
    passes on the same command lines.
    """
    first = words[0]
    program = Path(first).name
    if program == "vllm" and (*words[1:2],) == ("serve",):
        return [*words[2:]] if "--headless" not in words else None
    if program.startswith("python") and (*words[1:3],) == _SERVER:
        return [*words[3:]] if "--headless" not in words else None
    is_model = Path(first).is_dir() or (_HUB_ID.fullmatch(first) and not Path(first).exists())
    return [*words] if first.startswith(("-", "s3://")) or is_model else None


def _with_vllms_port(words: Sequence[str], environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment of vLLM's command line, with vLLM's port if it names none."""
    named = [name for name in environ if environ[name].strip() and settings.option(name) == "port"]
    named += [word for word in words if word.partition("=")[0] == "--port"]
    return environ if named else {**environ, "OPTION_PORT": str(VLLM_PORT)}


def called(
    words: Sequence[str], environ: Mapping[str, str]
) -> tuple[str, list[str], Mapping[str, str]] | None:
    """Return the meaning of the image's command line: the verb, its arguments, and its environment.
    Returns None if it starts another program.
    """
    if not words or words[0] in VERBS:
        verb, *rest = words or ["serve"]
        return verb, rest, environ
    of_vllm = _of_vllm(words)
    return None if of_vllm is None else ("serve", of_vllm, _with_vllms_port(of_vllm, environ))


def wants_help(arguments: Sequence[str]) -> bool:
    return any(it in _HELP for it in arguments)


def read(verb: str, arguments: Sequence[str]) -> dict[str, Given]:
    """Return the options on a verb's command line: variable's name → value.

    Values are not checked, and names need not be known. The last of equal flags counts. Raises
    SettingsError if a flag has no value, or there is more than one model.
    """
    found: dict[str, Given] = {}
    others: list[str] = []
    models: list[str] = []
    _, left = apart(verb, arguments)
    while left:
        word = left.pop(0)
        if not word.startswith("-") or word == "-":
            others.append(word)
            continue
        word = re.sub(r"^-O(?=\d)", "-O=", word)
        typed, assigned, value = word.partition("=")
        if typed in _MODELS:
            value = value if assigned else _value(typed, text, left)
            if value.startswith("{"):
                found[_SEVERAL] = Given(value, typed)
            else:
                models.append(value)
            continue
        name, read = _option(typed.partition(".")[0])
        if read and "." in typed:
            it = value if assigned else _value(typed, read, left)
            found[name] = Given(_with_key(found.get(name), typed, it), typed)
            continue
        denied, denied_read = _option(typed.removeprefix("--no"))
        if assigned:
            found[name] = Given(value, typed)
        elif read is None and typed.startswith("--no-") and denied_read in _BOOLEANS:
            found[denied] = Given("false", typed)
        else:
            found[name] = Given(_value(typed, read, left), typed)
    if models:
        found |= _model(",".join(models))
    if others and verb == "route":
        found["OPTION_ROUTER_REPLICAS"] = Given(",".join(others), "REPLICA")
    elif others:
        if "OPTION_MODEL_ID" in found:
            others.append(found["OPTION_MODEL_ID"].text)
        if len(others) > 1:
            fault = "only one word is the model; options are flags, like --max-model-len 8k, and "
            fault += f"{_SEVERAL} names several models"
            raise SettingsError([f"{' '.join(others)}: {fault}"])
        found["OPTION_MODEL_ID"] = Given(others[0], "MODEL")
    return found


def apart(verb: str, arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return a verb's arguments that are not options, by their names, and the other words.

    Raises SettingsError if one has no value.
    """
    if verb != "tune":
        return {}, [word for word in arguments if verb != "plan" or word != AS_JSON]
    found: dict[str, str] = {}
    left, words = [], [*arguments]
    while words:
        word = words.pop(0)
        name, assigned, value = word.partition("=")
        if name not in (WORKLOAD, RESULTS):
            left.append(word)
            continue
        if not assigned:
            value = words.pop(0) if words and not words[0].startswith("-") else ""
        if not value:
            raise SettingsError([f"{name}: needs a value"])
        found[name] = value
    return found, left


def _model(models: str) -> dict[str, Given]:
    """Read LMI's `-m NAME=URL`, with a folder that replaces the model store, or an S3 prefix.

    LMI's name may be followed by a version, an engine and a device: `NAME::Python:gpu0`.
    """

    def fault(why: str) -> SettingsError:
        return SettingsError([f"-m {models!r}: {why}"])

    if "," in models:
        raise fault(f"names several models; {_SEVERAL} does that")
    named, _, url = models.rpartition("=")
    name, _, rest = named.partition(":")
    engine = rest.partition(":")[2].partition(":")[0]
    if engine.lower() not in _PYTHON:
        raise fault(f"chooses the engine {engine}, but Slipway only runs vLLM")
    names = {"OPTION_SERVED_MODEL_NAME": Given(f"{name},lmi", "-m")} if name else {}
    if url.startswith("s3://"):
        return {**names, "OPTION_MODEL_ID": Given(url, "-m")}
    folder = re.sub(r"^file:(//(localhost)?(?=/))?", "", url)
    if re.match(r"[a-z][a-z0-9+.-]*:", folder):
        raise fault("should be NAME=file:/FOLDER or NAME=s3://BUCKET/PREFIX; download others first")
    if not Path(folder).is_dir():
        raise fault("there is no such folder; check its path")
    return {**names, "SERVING_MODEL_STORE": Given(folder, "-m")}


def _option(typed: str) -> tuple[str, Reader | None]:
    """Return the variable of a flag, and its reader; None as the reader of an unknown flag."""
    bare = typed.lstrip("-").replace("_", "-")
    unknown = (PREFIX + bare.replace("-", "_").upper(), None)
    if found := flags().get(typed) or flags().get(f"--{bare}"):
        return found
    # Like argparse in vLLM: an unambiguous prefix of one of vLLM's flags means that flag.
    longer = [it for it in vllm_flags() if typed.startswith("--") and it.startswith(f"--{bare}")]
    return flags()[longer[0]] if len(longer) == 1 else unknown


def _with_key(before: Given | None, typed: str, text: str) -> str:
    """Return a flag's JSON with one key set, as `--x.key.inner 5` and `--x.list+ a,b` do."""
    _, *keys = typed.removesuffix("+").split(".")
    value: Any = text.split(",") if typed.endswith("+") else text
    whole: Any = {}
    with contextlib.suppress(ValueError):
        value = json.loads(text) if value == text else value
    with contextlib.suppress(ValueError):
        whole = json.loads(before.text if before else "{}")
    if not isinstance(whole, dict):
        whole = {}
    inner = whole
    for key in keys[:-1]:
        inner = inner.setdefault(key, {})
        if not isinstance(inner, dict):
            raise SettingsError([f"{typed}: {key} has a value already; keep one"])
    inner[keys[-1]] = value
    return json.dumps(whole)


def _value(typed: str, read: Reader | None, left: list[str]) -> str:
    """Take and return the value of a flag from the rest of the command line."""
    if read in _BOOLEANS:
        given = left and left[0].lower() in ("true", "false", "1", "0")
        return left.pop(0) if given else "true"
    values = []
    while left and not re.match(r"--|-[a-z]", left[0]):
        values.append(left.pop(0))
        if read is not words:
            break
    if not values and read:
        raise SettingsError([f"{typed}: needs a value"])
    return values[0] if len(values) == 1 else json.dumps(values) if values else "true"


def usage(verb: str) -> str:
    """Return the text of `--help`."""
    return "\n".join(_usage(verb)) + "\n"


def _usage(verb: str) -> Iterator[str]:
    yield f"usage: {verb} {_POSITIONAL[verb]} [--flag VALUE ...]"
    yield from ("", _ABOUT[verb], "", _NOTE)
    for section, options in sections().items():
        yield from ("", f"{section.value}:")
        for option in options:
            yield from _described(option)


def _described(option: Option) -> Iterator[str]:
    name = option.name
    if option.vllm and not name.startswith(PREFIX):
        name = option.vllm
    about = " ".join(option.help.replace("`", "").split())
    yield f"  {flag(name)}"
    yield from textwrap.wrap(
        about, 96, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False
    )
