# SPDX-License-Identifier: Apache-2.0
"""The reason of an end: the last line of real processes, and its advice for known causes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_config.facts.machine import out_of_memory_kills
from serving import exit as module
from serving.exit import MAX_LINE, Exit, memory_ran_out, remedy, report, root_cause
from serving.observability import redaction
from tests.support.harness import ports

ROOT = Path(__file__).parent.parent.parent


def run(*arguments, **environ):
    """The exit code of a process, its last line, and the number of such lines."""
    ended = subprocess.run(
        [sys.executable, "-m", "serving", *arguments],
        env={"PATH": os.environ["PATH"], **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = [json.loads(line) for line in ended.stderr.splitlines() if line.startswith("{")]
    assert sum(line["message"] in ("failed", "stopped") for line in lines) == 1
    assert len(ended.stderr.splitlines()[-1]) <= MAX_LINE
    return ended.returncode, lines[-1]


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return {"OPTION_MODEL_ID": str(tmp_path), "OPTION_LOAD_FORMAT": "dummy"}


@pytest.mark.parametrize(
    ("verb", "environ", "reason", "helps"),
    [
        ("serve", {"OPTION_PORT": "x", "OPTION_DTYPE": "y"}, "OPTION_PORT='x'", "correct"),
        ("serve", {"OPTION_MODEL_ID": "/nowhere"}, "no such folder", "the name is right"),
        ("serve", {"OPTION_MODEL_ID": str(ROOT / "docs")}, "config.json", "complete"),
        (
            "serve",
            {"OPTION_MAX_MODLE_LEN": "y" * 5000, "OPTION_Y": ""},
            "OPTION_MAX_MODLE_LEN: no such",
            "correct",
        ),
        ("serve", {"OPTION_PORT": "z" * 5000}, "OPTION_PORT='zzz", "correct"),
        ("route", {}, "OPTION_ROUTER_REPLICAS is not set", "correct"),
    ],
)
def test_wrong_options_and_models(verb, environ, reason, helps):
    code, last = run(verb, **environ)
    assert (code, last["message"], last["stage"]) == (2, "failed", "options")
    assert reason in last["reason"]
    assert helps in last["fix"]


@pytest.mark.parametrize("verb", ["serve", "route"])
def test_a_port_that_is_taken(model, verb):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = str(taken.getsockname()[1])
        replicas = {"OPTION_ROUTER_REPLICAS": "http://127.0.0.1:9"} if verb == "route" else {}
        code, last = run(verb, **model, **replicas, OPTION_PORT=port)
    assert (code, last["message"], last["stage"]) == (3, "failed", "start")
    assert last["reason"].startswith(
        f"cannot listen on port {port} of 127.0.0.1: Address already in use"
    )
    assert "OPTION_PORT" in last["fix"]


def test_an_engine_that_cannot_be_imported(model, tmp_path):
    """PYTHONPATH has a vllm whose import fails, as an old driver makes the real one fail."""
    broken = tmp_path / "broken" / "vllm"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('Found no NVIDIA driver')\n")
    code, last = run("serve", **model, PYTHONPATH=str(broken.parent), OPTION_PORT=str(ports.free()))
    assert (code, last["stage"]) == (3, "start")
    assert last["reason"] == "RuntimeError: Found no NVIDIA driver"
    assert "--gpus all" in last["fix"]


def test_an_error_of_our_own(model, tmp_path):
    (tmp_path / "psutil.py").write_text("raise KeyError('surprise')\n")
    code, last = run("serve", **model, PYTHONPATH=str(tmp_path))
    assert (code, last["stage"]) == (1, "unforeseen")
    assert last["reason"] == "KeyError: 'surprise'"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("verb", ["serve", "route"])
def test_a_signal_before_anything_has_been_imported(model, tmp_path, verb, number):
    """The first import after the handler's waits until the signal has been sent."""
    (tmp_path / "tempfile.py").write_text(
        "import os, time\nos.write(1, b'importing\\n')\ntime.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "serving", verb],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), **model},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(number)
        assert process.wait(10) == 0
        (last,) = process.stderr.read().splitlines()
    assert (json.loads(last)["message"], json.loads(last)["stage"]) == ("stopped", "options")


def test_a_signal_while_it_starts(model):
    with subprocess.Popen(
        [sys.executable, "-m", "serving", "serve"],
        env={"PATH": os.environ["PATH"], **model, "OPTION_PORT": str(ports.free())},
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr
        for line in process.stderr:
            if json.loads(line)["message"] == "importing vLLM":
                process.send_signal(signal.SIGTERM)
            last = json.loads(line)
    assert process.returncode == 0
    assert (last["message"], last["stage"]) == ("stopped", "start")


# Errors of vLLM, torch and others, and a word of the advice for each.
KNOWN = [
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "quantised"),
    ("ValueError: No available memory for the cache blocks.", "OPTION_TENSOR_PARALLEL_DEGREE"),
    (
        "ValueError: Free memory on device cuda:0 (2/80 GiB) on startup is less than desired GPU "
        "memory utilization (0.92, 73 GiB).",
        "lower OPTION_GPU_MEMORY_UTILIZATION",
    ),
    (
        "ValueError: To serve at least one request with the models's max seq len (131072), 16 GiB "
        "KV cache is needed, which is larger than the available KV cache memory (9 GiB).",
        "lower OPTION_MAX_MODEL_LEN",
    ),
    (
        "AttributeError: 'Idefics3Config' object has no attribute 'image_token_index'",
        "leave the draft out",
    ),
    ("max_model_len (100000) is greater than the derived max_model_len", "OPTION_MAX_MODEL_LEN"),
    ("OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'", "--shm-size"),
    ("DataLoader worker is killed by signal: Bus error", "--shm-size"),
    ("OSError: [Errno 28] No space left on device", "larger volume"),
    ("401 Client Error: Unauthorized for url", "HF_TOKEN"),
    ("Access to model meta-llama/X is restricted: it is gated", "HF_TOKEN"),
    ("ValueError: Model architectures ['Foo'] are not supported for now.", "vLLM supports"),
    ("set the option `trust_remote_code=True` to remove this error", "TRUST_REMOTE_CODE=true"),
    ("FileNotFoundError: [Errno 2] No such file or directory: 'a'", "complete"),
    ("an engine process ended unexpectedly: exit code -9", "more memory"),
    ("Engine core initialization failed. Failed core proc(s): {'EngineCore': -9}", "more memory"),
    ("Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down", "more memory"),
    ("Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting", "more memory"),
    ("RuntimeError: NCCL error in: x.cpp:1", "NCCL_DEBUG"),
    ("Model architectures ['X'] failed to be inspected. Please check the logs", "on a GPU"),
    ("ModuleNotFoundError: No module named 'torchvision'", "on a GPU"),
    ("ModuleNotFoundError: No module named 'vllm.pynccl'", "unchanged image"),
    ("RuntimeError: aggregated wrongly", "the lines above"),
]


@pytest.mark.parametrize(("reason", "helps"), KNOWN)
def test_known_causes_have_a_fix(reason, helps):
    assert helps in remedy(reason)


@pytest.mark.parametrize(
    ("wanted", "by"), [("2.00 GiB", "0.03"), ("512.00 MiB", "0.01"), ("8.10 GiB", "0.11")]
)
def test_a_step_that_finds_no_memory_is_told_how_much_to_leave(wanted, by):
    """At a start, the weights find no memory, and a larger share of the GPU is no remedy."""
    reason = (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a "
        "total capacity of 79.10 GiB of which 1.21 GiB is free."
    )
    assert f"OPTION_GPU_MEMORY_UTILIZATION by {by}" in remedy(reason, "serving")
    assert "OPTION_TENSOR_PARALLEL_DEGREE" in remedy(reason, "start")


def test_a_reason_that_points_elsewhere_gives_way_to_the_first_that_does_not():
    vague = "RuntimeError: Engine core initialization failed. See root cause above. {}"
    causes = [
        "WorkerProc failed to start.",
        "ValueError: the real one",
        "Exception: WorkerProc initialization failed due to an exception in a background process.",
        "RuntimeError: a later one",
    ]
    assert root_cause(vague, causes) == "ValueError: the real one"
    assert root_cause(vague, causes[:1]) == vague
    assert root_cause("ValueError: clear", causes) == "ValueError: clear"


def test_an_engines_end_in_a_step_has_the_exception_as_its_reason():
    """vLLM logs its whole configuration first, and may have logged the failure of one request
    before.
    """
    engine = (
        "import logging, multiprocessing, os, json\n"
        "from logging.config import dictConfig\n"
        "dictConfig(json.load(open(os.environ['VLLM_LOGGING_CONFIG_PATH'])))\n"
        "log = logging.getLogger('vllm.v1.engine.core')\n"
        "def fail(message, error):\n"
        "    try: raise error\n"
        "    except Exception: log.exception(message)\n"
        "fail('Failed to compile grammar for request a', RuntimeError('of one request'))\n"
        "log.error('Dumping input data for V1 LLM engine (v0.32.0) with config: %s, ',"
        " 'trust_remote_code=False')\n"
        "log.error('Dumping scheduler output for model execution: %s', 'out of memory')\n"
        "fail('EngineCore encountered a fatal error.', IndexError('The shape of the mask [1]'))\n"
    )
    program = (
        "import os, subprocess, sys\n"
        "from serving.observability import capture, logs\n"
        "from serving.exit import Exit, report, root_cause\n"
        "logs.configure(os.environ)\n"
        "os.environ.update(logs.engine_environment(os.environ, 'info'))\n"
        "with capture.capture_output():\n"
        f"    subprocess.run([sys.executable, '-c', {engine!r}])\n"
        "reason = root_cause('an engine process ended unexpectedly', capture.causes(60))\n"
        "report(Exit(1, 'serving', reason))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": os.environ["PATH"]},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    last = json.loads(ended.stderr.splitlines()[-1])
    assert last["reason"] == "IndexError: The shape of the mask [1]"
    assert last["fix"] == "see the lines above"


@given(st.text(max_size=4000))
def test_the_last_line_is_short_whatever_the_reason(reason):
    written = []
    original = module.log.error
    module.log.error = lambda message, extra: written.append(extra["facts"])  # type: ignore
    try:
        report(Exit(1, "start", reason))
    finally:
        module.log.error = original  # type: ignore[method-assign]
    assert len(module._line(written[0])) <= MAX_LINE


def test_kubernetes_finds_it_where_it_looks(monkeypatch, tmp_path):
    message = tmp_path / "termination-log"
    monkeypatch.setattr(module, "TERMINATION_LOG", message)
    monkeypatch.setattr(redaction, "_values", None)
    redaction.hide({"A_TOKEN": "very-secret"})
    report(Exit(1, "serving", "it broke"))
    assert not message.exists()  # no file is made without Kubernetes
    message.touch()
    report(Exit(1, "serving", "it broke on very-secret\n  twice"))
    line = json.loads(message.read_text())
    assert (line["message"], line["reason"]) == ("failed", "it broke on [secret] twice")


@pytest.mark.parametrize(("version", "name"), [(2, "memory.events"), (1, "memory.oom_control")])
def test_kills_for_want_of_memory_are_noticed(tmp_path, monkeypatch, version, name):
    (tmp_path / "proc/self").mkdir(parents=True)
    group = tmp_path / ("sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory")
    (group / "pod").mkdir(parents=True)
    line = "0::/pod" if version == 2 else "4:memory:/pod"
    (tmp_path / "proc/self/cgroup").write_text(line + "\n")
    assert out_of_memory_kills(tmp_path) is None
    (group / "pod" / name).write_text("low 0\noom 1\noom_kill 1\n")
    assert out_of_memory_kills(tmp_path) == 1
    monkeypatch.setattr(module, "out_of_memory_kills", lambda: 2)
    assert "ran out of memory" in memory_ran_out(1)
    assert memory_ran_out(2) == memory_ran_out(None) == ""
    assert "more memory" in remedy("x" + memory_ran_out(1))


def test_the_troubleshooting_page_has_every_fix_with_reasons_that_lead_to_it():
    page = (ROOT / "docs/guides/troubleshooting.md").read_text()
    table = page.partition("| `reason` has, for example | `fix` |\n|---|---|\n")[2]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    for examples, fix in rows:
        for example in re.findall("`([^`]+)`", examples) if "anything" not in examples else ():
            assert remedy(example) == fix, example
    unknown = remedy("aggregated wrongly"), remedy("aggregated wrongly", "options")
    assert {fix for _, fix in rows} == {fix for _, fix in module._REMEDIES} | {*unknown}
