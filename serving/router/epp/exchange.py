# SPDX-License-Identifier: Apache-2.0
"""One request, as a gateway shows it to an endpoint picker: its head and body come as messages, and
the endpoints that it may go to are the answer; then the head and body of its answer pass by.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Set
from typing import NamedTuple, Protocol

from serving import errors
from serving.access.access import CREDENTIALS
from serving.access.limits import Taken
from serving.errors import HeadTooLarge, Overloaded, ServingError, TooLarge, TooSlow
from serving.http.http1 import BEHIND_S, HEAD_S, LEAST_RATE, MAX_HEAD, MAX_HEADERS
from serving.observability.tracing import Span
from serving.protocol import HELD_MS, IDENTITY, REQUEST_ID, ROUTE
from serving.router import metrics
from serving.router.epp import envoy_messages
from serving.router.epp import ext_proc_pb2 as pb
from serving.router.epp.answer_usage import UsageReader
from serving.router.epp.envoy_messages import FULL_DUPLEX, Headers
from serving.router.epp.grpc_streams import Stream
from serving.router.fleet.replicas import Replica
from serving.router.http.buffers import Buffers
from serving.router.http.forwarded_request import NO_HEADERS, Request, Rules
from serving.router.http.ports import WholeResponder
from serving.router.placement import Outcome, Placement, Routing

log = logging.getLogger(__name__)

Responses = Iterator[pb.ProcessingResponse]

_STATUS = re.compile(rb"[1-5][0-9][0-9]")


class Unsupported(Exception):
    """The gateway is set up for a way of exchanging messages that is not this one."""


class Misused(Exception):
    """The messages are not those of one request and its answer. The message says how."""


class Place(Protocol):
    """Decides whether a replica is to answer a request, or the router itself."""

    def __call__(
        self, responder: WholeResponder, request: Request, among: Set[str] | None, /
    ) -> Placement | None:
        """The undecided placement; None if the answer is given or in flight.

        Raises ServingError if it is refused.
        """


class Picking(NamedTuple):
    """The parts of the router that an exchange needs."""

    place: Place
    routing: Routing
    rules: Rules
    buffers: Buffers


class WholeAnswer:
    """The WholeResponder of a request that is answered by the gateway at our word."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.given: asyncio.Future[pb.ProcessingResponse] = asyncio.Future()

    def respond(self, status: int, content_type: bytes, body: bytes, *lines: bytes) -> None:
        headers = [(b"content-type", content_type), (REQUEST_ID, self._request.id)]
        for line in lines:
            name, _, value = line.partition(b":")
            headers.append((name, value.strip()))
        if not self.given.done():
            self.given.set_result(envoy_messages.immediate(status, body, headers))

    def fail(self, error: ServingError) -> None:
        shape = errors.shape(self._request.path)
        lines = [f"{name}: {value}".encode() for name, value in errors.headers(error).items()]
        self.respond(shape.status(error), b"application/json", shape.body(error), *lines)


