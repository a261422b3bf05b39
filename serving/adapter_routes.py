"""The adapter registry's HTTP face: SageMaker's calls and LMI's.

SageMaker sends parameters in the query string, with an empty body; others send a JSON object. Both
are read, the query first.
"""

import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from serving.adapters import Adapter, Adapters
from serving.errors import BadRequest
from serving.invocations import Front

LIMIT = 100
"""Adapters on one page of the list, at most and when nothing is said."""


class AdapterRoutes:
    def __init__(self, front: Front) -> None:
        self._front = front

    async def all(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET lists adapters, POST registers one."""
        adapters, request = self._of(scope), Request(scope)
        if scope["method"] == "POST":
            asked = _asked(await self._front.body(scope, receive), request)
            name, src = asked.required("name"), asked.required("src")
            await adapters.register(name, src, asked.flag("preload"), asked.flag("pin"))
            answer: Any = _done(request, name, "registered")
        else:
            answer = _page(adapters.listed(), request)
        await JSONResponse(answer)(scope, receive, send)

    async def one(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET describes an adapter, DELETE takes it away."""
        adapters, name = self._of(scope), scope["path_params"]["name"]
        if scope["method"] == "DELETE":
            await adapters.unregister(name)
            answer: Any = _done(Request(scope), name, "unregistered")
        else:
            answer = _described(adapters.get(name))
        await JSONResponse(answer)(scope, receive, send)

    async def update(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST changes an adapter."""
        adapters, name = self._of(scope), scope["path_params"]["name"]
        request = Request(scope)
        asked = _asked(await self._front.body(scope, receive), request)
        src = asked.required("src") if "src" in asked else None
        await adapters.update(name, src, asked.given("preload"), asked.given("pin"))
        await JSONResponse(_done(request, name, "updated"))(scope, receive, send)

    def _of(self, scope: Scope) -> Adapters:
        front = self._front
        front.lifecycle.require_ready()
        front.require_model(scope)
        return front.require_adapters()


class _Asked(dict[str, Any]):
    """The parameters of a call."""

    def required(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str) or not value:
            raise BadRequest(
                f"{name} is missing; it goes into the query string or a JSON body", name
            )
        return value

    def given(self, name: str) -> bool | None:
        value = self.get(name)
        match str(value).lower():
            case "none" | "":
                return None
            case "true":
                return True
            case "false":
                return False
        raise BadRequest(f"{name}={value!r:.100} should be true or false", name)

    def flag(self, name: str) -> bool:
        return bool(self.given(name))


def _asked(body: bytes, request: Request) -> _Asked:
    try:
        found = msgspec.json.decode(body, type=dict[str, Any]) if body.strip() else {}
    except (msgspec.MsgspecError, RecursionError):
        raise BadRequest("the body should be empty or a JSON object") from None
    return _Asked({**found, **request.query_params})


def _page(adapters: list[Adapter], request: Request) -> dict[str, Any]:
    limit = _whole(request, "limit", LIMIT, 1, LIMIT)
    start = _whole(request, "next_page_token", 0, 0, None)
    page = {"adapters": [_described(adapter) for adapter in adapters[start : start + limit]]}
    if start + limit < len(adapters):
        return {"nextPageToken": str(start + limit), **page}
    return page


def _whole(request: Request, name: str, otherwise: int, low: int, high: int | None) -> int:
    value = request.query_params.get(name, str(otherwise))
    if not re.fullmatch("[0-9]{1,9}", value) or int(value) < low:
        raise BadRequest(f"{name}={value!r:.100} should be a whole number, at least {low}", name)
    if high is not None and int(value) > high:
        raise BadRequest(f"{name}={value} should be at most {high}", name)
    return int(value)


def _described(adapter: Adapter) -> dict[str, Any]:
    return {
        "name": adapter.name,
        "src": adapter.src,
        "preload": adapter.preload,
        "pin": adapter.pin,
    }


def _done(request: Request, name: str, what: str) -> dict[str, str]:
    """SageMaker tells a component's own name in a header; `name` is one that it made up."""
    shown = request.headers.get("X-Amzn-SageMaker-Adapter-Alias", name)
    return {"status": f"Adapter {shown} {what}"}
