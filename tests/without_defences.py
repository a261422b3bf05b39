# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that runs each test without the defence that it tests.

Each test runs in a separate process (a fork), so that no patch remains. The outcomes go to the file
OUTCOMES: threat → whether a test of it failed, which is right.
"""

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.defences import DEFENCES, Removed

LIMIT_S = 40.0
MEMORY = 8 * 1024**3  # bytes; the removed defence may be the one that bounds memory


def outcomes(file: Path) -> dict[str, bool]:
    """For each threat, whether its test fails without the defence."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.without_defences", "-p", "no:xdist"]
    ended = subprocess.run(
        [*command, *sorted({it.test for it in DEFENCES.values()})],
        env={**os.environ, "OUTCOMES": str(file)},
        capture_output=True,
        text=True,
    )
    assert file.exists(), ended.stdout + ended.stderr
    found: dict[str, bool] = json.loads(file.read_text())
    return found


def pytest_runtestloop(session: pytest.Session) -> bool:
    failed = dict.fromkeys(DEFENCES, False)
    for item in session.items:
        for threat, removed in DEFENCES.items():
            # One example of a parametrised test is enough. A row may name it.
            named = removed.test in (item.nodeid, item.nodeid.partition("[")[0])
            if named and not failed[threat]:
                failed[threat] = _fails(item, removed)
    Path(os.environ["OUTCOMES"]).write_text(json.dumps(failed))
    return True


def _fails(item: pytest.Item, removed: Removed) -> bool:
    """Whether a test fails, or does not end, in a process without its defence."""
    sys.stdout.flush()
    if child := os.fork():
        timer = threading.Timer(LIMIT_S, os.kill, (child, signal.SIGKILL))
        timer.start()
        _, status = os.waitpid(child, 0)
        timer.cancel()
        return status != 0
    failed = False
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        for place, replacement in removed.patches.items():
            _replace(place, replacement)
        reports = runtestprotocol(item, nextitem=None, log=False)
        failed = any(it.failed for it in reports)
    finally:  # an error before the test does not count as its failure
        sys.stdout.flush()
        os._exit(failed)


def _replace(place: str, replacement: Any) -> None:
    """place: `module:name.of.it`, which must exist; or with a [key] at the end."""
    module, _, path = place.partition(":")
    path, _, key = path.partition("[")
    it: Any = importlib.import_module(module)
    *before, last = path.split(".")
    for part in before:
        it = getattr(it, part)
    current = getattr(it, last)
    if key:
        current[key.rstrip("]")] = replacement
    else:
        setattr(it, last, replacement)
