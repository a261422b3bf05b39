# SPDX-License-Identifier: Apache-2.0
"""Files that others wait for while they are fetched."""

import itertools
import os

import pytest

from serving.sources.arriving import LONGEST, Sign, Unfetched, wait


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model-00002-of-00003.safetensors"


@pytest.fixture
def sign(tmp_path):
    return Sign(tmp_path / "arriving")


def waited(file, sign, *events, size=3, still_s=10.0):
    """Wait, while one event happens at each look. Returns the number of looks that were in vain.
    The clock ticks once a look.
    """
    ticks, happening = itertools.count(), iter(events)
    looks = 0

    def pause(_):
        nonlocal looks
        looks += 1
        next(happening, lambda: None)()

    wait(file, size, sign.path, still_s, pause, lambda: float(next(ticks)))
    return looks


def test_a_file_that_is_there_is_not_waited_for(file, sign):
    file.write_bytes(b"abc")
    assert waited(file, sign) == 0


def test_a_file_is_waited_for_until_it_has_its_name(file, sign):
    part = file.with_name(f"{file.name}.0a1b2c3d")
    events = [lambda: part.write_bytes(b"ab"), lambda: part.write_bytes(b"abc")]
    assert waited(file, sign, *events, lambda: part.rename(file)) == 3


def test_a_fetch_that_fails_ends_the_wait_with_its_reason(file, sign):
    reason = "'s3://models/tiny': an object changed while it was fetched; start again"
    with pytest.raises(Unfetched) as caught:
        waited(file, sign, lambda: None, lambda: sign.fail(reason))
    assert str(caught.value) == reason


def test_a_reason_has_a_bound(file, sign):
    sign.fail("a" * (2 * LONGEST))
    with pytest.raises(Unfetched, match=f"^a{{{LONGEST}}}$"):
        waited(file, sign)


def test_a_file_of_another_size_is_refused(file, sign):
    with pytest.raises(Unfetched, match=r"has 2 bytes instead of 3; start again"):
        waited(file, sign, lambda: file.write_bytes(b"ab"))


def test_a_wait_without_progress_ends(file, sign):
    with pytest.raises(Unfetched, match="nothing has arrived for 10 s"):
        waited(file, sign)


def test_a_wait_goes_on_while_bytes_arrive(file, sign):
    times = iter(range(1, 100))
    moved = [lambda: os.utime(sign.path, (0, next(times)))] * 50
    assert waited(file, sign, *moved, lambda: file.write_bytes(b"abc")) == 51


def test_a_wait_without_its_sign_ends(file, sign):
    with pytest.raises(Unfetched, match="cannot be read"):
        waited(file, sign, sign.path.unlink)
