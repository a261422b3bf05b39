# SPDX-License-Identifier: Apache-2.0
"""The compile cache's folder and key."""

import dataclasses
import json
from pathlib import Path

import pytest

from lmi_config.facts.gpus import Gpu
from lmi_config.facts.machine import is_volume
from lmi_config.plan import compile_cache

H100 = Gpu(name="H100", memory=80 * 2**30, driver="580.65.06")
MOUNTS = """\
22 1 8:1 / / rw - overlay overlay rw
23 22 8:2 / /models rw - ext4 /dev/sdb rw
24 22 0:1 / /dev/shm rw - tmpfs tmpfs rw
"""


@pytest.fixture
def mounts(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTS)
    return tmp_path


def test_a_volume_is_mounted_and_not_in_memory(mounts):
    folders = [Path(it) for it in ("/models/not/yet", "/tmp/x", "/dev/shm/x")]
    assert [is_volume(it, mounts) for it in folders] == [True, False, False]


def test_other_versions_devices_and_drivers_have_other_parts():
    other = dataclasses.replace(H100, name="A100")
    newer = dataclasses.replace(H100, driver="590.1")
    minor = dataclasses.replace(H100, driver="580.99")
    keys = [compile_cache.key(it) for it in ((), (H100,), (other,), (newer,))]
    assert len({*keys}) == 4
    assert compile_cache.key((minor,)) == compile_cache.key((H100, H100)) == keys[1]


def test_a_named_folder_wins_and_no_volume_no_cache(tmp_path):
    found = compile_cache.look(str(tmp_path), {"HF_HOME": "/models"}, (), "OPTION_CACHE_FOLDER")
    assert found
    assert (found.folder, found.origin, found.seen) == (tmp_path, "OPTION_CACHE_FOLDER", False)
    assert compile_cache.look(None, {}, ()) is None


def test_a_volume_with_downloads_keeps_it(mounts):
    downloads = {"SERVING_DOWNLOAD_DIR": "/tmp", "HF_HOME": "/models"}
    found = compile_cache.look(None, downloads, (), root=mounts)
    assert found
    assert str(found.folder) == "/models/slipway-compile-cache"
    assert found.origin == "HF_HOME"


def test_a_finished_start_has_been_seen(tmp_path):
    part = tmp_path / compile_cache.key(())
    part.mkdir()
    for text, size in (('{"a": [3, ""], "b": [4, ""]}', 7), ("{", None), ("[]", None), ("3", None)):
        (part / "manifest.json").write_text(text)
        found = compile_cache.look(str(tmp_path), {}, (), "OPTION_CACHE_FOLDER")
        assert found
        assert (found.seen, found.size) == (size is not None, size or 0)
    (part / "manifest.json").write_text(json.dumps({"a": [1]}))
    found = compile_cache.look(str(tmp_path), {}, (), "OPTION_CACHE_FOLDER")
    assert found
    assert not found.seen
