# SPDX-License-Identifier: Apache-2.0
"""The placement of a request: the strategy's choice among the replicas that can serve it, and the
next replica if that one cannot. The proxy and the endpoint picker both use it.
"""

import asyncio
import copy
import hashlib
import logging
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import msgspec

from serving import errors
from serving.access.caller import Caller, HandOver, Phase
from serving.access.limits import Limiter
from serving.cache_hints.intent import NO_INTENT
from serving.errors import BadRequest, NotReady, Overloaded, ServingError, Shed
from serving.observability import logs
from serving.observability.redaction import redacted
from serving.observability.tracing import Span, Tracer
from serving.protocol import ADAPTERS, MANAGEMENT, REQUEST_ID, SLO_TTFT_MS
from serving.router import metrics
from serving.router.fleet.circuit_breaker import is_error
from serving.router.fleet.prefill import prefill
from serving.router.fleet.replicas import Replica, ReplicaPool
from serving.router.forecast.first_token import Awaited
from serving.router.http.forwarded_request import Headers, Request
from serving.router.metrics import Tally
from serving.router.models.model_messages import Row
from serving.router.models.view import OwnModels
from serving.router.peers import Peers
from serving.router.policy import phases
from serving.router.policy.candidates import Candidates
from serving.router.policy.conversations import Conversations
from serving.router.policy.policies import Choice, Policy, PrefixAware
from serving.router.policy.replica_load import PER_REQUEST, Work
from serving.router.policy.routing_request import Reader, RoutingRequest
from serving.router.policy.tiers import NOTHING, described
from serving.router.retry import RetryBudget
from serving.router.routes import Routes, creates, generates
from serving.router.session_affinity import SessionAffinity
from serving.waiting.held import HeldQueue, Waiter

log = logging.getLogger(__name__)

_called = attrgetter("called")
TRIES = 4
"""Replicas that one request is sent to, at most."""
PREFILL_S = 60.0
"""Time limit in seconds for another replica to compute the prompt; after it, the answering replica
computes the prompt.
"""
CLIENT_LEFT = 499
"""The status of a request whose client left before it had an answer's."""

_UNREAD = RoutingRequest()
_MILLISECONDS = re.compile(rb"[1-9][0-9]{0,8}")
_OF_ONE = (f"{MANAGEMENT[0]}/", *ADAPTERS)
"""The beginnings of paths that are about one model of several."""

Tokenise = Callable[[RoutingRequest, Request, bytes], Awaitable[RoutingRequest]]


class Timeouts(NamedTuple):
    """Seconds that a replica may take to begin its answer, and between two pieces of the answer."""

    first_byte: int
    idle: int


class Kind(NamedTuple):
    """The candidates of a request that waits, equal for requests with the same candidates: as
    ReplicaPool.candidates() has it.
    """

    model: str
    adapter: str
    among: Set[str] | None


