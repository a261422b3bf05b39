# SPDX-License-Identifier: Apache-2.0
"""The path of one request: to a replica, to another if that helps, and its answer back to the
client.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, TypeVarTuple

from serving import errors
from serving.access.limits import Taken
from serving.errors import RateLimited, ReplicaFailed, ReplicaTimedOut, ServingError
from serving.observability.tracing import Span
from serving.protocol import HELD_MS, RATE_LIMIT, REQUEST_ID, ROUTE, SESSION_ID
from serving.router import metrics
from serving.router.fleet.replicas import Replica
from serving.router.http.forwarded_request import NO_HEADERS, Headers, Request
from serving.router.http.ports import Responder
from serving.router.http.upstream import FRAMING, HOP_BY_HOP, Upstream, is_framed
from serving.router.placement import TRIES, Outcome, Placement, Routing, Tokenise
from serving.router.proxy.continuation import Continuation, continuation

REFUSED = frozenset((429, 503))
"""The statuses of a replica that has not begun the work, because it is overloaded or stopping."""
RETRIED = REFUSED | {502}
"""The statuses that may differ on another replica. Other statuses are about the request; so is 504:
after all the work that a replica has put into it in vain, the next one would do the same.
"""

STOPPED_S = 5.0
"""A stream without a byte for this many seconds has stopped, if its replica is down as well."""

# Lines of an answer's head that are not passed on. All answers get the request's id there.
_DROPPED_1_0 = HOP_BY_HOP | {REQUEST_ID}
_DROPPED = _DROPPED_1_0 - {b"transfer-encoding"}

Ts = TypeVarTuple("Ts")


class ProxiedRequest:
    """A request on its way to a replica, and its answer on the way back.

    It is the Answering of a client's connection, and the Listener of one Upstream after another.
    """

    def __init__(
        self,
        responder: Responder,
        request: Request,
        routing: Routing,
        *,
        inference: bool,
        ended: Callable[["ProxiedRequest"], None],
    ) -> None:
        """inference: whether the strategy chooses its replica. ended: is called once, when all its
        work is done.
        """
        # client
        self._responder = responder
        self._request = request
        self._ended = ended
        # routing
        self._routing = routing
        self.placement = Placement(routing, inference=inference)
        # replica
        self._pending: asyncio.Task[None] | None = None  # on the way to an upstream
        self._upstream: Upstream | None = None
        self._sent = False  # to any replica
        self._identified = False  # the replica got a signed identity
        self._prefilling = False
        # answer
        self.begun = False
        self._status = 0
        self._computing = True  # its first byte is not here
        self._over = False
        self._taken: Taken | None = None  # of its caller's limits
        self._continuation: Continuation | None = None  # of a stream that can outlive its replica
        self._paused = False
        self._bytes = 0
        self._error: ServingError | None = None  # instead of one
        # time
        self._began = self._progress_at = time.monotonic()
        self._first_byte_at: float | None = None
        # trace, if there is one
        self._trace = routing.trace(request)
        self._choosing: Span | None = None
        self._attempt: Span | None = None

    def start(self) -> None:
        if self.placement.inference and self._request.caller.limited:
            self._spawn(self._take)
        else:
            self._read()

    async def _take(self) -> None:
        """Apply the sender's limits."""
        try:
            self._taken = await self._routing.limiter.take(self._request.caller)
        except RateLimited as error:
            self._pending = None
            self._fail(error)
            return
        self._pending = None
        self._read()

    def _read(self) -> None:
        if self._trace:
            self._choosing = self._trace.part("choose")
        placement, request = self.placement, self._request
        try:
            placement.read(request, request.body)
        except ServingError as error:
            self._fail(error)
            return
        if self._routing.continues and self._is_held():
            self._continuation = continuation(request.path, bytes(request.body))
        if it := self._continuation:
            request.replace(it.path, it.body)
        if placement.inference and (tokenise := self._routing.tokenise):
            self._spawn(self._tokenise, tokenise, bytes(request.body))
        else:
            self._go_on()

    def _go_on(self) -> None:
        """Send it to a replica, now or when one has room for it."""
        placement = self.placement
        if not placement.must_wait():
            self._choose()
            return
        try:
            placement.wait(self._request, self._take_turn, self._fail)
        except ServingError as error:
            self._fail(error)

    def _take_turn(self) -> None:
        """It was held, and can go. Its errors must not end the request that made room for it."""
        try:
            self._choose()
        except Exception:
            self._fail(errors.unforeseen())

    def _is_held(self) -> bool:
        """Whether the whole request is here, can go to any replica, and its answer can be framed
        here.
        """
        request = self._request
        return not (request.streamed or request.http10 or SESSION_ID in request.named)

    def _spawn(self, work: Callable[[*Ts], Coroutine[Any, Any, None]], *args: *Ts) -> None:
        """Continue in a task; there is at most one."""
        self._pending = asyncio.create_task(self._guard(work, *args))

    async def _guard(self, work: Callable[[*Ts], Coroutine[Any, Any, None]], *args: *Ts) -> None:
        try:
            await work(*args)
        except Exception:
            self._fail(errors.unforeseen())

    async def _tokenise(self, tokenise: Tokenise, body: bytes) -> None:
        placement = self.placement
        placement.features = await tokenise(placement.features, self._request, body)
        self._pending = None
        self._go_on()

    async def _look(self) -> None:
        """Wait until it is known which replicas can serve now."""
        await self._routing.look()
        self._pending = None
        self._choose(self.placement.trouble())

    def _choose(self, failure: ServingError | None = None) -> None:
        """Send it to the best replica that was not tried. failure: the failure of the previous
        replica.
        """
        if replica := self.placement.choose_prefilling(fetching=True):
            self._prefilling = True
            if self._trace:
                self._begin_attempt(self._trace, replica, "prefill")
            self._spawn(self._prefill)
        elif replica := self.placement.choose():
            if self._trace:
                self._begin_attempt(self._trace, replica, self._request.method.decode("latin-1"))
            self._connect(replica, reuse=True)
        elif failure:
            self._fail(failure)
        else:
            self._spawn(self._look)

    async def _prefill(self) -> None:
        """Let its prefill replica compute the prompt for the answering replica."""
        end = await self.placement.prefill(self._request, self._context())
        self._pending = None
        self._prefilling = False
        self._end_attempt(0, None if end == "handed_over" else end)
        self._choose_again()

    def _begin_attempt(self, trace: Span, replica: Replica, name: str) -> None:
        placement = self.placement
        if choosing := self._choosing:
            choosing.note(slipway__strategy=placement.strategy, slipway__replica=replica.name)
            if placement.inference:
                choosing.note(
                    slipway__prompt_tokens_about=placement.features.tokens,
                    slipway__cached_tokens_expected=placement.cached,
                )
            choosing.end()
            self._choosing = None
        attempt = self._attempt = trace.call(name)
        attempt.note(
            http__request__method=self._request.method.decode("latin-1"),
            server__address=replica.host,
            server__port=replica.port,
            slipway__replica=replica.name,
            http__request__resend_count=max(len(placement.tried) - 1, 0) or None,
        )

    def _context(self) -> Headers:
        """The trace headers for its replica."""
        return self._attempt.headers() if self._attempt else NO_HEADERS

    def _end_attempt(self, status: int, error: str | None = None) -> None:
        if self._attempt:
            self._attempt.note(http__response__status_code=status or None)
            self._attempt.end(error or (str(status) if status >= 400 else None))
            self._attempt = None

    def _connect(self, replica: Replica, *, reuse: bool) -> None:
        self._progress_at = time.monotonic()
        if reuse and self._keeps and (upstream := replica.idle.take()):
            self._send(replica, upstream)
        else:
            self._spawn(self._connect_anew, replica)

    @property
    def _keeps(self) -> bool:
        """Whether its connection can carry further requests. A request that can be sent only once
        cannot take one that was idle: its replica may just have closed that.
        """
        placement = self.placement
        once = self._request.streamed or placement.once or placement.fetch is not None
        return not (once or self._decoding)

    @property
    def _decoding(self) -> bool:
        """Whether answers come without their framing."""
        return self._request.http10 or self._continuation is not None

    async def _connect_anew(self, replica: Replica) -> None:
        try:
            idle = replica.idle if self._keeps else None
            upstream = await replica.connect(self._routing.tls, idle, decoding=self._decoding)
        except (OSError, TimeoutError) as error:
            self._pending = None
            reason = str(error) or "it takes no connections"
            self.placement.unreachable(time.monotonic())
            self._retry("connect", ReplicaFailed(f"the replica cannot be reached: {reason}"))
        else:
            self._pending = None
            self._send(replica, upstream)

    def _send(self, replica: Replica, upstream: Upstream) -> None:
        self._upstream = upstream
        self._sent = True
        request, fetch = self._request, self.placement.fetch
        front = fetch.front if fetch else b""
        identity = self.placement.identity(request)
        self._identified = bool(identity)
        upstream.send(
            self,
            request.head(replica.authority, self._context(), identity, len(front)),
            front + request.framed() if fetch else request.framed(),
            head_only=request.method == b"HEAD",
            complete=request.complete,
        )
        if self._paused:
            upstream.pause()
        if request.streamed:
            self._responder.resume()

    def _retry(self, reason: str, failure: ServingError) -> None:
        """Send it to another replica, or answer with the failure if that is not allowed."""
        if not self.placement.replica:
            return
        self._leave_replica()
        self._end_attempt(0, reason)
        if not self._take_retry():
            self._fail(failure)
            return
        metrics.RETRIES.labels(reason).inc()
        self._choose_again(failure)

    def _choose_again(self, failure: ServingError | None = None) -> None:
        if self._trace:
            self._choosing = self._trace.part("choose")
        self._choose(failure)

    def _take_retry(self, *, refused: bool = False) -> bool:
        """Spend a retry of the budget. Returns the next replica, if the request can be sent again.
        refused: whether the replica has answered that it did not take it.
        """
        return (
            not self._over
            and self._request.repeatable
            # A replica that has failed may have done it already, and so would the next one.
            and (refused or not (self._sent and self.placement.once))
            and len(self.placement.tried) < TRIES
            and bool(self.placement.candidates(time.monotonic()))
            and self._routing.retries.spend()
        )

    def _leave_replica(self) -> None:
        """The replica has no more to do with this."""
        if self._pending:
            self._pending.cancel()
            self._pending = None
        self.placement.leave()
        if self._upstream:
            self._upstream.drop()
            self._upstream = None

    # Answering: the client's side

    def body_arrived(self) -> None:
        request = self._request
        if request.forwarded:
            return
        self._progress_at = time.monotonic()
        if self._upstream:
            self._upstream.send_more(request.framed(), complete=request.complete)
        if not self._upstream or self._upstream.full:
            self._responder.pause()

    def pause(self) -> None:
        self._paused = True
        self._progress_at = time.monotonic()
        if self._upstream:
            self._upstream.pause()

    def resume(self) -> None:
        self._paused = False
        self._progress_at = time.monotonic()
        if self._upstream:
            self._upstream.resume()

    def cancel(self) -> None:
        self._end("cancelled")

    # Listener: the replica's side

    def on_head(self, status: int, head: bytes, headers: dict[bytes, bytes], body: bytes) -> bool:
        replica, request = self.placement.replica, self._request
        assert replica
        now = time.monotonic()
        if not self.begun and self.placement.doubts(status) and self._take_retry():
            self.placement.doubt()
            self._try_elsewhere(status)
            return False
        self.placement.judge(status, now)
        # The identity was for the server that was there before a restart.
        stranger = self._identified and status == HTTPStatus.UNAUTHORIZED
        refused = stranger or status in REFUSED
        if (stranger or _helps(status, headers)) and self._take_retry(refused=refused):
            self._try_elsewhere(status)
            return False
        stream = self._continuation
        if self.begun:  # this is to be its rest
            assert stream
            if not stream.begin(status, headers):
                self._cut()
                return False
            self.placement.computed()
            return self._pass_on(stream, body)
        if stream:
            stream.begin(status, headers)
            body = stream.passed(body)
        self.begun = True
        self._progress_at = now
        self._status = status
        self.placement.answered(headers)
        ends = is_framed(headers) or status in (204, 304) or request.method == b"HEAD"
        lines = _passed_on(head, headers, _DROPPED_1_0 if request.http10 else _DROPPED)
        if self._taken:
            lines += [b"%b: %b" % header for header in self._taken.headers]
        if self.placement.held_s is not None:
            lines.append(b"%b: %d" % (HELD_MS, round(1000 * self.placement.held_s)))
        if ROUTE in request.named and self.placement.inference:
            lines.append(ROUTE + b": " + self.placement.decision().encode())
        self._responder.start(
            lines,
            keep_alive=request.complete and ends,
            body=body,
        )
        self._computing = not body  # some servers send the head before they have anything to say
        self._bytes = len(body)
        if body:
            self._first_byte()
        if stream and stream.broken:
            self._break_off()
            return False
        return True

    def _try_elsewhere(self, status: int) -> None:
        """Let another replica answer, after this status of the current one."""
        self._upstream = None  # it looks after itself
        self._leave_replica()
        self._end_attempt(status)
        metrics.RETRIES.labels(str(status)).inc()
        self._choose_again()

    def on_data(self, data: bytes) -> None:
        self._progress_at = time.monotonic()
        if self._computing:
            self._first_byte()
        if self._continuation:
            self._pass_on(self._continuation, data)
            return
        self._bytes += len(data)
        write = self._responder.write  # in two steps: Python 3.11 is slow to call attributes
        write(data)

    def _first_byte(self) -> None:
        """The answer's first byte is here, so its prompt is computed."""
        self._computing = False
        self._first_byte_at = self._progress_at
        waited = self._progress_at - self._began
        if self._trace:
            metrics.FIRST_BYTE.observe(waited, self._trace.exemplar)
        else:
            metrics.FIRST_BYTE.add(waited)
        self.placement.first_byte(waited)

    def _pass_on(self, stream: Continuation, data: bytes) -> bool:
        """Pass a stream's next bytes on. Whether more of this answer is wanted."""
        if data := stream.passed(data):
            self._bytes += len(data)
            self._responder.write(data)
        if stream.broken:
            self._break_off()
        return not stream.broken

    def on_end(self, *, keep_alive: bool) -> None:
        self._upstream = None
        if stream := self._continuation:
            if not stream.may_end:
                self._break_off()
                return
            self._responder.write(stream.end())
            keep_alive = True  # its framing was taken off and put on again
        self._end("finished")
        self._responder.finish(keep_alive=keep_alive)

    def on_lost(self, reason: str) -> None:
        upstream, self._upstream = self._upstream, None
        replica = self.placement.replica
        if self.begun:
            self._break_off()
            return
        if upstream and upstream.used and replica and self._request.repeatable:
            # It was idle for so long that the replica closed it just as it was used again.
            self._connect(replica, reuse=False)
            return
        if replica:
            self.placement.unreachable(time.monotonic())
        self._retry("lost", ReplicaFailed(reason))

    def on_writable(self) -> None:
        if self._request.streamed:
            self._responder.resume()

    # the router's side

    def check_timeouts(self, now: float) -> None:
        """End it if it has waited for too long."""
        if self._prefilling or self.placement.waiting:  # which have separate limits
            return
        waited = now - self._progress_at
        timeouts = self._routing.timeouts
        first = timeouts.first_byte if self._request.complete else timeouts.idle
        if not self.begun and waited > first:
            what = "a replica did not answer" if self._request.complete else "no more body came"
            self._fail(ReplicaTimedOut(f"{what} within {first} s"))
        elif self.begun and waited > timeouts.idle:
            if self._paused:  # by the client, whom no other replica would make read
                self._cut()
            else:
                self._break_off()

    def look(self) -> None:
        """Update how long it has waited for its replica."""
        if self._paused or not self._request.complete:
            self.placement.waits_since = None
        elif self.begun:
            self.placement.moved(self._progress_at)
        elif not self._prefilling:
            self.placement.waits_since = self._progress_at

    def replica_down(self) -> None:
        """The replica of this request is down. Another replica gets the request if its answer has
        not begun, or if its stream has stopped.
        """
        if self._prefilling:  # which learns of it by itself
            return
        if not self.begun and self.placement.replica:
            self._retry("down", ReplicaFailed("the replica does not answer any more"))
        elif self._continuation and time.monotonic() - self._progress_at > STOPPED_S:
            self._break_off()

    def _fail(self, error: ServingError) -> None:
        if self.begun:
            self._cut()
            return
        self._error = error
        self._end("failed")
        self._responder.fail(error)

    def _break_off(self) -> None:
        """Its replica does not complete the answer that has begun."""
        stream = self._continuation
        if stream and stream.complete:
            if self._upstream:
                self._upstream.drop()
            self.on_end(keep_alive=True)
        elif stream and stream.resume() and self._take_retry():
            self._leave_replica()
            self._end_attempt(0, "stream")
            self._request.replace(stream.path, stream.body)
            metrics.RETRIES.labels("stream").inc()
            self._choose_again()
        else:
            self._cut()

    def _cut(self) -> None:
        """The answer has begun and cannot be completed."""
        self._end("cut")
        if self._continuation and self._continuation.failure:
            self._responder.write(self._continuation.end())
            self._responder.finish(keep_alive=True)
        else:
            self._responder.abort()

    def _end(self, how: str) -> None:
        if self._over:
            return
        self._over = True
        if self._taken:
            self._routing.limiter.give_back(self._taken)
        if self._trace:
            broken = None if how == "finished" else how
            if self._choosing:
                self._choosing.end(broken)
                self._choosing = None
            self._end_attempt(self._status, broken)
        first = self._first_byte_at
        outcome = Outcome(how, self._status, self._began, first, self._bytes, self._error)
        self.placement.over(self._request, outcome, self._trace)
        self._leave_replica()
        self._ended(self)


def _helps(status: int, headers: dict[bytes, bytes]) -> bool:
    """Whether another replica may answer otherwise. A key's limits are the same everywhere."""
    return status in RETRIED and not any(name.startswith(RATE_LIMIT) for name in headers)


def _passed_on(head: bytes, headers: dict[bytes, bytes], dropped: frozenset[bytes]) -> list[bytes]:
    """The lines of an answer's head that are not about the connection to the replica."""
    head = b"HTTP/1.1" + head[8:]  # a version is of one connection
    if dropped.isdisjoint(headers):
        return [head]
    named = {name.strip().lower() for name in headers.get(b"connection", b"").split(b",")}
    dropped = dropped | (named - FRAMING)  # the body keeps its framing
    return [
        line
        for line in head.split(b"\r\n")
        if line.partition(b":")[0].strip().lower() not in dropped
    ]
