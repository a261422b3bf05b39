# SPDX-License-Identifier: Apache-2.0
"""The tests of a file share an event loop."""

import pytest


@pytest.fixture(scope="module", autouse=True)
async def one_loop(anyio_backend):
    """gRPC's poller reports the end of each call to the loop, later than the test: a closed loop
    would raise.
    """
