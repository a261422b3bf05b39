# SPDX-License-Identifier: Apache-2.0
"""The spans of tracing.py, made and sent by OpenTelemetry's SDK. This module is imported only if
spans are sent.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lmi_config.options.settings import traces_protocol
from serving import VERSION
from serving.aio import in_thread
from serving.lifecycle import SHUTDOWN
from serving.observability.failure_log import FailureLog
from serving.observability.tracing import Headers, Span, Tracer, Value
from serving.protocol import TRACE_CONTEXT, TRACEPARENT

log = logging.getLogger(__name__)

_w3c = TraceContextTextMapPropagator()


class OtelSpan(Span):
    """A span of OpenTelemetry's."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span, clock: int) -> None:
        """clock: the offset from time.monotonic_ns() to the time. All spans of a request share it,
        so that a part stays within the request even if the machine's clock is changed.
        """
        self._tracer = tracer
        self._span = span
        self._clock = clock
        self._context = trace.set_span_in_context(span, Context())

    @property
    def trace_id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def exemplar(self) -> dict[str, str] | None:
        return {"trace_id": self.trace_id} if self._span.is_recording() else None

    def part(self, name: str, kind: SpanKind = SpanKind.INTERNAL) -> "OtelSpan":
        if not self._span.is_recording():  # then no part of it is recorded
            return self
        now = self._clock + time.monotonic_ns()
        span = self._tracer.start_span(name, self._context, kind, start_time=now)
        return OtelSpan(self._tracer, span, self._clock)

    def call(self, name: str) -> "OtelSpan":
        return self.part(name, SpanKind.CLIENT)

    def headers(self) -> list[tuple[bytes, bytes]]:
        found: dict[str, str] = {}
        _w3c.inject(found, self._context)
        return [(name.encode(), value.encode()) for name, value in found.items()]

    def note(self, **attributes: Value | None) -> None:
        known = {name.replace("__", "."): it for name, it in attributes.items() if it is not None}
        self._span.set_attributes(known)

    def end(self, error: str | None = None) -> None:
        if error:
            self.note(error__type=error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end(self._clock + time.monotonic_ns())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(kind.__name__ if kind else None)


class OtelTracer(Tracer):
    """Sends spans to a collector.

    The SDK reads OpenTelemetry's variables for the sampling, the queue's length, and the
    collector's headers and certificates. If the collector cannot be reached, spans are lost, and no
    request waits.
    """

    def __init__(self, endpoint: str, service: str) -> None:
        """endpoint: the collector's. service: the service's name if no variable gives one."""
        resource = Resource.create({SERVICE_VERSION: VERSION})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: service}))
        # The SDK would log each failed try. _LoggingExporter logs a failure once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_LoggingExporter(_exporter(endpoint))))
        self._tracer = self._provider.get_tracer("slipway", VERSION)

    def begin(self, name: str, headers: Headers) -> OtelSpan:
        now = time.time_ns()
        clock = now - time.monotonic_ns()
        carried = {
            name.decode(): [value.decode("latin-1") for key, value in headers if key == name]
            for name in TRACE_CONTEXT
        }
        parent = Context()
        if len(carried[TRACEPARENT.decode()]) == 1:  # several headers name no parent
            parent = _w3c.extract(carried, parent)
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=now)
        return OtelSpan(self._tracer, span, clock)

    async def stop(self) -> None:
        providers = [self._provider, trace.get_tracer_provider()]
        await in_thread(_shut_down, [it for it in providers if isinstance(it, TracerProvider)])


def _shut_down(providers: Sequence[TracerProvider]) -> None:
    # A provider's shutdown() waits until its exporter gives up.
    threads = [threading.Thread(target=it.shutdown, daemon=True) for it in providers]
    for thread in threads:
        thread.start()
    until = time.monotonic() + SHUTDOWN.traces
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0))


def _exporter(endpoint: str) -> SpanExporter:
    if traces_protocol(os.environ) == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
        OTLPSpanExporter as GrpcExporter,
    )

    # vLLM sets the same. The exporter ignores it for https://.
    return GrpcExporter(endpoint, insecure=True)


class _LoggingExporter(SpanExporter):
    """An exporter that logs when its failures begin."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._trouble = FailureLog(
            log.warning, "traces are lost, and nothing else: %s; OTEL_EXPORTER_OTLP_* name it"
        )

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        lost = result is not SpanExportResult.SUCCESS
        self._trouble.note("the collector did not take them" if lost else None)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
