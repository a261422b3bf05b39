# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker's gRPC server: external processing, health and reflection."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from lmi_config.options.declared import Settings
from serving.http.sockets import CannotListen, bound
from serving.router.epp import ext_proc_pb2 as pb
from serving.router.epp.exchange import Exchange, Picking, Unsupported
from serving.router.epp.tls import credentials

log = logging.getLogger(__name__)

_SERVICE = pb.DESCRIPTOR.services_by_name["ExternalProcessor"].full_name
LIVENESS = "liveness"
READINESS = ("", "readiness", _SERVICE)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class EndpointPicker:
    """Answers gateways that ask where requests are to go."""

    def __init__(self, settings: Settings, picking: Picking) -> None:
        self._settings = settings
        self._picking = picking
        self._health = health.aio.HealthServicer()
        self._warned: set[str] = set()
        self._server: Any = None

    async def start(self) -> None:
        """Listen. Raises CannotListen, OSError where a file of TLS cannot be read."""
        settings = self._settings
        # gRPC shares the port with whoever has it, and of a port that is taken it says nothing.
        shared = settings.router_processes > 1
        bound(settings.host, settings.epp_port, shared=shared).close()
        server = self._server = grpc.aio.server(options=[("grpc.so_reuseport", int(shared))])
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
        """Take no more requests, and wait for so many seconds for those under way."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)

    async def _process(
        self, incoming: AsyncIterator[pb.ProcessingRequest], context: Any
    ) -> AsyncGenerator[pb.ProcessingResponse]:
        try:
            async with aclosing(Exchange(self._picking).responses(incoming)) as responses:
                async for response in responses:
                    yield response
        except Unsupported as error:
            if str(error) not in self._warned:
                self._warned.add(str(error))
                log.error("%s", error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except Exception:
            log.exception("picking an endpoint failed")
            await context.abort(grpc.StatusCode.INTERNAL, "picking an endpoint failed")
