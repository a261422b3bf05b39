# SPDX-License-Identifier: Apache-2.0
"""A custom handler's answer to a request, by the `handle` of a model.py."""

import contextlib
from collections.abc import Mapping

from starlette.types import Message

from handlers.custom import NO_BODY, Kind
from serving.errors import ServingError
from serving.inference.request import JSON_LINES, ClientRequest
from serving.user_code import UserCode


async def is_handled(code: UserCode, client: ClientRequest) -> bool:
    """Let the handler answer. Returns False if it left the request to the engine.

    Raises ServingError if no part of the answer has been sent yet, and ClientLeft.
    """
    try:
        with client.admitted.raising():
            return await _handled(code, client)
    except ServingError as error:
        if not client.record.status:
            raise
        client.record.error = error
        line = JSON_LINES.frame(client.errors.body(error))
        await client.answer({"type": "http.response.body", "body": line})
        return True


async def _handled(code: UserCode, client: ClientRequest) -> bool:
    headers = client.scope["headers"]
    given = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    head: Message | None = _head(200, {}, 0)
    whole = b""
    length: int | None = 0

    async def send(body: bytes, more: bool) -> None:
        nonlocal head
        if head:
            await client.answer(head)
            head = None
        await client.answer({"type": "http.response.body", "body": body, "more_body": more})

    async with contextlib.aclosing(code.handle(given, client.body)) as answers:
        async for kind, data in answers:
            if kind == Kind.DONE:
                if data is None:
                    return False
                break
            if kind == Kind.HEAD:
                length = data[2]
                head = _head(*data)
            elif length is None:
                await send(data, more=True)
            else:
                whole = data
    await send(whole, more=False)
    return True


def _head(status: int, headers: Mapping[str, str], length: int | None) -> Message:
    sent = [
        (name.encode(), value.encode("latin-1"))
        for name, value in headers.items()
        if name not in ("content-length", "transfer-encoding")  # the server sets these
    ]
    if length is not None and status not in NO_BODY:
        sent.append((b"content-length", b"%d" % length))
    return {"type": "http.response.start", "status": status, "headers": sent}
