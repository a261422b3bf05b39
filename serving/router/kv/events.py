# SPDX-License-Identifier: Apache-2.0
"""A replica's KV events over ZeroMQ → the index.

vLLM numbers its batches of events from 0, publishes them, and keeps a log of the latest 10,000. A
follower reads the log from the last batch it has, then listens. It reads the log again from there
whenever a batch is missing, or none comes for a while. If the log no longer has exactly that batch,
the engine has restarted or the log was cut. The follower then learns the rank again from the
batches in the log.
"""

import asyncio
import logging
import re
from collections.abc import Mapping

import msgspec
import zmq
import zmq.asyncio

from serving.router.policy.kv_index import AllBlocksCleared, Event, KvIndex, Position
from serving.router.policy.tiers import Held, described

log = logging.getLogger(__name__)

ANSWER_S = 5.0
"""For the next batch of a log; vLLM looks for requests ten times a second."""
IDLE_S = 5.0
"""After this many seconds without events, the log is asked for missed ones."""
SLICE = 256
"""Blocks that are applied before other tasks may run."""

RANKS = 64
"""Data parallel ranks of one replica that are followed."""
MESSAGE = 2**21
"""Bytes of a part of a message. vLLM's have some 10 KB, and 1 MB for a prompt of 131,072 tokens."""
BLOCKS = 2**16
"""Blocks of one event."""
QUEUED, QUEUED_LOG = 256, 1_000
"""Messages of a socket that wait to be read. Missing events are read from the log again."""
MALFORMED = 100
"""Number of malformed messages after which a replica is followed again, after a pause."""
AGAIN_S = 0.05
"""Seconds before a log with a missing batch is read again."""
PARTS = 8
"""Maximum parts of a message; vLLM's have at most four."""

_END = -1


class Source(msgspec.Struct):
    """The addresses of one data parallel rank's events: ZeroMQ URLs."""

    endpoint: str
    replay_endpoint: str


class _Batch(msgspec.Struct, array_like=True):
    time: float
    events: list[msgspec.Raw]


_PORT = re.compile("[1-9][0-9]{0,4}")
_read_sources = msgspec.json.Decoder(dict[int, Source]).decode
_read_batch = msgspec.msgpack.Decoder(_Batch).decode
_read_event = msgspec.msgpack.Decoder(Event).decode


class SourcesRefused(Exception):
    """A replica names places of KV events that are not followed."""


