"""Every option, declared once: names, what it takes, default, where it goes, what it is for.

An option's names are environment variables in order of precedence. `OPTION_*` and the `SERVING_*`,
`SAGEMAKER_*`, `HF_*` names beside it are the vocabulary of Amazon SageMaker's LMI container. Every
command-line option of vLLM that is not declared here can be given by its own name as
`OPTION_<NAME>`; `vllm_options.json` lists them.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

PREFIX = "OPTION_"

Reader = Callable[[str], Any]
"""Turns an option's text into its value, or raises ValueError saying what it should be."""


def text(value: str) -> str:
    return value


def words(value: str) -> tuple[str, ...]:
    """Read a JSON list, or words between commas."""
    if value.startswith("["):
        found = _json(value)
        if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
            raise ValueError('a JSON list of strings, like ["a", "b"], or words between commas')
        return tuple(found)
    return tuple(word.strip() for word in value.split(",") if word.strip())


def boolean(value: str) -> bool:
    try:
        return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
    except KeyError:
        raise ValueError("true or false") from None


def integer(low: int | None = None, high: int | None = None) -> Reader:
    def read(value: str) -> int:
        limits = "".join(
            f", {word} {limit}"
            for word, limit in (("at least", low), ("at most", high))
            if limit is not None
        )
        try:
            number = int(value)
            if (low is not None and number < low) or (high is not None and number > high):
                raise ValueError
        except ValueError:
            raise ValueError(f"a whole number{limits}") from None
        return number

    return read


def fraction(value: str) -> float:
    try:
        number = float(value)
        if not 0 < number <= 1:
            raise ValueError
    except ValueError:
        raise ValueError("a number above 0 and at most 1, like 0.9") from None
    return number


def size(value: str) -> int:
    """Read a number with vLLM's suffixes: k, m, g, t are powers of 1000, K, M, G, T of 1024."""
    match = re.fullmatch(r"(\d+)(?:([kmgt])|([KMGT]))?|(\d+\.\d+)([kmgt])", value)
    if not match:
        raise ValueError("a whole number, or one with a suffix like 8k (8,000) or 8K (8,192)")
    whole, decimal, binary, real, real_decimal = match.groups()
    if binary:
        return int(whole) << 10 * ("KMGT".index(binary) + 1)
    if suffix := decimal or real_decimal:
        return int(float(whole or real) * 1000 ** ("kmgt".index(suffix) + 1))
    return int(whole)


def model_len(value: str) -> int:
    """Read a length in tokens; "auto" and -1 ask vLLM for the longest that fits its memory."""
    if value.lower() in ("auto", "-1"):
        return -1
    try:
        length = size(value)
        if length < 1:
            raise ValueError
    except ValueError:
        raise ValueError('a number of tokens, like 8192 or 8k, or "auto"') from None
    return length


def degree(value: str) -> int | Literal["max"]:
    if value.lower() == "max":
        return "max"
    try:
        number: int = integer(low=1)(value)
    except ValueError:
        raise ValueError('a whole number, at least 1, or "max"') from None
    return number


DTYPES = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    **{name: name for name in ("auto", "float32", "float16", "bfloat16", "float", "half")},
}


def dtype(value: str) -> str:
    try:
        return DTYPES[value.lower()]
    except KeyError:
        raise ValueError(f"one of {', '.join(DTYPES)}") from None


def _json(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"JSON ({error})") from None


@dataclasses.dataclass(frozen=True)
class Option:
    """What is known of one option beside its default.

    names: environment variables that set it; the first that is set wins.
    vllm: the vLLM option it becomes. `OPTION_<VLLM>` is then one more name, which must agree.
    """

    names: tuple[str, ...]
    read: Reader
    help: str
    vllm: str | None = None


