# SPDX-License-Identifier: Apache-2.0
"""The requests and the report of `bench long_documents --sweep`, without a server."""

import sys

import pytest

from tools.bench import long_documents
from tools.bench.long_documents import Hits, Round, parsed, swept


def answered(ttft, tokens):
    return Round(requests=2, ttfts=[ttft, ttft], seconds=1.0, tokens=tokens, faults=[])


def test_a_row_has_both_engines_and_where_their_prompts_came_from():
    alone = [(answered(0.1, 500), Hits(450, 0, 0)), (answered(0.8, 2000), Hits(0, 0, 0))]
    with_l1 = [(answered(0.1, 500), Hits(450, 0, 0)), (answered(0.2, 2000), Hits(100, 1800, 0))]
    assert [*swept([0.5, 2.0], 1000, alone, with_l1)] == [
        ["0.5", "0.50", "0.100", "0.100", "1.00", "90%", "90%", "0%"],
        ["2", "2.00", "0.800", "0.200", "4.00", "0%", "5%", "90%"],
    ]


def options(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["long_documents", *words])
    return parsed()


def test_it_asks_about_half_to_four_times_as_many_documents_as_fit(monkeypatch):
    assert options(monkeypatch, "--sweep").sweep == long_documents.SWEEP == (0.5, 1.0, 2.0, 4.0)
    assert options(monkeypatch, "--sweep", "1", "3").sweep == [1.0, 3.0]
    assert options(monkeypatch).sweep is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--sweep", "0.1"], "--sweep 0.1: of --documents 8 that is none"),
        (["--sweep", "0"], "invalid positive value: '0'"),
        (["--unique", "--arms", "none", "slow"], "--unique: not with --repeat, and not with"),
        (["--unique", "--arms", "l1", "--repeat", "2"], "--unique: not with --repeat, and not"),
    ],
)
def test_bad_arguments(monkeypatch, capsys, words, told):
    with pytest.raises(SystemExit):
        options(monkeypatch, *words)
    assert told in capsys.readouterr().err
