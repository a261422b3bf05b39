# SPDX-License-Identifier: Apache-2.0
"""SageMaker's life of an endpoint on the real engine, and SageMaker's contract, rule by rule."""

import json
import subprocess
import sys

import pytest

from examples.sagemaker import make_adapters
from scripts.models import tiny_lora
from scripts.sagemaker_local.server import running
from tests.e2e.conftest import ROOT, START_S, serving


@pytest.fixture
def s3(tmp_path):
    """A folder that stands for S3, with three adapters."""
    make_adapters.make(tmp_path / "bucket")
    return tmp_path


def test_the_example_in_the_documentation(tiny_options, s3, monkeypatch):
    monkeypatch.setenv("SLIPWAY_PYTHON", sys.executable)
    limits = {"accept_s": 5, "ping_s": 10, "startup_s": START_S}  # the machine may be busy
    with running(s3=s3, **limits) as url:
        ended = subprocess.run(
            [
                *(sys.executable, ROOT / "examples" / "sagemaker" / "endpoint.py"),
                *(url, f"process:{ROOT / 'entrypoint.sh'}"),
                *(f"s3://bucket/{name}.tar.gz" for name in ("one", "two", "three")),
                *(f"{name}={value}" for name, value in tiny_options.items()),
            ],
            capture_output=True,
            text=True,
            timeout=START_S + 120,
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    steps = [line.partition(":")[0] for line in ended.stdout.splitlines()]
    assert steps == ["created", "invoked", "streamed", "session", "updated", "deleted"]


def test_every_rule_of_the_contract_is_kept(tiny_options, tmp_path):
    environ = {
        **tiny_options,
        "OPTION_ENABLE_LORA": "true",
        "OPTION_ADAPTER_ROOTS": str(tmp_path / "adapters"),
    }
    adapter = tiny_lora.write(tmp_path / "adapters" / "one", 1)
    with serving(tmp_path / "log", **environ) as served:
        served.ready()
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "scripts.sagemaker_local", "check", served.url),
                *(f"--adapter={adapter}", f"--pid={served.process.pid}", "--json"),
            ],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert served.process.wait(10) == 0
    sheet = json.loads(ended.stdout)
    assert [it for it in sheet if it["verdict"] != "pass"] == []
    assert len(sheet) == 34
    assert ended.returncode == 0
