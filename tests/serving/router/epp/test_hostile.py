# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker, called over gRPC by peers that are not gateways."""

import asyncio
import contextlib
import gc
import itertools
import json
import socket
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from serving.router.epp import exchange, grpc_server
from serving.router.epp import ext_proc_pb2 as pb
from serving.router.epp.envoy_messages import FULL_DUPLEX
from serving.router.http import buffers
from tests.fuzzing import examples
from tests.serving.access.test_access import SECRET, bearer, written
from tests.serving.router.conftest import routing
from tests.support.harness import ports
from tests.support.harness.process import ROOT
from tests.support.harness.wait import until_async

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
BODY = json.dumps({"prompt": "Hi"}).encode()
ENDED = (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError)
"""The errors that gRPC raises for a call that has ended; the moment decides which."""

pytestmark = pytest.mark.anyio


def headed(*more, path="/v1/completions", end=False):
    """A request's head. more: additional headers."""
    named = [(":method", b"POST"), (":path", path.encode()), (":authority", b"a"), *more]
    lines = [pb.HeaderValue(key=name, raw_value=value) for name, value in named]
    found = pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=lines), end_of_stream=end)
    )
    found.protocol_config.request_body_mode = FULL_DUPLEX
    found.protocol_config.response_body_mode = FULL_DUPLEX
    return found


def body(content=BODY, *, end=True):
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=content, end_of_stream=end))


def answer(status=b"200", *, end=False):
    lines = [pb.HeaderValue(key=":status", raw_value=status)]
    head = pb.HttpHeaders(headers=pb.HeaderMap(headers=lines), end_of_stream=end)
    return pb.ProcessingRequest(response_headers=head)


def answered(content=b"{}", *, end=True):
    return pb.ProcessingRequest(response_body=pb.HttpBody(body=content, end_of_stream=end))


TRAILERS = pb.ProcessingRequest(request_trailers=pb.HttpTrailers())
ANSWER_TRAILERS = pb.ProcessingRequest(response_trailers=pb.HttpTrailers())


class Peer:
    """A peer that reaches the picker's port."""

    def __init__(self, it, port):
        self.it = it
        self.port = port
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options)

    def open(self):
        return self.channel.stream_stream(
            PROCESS,
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )()

    async def say(self, *messages):
        """Send the messages. Returns the responses, and the stream's status."""
        call, found = self.open(), []
        with contextlib.suppress(*ENDED):
            for message in messages:
                await call.write(message)
            await call.done_writing()
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for response in call:
                found.append(response)
        return found, await call.code()

    async def picks(self):
        """Whether an ordinary request gets through."""
        found, code = await self.say(headed(), body(), answer(), answered())
        return code is grpc.StatusCode.OK and found[0].HasField("request_headers")

    async def at_rest(self):
        """Wait until no peer occupies any buffer or slot."""
        picker = self.it.router._picker
        held = picker._picking.buffers
        limiter = self.it.router.routing.limiter
        await until_async(
            lambda: not (held.heads or held.bodies or len(picker._streams) or +limiter._at_once),
            10,
        )
        loads = [(it.in_flight, it.queued, it.context) for it in self.it.router.pool.replicas]
        assert loads == [(0, 0, 0)] * len(loads)


@contextlib.asynccontextmanager
async def picking(**more):
    port = ports.free()
    async with routing(1, epp=True, epp_port=port, **more) as it:
        peer = Peer(it, port)
        yield peer
        await peer.channel.close()


MESSAGES = st.sampled_from(
    [
        headed(),
        headed(end=True),
        headed(("x-long", b"x" * 70_000)),
        headed(path="/nothing"),
        headed(path="/ping", end=True),
        body(),
        body(b"{", end=False),
        body(b"", end=False),
        TRAILERS,
        answer(),
        answer(b"500"),
        answer(b"many"),
        answer(end=True),
        answered(),
        answered(b"{", end=False),
        ANSWER_TRAILERS,
        pb.ProcessingRequest(),
    ]
)


async def test_messages_in_any_order_leave_nothing_held(tmp_path):
    keys = written(tmp_path / "keys.json", {"team-a": {"concurrent_requests": 3}})
    async with picking(api_keys_file=keys, router_secret=SECRET) as peer:
        loop = asyncio.get_running_loop()
        ((name, value),) = bearer("team-a").items()
        known = pb.HeaderValue(key=name.lower(), raw_value=value.encode())

        async def tried(messages, leaves):
            for message in messages:
                if message.HasField("request_headers"):
                    message.request_headers.headers.headers.append(known)
            if leaves:
                call = peer.open()
                with contextlib.suppress(*ENDED):
                    for message in messages:
                        await call.write(message)
                call.cancel()
            else:
                await peer.say(*messages)
            await peer.at_rest()

        @examples(400)
        @given(st.lists(MESSAGES, max_size=7), st.booleans())
        def check(messages, leaves):
            copies = [pb.ProcessingRequest.FromString(it.SerializeToString()) for it in messages]
            asyncio.run_coroutine_threadsafe(tried(copies, leaves), loop).result(30)

        await asyncio.to_thread(check)


