# SPDX-License-Identifier: Apache-2.0
"""vLLM's CUDA build on machines whose GPUs are stand-ins: `scripts/test rehearsal`."""

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tools.rehearsal import shapes, stand_ins
from tools.rehearsal.cases import Gpus

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("SLIPWAY_REHEARSAL")  # of the environment with requirements/gpu.txt


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write what vLLM says to recorded.jsonl")


@pytest.fixture(scope="session", autouse=True)
def _needs_the_cuda_build() -> None:
    if not PYTHON:
        pytest.skip("there is no CUDA build of vLLM; scripts/test rehearsal installs one")


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the stand-ins."""
    folder = tmp_path_factory.mktemp("libraries")
    stand_ins.build(folder)
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    shapes.make(folder)
    return folder


def environment(libraries: Path, gpus: Gpus | None) -> dict[str, str]:
    """Variables of a process on a machine with these GPUs; None for no driver."""
    assert PYTHON
    found = {
        "HOME": os.environ["HOME"],
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(Path(PYTHON).parents[1] / "cache"),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    if gpus:
        found |= {"LD_LIBRARY_PATH": str(libraries), stand_ins.GPUS: gpus.variable}
    return found


def ask(libraries: Path, gpus: Gpus, questions: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let one process check all of them: the import takes most of the time."""
    lines = "".join(json.dumps(question) + "\n" for question in questions)
    assert PYTHON
    ended = subprocess.run(
        [PYTHON, "-P", str(ROOT / "tools" / "rehearsal" / "judge.py")],
        env=environment(libraries, gpus),
        input=lines,
        capture_output=True,
        text=True,
    )
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(answers) == lines.count("\n"), ended.stderr[-4000:]
    return answers
