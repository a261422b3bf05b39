# SPDX-License-Identifier: Apache-2.0
"""A stream that outlives its replica: the recorded state, and the request for the rest from another
replica.

An answer is continued only if another replica generates the same one: it is greedy or seeded, has
one choice, and has neither tools nor log probabilities. For a greedy answer, the next replica
computes the prompt and the tokens so far, as a completion of token ids (from vLLM's
`return_token_ids`), and generates only the rest. This could change the text in some cases: stop
strings, penalties, grammars, seeds, reasoning and formatters depend on the answer's beginning, and
images on more than tokens. In these cases the next replica generates the whole answer, and the
client gets the part that it does not have.
"""

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from handlers.records import has_more
from serving.http.http1 import CHUNK, LAST_CHUNK
from serving.protocol import CHAT_COMPLETIONS, COMPLETIONS, FORMATTED
from serving.router.usage import counted

MOST = 1 << 18
"""Tokens of prompt and answer, and characters of the answer, that are kept of one stream. A longer
one is not continued.
"""

LARGEST_EVENT = 1 << 20
"""Bytes of an event that is read. A stream with a larger one is not continued."""

COMPLETION_TOKENS = 16
"""Default length of a completion (OpenAI's default, and vLLM's)."""

_OF_THE_PROMPT = frozenset(
    (
        *("messages", "prompt", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
        *("continue_final_message", "add_special_tokens", "documents", "reasoning_effort"),
        *("document_order", "truncate_prompt_tokens", "truncation_side"),
    )
)
"""Keys that decide about the prompt's tokens, which are known by then."""
_OF_THE_LENGTH = frozenset(("max_tokens", "max_completion_tokens", "min_tokens"))
_SAME = frozenset(
    (
        *("model", "adapters", "stream", "stream_options", "user", "cache_salt", "priority"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "n", "best_of", "logprobs", "echo"),
        *("repetition_penalty", "logit_bias", "allowed_token_ids", "stop_token_ids", "ignore_eos"),
        *("skip_special_tokens", "spaces_between_special_tokens", "session_id"),
    )
)
"""Keys with the same meaning for the rest of a greedy answer as for the whole answer."""
_OTHERS = frozenset(
    (
        *("tools", "functions", "return_token_ids", "echo", "suffix", "use_beam_search"),
        *("prompt_embeds", "kv_transfer_params"),
    )
)
"""Keys of requests that are not continued."""
_CONTINUED = _OF_THE_PROMPT | _OF_THE_LENGTH | _SAME
_TEXTS = ("text", "content", "reasoning", "reasoning_content")
"""Keys of an event's choice, or of its delta, that are the answer's text."""
_STAMP = ("id", "object", "created", "model")

_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_UNKNOWN = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""The exceptions of reading an event that does not have vLLM's shape."""
_decode = msgspec.json.decode
_encode = msgspec.json.encode


def continuation(path: str, body: bytes) -> "Continuation | None":
    """Continues a request's stream, if possible."""
    if path not in (CHAT_COMPLETIONS, COMPLETIONS) or b'"stream"' not in body:
        return None
    if has_more(body, MOST):
        return None
    try:
        asked = _decode(body)
    except _UNREADABLE:
        return None
    if not isinstance(asked, dict):
        return None
    asked = {key: value for key, value in asked.items() if value is not None}
    greedy = asked.get("temperature") in (0, 0.0) and asked.get("temperature") is not False
    if (
        asked.get("stream") is not True
        or not (greedy or isinstance(asked.get("seed"), int))
        or any(asked.get(key) for key in _OTHERS)
        or asked.get("logprobs", False) is not False  # 0 asks for some as well
        or "prompt_logprobs" in asked
        or asked.get("n", 1) != 1
        or asked.get("best_of", 1) != 1
    ):
        return None
    prompt = asked.get("prompt", "")
    if path == COMPLETIONS and not isinstance(prompt, str) and not _is_tokens(prompt):
        return None
    resumable = (
        greedy
        and asked.keys() <= _CONTINUED
        and all(isinstance(asked.get(key, 0), int) for key in _OF_THE_LENGTH)  # vLLM takes "5"
        and _is_text(asked.get("messages", []))
    )
    return Continuation(path, body, asked, resumable=resumable)


def _is_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


def _is_text(messages: Any) -> bool:
    """Whether a prompt consists of text only, so that its tokens describe it completely."""
    if not isinstance(messages, list):
        return False
    parts = [
        part
        for message in messages
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    ]
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)


