"""One request's passage through a custom handler, the `handle` of a model.py."""

import asyncio
import contextlib
from collections.abc import Mapping

from starlette.types import Message, Receive, Scope, Send

from handlers.custom import Kind
from serving import errors
from serving.errors import ServingError
from serving.exchange import JSON_LINES
from serving.user_code import UserCode


class Handling:
    """properties: the model's, which the handler finds beside the request's headers. codes: the
    statuses of errors.
    """

    def __init__(
        self,
        code: UserCode,
        properties: Mapping[str, str],
        scope: Scope,
        receive: Receive,
        send: Send,
        codes: errors.Codes,
    ) -> None:
        self._code = code
        self._properties = properties
        self._scope = scope
        self._receive = receive
        self._send = send
        self._codes = codes
        self._task: asyncio.Task[bool] | None = None
        self._aborted: ServingError | None = None
        self._begun = False
        self._waiting: bytes | None = None  # for the next part: an only one has its length told

    def abort(self, error: ServingError) -> None:
        self._aborted = error
        if self._task:
            self._task.cancel()

    async def answered(self, body: bytes) -> bool:
        """Have the handler answer; say whether it did, or left the request to the engine.

        Raises ServingError where nothing has been sent yet.
        """
        self._task = asyncio.create_task(self._answered(body))
        leaving = asyncio.create_task(self._client_leaves())
        try:
            return await self._task
        except asyncio.CancelledError:
            if not self._task.cancelled():
                raise
            if self._aborted:
                await self._fail(self._aborted)
            return True
        except ServingError as error:
            await self._fail(error)
            return True
        finally:
            leaving.cancel()
            self._task.cancel()

    async def _client_leaves(self) -> None:
        await self._receive()
        if self._task:
            self._task.cancel()

    async def _answered(self, body: bytes) -> bool:
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in self._scope["headers"]
        }
        properties = {**self._properties, **headers}
        head: Message = {"type": "http.response.start", "status": 200, "headers": []}
        async with contextlib.aclosing(self._code.handle(properties, body)) as answers:
            async for kind, data in answers:
                if kind == Kind.DONE:
                    if data is None:
                        return False
                    break
                if kind == Kind.HEAD:
                    status, headers = data
                    told = [
                        (name.encode(), value.encode("latin-1"))
                        for name, value in headers.items()
                        if name not in ("content-length", "transfer-encoding")  # those are ours
                    ]
                    head = {**head, "status": status, "headers": told}
                    continue
                if self._waiting is not None:
                    await self._part(head, self._waiting, more=True)
                self._waiting = data
        await self._part(head, self._waiting or b"", more=False)
        return True

    async def _part(self, head: Message, body: bytes, more: bool) -> None:
        if not self._begun:
            self._begun = True
            length = [] if more else [(b"content-length", str(len(body)).encode())]
            await self._send({**head, "headers": [*head["headers"], *length]})
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _fail(self, error: ServingError) -> None:
        if not self._begun:
            raise error
        self._scope["slipway.error"] = error
        told = JSON_LINES.frame(errors.body(error, self._scope["path"], self._codes))
        await self._send({"type": "http.response.body", "body": (self._waiting or b"") + told})
