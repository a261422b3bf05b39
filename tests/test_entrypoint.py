import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*arguments, **environ):
    return subprocess.run(
        [str(ROOT / "entrypoint.sh"), *arguments],
        env={"PATH": os.environ["PATH"], "SLIPWAY_PYTHON": sys.executable, **environ},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("arguments", [(), ("serve",)])
def test_serve_is_the_default_and_wrong_options_end_it_at_once(arguments):
    ended = run(*arguments, OPTION_MAX_MODEL_LEN="abc", OPTION_MAX_MODLE_LEN="5")
    assert ended.returncode == 2
    assert "OPTION_MAX_MODEL_LEN='abc': should be a number of tokens" in ended.stderr
    assert (
        "OPTION_MAX_MODLE_LEN: no such option; did you mean OPTION_MAX_MODEL_LEN?" in ended.stderr
    )


def test_the_verb_to_come_says_so():
    ended = run("route")
    assert (ended.returncode, ended.stderr) == (2, "route is not there yet\n")


def test_anything_else_runs_as_given():
    ended = run("echo", "a b", "c")
    assert (ended.returncode, ended.stdout) == (0, "a b c\n")


def test_an_unknown_argument_shows_the_usage():
    ended = run("serve", "--fast")
    assert ended.returncode == 2
    assert "usage: python -m serving" in ended.stderr


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ("/nowhere", "there is no such folder"),
        (str(ROOT / "docs"), "there is neither config.json nor params.json nor a *.gguf file"),
    ],
)
def test_a_model_that_is_not_there_ends_it_at_once(model, fault):
    ended = run("serve", OPTION_MODEL_ID=model)
    assert ended.returncode == 2
    assert fault in ended.stderr


def test_a_port_that_is_taken_is_told(tmp_path):
    import socket

    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = str(taken.getsockname()[1])
        options = {"OPTION_MODEL_ID": str(tmp_path), "OPTION_LOAD_FORMAT": "dummy"}
        ended = run("serve", **options, OPTION_PORT=port)
    assert ended.returncode == 3
    assert f"cannot listen on port {port}: Address already in use" in ended.stderr


def test_the_options_are_checked_with_nothing_installed():
    ended = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "import sys; sys.path.insert(0, '.');"
         "import runpy; runpy.run_module('lmi_config', run_name='__main__')"],
        env={"OPTION_PORT": "x"}, cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr.startswith("1 option cannot be used:\n  OPTION_PORT='x'")
