# SPDX-License-Identifier: Apache-2.0
"""Readers of option values: they turn text into a value, or raise ValueError with the expected
form.
"""

import ipaddress
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from lmi_config.options import spelling

Reader = Callable[[str], Any]
"""Turns an option's text into its value, or raises ValueError with the expected form."""

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def text(value: str) -> str:
    return value


def key(value: str, shortest: int = 8) -> str:
    """Read a value that is sent in a header. Masking a shorter value in a log would also mask parts
    of harmless words.
    """
    if not re.fullmatch(r"[\x21-\x7e]+", value) or len(value) < shortest:
        raise ValueError(f"at least {shortest} characters of ASCII, without spaces")
    return value


def long_key(value: str) -> str:
    """Read a key for signatures."""
    return key(value, 32)


def store(value: str) -> str:
    """Read the address of a Valkey or Redis."""
    if not re.fullmatch(r"(valkey|redis)s?://[^/\s]+(/\d*)?", value):
        raise ValueError("like valkey://host:6379, or valkeys:// with TLS")
    return value


def adapter_list(value: str) -> str:
    """Read the place of the list of adapters: a folder, a prefix in S3, or a Valkey or Redis."""
    try:
        return store(value) if "://" in value and not value.startswith("s3://") else value
    except ValueError:
        raise ValueError("a folder, s3://bucket/prefix, or valkey://host:6379") from None


def https_url(value: str) -> str:
    """Read a URL whose answers cannot be changed on the way: https, or this machine."""
    match = re.fullmatch(r"(https?)://(\[[0-9a-f:]+\]|[^/\s:@\[\]]+)(:\d+)?(/[^\s#]*)?", value)
    here = match and match[2] in ("localhost", "127.0.0.1", "[::1]")
    if not match or (match[1] == "http" and not here):
        raise ValueError("like https://host/path; http:// is for this machine alone")
    return value


def words(value: str) -> tuple[str, ...]:
    """Read a JSON list, consecutive JSON objects, or words between commas.

    JSON values other than strings stay JSON, as in AWS's vLLM container.
    """
    if value.startswith("["):
        return tuple(it if isinstance(it, str) else json.dumps(it) for it in _json(value))
    if value.startswith("{"):
        return tuple(map(json.dumps, _objects(value)))
    if not (found := tuple(word.strip() for word in value.split(",") if word.strip())):
        raise ValueError("at least one word")
    return found


HUB = "hf://"
_ID_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB_ID = re.compile(
    rf"(?:{HUB})?(?P<repo>{_ID_PART}/{_ID_PART})(?:@(?P<revision>{_ID_PART}(?:/{_ID_PART})*))?"
)


class HubId(NamedTuple):
    """revision: a branch, a tag or a commit; None for the main branch."""

    repo: str
    revision: str | None


def hub_id(src: str) -> HubId | None:
    """Read `org/name` or `hf://org/name`, optionally with `@revision`. None for other texts."""
    found = _HUB_ID.fullmatch(src)
    return HubId(found["repo"], found["revision"]) if found else None


def names_repo(repo: str, repos: Iterable[str]) -> bool:
    """Whether a list of `org/name` and `org/*` names a repository."""
    return any(repo == it or f"{repo.partition('/')[0]}/*" == it for it in repos)


def repos(value: str) -> tuple[str, ...]:
    """Read repositories of the hub between commas: `org/name`, or `org/*` for an organisation's."""
    found = words(value)
    for word in found:
        asked = hub_id(word.removesuffix("*") + "all" if word.endswith("/*") else word)
        if not asked or asked.revision or "://" in word:
            raise ValueError("org/name or org/*, between commas")
    return found


CACHE_SOURCE = re.compile(
    r"(?P<uri>s3://(?P<bucket>[^/#]+)/(?P<prefix>(?:[^/#]+/)*)(?P<name>[^/#]+))"
    r"#sha256=(?P<digest>[0-9a-f]{64})"
)
"""An archive on S3 and its digest."""


def cache_source(value: str) -> str:
    if not CACHE_SOURCE.fullmatch(value):
        raise ValueError("an archive and its digest: s3://bucket/name.tgz#sha256=…, 64 hex digits")
    return value


