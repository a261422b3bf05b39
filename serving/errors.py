"""What can go wrong with a request, and how each path tells it: one table, three body shapes."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from lmi_config.options import Settings

log = logging.getLogger(__name__)


class ServingError(Exception):
    """A request that is not answered as asked. The message is meant for the client."""


class BadRequest(ServingError):
    """The request cannot be understood, or asks for what cannot be done.

    parameter: the part of the request that is at fault, where one is.
    """

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class NotFound(ServingError):
    """The request names a model or a path that is not here."""


class MethodNotAllowed(ServingError):
    """The path is here but answers other methods: those that are allowed."""

    def __init__(self, path: str, method: str, allowed: Sequence[str]) -> None:
        super().__init__(f"{path} does not answer {method}")
        self.allowed = allowed


class TooLarge(ServingError):
    """The body is larger than the server takes."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the body is larger than {limit} bytes; SERVING_MAX_REQUEST_SIZE sets the limit"
        )


class Conflict(ServingError):
    """The name is taken, or the call asks for what this server does not do."""


class AdapterRefused(ServingError):
    """An adapter's files cannot be used. The message says why."""


class AdapterFailed(ServingError):
    """The engine could not load an adapter; it may be tried again."""


class UserCodeFailed(ServingError):
    """A user's model.py cannot be loaded, or a function of it raised, hung or returned nonsense."""


class NoSlot(ServingError):
    """There is no room for one more adapter."""


class NotReady(ServingError):
    """The server is starting or stopping, or holds as much as it can."""


class Overloaded(ServingError):
    """There are more requests than can be answered in time. retry_after: in seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TimedOut(ServingError):
    """The answer took longer than the operator allows."""

    def __init__(self, timeout: int) -> None:
        super().__init__(
            f"the request took longer than {timeout} s; OPTION_PREDICT_TIMEOUT sets the limit"
        )


class HeadTooLarge(ServingError):
    """The request's line and headers are longer than the router takes."""


class ReplicaFailed(ServingError):
    """A replica broke off, or did not speak HTTP, before its answer began."""


class ReplicaTimedOut(ServingError):
    """A replica did not begin its answer in time."""


class EngineFailed(ServingError):
    """The engine broke while it served the request; its log has the cause."""


class ServerFailed(ServingError):
    """Slipway itself broke while it served the request; its log has the cause."""


class _Told(NamedTuple):
    """How one kind of error is told: its status, and its name in the two APIs that have names."""

    status: int
    status_on_invocations: int
    openai_type: str
    lmi_type: str


# LMI answers 424 to every fault of the client that its Python side finds, and clients match on it.
_TABLE: Mapping[type[ServingError], _Told] = {
    BadRequest: _Told(400, 424, "BadRequestError", "BadRequestException"),
    NotFound: _Told(404, 404, "NotFoundError", "ResourceNotFoundException"),
    MethodNotAllowed: _Told(405, 405, "MethodNotAllowedError", "MethodNotAllowedException"),
    TooLarge: _Told(413, 413, "PayloadTooLargeError", "PayloadTooLargeException"),
    Conflict: _Told(409, 409, "ConflictError", "IllegalArgumentException"),
    AdapterRefused: _Told(424, 424, "FailedDependencyError", "TranslateException"),
    AdapterFailed: _Told(424, 424, "FailedDependencyError", "TranslateException"),
    UserCodeFailed: _Told(424, 424, "FailedDependencyError", "TranslateException"),
    NoSlot: _Told(507, 507, "InsufficientStorageError", "OutOfMemoryException"),
    NotReady: _Told(503, 503, "ServiceUnavailableError", "ServiceUnavailableException"),
    Overloaded: _Told(503, 503, "ServiceUnavailableError", "WlmCapacityException"),
    TimedOut: _Told(504, 504, "TimeoutError", "TimeoutException"),
    HeadTooLarge: _Told(431, 431, "BadRequestError", "BadRequestException"),
    ReplicaFailed: _Told(502, 502, "BadGatewayError", "BadGatewayException"),
    ReplicaTimedOut: _Told(504, 504, "TimeoutError", "TimeoutException"),
    EngineFailed: _Told(500, 500, "InternalServerError", "InternalServerException"),
    ServerFailed: _Told(500, 500, "InternalServerError", "InternalServerException"),
}

Codes = Mapping[type[ServingError], int]
"""Statuses that the operator wants in the place of those in the table."""


