# SPDX-License-Identifier: Apache-2.0
"""Limits of the fields that clients may send to the engine.

vLLM (0.32) reads much more from a body than sampling parameters. Two kinds of fields are checked:

- Fields that reach the KV connector, other hosts' caches or extensions are refused, unless the
  operator trusts every client.
- Fields that cost the engine more than they cost the client have a limit.

vLLM itself refuses templates and processor arguments of clients, and limits `logprobs`,
`logprob_token_ids`, the number of `stop` and `bad_words`, and the nesting of schemas.
tests/serving/engine/test_vllm_requests.py has a reason for every field of vLLM's that has no limit.
"""

import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

from handlers.records import MOST_VALUES, has_more, is_list
from serving.errors import BadRequest
from serving.inference.content.fields import (
    PAIRS,
    RequestFields,
    given,
    length,
    prompts,
)

T = TypeVar("T")

_INTERNAL = (
    "kv_transfer_params",  # makes connectors read and free KV blocks, also those of other hosts
    "ec_transfer_params",  # the same for the encoder's cache
    "vllm_xargs",  # for extensions; can set the two above, and have KV events published again
)
_LONGEST = {
    "request_id": 256,
    "bad_words": 16 * 1024,  # each is made into tokens on the event loop
    "stop": 16 * 1024,  # each is searched in the text after every token
    "stop_token_ids": 16 * 1024,  # every token is compared with all of them, one by one
    "allowed_token_ids": 2 * 1024 * 1024,  # copied to the engine's process; a whole vocabulary fits
    "logit_bias": 2 * 1024 * 1024,
    "response_format": 64 * 1024,  # the time to compile a grammar grows with its square
    "structured_outputs": 64 * 1024,
    "text": 64 * 1024,  # of Responses, with a schema in it
    "output_config": 64 * 1024,  # of Messages, with a schema in it
    "stop_sequences": 16 * 1024,  # as `stop`
    "metadata": 16 * 1024,  # is sent back
    "tools": 256 * 1024,
    "tool_choice": 64 * 1024,
    "chat_template_kwargs": 64 * 1024,  # each key is looked up in the template, and logged by vLLM
    "include": 4 * 1024,
    "logprob_token_ids": 4 * 1024,
    "media_io_kwargs": 16 * 1024,
    "mm_processor_kwargs": 16 * 1024,
}
"""Most bytes of JSON in the value of a key."""

SEQUENCES = 1024
"""Most sequences that a request may generate: its prompts times `n`."""
INPUTS = 2048
"""Most inputs in a request for embeddings, as at OpenAI."""
PAIRS_SIZE = 16 * 1024 * 1024
"""Most bytes of a request's pairs. vLLM reads the query again with each document."""
SHORTENED = 1024 * 1024
"""Most bytes of compared texts that vLLM may shorten, which it does on the event loop."""
TOKENIZED = 1024 * 1024
"""Most bytes of a request to tokenize or detokenize. vLLM has no limit, and answers on the event
loop.
"""
TOKENS = 2 * 1024 * 1024
"""Most tokens in a request's prompts or inputs, if they are given as tokens."""
MESSAGES = 8192
"""Most messages and parts of messages in a request. vLLM takes up to 0.1 ms to read one, on the
event loop.
"""
PATTERN, REPEATED = 64, 512
"""Most tokens of `repetition_detection` in a pattern, and in the pattern's repetitions.

vLLM compares them in the loop that serves all requests, for every token of every sequence. With
these limits that takes at most about a millisecond.
"""
PROMPT_LOGPROBS = 16 * 1024 * 1024
"""Most bytes of the prompts, times `n`, times the log probabilities of each token. vLLM makes an
object of some 200 bytes for each before it answers.
"""
KEPT = {
    "previous_response_id": "send the whole conversation as input",
    "prompt": "send its text as instructions or input",
    "previous_input_messages": "send the whole conversation as input",
    "background": "wait for the answer, or request a stream",
    "store": "leave it out, or set it to false",
}
"""Keys of Responses that need stored answers → the fix for the client."""


class _Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw()
    output: msgspec.Raw = msgspec.Raw()  # a tool's output in Responses


class _Content(msgspec.Struct):
    content: list[msgspec.Raw]


class _Part(msgspec.Struct):
    tool: msgspec.Raw = msgspec.Raw()  # Messages may define tools within a conversation


def _reader(kind: Any) -> Callable[[bytes], Any]:
    return msgspec.json.Decoder(kind).decode


_Token = Annotated[int, msgspec.Meta(ge=0)]
_LISTS = {
    "texts": _reader(list[str]),
    "tokens": _reader(list[_Token]),
    "lists": _reader(list[list[_Token]]),
}
_parts = _reader(list[_Part | str | int | float | bool | list[msgspec.Raw] | None])
_messages, _conversations = _reader(list[_Message]), _reader(list[list[_Message]])
_objects, _items = _reader(list[_Part]), _reader(list[dict[str, Any]])
_compared = _reader(str | _Content | list[str | _Content])
_whole = _reader(int)
_bias = msgspec.json.Decoder(dict[str, float] | None, strict=False).decode
_lax = _reader(int | float | bool)  # vLLM accepts all of these