def address(value: str) -> str:
    """Read an IP address."""
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise ValueError("an address, like 127.0.0.1, 0.0.0.0 or ::") from None


def boolean(value: str) -> bool:
    try:
        return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
    except KeyError:
        raise ValueError("true or false") from None


def strictness(value: str) -> bool | Literal["auto"]:
    try:
        return "auto" if value.lower() == "auto" else boolean(value)
    except ValueError:
        raise ValueError("auto, true or false") from None


def switch(value: str) -> bool | None:
    """Read an option of vLLM's without a --no- form: true, or None for not set."""
    return boolean(value) or None


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


def one_of(*numbers: int) -> Reader:
    def read(value: str) -> int:
        if value not in map(str, numbers):
            raise ValueError(f"one of {', '.join(map(str, numbers))}")
        return int(value)

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
    """Read a number with vLLM's suffixes, or with units.

    k, m, g, t are powers of 1000, K, M, G, T of 1024; kB to TB and KiB to TiB keep their usual
    meaning, in any case.
    """
    if unit := re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt])(i?)b", value, re.IGNORECASE):
        number, letter, binary = unit.groups()
        return int(float(number) * (1024 if binary else 1000) ** ("kmgt".index(letter.lower()) + 1))
    match = re.fullmatch(r"(\d+)(?:([kmgt])|([KMGT]))?|(\d+\.\d+)([kmgt])", value)
    if not match:
        raise ValueError(
            "a whole number, or one with a suffix: 8k and 8kB are 8,000, 8K and 8KiB are 8,192"
        )
    whole, decimal, binary, real, real_decimal = match.groups()
    if binary:
        return int(whole) << 10 * ("KMGT".index(binary) + 1)
    if suffix := decimal or real_decimal:
        return int(float(whole or real) * 1000 ** ("kmgt".index(suffix) + 1))
    return int(whole)


AUTO = -1
"""The length that makes vLLM choose the longest one that fits its memory."""


def model_len(value: str) -> int:
    """Read a length in tokens, or "auto" or -1 for AUTO."""
    if value.lower() in ("auto", "-1"):
        return AUTO
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


class AtMost(int):
    """A number that is reduced to the available room."""


def copies(value: str) -> int | Literal["auto"]:
    if value.lower() == "auto":
        return "auto"
    try:
        number: int = integer(low=1)(value)
    except ValueError:
        raise ValueError('a whole number, at least 1, or "auto"') from None
    return number


def at_most(value: str) -> AtMost:
    return AtMost(integer(low=1)(value))


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


def _objects(value: str) -> Iterator[Any]:
    """Yield consecutive JSON values, with or without space between them."""
    decoder = json.JSONDecoder()
    while value := value.lstrip():
        try:
            found, end = decoder.raw_decode(value)
        except ValueError as error:
            raise ValueError(f"JSON ({error})") from None
        yield found
        value = value[end:]


def json_text(value: str) -> str:
    """Check that it is JSON; vLLM reads it itself."""
    _json(value)
    return value


def counts(value: str) -> str:
    """Check a JSON object, or make one of `image=2,video=0`, the form of older versions of vLLM."""
    if found := re.fullmatch(r"\w+=\d+(,\s*\w+=\d+)*", value):
        pairs = (pair.partition("=") for pair in found[0].replace(" ", "").split(","))
        return json.dumps({name: int(count) for name, _, count in pairs})
    return json_text(value)


def compilation(value: str) -> str:
    """Check JSON, and rename `level` to `mode`, its current name in vLLM."""
    found = _json(value)
    if isinstance(found, dict) and "level" in found and "mode" not in found:
        return json.dumps({"mode" if it == "level" else it: found[it] for it in found})
    return value


def json_object(value: str) -> Mapping[str, Any]:
    found = _json(value)
    if not isinstance(found, dict):
        raise ValueError('a JSON object, like {"a": 1}')
    return found


MOST_MODELS, LONGEST_NAME = 64, 128
_MODEL_NAME = re.compile(rf"[A-Za-z0-9][\w.:@/-]{{0,{LONGEST_NAME - 1}}}", re.ASCII)