def codes(settings: Settings) -> Codes:
    found = {
        BadRequest: settings.bad_request_http_code,
        EngineFailed: settings.server_error_http_code,
        ServerFailed: settings.server_error_http_code,
        NotReady: settings.wlm_error_http_code,
        Overloaded: settings.throttle_error_http_code,
        TimedOut: settings.timeout_http_code,
    }
    return {kind: code for kind, code in found.items() if code}


_NONE: Codes = {}


def from_engine(status: int, answer: bytes, request: bytes) -> ServingError:
    """The exception for an error that the engine answered in OpenAI's shape.

    vLLM likes to repeat what it was sent; a message that repeats the prompt is not passed on.
    """
    try:
        error = msgspec.json.decode(answer)["error"]
        message, parameter = str(error["message"]), error.get("param")
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
        message, parameter = "the engine answered with an error", None
    if _repeats(message, request):
        message = f"{parameter or 'the request'} is not valid"
    if status == 404:
        return NotFound(message)
    if status == 503:
        return NotReady(message)
    if status >= 500:
        return EngineFailed(message)
    return BadRequest(message, parameter)


_PROTOCOL_KEYS = ("role", "type")  # their values say how to read a prompt, not what is in it


def _repeats(message: str, request: bytes) -> bool:
    """Whether a message has a text of the request's prompt in it, or the beginning of one."""
    try:
        body = msgspec.json.decode(request, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    prompts = [body.get(key) for key in ("prompt", "input", "messages", "suffix")]
    shown = (message, _ESCAPE.sub(_unescaped, message))
    return any(
        beginning in it and re.search(rf"(?<!\w){re.escape(beginning)}", it)
        for text in _texts(prompts)
        if (beginning := text.strip()[:24])
        for it in shown
    )


def _texts(value: Any) -> Iterator[str]:
    left = [value]  # no recursion: what the decoder bears is nested too deeply for it
    while left:
        it = left.pop()
        if isinstance(it, str):
            yield it
        elif isinstance(it, list):
            left.extend(it)
        elif isinstance(it, dict):
            left.extend(item for key, item in it.items() if key not in _PROTOCOL_KEYS)


_ESCAPE = re.compile(
    r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}|.)", re.DOTALL
)


def _unescaped(escape: re.Match[str]) -> str:
    """What a message that shows a text as Python or JSON writes it means."""
    code = escape[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}.get(code, code)


INVOCATIONS = ("/invocations", "/predictions/{model}", "/models/{model}/invoke")
"""The paths of LMI's that are one: the last two are those of its server and of SageMaker's
multi-model endpoints.
"""
INVOCATIONS_PATH = "(?:" + re.sub(r"\{\w+\}", "[^/]+", "|".join(INVOCATIONS)) + ")"
"""The same as a regular expression."""
_INVOCATIONS = re.compile(INVOCATIONS_PATH)


def status(error: ServingError, path: str, codes: Codes = _NONE) -> int:
    """The HTTP status that tells this error on this path."""
    told = _TABLE[type(error)]
    return codes.get(type(error)) or (
        told.status_on_invocations if _INVOCATIONS.fullmatch(path) else told.status
    )


def headers(error: ServingError) -> dict[str, str]:
    """What the answer's head says of the error besides the status."""
    match error:
        case NotReady():
            return {"retry-after": "1"}
        case Overloaded():
            return {"retry-after": str(error.retry_after)}
        case MethodNotAllowed():
            return {"allow": ", ".join(error.allowed)}
    return {}


def body(error: ServingError, path: str, codes: Codes = _NONE) -> bytes:
    """The JSON body that tells this error on this path, in the shape of the path's API."""
    code, message = status(error, path, codes), str(error)
    told = _TABLE[type(error)]
    shape: dict[str, Any]
    if _INVOCATIONS.fullmatch(path):
        shape = {"code": code, "error": message}
    elif path.startswith("/v1/"):
        parameter = getattr(error, "parameter", None)
        parts = {"message": message, "type": told.openai_type, "param": parameter, "code": code}
        shape = {"error": parts}
    else:
        shape = {"code": code, "type": told.lmi_type, "message": message}
    return msgspec.json.encode(shape)


def unforeseen() -> ServingError:
    """What an exception that nobody foresaw is told as. To be called while it is handled."""
    log.exception("a request failed unexpectedly")
    return ServerFailed("the server failed on this request; its log says why")


def response(error: ServingError, path: str, codes: Codes = _NONE) -> Response:
    """The whole answer that tells this error on this path."""
    return Response(
        body(error, path, codes),
        status_code=status(error, path, codes),
        headers=headers(error),
        media_type="application/json",
    )
