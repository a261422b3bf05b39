# SPDX-License-Identifier: Apache-2.0
"""The warm Python, without an engine: its forked programs behave as those that `python` starts."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.support.harness import warm
from tests.support.harness.process import ROOT, running
from tests.support.harness.wait import until
from tests.support.harness.warm import NotWarm, WarmPython
from tests.tools.warm_prepared import PROGRAM

ENVIRON = {"PATH": os.environ["PATH"], "ONE": "1"}
WARM = "__import__('sys').modules.get('tests.tools.warm_prepared') is not None"
WAIT = "import time; print('there', flush=True); time.sleep(60)"


def make():
    with tempfile.TemporaryDirectory() as folder, WarmPython(PROGRAM[1], Path(folder)) as it:
        yield it


python = pytest.fixture(scope="module")(make)
mortal = pytest.fixture(make)


@pytest.fixture
def start(python, tmp_path):
    with contextlib.ExitStack() as stack:

        def start(code, *arguments, of=python, environ=ENVIRON):
            with log(tmp_path).open("wb") as output:
                process = of.start(
                    [*PROGRAM, code, *arguments], environ, folder=tmp_path, output=output
                )
            stack.callback(process.wait, 60)
            stack.callback(process.kill)
            return process

        yield start


def log(folder):
    return folder / "log"


def said(folder):
    """The last line of the output."""
    until(lambda: log(folder).read_text().endswith("\n"))
    return log(folder).read_text().splitlines()[-1]


def test_it_runs_as_if_python_had_been_started(start, tmp_path):
    seen = """
import json, os, sys
print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ), sys.stdin.read(), os.getpid(),
                  os.getsid(0), os.getpgid(0), __name__, sorted(os.listdir("/proc/self/fd"))[:3]]))
"""
    process = start(seen, "a", "b c")
    assert process.wait(60) == 0
    number = process.pid
    assert json.loads(said(tmp_path)) == [
        *([seen, "a", "b c"], str(tmp_path), ENVIRON, "", number, number, number, "__main__"),
        ["0", "1", "2"],
    ]


def test_its_modules_are_imported_already_and_its_name_is_its_own(start, tmp_path):
    process = start(f"print({WARM}); " + WAIT)
    assert said(tmp_path) == "there"
    assert "True" in log(tmp_path).read_text()
    assert " ".join(PROGRAM) in " ".join(psutil.Process(process.pid).cmdline())
    process.kill()
    assert process.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("import os; os._exit(4)", 4),
        ("raise ValueError('why')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGABRT)", -signal.SIGABRT),
    ],
)
def test_it_ends_as_its_program_does(start, tmp_path, code, expected):
    process = start(code)
    assert process.wait(60) == process.poll() == process.returncode == expected
    assert ("ValueError: why" in log(tmp_path).read_text()) == (expected == 1)
    process.kill()  # which is no error


def test_a_program_that_takes_pythons_place_hears_signals(python, tmp_path):
    """`entrypoint.sh` starts it in this way: with -P, and with signals blocked until it can handle
    them.
    """
    it = python.executable(["-P", *PROGRAM])
    command = ["env", "--block-signal=TERM", it, "-P", *PROGRAM, f"print({WARM}); {WAIT}"]
    with log(tmp_path).open("wb") as output:
        process = subprocess.Popen(command, env=ENVIRON, stdout=output)
    assert said(tmp_path) == "there"
    assert "True" in log(tmp_path).read_text()
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM


def test_a_program_can_be_a_file(python, tmp_path):
    (tmp_path / "program.py").write_text("import sys; print(__name__, sys.argv[1:])")
    with log(tmp_path).open("wb") as output:
        process = python.start([str(tmp_path / "program.py"), "a"], ENVIRON, output=output)
    assert process.wait(60) == 0
    assert said(tmp_path) == "__main__ ['a']"


def test_signals_reach_it(start, tmp_path):
    process = start("import signal; signal.signal(15, lambda *_: exit(7)); " + WAIT)
    assert said(tmp_path) == "there"
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    process.terminate()
    assert process.wait(60) == 7


def test_many_at_once(start):
    processes = [start(f"import sys; sys.exit({n})") for n in range(8)]
    assert [it.wait(60) for it in processes] == [*range(8)]


def test_it_ends_with_the_warm_python(start, mortal, tmp_path):
    process = start(WAIT, of=mortal)
    assert said(tmp_path) == "there"
    found = psutil.Process(process.pid)
    mortal._process.kill()
    assert process.wait(60) == -signal.SIGKILL
    until(lambda: not running(found), 60)
    with pytest.raises(NotWarm):
        start(WAIT, of=mortal)


def test_others_run_an_executable_that_is_forked(python):
    code = f"import sys; print({WARM}, flush=True); sys.exit(3)"
    it = python.executable(PROGRAM)
    found = subprocess.run([it, *PROGRAM, code], capture_output=True, check=False, timeout=60)
    assert (found.returncode, found.stdout) == (3, b"True\n")
    ordinary = [it, "-c", code]
    found = subprocess.run(ordinary, capture_output=True, check=False, timeout=60)
    assert (found.returncode, found.stdout) == (3, b"False\n")


def test_another_process_uses_it_and_leaves_it_running(python, start, tmp_path):
    with WarmPython(None, python.folder) as other:
        process = start(WAIT, of=other)
        assert said(tmp_path) == "there"
    assert running(psutil.Process(process.pid))
    assert start("pass").wait(60) == 0


def test_the_cpu_time_of_a_forked_process_is_known_at_its_end(start):
    before = warm.spent_s
    process = start("import time\nwhile time.process_time() < 0.2: pass")
    assert process.wait(60) == 0
    assert 0.2 <= warm.spent_s - before < 20


def test_modules_that_cannot_be_imported(tmp_path):
    with WarmPython("tests.tools.absent", tmp_path) as it, pytest.raises(NotWarm, match="absent"):
        it.start(["-m", "json"], ENVIRON)


CHILD = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, *sys.argv[2:]])
print("child", child.pid, flush=True)
signal.signal(signal.SIGUSR1, lambda *_: child.terminate())
print("ended", child.wait(), flush=True)
"""


