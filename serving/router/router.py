# SPDX-License-Identifier: Apache-2.0
"""One process of `route`: one port in front of several servers."""

import asyncio
import functools
import logging
import re
import signal
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Hashable, Iterator, Mapping, Set
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote

import msgspec

from lmi_config.options.declared import Settings
from lmi_config.options.settings import SettingsError
from serving import errors, protocol
from serving.access.access import Access
from serving.access.limits import Limiter
from serving.access.objectives import Objectives
from serving.aio import in_thread
from serving.cache_hints.intent import digest
from serving.errors import (
    BadRequest,
    MethodNotAllowed,
    NotFound,
    NotReady,
    Overloaded,
    ServingError,
)
from serving.follow import kept
from serving.http.listener import Listener
from serving.http.origins import Origins
from serving.http.sockets import Connections, Place, most_routed
from serving.http.tls import ServerTls
from serving.kv_cache.salt import Tenants
from serving.lifecycle import SHUTDOWN
from serving.observability.tracing import tracer
from serving.process import StopSignals, return_heaps
from serving.router import status
from serving.router.fleet.broadcast import Answer, Broadcast, told_by
from serving.router.fleet.consistency import differences
from serving.router.fleet.discovery import addresses, discovered
from serving.router.fleet.health import Asking, HealthChecks
from serving.router.fleet.own_copies import COPY, MODEL, OwnCopies, described, merged
from serving.router.fleet.replicas import Replica, ReplicaPool
from serving.router.http import buffers
from serving.router.http.buffers import MOST_HELD, MOST_HELD_BYTES, Buffers
from serving.router.http.downstream import Downstream
from serving.router.http.forwarded_request import Request, Rules
from serving.router.http.ports import Responder, WholeResponder
from serving.router.kv.awareness import KvAwareness
from serving.router.metrics import FALLBACKS, Tally
from serving.router.models import doors
from serving.router.models.model_messages import Door, Row
from serving.router.models.view import OwnModels
from serving.router.peers import Link, Peers
from serving.router.placement import Kind, Placement, Routing, Timeouts
from serving.router.policy.conversations import Conversations
from serving.router.policy.kv_index import KvIndex
from serving.router.policy.policies import KvAware, Policy, PrefixAware, RoundRobin, Session
from serving.router.policy.prefix_index import PrefixIndex
from serving.router.policy.routing_request import RequestReader, RoutingRequest
from serving.router.proxy.proxied import ProxiedRequest
from serving.router.retry import RetryBudget
from serving.router.routes import (
    BATCH,
    CHANGE,
    CONVERSATION,
    END_TO_END,
    INFERENCE,
    READ,
    Route,
    Routes,
    may_be_added,
)
from serving.router.session_affinity import SessionAffinity
from serving.ui import page as ui
from serving.waiting.held import HeldQueue

log = logging.getLogger(__name__)

_OWN = frozenset(
    (
        *(*protocol.ROUTER_PROBES, protocol.METRICS, protocol.SERVER_METRICS),
        *(protocol.REPLICAS, protocol.UI_STATUS),
    )
)
"""Paths that a router answers itself, besides those of its page."""
_MANAGED = re.compile(protocol.MANAGED_PATH)
_COUNT = re.compile("[0-9]{1,9}")
COMPARED = 1_000
"""Number of replicas that are compared per second, if many become ready."""
SWEEP_S = 1.0
"""Seconds between two sweeps for requests that have waited too long."""


class EndpointPicking(Protocol):
    """Answers gateways: epp.server.EndpointPicker, which imports gRPC."""

    async def start(self) -> None:
        """Listen. Raises CannotListen, OSError."""

    async def run(self) -> None:
        """Work until cancelled."""

    async def stop(self, grace: float) -> None:
        """Take no more requests, and wait for those in flight. grace: seconds to wait."""