@dataclass(frozen=True, slots=True)
class Routing:
    """The parts of the router that a routed request needs."""

    pool: ReplicaPool
    look: Callable[[], Awaitable[None]]
    """Has the pool know which replicas can serve now."""
    strategy: str
    policy: Policy
    """Chooses replicas for inference, by the strategy of this name."""
    fallback: Policy
    """Chooses replicas for requests that any replica can answer."""
    affinity: SessionAffinity
    conversations: Conversations
    peers: Peers
    limiter: Limiter
    """Holds keys to their limits."""
    retries: RetryBudget
    held: HeldQueue
    """The requests that wait for a replica."""
    hold: int
    """Seconds that one may wait there; 0 for none."""
    within: float | None
    """Seconds that the first token of an answer may take, if its request does not say so."""
    timeouts: Timeouts
    tls: ssl.SSLContext
    """Knows the authorities of encrypted replicas."""
    tally: Tally
    placements: set["Placement"]
    """The requests in flight at a replica."""
    access_log: bool
    """Whether each request leaves a line in the log."""
    tracer: Tracer | None
    read: Reader
    tokenise: Tokenise | None
    """Adds a request's tokens, if the strategy needs them."""
    models: OwnModels | None
    """The models of this container, if there are several."""
    identity: Callable[[Caller, Sequence[str], Phase], bytes | None]
    """The identity of the sender and the phase, for replicas of these names."""
    prefill_tokens: int
    """A prompt with at least this many uncached tokens is computed on another server; 0 for
    never.
    """
    continues: bool
    """Whether another replica completes a stream if its replica fails."""
    routes: Routes

    def has_room(self, kind: Kind) -> bool:
        """Whether a replica can take one more request of the kind. Requests whose prompts another
        replica is computing count as taken.
        """
        pool, now = self.pool, time.monotonic()
        coming = 0
        if self.prefill_tokens:
            coming = sum([it.in_flight for it in pool.of_role("prefill")])
        candidates = pool.candidates(kind.model, kind.adapter, (), now, kind.among)
        return candidates.has_room(coming + 1)

    def trace(self, request: Request) -> Span | None:
        """The span of a new request, if traces are sent."""
        if not self.tracer:
            return None
        name = f"{request.method.decode('latin-1')} {self.routes.template(request.path)}"
        return self.tracer.begin(name, request.headers)


class Fetch(NamedTuple):
    """A prompt's KV that the answering replica must fetch. by: the replica that has computed it.
    front: the address of the KV, put in front of the body. digest: the address's SHA-256, in hex
    digits.
    """

    by: Replica
    front: bytes
    digest: str

    def is_for(self, replica: Replica | None) -> bool:
        return replica is not self.by and bool(replica and replica.transfer == self.by.transfer)


class Outcome(NamedTuple):
    """How a request ended.

    end: as its series has it. status: of its replica's answer, 0 without one. began, first_byte:
    when it and its answer did, by the clock. sent: bytes of the answer's body, with its framing.
    error: the answer instead.
    """

    end: str
    status: int
    began: float
    first_byte: float | None
    sent: int
    error: ServingError | None


class RoutedLine(logs.RequestLine):
    """The line of a request that a replica was chosen for."""

    end: str
    strategy: str
    attempts: int
    bytes_in: int
    bytes_out: int
    replica: str = ""
    prefilled_on: str = ""
    held_ms: float | None = None
    first_byte_ms: float | None = None
    key: str = ""
    tenant: str | None = None
    adapter: str = ""
    error: str = ""
    trace_id: str = ""


