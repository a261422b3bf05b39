# SPDX-License-Identifier: Apache-2.0
"""A server of LMCache for all tests: its imports take seconds."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.serving.engine.test_kv_connector import Server


@pytest.fixture(scope="session")
def lmcache_server() -> "Iterator[Server]":
    from tests.serving.engine.test_kv_connector import Server  # which imports vLLM

    found = Server()
    yield found
    found.kill()


@pytest.fixture(scope="module")
def server(lmcache_server: "Server") -> "Server":
    """The server, which knows no prompt."""
    lmcache_server.forget()
    return lmcache_server
