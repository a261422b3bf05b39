# SPDX-License-Identifier: Apache-2.0
"""Requests of the documentation, sent to a server, get the answers that it shows."""

import functools
import json
import subprocess
from typing import Any

import pytest
from openai.resources.chat.completions import Completions

from tests import documented

PAGES = ("README.md", "docs/start/checkout.md", "docs/reference/http.md")
SENT = [
    it
    for it in documented.commands()
    if it.where.startswith(PAGES) and it.line.startswith("curl ") and "/ping" not in it.line
]


def shape(value):
    """Keys and kinds of a JSON value: texts and numbers are each model's own."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return type(value).__name__


def test_there_is_something_to_send():
    assert {it.where.partition(":")[0] for it in SENT} == {*PAGES}


@pytest.mark.parametrize("command", SENT, ids=lambda it: f"{it.where} {it.line[:50]}")
def test_a_curl_line_gets_what_is_shown(command, server):
    line = command.line.replace("localhost:8080", f"127.0.0.1:{server.port}")
    got = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout
    lines = [json.loads(it) for it in got.splitlines()]
    assert lines
    if command.output.strip():
        shown = [json.loads(it) for it in command.output.strip().splitlines()]
        assert shape(lines) == shape(shown)


@pytest.mark.parametrize(
    "block",
    [it for it in documented.blocks("python") if it.page in PAGES],
    ids=lambda it: it.name,
)
def test_the_openai_example_gets_an_answer(block, server, monkeypatch):
    create = functools.partialmethod(Completions.create, max_tokens=16)  # not to the model's limit
    monkeypatch.setattr(Completions, "create", create)
    text = block.text.replace("http://localhost:8080", server.url)
    assert text != block.text
    module: dict[str, Any] = {}
    exec(compile(text, block.name, "exec"), module)
    assert isinstance(module["answer"].choices[0].message.content, str)
