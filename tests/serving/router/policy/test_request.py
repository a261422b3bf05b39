# SPDX-License-Identifier: Apache-2.0
"""The fields that the router reads of a request."""

import json
import tracemalloc

import pytest

from serving.cache_hints.intent import CONVERSATION_S, NO_INTENT, digest
from serving.protocol import ADAPTER_ID, CLASSIFY, EMBEDDINGS, PAIRS_PATHS, POOLING
from serving.router.policy.prefix_index import CHUNK
from serving.router.policy.routing_request import LONGEST_ADAPTER, RequestReader
from tests import agents

JSON = {b"content-type": b"application/json"}
read = RequestReader("prefixaware", None, {"poet"}).read


def asked(body, headers=None, read=read):
    return read({**JSON, **(headers or {})}, json.dumps(body).encode())


LONG = "word " * CHUNK


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": LONG},
        {"inputs": LONG, "parameters": {"max_new_tokens": 5}},
        {"model": "base", "messages": [{"role": "user", "content": LONG}]},
        {"input": LONG},
        {"input": "", "instructions": LONG},
        {"messages": [], "system": LONG},
    ],
)
def test_prompts_of_all_formats_make_chains(body):
    found = asked(body)
    assert found.tokens == pytest.approx(len(LONG) / 4, rel=0.05)
    assert len(found.chain) == len(LONG) // CHUNK


@pytest.mark.parametrize("path", [EMBEDDINGS, CLASSIFY, POOLING, *PAIRS_PATHS])
def test_texts_that_no_cache_keeps_are_counted_and_not_hashed(path):
    body = json.dumps({"query": LONG, "documents": [LONG], "input": LONG}).encode()
    found = read(JSON, body, f"{path}?a=b".encode())
    assert found.chain == ()
    assert found.tokens >= len(LONG) // 4


def test_no_memory_is_kept_for_the_long_names_of_sessions():
    """A body's key, or a tenant's header, may have megabytes."""
    by_user = RequestReader("session", None, ())
    tracemalloc.start()
    try:
        for number in range(20):
            name = f"{number}{'x' * 2**20}"
            assert by_user.read(JSON, json.dumps({"user": name}).encode()).session
            assert by_user.read(JSON, b'{"user": "a"}', tenant=name).session
        assert tracemalloc.get_traced_memory()[0] < 2**22
    finally:
        tracemalloc.stop()


def test_a_conversation_goes_on_with_the_same_chain():
    turns = [{"role": "user", "content": LONG}]
    first = asked({"messages": turns, "temperature": 0}).chain
    turns += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": LONG}]
    second = asked({"stream": True, "messages": turns}).chain
    assert list(second[: len(first)]) == list(first)
    assert len(second) > len(first)


def test_marks_on_parts_are_left_to_the_server():
    """The router has no use for them, so it does not search prompts for them."""
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    assert asked(body).intent == NO_INTENT
    options = {"prompt_cache_options": {"mode": "explicit"}, "session_id": "s"}
    found = asked(body | options).intent
    assert found.taken == ("session_id", "prompt_cache_options")
    assert (found.session, found.low) == (digest(None, "s"), False)


CALL = {"id": "1", "call_id": "1", "name": "look", "input": {}, "arguments": "{}"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (agents.codex(LONG), agents.codex(LONG, *agents.codex_goes_on(CALL, "sunny"))),
        (
            agents.claude(LONG, bill="one"),
            agents.claude(LONG, *agents.claude_goes_on(CALL, "sunny"), bill="two"),
        ),
    ],
)
def test_an_agent_goes_on_with_the_same_chain(first, second):
    """Claude Code's system prompt begins with different characters in each request."""
    before, after = asked(first).chain, asked(second).chain
    assert len(before) >= len(LONG) // CHUNK
    assert list(after[: len(before) - 1]) == list(before[:-1])


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens?beta=true", "/tokenize"])
def test_what_is_only_counted_is_in_no_cache(path):
    body = json.dumps({"model": "poet", "messages": [{"role": "user", "content": LONG}]}).encode()
    found = read(JSON, body, path.encode())
    assert (found.tokens, [*found.chain], found.adapter) == (0, [], "poet")


