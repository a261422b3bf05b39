# SPDX-License-Identifier: Apache-2.0
"""The endpoint of a route: a request gets its record, and exceptions become answers.

Starlette's application would need two layers of middleware around every sent message, which is a
noticeable cost for each streamed token.
"""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from serving import errors
from serving.access.access import Access
from serving.access.caller import ANYBODY, Caller
from serving.cancellation import ClientLeft
from serving.errors import ErrorShape, MethodNotAllowed, NotReady, ServingError
from serving.http.bodies import Answer, Sender, sender
from serving.http.origins import Origins
from serving.inference.request import HttpCall
from serving.observability.access_log import AccessRecord
from serving.observability.error_rate import ErrorRates
from serving.observability.latency_targets import Objectives
from serving.observability.tracing import Tracer

Handler = Callable[[HttpCall], Awaitable[None]]
"""Answers a request. Raises ServingError and ClientLeft."""


class Endpoint:
    """An ASGI app whose errors are answered. It logs no line, because probes are frequent.

    shape: the shape of its errors.
    """

    def __init__(self, app: ASGIApp, gate: "Gate", shape: ErrorShape) -> None:
        self._app = app
        self._gate = gate
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        error = await self._gate.run(
            scope, lambda scope, _: app(scope, receive, send), sender(send)
        )
        if error:
            await self._shape.response(error)(scope, receive, send)


class RecordedEndpoint:
    """A route of the API: its answers are recorded, and its errors are counted.

    route: its path in the log and the series. shape: returns the shape of errors for a requested
    path. objectives: the latency targets that requests are compared with. tracer: sends spans; None
    if they are not sent.
    """

    def __init__(
        self,
        route: str,
        handler: Handler,
        gate: "Gate",
        shape: Callable[[str], ErrorShape],
        rates: ErrorRates,
        objectives: Objectives,
        tracer: Tracer | None,
    ) -> None:
        self._route = route
        self._handler = handler
        self._gate = gate
        self._shape = shape
        self._rates = rates
        self._objectives = objectives
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = AccessRecord(self._route, scope, self._tracer)
        scope["headers"] = record.with_id(scope["headers"])
        connection = sender(send)
        sent, shape = Answer(send), self._shape(scope["path"])
        sent.at_head(record.head)

        def answer(scope: Scope, caller: Caller) -> Awaitable[None]:
            record.caller = caller
            return self._handler(HttpCall(scope, receive, sent, record, shape))

        try:
            error = await self._gate.run(scope, answer, connection)
            if error:
                record.error = error
                if not record.status:
                    await shape.response(error)(scope, receive, sent)
        finally:
            if record.caller.is_client:
                if record.error:
                    self._rates.count(record.error)
                self._objectives.count(record)
                record.close(complete=sent.complete)


class Gate:
    """Checks requests to a route, passes its answers through, and returns its exceptions.

    methods: the methods that it answers; none for any. origins: the allowed origins of requests.
    access: authenticates requests; None to accept any sender.
    """

    def __init__(self, methods: tuple[str, ...], origins: Origins, access: Access | None) -> None:
        self._methods = (*methods, "HEAD") if "GET" in methods else methods
        self._origins = origins
        self._access = access

    async def run(
        self,
        scope: Scope,
        answer: Callable[[Scope, Caller], Awaitable[None]],
        connection: Sender | None,
    ) -> ServingError | None:
        """Answer a request. Returns the error to answer with instead, or None.

        connection: the request's connection, or None if it is not known.
        """
        try:
            if connection and connection.refusal:
                raise connection.refusal
            self._origins.require(scope["method"], dict(scope["headers"]))
            caller = ANYBODY
            if access := self._access:
                caller = access.caller(scope["headers"])
                caller.require_path(scope["path"])
                scope = {**scope, "headers": access.without_credentials(scope["headers"])}
            if self._methods and scope["method"] not in self._methods:
                raise MethodNotAllowed(scope["path"], scope["method"], self._methods)
            if scope["method"] == "HEAD":  # it is answered like GET, but no body is sent
                scope = {**scope, "method": "GET"}
            await answer(scope, caller)
        except ServingError as error:
            return errors.without_frames(error)
        except ClientLeft:
            return None
        except asyncio.CancelledError:  # by uvicorn, which would send its own answer
            return NotReady("the server is stopping")
        except Exception:
            return errors.unforeseen()
        return None