def is_model_name(name: str) -> bool:
    """Whether one of several models may have this name. Bodies, logs and lists contain it."""
    return bool(_MODEL_NAME.fullmatch(name))


def models(value: str) -> Mapping[str, Mapping[str, str]]:
    """Read several models: name → options, as texts."""
    found = json_object(value)
    if len(found) > MOST_MODELS:
        raise ValueError(f"at most {MOST_MODELS} models")
    made = {}
    for name, options in found.items():
        if not is_model_name(name):
            raise ValueError(
                f"names of models: up to {LONGEST_NAME} letters, digits and ._:@/-, the first a "
                f"letter or a digit; {name!r:.100} is none"
            )
        if not isinstance(options, dict):
            raise ValueError(
                f'options for each model, like {{{json.dumps(name)}: {{"model_id": "org/name"}}}}'
            )
        made[name] = {
            key: it if isinstance(it, str) else "" if it is None else json.dumps(it)
            for key, it in options.items()
        }
    return made


def number(value: str) -> float:
    try:
        found = float(value)
        if not math.isfinite(found):
            raise ValueError
    except ValueError:
        raise ValueError("a number") from None
    return found


def amount(value: str) -> float:
    try:
        if (found := number(value)) < 0:
            raise ValueError
    except ValueError:
        raise ValueError("a number, at least 0") from None
    return found


def positive(value: str) -> float:
    try:
        if (found := number(value)) <= 0:
            raise ValueError
    except ValueError:
        raise ValueError("a number above 0") from None
    return found


def choice(*choices: str) -> Reader:
    def read(value: str) -> str:
        if value not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return value

    return read


_TASKS = (
    "auto",
    "text-generation",
    "generate",
    "text-embedding",
    "embed",
    "feature-extraction",
    "classify",
    "score",
    "reward",
)
_AS_TASKS = {
    **dict.fromkeys(
        (
            "any-to-any",
            "audio-text-to-text",
            "conversational",
            "image-text-to-text",
            "video-text-to-text",
            "visual-question-answering",
        ),
        "text-generation",
    ),
    "embedding": "embed",
    "sentence-similarity": "feature-extraction",
    "text-classification": "classify",
    "text-ranking": "classify",
    "transcription": "text-generation",
}
"""The hub's and older vLLM's names of tasks → ours."""
_IN_WORDS = ("question-answering", "summarization", "text2text-generation", "translation")
"""Tasks that a generating model does by a prompt."""
UNKNOWN_TASK = "no task of vLLM's: the model does its own, as with auto"
_ELSEWHERE = {
    **dict.fromkeys(
        (
            "audio-classification",
            "depth-estimation",
            "document-question-answering",
            "fill-mask",
            "image-classification",
            "image-feature-extraction",
            "image-segmentation",
            "image-to-text",
            "mask-generation",
            "object-detection",
            "table-question-answering",
            "token-classification",
            "video-classification",
            "zero-shot-classification",
            "zero-shot-image-classification",
            "zero-shot-object-detection",
        ),
        "SageMaker's Hugging Face inference container",
    ),
    **dict.fromkeys(
        (
            "image-text-to-image",
            "image-to-image",
            "image-to-video",
            "text-to-image",
            "text-to-video",
        ),
        "a server of diffusion models",
    ),
    **dict.fromkeys(
        ("automatic-speech-recognition", "text-to-audio", "text-to-speech"), "a server of speech"
    ),
}
"""Unsupported tasks → software for them."""


def task(value: str) -> str:
    """Read a task. An unknown task is "auto", as in LMI; the caller logs a note (UNKNOWN_TASK)."""
    name = value.lower().replace("_", "-")
    if name in _TASKS:
        return name
    if name in _AS_TASKS:
        return _AS_TASKS[name]
    if name in _IN_WORDS:
        return "auto"
    near = spelling.nearest(name, (*_TASKS, *_AS_TASKS))
    if name not in _ELSEWHERE and not near:
        return "auto"
    does = f"; {value} is done by {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    meant = f"; did you mean {near}?" if near and not does else ""
    raise ValueError(f"one of {', '.join(_TASKS)}{does}{meant}")


