# SPDX-License-Identifier: Apache-2.0
"""The facts that the router reads from a replica's /metrics."""

import functools
import json
import resource
import zlib

import pytest

from serving.router.fleet import health
from serving.router.fleet.facts import read
from serving.router.policy.replica_load import ADAPTERS
from serving.router.policy.tiers import DEFAULT_PRICES, Capacity
from tests.serving.router.conftest import FakeReplica, routing, whole
from tests.support.harness.wait import until_async

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


def test_tiers_of_the_supervisor_are_one_for_all_copies():
    found = read(ENGINE.encode(), (TIERS + "slipway_kv_chunk_tokens 256.0\n").encode())
    assert found.capacity == Capacity(engine=1_600, memory=3_200_000, pool="copies")
    assert found.chunk == 256
    assert read(ENGINE.encode(), b"slipway_copies 2.0\n").capacity == Capacity(engine=1_600)


def test_by_which_keys_its_caches_are_found():
    found = read(b'slipway_tenants_info{header="x-tenant"} 1.0\nslipway_kv_chunk_tokens 256.0\n')
    assert (found.tenant_header, found.chunk) == ("x-tenant", 256)
    assert read(b'slipway_tenants_info{header=""} 1.0\n').tenant_header == ""
    assert (read(b"").tenant_header, read(b"").chunk) == (None, 0)


def test_the_speed_and_the_fullness_of_its_engines():
    series = (
        'vllm:request_prefill_kv_computed_tokens_sum{engine="%d",model_name="m"} 1000.0\n'
        'vllm:request_prefill_time_seconds_sum{engine="%d",model_name="m"} 2.5\n'
        'vllm:kv_cache_usage_perc{engine="%d",model_name="m"} 0.%d\n'
    )
    found = read("".join(series % (n, n, n, n + 3) for n in range(2)).encode())
    assert (found.computed, found.kv_usage) == ((2000, 5), 0.4)
    assert (read(b"").computed, read(b"").kv_usage) == ((0, 0), None)


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


ENDLESS = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"


@functools.cache
def bomb() -> bytes:
    """300 MiB of blanks, compressed."""
    packer = zlib.compressobj(wbits=31)
    return b"".join(packer.compress(b" " * (1 << 20)) for _ in range(300)) + packer.flush()


@pytest.mark.parametrize("kind", ["without end", "compressed"])
@pytest.mark.parametrize("path", ["/ping", "/v1/models", "/metrics", "/adapters?name=a&src=b"])
@pytest.mark.anyio
async def test_answers_to_the_routers_own_questions_have_a_limit(path, kind):
    """The router closes the connection after a part of 400 MiB, and does not decompress a
    compressed answer.
    """
    packed = bomb()
    sent: list[int] = []  # MiB of each answer, when it is over

    class Hostile(FakeReplica):
        async def _answer(self, asked, reader, writer):
            if asked.target != path:
                await super()._answer(asked, reader, writer)
            elif kind == "compressed":
                writer.write(whole(200, packed, "content-encoding: gzip"))
                await writer.drain()
                sent.append(0)
            else:
                writer.write(ENDLESS)
                done = 0
                try:
                    while done < 400:
                        done += 1
                        writer.write(b" " * (1 << 20))
                        await writer.drain()
                finally:
                    sent.append(done)

    hostile = Hostile()
    await hostile.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        async with routing(1, wait=False, router_replicas=hostile.url) as it:
            if path.startswith("/adapters"):
                await it.ready(1)
                answer = await it.client.post(path)
                assert answer.status_code == (502 if kind == "without end" else 200)
            await until_async(lambda: bool(sent))
            assert (await it.client.get("/replicas")).status_code == 200
    finally:
        await hostile.stop()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150 * 1024
    assert sent[0] < 200


def test_what_a_replica_says_of_its_state_is_kept_to_a_sentence():
    long = json.dumps({"status": "starting", "detail": "a" * 100_000}).encode()
    assert health._read_ping(503, long)[1] == "a" * health.DETAIL