class Continuation:
    """One request's stream."""

    def __init__(
        self, path: str, body: bytes, asked: Mapping[str, Any], *, resumable: bool
    ) -> None:
        """asked: the body's keys. resumable: whether its rest can be generated from tokens."""
        if resumable:
            keys = _decode(body, type=dict[str, msgspec.Raw])  # null may be there already
            body = _encode(keys | {"return_token_ids": True})
        self._asked = asked
        self._first = path, body
        # the current request
        self.path, self.body = path, body
        self._continues = False  # whether the client has the beginning already
        self._given = 0  # tokens of the answer that the replica was given
        self._skipped: dict[str, str] = {}  # text that it generates, and the client has
        # its answer
        self._chunked = False
        self._followed = False  # whether its events are read
        self._incoming = bytearray()  # the beginning of an event
        self.complete = False
        """Whether the stream is complete."""
        self.broken = False
        """Whether it has failed: the replica reports a failure, or its answer differs from the
        earlier one.
        """
        self.failure = b""
        """The replica's message about it."""
        # the answer so far
        self._over = False  # whether it is not to be continued
        self._resumable = resumable
        self._stamp: dict[str, Any] = {}  # fields of all events
        self._has_role = self._has_reason = self._has_usage = False
        self._prompt = array("I")
        self._tokens = array("I")
        self._texts: dict[str, list[str]] = {}
        self._length = 0
        self._whole = 0, 0  # the last tokens and characters that belong together

    # as it passes

    def begin(self, status: int, headers: Mapping[bytes, bytes]) -> bool:
        """A replica's answer begins. Whether it is a stream of events."""
        self._chunked = b"chunked" in headers.get(b"transfer-encoding", b"").lower()
        kind = headers.get(b"content-type", b"").lower()
        self._followed = (
            status == 200
            and self._chunked
            and kind.startswith(b"text/event-stream")
            and b"content-encoding" not in headers
        )
        self._resumable = self._resumable and FORMATTED not in headers
        self._incoming = bytearray()
        self.broken, self.failure = False, b""
        return self._followed

    def passed(self, data: bytes) -> bytes:
        """The client's part of the next bytes, with the framing of its head."""
        if self._followed:
            looked = max(len(self._incoming) - 3, 0)  # at what came before
            self._incoming += data
            data = b""
            if self._incoming.find(b"\n\n", looked) >= 0:
                *events, rest = bytes(self._incoming).split(b"\n\n")
                data = b"".join([self._passed(event + b"\n\n") for event in events])
                self._incoming, looked = bytearray(rest), 0
            # Another server's, which are not known here, or one without an end.
            strange = self._incoming.find(b"\r\n\r\n", looked) >= 0
            if strange or len(self._incoming) > LARGEST_EVENT:
                data += self._strange(bytes(self._incoming))
        return CHUNK % (len(data), data) if data and self._chunked else data

    def _strange(self, data: bytes) -> bytes:
        """The client's part of an unread event, and of all later ones."""
        self._incoming = bytearray()
        if self._continues:  # of which it has a part
            self._break()
            return b""
        self._give_up()
        self._followed = False
        return data

    def end(self) -> bytes:
        """The client's last bytes."""
        told = CHUNK % (len(self.failure), self.failure) if self.failure else b""
        return told + LAST_CHUNK if self._chunked else b""

    @property
    def may_end(self) -> bool:
        """Whether an answer that ends now is a whole one."""
        return self.complete or self._over or not self._followed

    def _passed(self, event: bytes) -> bytes:
        data = event[6:-2]
        if self.broken:
            self.failure += event if self.failure else b""
            return b""
        if data == b"[DONE]":
            self.complete = True
            return event
        if not event.startswith(b"data: "):
            return event
        try:
            found = _decode(data, type=dict[str, Any])
            if "error" in found:
                self.broken = int(found["error"]["code"]) >= 500
                self.failure = event if self.broken else b""
                return b"" if self.broken else event
            wanted = self._read(found)
        except (*_UNREADABLE, *_UNKNOWN):
            if self._continues:
                self._break()
                return b""
            self._give_up()  # it is of no shape that is known here
            return event
        return b"data: %b\n\n" % _encode(found) if wanted and not self.broken else b""

    def _read(self, event: dict[str, Any]) -> bool:
        """Record an event, and turn it into one of the client's stream. Returns whether it is new
        to the client.
        """
        self._stamp = self._stamp or {key: event[key] for key in _STAMP}
        event |= self._stamp
        if usage := event.get("usage"):
            self._correct(usage)
        if not event["choices"]:
            again, self._has_usage = self._has_usage, True
            return not again
        (choice,) = event["choices"]
        prompt = event.get("prompt_token_ids") or choice.get("prompt_token_ids")
        tokens = choice.get("token_ids")
        if self.path != self._first[0]:
            choice = event["choices"][0] = _as_chat(choice)
        for part in (event, choice):
            part |= dict.fromkeys(part.keys() & {"prompt_token_ids", "token_ids"})
        if self._has_reason:
            return False
        if prompt and not self._prompt:
            self._prompt.extend(prompt)
        delta = choice.get("delta", choice)
        again = self._has_role and "role" in delta
        self._has_role = self._has_role or "role" in delta
        new = self._keep(delta, tokens)
        if choice.get("finish_reason") is not None:
            self._has_reason = True
            if any(self._skipped.values()):  # it was longer before
                self._break()
            return True
        return new and not again and bool(delta)

    def _keep(self, delta: dict[str, Any], tokens: list[int] | None) -> bool:
        """Record a piece of the answer, and remove the part that the client already has. Returns
        whether a part is left, or the piece was empty.
        """
        texts = {key: delta[key] for key in _TEXTS if delta.get(key)}
        for key, text in texts.items():
            had = self._skipped.get(key, "")
            if not (text.startswith(had) or had.startswith(text)):
                self._break()
            self._skipped[key] = had[len(text) :]
            delta[key] = text[len(had) :]
            self._length += len(delta[key])
            if not self._over:
                self._texts.setdefault(key, []).append(delta[key])
        if self._over:
            return True
        if texts.keys() - {"text", "content"} or (texts and tokens is None):
            self._resumable = False
        if self._resumable and tokens:
            self._tokens.extend(tokens)
            # Of several tokens the last may be of a character whose other bytes are to come.
            if len(tokens) == 1 and texts:
                unseen = sum(map(len, self._skipped.values()))
                self._whole = len(self._tokens), self._length - unseen
        if len(self._prompt) + len(self._tokens) + self._length > MOST:
            self._give_up()
        return not texts or any(delta[key] for key in texts)

    def _correct(self, usage: dict[str, Any]) -> None:
        """Count the tokens that a replica was given as the answer's, not as the prompt's."""
        if not self._given:
            return
        prompt = max(counted(usage["prompt_tokens"]) - self._given, 0)
        usage["prompt_tokens"] = prompt
        usage["completion_tokens"] = counted(usage["completion_tokens"]) + self._given
        if details := usage.get("prompt_tokens_details"):
            details["cached_tokens"] = min(counted(details["cached_tokens"] or 0), prompt)

    def _break(self) -> None:
        """It is not the answer that the client has the beginning of."""
        self.broken = True
        self._give_up()

    def _give_up(self) -> None:
        self._over = True
        self._prompt, self._tokens = array("I"), array("I")
        self._texts.clear()

    # after a failure of its replica

    def resume(self) -> bool:
        """Set `path` and `body` to a request for the rest. Returns whether a rest can be
        requested.
        """
        if self._over or not self._followed:
            return False
        resumes = self._resumable and self._whole[0] and self._prompt and not self._has_reason
        tokens, length = self._whole = self._whole if resumes else (0, 0)
        del self._tokens[tokens:]
        self._skipped = {key: "".join(it)[length:] for key, it in self._texts.items()}
        self._continues, self._given = True, tokens
        self.path, self.body = (COMPLETIONS, self._of_the_rest()) if resumes else self._first
        return True

    def _of_the_rest(self) -> bytes:
        asked = {key: value for key, value in self._asked.items() if key in _SAME}
        most = self._asked.get("max_tokens")
        if self._first[0] == CHAT_COMPLETIONS:
            most = self._asked.get("max_completion_tokens", most)
        elif most is None:
            most = COMPLETION_TOKENS
        asked["prompt"] = [*self._prompt, *self._tokens]
        asked["max_tokens"] = None if most is None else most - self._given
        asked["min_tokens"] = max(0, self._asked.get("min_tokens", 0) - self._given)
        asked["return_token_ids"] = True
        return _encode(asked)


def _as_chat(choice: Mapping[str, Any]) -> dict[str, Any]:
    """A completion's choice as a chat's."""
    reason = choice.get("finish_reason")
    found = {
        "index": 0,
        "delta": {"content": choice["text"]},
        "logprobs": None,
        "finish_reason": reason,
        "token_ids": None,
    }
    return found if reason is None else found | {"stop_reason": choice.get("stop_reason")}