class Router:
    """The router of one process: its parts, its life cycle, and the routing of requests."""

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        link: Link | None = None,
        copies: OwnCopies | None = None,
        models: Door | None = None,
    ) -> None:
        """link: to the router's other processes. copies, models: of this container, if it has such
        servers.
        """
        self._settings = settings
        self._copies = copies
        self._models = OwnModels(models) if models else None
        self._origins = Origins(settings.cors_allowed_origin, settings.host)
        self._gateway_origins = Origins(settings.cors_allowed_origin, "")  # it may have any name
        self._page = ui.FILES if settings.serves_ui else {}
        self._access = Access(
            settings,
            routes=True,
            name=link.name if link else "",
            closed=bool((copies and copies.closed) or (models and models.closed)),
        )
        self._objectives = Objectives(settings)
        self._tenants = Tenants(settings.cache_salt_header)
        self._tls = ServerTls(settings)
        # clients
        named = (settings.cache_salt_header, settings.session_key)
        self.rules = Rules(
            settings.max_request_size,
            settings.batch_file_size,
            (settings.cache_salt_header or "").lower().encode(),
            END_TO_END | {name.lower().encode() for name in named if name},
        )
        self.buffers = Buffers()
        self.connections = Connections(most_routed())
        self.clients: set[Downstream] = set()
        self.proxied: set[ProxiedRequest] = set()
        # replicas
        self.pool = ReplicaPool(self._on_ready, self._on_gone, copies.urls if copies else ())
        tls = _authorities(settings.router_ca_file)
        asking = self._asking = Asking(self._access, tls)
        self._health = HealthChecks(
            *(self.pool, asking, copies.supervisors_series if copies else str),
            tell=lambda seen: self.routing.peers.tell(seen),
        )
        self._differences: dict[str, str] = {}
        self._compare: asyncio.TimerHandle | None = None
        policy, self.kvaware = _strategy(settings, environ, asking)
        affinity = SessionAffinity()
        held = HeldQueue(MOST_HELD, MOST_HELD_BYTES, time.monotonic)
        self.routing = Routing(
            pool=self.pool,
            look=self._health.look,
            strategy=settings.routing_strategy,
            policy=policy,
            fallback=RoundRobin(),
            affinity=affinity,
            conversations=Conversations(),
            peers=Peers(
                *(self.pool.named, self._learned, affinity.bind, self._health.on_seen, held, link)
            ),
            limiter=Limiter(settings.limits_url),
            retries=RetryBudget(),
            held=held,
            hold=settings.router_hold,
            within=settings.slo_ttft_ms / 1000 if settings.slo_ttft_ms else None,
            timeouts=Timeouts(settings.router_first_byte_timeout, settings.router_idle_timeout),
            tls=tls,
            tally=Tally(),
            placements=set(),
            access_log=settings.router_access_log,
            tracer=tracer(settings, "slipway-router"),
            read=RequestReader(
                settings.routing_strategy,
                settings.session_key,
                self.pool.adapters,
                None if models else self.pool.apart,
            ).read,
            tokenise=self.kvaware.tokenise if self.kvaware else None,
            models=self._models,
            identity=self._access.identity,
            prefill_tokens=settings.router_prefill_tokens if self._divides(policy) else 0,
            continues=settings.router_continue_streams,
            routes=Routes(settings.router_paths),
        )
        self._broadcast = Broadcast(
            *(self.pool, self._health, settings.router_first_byte_timeout, asking),
            *(self._access.identity, self.rules.tenant),
        )
        self._changes: set[asyncio.Task[None]] = set()
        self._changing: list[str] = []  # models whose adapters are being changed
        self._picker = self._endpoint_picker()
        # life
        self.draining = False
        self._signals = StopSignals()
        self._idle = asyncio.Event()

    def _divides(self, policy: Policy) -> bool:
        """Whether a request can be divided between two replicas: the router has a secret to sign
        the hand-over with, and its strategy knows which tokens are cached.
        """
        return bool(self._settings.router_secret) and isinstance(policy, PrefixAware)

    def _endpoint_picker(self) -> EndpointPicking | None:
        """The endpoint picker for gateways, or None if it is not configured."""
        if not self._settings.epp:
            return None
        # They import gRPC, which only a picker needs.
        from serving.router.epp.exchange import Picking
        from serving.router.epp.grpc_server import EndpointPicker

        # Its peers and the clients of the proxy cannot use up each other's memory.
        picking = Picking(self.place, self.routing, self.rules, Buffers())
        return EndpointPicker(self._settings, picking)

    def _connection(self, place: Place) -> Downstream:
        return Downstream(self.dispatch, self.rules, self.buffers, place, self.clients)

    # its life

    async def run(self, listener: socket.socket) -> None:
        """From listening to the end. Raises CannotListen, OSError of an endpoint picker."""
        if self._picker:
            await self._picker.start()
        numbers = (signal.SIGTERM, signal.SIGINT)
        self._signals.listen(*(it for it in numbers if signal.getsignal(it) is not signal.SIG_IGN))
        await self._access.open()
        accepting = Listener(listener, self.connections, self._connection, self._tls)
        host, port = listener.getsockname()[:2]
        strategy = self._settings.routing_strategy
        facts = {"host": host, "port": port, "strategy": strategy}
        text = f"routing on port {port} of {host}, strategy {strategy}"
        log.info("routing", extra={"facts": facts, "text": text})
        works = [
            kept("health", lambda: self._health.run(self._places)),
            kept("memory", return_heaps),
            kept("peers", self.routing.peers.run),
            kept("time_outs", self._sweep),
            kept("objectives", self._objectives.follow),
            self._access.follow(),
            self._tls.follow(),
        ]
        if self.kvaware:
            works.append(kept("tokenizer", self.kvaware.run))
        if self._picker:
            works.append(kept("endpoint_picker", self._picker.run))
        if own := self._models:
            works.append(kept("models", lambda: own.follow(self._work, self._on_models)))
        tasks = [asyncio.create_task(work) for work in works]
        await self._signals.stop()
        await self._drain()
        accepting.close()
        await self._farewell()
        await self.routing.limiter.close()
        if self.routing.tracer:
            await self.routing.tracer.stop()
        await _cancel(*tasks, *self._changes)

    def _places(self) -> AsyncGenerator[frozenset[str]]:
        """The addresses of the replicas, now and after each change."""
        if self._models:
            return self._models.places()
        replicas = discovered(self._settings.router_replicas or "")
        return addresses(replicas) if self._picker else replicas

    async def _drain(self) -> None:
        """Take no more requests, and wait for those in flight."""
        log.info("draining")
        self.draining = True
        # Another router takes them; here they might wait in vain until the last moment.
        self.routing.held.close(NotReady("the router is stopping"))
        self._check_idle()
        ends = [asyncio.create_task(it) for it in (self._signals.hurry(), self._finished())]
        await asyncio.wait(ends, timeout=SHUTDOWN.drain, return_when=asyncio.FIRST_COMPLETED)
        await _cancel(*ends)
        if self._picker:
            await self._picker.stop(0)

    async def _finished(self) -> None:
        """Wait until all requests in flight are answered."""
        if self._picker:
            await self._picker.stop(SHUTDOWN.drain)
        await self._idle.wait()

    async def _farewell(self) -> None:
        """Close clients' connections once their output is sent."""
        for client in [*self.clients]:
            client.transport.close()
        ended = time.monotonic() + SHUTDOWN.farewell
        while self.clients and time.monotonic() < ended:
            await asyncio.sleep(0.05)

    def stop(self) -> None:
        """Stop; when it is called again, without waiting for requests."""
        self._signals.ask()

    def _check_idle(self) -> None:
        """A request is over, or no more are taken."""
        if self.draining and not self.proxied and not self._changes:
            self._idle.set()

    async def _sweep(self) -> None:
        """End requests that have waited too long; one sweep is cheaper than a timer for each."""
        now = time.monotonic()
        while True:
            await asyncio.sleep(SWEEP_S)
            self.routing.tally.flush()
            before, now = now, time.monotonic()
            for proxied in [*self.proxied]:
                proxied.look()
                proxied.check_timeouts(now)
            self.pool.look(now, self._waiting())
            self.routing.held.expire()
            self.routing.held.wake()
            for client in [*self.clients]:
                client.check_timeouts(now, now - before)

    def _waiting(self) -> Iterator[tuple[Replica, float]]:
        """For each request that waits for its replica, since when."""
        for placement in self.routing.placements:
            if placement.replica and placement.waits_since is not None:
                yield placement.replica, placement.waits_since

    # replicas

    def _on_ready(self, replica: Replica, anew: bool) -> None:
        policy = self.routing.policy
        if anew:
            policy.forget(replica.name)
            self.routing.conversations.forget(replica.name)
        if isinstance(policy, PrefixAware):
            policy.index.resize(replica.name, replica.capacity)
        if self.kvaware:
            self.kvaware.on_ready(replica)
        self._compare = self._compare or asyncio.get_running_loop().call_later(
            len(self.pool.replicas) / COMPARED, self._warn_of_differences
        )
        self.routing.held.wake()

    def _warn_of_differences(self) -> None:
        """Warn of new differences among replicas."""
        self._compare = None
        before, self._differences = self._differences, self._different()
        for what in self._differences.keys() - before.keys():
            log.warning("%s", self._differences[what])

    def _different(self) -> dict[str, str]:
        if self._models:  # which are meant to differ
            return {}
        header = (self._settings.cache_salt_header or "").lower()
        divides = bool(self.routing.prefill_tokens)
        return differences(self.pool.replicas, header, divides=divides)

    def _on_gone(self, replica: Replica) -> None:
        if self.kvaware:
            self.kvaware.on_gone(replica)
        if self.pool.named.get(replica.name) is not replica:
            self.routing.policy.forget(replica.name)
            self.routing.conversations.forget(replica.name)
            return
        for proxied in [it for it in self.proxied if it.placement.replica is replica]:
            proxied.replica_down()

    def _learned(self, request: RoutingRequest, replica: str) -> None:
        if replica in self.pool.named:  # else nobody would forget it
            self.routing.policy.learn(request, replica, time.monotonic())
            self.routing.conversations.learn(request, replica)

    # several models in this container

    def _work(self) -> dict[str, tuple[int, int]]:
        """The waiting requests of each model, and those in flight, with changes of adapters."""
        assert self._models
        waiting = Counter[str]()
        for kind, count in self.routing.held.counts().items():
            assert isinstance(kind, Kind)
            waiting[kind.model] += count
        in_flight = Counter(self._changing)
        for replica in self.pool.replicas:
            in_flight[self._models.at(replica.name)] += replica.in_flight
        return {name: (waiting[name], in_flight[name]) for name in self._models.rows}

    def _on_models(self, before: Mapping[str, Row]) -> None:
        """Record the models' states, as the supervisor has reported them."""
        assert self._models
        rows = self._models.rows
        self.pool.close({it.address for it in rows.values() if not it.open})
        for name in before.keys() | rows.keys():
            if name not in rows:
                error: ServingError = NotFound(f"the model {name} was unloaded; load it again")
            elif reason := rows[name].trouble:
                error = NotReady(f"the model {name} cannot be started: {reason}; try again later")
            else:
                continue
            self.routing.held.give_up(functools.partial(_is_of, name), error)
        self.routing.held.wake()
        self._later(self._health.look())

    def _of_models(
        self, models: OwnModels, responder: WholeResponder, request: Request, route: Route | None
    ) -> bool:
        """Answer a request about the models. Returns whether this does. Raises ServingError."""
        method, path = request.method, request.path
        reads = method in (b"GET", b"HEAD")
        if route is BATCH:
            raise NotFound(
                f"{path:.100}: a container with several models has no files and batches; ask one "
                "that has a single model"
            )
        if path == protocol.MODELS or path.startswith(f"{protocol.MODELS}/"):
            if not reads:
                raise MethodNotAllowed(path, method.decode(), ["GET", "HEAD"])
            adapters = {models.at(it.name): it.adapters for it in self.pool.ready}
            found = doors.openai(models, request.caller, adapters)
            if path != protocol.MODELS:
                found = doors.one(found, path.removeprefix(f"{protocol.MODELS}/"))
            _respond(responder, found)
        elif path == protocol.MANAGEMENT[0] and reads:
            _respond(responder, doors.listed(models, request))
        elif path == protocol.MANAGEMENT[0] and method == b"POST":
            self._later(self._done(responder, doors.load(models, request)))
        elif path == protocol.MANAGEMENT[0]:
            raise MethodNotAllowed(path, method.decode(), ["GET", "HEAD", "POST"])
        elif not _MANAGED.fullmatch(path) or not path.startswith(protocol.MANAGEMENT[0]):
            return False
        elif reads:
            _respond(responder, doors.described(doors.known(models, path.rpartition("/")[2])))
        elif method == b"DELETE":
            unloading = doors.unload(models, path.rpartition("/")[2])
            self._later(self._done(responder, unloading))
        else:
            raise MethodNotAllowed(path, method.decode(), ["GET", "HEAD", "DELETE"])
        return True

    async def _done(
        self, responder: WholeResponder, work: Coroutine[Any, Any, tuple[int, dict[str, Any]]]
    ) -> None:
        """Answer with the outcome of a call: a status and a body."""
        try:
            code, found = await work
            _respond(responder, found, code)
        except ServingError as error:
            responder.fail(error)
        except Exception:
            responder.fail(errors.unforeseen())

    # requests

    def dispatch(self, responder: Responder, request: Request) -> ProxiedRequest | None:
        """Dispatch: the part that answers a request. Raises ServingError."""
        self._origins.require(request.method.decode("latin-1"), request.named)
        if not (route := self._route(responder, request)):
            return None
        if self.draining:
            raise NotReady("the router is stopping")
        inference = route is INFERENCE
        proxied = ProxiedRequest(
            responder, request, self.routing, inference=inference, ended=self._on_ended
        )
        self.proxied.add(proxied)
        return proxied

    def place(
        self, responder: WholeResponder, request: Request, among: Set[str] | None
    ) -> Placement | None:
        """The same for a gateway, which sends the request there itself. among: the endpoints that
        it may go to; None for all.
        """
        self._gateway_origins.require(request.method.decode("latin-1"), request.named)
        if not (route := self._route(responder, request)):
            return None
        return Placement(self.routing, inference=route is INFERENCE, among=among)

    def _route(self, responder: WholeResponder, request: Request) -> Route | None:
        """The route of a request that a single replica answers. None if it is answered here. Raises
        ServingError if the sender may not send it.
        """
        route = self.routing.routes.of(request.method, request.path)
        if self._copies and self._leaves_to_copies(route, request):
            route = READ
        if request.path not in protocol.ROUTER_PROBES and request.path not in self._page:
            self._identify(request, inference=route is INFERENCE)
        if (models := self._models) and self._of_models(models, responder, request, route):
            return None
        if route is None:
            self._answer(responder, request)
        elif route is BATCH and not self._settings.batch_folder:
            raise NotFound(
                "the router passes files and batches on where OPTION_BATCH_FOLDER says that its "
                "servers share a folder for them; else ask a server itself"
            )
        elif route is CHANGE:
            self._change(responder, request)
            return None
        elif route is CONVERSATION:
            last = self._last_replica(request) if request.method == b"POST" else ""
            call = self._broadcast.send_about_conversation(request, last)
            self._later(self._to_all(responder, call))
            return None
        elif self._copies and request.method == b"GET" and self._describes(request.path):
            self._later(self._describe(responder, request, self._copies))
            return None
        return route

    def _last_replica(self, request: Request) -> str:
        """Return the name of the replica of a conversation's last turn, "" if it is not known."""
        name = unquote(request.path.split("/")[2])
        return self.routing.conversations.replica(digest(request.tenant, name))

    def _describes(self, path: str) -> bool:
        """Whether a path asks for the description of the served model, by one of its names."""
        named = path.rpartition("/")[2] in self._settings.names_in_paths
        return named and bool(_MANAGED.fullmatch(path))

    def _leaves_to_copies(self, route: Route | None, request: Request) -> bool:
        """Whether a copy in this container answers a path that the router does not know, even if
        the answer is a refusal.
        """
        if route is BATCH:
            return not self._settings.batch_folder
        own = request.path in _OWN or request.path in self._page
        return route is None and not own

    def _identify(self, request: Request, *, inference: bool) -> None:
        """Find out who sends a request. Raises ServingError if the sender may not send it."""
        caller = self._access.caller(request.headers)
        caller.require_path(request.path, inference=inference)
        caller = request.caller = self._objectives.applied(caller, request.named)
        request.tenant = self._tenants.tenant(caller, request.headers)

    def _on_ended(self, proxied: ProxiedRequest) -> None:
        self.proxied.discard(proxied)
        if self.draining:
            self._check_idle()

    def _answer(self, responder: WholeResponder, request: Request) -> None:
        """Answer a request that needs no replica."""
        reads = request.method in (b"GET", b"HEAD")
        match request.path:
            case protocol.PING | protocol.HEALTH if reads:
                hold = self.routing.hold
                enough = self._models or status.enough(self.pool, self._copies, hold)
                code = 200 if enough and not self.draining else 503
                proof = self._access.introduction(request.named.get(protocol.CHALLENGE, b""))
                lines = [b"%b: %b" % header for header in proof]
                responder.respond(
                    code,
                    *status.ping(self.pool, self.draining, self._copies, hold, self._models),
                    *lines,
                )
            case protocol.LIVE if reads:
                responder.respond(200, b"text/plain", b"ok\n")
            case protocol.METRICS | protocol.SERVER_METRICS if reads and self._copies:
                numbers = {url: str(number) for url, number in self._copies.numbers.items()}
                self._later(self._all_series(responder, numbers, self._copies))
            case protocol.METRICS | protocol.SERVER_METRICS if reads and self._models:
                names = {it.address: name for name, it in self._models.rows.items() if it.running}
                self._later(self._all_series(responder, names))
            case protocol.METRICS | protocol.SERVER_METRICS if reads:
                self.routing.tally.flush()
                accept = request.named.get(b"accept", b"")
                traced = self.routing.tracer is not None
                held = self.routing.peers.held
                responder.respond(200, *status.metrics(self.pool, held, accept, traced=traced))
            case protocol.REPLICAS if reads:
                responder.respond(200, *self._replicas(request))
            case path if reads and path in self._page:
                responder.respond(200, *self._page[path], *ui.LINES)
            case protocol.UI_STATUS if reads and self._page:
                responder.respond(200, *self._replicas(request))
            case (
                protocol.PING
                | protocol.HEALTH
                | protocol.LIVE
                | protocol.METRICS
                | protocol.SERVER_METRICS
                | protocol.REPLICAS
            ) as path:
                raise MethodNotAllowed(path, request.method.decode(), ["GET", "HEAD"])
            case path if path in self._page or (path == protocol.UI_STATUS and self._page):
                raise MethodNotAllowed(path, request.method.decode(), ["GET", "HEAD"])
            case path if allowed := self.routing.routes.methods(path):
                raise MethodNotAllowed(path, request.method.decode(), allowed)
            case path:
                missing = f"there is nothing at {path}"
                if request.method == b"POST" and may_be_added(path):
                    missing += (
                        f"; where the servers have it, OPTION_ROUTER_PATHS={path} has the router "
                        "pass it on"
                    )
                raise NotFound(missing)

    def _replicas(self, request: Request) -> tuple[bytes, bytes]:
        """The kind and body of an answer about replicas. Raises BadRequest."""
        query = request.target.partition(b"?")[2].decode("latin-1")
        start = parse_qs(query).get("start", ["0"])[-1]
        if not _COUNT.fullmatch(start):
            raise BadRequest(
                f"start={start!r:.100}: is the number of replicas before the page, like 200"
            )
        warnings = [*self._different().values()]
        return status.replicas(
            *(self.pool, self.routing.policy, self.kvaware, warnings, self._copies, int(start))
        )

    def _change(self, responder: WholeResponder, request: Request) -> None:
        """Send the request to all replicas. Each gets the body, so the body must be complete."""
        if request.overflowed:
            if request.size > buffers.MAX_BODY:
                raise BadRequest(
                    f"the body of a change of adapters may have at most {buffers.MAX_BODY} bytes"
                )
            raise Overloaded(
                "there are more bytes of requests than the router has memory for; try again"
            )
        self._later(self._to_all(responder, self._changed(request)))

    def _later(self, answering: Coroutine[Any, Any, None]) -> None:
        """Run a slow answer in a task."""
        task = asyncio.create_task(answering)
        self._changes.add(task)
        task.add_done_callback(self._on_changed)

    async def _all_series(
        self,
        responder: WholeResponder,
        servers: Mapping[str, str],
        copies: OwnCopies | None = None,
    ) -> None:
        """Answer with the series of this container: the router's, the supervisor's, the servers'.
        servers: their numbers or names by their addresses.
        """
        try:
            told = await told_by(self.pool, self._asking, servers, protocol.METRICS)
            texts = {number: body.decode(errors="replace") for number, body in told.items()}
            self.routing.tally.flush()
            held = self.routing.peers.held
            kind, own = status.metrics(self.pool, held, b"", traced=False)
            shared = copies.supervisors_series() if copies else ""
            shared = self._models.series() if self._models else shared
            label = COPY if copies else MODEL
            body = await in_thread(merged, own.decode() + shared, texts, label)
            responder.respond(200, kind, body.encode())
        except Exception:
            responder.fail(errors.unforeseen())

    def _on_changed(self, task: asyncio.Task[None]) -> None:
        self._changes.discard(task)
        self._check_idle()

    async def _describe(
        self, responder: WholeResponder, request: Request, copies: OwnCopies
    ) -> None:
        """Answer with a description of the model, combined from the answers of its copies."""
        try:
            if not (told := await told_by(self.pool, self._asking, copies.numbers, request.path)):
                raise NotReady(self.pool.trouble())
            responder.respond(200, b"application/json", described(told, copies.left_out()))
        except ServingError as error:
            responder.fail(error)
        except Exception:
            responder.fail(errors.unforeseen())

    async def _changed(self, request: Request) -> Answer:
        """Return the answer to a change. Raises ServingError."""
        if not self._models:
            return await self._broadcast.send(request)
        row = self._models.named(request, "")
        if not row.open:  # an engine that falls asleep could not load it
            raise NotReady(f"the model {row.name} does not run; send it a request, and try again")
        self._changing.append(row.name)
        try:
            return await self._broadcast.send(request, row.endpoint)
        finally:
            self._changing.remove(row.name)

    async def _to_all(
        self, responder: WholeResponder, answering: Coroutine[Any, Any, Answer]
    ) -> None:
        """Answer with the answer of all replicas."""
        try:
            answer = await answering
            responder.respond(answer.status, answer.content_type, answer.body, *answer.lines)
        except ServingError as error:
            responder.fail(error)
        except Exception:
            responder.fail(errors.unforeseen())


