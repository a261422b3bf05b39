# SPDX-License-Identifier: Apache-2.0
"""Settings of Hypothesis for all tests: no time limits, because machines are noisy, and the same
few examples in each run, because a run judges a change. The nightly run searches for older defects.
AWS's clients and httpx's are made quickly, and tests are collected without the garbage collector.
"""

import functools
import gc
import os
import ssl
from collections.abc import Generator
from typing import Any

import httpx
import pytest
from botocore.loaders import JSONFileLoader
from httpx._transports import default as httpx_transport
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
settings.load_profile("same")

_load_file = JSONFileLoader.load_file


@functools.cache
def _loaded(path: str) -> Any:
    return _load_file(JSONFileLoader(), path)


# Otherwise every session reads megabytes of service descriptions again.
setattr(JSONFileLoader, "load_file", lambda self, file_path: _loaded(file_path))  # noqa: B010


@functools.cache
def _checking(trust_env: bool, *environ: str | None) -> ssl.SSLContext:
    return httpx.create_ssl_context(True, None, trust_env)


def _context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    if verify is not True or cert:
        return httpx.create_ssl_context(verify, cert, trust_env)
    return _checking(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


# Otherwise every client reads all authorities again: 50 ms, more than a test's server takes.
setattr(httpx_transport, "create_ssl_context", _context)  # noqa: B010


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, and freeze all imported objects: it would scan vLLM's
    millions of objects again and again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        _freeze()
        gc.enable()


@pytest.fixture
def frozen_heap() -> None:
    """The garbage collector scans new objects only, as in the server: the objects that other tests
    have left would take hundreds of milliseconds of a turn of the event loop.
    """
    _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()
