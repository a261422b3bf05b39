# SPDX-License-Identifier: Apache-2.0
"""The log on a terminal, and as text elsewhere: real processes, a real pseudoterminal."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ENTRYPOINT = str(ROOT / "entrypoint.sh")
PROGRAM = """
import logging, os, sys, time
from serving.observability import capture, logs
from serving.observability.access_log import ServedLine

logs.configure(os.environ)
logs.set_format(os.environ.get("FORMAT", "auto"))
logs.set_level(os.environ.get("LEVEL", "info"))
ours, vllm = logging.getLogger("serving.a"), logging.getLogger("vllm.b")
with capture.capture_output():
    ours.info("ours", extra={"facts": {"n": 1}})
    ours.info("ready", extra={"facts": {"n": 2}, "text": "in other words"})
    ours.info("the token is %s", os.environ["HF_TOKEN"])
    ours.error("odd \\x1b[2J\\r\\n2026 forged")
    ours.info("loading", extra={"text": "loading", "busy": True})
    time.sleep(0.3)
    logs.reach(1, 2)
    time.sleep(0.3)
    vllm.info("chatter")
    vllm.warning("Triton is not installed. triton-cpu is expected on x86 CPUs.")
    vllm.warning("Failed to create oneDNN linear, fallback to torch linear. Exception: could not")
    vllm.error("Error with model error=ErrorInfo(message='The model `x` does not exist.')")
    vllm.warning("[shutdown] Process manager: force killing remaining process EngineCore pid 7")
    vllm.warning("The global random seed is set to 0. Since VLLM_ENABLE_V1_MULTIPROCESSING is set")
    vllm.warning("Reset SSM cache type to float32 for accelerated GDN mamba backend 'none'.")
    vllm.warning("mind this")
    line = {"request_id": "an-id", "method": "POST", "path": "/x", "status": 200, "ms": 1.5}
    logs.access(ServedLine(**line, completion_tokens=3))
    print("shards: 50%|#####     | 1/2 [00:01<00:01]\\rdone", flush=True)
    print("Traceback (most recent call last):\\n  x\\nValueError: of", os.environ["HF_TOKEN"])
    try:
        raise ValueError("why")
    except ValueError:
        ours.exception("broke", extra={"busy": False})
"""
COLOUR = re.compile(r"\x1b\[[\d;]*m")
CONTROL = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


def on_a_terminal(*command, **environ):
    """The bytes that a terminal gets, and the exit code."""
    primary, secondary = pty.openpty()
    kept = {"PATH": os.environ["PATH"], "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command,
        env={**kept, "SLIPWAY_PYTHON": sys.executable, "HF_TOKEN": "very-secret-token", **environ},
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
    )
    os.close(secondary)
    written = b""
    while True:
        try:
            written += os.read(primary, 65536)
        except OSError:  # the other end is closed
            break
    os.close(primary)
    return written.decode(), process.wait(30)


def program(**environ):
    written, code = on_a_terminal(sys.executable, "-c", PROGRAM, **environ)
    assert code == 0, written
    return written


@pytest.fixture(scope="module")
def written():
    return program()


def lines(written):
    return [line.strip() for line in re.split(r"[\r\n]+", CONTROL.sub("", written))]


def test_a_terminal_gets_lines_for_people_in_colour(written):
    shown = lines(written)
    assert any(re.fullmatch(r"\d\d:\d\d:\d\d  ours n=1", line) for line in shown)
    assert any(line.endswith("  in other words") for line in shown)
    assert any(line.endswith("  POST /x 200, 1.5 ms completion_tokens=3") for line in shown)
    assert COLOUR.search(written)
    assert '{"time"' not in written


def test_secrets_are_hidden_there_too(written):
    assert "the token is [secret]" in written
    assert "ValueError: of [secret]" in written
    assert "very-secret" not in written


def test_nothing_that_is_logged_controls_the_terminal_or_forges_a_line(written):
    assert r"ERROR: odd \x1b[2J\x0d" in written
    assert "2026 forged" in written
    assert not any(line.startswith("2026") for line in CONTROL.sub("", written).splitlines())


def test_a_bar_says_what_the_start_is_busy_with(written):
    bars = [line for line in lines(written) if "loading" in line]
    assert bars
    assert all("━" in line for line in bars)
    assert not [line for line in bars if re.match(r"\d\d:", line)]


def test_others_are_shown_from_warnings_on_and_without_what_is_harmless(written):
    assert "WARNING: vllm.b: mind this" in written
    assert "chatter" not in written
    for harmless in ("Triton", "oneDNN", "ErrorInfo", "force killing", "random seed", "SSM"):
        assert harmless not in written
    everything = program(LEVEL="debug")
    assert "vllm.b: chatter" in everything
    assert "Triton is not installed" in everything


def test_a_traceback_is_one_entry(written):
    entry = CONTROL.sub("", written).partition("ERROR: broke")[2].replace("\r", "")
    first, *middle, last = re.split(r"\n(?!    )", entry)[0].splitlines()[1:]
    assert first == "    Traceback (most recent call last):"
    assert middle
    assert last == "    ValueError: why"


def test_there_is_no_colour_where_none_is_wanted():
    written = program(NO_COLOR="1")
    assert "in other words" in written
    assert not re.search(r"\x1b\[[\d;]*3\d", written)


@pytest.mark.parametrize(("chosen", "starts"), [("json", "{"), ("text", "20"), ("auto", "{")])
def test_the_format_is_chosen(chosen, starts):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "FORMAT": chosen, "HF_TOKEN": "very-secret-token"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert all(line.startswith((starts, "    ")) for line in ended.stderr.splitlines())
    assert "chatter" in ended.stderr
    assert "[secret]" in ended.stderr
    assert "very-secret" not in ended.stderr
    assert "\x1b" not in ended.stderr


def test_json_on_a_terminal_is_one_object_a_line():
    shown = [line for line in program(FORMAT="json").splitlines() if line.strip()]
    assert all(json.loads(line)["level"] for line in shown)


def test_a_failed_start_shows_the_reason_and_the_fix(tmp_path):
    written, code = on_a_terminal(ENTRYPOINT, "serve", str(tmp_path), "--port", "8089")
    assert code == 2
    (line,) = [it for it in lines(written) if "ERROR" in it]
    assert f"ERROR: MODEL: {tmp_path}: there is no config.json" in line
    assert '{"' not in written
