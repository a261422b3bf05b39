# SPDX-License-Identifier: Apache-2.0
"""The sessions of agents' bench, and its output."""

import sys

import pytest

from tools.bench.agents import __main__ as bench
from tools.bench.agents import documents
from tools.bench.agents.sessions import CHUNK, PUBLISHED, Maker, figures, ideal, read, write


def test_sessions_have_the_published_medians():
    found = figures(Maker(1, 20).sessions(300), 20)
    for name, published in PUBLISHED.items():
        assert found[name] == pytest.approx(published, rel=0.1), name
    assert found["with sub-agents"] == pytest.approx(0.44, abs=0.06)


def test_sessions_are_those_of_their_seed_and_are_read_as_they_were_written(tmp_path):
    made, again = Maker(7, 20).sessions(4), Maker(7, 20).sessions(4)
    assert write(made, tmp_path / "a", 20) == write(again, tmp_path / "b", 20)
    found = read(tmp_path / "a", 20)
    assert ideal(found) == ideal(made)
    for one, other in zip(found, made, strict=True):
        assert one.name == other.name
        for turn, own in zip(one.turns, other.turns, strict=True):
            assert (turn.tokens // CHUNK, turn.chain) == (own.tokens // CHUNK, own.chain)
            assert turn.ends == own.ends
    assert any(turn.agent for it in found for turn in it.turns)


def test_every_arm_has_a_row(capsys, monkeypatch):
    given = ["--sessions", "4", "--live", "2", "--sizes", "1", "--one-shots", "0", "2"]
    monkeypatch.setattr(sys, "argv", ["agents", *given])
    with pytest.raises(SystemExit):  # the exit code shows whether the gates hold
        bench.main()
    printed = capsys.readouterr().out
    rows = [it for it in printed.splitlines() if it.startswith(("| 0 | 1 |", "| 2 | 1 |"))]
    assert len(rows) == 2 * len(bench.STRATEGIES) + 2
    assert "hints at 2, 1:" in printed


# The order of documents


def test_a_cache_has_beginnings_only_and_forgets_ends_first():
    cache = documents.Cache([1, 2, 4, 8], room=15)
    assert [cache.computed(it) for it in ([0, 1, 2], [0, 1, 3], [1, 0], [3])] == [7, 8, 3, 8]
    assert cache.computed([0, 1, 3]) == 8
    endless = documents.Cache([1, 2, 4, 8], room=None)
    assert [endless.computed(it) for it in ([0, 1, 2], [0, 1, 3], [0, 1, 2])] == [7, 8, 0]


def test_every_scenario_has_a_row_and_together_canonical_computes_each_set_once(capsys):
    documents.main(60)
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == len(documents.SCENARIOS)
    together = documents.Scenario(5, 200, kind="together")
    given, canonical, popular = documents.shares(together, 0, 400)
    assert canonical == popular < 0.5 * given
    growing = documents.Scenario(3, 200, kind="more each turn")
    given, canonical, _ = documents.shares(growing, 0, 400)
    assert given < canonical
