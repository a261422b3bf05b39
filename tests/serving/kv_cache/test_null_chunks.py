# SPDX-License-Identifier: Apache-2.0
"""The cache server's own rule for chunks with null blocks, and LMCache's, which it replaces."""

from types import SimpleNamespace

from lmcache.v1.multiprocess.modules import lmcache_driven_transfer as lmcache

from serving.kv_cache.patches import null_chunks

GROUPS = [SimpleNamespace(kernel_group_indices=[0, 1]), SimpleNamespace(kernel_group_indices=[2])]


def test_a_chunk_that_is_null_in_part_is_not_stored():
    blocks = [[5, 6, 7, 8], [1, 2, 0, 4], [0, 0]]
    asked = blocks, GROUPS, [2, 2, 1], 2
    assert null_chunks.null_chunk_masks(*asked) == [[False, True], [True, True]]
    assert lmcache.all_null_chunk_masks(*asked) == [[False, False], [True, True]]


def test_the_null_block_is_the_one_that_is_named():
    asked = [[5, 0]], [SimpleNamespace(kernel_group_indices=[0])], [1], 2
    assert null_chunks.null_chunk_masks(*asked, 5) == [[True, False]]


def test_it_replaces_lmcaches_rule(monkeypatch):
    monkeypatch.setattr(lmcache, "all_null_chunk_masks", lmcache.all_null_chunk_masks)
    null_chunks.PATCH.apply()
    assert lmcache.all_null_chunk_masks is null_chunks.null_chunk_masks
