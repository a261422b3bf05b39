# SPDX-License-Identifier: Apache-2.0
"""The output of libraries and children becomes lines of the log: real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

PROGRAM = r"""
import ctypes, logging, os, subprocess, sys, warnings
from serving.observability import capture, logs

logs.configure(os.environ)
logs.set_level("info")
child = '''
import logging, sys, multiprocessing
multiprocessing.current_process().name = "EngineCore"
from logging.config import dictConfig
import json, os
dictConfig(json.load(open(os.environ["VLLM_LOGGING_CONFIG_PATH"])))
logging.getLogger("vllm.core").info("ready at %d", 5)
logging.getLogger("vllm.core").debug("never")
try:
    raise ValueError("the token is " + os.environ["HF_TOKEN"])
except ValueError:
    logging.getLogger("vllm.core").exception("broke")
logging.getLogger("urllib3").warning("a library")
print("printed", flush=True)
raise RuntimeError("raw")
'''
os.environ.update(logs.engine_environment(os.environ, "info"))
with capture.capture_output():
    logging.getLogger("serving.a").info("ours", extra={"facts": {"n": 1}})
    print("hello", os.environ["HF_TOKEN"])
    sys.stderr.write("[2026-11-22 01:02:03,4] LMCache \x1b[32mWARNING:\x1b[0m slow (a.py:1:b)\n")
    sys.stderr.write("[2026-11-22 01:02:03,4] LMCache WARNING: Session a has no lookup ipc key\n")
    sys.stderr.write("WARNING:root:basic\n[W1122 01:02:03.4 utils.cpp:68] native\n 0%\r 50%\r99%\n")
    sys.stderr.flush()
    for odd in ("", '"}', '", "level": 5}', '", "a": ' + "[" * 100_000):
        print('{"time": "' + odd)
    os.write(1, b"not \xff text")
    os.write(1, b"\n")
    subprocess.run(["sh", "-c", "echo of a shell >&2"])
    subprocess.run([sys.executable, "-c", child])
    warnings.warn("mind")
print("too late", file=sys.stderr)
logging.getLogger("serving.a").info("causes", extra={"facts": {"causes": capture.causes(60)}})
"""


def test_all_that_is_written_becomes_lines_of_the_log():
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PATH": os.environ["PATH"], "HF_TOKEN": "very-secret-token", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "very-secret" not in ended.stderr
    found = [json.loads(line) for line in ended.stderr.splitlines()]
    assert {line.pop("time")[-1] for line in found} == {"Z"}
    by_message = {line["message"]: line for line in found}

    def has(message, level, logger, **more):
        assert by_message[message] == {
            "level": level, "logger": logger, "message": message, **more
        }  # fmt: skip

    has("ours", "info", "serving.a", n=1)
    has("hello [secret]", "info", "output")
    has("slow (a.py:1:b)", "warning", "lmcache")
    has("basic", "warning", "root")
    has("utils.cpp:68] native", "warning", "output")
    has("99%", "info", "output")
    has("not \ufffd text", "info", "output")
    has("of a shell", "info", "output")
    has("ready at 5", "info", "vllm.core", process="EngineCore")
    has("a library", "warning", "urllib3", process="EngineCore")
    has("printed", "info", "output")
    assert by_message["broke"]["exception"].endswith("ValueError: the token is [secret]")
    assert by_message["RuntimeError: raw"]["exception"].startswith("Traceback")
    assert [line for line in found if "UserWarning: mind" in line["message"]]
    assert "never" not in by_message
    assert not [line for line in found if "ipc key" in line["message"]]
    assert found[-1]["causes"] == ["ValueError: the token is [secret]", "RuntimeError: raw"]
    assert ended.stdout == ""


DEAF = """
import os, sys
from serving.observability import capture, logs

logs.configure(os.environ)
with capture.capture_output():
    for number in range(2000):
        print("nobody reads this")
        line = {"request_id": "id", "method": "GET", "path": "/", "status": 200, "ms": 0.1}
        logs.access(logs.RequestLine(**line))
        logs.logging.getLogger("serving").error("nor %d", number)
os._exit(7)
"""


def test_a_log_that_nobody_reads_any_more_harms_nothing():
    with subprocess.Popen(
        [sys.executable, "-c", DEAF], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr
        process.stderr.close()
        assert process.wait(30) == 7


HOSTILE = r"""
import fcntl, json, os, subprocess, sys, termios, time
from serving.observability import capture, logs

logs.configure(os.environ)
logs.set_format(sys.argv[1])
own = {"time": "x", "level": "info", "logger": "l", "message": "m"}
lines = [json.dumps(own | {key: value}) for key, value in (
    ("logger", []), ("logger", {}), ("logger", None), ("logger", 1), ("message", []),
    ("message", {"a": 1}), ("message", None), ("process", []), ("process", 1), ("level", []),
    ("level", "notset"), ("time", []), ("exception", []), ("exception", {"a": [1]}),
    ("exception", "\n\n\n"), ("text", 5), ("facts", "\ud800"), ("message", "%s %d %(a)s {}"),
)]
head = '{"time": "x", "level": "info", "logger": "l", "message": "m", "f": '
lines += [head + it + "}" for it in (
    "[" * 900 + "]" * 900, '{"a":' * 400 + "1" + "}" * 400, "[" * 21 + "]" * 21, "1e999",
    "NaN", "9" * 4000, '"\\ud800"', "[" * 120_000,
)]
lines += ["Traceback (most recent call last):", " " + "x" * 300_000, " y" * 200_000, "end",
          "\x1b[31m" * 1000, "\x1b[" + "1;" * 100_000, "[rank0]:E0101 " + "1:" * 100_000,
          "A" * 600_000, "a." * 100_000 + "Error", "100%|" + "#" * 250 + "| 9/9 [\r50%| 1/2 ["]
child = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"
with capture.capture_output():
    for line in lines:
        data = line.encode(errors="surrogatepass") + b"\n"
        subprocess.run([sys.executable, "-S", "-c", child], input=data, check=True)
    data = bytes(range(256)) * 500 + b"\n"
    subprocess.run([sys.executable, "-S", "-c", child], input=data, check=True)
    subprocess.run([sys.executable, "-S", "-c", child], input=b"x\n" * 5_000, check=True)
    print("the last word")
    sys.stdout.flush()
    left = b"\1\0\0\0"
    while any(left):  # a machine that does other work may take longer than a stop waits
        left = fcntl.ioctl(1, termios.FIONREAD, left)
        time.sleep(0.1)
"""


@pytest.mark.parametrize("form", ["json", "text"])
def test_no_line_ends_the_log(form):
    ended = subprocess.run(
        [sys.executable, "-c", HOSTILE, form],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert b"the last word" in ended.stderr
    assert b'"logger": []' in ended.stderr.replace(b"\\", b"")
    assert b"[" * 21 in ended.stderr  # as text: it is complete
