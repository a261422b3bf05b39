# SPDX-License-Identifier: Apache-2.0
"""What is kept of each request: its id, a line in the log, and series for Prometheus."""

import contextlib
import functools
import random
import re
import time
from collections.abc import Awaitable, Container, Iterable

from prometheus_client import Counter, Histogram
from starlette.types import Message, Scope, Send

from serving import protocol
from serving.access.caller import ANYBODY, Caller, Phase
from serving.errors import ServingError
from serving.observability import logs
from serving.observability.logs import REQUEST_ID
from serving.observability.redaction import redacted
from serving.observability.tracing import Span, Tracer

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
_USED = Counter(
    "slipway_tokens",
    "Tokens that the engine has worked on, also for answers that were broken off.",
    ["tenant", "adapter", "direction", "cached"],
)
_IGNORED = Counter(
    "slipway_ignored_fields",
    "Requests with a key or parameter that had no effect on the answer, by its name.",
    ["field"],
)
TENANTS = 100
"""Tenants that have series of their own, the first ones that are seen; the others share one."""
PAIRS = 1000
"""The same of tenants with an adapter."""
OTHER = "other"
CLIENT_LEFT = 499
_UNTRACED: contextlib.nullcontext[None] = contextlib.nullcontext()

NAMES = 16
"""Names of keys that an answer's header may list."""
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_AN_ID = re.compile(rb"[\x21-\x7e]{1,128}")  # what can stand in a header, a line, a path


def request_id(headers: list[tuple[bytes, bytes]]) -> str:
    """The id that a client gave its request, SageMaker's before others', or else a new one."""
    found = dict(headers)
    for name in (protocol.INFERENCE_ID, protocol.REQUEST_ID):
        if (value := found.get(name)) and _AN_ID.fullmatch(value):
            given = value.decode()
            if redacted(given) == given:
                return given
    return f"{random.getrandbits(128):032x}"


class ServedLine(logs.RequestLine):
    """The line of a request that this server has answered."""

    key: str = ""
    tenant: str | None = None
    phase: Phase = ""
    adapter: str | None = None
    error: str = ""
    complete: bool = True
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    trace_id: str = ""


