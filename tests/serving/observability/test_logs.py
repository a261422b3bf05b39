# SPDX-License-Identifier: Apache-2.0
"""What the log writes, and at which level."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

from serving.observability.logs import MAX_REPEATS, Handler, JsonFormatter

ROOT = Path(__file__).parents[3]


def test_a_line_that_comes_too_often_is_counted_and_told_once():
    written = io.StringIO()
    logger = logging.Logger("serving.test")
    handler = Handler(written, JsonFormatter())
    logger.addHandler(handler)
    for number in range(100):
        logger.error("the store %s is away", number)
        logger.error("%s", f"other {number // 25}")
    handler.report_repeats()
    handler.report_repeats()
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert len([line for line in lines if line["message"].startswith("the store")]) == MAX_REPEATS
    assert len([line for line in lines if line["message"].startswith("other")]) == 100
    (last,) = [line for line in lines if "suppressed" in line]
    assert (last["suppressed"], last["like"]) == (100 - MAX_REPEATS, "the store %s is away")


def test_signals_change_the_level_of_a_running_router(tmp_path):
    replicas = tmp_path / "replicas"
    replicas.write_text("http://127.0.0.1:9\n")
    with subprocess.Popen(
        [sys.executable, "-m", "serving", "route"],
        env={**os.environ, "OPTION_ROUTER_REPLICAS": f"file://{replicas}"}
        | {"OPTION_PORT": "18765"},
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr
        levels = []
        for line in process.stderr:
            message = json.loads(line)["message"]
            if message == "routing":
                process.send_signal(signal.SIGUSR1)
            if message.startswith("the log's level"):
                levels.append(message.split()[4])
                process.send_signal(signal.SIGUSR2 if len(levels) < 3 else signal.SIGTERM)
    assert levels == ["debug", "info", "warning"]
    assert process.returncode == 0
