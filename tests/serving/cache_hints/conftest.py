# SPDX-License-Identifier: Apache-2.0
"""A server whose engine answers on all paths."""

import pytest

from serving.protocol import MESSAGES, RESPONSES
from tests.fake_engine import whole
from tests.serving.conftest import running


@pytest.fixture(scope="module")
async def door(anyio_backend):
    async with running() as it:
        for path in (RESPONSES, MESSAGES):
            it.engine.answers[path] = whole(lambda call: {"said": "b a"})
        yield it
