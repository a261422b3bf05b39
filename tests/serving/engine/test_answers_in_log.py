# SPDX-License-Identifier: Apache-2.0
"""Log lines of vLLM's parsers and others about requests and answers, as they reach our log."""

import ast
import io
import json
import logging
import re
from pathlib import Path

import pytest
import vllm
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers.abstract_tool_parser import ToolParserManager

from serving.observability import redaction
from serving.observability.logs import Handler, JsonFormatter, make_record

CANARY = "my-diagnosis-is-4711"
ANSWERS = [
    ("pythonic", f"[book(note={CANARY} , )]"),
    ("pythonic", f'[book(note=b"{CANARY}")]'),
    ("pythonic", f'[book(note={{x: "{CANARY}"}})]'),
    ("llama4_pythonic", f'[book(note=b"{CANARY}")]'),
    ("phi4_mini_json", f'functools[{{"name": "book", "arguments": {{"note": "{CANARY}" oops}}}}]'),
    ("xlam", f'[{{"name": "book", "arguments": {{"note": "{CANARY}" oops}}}}]'),
    ("hermes", f'<tool_call>{{"name": "book", "arguments": {{"note": "{CANARY}" oo}}</tool_call>'),
]


class Tokenizer:
    vocab: dict[str, int] = {}  # noqa: RUF012
    is_fast = True

    def get_vocab(self):
        return self.vocab

    def encode(self, text, **more):
        return []


@pytest.fixture
def lines():
    """The logged lines, as our handler writes them."""
    stream = io.StringIO()
    handler = Handler(stream, JsonFormatter())
    logger = logging.getLogger("vllm")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.setLevel(before)
    logger.removeHandler(handler)


@pytest.mark.parametrize(("parser", "answer"), ANSWERS)
def test_no_line_has_an_answer_in_it(lines, parser, answer):
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], model="m")
    ToolParserManager.get_tool_parser(parser)(Tokenizer()).extract_tool_calls(answer, request)
    assert CANARY not in json.dumps(lines())


def test_the_template_and_the_place_stay(lines):
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], model="m")
    parser = ToolParserManager.get_tool_parser("pythonic")(Tokenizer())
    parser.extract_tool_calls(f"[book(note={CANARY} , )]", request)
    (line,) = lines()
    assert line["message"] == "Error in extracting tool call from response."
    assert line["exception"].endswith("SyntaxError")
    assert "pythonic_tool_parser.py" in line["exception"]


def test_a_message_that_is_put_together_is_left_out(lines):
    logger = logging.getLogger("vllm.tool_parsers.new")
    logger.error(f"no call in {CANARY}")
    logger.error("no call in %s", CANARY)
    assert [line["message"] for line in lines()] == [redaction.LEFT_OUT, "no call in %s"]


def test_what_ends_the_engine_and_other_lines_stay(lines):
    logger = logging.getLogger("vllm.v1.engine.core")
    try:
        raise IndexError("of a step")
    except IndexError:
        logger.exception("EngineCore encountered a fatal error.")
        logger.exception("Unexpected error pre-processing request %s", "a")
    logging.getLogger("vllm.config").warning("%s is deprecated", "this")
    # As a record arrives from another process, which has filtered it.
    logging.getLogger("vllm").handlers[-1].handle(
        make_record(logging.ERROR, {"name": "vllm.tool_parsers.a", "msg": "no call in %s"})
    )
    fatal, of_one, other, passed_on = lines()
    assert "IndexError: of a step" in fatal["exception"]
    assert "IndexError: of a step" not in of_one["exception"]
    assert other["message"] == "this is deprecated"
    assert passed_on["message"] == "no call in %s"


SAYS = {"warning", "error", "exception", "critical", "warning_once", "error_once"}
HANDLES_TEXTS = (
    *("tool_parsers", "reasoning", "parser", "renderers", "tokenizers", "inputs", "multimodal"),
    *("entrypoints/anthropic", "entrypoints/generate", "entrypoints/openai", "entrypoints/pooling"),
    *("entrypoints/serve/engine", "entrypoints/serve/tokenize", "entrypoints/speech_to_text"),
    *("entrypoints/serve/exception_handling", "v1/structured_output", "v1/engine", "logging_utils"),
)
OTHERS = {
    "entrypoints.openai.models.serving": "names and folders of adapters",
    "entrypoints.openai.run_batch": "a program that is not run here",
    "v1.engine.coordinator": "numbers and engines",
    "v1.engine.core": "ids, and why the engine ends; one line is left out by its beginning",
    "v1.engine.core_client": "failures of calls that are no requests",
    "v1.engine.tensor_ipc": "failures of queues",
    "v1.engine.utils": "processes and hosts",
    "v1.engine.llm_engine": "not used here",
}
"""Modules that log more than fixed texts, but not the contents of a request."""


def says_more_than_its_own_words(call):
    name = getattr(call.func, "attr", "")
    if name not in SAYS or "logger" not in ast.unparse(call.func):
        return False
    plain = len(call.args) == 1 and isinstance(call.args[0], ast.Constant)
    return not plain or name == "exception" or any(it.arg == "exc_info" for it in call.keywords)


def test_every_module_that_handles_texts_is_filtered_or_has_a_reason():
    """After an update of vLLM: if this test names a module, add a logger of it to READERS, or a
    reason to OTHERS.
    """
    root, found = Path(vllm.__file__).parent, set()
    for place in HANDLES_TEXTS:
        for file in (root / place).rglob("*.py"):
            calls = (it for it in ast.walk(ast.parse(file.read_text())) if isinstance(it, ast.Call))
            if any(map(says_more_than_its_own_words, calls)):
                found.add(
                    re.sub(
                        r"\.__init__$", "", ".".join(file.relative_to(root).with_suffix("").parts)
                    )
                )
    unfiltered = {it for it in found if not f"vllm.{it}.".startswith(redaction._READERS)}
    assert unfiltered == {it for it in OTHERS if it in found}
