# SPDX-License-Identifier: Apache-2.0
"""HyperPod's tiered storage: our client, and LMCache's store with it, against the stand-in."""

import asyncio
import contextlib
import json
import os
import secrets
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry

from lmi_config.plan import shared_store
from serving.kv_cache.lmcache.shared_store import SharedStore
from serving.kv_cache.lmcache.tiered_storage import CheckedClient
from tests.support.harness.ports import free
from tests.support.harness.tiered_storage import PIECE, Daemon, misplaced, running
from tests.support.harness.wait import until

KEY = "model/with a slash@00000001@0@abc@salt"
CONTENT = os.urandom(3 * PIECE + 1000)
OTHER = os.urandom(len(CONTENT))


@pytest.fixture
def segment():
    path = Path("/dev/shm", f"slipway-test-{secrets.token_hex(8)}")
    yield path
    with contextlib.suppress(OSError):
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.fixture
def daemon(segment):
    found = Daemon(segment, 16 * PIECE)
    with running(found):
        yield found


@contextlib.asynccontextmanager
async def client_of(daemon, **more):
    client = CheckedClient(
        f"sagemaker-hyperpod://127.0.0.1:{daemon.port}",
        shared_memory_name=daemon.segment.name,
        timeout_ms=500,
        **more,
    )
    try:
        yield client
    finally:
        await client.close()


async def load(client, key=KEY):
    """The result of a look-up and a load: the content, or None; or the exception that LMCache takes
    for None.
    """
    content = bytearray(len(CONTENT))
    try:
        lease = await client.acquire_lease(key)
        loaded = lease and client.copy_from_lease(lease, memoryview(content))
    except Exception as error:
        return type(error)
    if lease:
        await client.release_lease(lease)
    return bytes(content) if loaded else None


def test_what_was_stored_is_found_by_others_on_the_node(daemon):
    async def run():
        async with client_of(daemon) as one, client_of(daemon) as other:
            assert await load(one) is None
            assert await one.put(KEY, memoryview(CONTENT))
            assert await other.put(KEY, memoryview(CONTENT))
            assert await load(other) == CONTENT
            assert await load(other, "another") is None

    asyncio.run(run())
    assert daemon.counts["conflicts"] == 1
    assert daemon.counts["leased"] == daemon.counts["released"] == 1


def test_an_object_with_a_lease_stays_where_it_is(daemon):
    async def run():
        async with client_of(daemon) as client:
            await client.put(KEY, memoryview(CONTENT))
            lease = await client.acquire_lease(KEY)
            for n in range(9):
                await client.put(f"other {n}", memoryview(OTHER))
            found = bytearray(len(CONTENT))
            assert client.copy_from_lease(lease, memoryview(found))
            assert found == CONTENT
            await client.release_lease(lease)
            for n in range(9, 18):
                await client.put(f"other {n}", memoryview(OTHER))
            assert await load(client) is None

    asyncio.run(run())
    assert daemon.counts["evicted"] >= 10


def _cut(lease):
    lease["offsets"][-1]["len"] -= 1
    return lease


def _elsewhere(lease):
    """Pieces of the right size, from another object."""
    for piece in lease["offsets"]:
        piece["offset"] += 4 * PIECE
    return lease


def _swapped(lease):
    first, second, *_ = lease["offsets"]
    first["offset"], second["offset"] = second["offset"], first["offset"]
    return lease


def _pieces(**changed: Any):
    def lie(lease):
        return lease | {"offsets": [lease["offsets"][0] | changed, *lease["offsets"][1:]]}

    return lie


