# SPDX-License-Identifier: Apache-2.0
"""The formats of a model's tool calls and reasoning, and vLLM's parsers for them.

No file names a parser. A model's format follows from its training, and is visible in its chat
template and its model_type. The rules are vLLM 0.32's: the format of each parser
(vllm/tool_parsers, vllm/reasoning), the parsers that users choose for models
(vllm-project/recipes), and the tokens that a parser needs to start. A model without a fitting rule
gets no parser, because a wrong parser would remove a part of the answer.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping

from lmi_config.facts.model import Checkpoint, ModelError, json_object

_LONGEST_TEMPLATE = 1_000_000  # bytes; published templates have less than 40,000
_THINK = ("<think>", "</think>")
_JAMBA = ("<tool_calls>", "</tool_calls>")
_DEEPSEEK = "<｜Assistant｜>"  # noqa: RUF001  # its tokens have wide bars
_DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # noqa: RUF001


@dataclasses.dataclass(frozen=True)
class Parser:
    """A parser of vLLM, under its name there, and the evidence for it."""

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Chat:
    """The parsers of a model's output; None if unknown. tools: parses tool calls. reasoning:
    separates reasoning from the answer.
    """

    tools: Parser | None = None
    reasoning: Parser | None = None


@dataclasses.dataclass(frozen=True)
class _Rule:
    """A parser, and the conditions for it, which must all hold.

    types: prefixes of model_type; one of them must match. marks: texts that the template must
    contain. tokens: tokens that the vocabulary must contain.
    """

    parser: str | None
    types: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()


# The first fitting rule counts.
_TOOLS = (
    _Rule("openai", types=("gpt_oss",)),
    _Rule("deepseek_v32", types=("deepseek_v32",)),
    _Rule("deepseek_v41", types=("deepseek_v41",)),
    _Rule("deepseek_v4", types=("deepseek_v4",)),
    _Rule("kimi_k3", types=("kimi_k3",)),
    _Rule("poolside_v1", types=("laguna",), marks=("<arg_key>",)),
    _Rule("minimax_m3", types=("minimax_m3",)),
    _Rule("step3p5", types=("step3p5", "step3p7"), marks=("<function=",)),
    _Rule("llama4_pythonic", types=("llama4",), marks=("tools",)),
    _Rule("gemma4", marks=("<|tool_call>",)),
    _Rule("functiongemma", marks=("<start_function_call>",)),
    _Rule("deepseek_v3", marks=(*_DEEPSEEK_CALLS, "```json"), tokens=_DEEPSEEK_CALLS),
    _Rule("deepseek_v31", marks=(*_DEEPSEEK_CALLS, "thinking"), tokens=_DEEPSEEK_CALLS),
    _Rule("kimi_k2", marks=("<|tool_calls_section_begin|>",)),
    _Rule("glm45", marks=("[gMASK]", "<arg_key>")),
    _Rule("minimax_m2", marks=("<minimax:tool_call>",)),
    _Rule("seed_oss", marks=("seed:tool_call>", "<function=")),
    _Rule("longcat", marks=("<longcat_tool_call>",)),
    _Rule(
        "lfm2",
        types=("lfm2",),
        marks=("tools",),
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    _Rule("internlm", marks=("<|action_start|>", "<|plugin|>")),
    _Rule("olmo3", types=("olmo3",), marks=("<function_calls>",)),
    _Rule("jamba", types=("jamba",), marks=_JAMBA, tokens=_JAMBA),
    _Rule("hunyuan_a13b", types=("hunyuan_v1_moe",), marks=("<tool_calls>",)),
    _Rule(None, marks=("<tool_calls>",)),
    _Rule("phi4_mini_json", types=("phi3",), marks=("<|tool|>",)),
    _Rule("mistral", marks=("[TOOL_CALLS]",), tokens=("[TOOL_CALLS]",)),
    _Rule(
        "llama3_json",
        marks=('{"name": function name, "parameters":',),
        tokens=("<|python_tag|>",),
    ),
    _Rule("granite4", types=("granitemoehybrid",), marks=("<tool_call>",)),
    _Rule("granite", types=("granite",), marks=("<|tool_call|>",)),
    _Rule("qwen3_coder", marks=("<tool_call>", "<function=", "<parameter=")),
    _Rule("ernie45", types=("ernie4_5_moe",), marks=("<tool_call>",)),
    _Rule("hermes", marks=("<tool_call>", '"name": <function-name>, ')),
    _Rule("hermes", marks=("<tool_call>", '\\"name\\": <function-name>, ')),
)
_REASONING = (
    _Rule("openai_gptoss", types=("gpt_oss",)),
    _Rule("deepseek_v3", types=("deepseek_v32",)),
    _Rule("deepseek_v41", types=("deepseek_v41",)),
    _Rule("deepseek_v4", types=("deepseek_v4",)),
    _Rule("kimi_k3", types=("kimi_k3",)),
    _Rule("kimi_k2", types=("kimi_k2",), marks=("<think>",), tokens=_THINK),
    _Rule("poolside_v1", types=("laguna",), marks=("<think>",), tokens=("<assistant>",)),
    _Rule("minimax_m3", types=("minimax_m3",), tokens=("<mm:think>", "</mm:think>")),
    _Rule("minimax_m2", types=("minimax_m2",), marks=("<think>",)),
    _Rule("step3p5", types=("step3p5", "step3p7"), marks=("<think>",)),
    _Rule("nemotron_v3", types=("nemotron_h",), marks=("<function=", "enable_thinking")),
    _Rule("olmo3", types=("olmo3",), marks=("<think>",)),
    _Rule("hunyuan_a13b", types=("hunyuan_v1_moe",), marks=("<think>",)),
    _Rule("ernie45", types=("ernie4_5_moe",), marks=("<think>",), tokens=_THINK),
    _Rule("gemma4", marks=("<|channel>",)),
    _Rule("seed_oss", marks=("<seed:think>",)),
    _Rule("glm45", marks=("[gMASK]", "<think>"), tokens=_THINK),
    _Rule("mistral", marks=("[THINK]",), tokens=("[THINK]", "[TOOL_CALLS]")),
    _Rule("deepseek_v3", marks=(_DEEPSEEK, "<think>", "not thinking"), tokens=_THINK),
    _Rule("deepseek_r1", marks=(_DEEPSEEK + "<think>",), tokens=_THINK),
    _Rule("qwen3", types=("qwen3",), marks=("<think>", "<|im_start|>"), tokens=_THINK),
    # QwQ and models derived from it: their prompts end with an open <think>.
    _Rule(
        "deepseek_r1", types=("qwen2",), marks=("<|im_start|>assistant\\n<think>",), tokens=_THINK
    ),
)


STREAMED_BADLY: Mapping[str, str] = {
    "deepseek_v31": "arguments are broken in streams where an event has several tokens",
    "functiongemma": "arguments are broken in streams",
    "hunyuan_a13b": "streams have the marker before the calls as text",
    "jamba": "arguments are broken in streams",
    "phi4_mini_json": "streams have no calls",
}
"""Tool call parsers that read whole answers correctly, but not streams → the fault (vLLM 0.32;
tests/serving/engine/test_streamed_calls.py finds out).
"""


def look(checkpoint: Checkpoint, model_type: str | None, template: str | None = None) -> Chat:
    """Return the parsers according to the model's files. template: the template that replaces the
    model's own.
    """
    if template is None and "tekken.json" in checkpoint.sizes:
        # vLLM then uses Mistral's own tokenizer, which has templates in its code.
        return Chat(tools=Parser("mistral", "it has Mistral's own tokenizer, tekken.json"))
    tokenizer = _object(checkpoint, "tokenizer_config.json")
    if template is None:
        template = "\n".join(_templates(checkpoint, tokenizer))
    # The tokens may be in a large file, which only some rules need.
    tokens = functools.cache(lambda: frozenset(_added(checkpoint, tokenizer)))
    tools = _first(_TOOLS, template, model_type or "", tokens)
    if tools and (wrong := STREAMED_BADLY.get(tools.name)):
        tools = Parser(tools.name, f"{tools.reason}; {wrong}")
    return Chat(
        tools,
        _first(_REASONING, template, model_type or "", tokens),
    )


def _first(
    rules: Iterable[_Rule], template: str, model_type: str, tokens: Callable[[], Collection[str]]
) -> Parser | None:
    for rule in rules:
        if (
            (not rule.types or model_type.startswith(rule.types))
            and all(mark in template for mark in rule.marks)
            and all(token in tokens() for token in rule.tokens)
        ):
            named = [f"its chat template has {rule.marks[0]}"] if rule.marks else []
            named += [f"model_type {model_type}"] if rule.types else []
            return Parser(rule.parser, ", ".join(named)) if rule.parser else None
    return None


def _templates(checkpoint: Checkpoint, tokenizer: Mapping[str, object]) -> Iterable[str]:
    """Yield all chat templates, in the places of transformers: a file, or the configuration of the
    tokenizer or the processor, which may have several with names.
    """
    for name, size in checkpoint.sizes.items():
        if name == "chat_template.jinja" or (
            name.startswith("additional_chat_templates/") and name.endswith(".jinja")
        ):
            content = checkpoint.head(name, min(size, _LONGEST_TEMPLATE)) if size else b""
            yield content.decode("utf-8", "replace")
    for configuration in (_object(checkpoint, "chat_template.json"), tokenizer):
        match configuration.get("chat_template"):
            case str(template):
                yield template
            case [*several]:
                for each in several:
                    if isinstance(each, dict) and isinstance(each.get("template"), str):
                        yield each["template"]


_LIMITS = {"tokenizer.json": (64 * 2**20, 1_000_000)}  # one list for each of 500,000 merges


def _added(checkpoint: Checkpoint, tokenizer: Mapping[str, object]) -> Iterable[str]:
    """Yield the tokens that were added to the vocabulary, also special ones."""
    yield from _object(checkpoint, "added_tokens.json")
    entries = tokenizer.get("added_tokens_decoder")
    if isinstance(entries, dict) and entries:
        listed = [*entries.values()]
    else:
        whole = _object(checkpoint, "tokenizer.json").get("added_tokens")
        listed = whole if isinstance(whole, list) else []
    for entry in listed:
        if isinstance(entry, dict) and isinstance(entry.get("content"), str):
            yield entry["content"]


def _object(checkpoint: Checkpoint, name: str) -> dict[str, object]:
    """Return the content of a JSON file; empty if it cannot be read, which vLLM reports itself."""
    with contextlib.suppress(ModelError):
        if name in checkpoint.sizes:
            return json_object(checkpoint, name, *_LIMITS.get(name, ()))
    return {}
