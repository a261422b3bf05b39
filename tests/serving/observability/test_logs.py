# SPDX-License-Identifier: Apache-2.0
"""The lines that the log writes, and their levels."""

import asyncio
import io
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from serving.observability.logs import MAX_REPEATS, Handler, JsonFormatter
from tests.support.harness.process import Program
from tests.support.harness.wait import until

ROOT = Path(__file__).parents[3]


def test_a_line_that_comes_too_often_is_counted_and_told_once():
    written = io.StringIO()
    logger = logging.Logger("serving.test")
    handler = Handler(written, JsonFormatter())
    logger.addHandler(handler)
    for number in range(100):
        logger.error("the store %s is away", number)
        logger.error("%s", f"other {number // 25}")
    handler.report_repeats()
    handler.report_repeats()
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert len([line for line in lines if line["message"].startswith("the store")]) == MAX_REPEATS
    assert len([line for line in lines if line["message"].startswith("other")]) == 100
    (last,) = [line for line in lines if "suppressed" in line]
    assert (last["suppressed"], last["like"]) == (100 - MAX_REPEATS, "the store %s is away")


def test_signals_change_the_level_of_a_running_router(tmp_path):
    replicas = tmp_path / "replicas"
    replicas.write_text("http://127.0.0.1:9\n")
    with subprocess.Popen(
        [sys.executable, "-m", "serving", "route"],
        env={**os.environ, "OPTION_ROUTER_REPLICAS": f"file://{replicas}"}
        | {"OPTION_PORT": "18765"},
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr
        levels = []
        for line in process.stderr:
            message = json.loads(line)["message"]
            if message == "routing":
                process.send_signal(signal.SIGUSR1)
            if message.startswith("the log's level"):
                levels.append(message.split()[4])
                process.send_signal(signal.SIGUSR2 if len(levels) < 3 else signal.SIGTERM)
    assert levels == ["debug", "info", "warning"]
    assert process.returncode == 0


def test_lines_of_requests_are_written_together_and_in_their_order():
    """A pipe of packets shows each write. Other processes also write to it."""
    reading, writing = os.pipe2(os.O_DIRECT)
    with os.fdopen(writing, "w") as stream, os.fdopen(reading, "rb", 0) as pipe:
        handler = Handler(stream, JsonFormatter())

        async def work():
            for number in range(30):
                handler.write_soon(b"%03d %b\n" % (number, b"x" * 400))
            handler.handle(logging.makeLogRecord({"name": "a", "msg": "030", "levelno": 20}))
            handler.write_soon(b"031\n")
            await asyncio.sleep(0)
            handler.write_soon(b"032\n")

        asyncio.run(work())
        handler.write_soon(b"033\n")  # nothing would write it later
        packets = []
        while select.select([pipe], [], [], 0)[0]:
            packets.append(pipe.read(65536))
    assert len(packets) == 3 + 1 + 1 + 1 + 1
    assert max(map(len, packets)) <= select.PIPE_BUF
    assert all(packet.endswith(b"\n") for packet in packets)
    lines = b"".join(packets).splitlines()
    assert json.loads(lines.pop(30))["message"] == "030"
    assert [int(line[:3]) for line in lines] == [*range(30), *range(31, 34)]


FORKS = """
import asyncio, os
from serving.observability import logs

async def work():
    logs.access(logs.RequestLine(request_id="a", method="GET", path="/", status=200, ms=0.1))
    if process := os.fork():
        os.waitpid(process, 0)
    else:
        logs.flush()
        os._exit(0)

logs.configure({})
asyncio.run(work())
"""


def test_a_process_that_is_forked_meanwhile_does_not_write_them_again():
    ended = subprocess.run([sys.executable, "-c", FORKS], cwd=ROOT, capture_output=True, text=True)
    (line,) = ended.stderr.splitlines()
    assert json.loads(line)["request_id"] == "a"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_router_that_stops_has_written_a_line_for_each_request(processes, tmp_path):
    replicas = {"OPTION_ROUTER_REPLICAS": "http://127.0.0.1:9"}  # without a server
    environ = {**replicas, "OPTION_ROUTER_PROCESSES": str(processes)}
    command = (sys.executable, "-m", "serving", "route")
    with Program(*command, environ=environ, log=tmp_path / "log") as it:
        until(it.listens)
        with socket.create_connection(("127.0.0.1", it.port), 30) as client:
            for number in range(16):
                head = f"host: localhost:{it.port}\r\nx-request-id: r{number}\r\n"
                client.sendall(f"GET /v1/models HTTP/1.1\r\n{head}\r\n".encode())
            answers = b""
            while answers.count(b"HTTP/1.1 503") < 16:
                answers += client.recv(65536)
            it.process.terminate()
        it.process.wait(30)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    found = [line["request_id"] for line in lines if line["message"] == "request"]
    assert found == [f"r{number}" for number in range(16)]
