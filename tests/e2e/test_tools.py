# SPDX-License-Identifier: Apache-2.0
"""Tool calls and structured answers work without options: the template shows the format."""

import json
from typing import Any, Literal

import pydantic
import pytest

from tests import agents
from tests.e2e.conftest import serving

# The format of Hermes and Qwen.
TEMPLATE = (
    "{% if tools %}<tool_call>"
    '{"name": <function-name>, "arguments": <args-json-object>}</tool_call>'
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>{% endfor %}"
    "<|assistant|>"
)
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "strict": True, "parameters": CITY}
WEATHER = {"type": "function", "function": FUNCTION}
ASKED = {
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [WEATHER],
    # With greedy sampling, the tiny model would only generate white space, which JSON allows.
    "max_tokens": 2000,
    "temperature": 1,
    "seed": 0,
}


@pytest.fixture(scope="module")
def tools(tiny_options, tmp_path_factory):
    with serving(
        tmp_path_factory.mktemp("tools") / "log",
        **tiny_options,
        OPTION_CHAT_TEMPLATE=TEMPLATE,
    ) as served:
        served.ready()
        yield served


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations"])
def test_the_model_may_decide(path, tools):
    answer = tools.client.post(path, json={**ASKED, "tool_choice": "auto", "max_tokens": 16})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["role"] == "assistant"


def test_a_call_that_is_required(tools):
    chosen = tools.openai.chat.completions.create(model="lmi", **ASKED, tool_choice="required")
    call, *_ = chosen.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_a_call_in_a_stream(tools):
    name, arguments = "", ""
    named = {"type": "function", "function": {"name": "get_weather"}}
    for chunk in tools.openai.chat.completions.create(
        model="lmi", **ASKED, tool_choice=named, stream=True
    ):
        for part in chunk.choices[0].delta.tool_calls or ():
            name += part.function.name or ""
            arguments += part.function.arguments or ""
    assert name == "get_weather"
    assert json.loads(arguments) == {"city": "Paris"}


@pytest.fixture(scope="module")
def routed(tools, tmp_path_factory):
    log = tmp_path_factory.mktemp("routed") / "log"
    with serving(log, "./entrypoint.sh", "route", OPTION_ROUTER_REPLICAS=tools.url) as it:
        it.ready()
        yield it


DOORS = pytest.mark.parametrize("door", ["tools", "routed"])
TASK = "What is the weather in Paris?"


def posted(it, path, body, headers):
    answer = it.client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return answer.text


@DOORS
@pytest.mark.parametrize(("name", "namespace"), [("get_weather", None), ("look_up", "mcp__docs")])
def test_codex_at_work(door, name, namespace, request):
    it = request.getfixturevalue(door)

    def ask(*further, **more):
        body = strict(agents.codex(TASK, *further, **more))
        return agents.codex_reads(posted(it, "/v1/responses", body, agents.CODEX_HEADERS))

    *_, call = ask(tool_choice={"type": "function", "name": name}, temperature=1)
    assert call["type"] == "function_call"
    assert (call["name"], call["namespace"]) == (name, namespace)
    assert json.loads(call["arguments"]) == {"city": "Paris"}
    for result in ("Sunny.", [{"type": "input_text", "text": "Sunny."}]):
        (said,) = ask(*agents.codex_goes_on(call, result), max_output_tokens=8, temperature=0)
        assert said["role"] == "assistant"


@DOORS
def test_claude_code_at_work(door, request):
    """The model has room for 4,096 tokens, and does not think."""
    it = request.getfixturevalue(door)

    def ask(*further, **more):
        body = strict(agents.claude(TASK, *further, **more))
        message = agents.claude_reads(posted(it, agents.CLAUDE_PATH, body, agents.CLAUDE_HEADERS))
        counted = {key: body[key] for key in ("model", "messages", "system", "tools", "thinking")}
        path = "/v1/messages/count_tokens?beta=true"
        tokens = it.client.post(path, json=counted, headers=agents.CLAUDE_HEADERS).json()
        usage = message["usage"]
        of_cache = usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
        assert tokens["input_tokens"] == usage["input_tokens"] + of_cache
        return message

    thoughts = {"type": "enabled", "budget_tokens": 31_999}
    named = {"type": "tool", "name": "get_weather"}
    message = ask(tool_choice=named, temperature=1, thinking=thoughts)
    assert message["stop_reason"] == "tool_use"
    call = message["content"][-1]
    assert (call["name"], call["input"]) == ("get_weather", {"city": "Paris"})
    for result in ("Sunny.", [{"type": "text", "text": "Sunny."}], []):
        said = ask(*agents.claude_goes_on(call, result), max_tokens=8, temperature=0)
        assert said["stop_reason"] == "max_tokens"
    answer = it.client.post(
        agents.CLAUDE_PATH, json=agents.claude("word " * 5000), headers=agents.CLAUDE_HEADERS
    )
    assert answer.status_code == 400
    assert "maximum context length is 4096 tokens" in answer.json()["error"]["message"]


class City(pydantic.BaseModel):
    city: Literal["Paris"]


def test_what_clients_make_of_streams(tools):
    """OpenAI's and Anthropic's own helpers add the events up."""
    import anthropic  # it takes seconds to import

    asked: Any = {"model": "lmi", "temperature": 1}
    tool: Any = {"name": "get_weather", "strict": True, "input_schema": CITY}
    with (
        anthropic.Anthropic(base_url=tools.url, api_key="none", max_retries=0) as client,
        client.messages.stream(
            model="lmi",
            messages=[{"role": "user", "content": TASK}],
            max_tokens=32_000,
            tools=[tool],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            extra_body={"temperature": 1},
        ) as stream,
    ):
        (block,) = stream.get_final_message().content
    assert block.type == "tool_use"
    assert block.input == {"city": "Paris"}
    with tools.openai.responses.stream(
        input=TASK, text_format=City, max_output_tokens=2000, **asked
    ) as stream:
        assert stream.get_final_response().output_parsed == City(city="Paris")
    with tools.openai.chat.completions.stream(
        messages=ASKED["messages"], response_format=City, max_tokens=2000, **asked
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == City(city="Paris")


@DOORS
def test_requests_of_released_clients(door, request):
    it = request.getfixturevalue(door)
    for sent in agents.sent():
        limit = "max_output_tokens" if "input" in sent.body else "max_tokens"
        answer = it.client.post(sent.path, json={**sent.body, limit: 1}, headers=sent.headers)
        assert answer.status_code == 200, (str(sent), answer.text)


def strict(body):
    """A request with `strict` functions: their arguments fit the schemas, even if the model is
    untrained.
    """
    inner = [tool for it in body["tools"] for tool in it.get("tools", ())]
    for tool in (*body["tools"], *inner):
        if "name" in tool:
            tool["strict"] = True
    return body


def test_an_answer_in_json_of_a_schema(tools):
    schema = {"name": "weather", "schema": CITY}
    body = {
        **ASKED,
        "tools": None,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    content = tools.openai.chat.completions.create(model="lmi", **body).choices[0].message.content
    assert json.loads(content) == {"city": "Paris"}
