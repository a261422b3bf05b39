# SPDX-License-Identifier: Apache-2.0
"""The calls about this container's models: their list, and SageMaker's multi-model calls."""

import re
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from lmi_config.options.parsers import is_model_name
from serving.access.caller import Caller
from serving.errors import BadRequest, Conflict, NoSlot, NotFound, ServingError
from serving.protocol import MANAGEMENT, MODELS
from serving.router.http.forwarded_request import Request
from serving.router.models.model_messages import Answer, Row
from serving.router.models.view import OwnModels

LARGEST = 64 * 1024
"""Maximum bytes of the body of a call."""
LONGEST_URL = 1024
PAGE = 100
"""Maximum models on a page of the list."""
_BORN = int(time.time())


class _Load(msgspec.Struct):
    model_name: str
    url: str
    synchronous: bool = True


_read_load = msgspec.json.Decoder(_Load).decode


def listed(models: OwnModels, request: Request) -> dict[str, Any]:
    """The answer to GET /models: a page of them, in the order of their names. The token of the next
    page is the last name of this one. Raises BadRequest.
    """
    asked = _query(request)
    limit, after = asked.get("limit", str(PAGE)), asked.get("next_page_token", "")
    if not re.fullmatch("[1-9][0-9]{0,8}", limit):
        raise BadRequest(f"limit={limit!r:.100}: should be a number from 1 to {PAGE}", "limit")
    rest = sorted(name for name in models.rows if name > after)
    page = rest[: min(int(limit), PAGE)]
    found: dict[str, Any] = {"models": [described(models.rows[name]) for name in page]}
    if len(rest) > len(page):
        found["nextPageToken"] = page[-1]
    return found


def _query(request: Request) -> dict[str, str]:
    """The parameters in a request's target, each with its last value."""
    query = request.target.partition(b"?")[2].decode("latin-1")
    return dict(parse_qsl(query, keep_blank_values=True))


def described(row: Row) -> dict[str, Any]:
    """The answer to GET /models/{model}."""
    return {"modelName": row.name, "modelUrl": row.url, "status": row.state.upper()}


def openai(
    models: OwnModels, caller: Caller, adapters: dict[str, frozenset[str]]
) -> dict[str, Any]:
    """The answer to GET /v1/models. adapters: of the running models, by the model's name."""
    return {"object": "list", "data": [*_openai(models, caller, adapters)]}


def _openai(
    models: OwnModels, caller: Caller, adapters: dict[str, frozenset[str]]
) -> Iterator[dict[str, Any]]:
    for row in models.rows.values():
        if caller.models is not None and row.name not in caller.models:
            continue
        about = {"object": "model", "created": _BORN, "owned_by": "vllm", "state": row.state}
        yield {"id": row.name, **about, "root": row.url, "parent": None}
        for adapter in sorted(adapters.get(row.name, ())):
            if caller.may_use(adapter):
                yield {"id": adapter, **about, "root": adapter, "parent": row.name}


def one(found: dict[str, Any], name: str) -> dict[str, Any]:
    """The answer to GET /v1/models/{id}. found: the list. Raises NotFound."""
    entry: dict[str, Any] | None = next((it for it in found["data"] if it["id"] == name), None)
    if entry is None:
        raise NotFound(f"the model {name!r:.140} does not exist; GET {MODELS} lists those that do")
    return entry


def known(models: OwnModels, name: str) -> Row:
    """The model of this name. Raises NotFound."""
    row = models.rows.get(name)
    if row is None:
        lists = f"GET {MANAGEMENT[0]} lists those that are"
        raise NotFound(f"the model {name!r:.140} is not loaded; {lists}")
    return row


async def load(models: OwnModels, request: Request) -> tuple[int, dict[str, Any]]:
    """Load the model that a call names, in its body or its query. Returns the answer's status and
    body: 200 when the model can answer, or, if the call does not want to wait for it, 202. Raises
    ServingError.
    """
    if not models.dynamic:
        raise Conflict(
            "models are not registered here: OPTION_MODELS lists them all; set "
            "SAGEMAKER_MULTI_MODEL=true for calls that load them"
        )
    if not request.complete or len(request.body) > LARGEST:
        raise BadRequest(f"the body of this call may have at most {LARGEST} bytes")
    try:
        if request.body:
            asked = _read_load(request.body)
        else:
            asked = msgspec.convert(_query(request), _Load, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        why = f": {error!s:.200}" if isinstance(error, msgspec.ValidationError) else ""
        raise BadRequest(
            'the body should be like {"model_name": "NAME", "url": "/opt/ml/models/NAME/model"}'
            + why
        ) from None
    if not is_model_name(asked.model_name) or "/" in asked.model_name:
        raise BadRequest(
            f"model_name={asked.model_name!r:.140}: should be letters, digits and ._:@-, at most "
            "128, the first a letter or a digit",
            "model_name",
        )
    if len(asked.url) > LONGEST_URL:
        raise BadRequest(f"url: at most {LONGEST_URL} characters", "url")
    answer = await models.call(asked.model_name, asked.url, waits=asked.synchronous)
    _require_done(answer)
    told = "is loaded" if answer.status == 200 else "is being loaded"
    return answer.status, {"status": f"Model {asked.model_name!r} {told}."}


async def unload(models: OwnModels, name: str) -> tuple[int, dict[str, Any]]:
    """Unload a model. Returns the answer's status and body. Raises ServingError."""
    known(models, name)
    if not models.dynamic:
        raise Conflict(
            f"{name} is not unloaded by a call: OPTION_MODELS lists it, and it makes room for "
            "others when they need it"
        )
    _require_done(await models.call(name, None))
    return 200, {"status": f"Model {name!r} is unloaded."}


_RAISED: dict[int, type[ServingError]] = {404: NotFound, 409: Conflict, 507: NoSlot}


def _require_done(answer: Answer) -> None:
    """Raise ServingError if a call has failed."""
    if answer.status not in (200, 202):
        raise _RAISED.get(answer.status, BadRequest)(answer.text)