class AccessRecord:
    """What is kept of one request: its id, its line in the log, its part in the series.

    route: its path as the series have it, not what was asked for, which could be anything. adapter:
    the one it went to. error: what it was answered with, or what broke off a stream.
    """

    def __init__(self, route: str, scope: Scope, tracer: Tracer | None = None) -> None:
        self._route = route
        self._method = scope["method"]
        self._began = time.perf_counter()
        self._last: Message | None = None
        self.id = request_id(scope["headers"])
        self.status = 0
        """Of the answer, once its head is sent."""
        self.caller: Caller = ANYBODY
        """Who has sent it."""
        self.adapter: str | None = None
        self.error: ServingError | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        """What its answer's head has besides."""
        self._ignored: set[str] = set()
        self._tokens: tuple[int, int, int] | None = None
        self.generates = False
        """Whether it is to be answered with text."""
        self.first_token_s: float | None = None
        """Seconds from its head to the first token of its slowest sequence; None before that."""
        self.between_tokens_s: float | None = None
        """Seconds between two tokens, on average, of its slowest sequence."""
        self._header = (protocol.REQUEST_ID, self.id.encode())
        self.trace: Span | None = None
        """All that is done for it here, where spans are sent."""
        if tracer:
            self.trace = tracer.begin(f"{self._method} {route}", scope["headers"])
        REQUEST_ID.set(self.id)

    def with_id(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """A request's headers with its id, by which vLLM calls it."""
        others = [header for header in headers if header[0] != protocol.REQUEST_ID]
        return [*others, self._header]

    def wrap(self, send: Send) -> Send:
        """What is to be called in the place of `send`, so that the answer is recorded."""

        def recording(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                headers = [*message.get("headers", ()), *self.headers, self._header]
                if names := [it for it in sorted(self._ignored) if _NAME.fullmatch(it)][:NAMES]:
                    headers.append((protocol.IGNORED, ", ".join(names).encode()))
                message = {**message, "headers": headers}
            elif not message.get("more_body"):
                self._last = message
            return send(message)

        return recording

    def ignored(self, fields: Iterable[str], known: Container[str]) -> None:
        """These keys of the request have no effect. known: those that have a series of their own,
        since a client may make up others.
        """
        for field in {*fields} - self._ignored:
            self._ignored.add(field)
            _IGNORED.labels(field if field in known else OTHER).inc()

    def used(self, tenant: str, adapter: str, prompt: int, cached: int, generated: int) -> None:
        """The engine has worked on so many tokens for the request, or for a part of it. cached:
        those of the prompt that it needed not compute.
        """
        before = self._tokens or (0, 0, 0)
        self._tokens = (before[0] + prompt, before[1] + cached, before[2] + generated)
        labels = _labels(tenant, adapter)
        for number, *which in (
            (prompt - cached, "input", "false"),
            (cached, "input", "true"),
            (generated, "output", "false"),
        ):
            if number > 0:
                _USED.labels(*labels, *which).inc(number)

    def paced(self, first_at: float, between: float | None) -> None:
        """A sequence of its answer had its first token at this time, in seconds since 1970, and
        further ones so many seconds apart on average.
        """
        first = time.perf_counter() - self._began - (time.time() - first_at)
        self.first_token_s = max(self.first_token_s or 0.0, first)
        if between is not None:
            self.between_tokens_s = max(self.between_tokens_s or 0.0, between)

    @property
    def exemplar(self) -> dict[str, str] | None:
        """What names its trace in series, where that is sent."""
        return self.trace.exemplar if self.trace else None

    def part(self, name: str) -> contextlib.AbstractContextManager[Span | None]:
        """The span of a part of what is done for it."""
        return self.trace.part(name) if self.trace else _UNTRACED

    def close(self) -> None:
        """Count the request, write its line and end its span, at its end."""
        seconds = time.perf_counter() - self._began
        status = self.status or CLIENT_LEFT
        _requests(self._route, self.adapter is not None, status // 100).inc()
        _seconds(self._route).observe(seconds, self.exemplar)
        prompt, cached, completion = self._tokens or (None, None, None)
        line = ServedLine(
            request_id=self.id,
            method=self._method,
            path=self._route,
            status=status,
            ms=logs.milliseconds(seconds),
            key=self.caller.name,
            tenant=self.caller.shown_tenant or None,
            phase=self.caller.phase,
            adapter=redacted(self.adapter) if self.adapter else None,
            error=type(self.error).__name__ if self.error else "",
            complete=self._last is not None,
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=completion,
            trace_id=self.trace.trace_id if self.trace else "",
        )
        if self.trace:
            self._end_trace(self.trace, status)
        logs.access(line)

    def _end_trace(self, trace: Span, status: int) -> None:
        trace.note(
            http__request__method=self._method,
            http__route=self._route,
            http__response__status_code=status,
            slipway__request_id=self.id,
        )
        why = type(self.error).__name__ if self.error else str(status)
        trace.note(error__type=why if status >= 400 or self.error else None)
        # What a client did wrong is no fault of this server's, by the conventions.
        trace.end(why if status >= 500 or (self.error and status < 400) else None)


_tenants: set[str] = set()
_pairs: set[tuple[str, str]] = set()


def _labels(tenant: str, adapter: str) -> tuple[str, str]:
    """The labels of a tenant with an adapter, of which there are so many."""
    if tenant and tenant not in _tenants:
        if len(_tenants) >= TENANTS:
            tenant = OTHER
        else:
            _tenants.add(tenant)
    if adapter and (tenant, adapter) not in _pairs:
        if len(_pairs) >= PAIRS:
            adapter = OTHER
        else:
            _pairs.add((tenant, adapter))
    return tenant, adapter


@functools.cache
def _requests(path: str, adapter: bool, status: int) -> Counter:
    return _REQUESTS.labels(path, "adapter" if adapter else "base", f"{status}xx")


@functools.cache
def _seconds(path: str) -> Histogram:
    return _SECONDS.labels(path)