@pytest.fixture
def parent(start, tmp_path):
    """Starts a process whose sys.executable runs a child. Returns the process and the
    forked child.
    """

    def begin(code):
        process = start(CHILD, *PROGRAM, code)
        found = psutil.Process(process.pid)

        def forked():
            return [it for it in found.children(recursive=True) if code in " ".join(it.cmdline())]

        until(lambda: "there" in log(tmp_path).read_text(), 60)
        # The process that represents it has its command line for a moment.
        until(lambda: len(forked()) == 1, 60)
        return process, *forked()

    return begin


@pytest.mark.parametrize(("code", "status"), [("pass", 0), ("exit(3)", 3)])
def test_a_childs_end(start, tmp_path, code, status):
    assert start(CHILD, *PROGRAM, code).wait(60) == 0
    assert said(tmp_path) == f"ended {status}"


def test_a_child_is_forked_too_and_is_in_its_tree(parent, tmp_path):
    process, child = parent(f"print('warm', {WARM}, flush=True); " + WAIT)
    assert "warm True" in log(tmp_path).read_text()
    child.kill()
    assert process.wait(60) == 0
    assert said(tmp_path) == f"ended {-signal.SIGKILL}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_hears_the_signals_of_what_stands_for_it(parent, tmp_path, number):
    code = "import signal; signal.signal(15, lambda *_: exit(7)); " + WAIT
    process, child = parent(code)
    (stands_for_it,) = re.findall(r"^child (\d+)$", log(tmp_path).read_text(), re.MULTILINE)
    os.kill(int(stands_for_it), number)
    assert process.wait(60) == 0
    assert said(tmp_path) == f"ended {7 if number == signal.SIGTERM else -signal.SIGKILL}"
    until(lambda: not running(child), 60)


def test_what_is_below_it_ends_with_it(parent, tmp_path):
    process, _ = parent(WAIT)
    below = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    _, alive = psutil.wait_procs(below, timeout=60)
    assert not [it for it in alive if running(it)]


def test_other_programs_are_run_by_the_ordinary_python(start, tmp_path):
    code = "import sys; print(sys.argv[1:], sys.flags.dont_write_bytecode, sys.executable)"
    assert start(CHILD, "-B", "-c", code, "a").wait(60) == 0
    lines = log(tmp_path).read_text().splitlines()
    assert f"['a'] 1 {sys.executable}" in lines
    assert lines[-1] == "ended 0"


def test_a_child_is_started_without_what_forks_when_that_has_gone(start, tmp_path):
    gone = """
import os, signal, subprocess, sys
for it in open(f"/proc/self/task/{os.getpid()}/children").read().split():
    os.kill(int(it), signal.SIGKILL)
    os.waitpid(int(it), 0)
"""
    environ = {**ENVIRON, "PYTHONPATH": str(ROOT)}
    assert start(gone + CHILD, *PROGRAM, "exit(5)", environ=environ).wait(60) == 0
    assert said(tmp_path) == "ended 5"
