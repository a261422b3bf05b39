"""What can go wrong with a request, and how each path tells it: one table, three body shapes."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response


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
    """The path is here but answers other methods."""


class TooLarge(ServingError):
    """The body is larger than the server takes."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the body is larger than {limit} bytes; SERVING_MAX_REQUEST_SIZE sets the limit"
        )


class NotReady(ServingError):
    """The server is starting, stopping, or has more requests than it can hold."""


class EngineFailed(ServingError):
    """The engine broke while it served the request; its log has the cause."""


# Exception → status on /v1 and elsewhere, status on /invocations, type in OpenAI's words, type in
# LMI's. LMI answers 424 to every fault of the client that its Python side finds, and its clients
# match on that.
_TABLE: Mapping[type[ServingError], tuple[int, int, str, str]] = {
    BadRequest: (400, 424, "BadRequestError", "BadRequestException"),
    NotFound: (404, 404, "NotFoundError", "ResourceNotFoundException"),
    MethodNotAllowed: (405, 405, "MethodNotAllowedError", "MethodNotAllowedException"),
    TooLarge: (413, 413, "PayloadTooLargeError", "PayloadTooLargeException"),
    NotReady: (503, 503, "ServiceUnavailableError", "ServiceUnavailableException"),
    EngineFailed: (500, 500, "InternalServerError", "InternalServerException"),
}

_RETRY_AFTER = {"retry-after": "1"}


def from_engine(status: int, body: bytes) -> ServingError:
    """The exception for an error that the engine answered in OpenAI's shape.

    The engine seam has already seen to it that the message repeats nothing of the prompt.
    """
    try:
        error = msgspec.json.decode(body)["error"]
        message, parameter = str(error["message"]), error.get("param")
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
        message, parameter = "the engine answered with an error", None
    if status == 404:
        return NotFound(message)
    if status == 503:
        return NotReady(message)
    if status >= 500:
        return EngineFailed(message)
    return BadRequest(message, parameter)


def status(error: ServingError, path: str) -> int:
    """The HTTP status that tells this error on this path."""
    return _TABLE[type(error)][1 if path == "/invocations" else 0]


def body(error: ServingError, path: str) -> dict[str, Any]:
    """The JSON body that tells this error on this path, in the shape of the path's API."""
    code, message = status(error, path), str(error)
    _, _, openai_type, lmi_type = _TABLE[type(error)]
    if path == "/invocations":
        return {"code": code, "error": message}
    if path.startswith("/v1/"):
        parameter = getattr(error, "parameter", None)
        told = {"message": message, "type": openai_type, "param": parameter, "code": code}
        return {"error": told}
    return {"code": code, "type": lmi_type, "message": message}


def response(error: ServingError, path: str) -> Response:
    code = status(error, path)
    return Response(
        msgspec.json.encode(body(error, path)),
        status_code=code,
        headers=_RETRY_AFTER if code == 503 else None,
        media_type="application/json",
    )


def handle(request: Request, error: Exception) -> Response:
    """The app's exception handler for every ServingError."""
    assert isinstance(error, ServingError)
    return response(error, request.url.path)
