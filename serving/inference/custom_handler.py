# SPDX-License-Identifier: Apache-2.0
"""One request's passage through a custom handler, the `handle` of a model.py."""

import contextlib

from starlette.types import Message, Send

from handlers.custom import NO_BODY, Kind
from serving.errors import ServingError
from serving.inference.request import JSON_LINES, ClientRequest
from serving.user_code import UserCode


class CustomHandlerCall:
    """One request that a custom handler is to answer. send: what gets its answer."""

    def __init__(self, code: UserCode, client: ClientRequest, send: Send) -> None:
        self._code = code
        self._client = client
        self._send = send
        self._begun = False
        self._waiting: bytes | None = None  # for the next part: an only one has its length said

    async def answered(self) -> bool:
        """Have the handler answer; say whether it did, or left the request to the engine.

        Raises ServingError where nothing has been sent yet, and ClientLeft.
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
        head: Message = {"type": "http.response.start", "status": 200, "headers": []}
        async with contextlib.aclosing(self._code.handle(given, self._client.body)) as answers:
            async for kind, data in answers:
                if kind == Kind.DONE:
                    if data is None:
                        return False
                    break
                if kind == Kind.HEAD:
                    status, headers = data
                    sent = [
                        (name.encode(), value.encode("latin-1"))
                        for name, value in headers.items()
                        if name not in ("content-length", "transfer-encoding")  # those are ours
                    ]
                    head = {**head, "status": status, "headers": sent}
                    continue
                if self._waiting is not None:
                    await self._part(head, self._waiting, more=True)
                self._waiting = data
        await self._part(head, self._waiting or b"", more=False)
        return True

    async def _part(self, head: Message, body: bytes, more: bool) -> None:
        if not self._begun:
            self._begun = True
            whole = not more and head["status"] not in NO_BODY
            length = [(b"content-length", str(len(body)).encode())] if whole else []
            await self._send({**head, "headers": [*head["headers"], *length]})
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _fail(self, error: ServingError) -> None:
        if not self._begun:
            raise error
        self._client.record.error = error
        line = JSON_LINES.frame(self._client.errors.body(error))
        await self._send({"type": "http.response.body", "body": (self._waiting or b"") + line})
