# SPDX-License-Identifier: Apache-2.0
"""What is read of a replica's /metrics."""

import pytest

from serving.router.fleet.facts import read
from serving.router.policy.policies import ADAPTERS
from serving.router.policy.tiers import DEFAULT_PRICES, Capacity

ENGINE = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
TIERS = (
    'slipway_kv_tier_capacity_tokens{tier="l1"} 3.2e+06\n'
    'slipway_kv_tier_capacity_tokens{tier="disk"} 0.0\n'
)
STORE = 'slipway_kv_shared_store_info{store="ab12"} 1.0\n'
SPEEDS = (
    'slipway_kv_tier_load_seconds_per_token{tier="disk"} 2e-05\n'
    'slipway_kv_tier_load_seconds_per_token{tier="shared"} 8e-05\n'
)
PREFILL = "slipway_prefill_seconds_per_token 4e-05\n"


@pytest.mark.parametrize(
    ("metrics", "capacity"),
    [
        ("", Capacity()),
        (ENGINE, Capacity(engine=1_600)),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n', Capacity()),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="0"} 1.0\n', Capacity()),
        (ENGINE + TIERS, Capacity(engine=1_600, memory=3_200_000)),
        (ENGINE + STORE, Capacity(engine=1_600, store="ab12")),
        (
            STORE + 'slipway_kv_tier_capacity_tokens{tier="shared"} 9\n',
            Capacity(shared=9, store="ab12"),
        ),
        ('slipway_kv_tier_capacity_tokens{tier="l1"} NaN\n', Capacity()),
        ('slipway_kv_tier_capacity_tokens{tier="l1"} +Inf\n', Capacity()),
        ('slipway_kv_tier_capacity_tokens{tier="l1"} -5\n', Capacity()),
        ('slipway_kv_tier_capacity_tokens{tier="l1"} many\n', Capacity()),
    ],
)
def test_sizes(metrics, capacity):
    assert read(metrics.encode()).capacity == capacity


@pytest.mark.parametrize(
    ("metrics", "disk", "shared"),
    [
        ("", *DEFAULT_PRICES[1:]),
        (SPEEDS, *DEFAULT_PRICES[1:]),
        (PREFILL, *DEFAULT_PRICES[1:]),
        (SPEEDS + PREFILL, 0.5, 2.0),
        (SPEEDS.replace("2e-05", "0") + PREFILL, DEFAULT_PRICES.disk, 2.0),
        (SPEEDS + PREFILL.replace("4e-05", "0"), *DEFAULT_PRICES[1:]),
    ],
)
def test_prices_are_measured_or_assumed(metrics, disk, shared):
    prices = read(metrics.encode()).prices
    assert prices == pytest.approx((DEFAULT_PRICES.memory, disk, shared))


def test_by_which_keys_its_caches_are_found():
    found = read(b'slipway_tenants_info{header="x-tenant"} 1.0\nslipway_kv_chunk_tokens 256.0\n')
    assert (found.tenant_header, found.chunk) == ("x-tenant", 256)
    assert read(b'slipway_tenants_info{header=""} 1.0\n').tenant_header == ""
    assert (read(b"").tenant_header, read(b"").chunk) == (None, 0)


def test_its_role():
    assert read(b'slipway_role_info{role="prefill"} 1.0\n').role == "prefill"
    for other in (b"", b'slipway_role_info{role="boss"} 1.0\n'):
        assert read(other).role == "both"


def test_whose_kv_it_fetches():
    assert read(b'slipway_kv_transfer_info{kv="ab12"} 1.0\n').transfer == "ab12"
    for other in (b"", b"slipway_kv_transfer_info 1.0\n"):
        assert read(other).transfer == ""


def test_when_it_started():
    assert read(b"process_start_time_seconds 1.5e9\n").born == b"1.5e9"
    assert read(b"").born is None


@pytest.mark.parametrize(
    ("metrics", "slots"),
    [("", ADAPTERS), ("slipway_adapter_slots 4.0\n", 4), ("slipway_adapter_slots 0\n", ADAPTERS)],
)
def test_room_for_adapters(metrics, slots):
    assert read(metrics.encode()).adapter_slots == slots
