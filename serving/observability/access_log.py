# SPDX-License-Identifier: Apache-2.0
"""The record of each request: its id, its line in the access log, and its Prometheus series."""

import contextlib
import functools
import random
import re
import time
from collections.abc import Container, Iterable

from prometheus_client import Counter, Histogram
from starlette.types import Message, Scope

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
"""Tenants with separate series: the first ones to send a request. The others share one series."""
PAIRS = 1000
"""Pairs of tenant and adapter with separate series."""
OTHER = "other"
CLIENT_LEFT = 499
_UNTRACED: contextlib.nullcontext[None] = contextlib.nullcontext()

NAMES = 16
"""Names of keys that an answer's header may list."""
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_AN_ID = re.compile(rb"[\x21-\x7e]{1,128}")  # allowed in a header, a log line and a path


def request_id(headers: list[tuple[bytes, bytes]]) -> str:
    """Return the client's id of its request, or a new one. SageMaker's header takes precedence."""
    found = dict(headers)
    for name in (protocol.INFERENCE_ID, protocol.REQUEST_ID):
        if (value := found.get(name)) and _AN_ID.fullmatch(value):
            given = value.decode()
            if redacted(given) == given:
                return given
    return f"{random.getrandbits(128):032x}"


class ServedLine(logs.RequestLine):
    """The access log's line for a request that this server has answered."""

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
    """The record of one request: its id, its log line and its series.

    route: the route's path, for the series; the requested path could be any text. adapter: the
    adapter that it went to. error: the error that it was answered with, or that ended its stream.
    """

    def __init__(self, route: str, scope: Scope, tracer: Tracer | None = None) -> None:
        self._route = route
        self._method = scope["method"]
        self._began = time.perf_counter()
        self.id = request_id(scope["headers"])
        self.status = 0
        """The answer's status, once its head is sent; 0 before."""
        self.caller: Caller = ANYBODY
        """The sender of the request."""
        self.adapter: str | None = None
        self.error: ServingError | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        """Further headers of the answer."""
        self._ignored: set[str] = set()
        self._tokens: tuple[int, int, int] | None = None
        self.generates = False
        """Whether it generates text."""
        self.first_token_s: float | None = None
        """Seconds from its head to the first token of its slowest sequence; None before that."""
        self.between_tokens_s: float | None = None
        """Seconds between two tokens, on average, of its slowest sequence."""
        self._header = (protocol.REQUEST_ID, self.id.encode())
        self.trace: Span | None = None
        """The span of all work for it in this server, if spans are sent."""
        if tracer:
            self.trace = tracer.begin(f"{self._method} {route}", scope["headers"])
        REQUEST_ID.set(self.id)

    def with_id(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return a request's headers with its id, which vLLM uses as its name."""
        others = [header for header in headers if header[0] != protocol.REQUEST_ID]
        return [*others, self._header]

    async def head(self, message: Message) -> Message:
        """Record the head of the answer, and return it with further headers."""
        self.status = message["status"]
        headers = [*message.get("headers", ()), *self.headers, self._header]
        if names := [it for it in sorted(self._ignored) if _NAME.fullmatch(it)][:NAMES]:
            headers.append((protocol.IGNORED, ", ".join(names).encode()))
        return {**message, "headers": headers}

    def ignored(self, fields: Iterable[str], known: Container[str]) -> None:
        """Note keys of the request that have no effect. known: the keys that have separate series;
        clients may send any other key.
        """
        for field in {*fields} - self._ignored:
            self._ignored.add(field)
            _IGNORED.labels(field if field in known else OTHER).inc()

    def used(self, tenant: str, adapter: str, prompt: int, cached: int, generated: int) -> None:
        """Add the engine's tokens for the request, or for a part of it. cached: the prompt tokens
        that the engine found in its KV cache; `prompt` includes them.
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
                _used(*labels, *which).inc(number)

    def paced(self, first_at: float, between: float | None) -> None:
        """Note the pace of one sequence of its answer. first_at: the time of its first token, in
        seconds since 1970. between: the average seconds between two tokens, or None.
        """
        first = time.perf_counter() - self._began - (time.time() - first_at)
        self.first_token_s = max(self.first_token_s or 0.0, first)
        if between is not None:
            self.between_tokens_s = max(self.between_tokens_s or 0.0, between)

    @property
    def exemplar(self) -> dict[str, str] | None:
        """The labels of its trace for exemplars, or None if the trace is not sent."""
        return self.trace.exemplar if self.trace else None

    def part(self, name: str) -> contextlib.AbstractContextManager[Span | None]:
        """Return the span of a part of the work for it, or a context manager that yields None."""
        return self.trace.part(name) if self.trace else _UNTRACED

    def close(self, *, complete: bool) -> None:
        """At the request's end: count it, write its log line and end its span. complete: whether
        the answer was sent to its end.
        """
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
            complete=complete,
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
        # By OpenTelemetry's conventions, a client's error is not an error of the server's span.
        trace.end(why if status >= 500 or (self.error and status < 400) else None)


_tenants: set[str] = set()
_pairs: set[tuple[str, str]] = set()


def _labels(tenant: str, adapter: str) -> tuple[str, str]:
    """Return the labels of a tenant and an adapter; OTHER beyond TENANTS and PAIRS."""
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
def _used(tenant: str, adapter: str, direction: str, cached: str) -> Counter:
    return _USED.labels(tenant, adapter, direction, cached)


@functools.cache
def _seconds(path: str) -> Histogram:
    return _SECONDS.labels(path)
