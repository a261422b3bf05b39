# SPDX-License-Identifier: Apache-2.0
"""The supervisor's questions to its copies: their readiness, and the work of their engines."""

import pytest

from lmi_config.options.declared import Settings
from serving.copies import looks
from serving.copies.looks import Looks
from tests.serving.access.test_access import SECRET
from tests.serving.router.conftest import FakeReplica, sends, whole

pytestmark = pytest.mark.anyio

SERIES = (
    'vllm:request_prefill_kv_computed_tokens_count{engine="0"} %d\n'
    'vllm:request_prefill_kv_computed_tokens_count{engine="1"} 1.0\n'
    'vllm:prefix_cache_hits_total{engine="0"} 7.0\n'
)


@pytest.fixture
async def copies():
    found = [FakeReplica(), FakeReplica()]
    for number, it in enumerate(found):
        it.secret, it.called = SECRET, f"copy {number}"
        await it.start()
    yield found
    for it in found:
        await it.stop()


@pytest.fixture
def asking(copies):
    urls = {number: it.url for number, it in enumerate(copies)}
    found = Looks(urls, Settings(router_secret=SECRET, router_replicas=",".join(urls.values())))
    yield found
    found.close()


def reports(count):
    return sends(whole(200, (SERIES % count).encode()))


async def test_who_is_ready(copies, asking):
    copies[1].ping = 503, {"status": "starting"}
    await asking.look(counts=False)
    assert [*asking.ready] == [0]
    copies[1].ping = 200, {"status": "ready"}
    await copies[0].stop()
    await asking.look(counts=False)
    assert [*asking.ready] == [1]


async def test_a_copys_connection_is_kept(copies, asking):
    for _ in range(5):
        await asking.look(counts=False)
    assert [(it.pings, len(it.connections)) for it in copies] == [(5, 1)] * 2


async def test_the_work_of_all_engines_is_added_up(copies, asking, monkeypatch):
    monkeypatch.setattr(looks, "COUNTS_S", -1)
    for count, it in enumerate(copies):
        it.answer = reports(10 + count)
    await asking.look(counts=False)
    assert asking.prefilled()[0] == 0
    assert not any(it.asked for it in copies)
    await asking.look(counts=True)
    assert asking.prefilled()[0] == 10 + 11 + 2
    assert asking.hits()[0] == 14
    # A copy that starts again counts from 0, and what it had computed before stays counted.
    asking.gone(1)
    copies[1].answer = reports(4)
    await asking.look(counts=True)
    assert asking.prefilled()[0] == 10 + 11 + 2 + 4 + 1
    # Only these series are asked for: to write all of them takes a copy a while.
    asked = copies[0].asked[0]
    assert asked.target.startswith("/metrics?name%5B%5D=vllm%3A")
    assert asked.caller(SECRET).paths == ("/metrics",)