def any_task(value: str) -> str:
    """Read a task for a model.py, which may do tasks that vLLM does not: these stay unchanged."""
    try:
        found = task(value)
    except ValueError:
        return value
    return value if found == "auto" and value.lower() != "auto" else found


def some_of(*choices: str) -> Reader:
    def read(value: str) -> tuple[str, ...]:
        found = words(value)
        if not found or not {*found} <= {*choices}:
            raise ValueError(f"some of {', '.join(choices)}, comma-separated")
        return found

    return read


def kind(name: str, choices: tuple[str, ...] = ()) -> Reader:
    """Return the reader of an option of vLLM's, by its kind in vllm_options.json."""
    return {
        "boolean": boolean,
        "switch": switch,
        "integer": integer(),
        "number": number,
        "size": size,
        "list": words,
        "json": json_text,
        "choice": choice(*choices),
        "text": text,
    }[name]


def log_level(value: str) -> str:
    """Read the name of a level of Python's logging."""
    if value.lower() not in LOG_LEVELS:
        raise ValueError(f"one of {', '.join(LOG_LEVELS)}")
    return value.lower()


_RATE = re.compile(r"(\d+)(?:/(?:PT|P)?(\d*)([SMHD]))?", re.IGNORECASE)
_SECONDS = {"S": 1, "M": 60, "H": 3600, "D": 86400}


def rate(value: str) -> tuple[int, int]:
    """Read LMI's rates, N/DURATION in ISO 8601, or N per minute. Returns number and seconds."""
    if not (match := _RATE.fullmatch(value)):
        raise ValueError("errors and a duration, like 10/PT1M, 100/PT1H or 10 (a minute)")
    return int(match[1]), int(match[2] or 1) * _SECONDS[(match[3] or "M").upper()]


def inverted(value: str) -> bool:
    return not boolean(value)


def mebibytes(value: str) -> int:
    found: int = integer(low=1)(value)
    return found * 1024**2


def entry_point(value: str) -> str:
    if value != "model.py" and not value.startswith("djl_python."):
        raise ValueError(
            "model.py, as which to name a file of your own, beside serving.properties or the "
            "model's files, or one of LMI's own handlers, like "
            "djl_python.lmi_vllm.vllm_async_service"
        )
    return value


class Endpoints(NamedTuple):
    """The EndpointSlices of Kubernetes to read. namespace: empty for the pod's own.

    port: the name or the number of the pods' port, or None for the usual one.
    """

    namespace: str
    selector: str
    port: str | int | None


class Pool(NamedTuple):
    """An InferencePool of Kubernetes, whose pods are the replicas. namespace: empty for the pod's
    own.
    """

    namespace: str
    name: str


_POOL = re.compile(r"([a-z0-9-]*)/([a-z0-9][a-z0-9.-]*)", re.ASCII)
_REPLICA = re.compile(r"(?:(https?)://)?(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::(\d{1,5}))?/?", re.ASCII)
_ENDPOINTS = re.compile(r"([a-z0-9-]*)/([\w./=!,() -]+)(?:\?port=([a-z0-9-]+))?", re.ASCII)


LONGEST_HOST = 253
"""Most characters of a DNS name (RFC 1035, 2.3.4)."""


def replica(value: str) -> str:
    """Read the address of one server into its base URL, with a port and without a slash."""
    match = _REPLICA.fullmatch(value)
    try:
        if not match or len(match[2]) > LONGEST_HOST:
            raise ValueError
        scheme, host, port = match.groups()
        scheme = scheme or "http"
        number = integer(1, 65535)(port or ("443" if scheme == "https" else "80"))
        if host.startswith("["):
            host = f"[{ipaddress.IPv6Address(host[1:-1])}]"
    except ValueError:
        raise ValueError(
            "like http://10.0.0.5:8080 or https://a.example:8443: no user, path or query"
        ) from None
    return f"{scheme}://{host.lower()}:{number}"


def is_address(url: str) -> bool:
    """Whether a URL's host is an IP address."""
    try:
        ipaddress.ip_address(urlsplit(url).hostname or "")
    except ValueError:
        return False
    return True


