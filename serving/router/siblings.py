"""What router processes on one port tell each other: which request went where.

Each process tells the others of its choices, within milliseconds, and several times a second how
many requests it has under way, so that what a lost message or a dead process has left is put right.
Messages are datagrams in memory; one that finds no room is dropped.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from serving.router.policies import Asked, Share

if TYPE_CHECKING:
    from serving.router.replicas import Replica

CHOICES_S = 0.002
"""For so long choices are gathered: a datagram for each would cost more than the choice."""
LINKS = 5_000
"""Links of chains that fit into a datagram (Linux takes 200 kB)."""
TELL_S = 0.2
FORGET_S = 2.0
"""A process that has told nothing for so long has ended."""

_NOTHING: Share = (0, 0, 0)


class _Chosen(msgspec.Struct, array_like=True):
    replica: str
    tokens: int
    cached: int
    adapter: str
    chain: list[int]
    blocks: list[int] | None


class _Choices(msgspec.Struct, tag=1, array_like=True):
    process: int
    choices: list[_Chosen]


class _Bound(msgspec.Struct, tag=2, array_like=True):
    session: str
    replica: str


class _State(msgspec.Struct, tag=3, array_like=True):
    process: int
    loads: dict[str, Share]


class Link:
    """The sockets of all processes, made before they are forked."""

    def __init__(self, processes: int) -> None:
        self._pairs = [
            socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(processes)
        ]
        for pair in self._pairs:
            for end in pair:
                end.setblocking(False)

    def of(self, number: int) -> tuple[socket.socket, list[socket.socket]]:
        """Where process `number` listens, and where it tells the others."""
        others = [pair[1] for n, pair in enumerate(self._pairs) if n != number]
        return self._pairs[number][0], others


class Siblings:
    """The other processes. Without a link there are none."""

    def __init__(
        self,
        replicas: Callable[[], Sequence["Replica"]],
        learn: Callable[[Asked, str], None],
        bind: Callable[[str, str], None],
        own: tuple[socket.socket, list[socket.socket]] | None = None,
    ) -> None:
        self._replicas = replicas
        self._learn = learn
        self._bind = bind
        self._socket: socket.socket | None
        self._socket, self._others = own or (None, [])
        self._process = os.getpid()
        self._known: dict[int, tuple[float, dict[str, Share]]] = {}
        self._choices: list[_Chosen] = []
        self._links = 0  # of those
        self._decode = msgspec.msgpack.Decoder(_Choices | _Bound | _State).decode

    async def run(self) -> None:
        """Listen and tell until cancelled."""
        if not self._socket:
            await asyncio.Event().wait()
            return
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket, self._read)
        try:
            while True:
                self._state()
                self._forget(loop.time())
                await asyncio.sleep(TELL_S)
        finally:
            loop.remove_reader(self._socket)

    def tell(self, asked: Asked, replica: str, cached: int) -> None:
        """A request goes to the replica, which has so many of its tokens."""
        if not self._others:
            return
        blocks = None if asked.blocks is None else list(asked.blocks)
        prompt = asked.tokens, cached, asked.adapter, list(asked.chain), blocks
        if not self._choices:
            asyncio.get_running_loop().call_later(CHOICES_S, self._flush)
        self._choices.append(_Chosen(replica, *prompt))
        self._links += len(asked.chain) + len(blocks or ())
        if self._links > LINKS:
            self._flush()

    def _flush(self) -> None:
        if self._choices:
            self._send(_Choices(self._process, self._choices))
        self._choices, self._links = [], 0

    def tell_bound(self, session: str, replica: str) -> None:
        """The replica has a session."""
        self._send(_Bound(session, replica))

    def _state(self) -> None:
        self._flush()
        loads = {it.name: it.own for it in self._replicas()}
        self._send(_State(self._process, {name: load for name, load in loads.items() if any(load)}))

    def _send(self, message: msgspec.Struct) -> None:
        data = msgspec.msgpack.encode(message) if self._others else b""
        for other in self._others:
            with contextlib.suppress(OSError):  # no room, or nobody there
                other.send(data)

    def _read(self) -> None:
        assert self._socket
        now = asyncio.get_running_loop().time()
        for _ in range(100):  # the rest in the loop's next turn
            try:
                message = self._decode(self._socket.recv(1 << 18))
            except BlockingIOError:
                return
            match message:
                case _Choices():
                    _, loads = self._known.setdefault(message.process, (now, {}))
                    for it in message.choices:
                        began = 1, it.tokens - it.cached, it.tokens
                        loads[it.replica] = _sum(loads.get(it.replica, _NOTHING), began)
                        asked = Asked(adapter=it.adapter, chain=it.chain, blocks=it.blocks)
                        self._learn(asked, it.replica)
                    self._add_up()
                case _Bound():
                    self._bind(message.session, message.replica)
                case _State():
                    self._known[message.process] = (now, message.loads)
                    self._add_up()

    def _add_up(self) -> None:
        for replica in self._replicas():
            told = [loads.get(replica.name, _NOTHING) for _, loads in self._known.values()]
            replica.add_others(_sum(*told))

    def _forget(self, now: float) -> None:
        ended = [process for process, (told, _) in self._known.items() if now - told > FORGET_S]
        for process in ended:
            del self._known[process]
        if ended:
            self._add_up()


def _sum(*shares: Share) -> Share:
    in_flight, queued, context = (sum(it[n] for it in shares) for n in range(3))
    return in_flight, queued, context
