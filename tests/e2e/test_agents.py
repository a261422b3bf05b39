# SPDX-License-Identifier: Apache-2.0
"""Agents' APIs on the real engine: OpenAI's Responses by its client, and Anthropic's Messages."""

import json

import openai
import pytest

from tests import agents

SAID = [{"role": "user", "content": "Say something."}]
GREEDY = {"temperature": 0}


def test_responses(server):
    whole = server.openai.responses.create(
        model="lmi", input="Say something.", max_output_tokens=16, store=False, **GREEDY
    )
    assert whole.status in ("completed", "incomplete")
    assert whole.usage.output_tokens == 16
    pieces = [
        event.delta
        for event in server.openai.responses.create(
            model="lmi", input=SAID, max_output_tokens=16, stream=True, **GREEDY
        )
        if event.type == "response.output_text.delta"
    ]
    assert "".join(pieces) == whole.output_text != ""


def test_a_response_that_refers_to_another_is_refused(server):
    with pytest.raises(openai.BadRequestError, match="no answers are stored here"):
        server.openai.responses.create(model="lmi", input="a", previous_response_id="resp_1")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], ""),
        ([{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}], "ab"),
        ([{"type": "refusal", "refusal": "No."}], "No."),
    ],
)
def test_what_the_assistant_has_said_before(server, content, said):
    def tokens(content):
        before = {"type": "message", "role": "assistant", "content": content}
        asked = [*SAID, before, *SAID]
        answer = server.openai.responses.create(model="lmi", input=asked, max_output_tokens=1)
        return answer.usage.input_tokens

    assert tokens(content) == tokens(said)


def test_messages(server):
    asked = {"model": "lmi", "system": "Be brief.", "messages": SAID, "max_tokens": 16, **GREEDY}
    whole = server.client.post("/v1/messages", json=asked).json()
    assert whole["type"] == "message"
    assert whole["stop_reason"] == "max_tokens"
    assert whole["usage"]["output_tokens"] == 16
    (block,) = whole["content"]
    streamed = server.client.post("/v1/messages", json={**asked, "stream": True}).text
    assert agents.claude_reads(streamed)["content"] == [block]
    assert block["text"] != ""
    del asked["max_tokens"], asked["temperature"]
    counted = server.client.post("/v1/messages/count_tokens", json=asked).json()
    usage = whole["usage"]
    prompt = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert counted["input_tokens"] == prompt


def test_a_model_that_is_not_here(server):
    answer = server.client.post(
        "/v1/messages", json={"model": "other", "max_tokens": 8, "messages": SAID}
    )
    assert answer.status_code == 404
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "not_found_error"


