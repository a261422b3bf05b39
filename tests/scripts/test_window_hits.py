# SPDX-License-Identifier: Apache-2.0
"""What `python -m tests.e2e.window_hits` says of two engines' hits, without an engine."""

from tests.e2e.window_hits import rows


def case(hits, wrong=0):
    return {"window": 128, "windows": 4, "length": 512, "case": "restart"} | {
        "hits": hits,
        "wrong": wrong,
    }


def test_what_is_lost_with_the_manager_on():
    assert [*rows([case(2048), case(2000)], [case(512, 1), case(2000)])] == [
        ["128", "4 windows", "restart", "2,048", "2,048", "512", "75%", "1"],
        ["128", "4 windows", "restart", "2,048", "2,000", "2,000", "0%", "0"],
        ["", "", "all", "4,096", "4,048", "2,512", "38%", "1"],
    ]


def test_no_hits_at_all():
    first, _ = rows([case(0)], [case(0)])
    assert first[-2] == "-"
