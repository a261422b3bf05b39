# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker's gRPC server: external processing, health and reflection."""

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from lmi_config.options.declared import Settings
from serving.http.http1 import HANDSHAKE_S, KEEP_ALIVE_S
from serving.http.sockets import ROUTED, SPARE, CannotListen, bound
from serving.router.epp import ext_proc_pb2 as pb
from serving.router.epp.exchange import Exchange, Misused, Picking, Unsupported
from serving.router.epp.grpc_certificate import credentials
from serving.router.epp.grpc_streams import Evicted, Streams

log = logging.getLogger(__name__)
T = TypeVar("T")

_SERVICE = pb.DESCRIPTOR.services_by_name["ExternalProcessor"].full_name
LIVENESS = "liveness"
READINESS = ("", "readiness", _SERVICE)
STREAMS = ROUTED
"""Requests that are picked for or answered at once, as many as a router has connections."""
WATCHES = 64
"""Streams of health and reflection."""
RESET_S = 0.1
"""Seconds after the last message until the peer has reset its stream, if it does. gRPC leaks the
memory of a status that it cannot send (https://github.com/grpc/grpc/issues/43360).
"""
WRITE_S = 5.0
"""For the last answer on a stream that is let go."""
OPTIONS = (
    ("grpc.max_receive_message_length", 4 * 1024**2),
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),  # until HTTP/2 has begun
    ("grpc.max_connection_idle_ms", int(KEEP_ALIVE_S * 1000)),
)
EVICTED = "there are more streams than the endpoint picker takes, and this one was silent longest"
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class EndpointPicker:
    """Answers gateways that ask for the endpoints of requests."""

    def __init__(self, settings: Settings, picking: Picking) -> None:
        self._settings = settings
        self._picking = picking
        self._health = health.aio.HealthServicer()
        self._streams = Streams(STREAMS)
        self._warned: set[str] = set()
        self._server: Any = None

    async def start(self) -> None:
        """Listen. Raises CannotListen, and OSError if a file of TLS cannot be read."""
        settings = self._settings
        # gRPC shares a port that another program has, and does not report a port that is taken.
        shared = settings.router_processes > 1
        bound(settings.host, settings.epp_port, shared=shared).close()
        server = self._server = grpc.aio.server(
            interceptors=[Bounded(Streams(WATCHES))],
            options=[("grpc.so_reuseport", int(shared)), *OPTIONS],
            maximum_concurrent_rpcs=STREAMS + WATCHES + SPARE,
        )
        process = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=pb.ProcessingRequest.FromString,
            response_serializer=pb.ProcessingResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(_SERVICE, {"Process": process})
        server.add_generic_rpc_handlers((handler,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"{host}:{settings.epp_port}"
        try:
            if certificate := settings.epp_certificate:
                shown = credentials(certificate, settings.epp_private_key or "")
                server.add_secure_port(address, shown)
            else:
                server.add_insecure_port(address)
        except RuntimeError as error:  # gRPC's only one
            reason = OSError(0, str(error))
            raise CannotListen(settings.host, settings.epp_port, reason) from None
        await self._health.set(LIVENESS, _SERVING)
        for service in READINESS:
            await self._health.set(service, _NOT_SERVING)
        await server.start()
        facts = {"host": settings.host, "port": settings.epp_port}
        log.info("picking endpoints", extra={"facts": facts})

    async def run(self) -> None:
        """Say that we are ready once it is known which replicas can serve; until cancelled."""
        await self._picking.routing.pool.probed.wait()
        for service in READINESS:
            await self._health.set(service, _SERVING)
        await asyncio.Event().wait()

    async def stop(self, grace: float) -> None:
        """Accept no more requests, and wait this many seconds for those in flight."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)

    async def _process(
        self, incoming: AsyncIterator[pb.ProcessingRequest], context: Any
    ) -> AsyncGenerator[pb.ProcessingResponse]:
        stream = self._streams.open()
        exchange = Exchange(self._picking)
        try:
            async with aclosing(exchange.responses(_whole_reads(incoming), stream)) as responses:
                async for response in responses:
                    yield response
            if not exchange.over:
                await asyncio.sleep(RESET_S)  # a reset of the stream cancels this
        except Misused as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Evicted:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, EVICTED)
        except Unsupported as error:
            if str(error) not in self._warned:
                self._warned.add(str(error))
                log.error("%s", error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except Exception:
            log.exception("picking an endpoint failed")
            await context.abort(grpc.StatusCode.INTERNAL, "picking an endpoint failed")
        finally:
            stream.close()


async def _whole_reads(
    incoming: AsyncIterator[pb.ProcessingRequest],
) -> AsyncGenerator[pb.ProcessingRequest]:
    """Yield the messages. A read that is given up goes on until its stream ends, because gRPC leaks
    the memory of a cancelled read.
    """
    while True:
        message = await asyncio.shield(_begun(_read(incoming)))
        if message is None:
            return
        yield message


async def _read(incoming: AsyncIterator[pb.ProcessingRequest]) -> pb.ProcessingRequest | None:
    return await anext(incoming, None)


def _begun(operation: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Start a read or a write that may be given up. Its error then means that the stream has ended,
    and is not logged.
    """
    task = asyncio.create_task(operation)
    task.add_done_callback(_ignore)
    return task


def _ignore(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()


class Bounded(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Bounds the streams of health and reflection, which have no other limit."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or not handler.response_streaming or _SERVICE in details.method:
            return handler
        kind = "stream_stream" if handler.request_streaming else "unary_stream"
        return handler._replace(**{kind: functools.partial(self._bounded, getattr(handler, kind))})

    async def _bounded(self, behaviour: Any, asked: Any, context: Any) -> AsyncGenerator[Any]:
        stream = self._streams.open()
        writes = _Writes(context)
        try:
            answers = _answers(behaviour, asked, writes)
            async with aclosing(answers):
                while answer := await stream.next(answers, None):
                    yield answer
        except Evicted:
            await writes.over()
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, EVICTED)
        finally:
            stream.close()


class _Writes:
    """A servicer's context whose writes finish even if the servicer is cancelled, because gRPC
    cannot end a stream in the middle of a write.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._write: asyncio.Future[None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        self._write = _begun(self._context.write(message))
        await asyncio.shield(self._write)

    async def over(self) -> None:
        """Wait for pending writes."""
        if self._write:
            await asyncio.wait([self._write], timeout=WRITE_S)


async def _answers(behaviour: Any, asked: Any, context: Any) -> AsyncGenerator[Any]:
    """The results of a servicer's method; nothing if it writes to the context itself."""
    found = behaviour(asked, context)
    if inspect.isasyncgen(found):
        async for answer in found:
            yield answer
    else:
        await found
