# SPDX-License-Identifier: Apache-2.0
"""TLS of the server and the router, with real certificates that are replaced under load."""

import asyncio
import contextlib
import logging
import shutil
import socket
import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import psutil
import pytest

from lmi_config.options.declared import Settings
from lmi_config.options.settings import SettingsError
from serving import follow
from serving.http import listener
from serving.http import tls as tls_module
from serving.http.listener import Listener
from serving.http.sockets import Connections
from serving.http.tls import Authorities, ServerTls
from serving.router import router as router_module
from serving.server import server as server_module
from tests.certificates import certify
from tests.serving.conftest import running
from tests.serving.router.conftest import routing
from tests.support.harness import ports
from tests.support.harness.process import ROUTE, Program
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two folders with a certificate each, both signed by the first folder's authority."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    certify(one)
    shutil.copytree(one, two, dirs_exist_ok=True)
    for command in (
        "req -newkey rsa:2048 -nodes -keyout own.key -out own.csr -subj /CN=second",
        "x509 -req -in own.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names "
        "-out own.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=two, check=True, capture_output=True)
    return one, two


@pytest.fixture
def files(folders, tmp_path, monkeypatch):
    """Copies of the first certificate's files, which the test can replace, as options."""
    monkeypatch.setattr(follow, "LOOK_S", 0.01)
    for name in ("own.pem", "own.key", "ca.pem"):
        shutil.copy(folders[0] / name, tmp_path)
    return {
        "tls_cert_file": str(tmp_path / "own.pem"),
        "tls_key_file": str(tmp_path / "own.key"),
    }


def client(it, ca, **more):
    url = it.url.replace("http://127.0.0.1", "https://localhost")
    context = ssl.create_default_context(cafile=ca)
    if "certificate" in more:
        context.load_cert_chain(*more["certificate"])
    return httpx.AsyncClient(base_url=url, verify=context, timeout=20)


def shown(port):
    """The subject of the certificate that a new connection gets, by openssl."""
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-servername", "localhost"]
    found = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return "second" if "CN=second" in found.stdout.replace(" ", "") else "first"


async def swapped_under_load(ask, port, folders, tmp_path):
    """Replace the certificate while requests are in flight. Returns their statuses."""
    statuses, stop = [], asyncio.Event()

    async def asking():
        while not stop.is_set():
            statuses.append((await ask()).status_code)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(asking())
        assert await asyncio.to_thread(shown, port) == "first"
        for name in ("own.key", "own.pem"):
            shutil.copy(folders[1] / name, tmp_path)
        while await asyncio.to_thread(shown, port) != "second":
            pass
        count = len(statuses)
        await until_async(lambda: len(statuses) > count + 20)
        stop.set()
    return statuses


@pytest.mark.parametrize("fresh", [False, True])
async def test_a_servers_certificate_is_swapped_and_no_request_lost(
    files, folders, tmp_path, fresh, monkeypatch
):
    ca = str(tmp_path / "ca.pem")
    async with running(wait=False, **files) as it, client(it, ca) as kept:

        async def ask():
            async with client(it, ca) if fresh else kept_open() as asking:
                return await asking.post("/invocations", json={"inputs": "a"})

        class kept_open:  # noqa: N801
            async def __aenter__(self):
                return kept

            async def __aexit__(self, *_):
                pass

        while (await kept.get("/ping")).status_code != 200:
            await asyncio.sleep(0.01)
        port = httpx.URL(it.url).port
        statuses = await swapped_under_load(ask, port, folders, tmp_path)
        assert {*statuses} == {200}
        with pytest.raises(httpx.HTTPError):
            await it.client.get("/ping")


async def test_the_router_speaks_tls_both_ways(files, folders, tmp_path):
    """It trusts the server's authority, and encrypts connections to clients."""
    ca = str(tmp_path / "ca.pem")
    async with running(wait=False, **files) as server:
        replica = server.url.replace("http://127.0.0.1", "https://localhost")
        options: dict[str, Any] = {"router_replicas": replica, "router_ca_file": ca}
        async with routing(0, wait=False, **{**options, **files}) as it:
            await until_async(lambda: it.router.pool.ready)
            async with client(it, ca) as asking:

                async def ask():
                    return await asking.post("/v1/completions", json={"prompt": "a b"})

                statuses = await swapped_under_load(ask, it.port, folders, tmp_path)
                assert {*statuses} == {200}
                body = {"prompt": "one two", "stream": True}
                async with asking.stream("POST", "/v1/completions", json=body) as answer:
                    text = "".join([part async for part in answer.aiter_text()])
                assert text.endswith("data: [DONE]\n\n")


async def test_a_replica_of_an_unknown_authority_is_not_asked(files):
    async with running(wait=False, **files) as server:
        replica = server.url.replace("http://127.0.0.1", "https://localhost")
        async with routing(0, wait=False, router_replicas=replica) as it:
            await until_async(lambda: [one.state for one in it.router.pool.replicas] == ["down"])
            (one,) = it.router.pool.replicas
            assert "certificate" in one.detail.lower()


async def test_clients_need_a_certificate_where_the_operator_says_so(files, folders, tmp_path):
    ca = str(tmp_path / "ca.pem")
    async with running(wait=False, **files, tls_client_ca_file=ca) as it:
        async with client(it, ca) as asking:
            with pytest.raises(httpx.HTTPError):
                await asking.get("/ping")
        pair = (folders[1] / "own.pem", folders[1] / "own.key")
        async with client(it, ca, certificate=pair) as asking:
            assert (await asking.get("/ping")).status_code in (200, 503)


@pytest.mark.parametrize("verb", ["serve", "route"])
async def test_connections_count_before_they_shake_hands(files, tmp_path, monkeypatch, verb):
    monkeypatch.setattr(server_module, "most_connections", lambda queue: 20)
    monkeypatch.setattr(router_module, "most_routed", lambda: 20)
    async with either(verb, **files) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
        async with asyncio.timeout(4):  # less than a handshake has
            for reader, _ in silent[:30]:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
        async with httpx.AsyncClient(verify=context, timeout=20) as asking:
            found = await asking.get(f"https://localhost:{port}/ping")
            assert found.status_code in (200, 503)
        for _, writer in silent:
            writer.close()


# an authority that is taken out


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    """A folder with two authorities, and a client of each."""
    folder = tmp_path_factory.mktemp("clients")
    for n in (1, 2):
        for command in (
            f"req -x509 -newkey rsa:2048 -nodes -keyout ca{n}.key -out ca{n}.pem -days 2 "
            f"-subj /CN=clients{n}",
            f"req -newkey rsa:2048 -nodes -keyout c{n}.key -out c{n}.csr -subj /CN=client{n}",
            f"x509 -req -in c{n}.csr -CA ca{n}.pem -CAkey ca{n}.key -CAcreateserial -days 2 "
            f"-out c{n}.pem",
        ):
            subprocess.run(["openssl", *command.split()], cwd=folder, check=True, stderr=-3)
    return folder


class TlsClient:
    """A client that keeps its context, so that it can resume a session."""

    def __init__(self, port, ca, clients, n, version):
        self.port = port
        self.context = ssl.create_default_context(cafile=ca)
        self.context.minimum_version = self.context.maximum_version = version
        self.context.load_cert_chain(clients / f"c{n}.pem", clients / f"c{n}.key")
        self.session = None

    def connected(self):
        plain = socket.create_connection(("127.0.0.1", self.port), 20)
        try:
            return self.context.wrap_socket(
                plain, server_hostname="localhost", session=self.session
            )
        except OSError:
            plain.close()
            raise

    def ask(self, *, resumed=False):
        """The status of its answer; 0 if it gets none."""
        if not resumed:
            self.session = None
        try:
            with self.connected() as it:
                it.sendall(b"GET /ping HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                said = b""
                while part := it.recv(65536):
                    said += part
                self.reused, self.session = it.session_reused, it.session
        except OSError:
            return 0
        return int(said.split()[1]) if said else 0


@contextlib.asynccontextmanager
async def either(verb, **options):
    """The port of `serve` or `route`."""
    if verb == "serve":
        async with running(wait=False, **options) as it:
            yield httpx.URL(it.url).port
    else:
        options["router_replicas"] = "http://127.0.0.1:1"
        async with routing(0, wait=False, **options) as routed:
            yield routed.port


def put(path, content, *, renamed):
    if not renamed:
        path.write_bytes(content)
        return
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.rename(path)


@pytest.mark.parametrize("verb", ["serve", "route"])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("bundled", [False, True])
async def test_an_authority_that_is_taken_out_lets_nobody_in(
    files, tmp_path, clients, caplog, verb, version, bundled
):
    """Neither by a handshake nor by an earlier session. bundled: the file had both authorities
    before.
    """
    caplog.set_level(logging.INFO)
    ca = [(clients / f"ca{n}.pem").read_bytes() for n in (1, 2)]
    followed = tmp_path / "clients.pem"
    followed.write_bytes(ca[0] + ca[1] if bundled else ca[0])
    async with either(verb, tls_client_ca_file=str(followed), **files) as port:
        one, two = (TlsClient(port, str(tmp_path / "ca.pem"), clients, n, version) for n in (1, 2))

        async def ask(who, **more):
            return await asyncio.to_thread(lambda: who.ask(**more))

        assert await ask(one)
        assert bool(await ask(two)) is bundled
        assert await ask(one, resumed=True)
        assert one.reused
        kept = one.session
        put(followed, ca[1], renamed=bundled)
        with contextlib.suppress(TimeoutError):  # it is asserted below
            await until_async(lambda: "were reloaded" in caplog.text, 10)
        for _ in range(3):
            one.session = kept
            assert await ask(one, resumed=True) == 0
            assert await ask(one) == 0
        assert await ask(two)


@pytest.mark.parametrize("verb", ["serve", "route"])
async def test_connections_that_a_lost_authority_let_in_end(
    files, tmp_path, clients, monkeypatch, verb
):
    """An idle connection ends at once, and one with an unfinished request ends soon after. Another
    client's connection stays.
    """
    monkeypatch.setattr(listener, "RETIRED_S", 1.0)
    ca = [(clients / f"ca{n}.pem").read_bytes() for n in (1, 2)]
    followed = tmp_path / "clients.pem"
    followed.write_bytes(ca[0] + ca[1])
    async with either(verb, tls_client_ca_file=str(followed), **files) as port:
        version = ssl.TLSVersion.TLSv1_3

        def opened(n, said):
            client = TlsClient(port, str(tmp_path / "ca.pem"), clients, n, version)
            found = client.connected()
            found.sendall(said)
            return found

        ping = b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n"
        unfinished = b"POST /invocations HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"

        def answered(it):
            it.settimeout(20)
            return it.recv(65536).startswith(b"HTTP/1.1 ")

        def rest(it):
            while it.recv(65536):
                pass

        idle, other = [await asyncio.to_thread(opened, n, ping) for n in (1, 2)]
        slow = await asyncio.to_thread(opened, 1, unfinished)
        for it in (idle, other):
            assert await asyncio.to_thread(answered, it)
        put(followed, ca[1], renamed=True)
        for it in (idle, slow):
            with contextlib.suppress(ConnectionError):
                await asyncio.to_thread(rest, it)
        other.sendall(ping)
        assert await asyncio.to_thread(answered, other)
        for it in (idle, slow, other):
            it.close()


def test_what_an_authority_has_signed(clients, tmp_path):
    """Intermediate authorities count if their root authority is also in the file."""
    for command in (
        "req -newkey rsa:2048 -nodes -keyout mid.key -out mid.csr -subj /CN=middle",
        f"x509 -req -in mid.csr -CA {clients}/ca1.pem -CAkey {clients}/ca1.key -CAcreateserial "
        "-days 2 -out mid.pem",
        f"x509 -req -in {clients}/c2.csr -CA mid.pem -CAkey mid.key -CAcreateserial -days 2 "
        "-out leaf.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=tmp_path, check=True, stderr=-3)
    ca1, ca2 = ((clients / f"ca{n}.pem").read_bytes() for n in (1, 2))
    middle = (tmp_path / "mid.pem").read_bytes()
    shown = {
        name: ssl.PEM_cert_to_DER_cert(path.read_text())
        for name, path in {
            "one": clients / "c1.pem",
            "two": clients / "c2.pem",
            "leaf": tmp_path / "leaf.pem",
        }.items()
    }
    names = {der: name for name, der in shown.items()}
    for content, trusted in (
        (ca1, {"one"}),
        (ca1 + ca2, {"one", "two"}),
        (ca1 + middle, {"one", "leaf"}),
        (middle, set()),
        (b"nothing", set()),
        (b"", set()),
    ):
        found = Authorities(content).trusted({*shown.values()})
        assert {names[it] for it in found} == trusted
    both = Authorities(ca1 + ca2)
    assert Authorities(ca2).lacks(both)
    assert not both.lacks(Authorities(ca2))
    assert not both.lacks(Authorities(ca2 + ca1))
    assert both.lacks(Authorities(b"what OpenSSL alone reads"))


async def test_what_cannot_be_used_changes_nothing(files, folders, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    tls = ServerTls(Settings(**files))
    following = asyncio.create_task(tls.follow())
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    server = Listener(listening, Connections(20), lambda _: asyncio.Protocol(), tls)
    shutil.copy(folders[1] / "own.key", tmp_path)  # without its certificate
    await until_async(lambda: "do not match" in caplog.text)
    assert await asyncio.to_thread(shown, port) == "first"
    (tmp_path / "own.pem").write_text("nothing")
    await until_async(lambda: caplog.text.count("stay as they were") > 1)
    assert await asyncio.to_thread(shown, port) == "first"
    shutil.copy(folders[1] / "own.pem", tmp_path)
    while await asyncio.to_thread(shown, port) != "second":
        pass
    following.cancel()
    server.close()


async def test_a_certificate_that_is_about_to_expire(files, folders, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(tls_module, "CHECK_S", 0.01)
    start = datetime.now(UTC)
    clock = start - timedelta(days=18)  # it is valid until two days after start
    looks = 0

    def now():
        nonlocal looks
        looks += 1
        return clock

    tls = ServerTls(Settings(**files), now=now)
    following = asyncio.create_task(tls.follow())
    warned = []
    for days in (20, 14, 13, 4, 3, 1.5, 1, 0.5):
        clock, before = start + timedelta(days=2 - days), looks
        await until_async(lambda before=before: looks > before)
        warned.append(caplog.text.count("own.pem expires on 2"))
    assert warned == [0, 1, 1, 1, 2, 2, 3, 3]
    async with running(wait=False, **files) as it, client(it, str(tmp_path / "ca.pem")) as asking:
        found = (await asking.get("/metrics")).text
        (line,) = [it for it in found.splitlines() if it.startswith("slipway_certificate_expiry")]
        assert abs(float(line.split()[1]) - (start + timedelta(days=2)).timestamp()) < 600
    following.cancel()


def test_what_stops_the_start(files, tmp_path):
    cert = {"tls_cert_file": files["tls_cert_file"]}
    with pytest.raises(SettingsError, match="needs both"):
        ServerTls(Settings(**cert))
    with pytest.raises(SettingsError, match="No such file"):
        ServerTls(Settings(**cert, tls_key_file=str(tmp_path / "none")))
    with pytest.raises(SettingsError, match=r"not PEM|do not match"):
        ServerTls(Settings(**cert, tls_key_file=files["tls_cert_file"]))
    with pytest.raises(SettingsError, match=r"own\.pem expired on 2"):
        ServerTls(Settings(**files), now=lambda: datetime.now(UTC) + timedelta(days=3))


CONNECTED = 300
AT_ONCE = 20  # so that a handshake has its time on a busy machine
BUFFER = 256 * 1024  # of each connection with TLS, in uvloop


async def test_many_connections_do_not_stretch_the_routers_heap(files, tmp_path):
    """A longer heap keeps more pages, each with a small block that is still used."""
    environ = {
        "OPTION_ROUTER_REPLICAS": f"http://127.0.0.1:{ports.free()}",
        "OPTION_TLS_CERT_FILE": files["tls_cert_file"],
        "OPTION_TLS_KEY_FILE": files["tls_key_file"],
    }
    trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))

    def heap(process: psutil.Process) -> int:
        (found,) = [it for it in process.memory_maps(grouped=False) if it.path == "[heap]"]
        start, end = (int(it, 16) for it in found.addr.split("-"))
        return end - start

    with Program(*ROUTE, environ=environ, log=tmp_path / "log") as router:
        await until_async(router.listens, 60)
        before = heap(router.own)
        opened = []
        for _ in range(CONNECTED // AT_ONCE):
            opening = [
                asyncio.open_connection("localhost", router.port, ssl=trusting)
                for _ in range(AT_ONCE)
            ]
            opened += await asyncio.gather(*opening)
        assert heap(router.own) - before < 0.5 * CONNECTED * BUFFER
        for _, writer in opened:
            writer.close()
