# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Responses, without what a server would have to keep: each request has all of it."""

import msgspec

from handlers.records import EngineCall, FormatError, read

PATH = "/v1/responses"


class _Kept(msgspec.Struct):
    """The keys that refer to what was kept, or ask for it."""

    previous_response_id: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    previous_input_messages: msgspec.Raw = msgspec.Raw()
    background: msgspec.Raw = msgspec.Raw()
    store: msgspec.Raw = msgspec.Raw()


_read = msgspec.json.Decoder(_Kept).decode
_FIXES = {
    "previous_response_id": "send the whole conversation as input",
    "prompt": "send its text as instructions or input",
    "previous_input_messages": "send the whole conversation as input",
    "background": "wait for the answer, or have it streamed",
    "store": "leave it out, or set it to false",
}


def parse(body: bytes) -> EngineCall:
    """The engine's call. Raises FormatError for what would need answers that are kept."""
    found = read(_read, body)
    for key, fix in _FIXES.items():
        if bytes(getattr(found, key)) not in (b"", b"null", b"false"):
            raise FormatError(f"{key}: no answers are kept here; {fix}", key)
    return EngineCall(PATH, body)
