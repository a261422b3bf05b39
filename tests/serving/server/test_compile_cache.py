# SPDX-License-Identifier: Apache-2.0
"""The compile cache: files that another user could have written, or has changed, are not used."""

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import psutil
import pytest

from lmi_config.options.parsers import CACHE_SOURCE
from lmi_config.plan.compile_cache import MANIFEST, CompileCache
from serving.kv_cache import fingerprints
from serving.kv_cache.fingerprints import steady_path
from serving.server.compile_cache import VARIABLES, Kept, prepare_model_infos

LIMIT = 2**22
KEY = "0123456789abcdef"


@pytest.fixture
def cache(tmp_path):
    return CompileCache(folder=tmp_path / "cache", key=KEY, origin="OPTION_CACHE_FOLDER")


@pytest.fixture(autouse=True)
def umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def filled(cache, name="vllm/graph.py", content="code"):
    """The file of a completed start."""
    kept = Kept(cache, LIMIT)
    file = cache.part / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    kept.save()
    kept.close()
    return file


def test_files_of_a_finished_start_are_there_at_the_next(cache):
    file = filled(cache)
    kept = Kept(cache, LIMIT)
    assert file.read_text() == "code"
    assert kept.environment == {name: str(cache.part / at) for name, at in VARIABLES.items()}


def test_files_of_a_start_that_did_not_finish_are_made_again(cache):
    first = Kept(cache, LIMIT)
    file = cache.part / "half"
    file.write_text("co")
    first.close()
    assert Kept(cache, LIMIT).environment
    assert not file.exists()


@pytest.mark.parametrize("content", ["co", "other code", ""])
def test_a_changed_file_has_all_compiled_again(cache, content, caplog):
    file = filled(cache)
    other = filled(cache, "triton/kernel")
    file.write_text(content)
    assert Kept(cache, LIMIT).environment
    assert not file.exists()
    assert not other.exists()
    assert f"{file} has changed" in caplog.text


def test_a_manifest_that_cannot_be_read_lists_nothing(cache):
    for manifest in ("", "[]", '{"vllm/graph.py": 3}', "[" * 100_000):
        file = filled(cache)
        (cache.part / MANIFEST).write_text(manifest)
        Kept(cache, LIMIT).close()
        assert not file.exists()


def writable(cache):
    cache.part.chmod(0o770)


def file_writable(cache):
    (cache.part / "vllm/graph.py").chmod(0o666)


def folder_writable(cache):
    cache.folder.chmod(0o777)


def link_out(cache):
    (cache.part / "vllm/more.py").symlink_to("/etc/passwd")


def link_of_a_folder(cache):
    (cache.part / "triton").symlink_to("/tmp")


def pipe(cache):
    os.mkfifo(cache.part / "pipe", 0o600)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (writable, "other users can write to"),
        (file_writable, "other users can write to"),
        (folder_writable, "other users can write to"),
        (link_out, "leads to /etc/passwd"),
        (link_of_a_folder, "leads to /tmp"),
        (pipe, "neither a file nor a folder"),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_code_that_others_could_have_written_is_not_used(cache, change, reason, alone, caplog):
    file = filled(cache)
    other = None if alone else Kept(cache, LIMIT)
    change(cache)
    assert Kept(cache, LIMIT).environment == {}
    assert file.read_text() == "code"
    assert "OPTION_CACHE_FOLDER: compiled files are not kept" in caplog.text
    assert reason in caplog.text
    if other:
        other.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_code_of_another_user_is_not_used(cache, caplog):
    file = filled(cache)
    os.chown(file, 12345, -1)
    assert Kept(cache, LIMIT).environment == {}
    assert "belongs to user 12345" in caplog.text


def test_a_folder_that_cannot_be_made_is_told(tmp_path, caplog):
    (tmp_path / "file").touch()
    cache = CompileCache(folder=tmp_path / "file/cache", key=KEY, origin="OPTION_CACHE_FOLDER")
    assert Kept(cache, LIMIT).environment == {}
    assert "Not a directory" in caplog.text


def test_a_full_disk_is_told_and_not_used(cache, caplog):
    assert Kept(cache, LIMIT, least_free=2**62).environment == {}
    assert "bytes are free" in caplog.text