def _option(
    read: Reader, *names: str, default: Any = None, help: str, vllm: str | None = None
) -> Any:
    about = Option(names, read, help, vllm)
    return dataclasses.field(default=default, metadata={"option": about})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the operator asked for, read and checked. `settings.read()` makes it."""

    model_id: str = _option(
        text,
        "HF_MODEL_ID",
        "OPTION_MODEL_ID",
        default="/opt/ml/model",
        vllm="model",
        help="The model: a local folder or a Hugging Face hub id.",
    )
    served_model_name: tuple[str, ...] = _option(
        words,
        "OPTION_SERVED_MODEL_NAME",
        default=(),
        vllm="served_model_name",
        help="Names that requests may give as `model`. The first stands in answers and metrics. "
        "Default: the hub id or the folder's name, and `lmi`.",
    )
    port: int = _option(
        integer(1, 65535),
        "SAGEMAKER_BIND_TO_PORT",
        "OPTION_PORT",
        default=8080,
        help="The port to listen on.",
    )
    max_request_size: int = _option(
        integer(low=1),
        "SAGEMAKER_MAX_REQUEST_SIZE",
        "SERVING_MAX_REQUEST_SIZE",
        default=64 * 1024**2,
        help="The largest request body in bytes; a larger one is answered 413.",
    )
    tensor_parallel_degree: int | Literal["max"] = _option(
        degree,
        "OPTION_TENSOR_PARALLEL_DEGREE",
        "TENSOR_PARALLEL_DEGREE",
        "SM_NUM_GPUS",
        default="max",
        vllm="tensor_parallel_size",
        help="Devices that one copy of the model is spread over. `max`: every visible GPU, or 1 "
        "without GPUs.",
    )
    max_model_len: int | None = _option(
        model_len,
        "OPTION_MAX_MODEL_LEN",
        vllm="max_model_len",
        help="Longest prompt and answer together, in tokens. Default: the model's own.",
    )
    max_rolling_batch_size: int | None = _option(
        integer(low=1),
        "OPTION_MAX_ROLLING_BATCH_SIZE",
        vllm="max_num_seqs",
        help="Sequences that are generated at the same time. Default: vLLM's own.",
    )
    dtype: str = _option(
        dtype,
        "OPTION_DTYPE",
        default="auto",
        vllm="dtype",
        help="Data type of the weights and activations: auto, fp32, fp16, bf16.",
    )
    enforce_eager: bool | None = _option(
        boolean,
        "OPTION_ENFORCE_EAGER",
        vllm="enforce_eager",
        help="Run the model without compiling it: starts sooner, runs slower. Default: true "
        "without a GPU, else false.",
    )
    gpu_memory_utilization: float | None = _option(
        fraction,
        "OPTION_GPU_MEMORY_UTILIZATION",
        vllm="gpu_memory_utilization",
        help="Share of each GPU's memory that vLLM may use. Default: vLLM's own.",
    )
    trust_remote_code: bool = _option(
        boolean,
        "OPTION_TRUST_REMOTE_CODE",
        default=False,
        vllm="trust_remote_code",
        help="Run Python code that comes with the model.",
    )
    strict: bool = _option(
        boolean,
        "OPTION_STRICT",
        default=True,
        help="Refuse to start when an OPTION_* name is not known; false only warns.",
    )
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """vLLM options given by their own names, read but not interpreted: name → value."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that requests may give as `model`; the first stands in answers."""
        if self.served_model_name:
            return self.served_model_name
        local = self.model_id.startswith((".", "/")) or Path(self.model_id).is_dir()
        name = Path(self.model_id).absolute().name if local else self.model_id
        return (name, "lmi")


OPTIONS: Mapping[str, Option] = {
    field.name: field.metadata["option"]
    for field in dataclasses.fields(Settings)
    if "option" in field.metadata
}
"""Settings field → what is declared of it."""


# vLLM options that belong to its own HTTP server, which Slipway replaces.
_HTTP = "its own HTTP server is not used: Slipway answers HTTP itself"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "allow_credentials",
            "allowed_headers",
            "allowed_methods",
            "allowed_origins",
            "api_key",
            "api_server_count",
            "config",
            "data_parallel_supervisor_port",
            "disable_access_log_for_endpoints",
            "disable_fastapi_docs",
            "disable_uvicorn_access_log",
            "dp_supervisor_probe_failure_threshold",
            "dp_supervisor_probe_interval_s",
            "dp_supervisor_probe_timeout_s",
            "enable_offline_docs",
            "enable_request_id_headers",
            "enable_ssl_refresh",
            "grpc",
            "grpc_port",
            "h11_max_header_count",
            "h11_max_incomplete_event_size",
            "headless",
            "host",
            "middleware",
            "root_path",
            "ssl_ca_certs",
            "ssl_cert_reqs",
            "ssl_certfile",
            "ssl_ciphers",
            "ssl_keyfile",
            "uds",
            "uvicorn_log_level",
        ),
        _HTTP,
    ),
    "shutdown_timeout": "Slipway drains requests itself, within 25 seconds of SIGTERM",
}
"""vLLM options that cannot be given, each with the reason."""


@functools.cache
def vllm_options() -> Mapping[str, Reader]:
    """vLLM's own options that are passed on: name → reader."""
    declared = {option.vllm for option in OPTIONS.values()}
    listed = json.loads(Path(__file__).with_name("vllm_options.json").read_text())
    return {
        name: _reader(row["kind"], row.get("choices", ()))
        for name, row in listed.items()
        if name not in declared and name not in REFUSED
    }


def _reader(kind: str, choices: tuple[str, ...]) -> Reader:
    def choice(value: str) -> str:
        if value not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return value

    def number(value: str) -> float:
        try:
            found = float(value)
            if not math.isfinite(found):
                raise ValueError
        except ValueError:
            raise ValueError("a number") from None
        return found

    def json_text(value: str) -> str:
        _json(value)
        return value

    return {
        "boolean": boolean,
        "switch": lambda value: boolean(value) or None,  # vLLM has no --no- form of these
        "integer": integer(),
        "number": number,
        "size": size,
        "list": words,
        "json": json_text,
        "choice": choice,
        "text": text,
    }[kind]
