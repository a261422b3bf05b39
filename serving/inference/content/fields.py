# SPDX-License-Identifier: Apache-2.0
"""The fields of a request's body that this server's decisions depend on, read once.

Only this module decides a body's format. Values stay undecoded bytes until they are needed, so that
a long list costs nothing before its length is checked. All other keys are skipped.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from handlers import embeddings, lmi, openai
from handlers.records import EngineCall, FormatError, flag, has_more, is_list, read
from serving.cache_hints.intent import HintKeys
from serving.errors import BadRequest
from serving.protocol import (
    CHAT_COMPLETIONS,
    CLASSIFY,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    PAIRS_PATHS,
    RERANK,
    RESPONSES,
    SCORE,
)

MOST = 2048
"""Most prompts in any request. checks.py has lower limits by kind, for the engine's call."""
ADAPTERS = 1024
"""Most names in a list of adapters."""
KEYS = 131_072
"""Most keys in all objects of a body. vLLM takes up to 4 µs for each, on the event loop."""
VALUES = 2_621_440
"""Most values in all lists and objects of a body: the most tokens of prompts, and some more."""
TEXTS = 1_048_576
"""Most texts in a body, names of keys among them: they are read one by one to count the others."""
PAIRS = ("query", "queries", "text_1", "data_1", "documents", "items", "text_2", "data_2")
"""Keys of the texts that are compared."""

GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "grammar", "choice")}
"""Keys of vLLM before 0.12 → their kinds of `structured_outputs`, which replaced them."""
_GUIDING = ("guided_decoding_backend", "guided_whitespace_pattern")
"""Keys of vLLM before 0.12 without a successor: vLLM now chooses the backend by the constraint."""

_SHORT = 128 * 1024  # bytes of JSON that may be decoded without a check of its length
_NONE = msgspec.Raw()

Parse = Callable[[bytes], EngineCall]
"""Reads a body of one format. Raises FormatError."""


@functools.cache
def formats(embeds: bool, normalize: bool, classifies: bool = False) -> Mapping[str, Parse]:
    """Return the formats on /invocations by their keys, in LMI's order of precedence. The first of
    these keys that a body has decides its format.

    embeds: whether the model computes embeddings. normalize: whether they have the length 1.
    classifies: whether it classifies, as rerankers do.
    """
    found: dict[str, Parse] = {
        "prompt": openai.on(COMPLETIONS),
        "inputs": functools.partial(embeddings.parse, normalize=normalize) if embeds else lmi.parse,
        "messages": openai.on(CHAT_COMPLETIONS),
    }
    if not embeds and not classifies:
        return found | {"input": openai.on(RESPONSES)}
    found |= {"query": openai.on(RERANK), "text_1": openai.on(SCORE)}
    return found | {"input": openai.on(EMBEDDINGS if embeds else CLASSIFY)}


