"""`scripts/route`, where Python and the entry point only say what they get."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FETCHED = "a model was fetched"


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def root(tmp_path):
    """A checkout whose environment is set up already."""
    (tmp_path / "scripts").mkdir()
    for name in ("route", "env.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "requirements").mkdir()
    stamp = tmp_path / ".venv/.slipway"
    program(tmp_path / ".venv/bin/python", f'case $2 in scripts.*) echo "{FETCHED}";; esac')
    for engine in ("cpu", "gpu"):
        (tmp_path / f"requirements/{engine}.txt").write_text(engine)
        with stamp.open("a") as lines:
            lines.write(f"{engine} {hashlib.sha256(engine.encode()).hexdigest()}\n")
    program(tmp_path / "entrypoint.sh", 'echo "$@" "${OPTION_MODEL_ID-no model}"')
    program(tmp_path / "uv", "exit 1")
    return tmp_path


def routed(root, **environ):
    kept = {name: os.environ[name] for name in ("PATH", "HOME")}
    return subprocess.run(
        [root / "scripts/route"],
        env={**kept, "SLIPWAY_UV": str(root / "uv"), **environ},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_a_router_without_a_model_gets_none(root):
    """It would tokenise for another model than the servers', and match nothing."""
    assert routed(root) == "route no model\n"


def test_a_model_that_is_named_is_the_routers(root):
    assert routed(root, OPTION_MODEL_ID="org/model") == "route org/model\n"