@pytest.mark.parametrize(
    ("messages", "status", "code"),
    [
        ([headed(), headed()], 0, "INVALID_ARGUMENT"),
        ([headed(end=True), headed()], 0, "INVALID_ARGUMENT"),
        ([headed(), body(), body()], 0, "INVALID_ARGUMENT"),
        ([headed(), body(), TRAILERS], 0, "INVALID_ARGUMENT"),
        ([headed(), TRAILERS, TRAILERS], 0, "INVALID_ARGUMENT"),
        ([headed(), body(), answer(), answer()], 0, "INVALID_ARGUMENT"),
        ([headed(), body(), answer(b"many")], 0, "INVALID_ARGUMENT"),
        ([headed(), body(), answer(b"")], 0, "INVALID_ARGUMENT"),
        ([headed(), body(), answer(end=True), answered()], 0, "INVALID_ARGUMENT"),
        ([headed(("\u20ac", b""))], 0, "INVALID_ARGUMENT"),
        ([headed(("x-long", b"x" * 70_000))], 431, "OK"),
        ([headed(*[("a", b"")] * 1_001)], 431, "OK"),
        ([headed(path="/" + "x" * 70_000)], 431, "OK"),
        ([headed(("content-length", b"9" * 12))], 413, "OK"),
        ([headed(("content-length", b"9" * 5_000))], 0, "OK"),
        ([headed(("connection", b"x-amzn-sagemaker-session-id"))], 400, "OK"),
        ([headed(("origin", b"https://elsewhere.example")), body()], 403, "OK"),
        ([headed(path=""), body()], 404, "OK"),
        ([headed(path="http://169.254.169.254/"), body()], 404, "OK"),
        ([pb.ProcessingRequest()], 0, "OK"),
        ([body(), body()], 0, "OK"),
    ],
)
async def test_what_no_gateway_sends(messages, status, code, caplog):
    async with picking() as peer:
        found, ended = await peer.say(*messages)
        assert ended.name == code
        given = [it.immediate_response.status.code for it in found]
        assert [it for it in given if it] == ([status] if status else [])
        await peer.at_rest()
        assert await peer.picks()
        await peer.at_rest()
    assert "Traceback" not in caplog.text
    assert "failed" not in caplog.text


async def test_one_stream_of_many_heads_takes_nothing_from_others():
    """Neither from the picker's peers nor from the proxy's clients."""
    async with picking() as peer:
        for _ in range(3):
            await peer.say(*[headed(("x-some", b"x" * 60_000))] * 100)
        assert (await peer.it.post({"prompt": "Hi"})).status_code == 200
        await peer.at_rest()


async def test_heads_without_bodies_keep_nobody_out(monkeypatch):
    monkeypatch.setattr(buffers, "MAX_HEADS", 1_000_000)
    async with picking() as peer:
        calls = [peer.open() for _ in range(60)]
        for call in calls:
            with contextlib.suppress(*ENDED):
                await call.write(headed(("x-some", b"x" * 60_000)))
        held = peer.it.router._picker._picking.buffers
        await until_async(lambda: held.heads < 1_300_000, 10)
        assert await peer.picks()
        assert (await peer.it.post({"prompt": "Hi"})).status_code == 200
        assert sum(call.done() for call in calls) > 30
        for call in calls:
            call.cancel()
        await peer.at_rest()


@pytest.mark.parametrize("whole", [False, True])
async def test_streams_that_say_nothing_keep_nobody_out(monkeypatch, whole):
    """They are silent before their request, or after it."""
    monkeypatch.setattr(grpc_server, "STREAMS", 20)
    async with picking() as peer:
        calls = []
        for _ in range(50):
            calls.append(call := peer.open())
            await call.write(headed(end=True) if whole else pb.ProcessingRequest())
            if whole:
                await call.read()
        await until_async(lambda: sum(call.done() for call in calls) >= 30, 10)
        assert await peer.picks()
        assert len(peer.it.router._picker._streams) <= 20
        for call in calls:
            call.cancel()
        await peer.at_rest()


