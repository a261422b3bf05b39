# SPDX-License-Identifier: Apache-2.0
"""The phases of loading, recognised by vLLM's own log lines."""

import logging
from importlib.util import find_spec
from pathlib import Path

import pytest

from serving.server import start_phases
from tests import composed


def line(message, name="vllm.v1.worker.gpu_model_runner"):
    start_phases.notice(logging.makeLogRecord({"name": name, "msg": message}))


@pytest.fixture(autouse=True)
def nothing_found():
    start_phases._found.clear()


def test_the_slowest_rank_of_each_phase_counts():
    for seconds in ("12.000000", "14.500000", "13.000000"):
        line(f"Model loading took 3.41 GiB memory and {seconds} seconds")
    line("torch.compile took 20.25 s in total")
    line("Initial profiling/warmup run took 5.00 s")
    line("Graph capturing finished in 7 secs, took 0.50 GiB")
    assert start_phases.report(50.0) == {
        "weights": 14.5,
        "compile": 20.25,
        "profile": 5.0,
        "graphs": 7.0,
        "rest": pytest.approx(3.25),
    }


def test_lines_of_others_and_of_no_phase_do_not_count():
    line("torch.compile took 20.25 s in total", name="output")
    line("torch.compile took long")
    assert start_phases.report(3.0) == {"rest": 3.0}


@pytest.mark.parametrize("phase", start_phases.PATTERNS)
def test_vllm_has_the_line(phase):
    """The source is read, not imported."""
    found = find_spec("vllm")
    assert found
    assert found.origin
    folder = Path(found.origin).parent
    text, _ = start_phases.PATTERNS[phase]
    files = [folder / "compilation/monitor.py", *(folder / "v1/worker").rglob("*model_runner.py")]
    assert any(text in file.read_text() for file in files)


def test_the_reference_names_each_phase():
    table = (composed.ROOT / "docs/reference/metrics.md").read_text()
    (row,) = [it for it in table.splitlines() if "slipway_start_loading_seconds" in it]
    assert all(f"`{phase}`" in row for phase in (*start_phases.PATTERNS, start_phases.REST))
