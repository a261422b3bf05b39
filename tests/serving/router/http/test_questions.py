# SPDX-License-Identifier: Apache-2.0
"""The router's own questions: every kind of answer, and a connection that is kept."""

import asyncio

import pytest

from serving.router.http.questions import Questions
from tests.serving.router.conftest import END, STREAM, FakeReplica, chunk, sends, whole

pytestmark = pytest.mark.anyio

BEGUN = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n"


@pytest.fixture
async def server():
    found = FakeReplica()
    await found.start()
    yield found
    await found.stop()


@pytest.fixture
def questions(server):
    found = Questions(server.url)
    yield found
    found.close()


async def ask(questions, most=1_000, within=5.0, **headers):
    return await questions.get("/path?query", headers, most, within)


async def closes(replica, asked, writer):
    """An answer that ends with its connection."""
    writer.write(BEGUN + b"body")
    writer.close()


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (sends(whole(200, b"body")), 200, b"body"),
        (sends(whole(503, b"")), 503, b""),
        (sends(b"HTTP/1.1 204 No\r\n\r\n"), 204, b""),
        (sends(STREAM + chunk(b"bo") + chunk(b"dy") + END), 200, b"body"),
        (sends(b"HTTP/1.1 102 Wait\r\n\r\n" + whole(200, b"body")), 200, b"body"),
        (closes, 200, b"body"),
    ],
)
async def test_any_answer_is_read_whole(server, questions, answer, status, body):
    server.answer = answer
    for _ in range(3):
        told = await ask(questions, name="value")
        assert (told.status, told.body) == (status, body)
    asked = server.asked[0]
    assert (asked.method, asked.target) == ("GET", "/path?query")
    assert asked.headers == {
        "host": f"127.0.0.1:{server.port}",
        "accept-encoding": "identity",
        "name": "value",
    }
    assert len(server.connections) <= 1


async def test_headers_have_names_in_lower_case(server, questions):
    server.answer = sends(whole(200, b"", "X-One: 1"))
    assert (await ask(questions)).headers["x-one"] == "1"


async def test_a_connection_that_the_server_has_closed_is_no_failure(server, questions):
    async def once(replica, asked, writer):
        writer.write(whole(200, b"once"))
        await writer.drain()
        asyncio.get_running_loop().call_later(0.001, writer.transport.abort)

    server.answer = once
    for _ in range(50):
        assert (await ask(questions)).body == b"once"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (whole(200, b"a" * 1_001), "more than 1,000 bytes"),
        (STREAM + chunk(b"a" * 600) * 2 + END, "more than 1,000 bytes"),
        (BEGUN + b"a" * 1_001, "more than 1,000 bytes"),
        (b"nonsense\r\n\r\n", "not HTTP"),
    ],
)
async def test_an_answer_that_cannot_be_taken_says_why(server, questions, content, why):
    server.answer = sends(content)
    with pytest.raises(OSError, match=why):
        await ask(questions)
    server.answer = sends(whole(200, b"body"))
    assert (await ask(questions)).body == b"body"


async def test_a_server_that_is_not_there_refuses(server, questions):
    await server.stop()
    with pytest.raises(ConnectionRefusedError):
        await ask(questions)


async def test_the_next_question_after_a_silence_has_a_new_connection(server, questions):
    server.answer = sends(then_s=60)
    with pytest.raises(TimeoutError):
        await ask(questions, within=0.05)
    server.answer = sends(whole(200, b"body"))
    assert (await ask(questions)).body == b"body"
