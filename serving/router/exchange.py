"""One request's way: to a replica, to another where that helps, and its answer to the client."""

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from serving.errors import NotReady, ReplicaFailed, ReplicaTimedOut, ServingError
from serving.router import metrics
from serving.router.kvaware import KvAwareness
from serving.router.policies import Asked, Choice, Work
from serving.router.replicas import Replica
from serving.router.request import REQUEST_ID, Request
from serving.router.upstream import HOP_BY_HOP, Upstream, framed

if TYPE_CHECKING:
    from serving.router.client import Client
    from serving.router.server import Router

CONNECT_S = 3.0
KNOWN_S = 3.0
"""A router that has just started lets requests wait so long to learn which replicas can serve."""
RETRIED = frozenset((429, 502, 503, 504))
"""What another replica may answer otherwise. Other statuses are about the request."""
TRIES = 4
"""Replicas that one request is sent to, at most."""

# Of an answer's head: what is not passed on. The request's id is put there for all answers.
_DROPPED_1_0 = HOP_BY_HOP | {REQUEST_ID}
_DROPPED = _DROPPED_1_0 - {b"transfer-encoding"}


_NOT_READ = Asked()


class RetryBudget:
    """What keeps retries from being a load of their own: a tenth of the requests, and 100 in a row
    for when a replica dies with all that it had.
    """

    SHARE = 0.1
    RESERVE = 100.0

    def __init__(self) -> None:
        self._left = self.RESERVE

    def earn(self) -> None:
        """One more request has come."""
        self._left = min(self._left + self.SHARE, self.RESERVE)

    def spend(self) -> bool:
        """Take one retry, if there is one."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Exchange:
    """A request that is being answered. It is the Listener of one Upstream after another.

    begun: whether its answer has. touched: when it last came on.
    """

    def __init__(self, router: "Router", client: "Client", request: Request) -> None:
        self._router = router
        self._client = client
        self.request = request
        self.begun = False
        self.touched = time.monotonic()
        self.replica: Replica | None = None
        self._began = self.touched
        self._asked = _NOT_READ
        self._work: Work | None = None
        self._tried: list[Replica] = []
        self._upstream: Upstream | None = None
        self._pending: asyncio.Task[None] | None = None
        self._status = 0
        self._computing = True
        self._over = False

    def start(self) -> None:
        """Find a replica and ask it."""
        router, request = self._router, self.request
        router.exchanges.add(self)
        router.budget.earn()
        if not request.inference:
            self._choose()
            return
        body = bytes(request.body)
        self._asked = router.read(request.named, body)
        if router.kvaware:
            self._pending = asyncio.create_task(self._tokenised(router.kvaware, body))
        else:
            self._choose()

    async def _tokenised(self, kvaware: KvAwareness, body: bytes) -> None:
        try:
            await kvaware.tokenise(self._asked, self.request, body)
            self._pending = None
            self._choose()
        except Exception:
            self._client.broken()

    async def _known(self) -> None:
        """Wait until it is known which replicas can serve."""
        fleet = self._router.fleet
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_S):
                await fleet.known.wait()
        self._pending = None
        try:
            self._choose(NotReady(fleet.trouble()))
        except Exception:
            self._client.broken()

    def _choose(self, failure: ServingError | None = None) -> None:
        """Ask the best replica that was not tried. failure: what happened to the one before."""
        router, asked = self._router, self._asked
        now = time.monotonic()
        able = router.fleet.able(asked.adapter, self._tried, now)
        if not able and not failure and not router.fleet.known.is_set():
            self._pending = asyncio.create_task(self._known())
            return
        if not able:
            self._fail(failure or NotReady(router.fleet.trouble()))
            return
        began = time.perf_counter()
        bound = router.sessions.replica(asked.session) if asked.session else None
        if held := [it for it in able if it.name == bound]:
            choice = Choice(held[0], 0)
        else:
            policy = router.policy if self.request.inference else router.others
            choice = policy.choose(asked, able, now)
        replica = choice.replica
        assert isinstance(replica, Replica)
        self.replica = replica
        self._tried.append(replica)
        self._work = replica.begin(asked.tokens, choice.cached, asked.streamed, now)
        if self.request.inference:
            router.policy.learn(asked, replica.name, now)
            router.siblings.tell(asked, replica.name, choice.cached)
            metrics.DECISION.observe(time.perf_counter() - began)
            router.tally.prompt_tokens += asked.tokens
            router.tally.cached_tokens += choice.cached
        self._connect(replica, reuse=True)

    def _connect(self, replica: Replica, reuse: bool) -> None:
        self.touched = time.monotonic()
        # The replica may just have closed one that is idle, and a streamed body is sent only once.
        reuse = reuse and not self.request.http10 and not self.request.streamed
        if reuse and replica.idle:
            self._ask(replica, replica.idle.pop())
        else:
            self._pending = asyncio.create_task(self._connected(replica))

    async def _connected(self, replica: Replica) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):  # wait_for() may miss that it is cancelled
                _, upstream = await loop.create_connection(
                    lambda: Upstream(replica.idle, decoding=self.request.http10),
                    replica.host,
                    replica.port,
                )
        except (OSError, TimeoutError) as error:
            self._pending = None
            reason = str(error) or "it takes no connections"
            replica.breaker.unreachable(time.monotonic())
            self._again("connect", ReplicaFailed(f"the replica cannot be reached: {reason}"))
        except Exception:
            self._client.broken()
        else:
            self._pending = None
            self._ask(replica, upstream)

    def _ask(self, replica: Replica, upstream: Upstream) -> None:
        self._upstream = upstream
        request = self.request
        upstream.ask(
            self,
            (request.head(replica.authority), request.framed()),
            head_only=request.method == b"HEAD",
            whole=request.complete,
        )
        if request.streamed:
            self._client.passed_on()

    def _again(self, why: str, failure: ServingError) -> None:
        """Ask another replica, if the request can be sent again, else tell the failure."""
        if not self.replica:
            return
        self._left()
        if not self._may_again():
            self._fail(failure)
            return
        metrics.RETRIES.labels(why).inc()
        self._choose(failure)

    def _may_again(self) -> bool:
        return (
            not self._over
            and self.request.kept
            and len(self._tried) < TRIES
            and bool(self._router.fleet.able(self._asked.adapter, self._tried, time.monotonic()))
            and self._router.budget.spend()
        )

    def _left(self) -> None:
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

    # the client's side

    def sent_more(self) -> None:
        """The client has sent more. Of a body that is streamed, or what follows it."""
        if self.request.ended:
            return
        self.touched = time.monotonic()
        if self._upstream:
            self._upstream.send(self.request.framed(), whole=self.request.complete)
        if not self._upstream or self._upstream.full:
            self._client.hold(True)

    def hold(self, hold: bool) -> None:
        """The client reads too slowly, or keeps up again."""
        self.touched = time.monotonic()
        if self._upstream:
            self._upstream.hold(hold)

    def cancel(self) -> None:
        """The client is gone."""
        self._end("cancelled")

    # the replica's side: Listener

    def answered(self, status: int, head: bytes, headers: dict[bytes, bytes], body: bytes) -> bool:
        replica = self.replica
        assert replica
        now = time.monotonic()
        replica.breaker.answered(status, now)
        if status in RETRIED and self._may_again():
            self._upstream = None  # it looks after itself
            self._left()
            metrics.RETRIES.labels(str(status)).inc()
            self._choose()
            return False
        self.begun = True
        self.touched = now
        self._status = status
        if session := self._router.sessions.learn(headers, replica.name):
            self._router.siblings.tell_bound(session, replica.name)
        request = self.request
        dropped = _DROPPED_1_0 if request.http10 else _DROPPED
        head = b"HTTP/1.1" + head[8:]  # a version is of one connection
        lines = [head]
        if not dropped.isdisjoint(headers):
            named = {it.strip().lower() for it in headers.get(b"connection", b"").split(b",")}
            dropped = dropped | named
            lines = [
                it
                for it in head.split(b"\r\n")
                if it.partition(b":")[0].strip().lower() not in dropped
            ]
        ends = framed(headers) or status in (204, 304) or request.method == b"HEAD"
        self._client.begin(lines, request.complete and ends, body)
        self._computing = not body  # some servers send the head before they have anything to say
        if body:
            self._computed()
        return True

    def more(self, data: bytes) -> None:
        self.touched = time.monotonic()
        if self._computing:
            self._computed()
        self._client.transport.write(data)

    def _computed(self) -> None:
        """The answer's first byte is here."""
        self._computing = False
        metrics.FIRST_BYTE.observe(self.touched - self._began)
        if self.replica and self._work:
            self.replica.computed(self._work)

    def finished(self, keep: bool) -> None:
        self._upstream = None
        self._end("finished")
        self._client.done(keep)

    def lost(self, reason: str) -> None:
        upstream, self._upstream = self._upstream, None
        replica = self.replica
        if self.begun:
            self._end("cut")
            self._client.transport.abort()
            return
        if upstream and upstream.used and replica and self.request.kept:
            # It was idle for so long that the replica closed it just as it was used again.
            self._connect(replica, reuse=False)
            return
        if replica:
            replica.breaker.unreachable(time.monotonic())
        self._again("lost", ReplicaFailed(reason))

    def drained(self) -> None:
        if self.request.streamed:
            self._client.hold(False)

    # the router's side

    def overdue(self, now: float) -> None:
        """End it if it has waited for too long."""
        waited = now - self.touched
        limits = self._router.limits
        first = limits.first_byte if self.request.complete else limits.idle
        if not self.begun and waited > first:
            what = "a replica did not answer" if self.request.complete else "no more body came"
            self._fail(ReplicaTimedOut(f"{what} within {first} s"))
        elif self.begun and waited > limits.idle:
            self._end("cut")
            self._client.transport.abort()

    def abandon(self) -> None:
        """The replica is down. What it has not begun to answer goes to another."""
        if not self.begun and self.replica:
            self._again("down", ReplicaFailed("the replica does not answer any more"))

    def _fail(self, error: ServingError) -> None:
        self._end("failed")
        self._client.fail(error)

    def _end(self, how: str) -> None:
        if self._over:
            return
        self._over = True
        name = self.replica.name if self.replica else ""
        self._left()
        self._router.exchanges.discard(self)
        self._router.tally.requests[name, self._status, how] += 1
        self._router.finished()
