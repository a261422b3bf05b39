# SPDX-License-Identifier: Apache-2.0
"""Only a request's own KV is stored, whatever vLLM does with its blocks."""

import itertools
import random
from types import SimpleNamespace

import pytest
from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp

from serving.engine.patches.engine_core import real_blocks
from tests.serving.engine import window_hits
from tests.serving.engine.painted import Painted, full, local, window
from tests.serving.engine.test_kv_connector import CHUNK

NULL = 0


@pytest.mark.parametrize(
    ("blocks", "held", "left"),
    [
        ([[5, 6, 7, 8]], ([5, 6, 7, 8, 9],), (0, [[5, 6, 7, 8]])),
        ([[0, 0, 7, 8]], ([0, 0, 7, 8],), (64, [[7, 8]])),
        ([[0, 6, 7, 8]], ([0, 6, 7, 8],), (64, [[7, 8]])),  # a chunk of two blocks, null in part
        ([[5, 6, 0, 8]], ([5, 6, 0, 8],), None),
        ([[5, 6, 7, 8]], ([0, 6, 7, 8],), (64, [[7, 8]])),  # it has left the window since
        ([[5, 6, 7, 8]], ([5, 9, 7, 8],), (64, [[7, 8]])),
        ([[5, 6, 7, 8]], ([5, 6, 7],), None),
        ([[5, 6, 7]], ([5, 6, 7, 8],), None),
        ([[5, 6, 7, 8]], None, None),
        ([[5, 6, 7, 8]], ([5, 6, 7, 8], [1, 2, 3, 4]), None),
        ([[5, 6, 7, 8], [0, 3, 4, 9]], ([5, 6, 7, 8], [0, 3, 4, 9]), (64, [[7, 8], [4, 9]])),
    ],
)
def test_what_is_left_of_a_store(blocks, held, left):
    """Blocks of 32 tokens, chunks of 64."""
    operation = LoadStoreOp([*range(128)], blocks, 0, 128)
    meta = SimpleNamespace(
        requests=[SimpleNamespace(request_id="a", direction="STORE", op=operation)]
    )
    state = SimpleNamespace(get_block_ids=lambda _: held)
    real_blocks.real_stores(meta, state, [32] * len(blocks), 64, NULL)
    found = [(it.op.start, it.op.block_ids) for it in meta.requests]
    assert found == ([left] if left else [])


@pytest.mark.parametrize(("state", "null"), [(None, NULL), (SimpleNamespace(), None)])
def test_nothing_is_stored_where_vllm_does_not_say_what_is_real(state, null):
    operation = LoadStoreOp([*range(32)], [[5]], 0, 32)
    meta = SimpleNamespace(
        requests=[SimpleNamespace(request_id="a", direction="STORE", op=operation)]
    )
    real_blocks.real_stores(meta, state, [32], 32, null)
    assert not meta.requests


KINDS = {
    "full": ({"a": full(128)}, False),
    "window": ({"a": window(128, 64)}, False),
    "window, blocks smaller than chunks": ({"a": window(32, 64)}, False),
    "window, lmcache-driven": ({"a": window(32, 64)}, True),
    "window as large as a chunk": ({"a": window(32, CHUNK)}, False),
    "full and window": ({"a": full(32), "b": window(32, 64)}, True),
    "full and two windows": ({"a": full(64), "b": window(64, 64), "c": window(64, 192)}, True),
    "full and local": ({"a": full(64), "b": local(64, 128)}, True),
}


@pytest.mark.parametrize("budget", [pytest.param(4096, marks=pytest.mark.nightly), 300])
@pytest.mark.parametrize("kind", KINDS)
def test_only_a_prompts_own_kv_is_stored_and_loaded(server, kind, budget):
    """Known prompts grow, branch and repeat, while the tiers or the engine forget them. budget: a
    prompt is computed in one step, or in several, between which its blocks leave the window.
    """
    layers, gpu_way = KINDS[kind]
    engine = Painted(server.port, layers, gpu_way, budget=budget)
    chance = random.Random(budget)
    try:
        for _ in range(3):
            for first, salt in itertools.product((1, 2), ("one", "other", None)):
                engine.answer(engine.ask(first, chance.choice((680, 900, 1250)), salt=salt))
            engine.idle()
            match chance.randrange(3):
                case 0:
                    server.forget()
                case 1:
                    assert engine.scheduler.reset_prefix_cache()
        server.forget()
        engine.answer(*(engine.ask(1, length, salt="one") for length in (930, 1300)))
        engine.idle()
        assert engine.scheduler.reset_prefix_cache()
        for layer in engine.layers.values():
            layer[1:] = -1
        engine.answer(engine.ask(1, 680, salt="one"), engine.ask(1, 1100, salt="one"))
        engine.idle()
        assert engine.stored
        assert engine.loaded
        assert engine.wrong == []
        if len(layers) == 1:
            assert not next(iter(engine.layers.values()))[0].any()
    finally:
        server.forget()
        engine.worker.shutdown()
        engine.scheduler.shutdown()


@pytest.mark.parametrize("gpu_way", [False, True])
def test_a_block_that_another_request_has_by_now_is_not_stored(server, gpu_way):
    """A chunk's first blocks leave the window before its last ones are computed. By then, another
    request has got the first blocks.
    """
    engine = Painted(server.port, {"a": window(32, 64)}, gpu_way, blocks=14, budget=200)
    try:
        engine.answer(*(engine.ask(first, 1250) for first in (1, 2)))
        engine.idle()
        assert engine.wrong == []
    finally:
        server.forget()
        engine.worker.shutdown()
        engine.scheduler.shutdown()


def test_what_a_restart_costs_where_layers_keep_only_a_window(server):
    """docs/guides/kv_cache.md gives this reason for layers with a window to keep all KV."""
    length = 4 * window_hits.WINDOW
    off = [*window_hits.measured(server, window_hits.OFF, length)]
    on = [*window_hits.measured(server, window_hits.ON, length)]
    assert all(off)
    assert [bool(hits) for hits in on] == [True, False, True]
