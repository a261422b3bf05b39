# SPDX-License-Identifier: Apache-2.0
"""The answer to the ping of a worker whose KV caches are not or no longer registered.

tests/serving/engine/test_kv_connector.py tests the same with an engine's connector.
"""

from types import SimpleNamespace

import pytest
from lmcache.v1.multiprocess.modules import management
from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule

from serving.kv_cache.patches import forgotten_workers


def module(kind, name):
    found = kind.__new__(kind)
    setattr(found, name, {})
    found.touch_instance = lambda _: None
    return found


@pytest.fixture
def modules():
    return [
        module(LMCacheDrivenTransferModule, "_cache_contexts"),
        module(EngineDrivenTransferModule, "_engine_driven_contexts"),
    ]


@pytest.fixture
def ping(monkeypatch, modules):
    monkeypatch.setattr(management.ManagementModule, "ping", management.ManagementModule.ping)
    forgotten_workers.PATCH.apply()
    server = SimpleNamespace(_liveness_targets=modules)
    return lambda instance: management.ManagementModule.ping(server, instance)


def test_a_worker_that_is_not_known_learns_it_and_registers_at_the_next_ping(ping, modules):
    assert [ping(5), ping(6), ping(5)] == [False, False, True]
    modules[0]._cache_contexts[5] = object()
    assert [ping(5), ping(5)] == [True, True]
    modules[0]._cache_contexts.clear()
    assert [ping(5), ping(5)] == [False, True]
    assert [ping(5), ping(5)] == [False, True]  # it could not be registered


def test_others_are_answered_as_before(ping, modules):
    modules[1]._engine_driven_contexts[7] = object()
    assert [ping(None), ping(7), ping(None), ping(7)] == [True] * 4


def test_workers_that_never_come_again_are_forgotten(ping, monkeypatch):
    monkeypatch.setattr(forgotten_workers, "_MOST_TOLD", 3)
    assert [ping(number) for number in range(10)] == [False] * 10
    assert ping(0) is False


def test_lmcache_still_finds_its_handler(ping):
    patched = management.ManagementModule.ping
    assert vars(patched).items() >= vars(patched.__wrapped__).items()
