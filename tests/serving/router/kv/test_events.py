# SPDX-License-Identifier: Apache-2.0
"""Followers of a publisher that speaks as vLLM's does, over a network that may lose messages."""

import asyncio
import logging
import time
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio

from serving.router.kv import events
from serving.router.kv.events import Follower, Source, SourcesRefused, sources
from serving.router.policy.kv_index import BlockRemoved, BlockStored, KvIndex, chain, seed
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """A PUB socket of (topic, number, batch), and a ROUTER that replays the log from a number."""

    def __init__(self, url="tcp://127.0.0.1:*", log_url="tcp://127.0.0.1:*", kept=10_000):
        context = zmq.asyncio.Context.instance()
        self.pub, self.router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.pub.linger = self.router.linger = 0
        self.pub.bind(url)
        self.router.bind(log_url)
        urls = (it.getsockopt_string(zmq.LAST_ENDPOINT) for it in (self.pub, self.router))
        self.source = Source(*urls)
        self.kept = kept
        self.batches: list[bytes] = []
        self.asked: list[int] = []
        self.task = asyncio.create_task(self.answer())

    async def publish(self, *events, send=True):
        batch = [time.time(), list(events), 0]
        await self.publish_bytes(msgspec.msgpack.encode(batch), send)

    async def publish_bytes(self, content, send=True):
        number = len(self.batches).to_bytes(8, "big")
        self.batches.append(content)
        if send:
            await self.pub.send_multipart([b"", number, content])

    async def answer(self):
        while True:
            client, empty, first = await self.router.recv_multipart()
            start = int.from_bytes(first, "big")
            self.asked.append(start)
            for number, content in list(enumerate(self.batches))[-self.kept :]:
                if number >= start:
                    message = [client, empty, b"", number.to_bytes(8, "big"), content]
                    await self.router.send_multipart(message)
            await self.router.send_multipart([client, empty, b"", END, b""])

    async def close(self):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.pub.close()
        self.router.close()


@asynccontextmanager
async def publishing(**more):
    it = Publisher(**more)
    try:
        yield it
    finally:
        await it.close()


@asynccontextmanager
async def following(*published):
    index = KvIndex()
    follower = Follower(index, "a", {n: it.source for n, it in enumerate(published)})
    task = asyncio.create_task(follower.run())
    try:
        yield index
    finally:
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not index.follows("a")
        assert not index.positions


def block(n):
    """The n-th block of a prompt; its engine hash is n."""
    return BlockStored([n], n - 1 if n else None, [n], 1)


def held(index, count=100):
    return index.in_engine("a", {1: chain(range(count), 1, seed())}, 0.0)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(events, "IDLE_S", 0.2)
    monkeypatch.setattr(events, "ANSWER_S", 0.5)


async def test_a_follower_reads_the_log_and_then_new_batches():
    async with publishing() as it:
        await it.publish(block(0), block(1))
        async with following(it) as index:
            await until_async(lambda: index.follows("a"))
            assert held(index) == 2
            await it.publish(block(2))
            await until_async(lambda: held(index) == 3)
            await it.publish(BlockRemoved([2]))
            await until_async(lambda: held(index) == 2)
        assert held(index) == 0


async def test_an_empty_log():
    async with publishing() as it, following(it) as index:
        await until_async(lambda: index.follows("a"))
        await it.publish(block(0))
        await until_async(lambda: held(index) == 1)


@pytest.mark.parametrize("idle", [0.2, 10])
async def test_a_gap_is_filled_from_the_log(monkeypatch, idle):
    async with publishing() as it, following(it) as index:
        await it.publish(block(0))
        await until_async(lambda: held(index) == 1)
        await asyncio.sleep(0.3)
        monkeypatch.setattr(events, "IDLE_S", idle)
        await it.publish(block(1), send=False)
        await it.publish(block(2), send=idle == 10)
        await until_async(lambda: held(index) == 3)
        assert it.asked[-1] == 0  # from the last batch that is known


async def test_batches_that_come_twice_late_or_in_another_order_change_nothing():
    async with publishing() as it, following(it) as index:

        async def send(number):
            await it.pub.send_multipart([b"", number.to_bytes(8, "big"), it.batches[number]])

        for event in (block(0), block(1), block(2), BlockRemoved([2])):
            await it.publish(event)
        await until_async(lambda: held(index) == 2)
        await send(2)  # from before the removal
        await it.publish(BlockRemoved([99]))
        await until_async(lambda: index.positions["a", 0].number == 4)
        assert held(index) == 2
        await it.publish(block(2), send=False)
        await it.publish(block(3), send=False)
        await send(6)
        await send(5)
        await until_async(lambda: held(index) == 4)
        await until_async(lambda: index.follows("a"))


