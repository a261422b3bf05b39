# SPDX-License-Identifier: Apache-2.0
"""Folders under /tmp on a machine that others also use."""

import os
import tempfile
from pathlib import Path

import pytest

from serving import folders
from serving.kv_cache import disk, fingerprints
from serving.sources.locate import locate
from serving.sources.s3 import S3
from tests.serving.kv_cache.test_disk import ONE, tier

ANOTHER = 4711


@pytest.fixture(autouse=True)
def home(monkeypatch):
    """A folder in a separate /tmp, where everybody may write."""
    with tempfile.TemporaryDirectory() as shared:
        Path(shared).chmod(0o1777)
        monkeypatch.setattr(folders, "HOME", Path(shared) / "slipway")
        yield Path(shared) / "slipway"


@pytest.fixture
def squatted(home):
    """Another user was there first, and made the folders writable for all."""
    if os.geteuid():
        pytest.skip("needs root, to give folders away")
    for name in (".", "served", "models"):
        (home / name).mkdir()
        (home / name).chmod(0o777)
        os.chown(home / name, ANOTHER, ANOTHER)
    return home


def second(home):
    return home.with_name(f"slipway-{os.geteuid()}")


def test_they_are_for_one_user(home):
    before = os.umask(0)
    try:
        made = folders.make(folders.place("served"))
    finally:
        os.umask(before)
    assert made == home / "served"
    assert [folder.stat().st_mode & 0o777 for folder in (home, made)] == [0o700, 0o700]


def test_looking_for_a_place_makes_nothing(home):
    folders.place("served")
    assert not home.exists()


def test_a_model_is_not_served_by_a_name_that_another_user_may_change(squatted, tmp_path):
    name = fingerprints.served_path(tmp_path, ONE)
    assert name == second(squatted) / "served" / ONE
    assert name.resolve() == tmp_path
    assert not [*(squatted / "served").iterdir()]


def test_models_are_not_kept_where_another_user_may_change_them(squatted):
    source = locate("s3://bucket/model", {})
    assert isinstance(source, S3)
    assert source.downloads == second(squatted) / "models"


def test_a_place_that_is_taken_before_it_is_made_is_refused(squatted):
    with pytest.raises(PermissionError, match="belongs to user 4711"):
        folders.make(squatted / "models")


def test_what_root_made_or_mounted_for_us_is_used(home):
    if os.geteuid():
        pytest.skip("needs root, to be another user")
    (home / "models").mkdir(parents=True)
    (home / "models").chmod(0o777)
    os.seteuid(ANOTHER)
    try:
        assert folders.place("models") == home / "models"
        assert folders.place("served") == second(home) / "served"  # where we may not write
        assert folders.make(folders.place("served")).stat().st_uid == ANOTHER
    finally:
        os.seteuid(0)


def test_an_operators_folder_may_belong_to_anybody(squatted, tmp_path):
    for folder in (tmp_path / "disk", tmp_path / "mine"):
        folder.mkdir()
        os.chown(folder, ANOTHER, ANOTHER)
    assert folders.make(tmp_path / "mine" / "models").is_dir()
    assert Path(disk.claim(tier(tmp_path / "disk"), ONE).path).is_dir()


def test_the_disk_tier_is_not_made_where_another_user_may_swap_it(home):
    if os.geteuid():
        pytest.skip("needs root, to give folders away")
    lmcache = home.with_name("lmcache")
    lmcache.mkdir()
    os.chown(lmcache, ANOTHER, ANOTHER)
    with pytest.raises(PermissionError, match="belongs to user 4711"):
        disk.claim(tier(lmcache), ONE)
    assert not [*lmcache.iterdir()]