class _Repetition(msgspec.Struct):
    max_pattern_size: int = 0
    min_count: int = 0


_repetition = msgspec.json.Decoder(_Repetition).decode


def check(call: RequestFields, trusted: bool) -> None:
    """Raise BadRequest for a call that the engine must not get.

    trusted: whether clients may send fields that reach the engine's internals.
    """
    # A key that is not there is empty, and costs no call.
    for key in () if trusted else _INTERNAL:
        if (value := getattr(call, key)) and given(value):
            raise BadRequest(
                f"{key} is not for clients; OPTION_TRUST_REQUEST_INTERNALS=true lets them send it",
                key,
            )
    for key, longest in _LONGEST.items():
        if len(getattr(call, key)) > longest:
            raise BadRequest(f"{key} has more than {longest} bytes", key)
    n = _number(call.n, "n", 1) if call.n else 1
    if n * prompts(call.prompt) > SEQUENCES:
        raise BadRequest(f"n times the prompts may be at most {SEQUENCES}", "n")
    for key in ("top_k", "stream_interval", "priority"):
        if value := getattr(call, key):
            _check_bits(value, key)
    if call.logit_bias:
        _check_bias(call.logit_bias)
    for key in ("messages", "documents", "input"):
        if (value := getattr(call, key)) and not (key == "input" and _is_tokens(value)):
            _check_values(value, key)
    for key in ("prompt", "input", "messages"):
        if (value := getattr(call, key)) and is_list(value):
            _check_list(bytes(value), key, _kind(bytes(value)))
    if call.tools:
        _check_tools(call.tools)
    if call.system and is_list(call.system) and length(call.system) > INPUTS:
        raise BadRequest(f"system may have {INPUTS} parts", "system")
    if call.prompt_logprobs or call.echo:
        _check_prompt_logprobs(call, n)
    if call.repetition_detection:
        _check_repetition(call.repetition_detection)


def check_items(call: RequestFields) -> None:
    """Raise BadRequest for an `input` of Responses that is neither a text nor a list of items."""
    value = bytes(call.input)
    if value.startswith(b'"') or not given(call.input):
        return
    try:
        _items(value)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise BadRequest("input should be a text or a list of items", "input") from None


def check_kept(call: RequestFields) -> None:
    """Raise BadRequest for a call of Responses that needs stored answers. This server stores none:
    each request has its whole conversation.
    """
    for key, fix in KEPT.items():
        if bytes(getattr(call, key)) not in (b"", b"null", b"false"):
            raise BadRequest(f"{key}: no answers are stored here; {fix}", key)


def check_pairs(call: RequestFields) -> None:
    """Raise BadRequest for compared texts that the engine must not get."""
    parts = 0
    for key in PAIRS:
        if not given(value := getattr(call, key)):
            continue
        if is_list(value) and length(value) > INPUTS:
            raise BadRequest(f"{key} may have at most {INPUTS} texts", key)
        try:
            found = _compared(value)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise BadRequest(f"{key} should be a text or a list of texts", key) from None
        texts = found if isinstance(found, list) else [found]
        parts += sum(len(text.content) for text in texts if isinstance(text, _Content))
    if parts > MESSAGES:
        raise BadRequest(f"the texts may have {MESSAGES} parts, and these have {parts}")
    size = sum(len(getattr(call, key)) for key in PAIRS)
    each = sum(
        len(getattr(call, key))
        for key in (*PAIRS, "instruction", "chat_template_kwargs")
        if not is_list(value := getattr(call, key)) or length(value) == 1
    )
    if size + each * call.pairs > PAIRS_SIZE:
        raise BadRequest(
            f"the texts, with the query beside each document, may have {PAIRS_SIZE} bytes"
        )
    if (call.max_tokens_per_query or call.max_tokens_per_doc) and size > SHORTENED:
        raise BadRequest(
            f"texts of more than {SHORTENED} bytes are not shortened by max_tokens_per_query and "
            "max_tokens_per_doc; shorten them before, or use truncate_prompt_tokens"
        )


def check_tokenized(body: bytes) -> None:
    """Raise BadRequest for a request to tokenize or detokenize that is too large."""
    if len(body) > TOKENIZED:
        raise BadRequest(f"a request for tokens may have at most {TOKENIZED} bytes")


def _check_values(value: msgspec.Raw, key: str) -> None:
    if has_more(value, MOST_VALUES):
        raise BadRequest(f"{key} may have at most {MOST_VALUES} values, in all of its lists", key)


def _is_tokens(value: msgspec.Raw) -> bool:
    return is_list(value) and _kind(bytes(value)) in _LISTS


