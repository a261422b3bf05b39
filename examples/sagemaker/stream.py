# SPDX-License-Identifier: Apache-2.0
"""The events of an answer that SageMaker streams. Copy this file: it only needs Python.

    answer = boto3.client("sagemaker-runtime").invoke_endpoint_with_response_stream(...)
    for event in events(answer["Body"]):
        print(event["choices"][0]["delta"].get("content"), end="")

SageMaker splits the container's bytes at any place: a part can be half an event, several events, or
end within a character.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

FAILURES = ("ModelStreamError", "InternalStreamFailure")


class StreamError(Exception):
    """The stream broke off, or has an error of the model's. code: the platform's or the model's."""

    def __init__(self, message: str, code: object = None) -> None:
        super().__init__(message)
        self.code = code


def events(body: Iterable[Any]) -> Iterator[Any]:
    """Yield the data of SSE events or JSON lines: parsed JSON, or text that is not JSON.

    body: boto3's event stream, or any other parts, as bytes. Ends at `[DONE]` or with the body.
    Raises StreamError, and the client library's exceptions for broken connections.
    """
    data: list[bytes] = []  # the lines of an incomplete SSE event
    rest = b""
    parts = _parts(body)
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif line and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                yield _event(line)
            elif data and not line:
                event, data = b"\n".join(data), []
                if event == b"[DONE]":
                    for _ in parts:  # to its end, so that the connection can be reused
                        pass
                    return
                yield _event(event)
    if data == [b"[DONE]"] or rest.strip() == b"data: [DONE]":
        return
    if data or rest.startswith(b"data"):
        raise StreamError("the stream ended in the middle of an event")
    if rest.strip():
        yield _event(rest, last=True)


def _event(data: bytes, last: bool = False) -> Any:
    try:
        event = json.loads(data)
    except ValueError:
        if last:
            raise StreamError("the stream ended in the middle of an event") from None
        return data.decode()
    if isinstance(event, dict) and (error := event.get("error")):
        told = error if isinstance(error, dict) else event
        raise StreamError(str(told.get("message", error)), told.get("code"))
    return event


def _parts(body: Iterable[Any]) -> Iterator[bytes]:
    try:
        for part in body:
            if isinstance(part, bytes):
                yield part
            elif "PayloadPart" in part:
                yield part["PayloadPart"]["Bytes"]
            else:
                ((name, told),) = part.items()
                raise StreamError(f"{name}: {told.get('Message')}", told.get("ErrorCode", name))
    except Exception as error:  # boto3's own class, which this file does not import
        told = getattr(error, "response", {}).get("Error", {})
        if told.get("Code") not in FAILURES:
            raise
        raise StreamError(f"{told['Code']}: {told.get('Message')}", told["Code"]) from error