class Placement:
    """One request's replica, the replicas tried before, and its cost there."""

    def __init__(self, routing: Routing, *, inference: bool, among: Set[str] | None = None) -> None:
        """inference: whether the strategy chooses its replica. among: the endpoints that it may go
        to; None for all.
        """
        self._routing = routing
        self._policy = routing.policy if inference else routing.fallback
        self._among = among
        self._own: Row | None = None  # of several models in this container
        self._work: Work | None = None
        self._reason = NOTHING, False  # expected hits at its replica; whether by its session
        self._divisible = False
        self._foreseeable = False  # whether the first token shows in the answer
        self._awaited: Awaited | None = None
        self._prefilled_on = ""
        self._prefilled: Fetch | None = None  # for the next replica that is chosen
        self.fetch: Fetch | None = None
        """The request for its current replica."""
        self._phase: Phase = ""  # of the request, that replicas are to do
        self._uncharged = 0  # tokens of a prompt that one replica computed, until another answers
        self._answers = False  # whether its replica answers with more than an error
        self._trial = False  # whether it shows if an ejected replica works again
        self._doubted: tuple[Replica, bool] | None = None  # has answered with an error; a trial?
        self._waiter: Waiter | None = None  # while it is held
        self.held_s: float | None = None
        """Seconds that it was held; None if it was not."""
        self.inference = inference
        self.features = _UNREAD
        self._tenant: str | None = None
        self.once = False
        """Whether the request creates something (a session, a file, a batch), so that two replicas
        would create it twice.
        """
        self.tried: list[Replica] = []
        self.replica: Replica | None = None
        """The one that it is with."""
        self.waits_since: float | None = None
        """When its replica last did something for it; None while it waits for its client."""

    def read(self, request: Request, body: bytes | bytearray) -> None:
        """Read the strategy's keys from the request, without its tokens. With several models in
        this container, raises what OwnModels.named() does.
        """
        self._routing.retries.earn()
        self.once = creates(request.method, request.path)
        if self.inference:
            divides = self._routing.prefill_tokens and not request.streamed
            self._divisible = bool(divides) and generates(request.path)
            self._tenant = request.tenant
            within = self._objective(request)
            found = self._routing.read(request.named, body, request.target, request.tenant)
            knows = isinstance(self._policy, PrefixAware)
            self._foreseeable = knows and found.streamed and not request.streamed
            if within and self._routing.pool.accuracy.trusted:
                found = msgspec.structs.replace(found, within=within)
            if found.intent is not NO_INTENT:
                hinted = found.intent.taken, found.intent.ignored
                self._routing.tally.hints[hinted] += 1
            if found.adapter and not request.caller.may_use(found.adapter):
                found = msgspec.structs.replace(found, adapter="")  # for it there is none
            self.features = found
            self.once = self.once or found.begins_session
        if (models := self._routing.models) and (
            self.inference or request.path.startswith(_OF_ONE)
        ):
            self._find_model(models, request)

    def _objective(self, request: Request) -> float | None:
        """Seconds that its first token may take. Raises BadRequest."""
        if (given := request.named.get(SLO_TTFT_MS)) is None:
            return self._routing.within
        if not _MILLISECONDS.fullmatch(given):
            name, value = SLO_TTFT_MS.decode(), given.decode("latin-1")
            raise BadRequest(f"{name}: {value!r:.100} is not a number of milliseconds, like 500")
        return int(given) / 1000

    def _find_model(self, models: OwnModels, request: Request) -> None:
        """Send it to the server of the model that it names. An adapter's name means the adapter's
        model, if that runs.
        """
        given = self.features.model
        if given not in models.rows and given == self.features.adapter:
            pool = self._routing.pool
            having = (it.name for it in pool.replicas if given in it.adapters)
            given = next(filter(None, map(models.at, having)), given)
        self._own = models.named(request, given)
        self.features = msgspec.structs.replace(self.features, model=self._own.name)
        self._among = frozenset((self._own.endpoint,))

    def candidates(self, now: float) -> Candidates[Replica]:
        """The replicas that can take it and were not tried."""
        pool = self._routing.pool
        named = self.features
        return pool.candidates(named.model, named.adapter, self.tried, now, self._among)

    # held until a replica has room

    @property
    def waiting(self) -> bool:
        """Whether it is held."""
        return self._waiter is not None

    def must_wait(self) -> bool:
        """Whether it must be held: no replica is ready for it, all are full, or others wait."""
        if not self._routing.hold or not self.inference or self.tried:
            return False
        kind = self._kind
        return self._routing.held.waits_for(kind) or not self._routing.has_room(kind)

    @property
    def _kind(self) -> Kind:
        named, pool = self.features, self._routing.pool
        adapter = named.adapter if named.adapter in pool.adapters else ""
        return Kind(named.model, adapter, self._among)

    def wait(
        self, request: Request, go: Callable[[], None], fail: Callable[[ServingError], None]
    ) -> None:
        """Hold it. go: called when it is to choose its replica, fail: called instead with the
        reason. Raises Overloaded, Shed, and NotReady if the router stops.
        """
        routing, caller, now = self._routing, request.caller, time.monotonic()
        candidates = self.candidates(now)
        if candidates and caller.sheddable:
            metrics.UNHELD.labels("shed").inc()
            raise Shed
        tokens = self.features.tokens
        if candidates:  # other replicas may have its prompt by its turn
            policy = copy.copy(self._policy)  # for what is not asked for no turn is taken
            tokens -= policy.choose(self.features, candidates, now).held.tokens
        kind = self._kind
        waiter = Waiter(
            kind=kind,
            ready=partial(routing.has_room, kind),
            lane=f"{kind.model} {request.tenant or caller.name}",
            band=caller.priority,
            cost=PER_REQUEST + tokens,
            size=len(request.body),
            until=now + routing.hold,
            go=partial(self._go_on, go),
            fail=partial(self._give_up, fail),
        )
        try:
            routing.held.add(waiter)
        except Overloaded:
            metrics.UNHELD.labels("full").inc()
            raise
        self._waiter = waiter

    async def turn(self, request: Request) -> Replica | None:
        """Hold the request until its turn. It then goes to the replica that choose_prefilling() has
        found, which is returned, or else to that of choose(). Raises the exceptions of wait().
        """
        came: asyncio.Future[Replica | None] = asyncio.get_running_loop().create_future()

        def go() -> None:  # at once, so that the next one knows of it
            try:
                prefills = self.choose_prefilling()
                if not prefills:
                    self.choose()
            except Exception:  # which is no other request's fault
                fail(errors.unforeseen())
            else:
                if not came.done():
                    came.set_result(prefills)

        def fail(error: ServingError) -> None:
            if not came.done():
                came.set_exception(error)

        self.wait(request, go, fail)
        try:
            return await came
        finally:
            self._wait_no_more()

    def _go_on(self, go: Callable[[], None], waited: float) -> None:
        self._waiter, self.held_s = None, waited
        metrics.HELD.add(waited)
        go()

    def _give_up(
        self, fail: Callable[[ServingError], None], reason: str, error: ServingError
    ) -> None:
        assert self._waiter
        self.held_s = time.monotonic() - self._waiter.since
        self._waiter = None
        metrics.UNHELD.labels(reason).inc()
        fail(error)

    def _wait_no_more(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter:
            self._routing.held.leave(waiter)

    def choose_prefilling(self, *, fetching: bool = False) -> Replica | None:
        """Send its prompt to a prefill replica, which is returned. None if the answering replica
        should compute the prompt, or if this was called before. fetching: whether the answering
        replica can fetch KV from an address.
        """
        if not self._divisible:
            return None
        self._divisible = False
        routing, features = self._routing, self.features
        least = routing.prefill_tokens
        if features.tokens < least or features.begins_session:
            return None
        if features.session and routing.affinity.replica(features.session):
            return None
        pool, now = routing.pool, time.monotonic()
        if not pool.of_role("decode") or not (candidates := self.candidates(now)):
            return None
        decoding, held = answers = self._policy.choose(features, candidates, now)
        assert isinstance(decoding, Replica)
        can = decoding.role == "decode" and decoding.called
        if not can or features.tokens - held.tokens < least:
            return None
        prefilling = pool.prefilling(
            features.model, features.adapter, decoding, now, fetching=fetching
        )
        if not prefilling:
            metrics.PREFILLS.labels("none").inc()
            return None
        if not (choice := phases.prefills(self._policy, features, answers, prefilling, now)):
            metrics.PREFILLS.labels("busy").inc()
            return None
        self._go(choice, now)
        self.tried.pop()  # if no other is left, it can answer as well
        return self.replica

    async def prefill(self, request: Request, context: Headers) -> str:
        """Let the replica that choose_prefilling() has chosen compute the prompt. Returns how it
        ended, by the names of the metric. context: of its trace.
        """
        routing, replica = self._routing, self.replica
        assert replica
        identity = routing.identity(request.caller, (replica.called,), "prefill")
        assert identity is not None  # else the prompt is not computed apart
        within = min(PREFILL_S, routing.timeouts.first_byte)
        began = time.monotonic()
        found = await prefill(replica, request, context, identity, routing.tls, within)
        end, status, front, tokens = found
        self._uncharged = tokens if status == 200 else 0
        if end in ("connect", "lost"):
            self.unreachable(time.monotonic())
        elif status:
            self.judge(status, time.monotonic())
        metrics.PREFILLS.labels(end).inc()
        if end == "handed_over":
            metrics.PREFILL.observe(time.monotonic() - began)
            self._prefilled_on = replica.name
            if front:
                self._prefilled = Fetch(replica, front, hashlib.sha256(front).hexdigest())
            else:
                self._phase = "decode"
        self.leave()
        return end

    def identity(self, request: Request, *others: Replica) -> bytes | None:
        """The value that tells its replica, or one of the others, who sends the request. b"" if
        that replica gets no identity; None if it reads the client's credentials.
        """
        assert self.replica
        caller, phase = request.caller, self._phase
        if fetch := self.fetch:
            signed = HandOver(len(fetch.front), fetch.digest)
            caller, phase = msgspec.structs.replace(caller, hand_over=signed), "decode"
        names = self.replica.called, *map(_called, others)
        return self._routing.identity(caller, names, phase)

    def choose(self) -> Replica | None:
        """Send it to the best replica that was not tried. None if there is none."""
        routing, features = self._routing, self.features
        now = time.monotonic()
        candidates = self.candidates(now)
        if not candidates:
            return None
        bound = routing.affinity.replica(features.session) if features.session else None
        home = candidates.named(bound) if bound else None
        if home:  # the cache of a session's replica is not looked up
            choice = Choice(home)
        else:
            choice = routing.conversations.choose(self._policy, features, candidates, now)
            if features.session:
                self._count_turn(choice, candidates)
        self._go(choice, now)
        self._take_prefilled(self.replica)
        if self._foreseeable and not home and not self._prefilled_on:
            self._awaited = choice.replica.first_token.awaited(choice.replica.queued, now)
        if self.inference:
            metrics.DECISION.add(time.monotonic() - now)
            routing.tally.prompt_tokens += features.tokens
            routing.tally.cached_tokens += choice.held.tokens
            self._reason = choice.held, bool(home)
            if log.isEnabledFor(logging.DEBUG):
                log.debug("%s", self.decision())
        return self.replica

    def _count_turn(self, choice: Choice, candidates: Candidates[Replica]) -> None:
        """Count a further turn of a conversation: the tokens computed again, and whether its
        replica changes.
        """
        conversations, features = self._routing.conversations, self.features
        if self.tried or (repeated := conversations.repeated(features)) is None:
            return
        metrics.TURN_RECOMPUTED.add(max(repeated - choice.held.tokens, 0))
        before = conversations.replica(features.session)
        if before != choice.replica.name:
            reason = "cost" if candidates.named(before) else "gone"
            metrics.MOVES.labels(reason).inc()

    def _take_prefilled(self, replica: Replica | None) -> None:
        """Its prompt's KV is fetched once, by the first replica, if that can."""
        prefilled, self._prefilled = self._prefilled, None
        if prefilled and prefilled.is_for(replica):
            self.fetch = prefilled
        elif prefilled or self.fetch:
            self.fetch, self._prefilled_on = None, ""

    def alternatives(self) -> list[Replica]:
        """The next replicas in order of preference, in the current state."""
        now = time.monotonic()
        policy = copy.copy(self._policy)  # for what is not asked for no turn is taken
        tried = [*self.tried]
        pool, features = self._routing.pool, self.features
        while len(tried) < TRIES:
            left = pool.candidates(features.model, features.adapter, tried, now, self._among)
            if not left:
                break
            choice = policy.choose(features, left, now).replica
            assert isinstance(choice, Replica)
            tried.append(choice)
        return tried[len(self.tried) :]

    def move(self, replica: Replica) -> None:
        """It has gone to this replica instead."""
        self.leave()
        self._go(Choice(replica), time.monotonic())

    def _go(self, choice: Choice, now: float) -> None:
        replica, features, routing = choice.replica, self.features, self._routing
        assert isinstance(replica, Replica)
        self.replica = replica
        self.tried.append(replica)
        self._trial = replica.breaker.begin(now)
        self.waits_since = now
        routing.placements.add(self)
        self._work = replica.begin(features.tokens, choice.held, features.streamed, now)
        if self.inference:
            routing.policy.learn(features, replica.name, now)
            routing.conversations.learn(features, replica.name)
            routing.peers.announce(features, replica.name, self._work.left)

    def trouble(self) -> NotReady:
        """Why there is no replica for it."""
        if self._own:
            return NotReady(f"the model {self._own.name} does not run; try again")
        if self._among is not None and self._routing.pool.ready:
            endpoints = ", ".join(sorted(self._among)) or "none"
            return NotReady(f"no endpoint that the gateway allows can take it: {endpoints}")
        return NotReady(self._routing.pool.trouble(self.features.model))

    def decision(self) -> str:
        """Its replica, and the reason: the part of its prompt that the replica is expected to have
        cached.
        """
        assert self.replica
        known = f"{described(self._reason[0])} of {self.features.tokens:,} tokens"
        prefilled = f", prefilled on {self._prefilled_on}" if self._prefilled_on else ""
        return f"{self.strategy}: {self.replica.name} {known}{prefilled}"

    @property
    def strategy(self) -> str:
        """The rule that chose its replica."""
        if not self.inference:
            return "roundrobin"
        return "session" if self._reason[1] else self._routing.strategy

    @property
    def cached(self) -> int:
        """Tokens of its prompt that its replica is expected to have cached."""
        return self._reason[0].tokens

    def computed(self) -> None:
        """Its answer has begun, so its prompt is computed."""
        if self.replica and self._work:
            self.replica.computed(self._work)

    def answered(self, headers: dict[bytes, bytes]) -> None:
        """Its replica has sent the head of an answer."""
        assert self.replica
        affinity = self._routing.affinity
        if session := affinity.learn(headers, self.replica.name, self._tenant):
            self._routing.peers.announce_session(session, affinity.replica(session) or "")

    def moved(self, now: float) -> None:
        """There was more of its answer at that time."""
        self.waits_since = now
        if self.replica:
            self.replica.breaker.moved(now)

    def first_byte(self, waited: float) -> None:
        """Record the first byte of its answer after this many seconds: its prompt is computed."""
        self._routing.pool.first_bytes.append(waited - (self.held_s or 0.0))
        if self._awaited:
            self._learn_first_token(self._awaited)
        self.computed()
        self.heard()

    def _learn_first_token(self, awaited: Awaited) -> None:
        self._awaited = None
        if not (self.replica and self._answers):
            return
        ratio = self.replica.first_token.learn(awaited, time.monotonic())
        if ratio is not None:
            self._routing.pool.accuracy.add(ratio)
            metrics.FORECAST.add(ratio)

    def heard(self) -> None:
        """Its replica answers it, and charges its tokens."""
        if self._answers:
            self._uncharged = 0

    def doubts(self, status: int) -> bool:
        """Whether an error of its replica may be the request's fault or the replica's. The next
        replica's answer shows which.
        """
        assert self.replica
        if not is_error(status):
            return False
        suspect = self._trial or self.replica.breaker.suspect
        bound = self._reason[1]  # to a session, which no other replica has
        return suspect and not bound and not self._doubted

    def doubt(self) -> None:
        """Hold that error against the next replica's answer."""
        assert self.replica
        self._doubted, self._trial = (self.replica, self._trial), False

    def judge(self, status: int, now: float) -> None:
        """Its replica has begun an answer, which shows whether the replica works."""
        assert self.replica
        breaker, trial, self._trial = self.replica.breaker, self._trial, False
        self.replica.refuse(status == 503)
        self._answers = status < 400
        if status < 500:
            self.replica.answered_at = now
        if self._doubted and is_error(status):
            self._excuse(now)
            breaker.excused(now, trial=trial)
            return
        if self._doubted and status < 500 and status != 429:
            doubted, tried = self._doubted
            self._doubted = None
            doubted.breaker.answered(500, now, trial=tried)
        breaker.answered(status, now, trial=trial)

    def unreachable(self, now: float) -> None:
        """Its replica took no connection, or broke it off before it had answered."""
        assert self.replica
        trial, self._trial = self._trial, False
        self.replica.refuse(True)
        self.replica.breaker.unreachable(now, trial=trial)

    def _excuse(self, now: float) -> None:
        if self._doubted:
            doubted, trial = self._doubted
            self._doubted = None
            doubted.breaker.excused(now, trial=trial)

    def leave(self) -> None:
        """Its replica has no more to do with it."""
        if not self.replica:
            return
        if self._trial:
            self._trial = False
            self.replica.breaker.abandoned(time.monotonic())
        self._routing.placements.discard(self)
        self._awaited = None
        replica, self.replica = self.replica, None
        if self._work:
            replica.end(self._work)
            self._work = None
            self._routing.held.wake()

    def over(self, request: Request, outcome: Outcome, trace: Span | None) -> None:
        """It has ended: count it, write its line, end its span, and leave its replica."""
        name = self.replica.name if self.replica else ""
        self._wait_no_more()
        self.leave()
        self._excuse(time.monotonic())
        self._routing.limiter.charge(request.caller, self._uncharged)
        self._routing.tally.requests[name, outcome.status, outcome.end] += 1
        error, status = outcome.error, outcome.status or CLIENT_LEFT
        if error:
            status = errors.shape(request.path).status(error)
        if self._routing.access_log:
            logs.access(self._line(request, outcome, status, name, trace))
        if trace:
            trace.note(
                http__request__method=request.method.decode("latin-1"),
                http__route=self._routing.routes.template(request.path),
                http__response__status_code=status,
                slipway__attempts=len(self.tried),
            )
            broken = outcome.end if outcome.end != "finished" else str(status)
            why = type(error).__name__ if error else broken
            trace.note(error__type=why if status >= 400 or outcome.end != "finished" else None)
            # What a client did wrong is no fault of this server's, by the conventions.
            trace.end(why if status >= 500 or outcome.end == "cut" else None)

    def _line(
        self, request: Request, outcome: Outcome, status: int, replica: str, trace: Span | None
    ) -> RoutedLine:
        began, first = outcome.began, outcome.first_byte
        own = REQUEST_ID not in request.named  # else it is the client's, and may be anything
        known_as = request.id.decode("latin-1")
        adapter = self.features.adapter
        return RoutedLine(
            request_id=known_as if own else redacted(known_as),
            method=request.method.decode("latin-1"),
            path=self._routing.routes.template(request.path),
            status=status,
            ms=logs.milliseconds(time.monotonic() - began),
            end=outcome.end,
            strategy=self.strategy,
            attempts=len(self.tried),
            bytes_in=request.size,
            bytes_out=outcome.sent,
            replica=replica,
            prefilled_on=self._prefilled_on,
            held_ms=None if self.held_s is None else logs.milliseconds(self.held_s),
            first_byte_ms=None if first is None else logs.milliseconds(first - began),
            key=request.caller.name,
            tenant=request.caller.shown_tenant or None,
            adapter=adapter if adapter in self._routing.pool.adapters else "",
            error=type(outcome.error).__name__ if outcome.error else "",
            trace_id=trace.trace_id if trace else "",
        )