def test_responses_on_invocations(server):
    body = {"input": "An import statement", "max_output_tokens": 4, "temperature": 0}
    theirs, ours = server.client.post("/v1/responses", json=body), server.invoke(body)
    assert ours.json()["output"][0]["content"] == theirs.json()["output"][0]["content"]
    streamed = server.invoke(body | {"stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = [it.partition("\n")[0] for it in streamed.text.split("\n\n") if it]
    assert events[0] == "event: response.created"
    assert events[-1] == "event: response.completed"


def test_messages_on_invocations(server):
    """In the form that Bedrock's clients send, and by the route that AWS's vLLM image uses."""
    body = {"messages": SAID, "max_tokens": 4, **GREEDY}
    theirs = server.client.post("/v1/messages", json={"model": "lmi", **body}).json()["content"]
    bedrock = server.invoke({"anthropic_version": "bedrock-2023-05-31", **body})
    assert bedrock.json()["content"] == theirs
    route = {"X-Amzn-SageMaker-Custom-Attributes": "route=/v1/messages"}
    routed = server.invoke({"model": "lmi", **body}, **route)
    assert routed.json()["content"] == theirs


def test_tokens_of_a_chat(server):
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    tokens = server.client.post("/tokenize", json=chat).json()["tokens"]
    text = server.client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == "<|user|>Hello</s><|assistant|>"
    usage = server.client.post("/v1/chat/completions", json=chat | {"max_tokens": 1}).json()
    assert usage["usage"]["prompt_tokens"] == len(tokens)
    for body in ({"prompt": "a", "model": "other"}, {"tokens": [2**40]}, {}):
        answer = server.client.post("/detokenize" if "tokens" in body else "/tokenize", json=body)
        assert answer.status_code in (400, 404), answer.text


KEPT = {"type": "ephemeral"}


def said(text, **mark):
    return [{"role": "user", "content": [{"type": "text", "text": text, **mark}]}]


def message_of(server, body, stream):
    """The usage of a message, and the tokens of its prompt."""
    asked = {"model": "lmi", "max_tokens": 2, **GREEDY, **body}
    answer = server.client.post("/v1/messages", json={**asked, "stream": stream})
    assert answer.status_code == 200, answer.text
    found = agents.claude_reads(answer.text) if stream else answer.json()
    del asked["max_tokens"], asked["temperature"]
    counted = server.client.post("/v1/messages/count_tokens", json=asked).json()
    return found["usage"], counted["input_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_usage_of_messages_adds_up(server, stream):
    """Tokens count as written into the cache if the request asks for that."""
    text = f"{stream} " + "word " * 500
    system = [{"type": "text", "text": text, "cache_control": KEPT}]
    bodies = [
        ({"messages": said(f"plain {text}")}, False),
        ({"messages": said("Hi"), "system": system}, False),
        ({"messages": said(f"marked {text}", cache_control=KEPT)}, True),
        ({"messages": said(f"long {text}", cache_control={**KEPT, "ttl": "1h"})}, True),
        ({"messages": said(f"top {text}"), "cache_control": KEPT}, True),
    ]
    for body, marked in bodies:
        first, prompt = message_of(server, body, stream)
        again, _ = message_of(server, body, stream)
        for usage in (first, again):
            parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
            assert all(usage[it] >= 0 for it in parts)
            assert sum(usage[it] for it in parts) == prompt
            created = usage["cache_creation_input_tokens"]
            lifetimes = {"ephemeral_5m_input_tokens": created, "ephemeral_1h_input_tokens": 0}
            assert usage["cache_creation"] == lifetimes
        assert (first["cache_creation_input_tokens"] > 0) is marked
        assert again["cache_read_input_tokens"] > prompt // 2
        assert again["cache_creation_input_tokens"] <= first["cache_creation_input_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "key", "details", "total"),
    [
        ("/v1/completions", "prompt", "prompt_tokens_details", "prompt_tokens"),
        ("/v1/chat/completions", "messages", "prompt_tokens_details", "prompt_tokens"),
        ("/v1/responses", "input", "input_tokens_details", "input_tokens"),
    ],
)
def test_usage_of_openais_paths_adds_up(server, path, key, details, total, stream):
    text = f"{path} {stream} " + "word " * 500
    body = {key: said(text) if key == "messages" else text, **GREEDY, "stream": stream}
    body["max_output_tokens" if key == "input" else "max_tokens"] = 2
    if stream and key != "input":
        body["stream_options"] = {"include_usage": True}

    def ask():
        answer = server.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        if not stream:
            return answer.json()["usage"]
        if key == "input":
            return agents.events(answer.text)[-1][1]["response"]["usage"]
        last = answer.text.strip().split("\n\n")[-2]
        return json.loads(last.removeprefix("data: "))["usage"]

    first, again = ask(), ask()
    for usage in (first, again):
        told = usage[details]
        written = told.get("cache_write_tokens")
        if key == "prompt":
            assert written is None
        else:
            assert 0 <= told["cached_tokens"] + written <= usage[total]
            assert written == told.get("created_cache_tokens", written)
    assert again[details]["cached_tokens"] > first[total] // 2
