# SPDX-License-Identifier: Apache-2.0
"""A model's fingerprint: what makes another model of it."""

from serving.kv_cache.identity import fingerprint, store_name
from tests.serving.sources.test_digests import SIZE, model

CHUNK = 128


def test_one_byte_of_the_weights_makes_another_model(tmp_path):
    same = [model(tmp_path / name) for name in ("a", "b")]
    others = [model(tmp_path / str(place), place) for place in (0, SIZE // 2 + 5000, SIZE - 1)]
    found = [fingerprint(it, {}, CHUNK) for it in (*same, *others)]
    assert found[0] == found[1]
    assert len({*found}) == 4


def test_options_that_shape_the_cache_make_another_model(tmp_path):
    folder = model(tmp_path / "a")
    options = {"dtype": "float16"}, {"dtype": "float32"}, {"seed": 1}, {"seed": 2}
    half, whole, *seeds = (fingerprint(folder, it, CHUNK) for it in options)
    assert half != whole
    assert seeds[0] == seeds[1]


def test_chunks_of_another_size_are_another_models(tmp_path):
    folder = model(tmp_path / "a")
    assert fingerprint(folder, {}, 128) != fingerprint(folder, {}, 256)


def test_servers_share_a_store_only_with_the_same_model_and_chunks(tmp_path):
    """By this name the router knows whose KV a replica finds in its shared store."""
    same, other = model(tmp_path / "a"), model(tmp_path / "b", 0)
    here, there = {"host": "10.0.0.5", "port": 6379}, {"host": "10.0.0.6", "port": 6379}
    fleet = [(here, same, 128), (here, other, 128), (here, same, 256), (there, same, 128)]
    names = [store_name(place, fingerprint(it, {}, size)) for place, it, size in fleet]
    assert len({*names}) == 4
    again = store_name(dict(reversed(here.items())), fingerprint(model(tmp_path / "c"), {}, 128))
    assert again == names[0]
