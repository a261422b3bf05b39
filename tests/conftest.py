# SPDX-License-Identifier: Apache-2.0
"""Settings of Hypothesis for all tests: no time limits, because machines are noisy, and in CI the
same examples in each run, because CI judges a change and does not search for older defects. AWS's
clients are made quickly.
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


# Otherwise every session reads megabytes of service descriptions again.
setattr(JSONFileLoader, "load_file", lambda self, file_path: _loaded(file_path))  # noqa: B010


def pytest_collection_finish() -> None:
    """Freeze all imported objects: the garbage collector would scan vLLM's millions of objects
    again and again.
    """
    _freeze()


@pytest.fixture
def frozen_heap() -> None:
    """The garbage collector scans new objects only, as in the server: the objects that other tests
    have left would take hundreds of milliseconds of a turn of the event loop.
    """
    _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()
