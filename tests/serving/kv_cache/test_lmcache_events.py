# SPDX-License-Identifier: Apache-2.0
"""Reports of LMCache's server about its memory and its look-ups, by LMCache's own classes with our
modules.
"""

import tracemalloc
from types import SimpleNamespace

import msgspec
import pytest
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule
from lmcache.v1.multiprocess.modules.kv_events import KVEventModule
from lmcache.v1.multiprocess.request_handler import get_request_handler_options
from prometheus_client import CollectorRegistry

from serving.kv_cache.lmcache.lookups import Lookups
from serving.kv_cache.patches import shared_events

CHUNK = 4
TOKENS = tuple(range(10))


class Bus:
    """An event bus that passes events on at once."""

    enabled = True

    def __init__(self):
        self.callbacks = {}

    def subscribe(self, kind, callback):
        self.callbacks[kind] = callback

    def subscribe_drops(self, callback):
        pass

    def publish(self, event):
        if callback := self.callbacks.get(event.event_type):
            callback(event)


@pytest.fixture
def server(monkeypatch):
    """LMCache's modules for events and for engines that copy KV themselves."""
    for owner, name in (
        (KVEventModule, "__init__"),
        (KVEventModule, "_append_kv_event"),
        (KVEventModule, "_record_kv_event"),
        (KVEventModule, "read_kv_events"),
        (EngineDrivenTransferModule, "prepare_store"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    for patch in (shared_events.SALTS, shared_events.TOKENS, shared_events.PACKED):
        patch.apply()
    sessions = SimpleNamespace(
        get=lambda _: None, get_or_create=lambda _: SimpleNamespace(extras={})
    )
    bus = Bus()
    context = SimpleNamespace(event_bus=bus, chunk_size=CHUNK, session_manager=sessions)
    events = KVEventModule(context)
    transfers = EngineDrivenTransferModule.__new__(EngineDrivenTransferModule)
    transfers._ctx = context
    strategy = SimpleNamespace(prepare_store=lambda **_: "prepared")
    monkeypatch.setattr(
        transfers, "_resolve_for_transfer", lambda _: (SimpleNamespace(metadata=None), strategy)
    )
    monkeypatch.setattr(
        transfers, "_resolve_single_group_obj_keys", lambda key: object_keys(key.cache_salt)
    )
    return SimpleNamespace(bus=bus, events=events, transfers=transfers)


def object_keys(salt="", rank=0):
    return [ObjectKey(bytes([n]), "model", rank, cache_salt=salt) for n in (1, 2)]


def store(server, salt="", worker=0):
    key = IPCCacheServerKey("model", 1, worker, TOKENS, 0, 10, "request", salt)
    assert server.transfers.prepare_store(key, 1) == "prepared"
    changed(server, EventType.L1_WRITE_FINISHED, salt)


def changed(server, kind, salt):
    server.bus.publish(Event(kind, metadata={"keys": object_keys(salt)}))


def reported(server):
    batch = server.events.read_kv_events("model", 0, 100)
    return [(it.kind, it.block_hashes, it.parent_block_hash, it.token_ids) for it in batch.events]


STORED = [
    ("stored", [b"\1"], None, [0, 1, 2, 3]),
    ("stored", [b"\2"], b"\1", [4, 5, 6, 7]),
]


def test_chunks_that_an_engine_stores_itself_are_reported_with_their_tokens(server):
    store(server)
    assert reported(server) == STORED
    changed(server, EventType.L1_KEYS_EVICTED, "")
    assert reported(server)[2:] == [("removed", [b"\1", b"\2"], None, [])]


def test_chunks_of_tenants_and_adapters_are_not_reported(server):
    store(server, salt="tenant")
    assert reported(server) == []
    store(server)
    # They do not count as shared by all.
    store(server, salt="tenant")
    changed(server, EventType.L1_KEYS_EVICTED, "tenant")
    assert reported(server) == STORED


def test_the_tokens_come_from_the_first_rank(server):
    store(server, worker=1)
    assert reported(server) == []


def test_a_stored_chunk_takes_little_memory(server):
    """A list of Python's numbers has 36 bytes a token. The server keeps 65,536 such lists. An event
    has the tokens of its chunk without a copy: one would be 4 bytes a token more.
    """
    chunks, length = 100, 256
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for n in range(chunks):
            tokens = [[1000 + n * length + place for place in range(length)]]
            about = {"chunk_hashes": [b"%d" % n], "token_chunks": tokens, "parent_hashes": [None]}
            server.bus.publish(Event(EventType.MP_TOKENS, metadata=about))
            keys = [ObjectKey(b"%d" % n, "model", 0)]
            server.bus.publish(Event(EventType.L1_WRITE_FINISHED, metadata={"keys": keys}))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    batch = server.events.read_kv_events("model", 0, chunks)
    assert [it.token_ids[0] for it in batch.events] == [1000 + n * length for n in range(chunks)]
    assert msgspec.json.decode(msgspec.json.encode(batch.events[0].token_ids))[-1] == 1255
    assert (after - before) / chunks / length < 8


def test_lmcache_still_finds_its_handler(server):
    assert get_request_handler_options(EngineDrivenTransferModule.prepare_store)


def test_lookups_have_the_names_that_lmcache_has_for_them():
    registry = CollectorRegistry()
    count = Lookups(registry).get_subscriptions()[EventType.MP_LOOKUP_PREFETCH_END]
    for wanted, hits in ((1024, 0), (1024, 512), (0, 0)):
        about = {"requested_tokens": wanted, "hit_tokens": hits}
        count(Event(EventType.MP_LOOKUP_PREFETCH_END, metadata=about))
    value = registry.get_sample_value
    assert value("lmcache:num_lookup_tokens_total") == 2048
    assert value("lmcache:num_lookup_hits_total") == 512
    assert value("lmcache:request_cache_hit_rate_count") == 1
    assert value("lmcache:request_cache_hit_rate_bucket", {"le": "0.4"}) == 0
    assert value("lmcache:request_cache_hit_rate_bucket", {"le": "0.5"}) == 1
