# SPDX-License-Identifier: Apache-2.0
"""The errors of requests, and how they are sent: a table of statuses, and a shape for each API."""

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
    """The request is not answered as asked. The message is meant for the client."""


class BadRequest(ServingError):
    """The request is invalid, or asks for something unsupported.

    parameter: the part of the request that is at fault, or None.
    """

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class Malformed(ServingError):
    """The bytes are not HTTP/1.1, or are ambiguous."""


class InternalFunction(ServingError):
    """The request names a function of the handler, which clients must not choose."""


class NotFound(ServingError):
    """The request names a model or a path that does not exist here."""


class Forbidden(ServingError):
    """The request comes from a web page of a forbidden origin."""


class Unauthorized(ServingError):
    """The request has no valid key. The message does not contain the key."""


class NotPermitted(ServingError):
    """The request's key is valid, but does not permit this request."""


class RateLimited(ServingError):
    """A key has reached a limit. what: the limit's name in OpenAI's terms. limit: the limit, as a
    text. retry_after: in seconds. said: the headers of all its limits.
    """

    def __init__(
        self, what: str, limit: str, retry_after: int, said: Sequence[tuple[bytes, bytes]]
    ) -> None:
        super().__init__(f"this key may use {limit}; try again in {retry_after} s")
        self.what = what
        self.retry_after = retry_after
        self.said = said


class MethodNotAllowed(ServingError):
    """The path exists, but answers only the allowed methods."""

    def __init__(self, path: str, method: str, allowed: Sequence[str]) -> None:
        super().__init__(f"{path} does not answer {method}; it answers {', '.join(allowed)}")
        self.allowed = allowed


class TooLarge(ServingError):
    """The body is larger than the server accepts. option: the option that sets the limit."""

    def __init__(self, limit: int, option: str = "SERVING_MAX_REQUEST_SIZE") -> None:
        super().__init__(f"the body is larger than {limit} bytes; {option} sets the limit")


class Conflict(ServingError):
    """The name is taken, or the call asks for an operation that this server does not support."""


class AdapterRefused(ServingError):
    """An adapter's files cannot be used. The message says why."""


class AdapterFailed(ServingError):
    """The engine could not load an adapter; a retry may succeed."""


class AlreadyLoaded(AdapterFailed):
    """The engine already has an adapter with this inner name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the engine has {name} already")


class NotLoaded(AdapterFailed):
    """The engine has no adapter with this inner name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the engine does not have {name}")


class UserCodeFailed(ServingError):
    """A model.py cannot be loaded, or its function raised, hung or returned a wrong value."""


class NoSlot(ServingError):
    """There is no room for one more adapter."""


class NotReady(ServingError):
    """The server is starting or stopping, or has used up a memory limit."""


class Overloaded(ServingError):
    """There are more requests than can be answered in time. retry_after: in seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Shed(ServingError):
    """The engine runs as many requests as it can, and a request of this priority does not wait."""

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
    """There is no room on disk for the client's file or batch."""


class HeadTooLarge(ServingError):
    """The request's line and headers are longer than the server accepts."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request's line and headers are longer than {limit} bytes")


class TooSlow(ServingError):
    """The client took too long to send its request."""


class ReplicaFailed(ServingError):
    """A replica closed its connection or sent invalid HTTP before its answer began."""


class ReplicaTimedOut(ServingError):
    """A replica did not begin its answer in time."""


class EngineFailed(ServingError):
    """The engine failed while it served the request. The log has the cause."""


class ServerFailed(ServingError):
    """Slipway itself failed while it served the request. The log has the cause."""


class _Row(NamedTuple):
    """One kind of error: its statuses, and its names in the two APIs that have names."""

    status: int
    status_on_invocations: int
    openai_type: str
    lmi_type: str


# LMI answers 424 to every client error that its Python side finds, and clients depend on that.
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
"""OpenAI's codes of some errors. The others have vLLM's code, which is the status."""

Codes = Mapping[type[ServingError], int]
"""Statuses of the operator's, which replace those in the table."""


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
    """Return the headers of the error's answer."""
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
    """An API's shape of errors: their statuses and bodies. This class has LMI's shape.

    codes: statuses of the operator's, which replace those in the table.
    """

    def __init__(self, codes: Codes = _NONE) -> None:
        self._codes = codes

    def status(self, error: ServingError) -> int:
        return self._codes.get(type(error)) or self._status(_TABLE[type(error)])

    def body(self, error: ServingError) -> bytes:
        return msgspec.json.encode(self._shaped(error, self.status(error)))

    def event(self, error: ServingError) -> bytes:
        """Return the error as an event of a stream that has begun."""
        return self.body(error)

    def response(self, error: ServingError) -> Response:
        """Return the error as a whole answer."""
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
    """The errors of LMI's Python side."""

    def _status(self, row: _Row) -> int:
        return row.status_on_invocations

    def _shaped(self, error: ServingError, code: int) -> dict[str, Any]:
        return {"code": code, "error": str(error)}


class OpenAIErrors(ErrorShape):
    """OpenAI's errors."""

    def _shaped(self, error: ServingError, code: int) -> dict[str, Any]:
        kind = getattr(error, "what", None) or _TABLE[type(error)].openai_type
        parameter = getattr(error, "parameter", None)
        named = _OPENAI_CODES.get(type(error), code)
        parts = {"message": str(error), "type": kind, "param": parameter, "code": named}
        return {"error": parts}


class ResponsesErrors(OpenAIErrors):
    """The errors of OpenAI's Responses, which have a separate event for errors in streams."""

    def event(self, error: ServingError) -> bytes:
        kind, parameter = _TABLE[type(error)].openai_type, getattr(error, "parameter", None)
        parts = {"type": "error", "code": kind, "message": str(error), "param": parameter}
        return msgspec.json.encode(parts)


class AnthropicErrors(ErrorShape):
    """Anthropic's errors (docs.anthropic.com, Errors), except that its 529 is 503 here."""

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
    """Return the shape of a path's API."""
    if _INVOCATIONS.fullmatch(path):
        return InvocationsErrors(codes)
    if path.startswith(MESSAGES):
        return AnthropicErrors(codes)
    if path == RESPONSES:
        return ResponsesErrors(codes)
    if is_api(path):
        return OpenAIErrors(codes)
    return ErrorShape(codes)


def without_frames(error: ServingError) -> ServingError:
    """Return the error without the frames that raised it and the exceptions before it.

    A request's record keeps its error, and the frames keep the record. Such a cycle would stay in
    memory until Python's collector looks at all objects.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def unforeseen() -> ServingError:
    """Log the exception that is being handled, and return the client's error for it."""
    log.exception("a request failed unexpectedly")
    return ServerFailed("the server failed on this request; its log says why")
