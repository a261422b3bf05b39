# SPDX-License-Identifier: Apache-2.0
"""Request bodies at the limits of an engine. Each is answered, or refused with a reason, and the
engine keeps running whatever else is in its batch.
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

TEXT = "One two three four five six seven eight nine ten eleven twelve."
LONGEST, VOCABULARY = 4096, 4096  # of the model that the tests serve
LARGE = (2**31, 2**63 - 1, -(2**63), 2**64, 10**400)

SAMPLED: dict[str, tuple[Any, ...]] = {
    "n": (0, -1, 1, 2, 16, *LARGE),
    "best_of": (2,),
    "max_tokens": (0, -1, 1, *LARGE),
    "min_tokens": (-1, 4, LONGEST, *LARGE),
    "temperature": (-1, 0, 1e-300, 1e-9, 2, 3, 1e300, "a"),
    "top_p": (-1, 0, 1e-300, 1, 2),
    "top_k": (-2, -1, 0, 1, VOCABULARY + 1, *LARGE),
    "min_p": (-1, 1e-300, 1, 2),
    "presence_penalty": (-2, 2, 3),
    "frequency_penalty": (-2, 2, 3),
    "repetition_penalty": (-1, 0, 1e-300, 1e-40, 0.01, 100, 1e38, 1e300),
    "length_penalty": (1e300,),
    "seed": (-1, 0, *LARGE),
    "stop": ("", "e", ["e", ""], ["e"] * 3, 5, [[]]),
    "stop_token_ids": ([], [-1], [0], [VOCABULARY], [2**31], [2**63], ["a"], [1] * 1000),
    "ignore_eos": (True,),
    "logit_bias": (
        *({}, {"0": 100}, {"0": -100}, {"-1": 1}, {str(VOCABULARY): 1}, {"a": 1}, {"1": 1e300}),
        *({str(2**63): 1}, {str(10**400): 1}, {"1_0": 1}, {str(it): -100 for it in range(4096)}),
    ),
    "allowed_token_ids": ([], [-1], [0], [VOCABULARY], [2**63], [1, 1, 1], [*range(VOCABULARY)]),
    "bad_words": ([""], [" "], ["the"], ["\x00"], ["é"], ["a" * 10_000], [*"abcdefgh"]),
    "thinking_token_budget": (-2, 0, 5, 2**63),
    "watermarking": (True,),
    "repetition_detection": (
        {},
        {"max_pattern_size": 2, "min_count": 2},
        {"max_pattern_size": -1, "min_count": -1},
        {"max_pattern_size": 4, "min_pattern_size": 9, "min_count": 2},
    ),
    "structured_outputs": (
        {"json": {"type": "integer", "maximum": 10**400}},
        *({}, {"json": {}}, {"json": ""}, {"json": "{"}, {"json": {"type": "integer"}}),
        *({"json": {"type": "none"}}, {"json": {"$ref": "#"}}, {"json": {"$ref": "#/a"}}),
        *({"json": {"type": "integer", "multipleOf": 3}}, {"json": {"allOf": [{}, {}]}}),
        *({"json": {"type": "string", "pattern": "("}}, {"json": {"enum": []}}, {"json": True}),
        *({"json": {"type": "object", "patternProperties": {"a": {}, "b": {}}}}, {"json": 5}),
        *({"json_object": True}, {"json_object": False}, {"regex": ""}, {"regex": "[a-"}),
        *({"regex": "(?<=a)b"}, {"regex": "a\x00"}, {"regex": "\\p{L}+"}, {"regex": "^$"}),
        *({"regex": r"\1"}, {"regex": "[^\\s\\S]"}, {"regex": "(" * 3000}),
        *({"choice": []}, {"choice": [""]}, {"choice": ["a", "a"]}, {"choice": ['\x00\n"']}),
        *({"grammar": ""}, {"grammar": "root ::= root"}, {"grammar": 'root ::= "a" root'}),
        *({"grammar": "start: x"}, {"grammar": 'root ::= ""'}, {"grammar": "%"}),
        *({"grammar": "root ::= [^\\u0000-\\U0010ffff]"}, {"grammar": 'start: "a"'}),
        *({"structural_tag": ""}, {"structural_tag": "{}"}, {"structural_tag": "[]"}),
        {"structural_tag": json.dumps({"structures": [], "triggers": []})},
        {"structural_tag": json.dumps({"type": "structural_tag", "format": {"type": "any_text"}})},
        *({"regex": "a", "choice": ["b"]}, {"json": {}, "whitespace_pattern": "("}),
        {"regex": "a", "_backend": "outlines"},
    ),
    "response_format": (
        *({"type": "json_object"}, {"type": "text"}, {"type": "json_schema"}, {"type": "a"}, {}),
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True}},
        {"type": "structural_tag", "structures": [], "triggers": []},
        {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}},
    ),
    "prompt_logprobs": (-2, -1, 0, 1, 20, 21, *LARGE, True, "a"),
    "logprob_token_ids": ([], [0], [-1], [VOCABULARY], [2**63], [*range(20)], [*range(200)]),
    "truncate_prompt_tokens": (-2, -1, 0, 1, 3, LONGEST, LONGEST + 1, *LARGE),
    "truncation_side": ("left", "right", "a"),
    "priority": (0, 1, *LARGE),
    "return_token_ids": (True,),
    "return_tokens_as_token_ids": (True,),
    "return_token_offsets": (True,),
    "routed_experts_prompt_start": (-1, 1, LONGEST, *LARGE),
    "stream_interval": (0, 1, 10**6, *LARGE),
    "use_beam_search": (True,),
    "skip_special_tokens": (False,),
    "spaces_between_special_tokens": (False,),
    "include_stop_str_in_output": (True,),
    "add_special_tokens": (False,),
    "vllm_xargs": ({}, {"a": 2**64}, {"kv_transfer_params": "a"}),
    "kv_transfer_params": ({}, {"do_remote_prefill": True}),
    "cache_salt": ("", "a", 5),
    "request_id": ("", "a", "\x00", "é" * 100),
    "session_id": ("", "a"),
    "data_parallel_rank": (0, 5),
    "user": (5,),
}
"""Values of parameters that all or most generating requests have."""

LOGPROBS: tuple[dict[str, Any], ...] = (
    *({"logprobs": it} for it in (-2, -1, 0, 1, 20, 21, True, *LARGE)),
    {"echo": True},
    {"echo": True, "logprobs": 0},
    {"echo": True, "logprobs": 1, "max_tokens": 0},
    {"echo": True, "logprobs": 5, "max_tokens": 1, "n": 3},
    {"echo": True, "logprobs": 1, "prompt": [TEXT, "a", TEXT * 3]},
    {"prompt_logprobs": 1, "prompt": [TEXT, "a", TEXT * 3], "n": 2},
    {"prompt_logprobs": 1, "prompt": "a"},
    {"prompt_logprobs": 1, "prompt": TEXT * 120},
    {"prompt_logprobs": 2, "max_tokens": 1, "truncate_prompt_tokens": 2},
    {"prompt_logprobs": 2, "structured_outputs": {"choice": ["a", "b"]}, "logprobs": 2},
    {"logprobs": 3, "logprob_token_ids": [1, 2, 3], "prompt_logprobs": 2},
    {"use_beam_search": True, "n": 3, "logprobs": 2},
    {"use_beam_search": True, "n": 2, "prompt_logprobs": 2},
    {"use_beam_search": True, "n": 2, "echo": True, "logprobs": 1},
)
PROMPTS: tuple[Any, ...] = (
    *("", " ", "\x00", "</s>", "<s>" * 50, "é" * 50, TEXT * 2000, [], [""], [[]], [TEXT, ""]),
    *(
        [0],
        [-1],
        [1],
        [VOCABULARY - 1],
        [VOCABULARY],
        [2**31],
        [2**63],
        [1.5],
        ["a", 1],
        [[1], "a"],
    ),
    *([[1, 2], [-1]], [[1], []], [1] * (LONGEST - 1), [1] * LONGEST, [1] * (LONGEST + 1)),
    *(5, {}, True, {"prompt_token_ids": [1]}, [{"prompt": "a"}], [[["a"]]], [None]),
)
EMBEDS: tuple[Any, ...] = (
    "",
    "a",
    "AAAA",
    "gASVJAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOU",
    ["AAAA", "AAAA"],
    5,
)
SPOKEN: tuple[Any, ...] = (
    *(
        [],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": 5}],
    ),
    *([{"role": "user", "content": []}], [{"role": "x", "content": "a"}], {}, "a", [None], [[]]),
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
    [
        {
            "role": "user",
            "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}],
        }
    ],
    [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:,"}}]}],
    [{"role": "user", "content": [{"type": "prompt_embeds", "data": "AAAA"}]}],
    [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": "AAAA"}]}],
    [{"role": "tool", "content": "a", "tool_call_id": "b"}],
    [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "a", "arguments": "{"}}
            ],
        }
    ],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": {}}}]}],
    [{"role": "user", "content": TEXT * 2000}],
)
TOOL = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
CHATS: tuple[dict[str, Any], ...] = (
    *({"messages": it} for it in SPOKEN),
    *({"logprobs": True, "top_logprobs": it} for it in (-1, 0, 1, 20, 21, *LARGE)),
    *({"prompt_logprobs": it, "echo": True} for it in (0, 2)),
    *({"tools": [TOOL], "tool_choice": it} for it in ("auto", "none", "required", "a", {}, 5)),
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "a"}}},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "b"}}},
    {
        "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}],
        "tool_choice": "required",
    },
    *({"tools": it} for it in ([], [{}], [5], {}, [TOOL] * 3)),
    *({"reasoning_effort": it} for it in ("none", "high", "a", 5)),
    *(
        {"chat_template_kwargs": it}
        for it in ({}, {"messages": []}, {"a": {}}, {"tokenize": True}, 5)
    ),
    {"chat_template": "{{ 1 / 0 }}"},
    {"documents": [{"a": "b"}]},
    {"documents": [5]},
    *({"add_generation_prompt": it, "continue_final_message": True} for it in (True, False)),
    {
        "messages": [{"role": "assistant", "content": "a"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"include_usage": 5}},
    {"mm_processor_kwargs": {"a": 1}},
    {"functions": [{"name": "a"}]},
)
RESPONSES: tuple[dict[str, Any], ...] = (
    *({"input": it} for it in ("", [], [{}], {}, 5, [5], [{"role": "user", "content": []}])),
    {"input": [{"type": "reasoning"}]},
    {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]},
    {"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "{"}]},
    {"input": [{"type": "item_reference", "id": "a"}]},
    {"input": [{"type": "message", "role": "assistant", "content": [{"type": "output_text"}]}]},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
    {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "a"}]}]},
    *({"top_logprobs": it, "include": ["message.output_text.logprobs"]} for it in (-1, 1, 20, 21)),
    *(
        {"tools": [{"type": it}]}
        for it in ("web_search", "code_interpreter", "mcp", "function", "a")
    ),
    *({"max_output_tokens": it} for it in (0, -1, *LARGE)),
    *({"text": it} for it in ({}, {"format": {"type": "json_schema"}}, {"format": {"type": "a"}})),
    {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}},
    *({"truncation": it} for it in ("auto", "disabled", "a")),
    {"reasoning": {"effort": "a"}},
    {"tool_choice": {"type": "function", "name": "b"}},
    {"instructions": 5},
)
CLAUDE: tuple[dict[str, Any], ...] = (
    *({"max_tokens": it, "stop_sequences": [*"aeio"]} for it in (0, -1, *LARGE)),
    *({"messages": it} for it in SPOKEN),
    *({"system": it} for it in ("", [], 5, [{"type": "text", "text": ""}], [{}])),
    {"thinking": {"type": "enabled", "budget_tokens": 2**63}},
    *(
        {"tool_choice": it}
        for it in ({"type": "any"}, {"type": "tool", "name": "b"}, {"type": "a"})
    ),
    {"tools": [{"name": "a", "input_schema": {"type": "x"}}], "tool_choice": {"type": "any"}},
    {"stop_sequences": [""]},
    {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
)
LMI: tuple[dict[str, Any], ...] = (
    *({"inputs": it} for it in ("", " ", "\x00", 5, [], [""], [TEXT, "a"], {}, TEXT * 2000)),
    *(
        {"inputs": TEXT, "parameters": it}
        for it in (
            {"details": True, "decoder_input_details": True},
            {"details": True, "decoder_input_details": True, "n": 2},
            *({"max_new_tokens": it} for it in (0, -1, 2**31)),
            *({"top_n_tokens": it} for it in (1, 21, -1)),
            {"do_sample": True, "temperature": 0},
            {"do_sample": False, "temperature": 5},
            {"num_beams": 3},
            {"best_of": 3},
            {"seed": 2**64},
            {"truncate": -5},
            {"repetition_penalty": 1e-300},
        )
    ),
)
TOKENS: tuple[tuple[str, Any], ...] = (
    *(("/tokenize", {"prompt": it}) for it in ("", TEXT, 5)),
    ("/tokenize", {"messages": []}),
    *(
        ("/detokenize", {"tokens": it})
        for it in ([], [0], [-1], [VOCABULARY], [2**31], [2**64], "a")
    ),
)


class Asked(NamedTuple):
    path: str
    body: dict[str, Any]


def bodies() -> Iterator[Asked]:
    completion = {"prompt": TEXT, "max_tokens": 4}
    chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}
    responses = {"input": TEXT, "max_output_tokens": 4, "store": False}
    claude = {"messages": chat["messages"], "max_tokens": 4}
    for key, values in SAMPLED.items():
        for value in values:
            yield Asked("/v1/completions", {**completion, key: value})
            yield Asked("/v1/chat/completions", {**chat, key: value})
        yield Asked("/v1/responses", {**responses, key: values[-1]})
        yield Asked("/v1/messages", {**claude, key: values[-1]})
    for more in (*LOGPROBS, *({"prompt": it} for it in PROMPTS)):
        yield Asked("/v1/completions", {**completion, **more})
    for embeds, prompt in itertools.product(EMBEDS, (None, TEXT)):
        yield Asked("/v1/completions", {**completion, "prompt": prompt, "prompt_embeds": embeds})
    yield Asked("/v1/completions", {**completion, "suffix": "a"})
    for more in CHATS:
        yield Asked("/v1/chat/completions", {**chat, **more})
    for more in RESPONSES:
        yield Asked("/v1/responses", {**responses, **more})
    for more in CLAUDE:
        yield Asked("/v1/messages", {**claude, **more})
    for body in LMI:
        yield Asked("/invocations", body)
    yield from (Asked(*it) for it in TOKENS)
