# SPDX-License-Identifier: Apache-2.0
"""Calls about conversations: through the server to the cache server's paths and leases. Only the
engine and the rest of LMCache's server are missing.
"""

import asyncio
import socket
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import uvicorn
from starlette.applications import Starlette

from serving.cache_hints.intent import digest
from serving.kv_cache.lmcache import session_paths
from serving.kv_cache.lmcache.read_ahead import ReadAhead
from serving.kv_cache.session_client import SessionClient
from tests.serving.access.test_access import bearer, written
from tests.serving.conftest import running
from tests.serving.inference.test_queue import ask, filled, queued
from tests.serving.kv_cache.test_retention import Tier, chunk, flood
from tests.support.harness import ports
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

CHUNK = 256


@asynccontextmanager
async def served_by(app, **settings):
    """A server that asks this app about conversations."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with running(tiers=SessionClient(listener.getsockname()[1]), **settings) as it:
            yield it
    finally:
        server.should_exit = True
        await serving


class Store:
    """A store that has its own eviction policy, or none."""

    def __init__(self, policy=None):
        self.policy = policy
        self.deleted: list[str] = []
        self.is_away = False

    def delete(self, keys):
        if self.is_away:
            raise ConnectionError
        self.deleted += [key.chunk_hash.decode().rstrip("0") for key in keys]
        if self.policy:
            self.policy.on_keys_removed(keys)


class Reader(Tier):
    """Memory with stores behind it, and the queue of the reader from them."""

    def __init__(self):
        super().__init__()
        self.memory = Store(self.policy)
        self.stores = [Store(self.retention.policy()), Store()]
        self.ahead = ReadAhead(self.retention, lambda: False, registry=self.registry)


@asynccontextmanager
async def cached(**settings):
    """A server whose cache server has one tier in memory."""
    tier, app = Reader(), Starlette()
    storage = SimpleNamespace(
        l2_adapters=lambda: [(None, it) for it in tier.stores], delete_l1_keys=tier.memory.delete
    )
    app.state.engine = SimpleNamespace(
        context=SimpleNamespace(chunk_size=CHUNK, storage_manager=storage)
    )
    session_paths.add(app, tier.retention, tier.ahead)
    async with served_by(app, **settings) as it:
        yield it, tier


async def test_what_is_kept_of_a_conversation():
    async with cached() as (it, tier):
        tier.asks(digest(None, "mine"), "turn a", "turn b", seconds=300)
        answer = await it.client.get("/kv_sessions/mine")
        assert answer.json() == {"tokens": 4 * CHUNK, "seconds": 300}
        tier.now += 400
        assert (await it.client.get("/kv_sessions/mine")).status_code == 404


@pytest.mark.parametrize("coding", ["utf-8", "latin-1"])
async def test_an_id_is_the_same_in_a_header_a_body_and_a_path(coding):
    async with cached() as (it, tier):
        await it.post("/v1/completions", {"prompt": "a", "session_id": "café"})
        named = {"X-Session-ID": "café".encode(coding)}
        await it.post("/v1/completions", {"prompt": "a"}, headers=named)
        in_body, in_header = (call.session for call in it.engine.calls)
        assert in_header == in_body
        tier.asks(in_header, "tail", seconds=300, system=[])
        answer = await it.client.delete("/kv_sessions/café?forget=true")
        assert answer.json() == {"tokens": CHUNK}


async def test_the_end_by_a_call_lets_the_tail_go():
    async with cached() as (it, tier):
        tier.asks(digest(None, "mine"), "tail", seconds=300)
        tier.asks("sibling", "own", seconds=300)
        flood(tier, 4)
        assert (await it.client.delete("/kv_sessions/mine")).json() == {"tokens": 3 * CHUNK}
        assert tier.evicts(0.1) == ["tail"]
        again = await it.client.delete("/kv_sessions/mine")
        assert (again.status_code, again.json()) == (200, {"tokens": 0})
        answer = await it.client.get("/kv_sessions/mine")
        assert (answer.status_code, "it has ended" in answer.text) == (404, True)


async def test_what_a_conversation_alone_has_used_is_forgotten():
    async with cached() as (it, tier):
        disk, shared = tier.stores
        disk.policy.on_keys_created([chunk(name) for name in ("branch", "tail", "late")])
        tier.asks(digest(None, "mine"), "branch", "tail", "late", seconds=300)
        tier.asks("sibling", "branch", "own", seconds=300)
        tier.policy.on_keys_removed([chunk("branch")])  # only the disk has it, and knows its users
        disk.policy.on_keys_removed([chunk("late")])
        disk.policy.on_keys_created([chunk("late")])  # it was stored after the request's end
        for said in ("", "perhaps", "true&forget=true"):
            answer = await it.client.delete(f"/kv_sessions/mine?forget={said}")
            assert (answer.status_code, "true or false" in answer.text) == (400, True)
        answer = await it.client.delete("/kv_sessions/mine?forget=true")
        assert answer.json() == {"tokens": 5 * CHUNK}
        for one in (tier.memory, disk, shared):
            assert one.deleted == ["tail", "late"]
        assert tier.kept == {"system a", "system b", "own"}
        again = await it.client.delete("/kv_sessions/mine?forget=true")
        assert (again.status_code, again.json()) == (200, {"tokens": 0})


async def test_a_conversation_that_a_store_could_not_forget_can_be_forgotten_again():
    async with cached() as (it, tier):
        tier.asks(digest(None, "mine"), "tail", seconds=300, system=[])
        tier.stores[1].is_away = True
        answer = await it.client.delete("/kv_sessions/mine?forget=true")
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
        tier.stores[1].is_away = False
        answer = await it.client.delete("/kv_sessions/mine?forget=true")
        assert answer.json() == {"tokens": CHUNK}
        assert tier.stores[1].deleted == ["tail"]


async def test_an_end_deletes_nothing():
    async with cached() as (it, tier):
        tier.asks(digest(None, "mine"), "tail", seconds=300)
        await it.client.delete("/kv_sessions/mine?forget=false")
        assert not tier.memory.deleted


async def test_a_prefetch_by_a_call():
    async with cached() as (it, tier):
        path = "/kv_sessions/mine/prefetch"
        answer = await it.client.post(path)
        assert (answer.status_code, answer.json()) == (202, {"tokens": 0})
        tier.asks(digest(None, "mine"), "turn", seconds=300)
        assert (await it.client.post(path)).json() == {"tokens": 3 * CHUNK}
        assert [*tier.ahead._asked] == [digest(None, "mine")]
        tier.stores.clear()
        assert (await it.client.post(path)).json() == {"tokens": 0}
        assert (await it.client.get(path)).status_code == 405


async def test_the_conversation_of_a_request_that_waits_is_prefetched():
    async with cached(cache_salt_header="X-Tenant") as (it, tier):
        tier.asks(digest("a", "mine"), "turn", seconds=300)
        named = {"x-tenant": "a", "x-session-id": "mine"}
        await it.invoke({"inputs": "at once"}, headers=named)
        assert not tier.ahead._asked
        inside, _ = await filled(it)
        waiting = [ask(it, {"inputs": "a"}, **{"x-tenant": "a", "x-session-id": "mine"})]
        waiting += [ask(it, {"inputs": "a"}), ask(it, {"inputs": "a"}, x_session_id="unknown")]
        await until_async(lambda: tier.ahead._asked)
        await queued(it, 3)
        assert [*tier.ahead._asked] == [digest("a", "mine")]
        it.engine.gate.set()
        for answer in await asyncio.gather(*inside, *waiting):
            assert answer.status_code == 200


async def test_requests_wait_for_no_cache_server():
    async with running(tiers=SessionClient(ports.free())) as it:
        inside, _ = await filled(it)
        waiting = [ask(it, {"inputs": "a"}, x_session_id=str(number)) for number in range(20)]
        await queued(it, 20)
        it.engine.gate.set()
        for answer in await asyncio.gather(*inside, *waiting):
            assert answer.status_code == 200


@pytest.mark.parametrize("call", ["GET ", "DELETE ", "POST /prefetch"])
async def test_a_conversation_is_its_tenants_alone(call):
    async with cached(cache_salt_header="X-Tenant") as (it, tier):
        tier.asks(digest("a", "same name"), "of a", seconds=300, tenant="a")
        method, _, rest = call.partition(" ")
        path = f"/kv_sessions/same%20name{rest}"
        answer = await it.client.request(method, path, headers={"x-tenant": "b"})
        assert answer.json().get("tokens", 0) == 0
        assert not tier.ahead._asked
        answer = await it.client.get("/kv_sessions/same%20name", headers={"x-tenant": "a"})
        assert answer.json()["tokens"] == 3 * CHUNK


async def test_keys_without_administration_may_call(tmp_path):
    async with cached(api_keys_file=written(tmp_path / "keys.json")) as (it, tier):
        tier.asks(digest("\0team-a", "mine"), "turn", seconds=300)
        assert (await it.client.get("/kv_sessions/mine")).status_code == 401
        answer = await it.client.get("/kv_sessions/mine", headers=bearer("team-a"))
        assert answer.json()["tokens"] == 3 * CHUNK


async def test_without_tiers_the_refusal_says_why(shared):
    for method in ("GET", "DELETE"):
        answer = await shared.client.request(method, "/kv_sessions/mine")
        assert answer.status_code == 404
        assert "OPTION_KV_RETENTION_S=0" in answer.text


async def test_ids_have_a_limit():
    async with cached() as (it, _):
        answer = await it.client.delete(f"/kv_sessions/{'é' * 129}")
        assert answer.status_code == 400
        assert "more than 256 bytes" in answer.text


async def test_a_cache_server_that_is_away_is_said():
    async with running(tiers=SessionClient(ports.free())) as it:
        answer = await it.client.delete("/kv_sessions/mine")
        assert answer.status_code == 503
        assert "retry-after" in answer.headers


@pytest.mark.parametrize("body", [b"a" * 5000, b"{", b"[]", b"\xff"])
async def test_an_odd_answer_of_the_cache_server_is_none(body):
    async def odd(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async with served_by(odd) as it:
        answer = await it.client.get("/kv_sessions/mine")
        assert answer.status_code == 503
