# SPDX-License-Identifier: Apache-2.0
"""A forced call fits its function's schema, with and without a parser of the model's format."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests.e2e.conftest import serving
from tests.e2e.test_tools import TEMPLATE
from tests.support.models import tiny

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TRIP = {
    "type": "object",
    "properties": {
        "mode": {"enum": ["train", "car"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "stops": {"type": "array", "items": {"$ref": "#/$defs/Stop"}, "maxItems": 2},
    },
    "required": ["mode", "days", "stops"],
    "additionalProperties": False,
    "$defs": {
        "Stop": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 8}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS = {"get_weather": CITY, "plan_trip": TRIP}
SAY = [{"role": "user", "content": "Weather in Oslo?"}]
Call = tuple[str, Any]


@pytest.fixture(scope="session")
def terse(tmp_path_factory) -> Path:
    """The tiny model without white space: a random model would fill every gap of a grammar with
    it, up to its limit of tokens.
    """
    folder: Path = tmp_path_factory.mktemp("terse") / tiny.NAME
    shutil.copytree(tiny.make(), folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    blank = [it for it in range(tiny.VOCABULARY) if tokenizer.decode([it]).isspace()]
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 0.1  # of every token, so the last layer has it
    weights["lm_head.weight"][:, 0] = 0
    weights["lm_head.weight"][blank, 0] = -100
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=["hermes", "none"])
def served(request, tiny_options, terse, tmp_path_factory):
    with serving(
        tmp_path_factory.mktemp(request.param) / "log",
        **tiny_options | {"OPTION_MODEL_ID": str(terse)},
        OPTION_CHAT_TEMPLATE=TEMPLATE,
        OPTION_TOOL_CALL_PARSER=request.param,
    ) as it:
        it.ready()
        yield it


def functions(**more: Any) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, **more}}
        for name, schema in SCHEMAS.items()
    ]


def chat(served, stream: bool, choice: Any, **more: Any) -> tuple[list[Call], str]:
    """The calls of a chat, and its finish reason."""
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    body = {"model": "lmi", "messages": SAY, "tools": functions(), "tool_choice": choice, **more}
    if not stream:
        (answer,) = served.openai.chat.completions.create(**body).choices
        whole = answer.message.tool_calls or ()
        return [(it.function.name, it.function.arguments) for it in whole], answer.finish_reason
    calls: dict[int, Call] = {}
    ended = ""
    for event in served.openai.chat.completions.create(**body, stream=True):
        for part in event.choices[0].delta.tool_calls or ():
            name, arguments = calls.get(part.index, ("", ""))
            said = part.function
            calls[part.index] = name + (said.name or ""), arguments + (said.arguments or "")
        ended = event.choices[0].finish_reason or ended
    return [*calls.values()], ended


def messages(served, stream: bool, choice: Any, **more: Any) -> tuple[list[Call], str]:
    choice = {"type": "tool", **choice} if isinstance(choice, dict) else {"type": "any"}
    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    body = {"model": "lmi", "messages": SAY, "tools": tools, "tool_choice": choice, **more}
    answer = served.client.post("/v1/messages", json={**body, "stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream:
        said = answer.json()
        calls = [(it["name"], json.dumps(it["input"])) for it in said["content"] if "input" in it]
        return calls, said["stop_reason"]
    found, ended = [], ""
    for line in answer.text.splitlines():
        event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
        if event.get("type") == "content_block_start" and "name" in event["content_block"]:
            found.append((event["content_block"]["name"], ""))
        if "partial_json" in event.get("delta", ()):
            name, arguments = found.pop()
            found.append((name, arguments + event["delta"]["partial_json"]))
        ended = event.get("delta", {}).get("stop_reason") or ended
    return found, ended


def responses(served, stream: bool, choice: Any, **more: Any) -> tuple[list[Call], str]:
    choice = {"type": "function", **choice} if isinstance(choice, dict) else choice
    tools = [
        {"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()
    ]
    more["max_output_tokens"] = more.pop("max_tokens")
    more.pop("seed", None)
    body = {"model": "lmi", "input": SAY, "tools": tools, "tool_choice": choice, **more}
    answer = served.client.post("/v1/responses", json={**body, "stream": stream})
    assert answer.status_code == 200, answer.text
    said: Any = answer.json() if not stream else None
    for line in answer.text.splitlines() if stream else ():
        event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
        said = event.get("response") or said
    calls = [
        (it["name"], it["arguments"]) for it in said["output"] if it["type"] == "function_call"
    ]
    return calls, said["status"]


ENDED = {
    chat: ("length", ["stop", "tool_calls"]),
    messages: ("max_tokens", ["tool_use"]),
    responses: ("incomplete", ["completed"]),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [chat, messages, responses])
def test_arguments_fit_the_schema(ask, stream, served):
    cut, whole = ENDED[ask]

    def one(seed: int) -> bool:
        choice: Any = {"name": [*SCHEMAS][seed % 2]} if seed % 3 else "required"
        calls, ended = ask(served, stream, choice, max_tokens=300, temperature=1, seed=seed)
        if ended == cut:
            return False
        assert ended in whole
        assert calls
        for name, arguments in calls:
            assert choice == "required" or name == choice["name"]
            # The grammar counts the bytes of half a character as one character.
            counted = re.sub("\ufffd+", "\ufffd", arguments)
            jsonschema.validate(json.loads(counted), SCHEMAS[name])
        return True

    with ThreadPoolExecutor(4) as threads:
        finished = [*threads.map(one, range(5))]
    assert sum(finished) >= 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [chat, messages, responses])
def test_a_call_that_is_cut_off_says_so(ask, stream, served):
    _, ended = ask(served, stream, {"name": "plan_trip"}, max_tokens=8, temperature=1)
    assert ended == ENDED[ask][0]


def test_parallel_calls_off_means_one(served):
    more = {"parallel_tool_calls": False, "max_tokens": 300, "temperature": 1}
    for seed in range(4):
        calls, ended = chat(served, False, "required", seed=seed, **more)
        assert len(calls) == 1 or ended == "length"


def test_a_function_that_is_not_strict_gets_any_object(served):
    body = {"tools": functions(strict=False), "max_tokens": 400, "temperature": 1}
    for seed in range(4):
        calls, ended = chat(served, False, {"name": "get_weather"}, seed=seed, **body)
        if ended != "length":
            assert isinstance(json.loads(calls[0][1]), dict)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_schema_that_no_grammar_enforces_is_refused(path, served):
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools: Any = {
        "/v1/chat/completions": [
            {"type": "function", "function": {"name": "f", "parameters": schema}}
        ],
        "/v1/messages": [{"name": "f", "input_schema": schema}],
        "/v1/responses": [{"type": "function", "name": "f", "parameters": schema}],
    }[path]
    forced = {"type": "any"} if path == "/v1/messages" else "required"
    said = {"input": "a"} if path == "/v1/responses" else {"messages": SAY, "max_tokens": 8}
    body = {"model": "lmi", "tools": tools, "tool_choice": forced, **said}
    answer = served.client.post(path, json=body)
    assert answer.status_code == 400
    assert "`uniqueItems`" in answer.text
    assert "tools[0]" in answer.text


def test_auto_is_the_models(served, request):
    """Without a parser the call could not be read, so the request is refused."""
    body = {"messages": SAY, "tools": functions(), "max_tokens": 8}
    answer = served.client.post("/v1/chat/completions", json=body)
    expected = 200 if request.node.callspec.params["served"] == "hermes" else 400
    assert answer.status_code == expected, answer.text
