# SPDX-License-Identifier: Apache-2.0
"""The hints in requests of released clients, as `serve` and `route` read them."""

import json

import pytest

from serving.cache_hints.intent import READ_HERE, CacheIntent, digest
from serving.router.policy.routing_request import RequestReader
from tests import agents
from tests.serving.router.conftest import routing

pytestmark = pytest.mark.anyio


def of(number: int) -> str:
    """A conversation by the number in its id: ids of clients are numbered in each file."""
    return digest(None, f"00000000-0000-4000-8000-{number:012}")


def claude(session: str, parent: str = "", marked: int = 300) -> CacheIntent:
    ignored = () if marked else ("cache_control",)
    return CacheIntent(session=session, parent=parent, seconds=1800, marked=marked, ignored=ignored)


def codex(session: str, parent: str = "") -> CacheIntent:
    return CacheIntent(session=session, parent=parent, bucket=of(1), seconds=1800)


AGENT, AGENTS_AGENT = (digest(None, f"agent-{number:04}") for number in (2, 3))
NOTHING = CacheIntent()
HOUR = CacheIntent(seconds=3600, marked=3600)
NEMO = CacheIntent(
    ignored=tuple(
        f"nvext.{field}"
        for field in (
            *("agent_hints.osl", "agent_hints.latency_sensitivity", "agent_hints.prefix_id"),
            *("agent_hints.total_requests", "agent_hints.iat", "cache_control"),
        )
    )
)
WITH_MARKS = "with AnthropicPromptCachingMiddleware"
READ = {
    "claude_code: the first turn": claude(of(1)),
    "claude_code: a tool's result": claude(of(1)),
    "claude_code: a sub-agent's first turn": claude(AGENT, of(1)),
    "claude_code: a sub-agent's second turn": claude(AGENT, of(1)),
    "claude_code: the first turn of a sub-agent's sub-agent": claude(AGENTS_AGENT, AGENT),
    "claude_code: a further prompt": claude(of(4)),
    "claude_code: compaction": claude(of(4), marked=0),  # the mark is before the last message
    "claude_code: after compaction": claude(of(4)),
    "claude_code: a title for an interactive session": CacheIntent(session=of(5), seconds=1800),
    "claude_code: the first turn of an interactive session": claude(of(5)),
    "claude_code: a tool's result in an interactive session": claude(of(5)),
    "codex: the first turn": codex(of(1)),
    "codex: a tool's result": codex(of(1)),
    "codex: a sub-agent is started": codex(of(1)),
    "codex: a sub-agent's first turn": codex(of(11), of(1)),
    "codex: a sub-agent's second turn": codex(of(11), of(1)),
    "codex: compaction": codex(of(11), of(1)),
    "codex: after compaction": codex(of(11), of(1)),
    "langchain: a chat's first turn": NOTHING,
    "langchain: a tool's result in a streamed chat": NOTHING,
    "langchain: a further prompt of a chat": NOTHING,
    "langchain: a chat with prompt_cache_key and prompt_cache_options": CacheIntent(
        bucket=digest(None, "bucket"), seconds=1800
    ),
    "langchain: a tool's result in Responses": NOTHING,
    "langchain: a further prompt of Responses": NOTHING,
    f"langchain: the first turn of Messages {WITH_MARKS}": HOUR,
    f"langchain: a tool's result in Messages {WITH_MARKS}": HOUR,
    f"langchain: a further prompt of Messages {WITH_MARKS}": HOUR,
    "langchain: a tool's result in streamed Messages without marks": NOTHING,
    "nemo: the first turn": NEMO,
    "nemo: a tool's result": NEMO,
}
ALL = pytest.mark.parametrize("sent", agents.sent(), ids=str)


@pytest.fixture(scope="module")
async def router(anyio_backend):
    async with routing(1, routing_strategy="prefixaware") as it:
        yield it


def test_every_request_has_its_reading():
    assert [str(it) for it in agents.sent()] == [*READ]


@ALL
async def test_serve_accepts_the_request_and_reads_its_hints(door, sent):
    door.engine.calls.clear()
    asked = {**sent.headers, "X-Slipway-Cache": "1"}
    answer = await door.post(sent.path, sent.body, headers=asked)
    assert answer.status_code == 200, answer.text
    expected = READ[str(sent)]
    assert answer.headers["X-Slipway-Cache"] == expected.told
    (call,) = door.engine.calls
    assert (call.session, call.marked) == (expected.session or None, expected.marked > 0)
    assert READ_HERE.isdisjoint(call.request)


@ALL
async def test_route_passes_the_request_on_and_reads_all_but_marks(router, sent):
    answer = await router.post(sent.body, sent.path, headers=sent.headers)
    assert answer.status_code == 200, answer.text
    (replica,) = router.fleet
    assert replica.asked[-1].json() == sent.body
    expected = READ[str(sent)]
    if expected.session:
        assert router.router.routing.conversations.replica(expected.session) == replica.url
    headers = {name.lower().encode(): it.encode() for name, it in sent.headers.items()}
    read = RequestReader("prefixaware", None, ()).read
    found = read(headers, json.dumps(sent.body).encode(), sent.path.encode()).intent
    for name in {*expected.__struct_fields__} - {"marked", "taken", "ignored"}:
        assert getattr(found, name) == getattr(expected, name), name
