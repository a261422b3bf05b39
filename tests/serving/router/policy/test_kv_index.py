# SPDX-License-Identifier: Apache-2.0
"""The index, compared with events as vLLM 0.32 sends them, and with a simple model of an engine."""

import itertools
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.kv_cache.salt import digest
from serving.router.policy import kv_index
from serving.router.policy.kv_index import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KvIndex,
    chain,
    request_seed,
    seed,
)

SIZE = 4
ROOT = seed()
TOKENS = list(range(100, 112))  # three blocks
KEYS = chain(TOKENS, SIZE, ROOT)


def stored(tokens=TOKENS, hashes=(1, 2, 3), parent=None, **more):
    return BlockStored([*hashes], parent, [*tokens], SIZE, **more)


def index(*events, rank=0):
    found = KvIndex()
    for event in events:
        found.apply("a", rank, event)
    return found


def matched(found, keys=KEYS, now=0.0):
    return found.in_engine("a", {SIZE: keys}, now) // SIZE


def test_a_chain_has_a_key_for_each_full_block_after_those_before_it():
    assert len(chain([*TOKENS, 1, 2], SIZE, ROOT)) == 3
    assert chain(TOKENS[:8], SIZE, ROOT) == KEYS[:2]
    assert chain(TOKENS[8:], SIZE, KEYS[1]) == KEYS[2:]
    assert chain(TOKENS[4:8], SIZE, ROOT) != KEYS[1:2]
    assert chain([], SIZE, ROOT) == []
    with pytest.raises(OverflowError):
        chain([2**31], 1, ROOT)


def test_events_as_they_are_on_the_wire():
    wire = {
        "type": "BlockStored",
        "block_hashes": [2**64 - 1],
        "parent_block_hash": None,
        "token_ids": TOKENS[:4],
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "session_id": None,
    }
    event = msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=Event)
    found = index(event)
    assert matched(found) == 1
    wire = {"type": "BlockRemoved", "block_hashes": [2**64 - 1], "medium": "GPU", "group_idx": 0}
    found.apply("a", 0, msgspec.convert(wire, Event))
    assert matched(found) == 0


@pytest.mark.parametrize(
    ("events", "count"),
    [
        ([], 0),
        ([stored()], 3),
        ([stored(TOKENS[:4], [1]), stored(TOKENS[4:], [2, 3], 1)], 3),
        ([stored(TOKENS[4:], [2, 3], 1)], 0),
        ([stored(), BlockRemoved([3])], 2),
        ([stored(), BlockRemoved([3]), stored(TOKENS[8:], [3], 2)], 3),
        ([stored(), stored(), BlockRemoved([3]), BlockRemoved([2])], 3),
        ([stored(), stored(), BlockRemoved([3]), BlockRemoved([3])], 2),
        ([stored(), BlockRemoved([4])], 3),
        ([stored(), AllBlocksCleared()], 0),
        ([stored(medium="GPU")], 3),
        ([stored(medium="CPU")], 0),
        ([stored(), BlockRemoved([3], "CPU")], 3),
        ([stored(group_idx=1), BlockRemoved([3], "GPU", 0)], 3),
        ([stored(group_idx=1), BlockRemoved([3], "GPU", 1)], 2),
        ([stored(TOKENS[:4], [1], group_idx=1), stored(group_idx=2)], 1),
        ([stored(kv_cache_spec_kind="sliding_window")], 0),
        ([stored(kv_cache_spec_kind="mla_attention")], 3),
        ([stored(hashes=[1, 2])], 0),
        ([stored(extra_keys=[None, [["image", 2]], None])], 1),
        ([stored(extra_keys=[[["image", 0]], None, None])], 0),
        ([stored(extra_keys=[None, [["image", 2]], None]), stored(TOKENS[8:], [3], 2)], 1),
        ([stored(extra_keys=[["salt"], None, None])], 0),
        ([BlockStored([1], None, [], 0)], 0),
        ([stored([], [])], 0),
    ],
)
def test_what_is_held(events, count):
    assert matched(index(*events)) == count


# Memory, as LMCache 0.5.6 reports it: by chunks of another size, without salts and adapters


CHUNK = 6
LONG = list(range(100, 118))  # three chunks, and as many of the engine's blocks as fit
CHUNKS = chain(LONG, CHUNK, ROOT)
BOTH = {SIZE: chain(LONG, SIZE, ROOT), CHUNK: CHUNKS}


def chunks(tokens=LONG, hashes=(7, 8, 9), parent=None, **more):
    return BlockStored([*hashes], parent, [*tokens], CHUNK, "CPU", **more)


def removed(*hashes):
    return BlockRemoved([*hashes], "CPU")


