# SPDX-License-Identifier: Apache-2.0
"""Marks on parts of a prompt: Anthropic's `cache_control` and OpenAI's `prompt_cache_breakpoint`.
The client wants the KV kept up to the part.

A mark is on a part of the body, and only the chat template knows the token after that part. The end
of the whole prompt is the same in both. Therefore only the marks of the last message count.
"""

from collections.abc import Iterable, Iterator

import msgspec

from handlers.records import MOST_VALUES, has_more

MARK, BREAKPOINT = "cache_control", "prompt_cache_breakpoint"
LARGEST = 4 * 1024 * 1024
"""Most bytes of a body that is searched for marks. Its messages are then read once more."""
MOST = 80
"""Most marks of a request that count, the last ones: as many as OpenAI compares."""

_NONE = msgspec.Raw()
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class _Part(msgspec.Struct, gc=False):
    """A message, an item, or a part of one."""

    cache_control: msgspec.Raw = _NONE
    prompt_cache_breakpoint: msgspec.Raw = _NONE
    content: msgspec.Raw = _NONE
    output: msgspec.Raw = _NONE  # a tool's, in Responses


_turns = msgspec.json.Decoder(list[msgspec.Raw]).decode
_part = msgspec.json.Decoder(_Part).decode
_DEPTH = 3  # a message, its parts, and the parts of a tool's result


def read(
    turns: msgspec.Raw, before: Iterable[msgspec.Raw], body: bytes | bytearray
) -> dict[str, list[msgspec.Raw]]:
    """Return the kinds of marks in a body, each with the values of those on the last message,
    undecoded, at most MOST. There are none if a body only has others, or too much to look at.
    turns: its messages or items. before: what else can have marks.
    """
    kinds = [it for it in (MARK, BREAKPOINT) if b'"%b"' % it.encode() in body]
    if not kinds or len(body) > LARGEST or has_more(turns, MOST_VALUES):
        return {kind: [] for kind in kinds}
    last = [*_all(turns, _DEPTH, only_last=True)]
    found = {}
    for kind in kinds:
        values = [it for part in last if (it := getattr(part, kind))][-MOST:]
        if values or any(b'"%b"' % kind.encode() in bytes(it) for it in (turns, *before)):
            found[kind] = values
    return found


def _all(raw: msgspec.Raw, depth: int, *, only_last: bool = False) -> Iterator[_Part]:
    """Yield the parts in a list, and theirs before them."""
    if not depth or bytes(memoryview(raw)[:1]) != b"[":
        return
    try:
        found = _turns(raw)
        parts = [_part(it) for it in (found[-1:] if only_last else found) if _is_object(it)]
    except _UNREADABLE:  # the engine refuses it
        return
    for part in parts:
        yield from _all(part.content, depth - 1)
        yield from _all(part.output, depth - 1)
        yield part


def _is_object(raw: msgspec.Raw) -> bool:
    return bytes(memoryview(raw)[:1]) == b"{"
