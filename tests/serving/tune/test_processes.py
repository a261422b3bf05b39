# SPDX-License-Identifier: Apache-2.0
"""The errors of servers and loads that fail, run as separate processes."""

import os
import sys

import pytest

from serving.tune import load
from serving.tune.load import LoadError
from serving.tune.tuned_server import Server, StartError
from serving.tune.workload import Level
from tests.support.harness.process import AS_ENTRYPOINT_SH


def test_a_server_that_does_not_start_says_why(tmp_path):
    options = tmp_path / "1.yaml"
    options.write_text("max_model_len: abc\n")
    environ = {**os.environ, **AS_ENTRYPOINT_SH}
    with (
        Server(options, environ, tmp_path / "log") as server,
        pytest.raises(StartError, match=r"1\.yaml: max_model_len = 'abc': should be a number"),
    ):
        server.ready()
    assert server.ended()


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("import sys; sys.exit(3)", "tokenizer t: exit code 3"),
        ("raise OSError('Bearer abcdef is refused')", r"OSError: Bearer \[secret\] is refused"),
    ],
)
def test_a_load_without_a_result_says_why(tmp_path, program, told):
    words = [sys.executable, "-c", program, "--tokenizer", "t"]
    files = {"result": tmp_path / "r.json", "log": tmp_path / "log"}
    files["log"].write_text("ValueError: an earlier one\n")
    with pytest.raises(LoadError, match=told):
        load.run(words, Level(1, None), key=None, **files)


def test_a_load_knows_its_key_and_leaves_no_answers(tmp_path):
    file = tmp_path / "r.json"
    program = (
        "import json, os, sys; figures = dict.fromkeys(sys.argv[3:], 1); "
        "figures['completed'] = len(os.environ['OPENAI_API_KEY']); figures['failed'] = 0; "
        f"json.dump(figures, open({str(file)!r}, 'w'))"
    )
    names = ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms", "output_throughput")
    words = [sys.executable, "-c", program, "--tokenizer", "t", *names, "request_goodput"]
    found = load.run(words, Level(2, None), result=file, log=tmp_path / "log", key="12345")
    assert (found.level, found.requests) == ("2 users", 5)
    assert not file.exists()