async def test_watchers_keep_nobody_out(monkeypatch):
    """Streams of health and reflection that never end."""
    monkeypatch.setattr(grpc_server, "WATCHES", 8)
    async with picking() as peer:
        health = health_pb2_grpc.HealthStub(peer.channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest(service="")) for _ in range(30)]
        reflection = reflection_pb2_grpc.ServerReflectionStub(peer.channel)
        asked = [reflection.ServerReflectionInfo() for _ in range(30)]
        for call in asked:
            with contextlib.suppress(*ENDED):
                await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        both = [*watches, *asked]
        for call in both:  # the end comes after the messages that were sent before
            with contextlib.suppress(*ENDED):
                await asyncio.wait_for(call.read(), 10)
        await until_async(lambda: sum(call.done() for call in both) >= 52, 10)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
        assert await peer.picks()
        last = health.Watch(health_pb2.HealthCheckRequest())
        assert (await last.read()).status == 1
        for call in (*both, last):
            call.cancel()


async def test_a_write_that_was_given_up_may_fail():
    """A task whose error nobody sees would be a traceback in the log."""
    reached = asyncio.Event()

    class Ended:
        async def write(self, _message):
            await reached.wait()
            raise OSError("the stream has ended")

    errors = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    writes = grpc_server._Writes(Ended())
    writing = asyncio.create_task(writes.write(b""))
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait([writing])
    reached.set()
    await writes.over()
    del writes, writing
    gc.collect()
    assert not errors


async def test_a_request_has_to_come_in_time(monkeypatch):
    monkeypatch.setattr(exchange, "HEAD_S", 0.2)
    monkeypatch.setattr(exchange, "BEHIND_S", 0.3)
    async with picking() as peer:
        silent, slow, dripping = (peer.open() for _ in range(3))
        await silent.write(pb.ProcessingRequest())
        for call in (slow, dripping):
            await call.write(headed())
        with contextlib.suppress(*ENDED):
            while not dripping.done():
                await dripping.write(body(b"a", end=False))
                await asyncio.sleep(0.05)
        assert (await silent.code()).name == "INVALID_ARGUMENT"
        for call in (slow, dripping):
            found = [it async for it in call]
            assert [it.immediate_response.status.code for it in found] == [408]
        await peer.at_rest()


async def test_a_connection_that_says_nothing_is_closed(monkeypatch):
    options = [it for it in grpc_server.OPTIONS if "handshake" not in it[0]]
    monkeypatch.setattr(
        grpc_server, "OPTIONS", [*options, ("grpc.server_handshake_timeout_ms", 300)]
    )
    async with picking() as peer:

        def silent():
            with socket.create_connection(("127.0.0.1", peer.port), 20) as it:
                while it.recv(100):
                    pass

        await asyncio.to_thread(silent)
        assert await peer.picks()


async def test_a_message_has_a_limit():
    async with picking() as peer:
        _, code = await peer.say(headed(), body(b"x" * 5_000_000))
        assert code.name == "RESOURCE_EXHAUSTED"
        await peer.at_rest()


IN_USE = """
import asyncio, ctypes, gc, sys
from tests.serving.router.epp.test_hostile import picking

class Info(ctypes.Structure):
    _fields_ = [(f"field{n}", ctypes.c_size_t) for n in range(10)]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Info

async def main():
    async with picking() as peer:
        print(peer.port, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            gc.collect()
            print(mallinfo2().field7, flush=True)

asyncio.run(main())
"""
"""Prints the picker's port, and for each line the bytes that its process has allocated in C."""
RESETS = 500


@pytest.mark.parametrize("said", [(), (headed(), body())], ids=["silent", "asks"])
async def test_a_stream_that_is_reset_leaves_nothing_allocated(said):
    """gRPC itself would leave 80 bytes for each operation that was cancelled or has failed."""
    command = (sys.executable, "-c", IN_USE)
    pipe = asyncio.subprocess.PIPE
    picker = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe)
    told, asking = picker.stdout, picker.stdin
    assert told
    assert asking
    try:
        peer = Peer(None, int(await told.readline()))

        async def in_use():
            asking.write(b"\n")
            return int(await told.readline())

        async def reset(count):
            for _ in range(count // 100):
                calls = [peer.open() for _ in range(100)]
                for call in calls:
                    for message in said:
                        await call.write(message)
                    if said:
                        await call.read()
                    else:
                        await call.wait_for_connection()
                for call in calls:
                    call.cancel()
                await asyncio.gather(*(it.code() for it in calls))

        levels = []
        for _ in range(5):
            await reset(RESETS)
            await asyncio.sleep(1)  # the streams end
            levels.append(await in_use())
        # A table that grows to its size adds its bytes once, a leak adds them each time.
        assert min(after - before for before, after in itertools.pairwise(levels)) < 40 * RESETS
    finally:
        picker.kill()
        await picker.wait()
        await peer.channel.close()
