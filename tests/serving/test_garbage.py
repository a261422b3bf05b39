# SPDX-License-Identifier: Apache-2.0
"""Requests leave no cycles of objects. A server would keep their memory until a full collection,
which is rare because it costs time.
"""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.harness.process import Program

ROOT = Path(__file__).parents[2]


def left(*words):
    command = [sys.executable, "-m", "tests.serving.garbage", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    return json.loads(ended.stdout.splitlines()[-1])


def test_requests_to_a_server_leave_no_garbage():
    assert left("serve") == {}


def test_requests_to_a_router_leave_no_garbage():
    with Program(sys.executable, "-m", "tests.support.harness.stub_replica", "{port}") as replica:
        replica.ready()
        assert left("route", replica.url) == {}
