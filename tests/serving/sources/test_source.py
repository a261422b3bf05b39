# SPDX-License-Identifier: Apache-2.0
"""The properties that all sources share."""

import io
import threading

import pytest

from serving.sources import source


def test_a_call_takes_no_longer_than_it_may(monkeypatch):
    monkeypatch.setattr(source, "UNREACHABLE_S", 0.05)
    never = threading.Event()
    with pytest.raises(TimeoutError):
        source.with_timeout(never.wait)
    assert not never.is_set()
    never.set()
    monkeypatch.undo()
    with pytest.raises(io.UnsupportedOperation):
        source.with_timeout(lambda: io.BytesIO().fileno())