class RequestFields(HintKeys, gc=False):
    """The fields of a body: of a client's request or of the engine's call. HintKeys has more."""

    # The format's key, names of adapters and models, and the number of answers.
    adapters: msgspec.Raw = _NONE
    model: str | None = None
    prompt: msgspec.Raw = _NONE
    inputs: msgspec.Raw = _NONE
    anthropic_version: msgspec.Raw = _NONE
    stream: msgspec.Raw = _NONE
    n: msgspec.Raw = _NONE
    cache_salt: msgspec.Raw = _NONE
    # More fields for checks.py.
    kv_transfer_params: msgspec.Raw = _NONE
    ec_transfer_params: msgspec.Raw = _NONE
    vllm_xargs: msgspec.Raw = _NONE
    request_id: msgspec.Raw = _NONE
    bad_words: msgspec.Raw = _NONE
    stop: msgspec.Raw = _NONE
    stop_token_ids: msgspec.Raw = _NONE
    allowed_token_ids: msgspec.Raw = _NONE
    logit_bias: msgspec.Raw = _NONE
    response_format: msgspec.Raw = _NONE
    structured_outputs: msgspec.Raw = _NONE
    guided_json: msgspec.Raw = _NONE
    guided_regex: msgspec.Raw = _NONE
    guided_grammar: msgspec.Raw = _NONE
    guided_choice: msgspec.Raw = _NONE
    text: msgspec.Raw = _NONE
    output_config: msgspec.Raw = _NONE
    stop_sequences: msgspec.Raw = _NONE
    metadata: msgspec.Raw = _NONE
    echo: msgspec.Raw = _NONE
    logprobs: msgspec.Raw = _NONE
    top_logprobs: msgspec.Raw = _NONE
    prompt_logprobs: msgspec.Raw = _NONE
    repetition_detection: msgspec.Raw = _NONE
    # The texts that are compared, and the instruction that is added to each pair.
    query: msgspec.Raw = _NONE
    queries: msgspec.Raw = _NONE
    text_1: msgspec.Raw = _NONE
    data_1: msgspec.Raw = _NONE
    documents: msgspec.Raw = _NONE
    items: msgspec.Raw = _NONE
    text_2: msgspec.Raw = _NONE
    data_2: msgspec.Raw = _NONE
    instruction: msgspec.Raw = _NONE
    # Fields that vLLM turns into many objects.
    include: msgspec.Raw = _NONE
    logprob_token_ids: msgspec.Raw = _NONE
    media_io_kwargs: msgspec.Raw = _NONE
    mm_processor_kwargs: msgspec.Raw = _NONE
    tool_choice: msgspec.Raw = _NONE
    # Numbers that vLLM passes on unchecked.
    top_k: msgspec.Raw = _NONE
    stream_interval: msgspec.Raw = _NONE
    priority: msgspec.Raw = _NONE
    chat_template_kwargs: msgspec.Raw = _NONE
    max_tokens_per_query: msgspec.Raw = _NONE
    max_tokens_per_doc: msgspec.Raw = _NONE
    # Keys of Responses that refer to stored responses, or ask to store one.
    previous_response_id: msgspec.Raw = _NONE
    previous_input_messages: msgspec.Raw = _NONE
    background: msgspec.Raw = _NONE
    store: msgspec.Raw = _NONE

    @property
    def streamed(self) -> bool:
        """Whether the client wants a stream."""
        return bool(self.stream) and flag(msgspec.json.decode(self.stream)) not in (None, False)

    def sequences(self, path: str) -> int:
        """Return the number of sequences that the engine runs for its call at this path."""
        if path in PAIRS_PATHS:
            return self.pairs
        count = prompts(self.prompt or self.input)
        return count * _number(self.n) if self.n else count

    @property
    def pairs(self) -> int:
        """The number of texts that are compared with others, at most."""
        lists = (value for key in PAIRS if is_list(value := getattr(self, key)))
        return max(map(length, lists), default=0) or 1

    @property
    def session_command(self) -> str | None:
        """The requestType of a body without input for the model, or None."""
        if self.prompt or self.inputs or self.messages or self.input:
            return None
        try:
            return msgspec.json.decode(self.request_type, type=str)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def parser(self, known: Mapping[str, Parse], anthropic: bool = False) -> Parse:
        """Return the parser of the body's format, which is one of `known`. Raises BadRequest.

        anthropic: whether `messages` are Anthropic's. They are also Anthropic's in a body with
        `anthropic_version`, as on Amazon Bedrock (InvokeModel).
        """
        for key, parse in known.items():
            if given(value := getattr(self, key)):
                if key in _TEXTS and _has_objects(value):
                    raise BadRequest(
                        f"{key} should be a text or a list of texts; a conversation goes under "
                        "messages, and a picture into a part of a message, as image_url",
                        key,
                    )
                theirs = key == "messages" and (anthropic or given(self.anthropic_version))
                return openai.on(MESSAGES) if theirs else parse
        *names, last = known
        raise BadRequest(f"the body should have one of the keys {', '.join(names)} or {last}")

    def adapter_names(self) -> str | list[str] | None:
        """Return the adapters that the body names. Raises BadRequest, also for too many."""
        if not given(self.adapters):
            return None
        if prompts(self.adapters) > ADAPTERS:
            raise BadRequest(f"adapters may have at most {ADAPTERS} names", "adapters")
        try:  # within an object, for a message with the key's name
            return read(_read_adapters, b'{"adapters":%b}' % bytes(self.adapters)).adapters
        except FormatError as error:
            raise bad_request(error) from None

    def salt(self) -> str | None:
        """Return the client's cache_salt. Raises BadRequest if it is not a text, or empty."""
        if not self.cache_salt:
            return None
        try:
            salt = msgspec.json.decode(self.cache_salt, type=str | None)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise BadRequest("cache_salt should be a text", "cache_salt") from None
        if salt == "":
            raise BadRequest("cache_salt should not be empty", "cache_salt")
        return salt

    def require_few_prompts(self) -> None:
        """Raise BadRequest for too many prompts of any format, before any of them is read."""
        if prompts(self.prompt or self.inputs or self.input) > MOST:
            raise BadRequest(f"a request may have at most {MOST} inputs", "input")


class _Adapters(msgspec.Struct):
    adapters: str | list[str] | None = None


