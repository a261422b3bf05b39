# SPDX-License-Identifier: Apache-2.0
"""SageMaker's stateful sessions over HTTP: calls that begin or end one, and requests within one."""

from starlette.responses import JSONResponse, Response
from starlette.types import Message

from serving.api.session_store import SessionStore
from serving.errors import BadRequest
from serving.inference.pipeline import Pipeline
from serving.inference.request import ClientRequest
from serving.protocol import CLOSED_SESSION_ID, NEW_SESSION_ID, SESSION_ID, shown

# LMI and SageMaker's guide have the first name, AWS's library for containers the second.
_NEW_SESSION = (shown(SESSION_ID), shown(NEW_SESSION_ID))
_CLOSED_SESSION = shown(CLOSED_SESSION_ID)


class Sessions:
    """The sessions of requests; each belongs to a tenant. store: None if sessions are off."""

    def __init__(self, store: SessionStore | None) -> None:
        self._store = store

    async def answer(self, client: ClientRequest, pipeline: Pipeline) -> Response | None:
        """Return the answer to a call that begins or ends a session; None for any other request."""
        if not self._store or b"requestType" not in client.body:
            return None
        found = client.fields_of_json
        command = found.session_command if found else None
        if not command:
            return None
        with client.admitted.raising():
            return await self._answer(self._store, command, client, pipeline.tenant(client))

    async def _answer(
        self, store: SessionStore, command: str, client: ClientRequest, tenant: str | None
    ) -> Response:
        if command == "NEW_SESSION":
            session, value = await store.create(tenant)
            answer, headers = f"Session {session} created", dict.fromkeys(_NEW_SESSION, value)
        elif command == "CLOSE":
            session = client.headers.get(SESSION_ID, b"").decode("latin-1")
            if not session:
                raise BadRequest(f"{_NEW_SESSION[0]} should name the session to close")
            await store.close(session, tenant)
            answer, headers = f"Session {session} closed", {_CLOSED_SESSION: session}
        else:
            raise BadRequest(
                f"requestType={command!r:.100}; it should be NEW_SESSION or CLOSE", "requestType"
            )
        return JSONResponse({"result": answer}, headers=headers)

    async def join(self, client: ClientRequest, pipeline: Pipeline) -> None:
        """Check the session that a request names, and record its answer. If the request asks for a
        new session, a successful answer begins it.
        """
        name, store = client.headers.get(SESSION_ID, b"").decode("latin-1"), self._store
        if not name or not store:
            return
        tenant = pipeline.tenant(client)
        if name != "NEW_SESSION":
            with client.admitted.raising():
                await store.use(name, tenant)

        async def head(message: Message) -> Message:
            if message["status"] >= 400:
                return message
            session = name
            if name == "NEW_SESSION":
                session, value = await store.create(tenant)
                more = [(key.lower().encode(), value.encode()) for key in _NEW_SESSION]
                message = {**message, "headers": [*message["headers"], *more]}
            store.answered(session)
            return message

        client.answer.at_head(head)