def _check_bits(value: msgspec.Raw, key: str) -> None:
    if abs(_number(value, key, 0, _lax)) >= 2**63:
        raise BadRequest(f"{key} should be a whole number between -2^63 and 2^63 - 1", key)


def _check_bias(value: msgspec.Raw) -> None:
    """Raise BadRequest for the first wrong value. pydantic would report each of them."""
    try:
        _bias(value)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise BadRequest("logit_bias should map token ids to numbers", "logit_bias") from None


def _check_tools(value: msgspec.Raw) -> None:
    if not is_list(value):
        return
    try:
        found = _objects(value)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise BadRequest("tools should be a list of objects", "tools") from None
    if len(found) > INPUTS:
        raise BadRequest(f"tools may be at most {INPUTS}", "tools")


def _check_list(value: bytes, key: str, kind: str) -> None:
    """Raise BadRequest for a list that vLLM would not accept. vLLM tries each type that the list
    may have, and its error has a reason for each item and type.
    """
    if key != "prompt" and prompts(msgspec.Raw(value)) > INPUTS:
        raise BadRequest(f"a request may have at most {INPUTS} inputs", "input")
    if key == "prompt" or (key != "messages" and kind in _LISTS):
        _check_prompts(value, key, kind)
    else:
        _check_messages(value, key, kind)


def _check_prompts(value: bytes, key: str, kind: str) -> None:
    if kind != "texts" and value.count(b",") >= TOKENS:
        raise BadRequest(f"{key} has more than {TOKENS} tokens", key)
    try:
        _LISTS[kind](value)
    except (KeyError, msgspec.MsgspecError, UnicodeDecodeError):
        raise BadRequest(
            f"{key} should be a text or tokens, or a list of such, all of one kind", key
        ) from None


def _check_messages(value: bytes, key: str, kind: str) -> None:
    try:
        if kind in ("lists", "conversations"):
            found = [message for messages in _conversations(value) for message in messages]
        else:
            found = _messages(value)
        contents = [bytes(it) for message in found for it in (message.content, message.output)]
        parts = [
            part for content in contents if content.startswith(b"[") for part in _parts(content)
        ]
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise BadRequest(f"{key} should be a list of messages", key) from None
    if len(found) + len(parts) > MESSAGES:
        raise BadRequest(
            f"a request may have {MESSAGES} messages and parts of messages, and this one has "
            f"{len(found) + len(parts)}",
            key,
        )
    if sum(len(part.tool) for part in parts if isinstance(part, _Part)) > (
        most := _LONGEST["tools"]
    ):
        raise BadRequest(f"the tools in messages have more than {most} bytes", key)


_BEGINNING = re.compile(rb"\[\s*(\[?)\s*(\{?)")


def _kind(value: bytes) -> str:
    """Return the kind of a list's items, by its first bytes."""
    found = _BEGINNING.match(value)
    assert found
    if found[2]:
        return "conversations" if found[1] else "conversation"
    if found[1]:
        return "lists"
    return "texts" if value[found.end() : found.end() + 1] in (b'"', b"]") else "tokens"


def _check_prompt_logprobs(call: RequestFields, n: int) -> None:
    each = _number(call.prompt_logprobs, "prompt_logprobs", None, _lax)
    if each is None and bytes(call.echo) not in (b"", b"null", b"false"):
        chat = given(call.messages)
        key = "top_logprobs" if chat else "logprobs"  # a chat's `logprobs` is true or false
        each = _number(getattr(call, key), key, 0 if chat else None, _lax)
    if each is None or each < 0:  # vLLM refuses numbers below 0, unless the operator allows them
        return
    size = len(call.prompt) + len(call.messages)
    if size * n * (each + 1) > PROMPT_LOGPROBS:
        raise BadRequest(
            "log probabilities of prompts: their bytes, times n, times prompt_logprobs + 1, may be "
            f"at most {PROMPT_LOGPROBS}",
            "prompt_logprobs",
        )


def _check_repetition(value: msgspec.Raw) -> None:
    if not given(value):
        return
    try:
        found = _repetition(value)
    except msgspec.MsgspecError:
        raise BadRequest(
            "repetition_detection should have whole numbers", "repetition_detection"
        ) from None
    size, count = found.max_pattern_size, found.min_count
    if size > PATTERN or size * count > REPEATED:
        raise BadRequest(
            f"max_pattern_size may be at most {PATTERN}, and max_pattern_size times min_count at "
            f"most {REPEATED}",
            "repetition_detection",
        )


def _number(
    value: msgspec.Raw, key: str, otherwise: T, read: Callable[[bytes], Any] = _whole
) -> int | T:
    if not given(value):
        return otherwise
    try:
        return int(read(value))
    except (msgspec.MsgspecError, OverflowError):
        raise BadRequest(f"{key} should be a whole number", key) from None
