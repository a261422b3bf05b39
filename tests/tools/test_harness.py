# SPDX-License-Identifier: Apache-2.0
"""The harness of tests, benchmarks and chaos."""

import gc
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import metrics, ports, stats
from tests.support.harness.process import NotReady, Program, cpu_seconds, running
from tests.support.harness.slow_link import slow_link
from tests.support.harness.wait import until, until_async

STUB = (sys.executable, "-m", "tests.support.harness.stub_replica", "{port}")
PARENT = (
    *(sys.executable, "-c"),
    "import signal, subprocess; subprocess.Popen(['sleep', '60']); signal.pause()",
)
DEAF = "import signal; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


def test_a_program_is_started_again_on_its_port(tmp_path):
    with Program(*STUB, log=tmp_path / "log") as program:
        program.ready()
        first = program.process
        program.kill()
        assert first.returncode == -signal.SIGKILL
        program.start()
        program.ready()
        assert program.process is not first
        assert program.url.endswith(f":{program.port}")
        assert program.stop() == -signal.SIGTERM


def test_a_program_that_ends_is_not_waited_for_and_its_log_is_shown(tmp_path):
    command = (sys.executable, "-c", "import os, sys; sys.exit(os.environ['WHY'])")
    with (
        Program(*command, environ={"WHY": "no model"}, log=tmp_path / "log") as program,
        pytest.raises(NotReady, match=r"ended with exit code 1\nno model\n"),
    ):
        program.ready()


def test_a_program_that_is_not_ready_in_time():
    with Program("sleep", "60") as program, pytest.raises(NotReady, match="not ready within"):
        program.ready(0.1)


def test_what_a_program_leaves_behind_ends_with_it(tmp_path):
    with Program(*PARENT, log=tmp_path / "log") as program:
        until(lambda: program.children("sleep"))
        (child,) = program.children("sleep")
        assert program.children("no such command") == []
        program.kill()
        assert program.left_behind(0.1) == [child]
    assert program.left_behind() == []
    assert not running(child)


def test_a_program_that_does_not_stop_is_ended(tmp_path):
    with Program(sys.executable, "-c", DEAF, log=tmp_path / "log") as program:
        until(program.logged)
        with pytest.raises(subprocess.TimeoutExpired):
            program.stop(0.2)
        program.end()
        assert program.process.returncode == -signal.SIGKILL


def test_a_link_to_a_program_that_speaks_no_http():
    with Program(*STUB) as program:
        link = Program(
            *(sys.executable, "-m", "tests.support.harness.slow_link", str(program.port), "1e6"),
            "{port}",
        )
        assert not link.listens()
        with link:
            until(link.listens)
            link.ready()


def test_a_link_closes_a_connection_that_comes_at_its_end():
    with socket.create_server(("127.0.0.1", 0)) as server:
        with slow_link(server.getsockname()[1], 1e12) as port:
            client = socket.create_connection(("127.0.0.1", port))
        with client:
            gc.collect()


def test_a_link_closes_a_connection_whose_client_does_not_read():
    with socket.create_server(("127.0.0.1", 0)) as server:
        with slow_link(server.getsockname()[1], 1e12) as port:
            client = socket.create_connection(("127.0.0.1", port))
            with server.accept()[0] as accepted:
                accepted.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    accepted.sendall(bytes(50_000_000))
        with client:
            gc.collect()


def test_the_log_is_of_every_start(tmp_path):
    log = tmp_path / "log"
    log.write_text("an older program's\n")
    program = Program(
        "sh", "-c", "echo port {port} $NAMED $OPTION_PORT", log=log, environ={"NAMED": "{port}"}
    )
    for _ in range(2):
        program.start()
        program.process.wait()
    assert program.logged() == f"port {program.port} {program.port} {program.port}\n" * 2


def test_the_checkout_to_run_from(tmp_path):
    with Program("pwd", root=tmp_path, log=tmp_path / "log") as program:
        program.process.wait()
    assert Path(program.logged().strip()) == tmp_path


def test_cpu_time_is_finer_than_a_clock_tick():
    with Program(*STUB) as program:
        program.ready()
        assert 0 < cpu_seconds([program.own]) % 0.01 < 0.01


def test_ports_that_are_in_use_are_left_out():
    taken = ports.free() + 2
    with socket.create_server(("127.0.0.1", taken)):
        first = ports.free(3)
    assert first > taken
    assert ports.free() > first + 2


async def test_waiting():
    counted = iter(range(1000))

    async def holds():
        return next(counted) > 3

    until(lambda: next(counted) > 1)
    await until_async(lambda: next(counted) > 2)
    await until_async(holds)
    with pytest.raises(TimeoutError):
        until(lambda: False, seconds=0.01)
    with pytest.raises(TimeoutError):
        await until_async(lambda: False, seconds=0.01)


TEXT = """# HELP hits what was found
# TYPE hits counter
hits_total{place="a b",tier="l1"} 3.0
hits_total{place="c",tier="l2"} 4.0
hits_total_of_others 100
"""


def test_what_servers_count():
    assert metrics.total(TEXT, "hits_total") == 7
    assert metrics.total(TEXT, "misses_total") == 0
    tiers = {it.labels["tier"]: it.value for it in metrics.samples(TEXT, "hits_total")}
    assert tiers == {"l1": 3, "l2": 4}


class Round:
    def __init__(self, rate, cpu):
        self.rate, self.cpu = rate, cpu


def test_rounds_are_compared_pair_by_pair(capsys):
    rounds = {
        "ours": [Round(10, 2), Round(20, 4), Round(30, 6)],
        "before: ours": [Round(5, 2), Round(10, 4), Round(15, 6)],
        "alone": [Round(1, 1)],
    }
    stats.print_changes(rounds)
    assert capsys.readouterr().out == (
        "ours ÷ before: rate 2.000 [2.000 … 2.000], CPU 1.000 [1.000 … 1.000]\n"
    )
    assert stats.spread([1, 2, 3], ".0f") == "2 [1 … 3]"
    assert stats.spread([7], ".0f") == "7 [7 … 7]"
    assert stats.percentiles([*range(99)]) == (49, 98)
    assert stats.percentiles([7]) == (7, 7)