def test_a_second_server_leaves_files_alone_that_the_first_is_writing(cache):
    first = Kept(cache, LIMIT)
    file = cache.part / "half"
    file.write_text("co")
    second = Kept(cache, LIMIT)
    assert second.environment == first.environment
    assert file.read_text() == "co"
    first.close()
    second.close()


def test_a_killed_server_keeps_no_lock(cache):
    code = "import sys, fcntl, os\nfcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX)\n"
    Kept(cache, LIMIT).close()
    lock = str(cache.part / ".lock")
    subprocess.run([sys.executable, "-c", f"{code}os._exit(0)", lock], check=True)
    assert Kept(cache, LIMIT).environment


def test_other_versions_files_go_first_and_used_ones_stay(cache):
    parts = {}
    for number, name in enumerate(["a" * 16, "b" * 16, "c" * 16]):
        part = CompileCache(folder=cache.folder, key=name, origin="")
        filled(part, content="x" * (LIMIT // 4))
        os.utime(part.part / MANIFEST, (number, number))
        parts[name[0]] = part.part
    busy = os.open(parts["a"] / ".lock", os.O_RDWR)
    fcntl.flock(busy, fcntl.LOCK_SH)
    filled(cache, content="x" * (LIMIT // 4))
    kept = Kept(cache, LIMIT)
    assert kept.environment
    assert [name for name, part in parts.items() if part.exists()] == ["a", "c"]
    os.close(busy)
    kept.close()


def test_what_is_larger_than_the_limit_is_not_kept(cache, caplog):
    kept = Kept(cache, LIMIT)
    file = cache.part / "large"
    file.write_text("x" * (LIMIT + 1))
    kept.save()
    kept.close()
    assert "OPTION_CACHE_SIZE allows" in caplog.text
    assert Kept(cache, LIMIT).environment
    assert not file.exists()


@pytest.fixture
def packed(cache, tmp_path):
    """The folder of a completed start, in an archive."""
    file = filled(cache)
    archive = tmp_path / "compiled.tgz"
    subprocess.run(["tar", "-C", cache.folder, "-czf", archive, "."], check=True)
    shutil.rmtree(cache.folder)
    return archive, file


@pytest.fixture
def source(aws, packed):
    archive, _ = packed
    aws.client.create_bucket(Bucket="compiled")
    aws.client.put_object(Bucket="compiled", Key="a/b.tgz", Body=archive.read_bytes())
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    return f"s3://compiled/a/b.tgz#sha256={digest}"


def test_an_archive_fills_an_empty_folder_once(cache, packed, source, aws):
    assert CACHE_SOURCE.fullmatch(source)
    _, file = packed
    for _ in range(2):
        kept = Kept(cache, LIMIT, source)
        assert kept.environment
        assert file.read_text() == "code"
        kept.close()
    assert aws.fetched.count("a/b.tgz") == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda source: source[:-4] + "beef", "and not the option's"),
        (lambda source: source.replace("b.tgz", "c.tgz"), "there is no such object"),
    ],
)
def test_an_archive_that_is_not_the_options_is_not_unpacked(
    cache, packed, source, change, reason, caplog
):
    kept = Kept(cache, LIMIT, change(source))
    assert kept.environment, "the folder is used, and filled by this start"
    assert not packed[1].exists()
    assert "OPTION_CACHE_SOURCE: all is compiled here" in caplog.text
    assert reason in caplog.text


def test_an_archive_of_other_versions_or_too_large_is_told(cache, packed, source, caplog):
    other = dataclasses.replace(cache, key="f" * 16)
    assert Kept(other, LIMIT, source).environment
    assert f"has no files for the key {'f' * 16}" in caplog.text
    assert Kept(cache, 100, source).environment
    assert "the limit is 100" in caplog.text
    assert not packed[1].exists()


def test_an_archive_that_was_cut_is_told(cache, packed, aws, caplog):
    content = packed[0].read_bytes()[:-40]
    aws.client.create_bucket(Bucket="compiled")
    aws.client.put_object(Bucket="compiled", Key="b.tgz", Body=content)
    digest = hashlib.sha256(content).hexdigest()
    assert Kept(cache, LIMIT, f"s3://compiled/b.tgz#sha256={digest}").environment
    assert "cannot be unpacked" in caplog.text


@pytest.mark.parametrize("kind", ["link", "outside", "pipe"])
def test_an_archive_with_more_than_files_and_folders_is_not_used(
    cache, packed, aws, kind, tmp_path, caplog
):
    archive = tmp_path / "odd.tar"
    with tarfile.open(archive, "w") as members:
        odd = tarfile.TarInfo(f"{cache.key}/{'../../../out' if kind == 'outside' else 'odd'}")
        odd.type = {"link": tarfile.SYMTYPE, "pipe": tarfile.FIFOTYPE}.get(kind, tarfile.REGTYPE)
        odd.linkname = "/etc/passwd"
        members.addfile(odd)
    aws.client.create_bucket(Bucket="compiled")
    aws.client.put_object(Bucket="compiled", Key="odd.tar", Body=archive.read_bytes())
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    kept = Kept(cache, LIMIT, f"s3://compiled/odd.tar#sha256={digest}")
    assert kept.environment
    assert "cannot be unpacked" in caplog.text
    assert not [*cache.folder.parent.rglob("o[du][dt]")]


def test_what_a_killed_start_has_fetched_makes_room_for_the_next(cache, source):
    left = cache.part / ".source-1/b.tgz"
    left.parent.mkdir(parents=True)
    left.touch()
    seen = []
    Kept(cache, LIMIT, source, lambda _: seen.append(([*cache.folder.iterdir()], left.exists())))
    assert seen
    assert all(it == ([cache.part], False) for it in seen)


def test_what_is_made_later_is_private(cache):
    os.umask(0o002)
    Kept(cache, LIMIT)
    file = cache.part / "later"
    file.write_text("code")
    assert file.stat().st_mode & 0o022 == 0


def test_what_the_gpus_of_another_machine_can_do_is_forgotten(cache):
    file = filled(cache, "vllm/gpu_p2p_access_cache_for_0,1.json")
    assert Kept(cache, LIMIT).environment
    assert not file.exists()


def test_no_cache_no_variables():
    kept = Kept(None, LIMIT)
    kept.save()
    assert kept.environment == {}


def test_model_infos_of_the_image_are_copied_and_vllms_own_stay(tmp_path):
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    for name in ("one.json", "two.json"):
        (prepared / name).write_text("{}")
    own = tmp_path / "root/modelinfos/one.json"
    own.parent.mkdir(parents=True)
    own.write_text("own")
    prepare_model_infos({"VLLM_CACHE_ROOT": str(tmp_path / "root")}, prepared)
    assert own.read_text() == "own"
    assert sorted(it.name for it in own.parent.iterdir()) == ["one.json", "two.json"]
    prepare_model_infos({"HOME": str(tmp_path / "home")}, prepared)
    assert len([*(tmp_path / "home/.cache/vllm/modelinfos").iterdir()]) == 2


PATH = """
import sys
from pathlib import Path
from serving.kv_cache.fingerprints import steady_path
print(steady_path(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def refused(*_):
    raise PermissionError


def descriptors():
    return psutil.Process().num_fds()


def test_a_model_has_the_same_path_wherever_it_is(tmp_path, monkeypatch):
    folders = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"of": str(tmp_path)}))
        (folder / "model.safetensors").write_bytes(b"x" * 100)
        folders.append(folder)
    command = [sys.executable, "-c", PATH, str(folders[0])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        assert it.stdin
        assert it.stdout
        one = Path(it.stdout.readline().strip())
        assert one != folders[0]
        assert one.samefile(folders[0])
        opened = descriptors()
        assert steady_path(folders[1]) == folders[1], "another server uses the link"
        assert descriptors() <= opened
        it.stdin.close()
        it.wait()
        opened = descriptors()
        with monkeypatch.context() as patched:
            patched.setattr(fingerprints, "served_path", refused)
            assert steady_path(folders[1]) == folders[1], "the link cannot be written"
        assert descriptors() <= opened
    assert steady_path(folders[1]) == one
    assert one.samefile(folders[1])
