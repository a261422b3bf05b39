# SPDX-License-Identifier: Apache-2.0
"""The adapter registry over HTTP: SageMaker's calls and LMI's.

SageMaker sends parameters in the query string, with an empty body; others send a JSON object. Both
are read, and the query takes precedence.
"""

import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse

from serving.errors import BadRequest
from serving.inference.pipeline import Pipeline
from serving.inference.request import HttpCall, require_lora
from serving.lora.adapter import Adapter
from serving.protocol import ADAPTER_ALIAS

LIMIT = 100
"""Most adapters on a page of the list; also the default."""


async def every(call: HttpCall, pipeline: Pipeline) -> None:
    """GET lists adapters, POST registers one."""
    adapters, request = require_lora(pipeline.adapters), Request(call.scope)
    if call.scope["method"] == "POST":
        given = _parameters(await pipeline.bodies.read(call.scope, call.receive), request)
        name, src = given.required("name"), given.required("src")
        preload, pin = given.loading()
        if preload is None:
            preload = pipeline.preloads
        await adapters.register(name, src, preload, bool(pin))
        answer: Any = _done(request, name, "registered")
    else:
        answer = _page(adapters.listed(), request)
    await JSONResponse(answer)(call.scope, call.receive, call.send)


async def one(call: HttpCall, pipeline: Pipeline) -> None:
    """GET describes an adapter, DELETE unregisters it."""
    adapters = require_lora(pipeline.adapters)
    name = call.scope["path_params"]["name"]
    if call.scope["method"] == "DELETE":
        await adapters.unregister(name)
        answer: Any = _done(Request(call.scope), name, "unregistered")
    else:
        answer = _described(adapters.get(name))
    await JSONResponse(answer)(call.scope, call.receive, call.send)


async def update(call: HttpCall, pipeline: Pipeline) -> None:
    """POST changes an adapter."""
    adapters = require_lora(pipeline.adapters)
    name, request = call.scope["path_params"]["name"], Request(call.scope)
    given = _parameters(await pipeline.bodies.read(call.scope, call.receive), request)
    src = given.required("src") if "src" in given else None
    await adapters.update(name, src, *given.loading())
    await JSONResponse(_done(request, name, "updated"))(call.scope, call.receive, call.send)


class _Parameters(dict[str, Any]):
    """The parameters of a call."""

    def required(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str) or not value:
            raise BadRequest(
                f"{name} is missing; it goes into the query string or a JSON body", name
            )
        return value

    def choice(self, name: str) -> bool | None:
        value = self.get(name)
        match str(value).lower():
            case "none" | "":
                return None
            case "true":
                return True
            case "false":
                return False
        raise BadRequest(f"{name}={value!r:.100} should be true or false", name)

    def loading(self) -> tuple[bool | None, bool | None]:
        """Return `preload` and `pin`. Raises BadRequest if they contradict each other."""
        preload, pin = self.choice("preload"), self.choice("pin")
        if pin and preload is False:
            raise BadRequest(
                "pin=true keeps the adapter loaded, and preload=false does not; leave one out",
                "pin",
            )
        return preload, pin


def _parameters(body: bytes, request: Request) -> _Parameters:
    try:
        found = msgspec.json.decode(body, type=dict[str, Any]) if body.strip() else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise BadRequest("the body should be empty or a JSON object") from None
    return _Parameters({**found, **request.query_params})


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
    """Return the answer to a call. It names the component by SageMaker's header if there is one,
    because SageMaker generates `name`.
    """
    shown = request.headers.get(ADAPTER_ALIAS.decode(), name)
    return {"status": f"Adapter {shown} {what}"}
