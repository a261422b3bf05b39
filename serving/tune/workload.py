# SPDX-License-Identifier: Apache-2.0
"""A workload: the lengths and the load of requests, in the vocabulary of NVIDIA's AIPerf.

A file has options of `aiperf profile` by their names, as YAML or JSON. It has them alone, or in the
format of SageMaker's workload specification:
`{"benchmark": {"type": "aiperf"}, "parameters": {...}}`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lmi_config.facts import strict_yaml
from lmi_config.options import spelling

Endpoint = Literal["chat", "completions"]


class WorkloadError(ValueError):
    """A file is not a valid workload. The message has all its faults."""


class Level(NamedTuple):
    """A level of load. users: the most concurrent requests; None for no limit. rate: requests/s;
    None to send a user's next request when its last one is answered.
    """

    users: int | None
    rate: float | None

    def __str__(self) -> str:
        users = f"{self.users} user{'s' * (self.users > 1)}" if self.users else ""
        if self.rate is None:
            return users
        return f"{self.rate:g}/s" + (f", {users}" if users else "")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A workload's parameters.

    input, output: average tokens of a prompt and an answer; *_stddev: their standard deviations.
    prefixes: the number of shared prefixes; each prompt begins with one. prefix: tokens of each.
    count: requests of each level. warm_up: requests before a level. model: its name at the
    endpoint. tokenizer: the folder or hub id of the tokenizer. Both are None for the served model.
    """

    input: int
    output: int
    input_stddev: float = 0.0
    output_stddev: float = 0.0
    prefixes: int = 0
    prefix: int = 0
    concurrency: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    count: int | None = None
    warm_up: int | None = None
    seed: int | None = None
    endpoint: Endpoint = "chat"
    model: str | None = None
    tokenizer: str | None = None

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels, the lightest first."""
        if self.rates:
            users = self.concurrency[0] if self.concurrency else None
            return tuple(Level(users, rate) for rate in sorted(self.rates))
        return tuple(Level(users, None) for users in sorted(self.concurrency))

    @property
    def users(self) -> int | None:
        """The most concurrent requests; None without a limit."""
        return max(self.concurrency, default=None)

    @property
    def prompt(self) -> int:
        """Average tokens of a whole prompt."""
        return self.prefix + self.input

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and an answer together."""
        most = self.input * (1 + spread(self.input, self.input_stddev))
        most += self.output * (1 + spread(self.output, self.output_stddev))
        return self.prefix + math.ceil(most)

    def requests(self, level: Level) -> int:
        """Return the number of measured requests of a level: ten per user, or those of 20 s."""
        if self.count:
            return self.count
        return max(10, 10 * (level.users or 0) if level.rate is None else round(20 * level.rate))

    def warm_ups(self, level: Level) -> int:
        """Return the number of requests before the measurement: one per user, because a server
        compiles at first use.
        """
        return (level.users or 1) if self.warm_up is None else self.warm_up


def read(path: Path) -> Workload:
    """Read a workload from a file. Raises WorkloadError."""
    try:
        found = strict_yaml.read_file(path)
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from None
    except strict_yaml.NotYAML as error:
        raise WorkloadError(f"{path}: {error}") from None
    try:
        return parsed(found)
    except WorkloadError as error:
        raise WorkloadError(f"{path}: {error}") from None


def parsed(found: Any) -> Workload:
    """A file's content as a workload. Raises WorkloadError."""
    parameters = _parameters(found)
    values: dict[str, Any] = {}
    faults = []
    for name, value in parameters.items():
        field, read = _KEYS.get(name.removeprefix("--").replace("-", "_"), (None, None))
        if field is None or read is None:
            faults.append(_unknown(name))
        elif field in values:
            faults.append(f"{name}: is given twice, by two of its names; keep one")
        else:
            try:
                values[field] = read(value)
            except (ValueError, TypeError) as error:
                values[field] = None
                faults.append(f"{name}: {value!r:.80}: should be {error}")
    values.pop("streaming", None)
    faults += [
        f"{name}: is missing; a workload says how long prompts and answers are"
        for field, name in (("input", "prompt_input_tokens_mean"), ("output", "output_tokens_mean"))
        if field not in values
    ]
    if not values.keys() & {"concurrency", "rates"}:
        faults.append("concurrency: is missing, and so is request_rate; name one")
    if faults:
        raise WorkloadError("; ".join(faults))
    return _consistent(Workload(**values))


