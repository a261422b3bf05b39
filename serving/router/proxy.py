# SPDX-License-Identifier: Apache-2.0
"""One request's way: to a replica, to another where that helps, and its answer to the client."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVarTuple

from serving import errors
from serving.errors import NotReady, ReplicaFailed, ReplicaTimedOut, ServingError
from serving.protocol import REQUEST_ID, ROUTE
from serving.router import metrics
from serving.router.fleet.replicas import Replica, ReplicaPool
from serving.router.http.ports import Responder
from serving.router.http.request import Request
from serving.router.http.upstream import HOP_BY_HOP, Upstream, is_framed
from serving.router.metrics import Tally
from serving.router.peers import Peers
from serving.router.policy.policies import Choice, Policy, Work
from serving.router.policy.request import Reader, RoutingRequest
from serving.router.policy.tiers import Held, described
from serving.router.retry import RetryBudget
from serving.router.session_affinity import SessionAffinity

log = logging.getLogger(__name__)

CONNECT_S = 3.0
FIRST_PROBE_S = 3.0
"""A router that has just started lets requests wait so long to learn which replicas can serve."""
REFUSED = frozenset((429, 503))
"""What a replica answers that has not begun the work: it has too much of it, or is stopping."""
RETRIED = REFUSED | {502}
"""What another replica may answer otherwise. Other statuses are about the request; so is 504: after
all the work that a replica has put into it in vain, the next one would do the same.
"""
TRIES = 4
"""Replicas that one request is sent to, at most."""

# Of an answer's head: what is not passed on. The request's id is put there for all answers.
_DROPPED_1_0 = HOP_BY_HOP | {REQUEST_ID}
_DROPPED = _DROPPED_1_0 - {b"transfer-encoding"}

_UNREAD = RoutingRequest()

Ts = TypeVarTuple("Ts")
Tokenise = Callable[[RoutingRequest, Request, bytes], Awaitable[RoutingRequest]]


class Timeouts(NamedTuple):
    """Seconds that a replica may take to begin its answer, and between two pieces of it."""

    first_byte: int
    idle: int


@dataclass(frozen=True, slots=True)
class Routing:
    """What a request on its way needs of its router."""

    pool: ReplicaPool
    strategy: str
    policy: Policy
    """Chooses replicas for inference, by the strategy of this name."""
    fallback: Policy
    """Chooses them for requests that any replica answers alike."""
    affinity: SessionAffinity
    peers: Peers
    retries: RetryBudget
    timeouts: Timeouts
    tally: Tally
    read: Reader
    tokenise: Tokenise | None
    """Adds a request's tokens, where the strategy wants them."""


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
        """inference: whether the strategy chooses its replica. ended: is called once, when nothing
        of it is left to do.
        """
        # client
        self._responder = responder
        self._request = request
        self._ended = ended
        # routing
        self._routing = routing
        self._inference = inference
        self._features = _UNREAD
        self._tried: list[Replica] = []
        self.replica: Replica | None = None
        """The one that it is with."""
        self._work: Work | None = None
        self._reason = Held(), False
        """What its replica is expected to have, and whether that has its session."""
        # replica
        self._pending: asyncio.Task[None] | None = None  # on the way to an upstream
        self._upstream: Upstream | None = None
        self._sent = False  # to any replica
        # answer
        self.begun = False
        self._status = 0
        self._computing = True  # its first byte is not here
        self._over = False
        # time
        self._began = self._progress_at = time.monotonic()

    def start(self) -> None:
        routing, request = self._routing, self._request
        routing.retries.earn()
        if not self._inference:
            self._choose()
            return
        body = bytes(request.body)
        self._features = routing.read(request.named, body, request.target, request.tenant)
        if routing.tokenise:
            self._spawn(self._tokenise, routing.tokenise, body)
        else:
            self._choose()

    def _spawn(self, work: Callable[[*Ts], Coroutine[Any, Any, None]], *args: *Ts) -> None:
        """Go on in a task, of which there is at most one."""
        self._pending = asyncio.create_task(self._guard(work, *args))

    async def _guard(self, work: Callable[[*Ts], Coroutine[Any, Any, None]], *args: *Ts) -> None:
        try:
            await work(*args)
        except Exception:
            self.cancel()
            self._responder.fail(errors.unforeseen())

    async def _tokenise(self, tokenise: Tokenise, body: bytes) -> None:
        self._features = await tokenise(self._features, self._request, body)
        self._pending = None
        self._choose()

    async def _await_first_probe(self) -> None:
        """Wait until it is known which replicas can serve."""
        pool = self._routing.pool
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_PROBE_S):
                await pool.probed.wait()
        self._pending = None
        self._choose(NotReady(pool.trouble(self._features.model)))

    def _choose(self, failure: ServingError | None = None) -> None:
        """Send it to the best replica that was not tried. failure: what the one before did."""
        routing, features = self._routing, self._features
        now = time.monotonic()
        candidates = self._candidates(now)
        if not candidates:
            if failure or routing.pool.probed.is_set():
                self._fail(failure or NotReady(routing.pool.trouble(features.model)))
            else:
                self._spawn(self._await_first_probe)
            return
        began = time.perf_counter()
        bound = routing.affinity.replica(features.session) if features.session else None
        if home := [replica for replica in candidates if replica.name == bound]:
            choice = Choice(home[0])
        else:
            policy = routing.policy if self._inference else routing.fallback
            choice = policy.choose(features, candidates, now)
        replica = choice.replica
        assert isinstance(replica, Replica)
        self.replica = replica
        self._tried.append(replica)
        self._work = replica.begin(features.tokens, choice.held, features.streamed, now)
        if self._inference:
            routing.policy.learn(features, replica.name, now)
            routing.peers.announce(features, replica.name, self._work.left)
            metrics.DECISION.observe(time.perf_counter() - began)
            routing.tally.prompt_tokens += features.tokens
            routing.tally.cached_tokens += choice.held.tokens
            self._reason = choice.held, bool(home)
            if log.isEnabledFor(logging.DEBUG):
                log.debug("%s", self._decision())
        self._connect(replica, reuse=True)

    def _candidates(self, now: float) -> list[Replica]:
        named = self._features
        return self._routing.pool.candidates(named.model, named.adapter, self._tried, now)

    def _decision(self) -> str:
        """Which replica it goes to, and why: what that is expected to have of its prompt."""
        assert self.replica
        held, bound = self._reason
        strategy = "session" if bound else self._routing.strategy
        known = f"{described(held)} of {self._features.tokens:,} tokens"
        return f"{strategy}: {self.replica.name} {known}"

    def _connect(self, replica: Replica, *, reuse: bool) -> None:
        self._progress_at = time.monotonic()
        # The replica may just have closed one that is idle, and some requests are sent only once.
        once = self._request.streamed or self._features.begins_session
        reuse = reuse and not self._request.http10 and not once
        if reuse and (upstream := replica.take_idle()):
            self._send(replica, upstream)
        else:
            self._spawn(self._connect_anew, replica)

    async def _connect_anew(self, replica: Replica) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):  # wait_for() may miss that it is cancelled
                _, upstream = await loop.create_connection(
                    lambda: Upstream(replica.idle, decoding=self._request.http10),
                    replica.host,
                    replica.port,
                )
        except (OSError, TimeoutError) as error:
            self._pending = None
            reason = str(error) or "it takes no connections"
            replica.breaker.unreachable(time.monotonic())
            self._retry("connect", ReplicaFailed(f"the replica cannot be reached: {reason}"))
        else:
            self._pending = None
            self._send(replica, upstream)

    def _send(self, replica: Replica, upstream: Upstream) -> None:
        self._upstream = upstream
        self._sent = True
        request = self._request
        upstream.send(
            self,
            (request.head(replica.authority), request.framed()),
            head_only=request.method == b"HEAD",
            complete=request.complete,
        )
        if request.streamed:
            self._responder.resume()

    def _retry(self, reason: str, failure: ServingError) -> None:
        """Send it to another replica, or answer with the failure where that may not be done."""
        if not self.replica:
            return
        self._leave_replica()
        if not self._take_retry():
            self._fail(failure)
            return
        metrics.RETRIES.labels(reason).inc()
        self._choose(failure)

    def _take_retry(self, *, refused: bool = False) -> bool:
        """Spend a retry of the budget, if the request can be sent once more, and to whom. refused:
        whether the replica has answered that it did not take it.
        """
        return (
            not self._over
            and self._request.repeatable
            # A replica that has failed may have begun a session already, and so would the next one.
            and (refused or not (self._sent and self._features.begins_session))
            and len(self._tried) < TRIES
            and bool(self._candidates(time.monotonic()))
            and self._routing.retries.spend()
        )

    def _leave_replica(self) -> None:
        """The replica has no more to do with this."""
        if self._pending:
            self._pending.cancel()
            self._pending = None
        replica, self.replica = self.replica, None
        if replica and self._work:
            replica.end(self._work)
            self._work = None
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
        self._progress_at = time.monotonic()
        if self._upstream:
            self._upstream.pause()

    def resume(self) -> None:
        self._progress_at = time.monotonic()
        if self._upstream:
            self._upstream.resume()

    def cancel(self) -> None:
        self._end("cancelled")

    # Listener: the replica's side

    def on_head(self, status: int, head: bytes, headers: dict[bytes, bytes], body: bytes) -> bool:
        replica, request = self.replica, self._request
        assert replica
        now = time.monotonic()
        replica.breaker.answered(status, now)
        if status in RETRIED and self._take_retry(refused=status in REFUSED):
            self._upstream = None  # it looks after itself
            self._leave_replica()
            metrics.RETRIES.labels(str(status)).inc()
            self._choose()
            return False
        self.begun = True
        self._progress_at = now
        self._status = status
        if session := self._routing.affinity.learn(headers, replica.name):
            self._routing.peers.announce_session(session, replica.name)
        ends = is_framed(headers) or status in (204, 304) or request.method == b"HEAD"
        lines = _passed_on(head, headers, _DROPPED_1_0 if request.http10 else _DROPPED)
        if ROUTE in request.named and self._inference:
            lines.append(ROUTE + b": " + self._decision().encode())
        self._responder.start(
            lines,
            keep_alive=request.complete and ends,
            body=body,
        )
        self._computing = not body  # some servers send the head before they have anything to say
        if body:
            self._first_byte()
        return True

    def on_data(self, data: bytes) -> None:
        self._progress_at = time.monotonic()
        if self._computing:
            self._first_byte()
        write = self._responder.write  # in two steps: Python 3.11 is slow to call attributes
        write(data)

    def _first_byte(self) -> None:
        """The answer's first byte is here, so its prompt is computed."""
        self._computing = False
        metrics.FIRST_BYTE.observe(self._progress_at - self._began)
        if self.replica and self._work:
            self.replica.computed(self._work)

    def on_end(self, *, keep_alive: bool) -> None:
        self._upstream = None
        self._end("finished")
        self._responder.finish(keep_alive=keep_alive)

    def on_lost(self, reason: str) -> None:
        upstream, self._upstream = self._upstream, None
        replica = self.replica
        if self.begun:
            self._cut()
            return
        if upstream and upstream.used and replica and self._request.repeatable:
            # It was idle for so long that the replica closed it just as it was used again.
            self._connect(replica, reuse=False)
            return
        if replica:
            replica.breaker.unreachable(time.monotonic())
        self._retry("lost", ReplicaFailed(reason))

    def on_writable(self) -> None:
        if self._request.streamed:
            self._responder.resume()

    # the router's side

    def check_timeouts(self, now: float) -> None:
        """End it if it has waited for too long."""
        waited = now - self._progress_at
        timeouts = self._routing.timeouts
        first = timeouts.first_byte if self._request.complete else timeouts.idle
        if not self.begun and waited > first:
            what = "a replica did not answer" if self._request.complete else "no more body came"
            self._fail(ReplicaTimedOut(f"{what} within {first} s"))
        elif self.begun and waited > timeouts.idle:
            self._cut()

    def replica_down(self) -> None:
        """Its replica is down. What that has not begun to answer goes to another."""
        if not self.begun and self.replica:
            self._retry("down", ReplicaFailed("the replica does not answer any more"))

    def _fail(self, error: ServingError) -> None:
        self._end("failed")
        self._responder.fail(error)

    def _cut(self) -> None:
        """The answer has begun and cannot be completed."""
        self._end("cut")
        self._responder.abort()

    def _end(self, how: str) -> None:
        if self._over:
            return
        self._over = True
        name = self.replica.name if self.replica else ""
        self._leave_replica()
        self._routing.tally.requests[name, self._status, how] += 1
        self._ended(self)


def _passed_on(head: bytes, headers: dict[bytes, bytes], dropped: frozenset[bytes]) -> list[bytes]:
    """The lines of an answer's head that are not about the connection to the replica."""
    head = b"HTTP/1.1" + head[8:]  # a version is of one connection
    if dropped.isdisjoint(headers):
        return [head]
    named = {name.strip().lower() for name in headers.get(b"connection", b"").split(b",")}
    dropped = dropped | named
    return [
        line
        for line in head.split(b"\r\n")
        if line.partition(b":")[0].strip().lower() not in dropped
    ]