@pytest.mark.parametrize(
    ("events", "tokens"),
    [
        ([], None),
        ([stored()], None),
        ([chunks()], 18),
        ([chunks(LONG[:6], [7]), chunks(LONG[6:], [8, 9], 7)], 18),
        ([chunks(), chunks()], 18),  # repeated
        ([chunks(), chunks(), removed(9)], 12),
        ([chunks(), removed(9), removed(9)], 12),
        ([chunks(), removed(7)], 0),  # evicted in any order: the first is missing
        ([chunks(), removed(7), chunks(LONG[:6], [7])], 18),
        ([chunks(), removed(7, 8), chunks(LONG[6:12], [8], 7), chunks(LONG[:6], [7])], 18),
        ([chunks(LONG[6:], [8, 9], 7)], None),  # the event before was lost
        ([chunks(), removed(1, 2, 3), BlockRemoved([9])], 18),  # the engine's, with equal hashes
        ([chunks(), AllBlocksCleared()], 18),  # of the engine's cache
        ([chunks(), stored(hashes=(7, 8, 9)), removed(8)], 6),
        ([chunks(), BlockStored([5], None, [1, 2], 2, "CPU")], 18),  # a chunk of another size
        ([BlockStored([5], None, [1, 2], 6, "CPU")], None),
        ([chunks(extra_keys=[["salt"], None, None])], None),
        ([chunks(lora_name="one")], None),
        ([chunks(), BlockStored([1], None, [4] * 6, 6, "STORAGE")], 18),
    ],
)
def test_what_memory_holds(events, tokens):
    found = index(*events)
    assert found.in_memory("a", BOTH) == tokens
    assert found.in_memory("b", BOTH) is None


def test_blocks_and_chunks_are_looked_up_by_their_sizes():
    found = index(stored(), chunks())
    assert found.sizes == {SIZE, CHUNK}
    assert (found.in_engine("a", BOTH, 0), found.in_memory("a", BOTH)) == (12, 18)
    assert found.held("a") == (12, 18)
    # Another replica has other sizes.
    found.apply("b", 0, BlockStored([1], None, LONG[:9], 9))
    found.apply("b", 0, BlockStored([1], None, LONG[:16], 16, "CPU"))
    assert found.sizes == {SIZE, CHUNK, 9, 16}
    assert found.in_engine("b", BOTH | {9: chain(LONG, 9, ROOT)}, 0) == 9
    assert found.in_memory("b", BOTH) == 0
    assert found.in_memory("b", {16: chain(LONG, 16, ROOT)}) == 16
    # After a restart of a server, or a gap in its events, the index has nothing of it.
    found.forget_rank("a", 0)
    assert (found.in_engine("a", BOTH, 0), found.in_memory("a", BOTH)) == (0, None)


def test_memory_that_was_removed_is_bounded(monkeypatch):
    monkeypatch.setattr(kv_index, "MOST_REMOVED", 10)
    monkeypatch.setattr(kv_index, "MOST_BLOCKS", 50)
    found = index()
    for n in range(200):
        found.apply("a", 0, chunks([n] * 6, [n]))
        if n % 2:
            found.apply("a", 0, removed(n))
        memory = found._ranks["a"][0].memory
        assert len(memory._removed) <= 10
        assert len(memory._keys) <= 50


@pytest.mark.parametrize("inner", [None, "one@abc"])
@pytest.mark.parametrize("tenant", [None, "", "t"])
@pytest.mark.parametrize("salt", [None, "s"])
def test_seeds_are_as_the_engine_keeps_requests_apart(inner, tenant, salt):
    salted = digest(tenant, salt, inner)
    extra = [key for key in (inner, salted) if key] or None
    rest = [inner] if inner else None
    found = index(stored(extra_keys=[extra, rest, rest], lora_name=inner))
    for other in itertools.product((None, "one@abc"), (None, "", "t"), (None, "s")):
        same = other == (inner, tenant, salt)
        assert matched(found, chain(TOKENS, SIZE, request_seed(*other))) == (3 if same else 0)


def test_an_adapter_is_known_by_the_name_it_had_last():
    found = index(stored(lora_name="one@a@1"), stored(lora_name="one@a@2"), stored(lora_name="x"))
    assert found.inner("one@a") == "one@a@2"
    assert found.inner("x") == "x"
    assert found.inner("two") == "two"


def test_what_is_expected_counts_for_a_while():
    found = index(stored(TOKENS[:4], [1]))
    found.expect("a", {SIZE: KEYS}, 10.0)
    assert matched(found, now=11.9) == 3
    assert matched(found, now=12.0) == 1
    assert found.in_engine("b", {SIZE: KEYS}, 11.0) == 0
    found.expect("a", {SIZE: KEYS[:2]}, 11.0)
    assert matched(found, now=12.5) == 2
    found.expect("b", {SIZE: KEYS}, 11.0)
    found.expect("a", {SIZE: [1]}, 20.0)
    assert found._expected["a"].until.keys() == {1}
    found.forget("b")
    assert found.in_engine("b", {SIZE: KEYS}, 11.0) == 0


