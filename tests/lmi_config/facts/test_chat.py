# SPDX-License-Identifier: Apache-2.0
"""The parsers of vLLM that a model's files indicate.

The shapes are those of published models: their model_type, the contents of their chat templates,
and their special tokens. The right parser is the one that vllm-project/recipes (Apache-2.0) or
vLLM's documentation recommends for them.
"""

import json
from collections.abc import Mapping

import pytest

from lmi_config.facts import chat
from lmi_config.facts.chat import Chat

HERMES = '{% if tools %}<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}'
XML = "{% if tools %}<tool_call>\n<function=example>\n<parameter=a>"
LLAMA = '{% if tools %}Environment: ipython {"name": function name, "parameters": dictionary'
DEEPSEEK = "<｜User｜><｜Assistant｜>"  # noqa: RUF001
CALLS = "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"  # noqa: RUF001
CALL_TOKENS = ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]  # noqa: RUF001
THINK = ["<think>", "</think>"]
QWEN3 = "<|im_start|>{% if enable_thinking %}<think></think>"
GLM = "[gMASK]<sop><tool_call><arg_key></arg_key>"


class Files:
    """A checkpoint in memory."""

    where = "org/model"

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = {name: text.encode() for name, text in files.items()}
        self.sizes = {name: len(content) for name, content in self._files.items()}

    def head(self, name: str, length: int) -> bytes:
        return self._files[name][:length]


def configured(template: str | list[dict[str, str]], tokens: list[str]) -> str:
    added = {str(number): {"content": token} for number, token in enumerate(tokens)}
    return json.dumps({"chat_template": template, "added_tokens_decoder": added})


def names(found: Chat) -> tuple[str | None, str | None]:
    return (
        found.tools.name if found.tools else None,
        found.reasoning.name if found.reasoning else None,
    )


@pytest.mark.parametrize(
    ("model", "model_type", "template", "tokens", "expected"),
    [
        ("Qwen2.5", "qwen2", HERMES, [], ("hermes", None)),
        ("Qwen3", "qwen3", HERMES + QWEN3, THINK, ("hermes", "qwen3")),
        ("Qwen3 Instruct 2507", "qwen3", HERMES, THINK, ("hermes", None)),
        ("Qwen3-Coder", "qwen3_moe", XML, [], ("qwen3_coder", None)),
        ("Qwen3.5", "qwen3_5", XML + QWEN3, THINK, ("qwen3_coder", "qwen3")),
        (
            "QwQ",
            "qwen2",
            HERMES + "<|im_start|>assistant\\n<think>",
            THINK,
            ("hermes", "deepseek_r1"),
        ),
        ("Hermes 3", "llama", HERMES, [], ("hermes", None)),
        ("Llama 3.1", "llama", LLAMA, ["<|python_tag|>"], ("llama3_json", None)),
        ("Llama without the token", "llama", LLAMA, [], (None, None)),
        ("Llama 3", "llama", "<|start_header_id|>", [], (None, None)),
        ("Llama 4", "llama4", "{% if tools %}", [], ("llama4_pythonic", None)),
        ("gpt-oss", "gpt_oss", "<|channel|>", [], ("openai", "openai_gptoss")),
        ("Gemma 3", "gemma3", "<start_of_turn>", [], (None, None)),
        ("Gemma 4", "gemma4", "<|tool_call><|channel>", [], ("gemma4", "gemma4")),
        ("GLM-4.6", "glm4_moe", GLM + "<think>", THINK, ("glm45", "glm45")),
        ("Kimi K2", "kimi_k2", "<|tool_calls_section_begin|>", [], ("kimi_k2", None)),
        (
            "DeepSeek R1",
            "deepseek_v3",
            f"{DEEPSEEK}<think>{CALLS}```json",
            THINK + CALL_TOKENS,
            ("deepseek_v3", "deepseek_r1"),
        ),
        (
            "DeepSeek V3.1",
            "deepseek_v3",
            f"{DEEPSEEK}{{% if not thinking %}}<think>{CALLS}",
            THINK + CALL_TOKENS,
            ("deepseek_v31", "deepseek_v3"),
        ),
        ("R1 Distill", "llama", f"{DEEPSEEK}<think>{CALLS}```json", THINK, (None, "deepseek_r1")),
        ("DeepSeek V3.2", "deepseek_v32", "", [], ("deepseek_v32", "deepseek_v3")),
        ("Mistral Small 3.2", "mistral3", "[TOOL_CALLS]", ["[TOOL_CALLS]"], ("mistral", None)),
        ("Apriel 1.5", "llava", f"{HERMES}<tool_calls>", [], (None, None)),
        ("Nemotron 3", "nemotron_h", XML + "enable_thinking", [], ("qwen3_coder", "nemotron_v3")),
        ("Granite 4", "granitemoehybrid", "<tool_call>", [], ("granite4", None)),
        ("an unknown one", None, "<call>", [], (None, None)),
    ],
    ids=lambda it: it if isinstance(it, str) and len(it) < 30 else "",
)
def test_published_models(model, model_type, template, tokens, expected):
    # transformers writes the template to one of two places.
    inside = Files({"tokenizer_config.json": configured(template, tokens)})
    beside = Files(
        {"chat_template.jinja": template, "tokenizer_config.json": configured("", tokens)}
    )
    for files in (inside, beside):
        assert names(chat.look(files, model_type)) == expected


def test_several_templates_and_tokens_elsewhere():
    """Hermes 2 has a template for tools by name; newer tokenizers keep their tokens in one file."""
    templates = [
        {"name": "default", "template": "<|im_start|>"},
        {"name": "tool_use", "template": LLAMA},
    ]
    files = Files(
        {
            "tokenizer_config.json": json.dumps({"chat_template": templates}),
            "tokenizer.json": json.dumps({"added_tokens": [{"content": "<|python_tag|>"}]}),
        }
    )
    assert names(chat.look(files, "llama")) == ("llama3_json", None)
    files = Files({"additional_chat_templates/tool_use.jinja": HERMES})
    assert names(chat.look(files, "llama")) == ("hermes", None)


def test_mistrals_own_tokenizer():
    found = chat.look(Files({"tekken.json": "{}", "params.json": "{}"}), None)
    assert names(found) == ("mistral", None)


def test_a_template_in_place_of_the_models_own():
    files = Files({"tekken.json": "{}", "chat_template.jinja": "[TOOL_CALLS]"})
    assert names(chat.look(files, "mistral", HERMES)) == ("hermes", None)


@pytest.mark.parametrize(
    "content",
    ["[", "[" * 100_000, "[]", '{"chat_template": 7, "added_tokens_decoder": [7]}', "\xff"],
)
def test_files_that_are_no_such_thing_say_nothing(content):
    """vLLM itself reports them if it needs them."""
    files = Files(
        {
            "tokenizer_config.json": content,
            "tokenizer.json": content,
            "chat_template.jinja": LLAMA,
        }
    )
    assert names(chat.look(files, "llama")) == (None, None)


def test_the_reason_names_what_was_seen():
    found = chat.look(Files({"chat_template.jinja": HERMES}), "qwen2")
    assert found.tools
    assert found.tools.reason == "its chat template has <tool_call>"
