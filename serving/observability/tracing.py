# SPDX-License-Identifier: Apache-2.0
"""Traces, as all who do something for a request see them: nothing, or spans that begin and end."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from lmi_config.options.declared import Settings

Value = str | int | float | bool
Headers = Iterable[tuple[bytes, bytes]]


class Span(AbstractContextManager["Span"], Protocol):
    """A piece of work of a request: all that this process does for it, or a part of that.

    As a context manager it ends with the block, whose exception it names.
    """

    @property
    def trace_id(self) -> str:
        """The trace's, in 32 hexadecimal digits."""

    @property
    def exemplar(self) -> dict[str, str] | None:
        """The labels by which series name the trace; None where it is not sent."""

    def part(self, name: str) -> "Span":
        """A part of it, which begins now."""

    def call(self, name: str) -> "Span":
        """A part of it that another server works on, which gets its headers()."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What makes spans of others parts of this one: W3C's trace context."""

    def note(self, **attributes: Value | None) -> None:
        """Keep what is known; `__` stands for the dots of a name. What is None is left out.

        Names are those of OpenTelemetry's semantic conventions for HTTP and for generative AI, or
        begin with `slipway.`. No prompt, no answer and no header may be among the values.
        """

    def end(self, error: str | None = None) -> None:
        """It is over. error: what went wrong, by a name of which there are few."""


class Tracer(Protocol):
    """Begins spans, and sends those that are over to a collector, in the background."""

    def begin(self, name: str, headers: Headers) -> Span:
        """The span of a request that has come with these headers, whose names are in lower case."""

    async def stop(self) -> None:
        """Send what is there, ours and the engine's, for at most SHUTDOWN.traces seconds."""


def tracer(settings: Settings, service: str) -> Tracer | None:
    """What sends spans, where there is somewhere to send them to. service: what it is called where
    OpenTelemetry's variables do not say so.
    """
    if not settings.otlp_traces_endpoint:
        return None
    from serving.observability.otel import OtelTracer  # it imports OpenTelemetry

    return OtelTracer(settings.otlp_traces_endpoint, service)
