# SPDX-License-Identifier: Apache-2.0
"""The tests of a file share an event loop."""

import pytest


@pytest.fixture(scope="module", autouse=True)
async def one_loop(anyio_backend):
    """gRPC's poller tells the loop of each call of its end, later than the test: a closed loop
    would raise.
    """
