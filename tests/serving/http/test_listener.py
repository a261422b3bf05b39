# SPDX-License-Identifier: Apache-2.0
"""Connections from `accept` on: `serve` and `route` as processes with uvloop and few descriptors,
with and without TLS, and clients that send nothing.
"""

import asyncio
import contextlib
import json
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.certificates import certify
from tests.serving.router.conftest import STREAM, FakeReplica, chunk
from tests.support.harness.process import ROOT
from tests.support.harness.wait import until, until_async

pytestmark = pytest.mark.anyio

DESCRIPTORS = 400
PROMPT = {"prompt": "one two three"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("certificate")
    certify(found)
    return found


class Door:
    """A server in a separate process, and its address."""

    def __init__(self, verb: str, folder: Path | None, log: Path, **settings: object) -> None:
        if folder:
            settings |= {"tls_cert_file": str(folder / "own.pem")}
            settings |= {"tls_key_file": str(folder / "own.key")}
        self.log = log
        command = [sys.executable, "-m", "tests.few_descriptors", verb, str(DESCRIPTORS)]
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [*command, json.dumps(settings)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        assert self.process.stdout
        with self.process.stdout as told:
            self.port = int(told.readline())
        self.url = f"http{'s' if folder else ''}://localhost:{self.port}"
        self.verify = ssl.create_default_context(cafile=folder / "ca.pem") if folder else True

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, verify=self.verify, timeout=20, trust_env=False)

    def get(self, path: str) -> int:
        """The status of an answer on a separate connection; 0 if there is no answer."""
        with self.client() as client:
            try:
                return client.get(path).status_code
            except httpx.HTTPError:
                return 0

    def post(self) -> int:
        with self.client() as client:
            return client.post("/v1/completions", json=PROMPT).status_code

    @property
    def descriptors(self) -> int:
        return len([*Path(f"/proc/{self.process.pid}/fd").iterdir()])

    def silent(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 10)


@pytest.fixture(params=["serve", "route"])
def verb(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def encrypted(request):
    return request.param


@contextlib.contextmanager
def opened(verb, folder, log, **settings) -> Iterator[Door]:
    door = Door(verb, folder, log, **settings)
    try:
        until(lambda: door.get("/ping"))
        yield door
    finally:
        door.process.kill()
        door.process.wait()


@pytest.fixture
async def door(verb, encrypted, folder, tmp_path):
    replica = FakeReplica()
    await replica.start()
    settings = {"router_replicas": replica.url} if verb == "route" else {}

    def enter():
        kept = contextlib.ExitStack()
        log = tmp_path / "log"
        door = kept.enter_context(opened(verb, folder if encrypted else None, log, **settings))
        return kept, door

    kept, door = await asyncio.to_thread(enter)
    await until_async(lambda: asyncio.to_thread(lambda: door.get("/ping") == 200))
    door.replica = replica
    yield door
    kept.close()
    await replica.stop()


async def test_connections_that_say_nothing_count_from_accept(door):
    """More connections than descriptors."""

    def attack():
        with contextlib.ExitStack() as kept:
            for _ in range(2 * DESCRIPTORS):
                kept.enter_context(door.silent())
            assert [door.get("/ping") for _ in range(5)] == [200] * 5
            assert door.post() == 200
            assert door.descriptors <= DESCRIPTORS - 32

    await asyncio.to_thread(attack)
    log = door.log.read_text()
    assert "Traceback" not in log
    assert log.count("file descriptors are scarce") <= 1
    assert await asyncio.to_thread(door.post) == 200


async def test_where_no_descriptor_is_left_ping_is_answered_and_what_runs_goes_on(door):
    """Files, not connections, use up the descriptors."""
    release = asyncio.Event()

    async def answer(replica, asked, writer):
        writer.write(STREAM + chunk(b"data: 1\n\n"))
        await release.wait()
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    door.replica.answer = answer

    def scarce():
        with door.client() as client:
            body = {"prompt": "a " * 30, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as running:
                parts = running.iter_raw()
                next(parts)
                door.process.send_signal(signal.SIGRTMIN)
                until(lambda: door.descriptors == DESCRIPTORS, 10)
                assert [door.get("/ping") for _ in range(5)] == [200] * 5
                silent = [door.silent() for _ in range(30)]
                assert [door.get("/ping") for _ in range(5)] == [200] * 5
                loop.call_soon_threadsafe(release.set)
                assert b"".join(parts).endswith((b"[DONE]\n\n", b"[DONE]\r\n\r\n"))
            for it in silent:
                it.close()
        door.process.send_signal(signal.SIGRTMAX)
        until(lambda: door.post() == 200, 10)

    loop = asyncio.get_running_loop()
    await asyncio.to_thread(scarce)
    log = door.log.read_text()
    assert log.count("file descriptors are scarce") == 1
    assert "Traceback" not in log


HELLO = bytes.fromhex("1603010200010001fc0303") + bytes(32)
HOSTILE = {
    "nothing": b"",
    "half of a hello": HELLO[:20],
    "a hello of zeros": HELLO + bytes(480),
    "a hello without end": b"\x16\x03\x01\xff\xff" + bytes(70_000),
    "alerts without end": b"\x15\x03\x03\x00\x02\x01\x00" * 10_000,
    "data before a handshake": b"\x17\x03\x03\x00\x05abcde" * 1_000,
    "SSL 2": b"\x80\x2e\x01\x00\x02" + bytes(60),
    "HTTP/1.1": b"GET /ping HTTP/1.1\r\nhost: a\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
    "PROXY": b"PROXY TCP4 1.2.3.4 1.2.3.4 1 2\r\n",
    "SMTP": b"EHLO a\r\n",
    "zeros": bytes(200_000),
    "a line without end": b"GET /" + b"a" * 200_000,
    "headers without end": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 30_000,
    "lines without end": b"\r\n" * 100_000,
    "a length without end": b"POST / HTTP/1.1\r\ncontent-length: " + b"9" * 5_000 + b"\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\naa",
    "a chunk without end": b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + b"f" * 16,
    "requests without end": b"GET /ping HTTP/1.1\r\nhost: a\r\n\r\n" * 5_000,
}
LEAVINGS = ("close", "half", "reset")


def leave(it: socket.socket, how: str) -> None:
    if how == "reset":
        it.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif how == "half":
        with contextlib.suppress(OSError):
            it.shutdown(socket.SHUT_WR)
            while it.recv(65536):
                pass


def attack(door: Door, content: bytes, how: str, *, inside: bool) -> None:
    """Send these bytes, and leave. inside: after a handshake."""
    plain = door.silent()
    plain.settimeout(7)  # longer than a handshake has
    with contextlib.suppress(OSError):
        it = plain
        if inside:
            assert isinstance(door.verify, ssl.SSLContext)
            it = door.verify.wrap_socket(plain, server_hostname="localhost")
        with it:
            it.sendall(content)
            leave(it, how)
    plain.close()


async def test_whatever_clients_send_first(door, encrypted):
    """Over TLS and without it, with every way of leaving. Some clients close before the server
    accepts them.
    """
    before = await asyncio.to_thread(lambda: door.descriptors)

    def attacked():
        with ThreadPoolExecutor(30) as pool:
            attacks = [
                pool.submit(attack, door, content, how, inside=inside)
                for inside in {False, encrypted}
                for content in HOSTILE.values()
                for how in LEAVINGS
            ]
            assert [door.get("/ping") for _ in range(10)] == [200] * 10
            for it in attacks:
                it.result()
        assert door.post() == 200
        until(lambda: door.descriptors <= before + 2, 20)

    await asyncio.to_thread(attacked)
    log = door.log.read_text()
    assert "Traceback" not in log
    assert len(log) < 20_000


async def test_a_handshake_has_five_seconds(verb, folder, tmp_path):
    """A handshake that sends a byte now and then gets no more time."""

    def slow():
        with opened(verb, folder, tmp_path / "log", router_replicas="http://127.0.0.1:1") as door:
            began = time.monotonic()
            silent, dripping = door.silent(), door.silent()
            dripping.send(b"\x16\x03\x01\x02\x00")
            for it in (silent, dripping):
                with contextlib.suppress(ConnectionError):
                    assert it.recv(1) == b""
                it.close()
            assert 4 < time.monotonic() - began < 20

    await asyncio.to_thread(slow)