def sources(answer: bytes, host: str) -> dict[int, Source]:
    """A replica's answer to /kv_event_sources, by rank, with its host instead of the wildcard.
    Empty if it publishes no events, or has no log.

    host: IPv6 addresses are in brackets. Raises SourcesRefused for more than RANKS, and for
    addresses other than TCP ports of the host.
    """
    try:
        by_rank = _read_sources(answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    if len(by_rank) > RANKS:
        raise SourcesRefused(f"it names {len(by_rank)} ranks; at most {RANKS} are followed")
    return {
        rank: Source(_place(source.endpoint, host), _place(source.replay_endpoint, host))
        for rank, source in by_rank.items()
    }


def _place(url: str, host: str) -> str:
    """The URL, with the host for the wildcard. Raises SourcesRefused."""
    start, _, port = url.rpartition(":")
    if start not in ("tcp://*", f"tcp://{host}") or not _PORT.fullmatch(port):
        raise SourcesRefused(
            f"{url!r:.200} is no TCP port of its own; events are followed at tcp://{host}:PORT"
        )
    return f"tcp://{host}:{port}"


class Follower:
    """Keeps the index true to the events of one replica."""

    def __init__(self, index: KvIndex, replica: str, sources: Mapping[int, Source]) -> None:
        self._index = index
        self._replica = replica
        self._sources = sources
        self._live: set[int] = set()
        self._applied = 0
        self._warned = False
        self._malformed = 0  # messages

    async def run(self) -> None:
        """Follow until cancelled. Then the index knows nothing of the replica."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for rank, source in self._sources.items():
                    tasks.create_task(self._follow(rank, source))
        finally:
            self._index.forget(self._replica)

    async def _follow(self, rank: int, source: Source) -> None:
        with _socket(zmq.SUB, source.endpoint) as live:
            live.subscribe(b"")
            while True:
                try:
                    while not await self._caught_up(rank, source):
                        await asyncio.sleep(AGAIN_S)
                except TimeoutError:
                    self._set_live(rank, False)
                else:
                    self._set_live(rank, True)
                    await self._listen(rank, live)

    async def _listen(self, rank: int, live: zmq.asyncio.Socket) -> None:
        """Apply events until a batch is missing or no event has come for a while."""
        in_log = True  # messages that came while the log was read
        while True:
            if not await live.poll(0 if in_log else int(IDLE_S * 1000)):
                if not in_log:
                    return
                in_log = False
                continue
            number, content = await self._received(live)
            if number is None:
                continue
            last = self._index.positions.get((self._replica, rank))
            if in_log and last and number <= last.number:
                continue
            if number != (last.number + 1 if last else 0):
                return
            await self._apply(rank, number, content)

    async def _caught_up(self, rank: int, source: Source) -> bool:
        """Apply the log's batches after the last one that is known. Returns whether they were all.

        Raises TimeoutError if the log does not answer.
        """
        last = self._index.positions.get((self._replica, rank))
        with _socket(zmq.DEALER, source.replay_endpoint) as replay:
            await replay.send_multipart([b"", (last.number if last else 0).to_bytes(8, "big")])
            known = last is None
            while True:
                async with asyncio.timeout(ANSWER_S):
                    number, content = await self._received(replay)
                if number is None:
                    continue
                if not known:
                    if (number, hash(content)) != last:
                        self._index.forget_rank(self._replica, rank)
                        return False
                    known = True
                    continue
                if number == _END:
                    return True
                if last and number != last.number + 1:
                    return False  # ZeroMQ drops messages that it cannot queue
                last = await self._apply(rank, number, content)

    async def _apply(self, rank: int, number: int, content: bytes) -> Position:
        # The position comes first: it is forgotten with the replica.
        position = Position(number, hash(content))
        self._index.positions[self._replica, rank] = position
        await self._pause(1)
        try:
            events = _read_batch(content).events
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            events = []
            self._warn()
        for raw in events:
            applied = 1
            try:
                event = _read_event(raw)
                if not isinstance(event, AllBlocksCleared):
                    applied = len(event.block_hashes)
                if applied > BLOCKS:
                    self._warn()
                else:
                    self._index.apply(self._replica, rank, event)
            except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError):
                self._warn()
            await self._pause(applied)
        return position

    async def _pause(self, applied: int) -> None:
        """Let other tasks run, now and then."""
        self._applied += applied
        if self._applied >= SLICE:
            self._applied = 0
            await asyncio.sleep(0)

    async def _received(self, socket: zmq.asyncio.Socket) -> tuple[int | None, bytes]:
        """The next message, as _parts() has it. Other tasks run before: receiving one that is there
        does not let them.
        """
        await asyncio.sleep(0)
        frames = [await socket.recv()]
        while socket.getsockopt(zmq.RCVMORE):
            if len(frames) == PARTS:
                raise SourcesRefused(f"a message has more than {PARTS} parts")
            frames.append(await socket.recv())
        found = self._parts(frames)
        if found[0] is None:
            self._malformed += 1
            if self._malformed > MALFORMED:
                raise SourcesRefused(f"more than {MALFORMED} messages cannot be read")
        return found

    def _parts(self, frames: list[bytes]) -> tuple[int | None, bytes]:
        """The number and content of a message; no number if it is malformed."""
        if len(frames) >= 2 and len(frames[-2]) == 8:
            number = int.from_bytes(frames[-2], "big", signed=True)
            if number >= _END:
                return number, frames[-1]
        self._warn()
        return None, b""

    def _set_live(self, rank: int, live: bool) -> None:
        """Whether the rank is followed now; the replica is while all of its ranks are."""
        if live:
            self._live.add(rank)
        else:
            self._live.discard(rank)
        if self._live == self._sources.keys():
            if self._replica not in self._index.followed:
                engine, memory = self._index.held(self._replica)
                log.info(
                    "%s: its KV cache is known: %s",
                    self._replica,
                    described(Held(engine, memory)),
                )
            self._index.followed.add(self._replica)
        elif self._replica in self._index.followed:
            self._index.followed.discard(self._replica)
            log.warning("%s: the log of its KV events does not answer", self._replica)

    def _warn(self) -> None:
        if not self._warned:
            log.warning("%s: KV events that cannot be read are left out", self._replica)
        self._warned = True


def _socket(kind: int, url: str) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(kind)
    socket.linger = 0
    socket.ipv6 = True
    # What is lost is read from the log: better than as much memory as a follower is behind.
    socket.rcvhwm = QUEUED_LOG if kind == zmq.DEALER else QUEUED
    socket.maxmsgsize = MESSAGE
    try:
        socket.connect(url)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket
