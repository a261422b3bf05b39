# SPDX-License-Identifier: Apache-2.0
"""The report of `bench hits` on a server's answers, with a stand-in for the server."""

import httpx
import pytest

from tests.support.harness.process import Program
from tools.bench.hits import SUMS, Asked, Server, rows

TOOK = {"lookup": 0.01, "waited": 0.03, "prefill": 0.2, "computed": 100, "engine's": 0, "tiers'": 0}


@pytest.fixture
def server():
    return Server(Program("true"), 128, 10)


def counting(took):
    """A server whose counters grow by these figures with each question."""
    sums = dict.fromkeys(SUMS, 0.0)

    def answer(request):
        if request.url.path == "/metrics":
            lines = (f"{series} {sums[name]}" for name, series in SUMS.items())
            return httpx.Response(200, text="\n".join([*lines, ""]))
        for name, more in took.items():
            sums[name] += more
        return httpx.Response(200, text="data: {}\n\ndata: [DONE]\n\n")

    return httpx.Client(transport=httpx.MockTransport(answer), base_url="http://server")


@pytest.mark.parametrize(
    ("kind", "found", "fault"),
    [
        ("miss", {}, None),
        ("prefix", {"engine's": 1280}, None),
        ("l1", {"tiers'": 1280}, None),
        ("l1", {}, "document 3, l1: it came from nowhere"),
        ("l1", {"engine's": 1280}, "document 3, l1: it came from engine's"),
        ("miss", {"tiers'": 128}, "document 3, miss: it came from tiers'"),
    ],
)
def test_an_answer_that_did_not_come_from_there_is_a_fault(server, kind, found, fault):
    server._client = counting(TOOK | found)
    server.ask(kind, 3)
    (asked,) = server.asked
    assert asked.took == pytest.approx(TOOK | found)
    assert server.faults == ([f"chunks of 128: {fault}"] if fault else [])


def test_the_table_has_medians_and_what_they_are_made_of(server):
    server.asked = [
        Asked(kind, document, ttft, TOOK)
        for kind, ttft in {"miss": 2.0, "prefix": 0.25, "l1": 0.3, "disk": 0.4}.items()
        for document in range(3)
    ]
    found = {row[0]: row[1:] for row in rows(server)}
    assert [row[1] for row in found.values()] == ["8.00", "1.00", "1.20", "1.60"]
    assert found["l1"] == ["300", "1.20", "30.0", "10.0", "20.0", "200.0", "70.0", "100"]


@pytest.mark.parametrize(
    ("chunk", "transfer", "name"),
    [
        (None, "auto", "as planned"),
        (256, "auto", "chunks of 256"),
        (None, "lmcache_driven", "lmcache_driven"),
        (256, "lmcache_driven", "chunks of 256, lmcache_driven"),
    ],
)
def test_servers_are_told_apart(chunk, transfer, name):
    assert Server(Program("true"), chunk, 10, transfer).name == name