def test_ranks_have_caches_of_their_own():
    found = index(stored())
    found.apply("a", 1, stored(TOKENS[:4], [1]))
    found.apply("a", 0, AllBlocksCleared())
    assert matched(found) == 1
    found.forget_rank("a", 1)
    assert matched(found) == 0


def test_who_has_most_of_a_prompt_is_found_without_looking_at_all():
    found = KvIndex()
    for n in range(40):
        found.apply(f"r{n}", 0, stored(TOKENS[:4], [1]))
    found.apply("r7", 1, stored())
    found.apply("r9", 0, stored(TOKENS[:8], [1, 2]))
    deepest, half = found.holders({SIZE: KEYS})
    assert deepest == {"r7"}
    assert half == {f"r{n}" for n in range(40)}
    assert len(found._engines.holders) == 3  # a block is there once
    found.forget("r7")
    assert next(found.holders({SIZE: KEYS})) == {"r9"}
    # A new engine takes the slot of one that is gone, without its blocks.
    found.apply("new", 0, stored([1, 2, 3, 4], [5]))
    assert found.in_engine("new", {SIZE: KEYS}, 0) == 0
    for n in range(40):
        found.forget(f"r{n}")
    found.forget("new")
    assert not found._engines.holders
    assert [*found.holders({SIZE: KEYS})] == []


def test_a_forgotten_replica_leaves_nothing_behind():
    found = index(stored(), rank=3)
    found.followed.add("a")
    for key in (("a", 3), ("a", 4), ("b", 0)):
        found.positions[key] = kv_index.Position(1, 2)
    found.expect("a", {SIZE: [7]}, 0.0)
    found.forget("a")
    assert not found.follows("a")
    assert not found._ranks
    assert not found._expected
    assert found.positions == {("b", 0): kv_index.Position(1, 2)}
    found.forget("a")


def test_memory_has_an_end_even_where_blocks_are_told_of_again_and_again(monkeypatch):
    monkeypatch.setattr(kv_index, "MOST_BLOCKS", 100)
    monkeypatch.setattr(kv_index, "MOST_ADAPTERS", 10)
    found = index()
    for n in range(1000):
        found.apply("a", 0, stored(range(n, n + 4), [n], lora_name=f"{n}@1"))
        cache = found._ranks["a"][0].engine
        assert len(cache) <= 100
        assert len(found._engines.holders) <= 100
        assert len(found._inner) <= 10
    assert matched(found, chain(range(999, 1003), SIZE, ROOT)) == 1


@given(
    st.lists(
        st.one_of(
            st.lists(st.integers(0, 2), min_size=1, max_size=5),
            st.integers(0, 30),
            st.none(),
        ),
        max_size=40,
    )
)
def test_as_an_engine_does_it(steps):
    """A list is a request of this number of one-token blocks. A number evicts a block, counted from
    the oldest, if none follows it. None clears the cache.
    """
    found = KvIndex()
    blocks: Counter[tuple[int, ...]] = Counter()
    for step in steps:
        if isinstance(step, list):
            place = len(step) // 2 if blocks[tuple(step[: len(step) // 2])] else 0
            prefixes = [tuple(step[: end + 1]) for end in range(place, len(step))]
            parent = hash(tuple(step[:place])) if place else None
            hashes: list[int | bytes] = [hash(prefix) for prefix in prefixes]
            found.apply("a", 0, BlockStored(hashes, parent, step[place:], 1))
            blocks.update(prefixes)
        elif step is None:
            found.apply("a", 0, AllBlocksCleared())
            blocks.clear()
        else:
            leaves = [it for it in blocks if not any(o[:-1] == it for o in blocks)]
            for prefix in leaves[step : step + 1]:
                found.apply("a", 0, BlockRemoved([hash(prefix)]))
                blocks -= Counter([prefix])
        blocks = +blocks
        for prefix in [*blocks, (0, 1, 2), (2,)]:
            held = next((n for n in range(len(prefix)) if not blocks[prefix[: n + 1]]), len(prefix))
            assert found.in_engine("a", {1: chain(prefix, 1, ROOT)}, 0.0) == held
        blocks = +blocks
    rank = found._ranks.get("a", {}).get(0)
    cache = rank.engine if rank else None
    assert len(cache or ()) == len(blocks)
    assert sum(cache._more.values() if cache else ()) == sum(blocks.values()) - len(blocks)