def _is_of(name: str, kind: Hashable) -> bool:
    """Whether requests of a kind are for a model."""
    return isinstance(kind, Kind) and kind.model == name


def _respond(responder: WholeResponder, found: dict[str, Any], code: int = 200) -> None:
    responder.respond(code, b"application/json", msgspec.json.encode(found))


def _authorities(file: str | None) -> ssl.SSLContext:
    """The TLS context that checks the certificates of encrypted replicas. Raises SettingsError."""
    try:
        return ssl.create_default_context(cafile=file)
    except OSError as error:
        reason = error.strerror if error.filename or not error.args else "it should be PEM"
        raise SettingsError([f"OPTION_ROUTER_CA_FILE={file!r}: {reason}"]) from None


def _strategy(
    settings: Settings, environ: Mapping[str, str], asking: Asking
) -> tuple[Policy, KvAwareness | None]:
    """The strategy, and the source of KV events if the strategy needs one."""
    match settings.routing_strategy:
        case "roundrobin":
            return RoundRobin(), None
        case "session":
            return Session(), None
        case "kvaware":
            index = KvIndex()
            feeds = KvAwareness(index, settings, environ, FALLBACKS, asking)
            return KvAware(PrefixIndex(), index), feeds
    return PrefixAware(PrefixIndex()), None


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
