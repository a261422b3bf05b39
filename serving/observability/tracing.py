# SPDX-License-Identifier: Apache-2.0
"""The interface of traces: spans that begin and end, or None if spans are not sent."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from lmi_config.options.declared import Settings

Value = str | int | float | bool
Headers = Iterable[tuple[bytes, bytes]]


class Span(AbstractContextManager["Span"], Protocol):
    """A request's work in this process, or a part of that work.

    As a context manager it ends with the block, and records the block's exception.
    """

    @property
    def trace_id(self) -> str:
        """The trace's id, in 32 hexadecimal digits."""

    @property
    def exemplar(self) -> dict[str, str] | None:
        """The labels of the trace for exemplars; None if the trace is not sent."""

    def part(self, name: str) -> "Span":
        """Begin the span of a part of the work."""

    def call(self, name: str) -> "Span":
        """Begin the span of a call to another server, which gets its headers()."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return W3C trace context headers, which make another server's spans parts of this one."""

    def note(self, **attributes: Value | None) -> None:
        """Set attributes. `__` becomes the dot of a name. Values that are None are left out.

        Names are those of OpenTelemetry's semantic conventions for HTTP and for generative AI, or
        begin with `slipway.`. No prompt, no answer and no header may be among the values.
        """

    def end(self, error: str | None = None) -> None:
        """End the span. error: the kind of error, a name with few possible values."""


class Tracer(Protocol):
    """Begins spans, and sends finished spans to a collector in the background."""

    def begin(self, name: str, headers: Headers) -> Span:
        """Begin the span of a request. headers: the request's, with names in lower case."""

    async def stop(self) -> None:
        """Send the remaining spans, ours and the engine's, for at most SHUTDOWN.traces seconds."""


def tracer(settings: Settings, service: str) -> Tracer | None:
    """Return a tracer, or None without an endpoint. service: the service's name if OpenTelemetry's
    variables do not give one.
    """
    if not settings.otlp_traces_endpoint:
        return None
    from serving.observability.otel import OtelTracer  # it imports OpenTelemetry

    return OtelTracer(settings.otlp_traces_endpoint, service)
