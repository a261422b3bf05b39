# SPDX-License-Identifier: Apache-2.0
"""Tools are called, and answers follow a schema, without options: the template shows the format."""

import json

import pytest

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
    # Greedily the tiny model would fill its tokens with the white space that JSON may have.
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


def test_a_call_as_agents_ask_for_it(tools):
    """Claude Code asks on Messages, Codex on Responses, each in a shape of its own."""
    tool = {"name": "get_weather", "strict": True, "input_schema": CITY}
    body = {
        "model": "lmi",
        "messages": ASKED["messages"],
        "tools": [tool],
        "tool_choice": {"type": "tool", "name": "get_weather"},
        "max_tokens": 2000,
        "temperature": 1,
    }
    answer = tools.client.post("/v1/messages", json=body).json()
    assert answer["stop_reason"] == "tool_use"
    (call,) = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert (call["name"], call["input"]) == ("get_weather", {"city": "Paris"})
    answered = tools.openai.responses.create(
        model="lmi",
        input=ASKED["messages"],
        tools=[{"type": "function", **FUNCTION}],
        tool_choice={"type": "function", "name": "get_weather"},
        max_output_tokens=2000,
        temperature=1,
        store=False,
    )
    (call,) = [item for item in answered.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})


def test_an_answer_in_json_of_a_schema(tools):
    schema = {"name": "weather", "schema": CITY}
    body = {
        **ASKED,
        "tools": None,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    content = tools.openai.chat.completions.create(model="lmi", **body).choices[0].message.content
    assert json.loads(content) == {"city": "Paris"}
