# SPDX-License-Identifier: Apache-2.0
"""Messages between router processes on one port: the placement of each request, and the state of
replicas, which one of them probes.

Each process announces its choices to the others within milliseconds. Several times a second it also
announces its number of requests in flight, which corrects the effect of a lost message or a dead
process. Messages are datagrams in memory; a message without room is dropped.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Set
from typing import NamedTuple

import msgspec

from serving.access.signed_identity import new_name
from serving.cache_hints.intent import NO_INTENT, CacheIntent
from serving.router.fleet.health import Seen
from serving.router.fleet.replicas import Replica
from serving.router.policy.replica_load import Share
from serving.router.policy.routing_request import RoutingRequest
from serving.waiting.held import HeldQueue

CHOICES_S = 0.002
"""Seconds that choices are gathered, because a datagram for each would cost more than the
choice.
"""
LINKS = 5_000
"""Links of chains that fit into a datagram (Linux takes 200 kB)."""
LOADS_S = 0.2
"""Seconds between two messages about requests in flight."""
FORGET_S = 2.0
"""A process that has been silent for this many seconds has ended."""

_NOTHING: Share = (0, 0, 0)
_FINAL = CacheIntent(final=True)


class _Choice(msgspec.Struct, array_like=True):
    replica: str
    tokens: int
    work: int
    adapter: str
    chain: list[int]
    blocks: dict[int, list[int]] | None
    session: str
    final: bool


class _Choices(msgspec.Struct, tag=1, array_like=True):
    process: int
    choices: list[_Choice]


class _Session(msgspec.Struct, tag=2, array_like=True):
    session: str
    replica: str


class _Loads(msgspec.Struct, tag=3, array_like=True):
    """place: of the process among the router's. held: requests that it holds, and their work in
    tokens.
    """

    process: int
    place: int
    loads: dict[str, Share]
    held: tuple[int, int]


class Link(NamedTuple):
    """One process's sockets to the others."""

    inbox: socket.socket
    outboxes: list[socket.socket]
    name: str
    """The name of the whole router, which others sign for."""
    place: int
    """The number of the process among them."""


