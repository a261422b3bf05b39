# SPDX-License-Identifier: Apache-2.0
"""Tools are called without options where the model's template shows how: as OpenAI's client asks."""

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
# The tiny model would write nothing else.
NO_WHITE_SPACE = '{"backend": "xgrammar", "disable_any_whitespace": true}'
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASKED = {
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [WEATHER],
    "max_tokens": 64,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def tools(tiny_options, tmp_path_factory):
    with serving(
        tmp_path_factory.mktemp("tools") / "log",
        **tiny_options,
        OPTION_CHAT_TEMPLATE=TEMPLATE,
        OPTION_STRUCTURED_OUTPUTS_CONFIG=NO_WHITE_SPACE,
    ) as served:
        served.ready()
        yield served


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations"])
def test_the_model_may_decide(path, tools):
    answer = tools.client.post(path, json={**ASKED, "tool_choice": "auto"})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["role"] == "assistant"


def test_a_call_that_is_required(tools):
    chosen = tools.openai.chat.completions.create(model="lmi", **ASKED, tool_choice="required")
    (call,) = chosen.choices[0].message.tool_calls
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


def test_an_answer_in_json_of_a_schema(tools):
    schema = {"name": "weather", "schema": WEATHER["function"]["parameters"]}
    body = {
        **ASKED,
        "tools": None,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    content = tools.openai.chat.completions.create(model="lmi", **body).choices[0].message.content
    assert json.loads(content) == {"city": "Paris"}
