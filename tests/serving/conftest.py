# SPDX-License-Identifier: Apache-2.0
import asyncio
import json
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from lmi_config.options.declared import Settings
from serving.kv_cache.session_client import SessionClient
from serving.lifecycle import Step
from serving.server.server import Server
from serving.server.startup import Runtime
from tests.fake_engine import FakeEngine


@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"


class Running:
    """A real server on a real port, with a fake engine."""

    def __init__(self, settings: Settings, tiers: SessionClient | None) -> None:
        self.settings = settings
        self.tiers = tiers
        self.engine = FakeEngine()
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.start_error: Exception | None = None
        listener = socket.create_server(("127.0.0.1", 0))
        # Asyncio sets it only on sockets made with TCP's number; without it each body waits 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = Server(listener, settings, self.start)
        self.engine.names = settings.model_names
        self.task = asyncio.create_task(self.server.run())
        self.client = httpx.AsyncClient(base_url=self.url, timeout=60)

    async def start(self, note):
        note(Step.FETCHING, "pretending")
        await self.may_start.wait()
        if self.start_error:
            raise self.start_error
        return Runtime(engine=self.engine, adapters=None, code=None, cache=None, tiers=self.tiers)

    @property
    def pipeline(self):
        """The server's pipeline; the server must be ready."""
        return self.server.backend._pipeline

    async def ready(self):
        while (await self.client.get("/ping")).status_code != 200:
            await asyncio.sleep(0.01)

    async def post(self, path, body, **more):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.client.post(path, content=content, **more)

    async def invoke(self, body, **more):
        return await self.post("/invocations", body, **more)


@asynccontextmanager
async def running(
    wait: bool = True, tiers: SessionClient | None = None, **settings: Any
) -> AsyncIterator[Running]:
    it = Running(Settings(**{"max_request_size": 30_000} | settings), tiers)
    try:
        if wait:
            await it.ready()
        yield it
    finally:
        await it.client.aclose()
        it.engine.gate.set()
        if not it.task.done():
            it.server.stop()
        await asyncio.wait_for(it.task, 60)


@pytest.fixture(scope="module")
async def shared(anyio_backend):
    """One server for the tests that leave it unchanged."""
    async with running() as it:
        yield it


@pytest.fixture
async def served(anyio_backend):
    """A server for this test alone."""
    async with running() as it:
        yield it


@pytest.fixture(scope="module")
def watched():
    from tests.s3_server import Watched  # it takes a second to import

    app = Watched()
    thread = threading.Thread(target=app.server.serve_forever, args=[0.05])
    thread.start()
    yield app
    app.server.shutdown()
    thread.join()
    app.server.server_close()


@pytest.fixture
def aws(watched, monkeypatch, tmp_path):
    """The S3 server. The environment has only the variables that lead to it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", watched.url)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    watched.reset()
    return watched
