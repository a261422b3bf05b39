# SPDX-License-Identifier: Apache-2.0
"""The adapter registry over HTTP: SageMaker's calls and LMI's.

SageMaker sends parameters in the query string, with an empty body; others send a JSON object. Both
are read, and the query takes precedence.
"""

import re
from typing import Any

import msgspec
from starlette.requests import Request

from serving.errors import BadRequest
from serving.inference.pipeline import Pipeline
from serving.inference.request import HttpCall, require_lora
from serving.lora.adapter import Adapter
from serving.protocol import ADAPTER_ALIAS

LIMIT = 100
"""Most adapters on a page of the list; also the default."""


async def page(call: HttpCall, pipeline: Pipeline) -> dict[str, Any]:
    """List adapters."""
    listed, request = require_lora(pipeline.adapters).listed(), Request(call.scope)
    limit = _whole(request, "limit", LIMIT, 1, LIMIT)
    start = _whole(request, "next_page_token", 0, 0, None)
    found = {"adapters": [_described(adapter) for adapter in listed[start : start + limit]]}
    if start + limit < len(listed):
        return {"nextPageToken": str(start + limit), **found}
    return found


async def register(call: HttpCall, pipeline: Pipeline, body: dict[str, Any]) -> dict[str, str]:
    adapters, given = require_lora(pipeline.adapters), _Parameters.of(call, body)
    name, src = given.required("name"), given.required("src")
    preload, pin = given.loading()
    if preload is None:
        preload = pipeline.preloads
    await adapters.register(name, src, preload, bool(pin))
    return _done(call, name, "registered")


async def describe(call: HttpCall, pipeline: Pipeline) -> dict[str, Any]:
    return _described(require_lora(pipeline.adapters).get(call.scope["path_params"]["name"]))


async def unregister(call: HttpCall, pipeline: Pipeline) -> dict[str, str]:
    name = call.scope["path_params"]["name"]
    await require_lora(pipeline.adapters).unregister(name)
    return _done(call, name, "unregistered")


async def update(call: HttpCall, pipeline: Pipeline, body: dict[str, Any]) -> dict[str, str]:
    adapters, given = require_lora(pipeline.adapters), _Parameters.of(call, body)
    name = call.scope["path_params"]["name"]
    src = given.required("src") if "src" in given else None
    await adapters.update(name, src, *given.loading())
    return _done(call, name, "updated")


def parameters(body: bytes) -> dict[str, Any]:
    """Read the parameters in a body. Raises BadRequest."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any]) if body.strip() else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise BadRequest("the body should be empty or a JSON object") from None


class _Parameters(dict[str, Any]):
    """The parameters of a call."""

    @classmethod
    def of(cls, call: HttpCall, body: dict[str, Any]) -> "_Parameters":
        return cls({**body, **Request(call.scope).query_params})

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


def _done(call: HttpCall, name: str, what: str) -> dict[str, str]:
    """Return the answer to a call. It names the component by SageMaker's header if there is one,
    because SageMaker generates `name`.
    """
    shown = Request(call.scope).headers.get(ADAPTER_ALIAS.decode(), name)
    return {"status": f"Adapter {shown} {what}"}