def links(processes: int) -> list[Link]:
    """The links between processes, made before the fork."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(processes)]
    for end in (end for pair in pairs for end in pair):
        end.setblocking(False)
    name = new_name()
    return [
        Link(inbox, [outbox for _, outbox in pairs[:number] + pairs[number + 1 :]], name, number)
        for number, (inbox, _) in enumerate(pairs)
    ]


class Peers:
    """The router's other processes. Without a link there are none."""

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        learn: Callable[[RoutingRequest, str], None],
        bind: Callable[[str, str], None],
        see: Callable[[Seen], None],
        held: HeldQueue,
        link: Link | None = None,
    ) -> None:
        """replicas: by name, those whose loads are sent and set. learn: called with another
        process's choice for a request. bind: is called with a session and the replica that has
        begun it, or "" if the session has ended. see: is called with another process's report about
        a replica. held: the requests that this process holds, which others' loads may let go.
        """
        self._replicas = replicas
        self._learn = learn
        self._bind = bind
        self._see = see
        self._held = held
        self._inbox: socket.socket | None
        self._inbox, self._outboxes = link[:2] if link else (None, [])
        self._place = link.place if link else 0
        self._process = os.getpid()
        # the others' requests in flight, and the times of their reports
        self._loads: dict[int, tuple[float, dict[str, Share]]] = {}
        self._held_there: dict[int, tuple[int, int]] = {}
        self._places: dict[int, int] = {}
        # to be announced
        self._choices: list[_Choice] = []
        self._links = 0  # of those
        self._decode = msgspec.msgpack.Decoder(_Choices | _Session | _Loads | Seen).decode

    @property
    def held(self) -> tuple[int, int]:
        """Requests that all processes hold, and their work in tokens."""
        all_of_them = [(len(self._held), self._held.cost), *self._held_there.values()]
        requests, tokens = (sum(it[n] for it in all_of_them) for n in range(2))
        return requests, tokens

    async def run(self) -> None:
        """Listen, and send loads, until cancelled."""
        if not self._inbox:
            await asyncio.Event().wait()
            return
        loop = asyncio.get_running_loop()
        loop.add_reader(self._inbox, self._read)
        try:
            while True:
                self._send_loads()
                self._forget(loop.time())
                await asyncio.sleep(LOADS_S)
        finally:
            loop.remove_reader(self._inbox)

    def announce(self, request: RoutingRequest, replica: str, work: int) -> None:
        """Announce that a request goes to a replica. work: prompt tokens that the replica must
        compute.
        """
        if not self._outboxes:
            return
        blocks = None
        if request.blocks is not None:
            blocks = {size: list(chain) for size, chain in request.blocks.items()}
        prompt = request.tokens, work, request.adapter, list(request.chain), blocks
        if not self._choices:
            asyncio.get_running_loop().call_later(CHOICES_S, self._flush)
        ends = request.intent.final
        self._choices.append(_Choice(replica, *prompt, request.session, ends))
        self._links += len(request.chain) + sum(map(len, (blocks or {}).values()))
        if self._links > LINKS:
            self._flush()

    def announce_session(self, session: str, replica: str) -> None:
        """The replica has begun a session; "" for one that has ended."""
        self._send(_Session(session, replica))

    def tell(self, seen: Seen) -> None:
        """Report about a replica, if this process is the first one that runs: it probes for all."""
        if all(place > self._place for place in self._places.values()):
            self._send(seen)

    def _flush(self) -> None:
        if self._choices:
            self._send(_Choices(self._process, self._choices))
        self._choices, self._links = [], 0

    def _send_loads(self) -> None:
        self._flush()
        busy = {
            name: replica.own_load
            for name, replica in self._replicas.items()
            if replica.in_flight and any(replica.own_load)
        }
        held = len(self._held), self._held.cost
        self._send(_Loads(self._process, self._place, busy, held))

    def _send(self, message: msgspec.Struct) -> None:
        data = msgspec.msgpack.encode(message) if self._outboxes else b""
        for outbox in self._outboxes:
            with contextlib.suppress(OSError):  # no room, or no receiver
                outbox.send(data)

    def _read(self) -> None:
        assert self._inbox
        now = asyncio.get_running_loop().time()
        for _ in range(100):  # the rest in the loop's next turn
            try:
                message = self._decode(self._inbox.recv(1 << 18))
            except BlockingIOError:
                return
            match message:
                case _Choices():
                    self._take(message, now)
                case _Session():
                    self._bind(message.session, message.replica)
                case Seen():
                    self._see(message)
                case _Loads():
                    _, before = self._loads.get(message.process, (now, {}))
                    self._loads[message.process] = (now, message.loads)
                    self._held_there[message.process] = message.held
                    self._places[message.process] = message.place
                    self._add_up(before.keys() | message.loads.keys())

    def _take(self, message: _Choices, now: float) -> None:
        _, loads = self._loads.setdefault(message.process, (now, {}))
        for choice in message.choices:
            began = 1, choice.work, choice.tokens
            loads[choice.replica] = _sum(loads.get(choice.replica, _NOTHING), began)
            request = RoutingRequest(
                adapter=choice.adapter,
                chain=choice.chain,
                blocks=choice.blocks,
                session=choice.session,
                intent=_FINAL if choice.final else NO_INTENT,
            )
            self._learn(request, choice.replica)
        self._add_up({choice.replica for choice in message.choices})

    def _add_up(self, names: Set[str]) -> None:
        """The loads of these replicas have changed."""
        for name in names & self._replicas.keys():
            loads = [loads.get(name, _NOTHING) for _, loads in self._loads.values()]
            self._replicas[name].set_peer_load(_sum(*loads))
        self._held.wake()

    def _forget(self, now: float) -> None:
        ended = [process for process, (at, _) in self._loads.items() if now - at > FORGET_S]
        for process in ended:
            _, loads = self._loads.pop(process)
            self._held_there.pop(process, None)
            self._places.pop(process, None)
            self._add_up(loads.keys())


def _sum(*shares: Share) -> Share:
    in_flight, queued, context = (sum(share[n] for share in shares) for n in range(3))
    return in_flight, queued, context
