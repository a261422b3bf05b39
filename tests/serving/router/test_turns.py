# SPDX-License-Identifier: Apache-2.0
"""How long bodies occupy the router's event loop, in its own CPU time. Replicas refuse these
bodies, and the router reads them before.
"""

from typing import Any

import pytest

from tests.serving.api.test_turns import LONGEST_S, Turns, filled
from tests.serving.router.conftest import routing

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("frozen_heap"),
]

SAID = b'"messages":[{"role":"user","content":"a"}]'
BODIES = [
    *(b'{"%b":[X],%b}' % (key, SAID) for key in (b"adapters", b"cache_salt", b"requestType")),
    b'{"documents":[X],"document_order":"canonical",%b}' % SAID,
    b'{"stream":true,"temperature":0,"messages":[X]}',
]


async def longest(body: bytes, **settings: Any) -> float:
    async with routing(1, **settings) as it, Turns() as turns:
        answer = await it.post(body, "/v1/chat/completions")
    assert answer.status_code == 200
    return float(turns.longest)


@pytest.mark.parametrize("body", BODIES)
async def test_no_value_of_a_body_holds_the_event_loop(body):
    assert await longest(filled(body, b"[[[]]]"), router_continue_streams=True) < LONGEST_S


async def test_no_number_of_messages_holds_the_event_loop():
    body = b'{"messages":[X,{"content":[{"data":"a"}]}]}'
    assert await longest(filled(body, b"{}")) < LONGEST_S
