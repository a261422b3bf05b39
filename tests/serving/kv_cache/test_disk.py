# SPDX-License-Identifier: Apache-2.0
"""The disk tier's folder: real processes on real folders, which also have files of others."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lmi_config.facts import machine
from lmi_config.plan.kv_tiers import DiskTier
from serving.kv_cache import disk

MIB = 1024**2
ONE, TWO, THREE = "1" * 16, "2" * 16, "3" * 16

SERVER = """
import sys
from serving.kv_cache import disk
from tests.serving.kv_cache.test_disk import tier
print("ready", flush=True)
sys.stdin.readline()
claimed = disk.claim(tier(sys.argv[1]), sys.argv[2])
print(claimed.path, flush=True)
sys.stdin.readline()
"""


def tier(path, size=1 << 30):
    return DiskTier(path=str(path), size=size, direct=False)


class Server:
    """A process that claims its folder on a command, and holds it until it is killed."""

    def __init__(self, path, fingerprint):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(path), fingerprint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin
        assert self.process.stdout
        self.input, self.output = self.process.stdin, self.process.stdout
        assert self.output.readline() == "ready\n"

    def go(self):
        self.input.write("\n")
        self.input.flush()

    def claimed(self):
        line = self.output.readline()
        assert line, "it failed"
        return Path(line.strip())

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.input.close()
        self.output.close()


@contextlib.contextmanager
def servers(path, *fingerprints):
    """Servers that claim their folders at the same moment."""
    found = []
    try:
        found += [Server(path, fingerprint) for fingerprint in fingerprints]
        for server in found:
            server.go()
        yield found
    finally:
        for server in found:
            server.kill()


def write(file, size=4096):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x" * size)


def tree(root):
    """Everything below a folder: path → content, or a link's target."""
    return {
        str(path.relative_to(root)): path.readlink()
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(root.rglob("*"))
    }


def left_by_a_killed_server(path, fingerprint, files=1):
    with servers(path, fingerprint) as (server,):
        folder = server.claimed()
    for number in range(files):
        write(folder / f"m@0x1@{number}.data")
    return folder


@pytest.fixture
def strangers(tmp_path):
    """A disk that others also use. It also has files such as LMCache or another Slipway would
    write.
    """
    path = tmp_path / "disk"
    write(path / "models/llama/model.safetensors")
    write(path / "lost+found/x")
    write(path / "notes.txt")
    write(path / "lmcache/m@0x1@0.data")
    write(path / ".lock")
    write(path / f"{ONE}/model@0x1@0.data")
    write(path / f"{TWO}/.lock")
    write(path / f"{TWO}/model@0x1@0.data")
    write(tmp_path / f"elsewhere/{THREE}/.lock")
    write(tmp_path / f"elsewhere/{THREE}/model@0x1@0.data")
    (path / THREE).symlink_to(tmp_path / "elsewhere" / THREE)
    return tmp_path


def test_what_others_have_on_the_disk_is_untouched(strangers):
    before = tree(strangers)
    with servers(strangers / "disk", ONE, TWO, "a" * 16) as started:
        folders = {server.claimed() for server in started}
    with servers(strangers / "disk", "b" * 16) as (server,):
        folders.add(server.claimed())
    assert len(folders) == 4
    own = f"disk/{machine.KV}"
    assert {name: it for name, it in tree(strangers).items() if not name.startswith(own)} == before


def test_in_our_own_folder_only_caches_that_we_made_are_removed(strangers):
    path = strangers / "disk"
    ours = left_by_a_killed_server(path, "c" * 16, files=3)
    write(ours / "m@0x1@9.tmp")  # it was killed while it wrote this one
    home = path / machine.KV
    write(home / "README")
    write(home / "somebody/.lock")
    write(home / f"{ONE}/model@0x1@0.data")  # has no lock of ours
    (home / THREE).symlink_to(strangers / "elsewhere" / THREE)
    (home / TWO).mkdir()
    (home / TWO / ".lock").symlink_to(strangers / "elsewhere" / THREE / ".lock")
    before = {name: it for name, it in tree(strangers).items() if "c" * 16 not in name}
    with servers(path, "d" * 16) as (server,):
        server.claimed()
    assert not ours.exists()
    after = {name: it for name, it in tree(strangers).items() if "d" * 16 not in name}
    assert after == before


def test_a_strangers_file_in_a_cache_of_ours_stays(tmp_path):
    ours = left_by_a_killed_server(tmp_path, ONE)
    write(ours / "important.txt")
    with servers(tmp_path, TWO) as (server,):
        server.claimed()
    assert {file.name for file in ours.iterdir()} == {".lock", "important.txt"}


def test_servers_that_start_at_once_leave_each_other_alone(tmp_path):
    for letter in "ab":
        left_by_a_killed_server(tmp_path, ONE, files=300)
        names = [f"{letter}{number}" * 8 for number in range(4)]
        with servers(tmp_path, *names) as started:
            folders = [server.claimed() for server in started]
            assert [folder.name for folder in folders] == names
            assert all((folder / ".lock").is_file() for folder in folders)
        assert not (tmp_path / machine.KV / ONE).exists()


def test_a_cache_goes_when_no_server_holds_it(tmp_path):
    with servers(tmp_path, ONE, ONE) as (first, second):
        folder = first.claimed()
        assert second.claimed() == folder
        write(folder / "m@0x1@0.data")
        first.kill()
        with servers(tmp_path, TWO) as (third,):
            third.claimed()
        assert (folder / "m@0x1@0.data").exists()
        assert machine.reclaimable(tmp_path) == 0
    with servers(tmp_path, TWO) as (third,):
        third.claimed()
    assert not folder.exists()


def test_the_newest_files_of_the_same_model_are_kept(tmp_path):
    folder = left_by_a_killed_server(tmp_path, ONE)
    for age, name in enumerate("abcd"):
        write(folder / f"m@0x1@{name}.data", MIB)
        os.utime(folder / f"m@0x1@{name}.data", (1e9 - age, 1e9 - age))
    write(folder / "m@0x1@e.tmp", MIB)
    (folder / "m@0x1@0.data").unlink()
    found = disk.claim(tier(tmp_path, 4 * MIB), ONE)
    assert Path(found.path) == folder
    assert {file.name for file in folder.glob("m*")} == {"m@0x1@a.data", "m@0x1@b.data"}
    assert found.size == 2 * MIB


def test_only_what_a_server_would_remove_counts_as_free(strangers):
    path = strangers / "disk"
    assert machine.reclaimable(path) == 0
    left_by_a_killed_server(path, "c" * 16, files=3)
    assert machine.reclaimable(path) == 3 * 4096


@pytest.mark.parametrize("kind", ["link", "another user's"])
def test_a_folder_of_that_name_that_is_not_ours_is_refused(tmp_path, kind):
    write(tmp_path / f"victim/{ONE}/.lock")
    write(tmp_path / f"victim/{ONE}/m@0x1@0.data")
    path = tmp_path / "disk"
    path.mkdir()
    if kind == "link":
        (path / machine.KV).symlink_to(tmp_path / "victim")
    else:
        if os.geteuid():
            pytest.skip("needs root, to give a folder away")
        shutil.copytree(tmp_path / "victim", path / machine.KV)
        os.chown(path / machine.KV, 4711, 4711)
    before = tree(tmp_path)
    with pytest.raises(OSError, match=machine.KV):
        disk.claim(tier(path), TWO)
    assert machine.reclaimable(path) == 0
    assert tree(tmp_path) == before