LIES = {
    "misplaced": misplaced,
    "cut": _cut,
    "elsewhere": _elsewhere,
    "swapped": _swapped,
    "behind its end": _pieces(offset=15 * PIECE + 1),
    "far behind its end": _pieces(offset=1 << 70),
    "before its beginning": _pieces(offset=-1),
    "no size": _pieces(len=0),
    "a negative size": _pieces(len=-PIECE),
    "a huge size": _pieces(len=1 << 50),
    "infinite": _pieces(len=float("inf")),
    "words": _pieces(offset="here"),
    "no pieces": lambda lease: lease | {"offsets": []},
    "null": lambda lease: lease | {"offsets": None},
    "a list": lambda lease: [lease],
    "no id": lambda lease: {"offsets": lease["offsets"]},
    "one piece twice": lambda lease: lease | {"offsets": lease["offsets"] * 2},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_daemon_that_lies_is_never_believed(daemon, lie):
    async def run():
        async with client_of(daemon) as client:
            assert await client.put(KEY, memoryview(CONTENT))
            assert await client.put("other", memoryview(OTHER))
            daemon.answered = LIES[lie]
            assert not isinstance(await load(client), bytes)
            daemon.answered = lambda lease: lease
            assert await load(client) == CONTENT

    asyncio.run(run())


def test_an_object_of_another_key_is_a_miss(daemon):
    async def run():
        async with client_of(daemon) as client:
            await client.put(KEY, memoryview(CONTENT))
            await client.put("other", memoryview(OTHER))
            honest = await client.acquire_lease("other")
            daemon.answered = lambda lease: (
                lease | {"offsets": [{"offset": o, "len": n} for o, n in honest.offsets]}
            )
            assert await load(client) is None

    asyncio.run(run())


def test_memory_that_is_cut_shorter_while_it_is_read_ends_nobody(daemon):
    async def run():
        async with client_of(daemon) as client:
            await client.put(KEY, memoryview(CONTENT))
            lease = await client.acquire_lease(KEY)
            os.truncate(daemon.segment, PIECE)
            assert not client.copy_from_lease(lease, memoryview(bytearray(len(CONTENT))))

    asyncio.run(run())


def test_what_lies_where_an_object_was_is_not_served(daemon, segment):
    """A container sees such a file if it has mounted the file of a daemon that has
    restarted since.
    """

    async def run():
        async with client_of(daemon) as client:
            await client.put("other", memoryview(OTHER))
            old = segment.with_name(segment.name + "-old")
            segment.rename(old)
            again = Daemon(segment, 16 * PIECE)
            with running(again):
                again.segment = old  # the client's view of it
                async with client_of(again) as stale:
                    assert await stale.put(KEY, memoryview(CONTENT))
                    assert await load(stale) is None

    asyncio.run(run())


def test_a_new_segment_is_seen_at_once_where_it_can_be(daemon, segment):
    async def run():
        async with client_of(daemon) as client:
            await client.put(KEY, memoryview(CONTENT))
            again = Daemon(segment, 16 * PIECE)
            daemon.__dict__.update(again.__dict__ | {"port": daemon.port})
            assert await load(client) is None
            assert await client.put(KEY, memoryview(CONTENT))
            assert await load(client) == CONTENT

    asyncio.run(run())


# --- the store in LMCache's server ----------------------------------------------------------


class Object:
    """A memory object with the members that LMCache's store reads."""

    def __init__(self, content):
        self.content = bytearray(content)
        self.byte_array = memoryview(self.content)

    def get_size(self):
        return len(self.content)


@contextlib.contextmanager
def adapter_of(daemon):
    """The store that LMCache creates for a server on this node."""
    url = f"tieredstorage://127.0.0.1:{daemon.port}?shared_memory_name={daemon.segment.name}"
    config = SharedStore(json.dumps(dict(shared_store.read(url, {}).adapter)))._config
    adapter = create_l2_adapter_from_registry(config)
    try:
        yield adapter
    finally:
        adapter.close()


def _result(query, task):
    """The result of a task, once it is there: the keys' numbers."""
    while (found := query(task)) is None:
        time.sleep(0.005)
    return found.get_indices_list()


def _held(adapter, keys):
    task = adapter.submit_lookup_and_lock_task(keys, {})
    return _result(adapter.query_lookup_and_lock_result, task)


def _loaded(adapter, keys):
    objects = [Object(bytes(len(CONTENT))) for _ in keys]
    loaded = _result(adapter.query_load_result, adapter.submit_load_task(keys, objects))
    return [bytes(objects[n].content) for n in loaded]


def test_a_server_that_was_restarted_and_another_one_find_what_was_stored(daemon):
    keys = [ObjectKey(bytes([n]) * 8, "fingerprint", 1, cache_salt="tenant") for n in range(3)]
    with adapter_of(daemon) as first:
        first.submit_store_task(keys[:2], [Object(CONTENT), Object(OTHER)])
        until(first.pop_completed_store_tasks, every=0.005)
    with adapter_of(daemon) as again, adapter_of(daemon) as another:
        for server in (again, another):
            assert _held(server, keys) == [0, 1]
            assert _loaded(server, keys[:2]) == [CONTENT, OTHER]
            server.submit_unlock(keys[:2])
        daemon.answered = misplaced
        assert _held(again, keys) == [0, 1]
        assert _loaded(again, keys[:2]) == []


class Manager:
    """LMCache's storage manager, with the addition and removal of stores only."""

    def __init__(self):
        self.stores = {}

    def add_l2_adapter(self, config):
        self.stores[0] = create_l2_adapter_from_registry(config)
        return 0

    def delete_l2_adapter(self, index, seconds):
        self.stores.pop(index).close()


@pytest.fixture
def kept(segment, caplog, monkeypatch):
    """A store, and a function that looks at it. The function returns whether the store is used, and
    the logged text.
    """
    monkeypatch.setattr("serving.kv_cache.lmcache.shared_store.LOOK_S", 20)
    logged = []
    monkeypatch.setattr(
        "serving.kv_cache.lmcache.shared_store.log",
        SimpleNamespace(
            error=lambda message, *words, **_: logged.append(message % words),
            warning=lambda message, *words: logged.append(message % words),
        ),
    )
    port = free()
    url = f"tieredstorage://:{port}?shared_memory_name={segment.name}"
    found = shared_store.read(url, {"NODE_IP": "127.0.0.1"})
    store, manager = SharedStore(json.dumps(dict(found.adapter))), Manager()

    def look():
        logged.clear()
        store.look(manager)
        return bool(manager.stores), " ".join(logged)

    yield SimpleNamespace(look=look, port=port, segment=segment)
    for it in manager.stores.values():
        it.close()


AWAY = "the shared KV store is left out until it answers: "


def test_a_daemon_that_starts_later_is_used(kept):
    used, log = kept.look()
    assert not used
    assert log.startswith(f"{AWAY}FileNotFoundError")
    assert kept.look() == (False, "")  # it is logged once
    with running(Daemon(kept.segment), kept.port):
        assert kept.look() == (True, "the shared KV store is used")
    used, log = kept.look()  # it has been killed
    assert not used
    assert log.startswith(AWAY)
    with running(Daemon(kept.segment), kept.port):
        assert kept.look() == (True, "the shared KV store is used")


def test_memory_without_a_daemon_is_not_used_yet(kept):
    kept.segment.write_bytes(bytes(PIECE))
    used, log = kept.look()
    assert not used
    assert log == f"{AWAY}ConnectionRefusedError: [Errno 111] Connection refused"


def test_a_daemon_that_hangs_is_left_out(kept, monkeypatch):
    monkeypatch.setattr("serving.kv_cache.lmcache.shared_store.LOOK_S", 0.3)
    kept.segment.write_bytes(bytes(PIECE))
    with socket.create_server(("127.0.0.1", kept.port)):
        used, log = kept.look()
    assert not used
    assert log == f"{AWAY}TimeoutError: timed out"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda it: it.mkdir(), "IsADirectoryError: [Errno 21] Is a directory: '{segment}'"),
        (lambda it: it.touch(), "OSError: {segment} is empty"),
    ],
)
def test_memory_that_cannot_be_used_is_named(kept, spoil, why):
    spoil(kept.segment)
    assert kept.look() == (False, AWAY + why.format(segment=kept.segment))
