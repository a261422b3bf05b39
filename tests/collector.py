# SPDX-License-Identifier: Apache-2.0
"""A collector of traces for senders: it accepts OTLP over HTTP and over gRPC."""

import contextlib
import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status


class Received(NamedTuple):
    """A span, and the service that has sent it."""

    service: str
    span: Span

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def id(self) -> str:
        return self.span.span_id.hex()

    @property
    def parent(self) -> str:
        return self.span.parent_span_id.hex()

    @property
    def trace(self) -> str:
        return self.span.trace_id.hex()

    @property
    def failed(self) -> bool:
        return self.span.status.code == Status.STATUS_CODE_ERROR

    @property
    def attributes(self) -> dict[str, Any]:
        return {it.key: _value(it.value) for it in self.span.attributes}


class Collector:
    """The spans received so far, and the addresses to send them to."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.http = self.grpc = ""

    def take(self, request: ExportTraceServiceRequest) -> None:
        for of_resource in request.resource_spans:
            about = {it.key: _value(it.value) for it in of_resource.resource.attributes}
            for of_scope in of_resource.scope_spans:
                self.spans += [Received(about["service.name"], span) for span in of_scope.spans]

    def of(self, trace: str) -> list[Received]:
        """The spans of a trace, ordered by their start."""
        found = [it for it in self.spans if it.trace == trace]
        return sorted(found, key=lambda it: it.span.start_time_unix_nano)

    def environ(self) -> dict[str, str]:
        """Environment variables that make a program send its spans here at once."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.http,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "100",  # ms
        }


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Http(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    class Grpc(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, _: Any) -> ExportTraceServiceResponse:  # noqa: N802 - gRPC's name
            collector.take(request)
            return ExportTraceServiceResponse()

    with ThreadingHTTPServer(("127.0.0.1", 0), Http) as server, ThreadPoolExecutor(2) as pool:
        thread = threading.Thread(target=server.serve_forever, args=[0.05])
        thread.start()
        of_grpc = grpc.server(pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Grpc(), of_grpc)
        collector.http = f"http://127.0.0.1:{server.server_port}"
        collector.grpc = f"http://127.0.0.1:{of_grpc.add_insecure_port('127.0.0.1:0')}"
        of_grpc.start()
        try:
            yield collector
        finally:
            of_grpc.stop(0).wait()
            server.shutdown()
            thread.join()