def _parameters(found: Any) -> Mapping[str, Any]:
    if not isinstance(found, dict) or not found or not all(isinstance(it, str) for it in found):
        raise WorkloadError("should have lines like `concurrency: 16`")
    if "parameters" not in found:
        if found.keys() & {"schemaVersion", "benchmark"}:
            raise WorkloadError(
                "is a file for `aiperf profile --config`, which `aiperf` runs itself; give the "
                "names of its options, like `prompt_input_tokens_mean: 550`"
            )
        return found
    kind = found.get("benchmark", {"type": "aiperf"})
    if not isinstance(kind, dict) or kind.get("type") != "aiperf":
        raise WorkloadError('benchmark: should be {"type": "aiperf"}')
    if unknown := found.keys() - {"benchmark", "parameters", "tooling"}:
        raise WorkloadError(f"{', '.join(sorted(unknown))}: not known beside `parameters`")
    parameters = found["parameters"]
    if not isinstance(parameters, dict) or not all(isinstance(it, str) for it in parameters):
        raise WorkloadError("parameters: should have names like `concurrency`")
    return parameters


def _unknown(name: str) -> str:
    if why := _NOT_HERE.get(name.replace("-", "_")):
        return f"{name}: {why}"
    near = spelling.nearest(name, _KEYS)
    return f"{name}: no such key" + (f"; did you mean {near}?" if near else "")


def _consistent(workload: Workload) -> Workload:
    """Return the workload. Raises WorkloadError if its keys contradict each other."""
    faults = []
    if bool(workload.prefixes) != bool(workload.prefix):
        faults.append("num_prefix_prompts and prefix_prompt_length: give both, or neither")
    if workload.prefixes and (workload.input_stddev or workload.output_stddev):
        faults.append(
            "prefix prompts come with prompts and answers of one length: leave the stddev out"
        )
    if workload.rates and len(workload.concurrency) > 1:
        faults.append("request_rate and a list for concurrency: give a list for one of them")
    for name, mean, stddev in (
        ("input", workload.input, workload.input_stddev),
        ("output", workload.output, workload.output_stddev),
    ):
        if spread(mean, stddev) >= 1:
            faults.append(f"{name}: a stddev of {stddev:g} is too large for a mean of {mean}")
    if faults:
        raise WorkloadError("; ".join(faults))
    return workload


def spread(mean: int, stddev: float) -> float:
    """Return the half-width of the uniform distribution with this deviation, over the mean."""
    return math.sqrt(3) * stddev / mean


def _whole(low: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(f"a whole number from {low} on")
        return value

    return read


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError("a number, not below 0")
    return float(value)


def _list(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def listed(value: Any) -> tuple[Any, ...]:
        found = tuple(map(read, value if isinstance(value, list) else [value]))
        if not found:
            raise ValueError("a number or a list of them")
        return found

    return listed


def _rate(value: Any) -> float:
    if not (found := _number(value)):
        raise ValueError("requests/s, more than 0")
    return found


def _endpoint(value: Any) -> Endpoint:
    if value not in ("chat", "completions"):
        raise ValueError("chat or completions")
    found: Endpoint = value
    return found


def _streaming(value: Any) -> bool:
    if value is not True:
        raise ValueError("true: only a stream tells when its first token came")
    return True


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a text")
    return value


_FIELDS: Mapping[tuple[str, ...], tuple[str, Callable[[Any], Any]]] = {
    ("prompt_input_tokens_mean", "synthetic_input_tokens_mean", "isl"): ("input", _whole(1)),
    ("prompt_input_tokens_stddev", "synthetic_input_tokens_stddev", "isl_stddev"): (
        "input_stddev",
        _number,
    ),
    ("output_tokens_mean", "prompt_output_tokens_mean", "osl"): ("output", _whole(1)),
    ("output_tokens_stddev", "prompt_output_tokens_stddev", "osl_stddev"): (
        "output_stddev",
        _number,
    ),
    ("num_prefix_prompts", "prefix_prompt_pool_size", "prompt_prefix_pool_size"): (
        "prefixes",
        _whole(0),
    ),
    ("prefix_prompt_length", "prompt_prefix_length"): ("prefix", _whole(0)),
    ("concurrency",): ("concurrency", _list(_whole(1))),
    ("request_rate",): ("rates", _list(_rate)),
    ("request_count", "num_requests"): ("count", _whole(1)),
    ("warmup_request_count", "num_warmup_requests"): ("warm_up", _whole(0)),
    ("random_seed",): ("seed", _whole(0)),
    ("endpoint_type",): ("endpoint", _endpoint),
    ("streaming",): ("streaming", _streaming),
    ("model", "model_names"): ("model", _text),
    ("tokenizer",): ("tokenizer", _text),
}
"""AIPerf's names of one option → the field, and its reader, whose errors have the expected form."""
_KEYS = {name: to for names, to in _FIELDS.items() for name in names}
_NOT_HERE = {
    "url": "the endpoint is named on the command line",
    "benchmark_duration": "a load here ends after request_count requests",
    "input_file": "prompts are made up here; `aiperf` takes them from files",
    "public_dataset": "prompts are made up here; `aiperf` takes them from datasets",
    "goodput": "objectives are options here: --slo-ttft-ms and --slo-itl-ms",
}
"""Unsupported options of AIPerf → the alternative."""
