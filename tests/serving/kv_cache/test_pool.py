# SPDX-License-Identifier: Apache-2.0
"""The cache server's memory in /dev/shm, which killed servers leave behind: tested with real
processes.
"""

import fcntl
import os
import subprocess
import sys

import pytest

from serving.kv_cache import pool

POOL = "lmcache_l1_pool_slipway-"
SERVER = """
import sys
from pathlib import Path
from serving.kv_cache import pool as kv_pool
kv_pool.SHARED_MEMORY = Path(sys.argv[1])
with kv_pool.cleanup():
    pool = Path(sys.argv[1]) / sys.argv[2]
    kv_pool.hold(pool)
    pool.write_bytes(b"KV")
    print("ready", flush=True)
    sys.stdin.readline()
"""


class Server:
    """A server with a pool. It ends on a command, or is killed."""

    def __init__(self, folder, port):
        command = [sys.executable, "-c", SERVER, str(folder), f"{POOL}{port}"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout
        assert self.process.stdout.readline() == b"ready\n"

    def end(self, killed=False):
        if killed:
            self.process.kill()
        self.process.communicate()
        return self.process.returncode


@pytest.fixture
def started():
    found = []

    def start(*arguments):
        found.append(Server(*arguments))
        return found[-1]

    yield start
    for server in found:
        if server.process.returncode is None:
            server.end(killed=True)


@pytest.fixture
def pools(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "SHARED_MEMORY", tmp_path)
    return lambda: {file.name.removeprefix(POOL) for file in tmp_path.glob(f"{POOL}*")}


def test_what_a_killed_server_left_is_removed_at_the_next_start(tmp_path, started, pools):
    started(tmp_path, 1).end(killed=True)
    living = started(tmp_path, 2)
    assert pools() == {"2", "2.lock"}
    with pool.cleanup():
        assert pools() == {"2", "2.lock"}
    assert living.end() == 0
    assert pools() == set()


def test_a_server_that_ends_leaves_nothing(tmp_path, started, pools):
    assert started(tmp_path, 1).end() == 0
    assert pools() == set()


def test_what_others_have_there_stays(tmp_path, started, pools):
    others = ["psm_1", f"{POOL}1", f"{POOL}2.lock.old", "other.lock", f"{POOL}x.lock", "x"]
    for name in others:
        (tmp_path / name).write_text("somebody else's")
    (tmp_path / f"{POOL}3.lock").symlink_to(tmp_path / "x")
    (tmp_path / f"{POOL}3").write_text("somebody else's")
    started(tmp_path, 4).end(killed=True)
    before = {file.name for file in tmp_path.iterdir()} - {f"{POOL}4", f"{POOL}4.lock"}
    with pool.cleanup():
        pass
    assert {file.name for file in tmp_path.iterdir()} == before
    assert {(tmp_path / name).read_text() for name in others} == {"somebody else's"}


def test_one_pool_is_one_servers(tmp_path, started, pools):
    started(tmp_path, 1)
    with pool.cleanup(), pytest.raises(BlockingIOError):
        pool.hold(tmp_path / f"{POOL}1")
    assert pools() == {"1", "1.lock"}


def test_a_lock_of_another_user_is_not_waited_for(tmp_path, pools, caplog):
    if os.geteuid():
        pytest.skip("needs root, to give files away")
    squatted = tmp_path / "slipway-0.lock"
    squatted.write_text("")
    os.chown(squatted, 4711, 4711)
    with squatted.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pool.cleanup():
            pool.hold(tmp_path / f"{POOL}1")
    assert "a lock in /dev/shm is another user's" in caplog.text


def test_where_there_is_no_shared_memory_a_server_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "SHARED_MEMORY", tmp_path / "none")
    with pool.cleanup():
        pass
