# SPDX-License-Identifier: Apache-2.0
"""Compares a plan's figure for a request's share of the engine's KV cache with vLLM's own sums."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.kv_cache_utils import (
    _estimate_max_model_len_from_groups,
    _max_memory_usage_bytes_from_groups,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from lmi_config.facts.kv import KvShape
from lmi_config.options.settings import read
from lmi_config.plan.devices.parallelism import Parallelism
from lmi_config.plan.memory import kv_of_request
from serving.engine.kv_connector import FaultTolerantConnector
from tests.lmi_config.examples import machine, model

BLOCK = 16
IN_FLIGHT = 2 * 2048

GEMMA3_4B = (5, 29, 1024, 4, 256)
GPT_OSS_20B = (12, 12, 128, 8, 64)
MISTRAL_V01 = (0, 32, 4096, 8, 128)
LLAMA_8B = (32, 0, 0, 8, 128)
MODELS = [GEMMA3_4B, GPT_OSS_20B, MISTRAL_V01, LLAMA_8B]
"""Layers without and with a window, the window's length, the KV heads and their size."""


def vllms(full, windowed, window, heads, size):
    shape = {"block_size": BLOCK, "num_kv_heads": heads, "head_size": size, "dtype": torch.bfloat16}
    specs = [FullAttentionSpec(**shape)] * full
    specs += [SlidingWindowSpec(**shape, sliding_window=window)] * windowed
    return get_kv_cache_groups(config(1), {str(number): it for number, it in enumerate(specs)})


def config(length):
    found = VllmConfig()
    found.model_config = SimpleNamespace(max_model_len=length, use_mla=False)
    found.cache_config.kv_cache_layout = "NHD"
    found.scheduler_config.max_num_batched_tokens = IN_FLIGHT
    return found


def ours(full, windowed, window, heads, size):
    each = 2 * heads * size
    return KvShape(heads=heads, full=full * each, windowed=windowed * each, window=window)


@pytest.mark.parametrize("layers", MODELS)
@pytest.mark.parametrize("length", [1, 100, 5000, 32_768, 131_072])
def test_a_request_takes_what_vllm_sets_aside(layers, length):
    # vLLM rounds up to blocks, and adds one if a window begins within a block.
    groups = vllms(*layers)
    rounding = 2 * sum(
        len(groups[0].layer_names) * it.kv_cache_spec.page_size_bytes for it in groups
    )
    taken = ours(*layers).bytes_per_request(length, IN_FLIGHT, "auto", "bfloat16")
    assert taken <= _max_memory_usage_bytes_from_groups(config(length), groups) <= taken + rounding


@pytest.mark.parametrize("layers", MODELS)
def test_the_longest_request_that_fits_is_vllms(layers):
    groups = vllms(*layers)
    room = _max_memory_usage_bytes_from_groups(config(50_000), groups)
    fits = _estimate_max_model_len_from_groups(config(100_000), groups, room)
    kv = ours(*layers)
    assert kv.bytes_per_request(fits, IN_FLIGHT, "auto", "bfloat16") <= room
    if kv.full:
        more = fits + 2 * BLOCK * (kv.full + kv.windowed) // kv.full
        assert kv.bytes_per_request(more, IN_FLIGHT, "auto", "bfloat16") > room


def test_windows_are_kept_with_our_connector():
    assert supports_hma(FaultTolerantConnector)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_step_without_a_gpu_has_vllms_number_of_tokens(workers):
    tokens, _ = EngineArgs.get_batch_defaults(world_size=workers)
    kv = KvShape(heads=1, full=0, windowed=1, window=1)
    taken = kv_of_request(
        read({}), machine(), Parallelism(tensor=workers), model(), kv, 10**6
    )  # 2 bytes for each token of two steps
    assert taken == 2 * 2 * tokens[UsageContext.OPENAI_API_SERVER]
