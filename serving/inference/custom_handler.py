# SPDX-License-Identifier: Apache-2.0
"""One request's call of a custom handler, the `handle` of a model.py."""

import contextlib
from collections.abc import Mapping

from starlette.types import Message, Send

from handlers.custom import NO_BODY, Kind
from serving.errors import ServingError
from serving.inference.request import JSON_LINES, ClientRequest
from serving.user_code import UserCode


class CustomHandlerCall:
    """One request for a custom handler. send: gets its answer."""

    def __init__(self, code: UserCode, client: ClientRequest, send: Send) -> None:
        self._code = code
        self._client = client
        self._send = send
        self._begun = False

    async def answered(self) -> bool:
        """Let the handler answer. Returns False if it left the request to the engine.

        Raises ServingError if no part of the answer has been sent yet, and ClientLeft.
        """
        try:
            with self._client.admitted.raising():
                return await self._answered()
        except ServingError as error:
            await self._fail(error)
            return True

    async def _answered(self) -> bool:
        given = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in self._client.scope["headers"]
        }
        head = _head(200, {}, 0)
        whole = b""
        length: int | None = 0
        async with contextlib.aclosing(self._code.handle(given, self._client.body)) as answers:
            async for kind, data in answers:
                if kind == Kind.DONE:
                    if data is None:
                        return False
                    break
                if kind == Kind.HEAD:
                    length = data[2]
                    head = _head(*data)
                elif length is None:
                    await self._part(head, data, more=True)
                else:
                    whole = data
        await self._part(head, whole, more=False)
        return True

    async def _part(self, head: Message, body: bytes, more: bool) -> None:
        if not self._begun:
            self._begun = True
            await self._send(head)
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _fail(self, error: ServingError) -> None:
        if not self._begun:
            raise error
        self._client.record.error = error
        line = JSON_LINES.frame(self._client.errors.body(error))
        await self._send({"type": "http.response.body", "body": line})


def _head(status: int, headers: Mapping[str, str], length: int | None) -> Message:
    sent = [
        (name.encode(), value.encode("latin-1"))
        for name, value in headers.items()
        if name not in ("content-length", "transfer-encoding")  # the server sets these
    ]
    if length is not None and status not in NO_BODY:
        sent.append((b"content-length", b"%d" % length))
    return {"type": "http.response.start", "status": status, "headers": sent}