async def test_after_a_cut_log_the_rank_is_learned_anew():
    async with publishing() as it, following(it) as index:
        await it.publish(block(0), block(1))
        await until_async(lambda: held(index) == 2)
        it.kept = 2
        await it.publish(BlockRemoved([1]), send=False)
        await it.publish(block(0), send=False)
        await it.publish(block(1))
        await until_async(lambda: index.positions.get(("a", 0), (0,))[0] == 3)
        assert held(index) == 2
        await it.publish(BlockRemoved([1]))
        await until_async(lambda: held(index) == 1)


async def test_what_has_no_beginning_in_the_log_is_not_counted():
    async with publishing(kept=1) as it:
        await it.publish(block(0))
        await it.publish(block(1))
        async with following(it) as index:
            await until_async(lambda: index.follows("a"))
            assert held(index) == 0
            assert index.positions["a", 0].number == 1


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("silent", [True, False])
async def test_a_publisher_that_starts_anew_is_learned_anew(before, silent):
    """before: batches that the new publisher sends before anyone listens. silent: it sends no more
    afterwards.
    """
    async with publishing() as it, following(it) as index:
        await it.publish(block(0))
        await it.publish(block(1))
        await until_async(lambda: held(index) == 2)
        await it.close()
        await asyncio.sleep(0.1)
        async with publishing(url=it.source.endpoint, log_url=it.source.replay_endpoint) as new:
            for n in range(before):
                await new.publish(block(n), send=False)
            if not silent:
                await asyncio.sleep(0.3)
                await new.publish(block(before))
            await until_async(lambda: held(index) == before + (not silent))
            await until_async(lambda: index.follows("a"))


async def test_the_log_says_when_a_cache_is_known(caplog):
    caplog.set_level(logging.INFO)
    async with publishing() as it:
        await it.publish(block(0), block(1))
        chunk = BlockStored([1], None, [*range(256)], 256, "CPU")
        await it.publish(chunk)
        async with following(it) as index:
            await until_async(lambda: index.follows("a"))
            assert index.held("a") == (2, 256)
    assert caplog.messages == ["a: its KV cache is known: engine 2 memory 256"]


async def test_without_an_answer_it_is_not_followed(caplog):
    async with publishing() as it, following(it) as index:
        await it.publish(block(0))
        await until_async(lambda: index.follows("a"))
        it.task.cancel()
        await until_async(lambda: not index.follows("a"))
        it.task = asyncio.create_task(it.answer())
        await until_async(lambda: index.follows("a"))
        assert held(index) == 1
    assert [it.message for it in caplog.records] == ["a: the log of its KV events does not answer"]


async def test_all_ranks_or_none():
    async with publishing() as one, publishing() as two:
        two.task.cancel()
        await one.publish(block(0))
        await two.publish(block(0), block(1))
        async with following(one, two) as index:
            await until_async(lambda: held(index) == 1)
            assert not index.follows("a")
            two.task = asyncio.create_task(two.answer())
            await until_async(lambda: index.follows("a"))
            assert held(index) == 2


async def test_a_forgotten_replica_is_learned_anew():
    async with publishing() as it, following(it) as index:
        await it.publish(block(0))
        await until_async(lambda: held(index) == 1)
        index.forget("a")
        assert held(index) == 0
        await until_async(lambda: held(index) == 1)
        await until_async(lambda: index.follows("a"))


MALFORMED = [
    b"",
    b"\xc1",
    msgspec.msgpack.encode({"a": 1}),
    msgspec.msgpack.encode([1.0, 5]),
    msgspec.msgpack.encode([1.0, [5, {}, {"type": "Other"}, {"type": "BlockStored"}]]),
    msgspec.msgpack.encode([1.0, [BlockStored([9], None, [2**40], 1)]]),
]


async def test_what_is_malformed_is_left_out_and_told_once(caplog):
    async with publishing() as it, following(it) as index:
        await it.publish(block(0))
        await until_async(lambda: held(index) == 1)
        for content in MALFORMED:
            await it.publish_bytes(content)
        batch = msgspec.msgpack.encode([1.0, [{"type": "Other"}, block(1)], 0])
        await it.publish_bytes(batch)
        for frames in ([b""], [b"", b"x", b""], [b"", b"x" * 9, b""]):
            await it.pub.send_multipart(frames)
        await until_async(lambda: held(index) == 2)
        await it.publish(block(2))
        await until_async(lambda: held(index) == 3)
    assert [it.message for it in caplog.records] == [
        "a: KV events that cannot be read are left out"
    ]


async def test_others_run_while_a_long_log_is_applied():
    async with publishing() as it:
        for _ in range(50):
            await it.publish(*(block(n) for n in range(100)))
        async with following(it) as index:
            turns = 0
            while not index.follows("a"):
                turns += 1
                await asyncio.sleep(0)
            assert turns > 5000 // events.SLICE
            assert held(index) == 100


def test_sources():
    answer = msgspec.json.encode(
        {
            n: {
                "enable_kv_cache_events": True,
                "endpoint": f"tcp://*:{5557 + n}",
                "replay_endpoint": f"tcp://*:{5559 + n}",
            }
            for n in range(2)
        }
    )
    assert sources(answer, "[::1]") == {
        0: Source("tcp://[::1]:5557", "tcp://[::1]:5559"),
        1: Source("tcp://[::1]:5558", "tcp://[::1]:5560"),
    }
    for nothing in (
        b"[" * 100_000,
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"0": {"endpoint": "tcp://*:1"}}',
    ):
        assert sources(nothing, "a") == {}