@pytest.mark.parametrize(
    "other",
    [
        {"adapters": "poet"},
        {"model": "poet"},
        {"cache_salt": "mine"},
        {"tools": [{"type": "function"}]},
    ],
)
def test_requests_with_separate_kv_caches_have_separate_chains(other):
    body = {"prompt": LONG, "model": "base"}
    assert not set(asked(body).chain) & set(asked({**body, **other}).chain)


@pytest.mark.parametrize(
    ("body", "headers", "target", "adapter"),
    [
        ({}, {}, b"/invocations?adapter=poet", "poet"),
        ({}, {}, b"/invocations?x=1&adapter=a%20b", "a b"),
        ({"model": "poet"}, {}, b"/v1/completions?adapter=other", "other"),
        ({"model": "poet"}, {}, b"/v1/completions?adapter=", ""),
        ({"adapters": "body"}, {}, b"/invocations?adapter=poet", "body"),
        ({"adapters": ""}, {}, b"/invocations?adapter=poet", ""),
        ({"adapters": None}, {}, b"/invocations?adapter=poet", "poet"),
        ({}, {ADAPTER_ID: b"header"}, b"/invocations?adapter=poet", "header"),
        ({}, {}, b"/invocations?adapter=poet&adapter=other", "poet"),  # the replica refuses it
        ({}, {}, b"/invocations?adapters=poet", ""),
        ({}, {}, b"/adapter", ""),
    ],
)
def test_the_adapter_is_the_one_that_serve_takes(body, headers, target, adapter):
    given = {"prompt": LONG, **body}
    found = read({**JSON, **headers}, json.dumps(given).encode(), target)
    assert found.adapter == adapter
    assert bool(set(found.chain) & set(asked({"prompt": LONG}).chain)) is (adapter == "")


def test_tenants_have_chains_of_their_own():
    read, body = RequestReader("kvaware", None, ()).read, json.dumps({"prompt": LONG}).encode()
    one, two = (read({}, body, tenant=name) for name in ("1", "2"))
    assert not set(one.chain) & set(two.chain)


@pytest.mark.parametrize(
    ("body", "headers", "adapter"),
    [
        ({"model": "poet"}, {}, "poet"),
        ({"model": "base"}, {}, ""),
        ({"adapters": "other"}, {}, "other"),
        ({"adapters": ["other", "poet"]}, {}, "other"),
        ({"adapters": 5, "model": "poet"}, {}, "poet"),
        ({"model": "poet"}, {b"x-amzn-sagemaker-adapter-identifier": b"third"}, "third"),
    ],
)
def test_adapters(body, headers, adapter):
    assert asked(body, headers).adapter == adapter


def test_a_name_that_is_too_long_for_an_adapter_is_none():
    longest = "a" * LONGEST_ADAPTER
    assert asked({"adapters": longest}).adapter == longest
    assert asked({"adapters": longest + "a"}).adapter == ""


@pytest.mark.parametrize(
    ("key", "body", "headers", "session"),
    [
        (None, {}, {b"x-amzn-sagemaker-session-id": b"s"}, "s"),
        (None, {"user": "u"}, {b"x-session-id": b"s"}, "s"),
        (None, {}, {b"x-amzn-sagemaker-session-id": b"NEW_SESSION"}, ""),
        (None, {"session_id": "s"}, {}, "s"),
        (None, {"user": "u"}, {}, "u"),
        (None, {"user_id": "i", "user": "u"}, {}, "i"),
        (None, {"user": 5}, {}, ""),
        ("customer", {"customer": "c", "user": "u"}, {}, "c"),
        ("Customer", {"user": "u"}, {b"customer": b"c"}, "c"),
        ("customer", {"user": "u"}, {}, ""),
        ("customer", {"customer": ["c"]}, {}, ""),  # as servers have it
        ("customer", {"customer": "c"}, {b"x-amzn-sagemaker-session-id": b"s"}, "s"),
    ],
)
def test_sessions(key, body, headers, session):
    """They appear by a digest: names of clients may be secrets."""
    found = asked(body, headers, RequestReader("session", key, ()).read).session
    assert found == (digest(None, session) if session else "")


