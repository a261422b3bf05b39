# SPDX-License-Identifier: Apache-2.0
"""Whose fault it is when an answer breaks off."""

import pytest
from starlette.responses import StreamingResponse

from tests.serving.conftest import running

pytestmark = pytest.mark.anyio

FIRST = b'data: {"choices": [{"text": "a", "token_ids": [1]}]}\n\n'


def streaming(*events):
    """An engine's app that answers with these events. An exception among them is raised."""

    async def app(scope, receive, send):
        async def stream():
            for event in events:
                if isinstance(event, Exception):
                    raise event
                yield event

        await StreamingResponse(stream(), media_type="text/event-stream")(scope, receive, send)

    return app


@pytest.mark.parametrize("begun", [(), (FIRST,)])
@pytest.mark.parametrize(
    ("last", "message", "log"),
    [
        (
            b'data: {"choices": 5}\n\n',
            "the server failed on this request; its log says why",
            "a request failed unexpectedly",
        ),
        (
            RuntimeError("boom"),
            "the engine broke off; the server's log says why",
            "the engine raised while it answered a request",
        ),
    ],
)
async def test_who_is_blamed_for_a_stream_that_breaks_off(caplog, begun, last, message, log):
    """Our own reply that cannot read an event, or the engine."""
    async with running() as served:
        served.engine.app = streaming(*begun, last)
        answer = await served.invoke({"inputs": "a", "stream": True})
        assert answer.status_code == (200 if begun else 500)
        assert message in answer.text.splitlines()[-1]
    logged = {"a request failed unexpectedly", "the engine raised while it answered a request"}
    assert logged & {record.message for record in caplog.records} == {log}