@pytest.mark.parametrize(
    "place",
    [
        *("tcp://10.0.0.1:5557", "tcp://a.evil.example:5557", "tcp://*:0", "tcp://*:x", "tcp://*:"),
        *("ipc:///tmp/a", "inproc://a", "udp://*:5557", "tcp://*;10.0.0.1:5557", "tcp://*:123456"),
        *("tcp://eth0;*:5557", "*:5557", "", "tcp://*:5557:5558", "tcp://b*:5557"),
    ],
)
def test_events_come_from_the_replicas_own_host(place):
    for pair in ((place, "tcp://*:1"), ("tcp://*:1", place)):
        answer = dict(zip(("endpoint", "replay_endpoint"), pair, strict=True))
        with pytest.raises(SourcesRefused):
            sources(msgspec.json.encode({0: answer}), "a")


def test_no_more_ranks_than_there_can_be():
    place = {"endpoint": "tcp://*:1", "replay_endpoint": "tcp://*:2"}
    assert len(sources(msgspec.json.encode(dict.fromkeys(range(64), place)), "a")) == 64
    with pytest.raises(SourcesRefused, match="3000 ranks"):
        sources(msgspec.json.encode(dict.fromkeys(range(3000), place)), "a")


def hostile_batch(*events):
    return msgspec.msgpack.encode([1.0, list(events), 0])


NUMBER = (0).to_bytes(8, "big")
HOSTILE = {
    "a short number": [b"", b"1234", b"x"],
    "no parts": [b""],
    "many parts": [b""] * 500,
    "many parts and a number": [b""] * 100 + [NUMBER, b"x"],
    "a part of 3 MiB": [b"", NUMBER, bytes(3 << 20)],
    "no batch": [b"", NUMBER, b"\xc1" * 1000],
    "a million events": [b"", NUMBER, b"\x93\x00\xdd\x00\x0f\x42\x40" + b"\x01" * 10**6 + b"\x00"],
    "deep": [b"", NUMBER, b"\x93\x00" + b"\x91" * 10**6],
    "a deep event": [b"", NUMBER, b"\x93\x00\x91" + b"\x91" * 10**6],
    "many blocks": [
        *(b"", NUMBER),
        hostile_batch(BlockStored([*range(10**5)], None, [1] * 10**5, 1)),
    ],
    "long hashes": [b"", NUMBER, hostile_batch(BlockStored([b"a" * 10**6], None, [1], 1))],
    "a long name": [
        *(b"", NUMBER),
        hostile_batch(BlockStored([1], None, [1], 1, None, "a" * 10**6)),
    ],
    "blocks of nothing": [b"", NUMBER, hostile_batch(BlockStored([1] * 1000, None, [], 0))],
    "the least number": [b"", (-(2**63)).to_bytes(8, "big", signed=True), b"x"],
    "the past": [b"", (-5).to_bytes(8, "big", signed=True), b"x"],
}


@pytest.mark.parametrize("frames", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("place", ["log", "events"])
async def test_a_flood_of_hostile_messages_leaves_the_loop_to_others(frames, place):
    """None of the messages reaches the index."""
    context = zmq.asyncio.Context.instance()
    pub, log = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    pub.linger = log.linger = 0
    sent = 0

    async def floods():
        nonlocal sent
        while True:
            client, empty, _ = await log.recv_multipart()
            if place == "events":
                await log.send_multipart([client, empty, b"", END, b""])
            for n in range(200):
                message = [client, *frames] if place == "log" else frames
                sent += 1
                await (log if place == "log" else pub).send_multipart(message)
                if n % 20 == 0:
                    await asyncio.sleep(0.001)

    with pub, log:
        pub.bind("tcp://127.0.0.1:*")
        log.bind("tcp://127.0.0.1:*")
        urls = (it.getsockopt_string(zmq.LAST_ENDPOINT) for it in (pub, log))
        index = KvIndex()
        hostile = asyncio.create_task(floods())
        follower = asyncio.create_task(Follower(index, "a", {0: Source(*urls)}).run())
        longest, began = 0.0, time.monotonic()
        while time.monotonic() - began < 1:
            before = time.monotonic()
            await asyncio.sleep(0.001)
            longest = max(longest, time.monotonic() - before)
        for task in (hostile, follower):
            task.cancel()
        _, ended = await asyncio.gather(hostile, follower, return_exceptions=True)
    assert sent
    assert longest < 5  # without pauses, no other task would run
    if isinstance(ended, ExceptionGroup):
        assert ended.split(SourcesRefused)[1] is None
    else:
        assert isinstance(ended, asyncio.CancelledError)
    assert sum(index.held("a")) == 0
    assert not index._inner
