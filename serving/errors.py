# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a request, and what it is on the wire: one table, a shape for each API."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from lmi_config.options.declared import Settings
from serving.protocol import INVOCATIONS_PATH, MESSAGES, RESPONSES, is_api

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


class Malformed(ServingError):
    """What came is no HTTP/1.1, or may be read in two ways."""


class InternalFunction(ServingError):
    """The request names the handler's function that it is for, which is no client's to choose."""


class NotFound(ServingError):
    """The request names a model or a path that is not here."""


class Forbidden(ServingError):
    """The request comes from a web page that may not send it."""


class Unauthorized(ServingError):
    """The request has no key, or none that is valid. The message does not have it."""


class NotPermitted(ServingError):
    """The request's key is valid, and not for this."""


class RateLimited(ServingError):
    """A key has used up what it may. what: of which it has no more, in OpenAI's words. limit: how
    much it may. retry_after: in seconds. said: headers of all its limits.
    """

    def __init__(
        self, what: str, limit: str, retry_after: int, said: Sequence[tuple[bytes, bytes]]
    ) -> None:
        super().__init__(f"this key may use {limit}; try again in {retry_after} s")
        self.what = what
        self.retry_after = retry_after
        self.said = said


class MethodNotAllowed(ServingError):
    """The path is here but answers other methods: those that are allowed."""

    def __init__(self, path: str, method: str, allowed: Sequence[str]) -> None:
        super().__init__(f"{path} does not answer {method}; it answers {', '.join(allowed)}")
        self.allowed = allowed


class TooLarge(ServingError):
    """The body is larger than the server takes. option: sets the limit."""

    def __init__(self, limit: int, option: str = "SERVING_MAX_REQUEST_SIZE") -> None:
        super().__init__(f"the body is larger than {limit} bytes; {option} sets the limit")


class Conflict(ServingError):
    """The name is taken, or the call asks for what this server does not do."""


class AdapterRefused(ServingError):
    """An adapter's files cannot be used. The message says why."""


class AdapterFailed(ServingError):
    """The engine could not load an adapter; it may be tried again."""


class AlreadyLoaded(AdapterFailed):
    """The engine has an adapter of this inner name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the engine has {name} already")


class NotLoaded(AdapterFailed):
    """The engine has no adapter of this inner name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the engine does not have {name}")


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


class Shed(ServingError):
    """The engine works on as much as it can, and a request of this priority does not wait."""

    def __init__(self) -> None:
        super().__init__(
            "the server works on as much as it can, and requests of a negative priority do not "
            "wait; try again"
        )


class TimedOut(ServingError):
    """The answer took longer than the operator allows."""

    def __init__(self, timeout: int) -> None:
        super().__init__(
            f"the request took longer than {timeout} s; OPTION_PREDICT_TIMEOUT sets the limit"
        )


class StorageFull(ServingError):
    """There is no room on disk for what the client wants to be kept."""


class HeadTooLarge(ServingError):
    """The request's line and headers are longer than the server takes."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request's line and headers are longer than {limit} bytes")


class TooSlow(ServingError):
    """The client took too long to send its request."""


class ReplicaFailed(ServingError):
    """A replica broke off, or did not speak HTTP, before its answer began."""


class ReplicaTimedOut(ServingError):
    """A replica did not begin its answer in time."""


class EngineFailed(ServingError):
    """The engine broke while it served the request; its log has the cause."""


class ServerFailed(ServingError):
    """Slipway itself broke while it served the request; its log has the cause."""


class _Row(NamedTuple):
    """One kind of error: its status, and its name in the two APIs that have names."""

    status: int
    status_on_invocations: int
    openai_type: str
    lmi_type: str


# LMI answers 424 to every fault of the client that its Python side finds, and clients match on it.
_TABLE: Mapping[type[ServingError], _Row] = {
    BadRequest: _Row(400, 424, "BadRequestError", "BadRequestException"),
    Malformed: _Row(400, 400, "BadRequestError", "BadRequestException"),
    InternalFunction: _Row(400, 400, "BadRequestError", "BadRequestException"),
    NotFound: _Row(404, 404, "NotFoundError", "ResourceNotFoundException"),
    Forbidden: _Row(403, 403, "PermissionDeniedError", "AccessDeniedException"),
    Unauthorized: _Row(401, 401, "invalid_request_error", "UnauthorizedException"),
    NotPermitted: _Row(403, 403, "PermissionDeniedError", "AccessDeniedException"),
    RateLimited: _Row(429, 429, "RateLimitError", "ThrottlingException"),
    MethodNotAllowed: _Row(405, 405, "MethodNotAllowedError", "MethodNotAllowedException"),
    TooLarge: _Row(413, 413, "PayloadTooLargeError", "PayloadTooLargeException"),
    Conflict: _Row(409, 409, "ConflictError", "IllegalArgumentException"),
    AdapterRefused: _Row(424, 424, "FailedDependencyError", "TranslateException"),
    AdapterFailed: _Row(424, 424, "FailedDependencyError", "TranslateException"),
    AlreadyLoaded: _Row(424, 424, "FailedDependencyError", "TranslateException"),
    NotLoaded: _Row(424, 424, "FailedDependencyError", "TranslateException"),
    UserCodeFailed: _Row(424, 424, "FailedDependencyError", "TranslateException"),
    NoSlot: _Row(507, 507, "InsufficientStorageError", "OutOfMemoryException"),
    NotReady: _Row(503, 503, "ServiceUnavailableError", "ServiceUnavailableException"),
    Overloaded: _Row(503, 503, "ServiceUnavailableError", "WlmCapacityException"),
    Shed: _Row(429, 429, "RateLimitError", "ThrottlingException"),
    TimedOut: _Row(504, 504, "TimeoutError", "TimeoutException"),
    StorageFull: _Row(413, 413, "PayloadTooLargeError", "PayloadTooLargeException"),
    HeadTooLarge: _Row(431, 431, "BadRequestError", "BadRequestException"),
    TooSlow: _Row(408, 408, "BadRequestError", "BadRequestException"),
    ReplicaFailed: _Row(502, 502, "BadGatewayError", "BadGatewayException"),
    ReplicaTimedOut: _Row(504, 504, "TimeoutError", "TimeoutException"),
    EngineFailed: _Row(500, 500, "InternalServerError", "InternalServerException"),
    ServerFailed: _Row(500, 500, "InternalServerError", "InternalServerException"),
}

_OPENAI_CODES: Mapping[type[ServingError], str] = {
    Unauthorized: "invalid_api_key",
    NotPermitted: "insufficient_permissions",
    RateLimited: "rate_limit_exceeded",
}
"""OpenAI's own words for some; the others have vLLM's, which is the status."""

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


def headers(error: ServingError) -> dict[str, str]:
    """What the answer's head says of the error besides the status."""
    match error:
        case NotReady() | Shed():
            return {"retry-after": "1"}
        case Overloaded():
            return {"retry-after": str(error.retry_after)}
        case RateLimited():
            said = {name.decode(): value.decode() for name, value in error.said}
            return {"retry-after": str(error.retry_after), **said}
        case Unauthorized():
            return {"www-authenticate": "Bearer"}
        case MethodNotAllowed():
            return {"allow": ", ".join(error.allowed)}
    return {}


