# SPDX-License-Identifier: Apache-2.0
"""What sources have in common."""

import io
import time

import pytest

from serving.sources import source


def test_a_call_takes_no_longer_than_it_may(monkeypatch):
    monkeypatch.setattr(source, "UNREACHABLE_S", 0.05)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        source.with_timeout(lambda: time.sleep(1))
    assert time.monotonic() - began < 0.5
    monkeypatch.undo()
    with pytest.raises(io.UnsupportedOperation):
        source.with_timeout(lambda: io.BytesIO().fileno())