_read_adapters = msgspec.json.Decoder(_Adapters).decode
_read_fields = msgspec.json.Decoder(RequestFields).decode


def bad_request(error: FormatError) -> BadRequest:
    """Return the client's error for a body that breaks its format's rules."""
    return BadRequest(str(error), error.parameter)


def fields(body: bytes) -> RequestFields:
    """Return the fields of a body. Raises BadRequest.

    vLLM reads bodies with Python's json, which accepts more than JSON allows. The engine never gets
    a body that this reader refuses. Otherwise it could see names and salts that we did not see.
    """
    if len(body) > _SHORT:
        if body.count(b'"') - body.count(b'\\"') > 2 * TEXTS:
            raise BadRequest(f"a request may have at most {TEXTS} texts, with the names of keys")
        if has_more(body, KEYS, (b":",)):
            raise BadRequest(f"a request may have at most {KEYS} keys, in all of its objects")
        if has_more(body, VALUES):
            raise BadRequest(f"a request may have at most {VALUES} values, in all of its lists")
    try:
        return read(_read_fields, body)
    except FormatError as error:
        raise bad_request(error) from None


def fields_of(values: Mapping[str, Any]) -> RequestFields:
    """Return the fields of a call that a format has made of a body."""
    known = _RAW & values.keys()
    raw = {name: msgspec.Raw(msgspec.json.encode(values[name])) for name in known}
    return RequestFields(model=values.get("model"), **raw)


_RAW = {*RequestFields.__struct_fields__} - {"model", "request_type"}


def guided(found: RequestFields) -> str | None:
    """Return the GUIDED key that constrains a completion or chat, or None. vLLM would ignore the
    key, and answer without the constraint. Raises BadRequest if there are several constraints.
    """
    keys = (*GUIDED, "structured_outputs", "response_format")
    asked, *others = [key for key in keys if given(getattr(found, key))] or [""]
    if asked not in GUIDED:
        return None
    if others:
        raise BadRequest(
            f"{asked} and {others[0]} cannot both constrain an answer; send one of them", others[0]
        )
    return asked


def as_structured_outputs(found: RequestFields, key: str) -> RequestFields:
    """Return the fields of the same body, with a GUIDED key as `structured_outputs`."""
    constraint = b'{"%b":%b}' % (GUIDED[key].encode(), bytes(getattr(found, key)))
    return msgspec.structs.replace(found, structured_outputs=msgspec.Raw(constraint))


def with_structured_outputs(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the body, with a GUIDED key as `structured_outputs`."""
    left = {name: it for name, it in body.items() if name not in GUIDED and name not in _GUIDING}
    return {**left, "structured_outputs": {GUIDED[key]: body[key]}}


def given(value: msgspec.Raw) -> bool:
    """Whether a key is present, and not null."""
    return bool(value) and (len(value) > 4 or bytes(value) != b"null")


_TEXTS = ("prompt", "inputs")


def _has_objects(value: msgspec.Raw) -> bool:
    """Whether the value is an object, or a list that begins with one."""
    return bytes(memoryview(value)[:64]).lstrip(b"[ \t\r\n").startswith(b"{")


# The first byte of a list that is a single prompt: of tokens, or of messages.
_OF_ONE = {*(b"%d" % digit for digit in range(10)), b"{"}


def prompts(value: msgspec.Raw) -> int:
    """Count the prompts. A text, a list of tokens and a conversation are one prompt each; a list of
    these has one for each item. Counting stops above MOST.
    """
    beginning = bytes(memoryview(value)[:64])
    if not beginning.startswith(b"[") or beginning[1:].lstrip()[:1] in _OF_ONE:
        return 1
    return length(value) or 1


def length(value: msgspec.Raw) -> int:
    """Return the length of a list. Counting stops above MOST."""
    if len(value) <= _SHORT:
        return len(msgspec.json.decode(value, type=list[msgspec.Raw]))
    count = 0

    def look(kind: type, item: object) -> _Anything:
        nonlocal count
        count += 1
        if count > MOST:
            raise _TooMany
        return _ANYTHING

    with contextlib.suppress(_TooMany):
        msgspec.json.decode(value, type=list[_Anything], dec_hook=look)
    return count


class _Anything:
    """A type unknown to msgspec, which therefore calls dec_hook for each value."""


_ANYTHING = _Anything()


class _TooMany(Exception):
    pass


def _number(value: msgspec.Raw) -> int:
    """Return a whole number, or 1 for any other value."""
    text = bytes(value)
    return int(text) if text.isdigit() and len(text) < 6 else 1