class ErrorShape:
    """How an API has errors: in which statuses, and in which bodies. This is LMI's own.

    codes: statuses that the operator wants in the place of those in the table.
    """

    def __init__(self, codes: Codes = _NONE) -> None:
        self._codes = codes

    def status(self, error: ServingError) -> int:
        return self._codes.get(type(error)) or self._status(_TABLE[type(error)])

    def body(self, error: ServingError) -> bytes:
        return msgspec.json.encode(self._shaped(error, self.status(error)))

    def event(self, error: ServingError) -> bytes:
        """The same in a stream that has begun."""
        return self.body(error)

    def response(self, error: ServingError) -> Response:
        """The whole answer."""
        return Response(
            self.body(error),
            status_code=self.status(error),
            headers=headers(error),
            media_type="application/json",
        )

    def _status(self, row: _Row) -> int:
        return row.status

    def _shaped(self, error: ServingError, code: int) -> dict[str, Any]:
        return {"code": code, "type": _TABLE[type(error)].lmi_type, "message": str(error)}


class InvocationsErrors(ErrorShape):
    """As LMI's Python side has them."""

    def _status(self, row: _Row) -> int:
        return row.status_on_invocations

    def _shaped(self, error: ServingError, code: int) -> dict[str, Any]:
        return {"code": code, "error": str(error)}


class OpenAIErrors(ErrorShape):
    """As OpenAI has them."""

    def _shaped(self, error: ServingError, code: int) -> dict[str, Any]:
        kind = getattr(error, "what", None) or _TABLE[type(error)].openai_type
        parameter = getattr(error, "parameter", None)
        named = _OPENAI_CODES.get(type(error), code)
        parts = {"message": str(error), "type": kind, "param": parameter, "code": named}
        return {"error": parts}


class ResponsesErrors(OpenAIErrors):
    """As OpenAI's Responses have them: in streams as an event of their own."""

    def event(self, error: ServingError) -> bytes:
        kind, parameter = _TABLE[type(error)].openai_type, getattr(error, "parameter", None)
        parts = {"type": "error", "code": kind, "message": str(error), "param": parameter}
        return msgspec.json.encode(parts)


class AnthropicErrors(ErrorShape):
    """As Anthropic has them (docs.anthropic.com, Errors), but for its 529, which is 503 here."""

    def _shaped(self, error: ServingError, code: int) -> dict[str, Any]:
        kind = _ANTHROPIC.get(_TABLE[type(error)].status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}


_ANTHROPIC = {
    **dict.fromkeys((400, 405, 408, 409, 424, 431), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_INVOCATIONS = re.compile(INVOCATIONS_PATH)


def shape(path: str, codes: Codes = _NONE) -> ErrorShape:
    """The shape of a path's API."""
    if _INVOCATIONS.fullmatch(path):
        return InvocationsErrors(codes)
    if path.startswith(MESSAGES):
        return AnthropicErrors(codes)
    if path == RESPONSES:
        return ResponsesErrors(codes)
    if is_api(path):
        return OpenAIErrors(codes)
    return ErrorShape(codes)


def unforeseen() -> ServingError:
    """The error for an exception that nobody foresaw. To be called while it is handled."""
    log.exception("a request failed unexpectedly")
    return ServerFailed("the server failed on this request; its log says why")