def replica_source(value: str) -> frozenset[str] | Path | Endpoints | Pool:
    """Read the source of replicas: base URLs, a file with such, or Kubernetes."""
    scheme, _, rest = value.partition("://")
    if scheme == "file":
        if not rest.startswith("/"):
            raise ValueError("an absolute path after file://, like file:///etc/slipway/replicas")
        return Path(rest)
    if scheme == "kubernetes":
        match = _ENDPOINTS.fullmatch(rest)
        if not match:
            raise ValueError(
                "kubernetes://NAMESPACE/LABELS?port=PORT, like "
                "kubernetes://default/kubernetes.io/service-name=slipway?port=http"
            )
        namespace, selector, port = match.groups()
        number = port and port.isdecimal()
        return Endpoints(namespace, selector, integer(1, 65535)(port) if number else port)
    if scheme == "inferencepool":
        pool = _POOL.fullmatch(rest)
        if not pool:
            raise ValueError("inferencepool://NAMESPACE/NAME, like inferencepool:///slipway")
        return Pool(*pool.groups())
    addresses = value.replace(",", " ").split()
    if not addresses:
        raise ValueError(
            "URLs like http://10.0.0.5:8080, a file://, a kubernetes:// or an inferencepool:// URL"
        )
    return frozenset(map(replica, addresses))


MOST_PATHS, LONGEST_PATH = 64, 200
_SEGMENT = r"/[\w:@~-][\w.:@~-]*"
_PATH = re.compile(rf"(?:{_SEGMENT})+(?:/\*)?", re.ASCII)
BELOW = re.compile(rf"(?:{_SEGMENT})+", re.ASCII)
"""The allowed characters after a prefix. No server reads them as another path."""
_ADMINISTERS = re.compile(
    # Slipway's own
    r"adapters|metrics|ping|health|files|batches|"
    # vLLM's, SGLang's, Ollama's, llama.cpp's, Triton's, by their names or prefixes
    r"(?:abort|attach|clear|collective|configure|continue|destroy|detach|dump|finish|flush|freeze|"
    r"get|init|is|load|logging|lora|pause|profile|pull|push|release|reload|reset|resume|scale|set|"
    r"shutdown|sleep|slow|start|stop|trace|unload|update|wake)(?:[_-].*)?|"
    r".*(?:weights?|lora[_-]adapters?|shared[_-]?memory)(?:[_-].*)?|"
    r"blobs|copy|create|delete|(?:open|close)_session|props|repository|settings?|slots|"
    # and common names
    r"admin|config|debug|exit|internal|kill|quit|reboot|restart|rpc",
    re.IGNORECASE | re.ASCII,
)
_OWN = re.compile(r"/(?:models|workflows|server|replicas|ui|livez)(?:/.*)?", re.IGNORECASE)
"""Slipway's and LMI's own paths. Other servers have some of them at a deeper level, like KServe's
/v2/models/M/infer.
"""
_BROAD = ("/v1/*", "/v2/*", "/api/*")
"""Prefixes that include administrative paths of some servers."""


def administers(path: str) -> bool:
    """Whether a path is an administrative one by its name: it changes or describes a server."""
    named = any(_ADMINISTERS.fullmatch(segment) for segment in path.split("/"))
    return named or bool(_OWN.fullmatch(path))


def routed_paths(value: str) -> tuple[str, ...]:
    """Read the paths that `route` passes on: whole paths, and prefixes that end with /*."""
    found = tuple(dict.fromkeys(value.replace(",", " ").split()))
    if not found or len(found) > MOST_PATHS:
        raise ValueError(f"1 to {MOST_PATHS} paths like /generate or /custom/*")
    for path in found:
        if len(path) > LONGEST_PATH or not _PATH.fullmatch(path):
            raise ValueError(
                f"paths like /generate, and prefixes like /custom/*, of at most {LONGEST_PATH} "
                f"letters, digits and ._~:@-; {path!r:.100} is none"
            )
        if administers(path) or path.lower() in _BROAD:
            raise ValueError(
                f"without administrative paths of servers; {path} is one, or has some below it"
            )
    return found


def replicas(value: str) -> str:
    """Check the source of replicas; the router reads it itself."""
    replica_source(value)
    return value
