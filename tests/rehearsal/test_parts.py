# SPDX-License-Identifier: Apache-2.0
"""Slipway's own parts in vLLM's CUDA build."""

import pytest

from tests.rehearsal.conftest import ask
from tools.rehearsal.cases import MACHINES

PARTS = (
    "serving.engine.error_handlers",
    "serving.engine.kv_connector",
    "serving.engine.calls",
    "serving.engine.texts.streams",
    "serving.engine.texts.chats",
    "serving.engine.texts.completions",
    "serving.engine.patches.outputs.processor",
    "serving.engine.vllm_errors",
    "serving.kv_cache.lmcache.__main__",
    "serving.kv_cache.lmcache.disk_store",
    "serving.kv_cache.lmcache.shared_store",
    "serving.kv_cache.lmcache.tiered_storage",
)
"""Slipway's modules that vLLM and LMCache load, or that Slipway puts into them."""


@pytest.mark.timeout(1200)
def test_what_vllm_and_lmcache_load_of_ours_can_be_imported(libraries):
    (answer,) = ask(libraries, MACHINES["8xH100"], [{"imports": PARTS}])
    assert answer == {"platform": "NvmlCudaPlatform", "failed": {}}