@pytest.mark.parametrize("strategy", ["prefixaware", "kvaware", "session", "roundrobin"])
def test_every_strategy_knows_the_sessions_of_agents(strategy):
    headers = {b"x-claude-code-session-id": b"p", b"x-claude-code-agent-id": b"s"}
    found = asked(agents.claude("Hi"), headers, RequestReader(strategy, None, ()).read)
    assert found.session == found.intent.session == digest(None, "s")
    assert (found.intent.parent, found.intent.seconds) == (digest(None, "p"), CONVERSATION_S)


URL = "data:image/png;base64," + "A" * 400_000
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
OF_MESSAGES = {"type": "image", "source": {"type": "base64", "data": "A" * 400_000}}
TURN = {"role": "user", "content": [IMAGE, IMAGE]}


@pytest.mark.parametrize(
    ("body", "least"),
    [
        ({"messages": [TURN]}, 2_000),
        ({"messages": [{"role": "system", "content": LONG}, TURN]}, 2_000 + len(LONG) // 4),
        ({"input": [TURN]}, 2_000),
        ({"messages": [{"role": "user", "content": [OF_MESSAGES, {"data": "short"}]}]}, 1_000),
        ({"image": URL}, 1_000),
        ({"messages": [{"role": "user", "content": json.dumps(IMAGE)}]}, 100_000),  # a text
        ({"tools": [], "messages": [{"role": "user", "content": json.dumps(IMAGE)}]}, 100_000),
        ({"prompt": json.dumps(IMAGE)}, 100_000),
    ],
)
def test_images_do_not_count_as_text_unless_they_are_text(body, least):
    assert least <= asked(body).tokens < least + 100


DOCUMENTS = [{"text": name * 2 * CHUNK} for name in "abc"]
PARTS = [{"type": "text", "orderable": True, **it} for it in DOCUMENTS]


@pytest.mark.parametrize("permuted", [DOCUMENTS[::-1], DOCUMENTS[1:] + DOCUMENTS[:1]])
def test_documents_in_any_order_have_the_chain_of_the_order_that_is_served(permuted):
    def found(documents, **consent):
        return asked({"messages": [TURN], "documents": documents, **consent})

    consent = {"document_order": "canonical"}
    first, again = found(DOCUMENTS, **consent), found(permuted, **consent)
    assert again.chain == first.chain
    assert len(first.chain) >= 3 * 2
    assert first.tokens - found(DOCUMENTS).tokens >= 3 * 2 * CHUNK // 4
    assert found(DOCUMENTS).chain == found([]).chain


def test_parts_in_any_order_have_the_chain_of_the_order_that_is_served():
    def found(parts):
        turn = {"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}
        return asked({"messages": [turn], "document_order": "canonical"})

    assert found(PARTS).chain == found(PARTS[::-1]).chain
    for odd in (b"5", b"[" * 900 + b"]" * 900):
        body = b'{"messages": %b, "document_order": "canonical"}' % odd
        assert read(JSON, body).adapter == ""


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[" * 100_000, b"\xff\xfe", b'"text"', b"[1]", b"null", b'{"model":"\xff"}'],
)
def test_bodies_that_cannot_be_read_go_their_way(body):
    assert read(JSON, body).adapter == ""


@pytest.mark.parametrize("strategy", ["prefixaware", "session"])
def test_a_form_goes_its_way_unread(strategy):
    """To hash 64 MiB of sound would block the event loop, and no cache has a prefix of it."""
    body = b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\n' + LONG.encode() * 100
    kind = {b"content-type": b"Multipart/Form-Data; boundary=x", ADAPTER_ID: b"poet"}
    found = RequestReader(strategy, None, ()).read(kind, body)
    assert ([*found.chain], found.tokens, found.adapter) == ([], 1_000, "poet")
