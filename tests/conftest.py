# SPDX-License-Identifier: Apache-2.0
"""Hypothesis everywhere: no time limits on noisy machines, and the same examples in each run of CI,
which is to judge a change and not to find what was there before it. AWS's clients are made quickly.
"""

import functools
import gc
import os
from typing import Any

import pytest
from botocore.loaders import JSONFileLoader
from hypothesis import HealthCheck, settings

pytest_plugins = ("tests.durations",)

settings.register_profile(
    "random",
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("same", settings.get_profile("random"), derandomize=True, max_examples=30)
settings.load_profile("same" if os.environ.get("CI") else "random")

_load_file = JSONFileLoader.load_file


@functools.cache
def _loaded(path: str) -> Any:
    return _load_file(JSONFileLoader(), path)


# Every session reads megabytes of descriptions of services anew.
setattr(JSONFileLoader, "load_file", lambda self, file_path: _loaded(file_path))  # noqa: B010


def pytest_collection_finish() -> None:
    """What is imported now stays: the collector would look at vLLM's millions of objects again and
    again.
    """
    _freeze()


@pytest.fixture
def frozen_heap() -> None:
    """The collector looks at new objects only, as in the server: what other tests have left would
    take hundreds of milliseconds of a turn of the event loop.
    """
    _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()
