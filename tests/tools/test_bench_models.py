# SPDX-License-Identifier: Apache-2.0
"""`bench models`: its verdict on a container's log and its answers, and a short run with the tests'
engine.
"""

import json
import shutil
import sys

import pytest

from tests.support.harness.process import ROOT
from tests.support.models import tiny
from tools.bench.models import __main__ as bench
from tools.bench.models.verdict import Asked, longest_wait, row, unanswered, unfair, ups


def log(*states):
    """A container's log, with (second, model, state) in order."""
    lines = [
        json.dumps(
            {
                "time": f"2026-11-28T00:{at // 60:02}:{at % 60:02}.000Z",
                "message": "model",
                "model": model,
                "state": state,
            }
        )
        for at, model, state in states
    ]
    return "\n".join(["no JSON", *lines, '{"message":"request"}'])


A_UP = ((0, "a", "starting"), (10, "a", "ready"))
B_UP = ((22, "b", "starting"), (33, "b", "ready"))


def test_starts_of_a_log():
    first, second = ups(log(*A_UP, (20, "a", "stopping"), (22, "a", "cold"), *B_UP))
    assert (first.model, first.start_s) == ("a", 10)
    assert first.ready is not None
    assert first.stopping == first.ready + 10
    assert (second.model, second.start_s, second.stopping) == ("b", 11, None)


def test_a_wait_is_bounded_by_the_rule_of_swaps():
    found = ups(log(*A_UP, (20, "a", "stopping"), (22, "a", "cold"), *B_UP))
    assert longest_wait(found) == 30 + 2 * 13
    slow = ups(log((0, "a", "starting"), (40, "a", "ready")))
    assert longest_wait(slow) == 80 + 2 * 40
    assert longest_wait([]) == 30


@pytest.mark.parametrize(
    ("stopped", "held", "told"),
    [
        (20, 56, []),
        (15, 20, ["a started for 10.0 s and made room after 5.0 s"]),
        (20, 60, ["a request for a waited 60.0 s, beyond 56.0 s"]),
    ],
)
def test_what_is_unfair(stopped, held, told):
    found = ups(log(*A_UP, (stopped, "a", "stopping"), *B_UP))
    assert [*unfair([Asked("a", 200, "a", held)], found)] == told


def test_a_model_that_dies_does_not_make_room():
    assert [*unfair([], ups(log(*A_UP, (11, "a", "cold"), *B_UP)))] == []


def test_requests_without_their_models_answer():
    asked = [Asked("a", 200, "a", 0), Asked("a", 200, "b", 0), Asked("b", 503, "", 1)]
    assert [*unanswered(asked)] == [
        "a request for a got 200 of b",
        "a request for b got 503 of no model",
    ]


def test_a_row_of_the_table():
    asked = [*(Asked("a", 200, "a", 0.0) for _ in range(3)), Asked("b", 503, "", 4.0)]
    assert row("in turn", asked, ups(log(*A_UP))) == (
        "| in turn | 4 | 1 | 1 | 1 | 0.0 | 4.0 | 4.0 | 50.0 |"
    )


@pytest.fixture
def short(tmp_path, monkeypatch):
    """A folder with the models, for runs with the tests' engine."""
    monkeypatch.setattr(bench, "SERVE", (sys.executable, "-m", "tests.serving.models.parts"))
    monkeypatch.setattr(bench, "PAUSE_S", 0.1)
    monkeypatch.setattr(bench, "LOADS", 1)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in bench.NAMES:
        shutil.copytree(tiny.make(), tmp_path / name)
    return tmp_path


def test_models_that_take_turns(short, capsys):
    assert bench.taking_turns(short, users=2, seconds=2) == []
    told = capsys.readouterr().out
    assert "| in turn |" in told
    assert "| skewed |" in told
    assert "exit code 0" in told


def test_models_by_calls(short, capsys):
    assert bench.by_calls(short) == []
    assert capsys.readouterr().out.count("after DELETE") == 2
