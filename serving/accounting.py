"""What is kept of each request: its id, a line in the log, and series for Prometheus."""

import functools
import random
import re
import time
from collections.abc import Awaitable
from typing import Any

from prometheus_client import Counter, Histogram
from starlette.types import Message, Scope, Send

from serving import logs
from serving.logs import REQUEST_ID, redacted

_REQUESTS = Counter(
    "slipway_requests",
    "Requests by path, by whether they went to an adapter, and by status; 499: the client left.",
    ["path", "adapter", "status"],
)
_SECONDS = Histogram(
    "slipway_request_seconds",
    "Time from a request's head to the end of its answer.",
    ["path"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 300),
)
CLIENT_LEFT = 499

_INFERENCE_ID, _REQUEST_ID = b"x-amzn-sagemaker-inference-id", b"x-request-id"
_AN_ID = re.compile(rb"[\x21-\x7e]{1,128}")  # what can stand in a header, a line, a path
_TOKENS = re.compile(rb'"(prompt_tokens|completion_tokens)":(\d+)')
_TAIL = 700  # bytes at the end of an answer of vLLM's that `usage` is in


def request_id(headers: list[tuple[bytes, bytes]]) -> str:
    """The id that a client gave its request, SageMaker's before others', or else a new one."""
    found = dict(headers)
    for name in (_INFERENCE_ID, _REQUEST_ID):
        if (value := found.get(name)) and _AN_ID.fullmatch(value):
            given = value.decode()
            if redacted(given) == given:
                return given
    return f"{random.getrandbits(128):032x}"


class Account:
    """One request's: `send` takes the place of the client's; `close` is to be called at the end.

    path: the route, not what was asked for, which could be anything. The request's scope has the
    adapter's name as "slipway.adapter", once it is known, and the engine's error in a stream that
    had begun as "slipway.error".
    """

    def __init__(self, path: str, scope: Scope, send: Send) -> None:
        self._path = path
        self._scope = scope
        self._send = send
        self._began = time.perf_counter()
        self._status = 0
        self._last: Message | None = None
        self.id = request_id(scope["headers"])
        self._header = (_REQUEST_ID, self.id.encode())
        REQUEST_ID.set(self.id)
        # vLLM calls its request by it.
        others = [header for header in scope["headers"] if header[0] != _REQUEST_ID]
        scope["headers"] = [*others, self._header]

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), self._header]}
        elif not message.get("more_body"):
            self._last = message
        return self._send(message)

    def close(self, error: str = "") -> None:
        """Count the request and write its line. error: the kind that it was answered with."""
        seconds = time.perf_counter() - self._began
        status = self._status or CLIENT_LEFT
        adapter = self._scope.get("slipway.adapter")
        _requests(self._path, adapter is not None, status // 100).inc()
        _seconds(self._path).observe(seconds)
        facts: dict[str, Any] = {
            "method": self._scope["method"],
            "path": self._path,
            "status": status,
            "ms": round(1000 * seconds, 1),
        }
        if adapter:
            facts["adapter"] = redacted(adapter)
        if error:
            facts["error"] = error
        if self._last is None:
            facts["complete"] = False
        elif body := self._last.get("body"):
            for name, number in _TOKENS.findall(body, max(len(body) - _TAIL, 0)):
                facts[name.decode()] = int(number)
        logs.access(self.id, facts)


@functools.cache
def _requests(path: str, adapter: bool, status: int) -> Counter:
    return _REQUESTS.labels(path, "adapter" if adapter else "base", f"{status}xx")


@functools.cache
def _seconds(path: str) -> Histogram:
    return _SECONDS.labels(path)