class Exchange:
    """One request, and its answer.

    It gets each part once: a second head, or a body after its end, ends the exchange. `_close`
    gives back all its resources.
    """

    def __init__(self, picking: Picking) -> None:
        self._picking = picking
        self._routing = picking.routing
        # request
        self._request: Request | None = None
        self._among: frozenset[str] | None = None
        self._placement: Placement | None = None
        self._taken: Taken | None = None  # of its caller's limits
        self._failed = False
        self._request_full_duplex = self._answer_full_duplex = True
        self._patience = HEAD_S
        """Seconds that the gateway may still have us wait for its request."""
        # answer
        self._answered = False
        self._status = 0
        self._error: ServingError | None = None  # instead of one
        self._began = time.monotonic()
        self._first_byte_at: float | None = None
        self._bytes = 0
        self._computing = True  # its first byte is not here
        self._finished = False
        self._usage = UsageReader()
        self._trace: Span | None = None

    @property
    def over(self) -> bool:
        """Whether the gateway has heard all there is to say."""
        return self._failed or self._finished

    async def responses(
        self, incoming: AsyncIterator[pb.ProcessingRequest], stream: Stream
    ) -> AsyncGenerator[pb.ProcessingResponse]:
        """Answer each message. Raises Unsupported, Misused, Evicted."""
        try:
            while message := await self._next(incoming, stream):
                for response in await self._on_message(message, stream):
                    yield response
                if self._failed:
                    return
        except TimeoutError:
            if self._request is None:
                raise Misused(f"no request has come within {HEAD_S:g} s") from None
            slow = TooSlow(f"the body comes at less than {LEAST_RATE} bytes a second")
            for response in self._refuse(slow):
                yield response
        finally:
            self._close()

    async def _next(
        self, incoming: AsyncIterator[pb.ProcessingRequest], stream: Stream
    ) -> pb.ProcessingRequest | None:
        """The next message. The limit applies only to the request; the gateway has its own
        time-outs for the answer. Raises TimeoutError, Evicted.
        """
        asking = not self._answered and not (self._request and self._request.complete)
        began = time.monotonic()
        message = await stream.next(incoming, self._patience if asking else None)
        if asking:
            self._patience -= time.monotonic() - began
        return message

    async def _on_message(self, message: pb.ProcessingRequest, stream: Stream) -> Responses:
        kind = message.WhichOneof("request")
        if kind and kind.startswith("response") and self._finished:
            raise Misused("more of an answer came behind its end")
        match kind:
            case "request_headers":
                return await self._on_head(message, stream)
            case "request_body":
                body = message.request_body
                return await self._on_body(body.body, end=body.end_of_stream)
            case "request_trailers":
                return await self._on_trailers()
            case "response_headers":
                return self._on_answer(message)
            case "response_body":
                return self._on_answer_body(message.response_body)
            case "response_trailers":
                self._end_answer()
                return iter((envoy_messages.answer_trailers(),))
        return iter(())  # of a later version

    # the request

    async def _on_head(self, message: pb.ProcessingRequest, stream: Stream) -> Responses:
        if self._request:
            raise Misused("a second request came on the stream of another")
        self._patience = BEHIND_S
        if message.HasField("protocol_config"):
            self._answer_full_duplex = message.protocol_config.response_body_mode == FULL_DUPLEX
            self._request_full_duplex = message.protocol_config.request_body_mode == FULL_DUPLEX
        pseudo: dict[bytes, bytes] = {}
        headers: Headers = []
        for name, value in _headers(message.request_headers):
            if name.startswith(b":"):
                pseudo[name] = value
            else:
                headers.append((name, value))
        headers.append((b"host", pseudo.get(b":authority", b"")))
        method, target = pseudo.get(b":method", b""), pseudo.get(b":path", b"/")
        buffers = self._picking.buffers
        if too_large := _too_large(target, headers):
            target, headers = b"/", []
        request = Request(method, target, "2", headers, buffers, keep_alive=True)
        self._request = stream.request = request
        self._among = envoy_messages.subset(message)
        try:
            if too_large:
                raise HeadTooLarge(MAX_HEAD)
            if buffers.heads_full and not stream.make_room():
                raise Overloaded(
                    "there are more requests than the router has memory for; try again"
                )
            request.check(self._picking.rules)
        except ServingError as error:
            return self._refuse(error)
        if message.request_headers.end_of_stream:
            request.end_body()
            return await self._decide()
        if not self._request_full_duplex:
            raise Unsupported(
                "the gateway does not stream requests' bodies to the endpoint picker and back: its "
                "processing_mode.request_body_mode should be FULL_DUPLEX_STREAMED"
            )
        return iter(())

    async def _on_body(self, body: bytes, *, end: bool) -> Responses:
        request = self._request
        if request is None:
            return envoy_messages.request_body(body, end=end)
        if request.complete:
            raise Misused("more of a request came behind its end")
        self._patience = min(BEHIND_S, self._patience + len(body) / LEAST_RATE)
        try:
            self._picking.rules.check_size(request.path, request.size + len(body))
        except TooLarge as error:
            return self._refuse(error)
        if request.streamed:
            request.size += len(body)
            request.complete = end
            return envoy_messages.request_body(body, end=end)
        room = request.receive(body)
        if end:
            request.end_body()
        return await self._decide() if end or not room else iter(())

    async def _on_trailers(self) -> Responses:
        found: list[pb.ProcessingResponse] = []
        if request := self._request:
            if request.complete:
                raise Misused("more of a request came behind its end")
            request.end_body()
            if not request.streamed:
                found = [*await self._decide(trailers=True)]
        if not self._failed:
            found.append(envoy_messages.request_trailers())
        return iter(found)

    async def _decide(self, *, trailers: bool = False) -> Responses:
        """Choose its replica, and let the received part pass. trailers: they are its end."""
        request = self._request
        assert request
        request.take_turn()
        try:
            replicas = await self._replicas(request)
        except ServingError as error:
            return self._refuse(error)
        if not isinstance(replicas, list):
            self._failed = True
            return iter((replicas,))
        assert self._placement
        identity = self._placement.identity(request, *replicas[1:])
        lines = [(REQUEST_ID, request.id)]
        removed = {IDENTITY}  # only we tell who a client is
        if identity is not None:
            removed = {*CREDENTIALS}
        if identity:
            lines.append((IDENTITY, identity))
            removed.discard(IDENTITY)
        endpoints = [replica.endpoint for replica in replicas]
        found = [envoy_messages.routed(endpoints, lines, sorted(removed))]
        body = bytes(request.body)
        if body or not request.complete:
            found += envoy_messages.request_body(body, end=request.complete and not trailers)
        request.release()
        return iter(found)

    async def _replicas(self, request: Request) -> list[Replica] | pb.ProcessingResponse:
        """The replicas in order of preference, or the answer instead.

        Raises ServingError.
        """
        routing = self._routing
        whole = WholeAnswer(request)
        placement = self._picking.place(whole, request, self._among)
        if placement is None:
            return await whole.given
        self._placement = placement
        self._trace = routing.trace(request)
        if placement.inference and request.caller.limited:
            self._taken = await routing.limiter.take(request.caller)
        with self._choosing():
            placement.read(request, request.body)
            if placement.inference and (tokenise := routing.tokenise):
                body = bytes(request.body)
                placement.features = await tokenise(placement.features, request, body)
            if placement.must_wait():
                prefills = await placement.turn(request)
            else:
                prefills = placement.choose_prefilling()
            if not prefills:
                return await self._chosen(placement)
        await self._prefill(placement, request)
        with self._choosing():
            return await self._chosen(placement)

    def _choosing(self) -> contextlib.AbstractContextManager[Span | None]:
        return self._trace.part("choose") if self._trace else contextlib.nullcontext()

    async def _prefill(self, placement: Placement, request: Request) -> None:
        """Let the chosen prefill replica compute the prompt, before the gateway sends the request
        to the replica that answers.
        """
        assert placement.replica
        replica = placement.replica.name
        with self._trace.call("prefill") if self._trace else contextlib.nullcontext() as call:
            end = await placement.prefill(request, call.headers() if call else NO_HEADERS)
            if call:
                failed = None if end == "handed_over" else end
                call.note(slipway__replica=replica, error__type=failed)

    async def _chosen(self, placement: Placement) -> list[Replica]:
        routing = self._routing
        if not (placement.replica or placement.choose()):
            await routing.look()
            if not placement.choose():
                raise placement.trouble()
        assert placement.replica
        # A replica that fails may have done it already, and so would the next one.
        others = [] if placement.once else placement.alternatives()
        # What is signed for one goes to all: none may be a server that has not proven its name.
        known = bool(placement.replica.called)
        return [placement.replica, *(it for it in others if bool(it.called) == known)]

    def _refuse(self, error: ServingError) -> Responses:
        assert self._request
        self._failed = True
        self._error = error
        whole = WholeAnswer(self._request)
        whole.fail(error)
        return iter((whole.given.result(),))

    # the answer

    def _on_answer(self, message: pb.ProcessingRequest) -> Responses:
        if self._answered:
            raise Misused("a second answer came to one request")
        self._answered = True
        headers = dict(_headers(message.response_headers))
        status = headers.get(b":status", b"")
        if not _STATUS.fullmatch(status):
            raise Misused("an answer came without a status")
        placement, request = self._placement, self._request
        lines: Headers = []
        if placement and placement.replica and request:
            self._status = int(status)
            self._follow(placement, envoy_messages.served(message))
            placement.judge(self._status, time.monotonic())
            placement.heard()
            placement.waits_since = None  # the gateway may keep the body to itself
            placement.answered(headers)
            lines.append((REQUEST_ID, request.id))
            if placement.held_s is not None:
                lines.append((HELD_MS, b"%d" % round(1000 * placement.held_s)))
            lines += self._taken.headers if self._taken else []
            if ROUTE in request.named and placement.inference:
                lines.append((ROUTE, placement.decision().encode()))
        if message.response_headers.end_of_stream:
            self._end_answer()
        return iter((envoy_messages.answer_head(lines),))

    def _follow(self, placement: Placement, endpoint: str) -> None:
        """Record which endpoint has answered, one of those that were named. "": the first of
        them.
        """
        if endpoint and placement.replica and endpoint != placement.replica.endpoint:
            for replica in self._routing.pool.replicas:
                if replica.endpoint == endpoint:
                    placement.move(replica)
                    metrics.RETRIES.labels("gateway").inc()

    def _on_answer_body(self, message: pb.HttpBody) -> Responses:
        if message.body:
            self._bytes += len(message.body)
            if self._computing:
                self._first_byte()
            self._usage.feed(message.body)
            if self._placement:
                self._placement.moved(time.monotonic())
        if message.end_of_stream:
            self._end_answer()
        return iter((envoy_messages.answer_body(message, full_duplex=self._answer_full_duplex),))

    def _first_byte(self) -> None:
        """The answer's first byte is here, so its prompt is computed."""
        self._computing = False
        self._first_byte_at = time.monotonic()
        if self._placement:
            waited = self._first_byte_at - self._began
            metrics.FIRST_BYTE.observe(waited)
            self._placement.first_byte(waited)

    def _end_answer(self) -> None:
        self._finished = True
        if self._placement and self._placement.inference and (usage := self._usage.read()):
            metrics.USAGE.labels("prompt").inc(usage.prompt)
            metrics.USAGE.labels("cached").inc(usage.cached)
            metrics.USAGE.labels("completion").inc(usage.completion)

    def _close(self) -> None:
        """End the exchange: the gateway sends no more messages about it."""
        if self._request:
            self._request.release()
        if self._request and self._placement:
            end = "failed" if self._failed else "finished" if self._finished else "cancelled"
            first = self._first_byte_at
            outcome = Outcome(end, self._status, self._began, first, self._bytes, self._error)
            self._placement.over(self._request, outcome, self._trace)
        if self._taken:
            self._routing.limiter.give_back(self._taken)


def _headers(message: pb.HttpHeaders) -> Headers:
    """Raises Misused."""
    try:
        return envoy_messages.headers(message)
    except UnicodeEncodeError:
        raise Misused("a header's name has letters that no name has") from None


def _too_large(target: bytes, headers: Headers) -> bool:
    """Whether a head is longer than HTTP's may be."""
    size = len(target) + sum([len(name) + len(value) + 4 for name, value in headers])
    return size > MAX_HEAD or len(headers) > MAX_HEADERS
