# SPDX-License-Identifier: Apache-2.0
"""/v1/files and /v1/batches over HTTP, as OpenAI's clients call them."""

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse

from handlers.records import FormatError, read
from lmi_config.options.declared import Settings
from serving.aio import in_thread
from serving.batch import objects
from serving.batch.objects import BATCH, FILE, INPUT, Batch, File, OwnedBatch, OwnedFile
from serving.batch.runner import Runner
from serving.batch.store import Store, owner
from serving.batch.upload import received
from serving.errors import BadRequest, Conflict, NotFound, NotReady, Overloaded
from serving.inference.content.fields import bad_request
from serving.inference.pipeline import Pipeline
from serving.inference.request import HttpCall
from serving.kv_cache.salt import Tenants
from serving.protocol import BATCH_ENDPOINTS, EMBEDDINGS

ANCHOR = "created_at"
"""From when on a file's life counts."""
UPLOADS = 8
"""Files that are received at once; of one tenant half as many."""
WINDOW = re.compile("([1-9][0-9]{0,2})h")
MOST_WINDOW = 720
"""Hours that a batch may have; OpenAI's have 24."""
LEAST_LIFE, MOST_LIFE = 3600, 30 * 24 * 3600
"""Seconds, with `expires_after` and `output_expires_after`: OpenAI's limits."""

T = TypeVar("T", File, Batch)
R = TypeVar("R")


class _ExpiresAfter(msgspec.Struct):
    anchor: str
    seconds: int


class NewBatch(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: _ExpiresAfter | None = None


_read_new_batch = msgspec.json.Decoder(NewBatch).decode


def new_batch(body: bytes) -> NewBatch:
    """Read a request for a batch. Raises BadRequest."""
    try:
        return read(_read_new_batch, body)
    except FormatError as error:
        raise bad_request(error) from None


class FilesAndBatches:
    """Answers the paths of files and batches. store: None without files and batches.

    runner: is None until there is an engine.
    """

    def __init__(self, settings: Settings, store: Store | None) -> None:
        self._found = store
        self._largest = settings.batch_file_size
        self._tenants = Tenants(settings.cache_salt_header)
        self._header = (settings.cache_salt_header or "").lower()
        self._uploads = Counter[str | None]()  # by owner
        self.runner: Runner | None = None

    async def files(self, call: HttpCall, pipeline: Pipeline) -> object:
        found = await _on_disk(self._store.files, self._owner(call))
        if purpose := Request(call.scope).query_params.get("purpose"):
            found = [file for file in found if file.purpose == purpose]
        return _page(call, found, 10_000, 10_000)

    async def receive(self, call: HttpCall, pipeline: Pipeline) -> File:
        return await self._received(call, self._store, self._owner(call))

    async def file(self, call: HttpCall, pipeline: Pipeline) -> File:
        name = call.scope["path_params"]["id"]
        return await _on_disk(self._store.file, name, self._owner(call))

    async def delete(self, call: HttpCall, pipeline: Pipeline) -> object:
        name = call.scope["path_params"]["id"]
        await _on_disk(self._store.delete, name, self._owner(call))
        return {"id": name, "object": "file", "deleted": True}

    async def content(self, call: HttpCall, pipeline: Pipeline) -> None:
        store, name = self._store, call.scope["path_params"]["id"]
        whose = self._owner(call)
        file = await _on_disk(store.file, name, whose)
        with contextlib.ExitStack() as reading:
            path = await _on_disk(reading.enter_context, store.reading(name, whose))
            answer = FileResponse(
                path,
                stat_result=await _on_disk(path.stat),
                media_type="application/octet-stream",
                filename=file.filename,
                headers={"x-content-type-options": "nosniff"},
            )
            await call.reply(answer)

    async def batches(self, call: HttpCall, pipeline: Pipeline) -> object:
        whose = self._owner(call)
        list_them = functools.partial(self._store.batches, anybodys=_administers(call))
        found = [_seen_by(owned, whose) for owned in await _on_disk(list_them, whose)]
        return _page(call, found, 20, 100)

    async def batch(self, call: HttpCall, pipeline: Pipeline) -> Batch:
        return (await self._named(call)).batch

    async def cancel(self, call: HttpCall, pipeline: Pipeline) -> Batch:
        """End a batch, with the answers that it has. An administrator may end any batch."""
        anybodys = _administers(call)
        batch = (await self._named(call, anybodys=anybodys)).batch
        if not batch.status.open:
            raise Conflict(f"Cannot cancel a batch with status '{batch.status}'.")
        await _on_disk(self._store.ask_to_cancel, batch.id)
        owned = await self._named(call, anybodys=anybodys)
        return _seen_by(owned, self._owner(call))

    @property
    def _store(self) -> Store:
        if not self._found:
            raise NotFound(
                "this server keeps no files and batches; OPTION_BATCH_FOLDER turns them on"
            )
        return self._found

    def _owner(self, call: HttpCall) -> str | None:
        return owner(self._tenants.tenant(call.record.caller, call.scope["headers"]))

    async def _named(self, call: HttpCall, *, anybodys: bool = False) -> OwnedBatch:
        name = call.scope["path_params"]["id"]
        find = functools.partial(self._store.batch, anybodys=anybodys)
        return await _on_disk(find, name, self._owner(call))

    async def _received(self, call: HttpCall, store: Store, whose: str | None) -> File:
        uploads = self._uploads
        if uploads.total() == UPLOADS or (whose is not None and uploads[whose] == UPLOADS // 2):
            raise Overloaded(f"{uploads.total()} files are being received; try again")
        uploads[whose] += 1
        path = None
        try:
            await in_thread(store.require_room, whose)
            path = await in_thread(store.begin_upload)
            form = await received(call.scope, call.receive, path, self._largest)
            if (purpose := form.fields.get("purpose")) != INPUT:
                raise BadRequest(f"purpose={purpose!r:.40}; it should be {INPUT!r}", "purpose")
            await in_thread(store.require_room, whose)
            described = form.filename[:255], INPUT, form.size, _life(form.fields)
            file = store.described(objects.new_id(FILE), *described)
            await in_thread(store.keep, path, OwnedFile(file, whose))
            return file
        except OSError as error:
            raise _unusable(error) from error
        finally:
            uploads[whose] -= 1
            if path:
                await in_thread(path.unlink, True)

    async def make(self, call: HttpCall, pipeline: Pipeline, asked: NewBatch) -> Batch:
        store = self._store
        if asked.endpoint not in BATCH_ENDPOINTS:
            endpoints = ", ".join(BATCH_ENDPOINTS)
            raise BadRequest(
                f"endpoint={asked.endpoint!r:.100}; it should be one of {endpoints}", "endpoint"
            )
        engine = pipeline.engine
        if engine.classifies or engine.embeds != (asked.endpoint == EMBEDDINGS):
            raise BadRequest(f"the model does not answer {asked.endpoint}", "endpoint")
        hours = _hours(asked.completion_window)
        _require_small(asked.metadata)
        lives = None
        if policy := asked.output_expires_after:
            lives = _lives("output_expires_after", policy.anchor, policy.seconds)
        now = store.now()
        batch = Batch(
            id=objects.new_id(BATCH),
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            created_at=now,
            expires_at=now + 3600 * hours,
            metadata=asked.metadata,
        )
        owned = OwnedBatch(
            batch=batch,
            owner=self._owner(call),
            caller=call.record.caller,
            tenant=self._tenant_header(call),
            output=objects.new_id(FILE),
            errors=objects.new_id(FILE),
            lives=lives,
        )
        await _on_disk(store.begin, owned)
        if self.runner:
            self.runner.wake()
        return batch

    def _tenant_header(self, call: HttpCall) -> tuple[str, str] | None:
        """The header that names the tenant: lines have it too, and share its caches."""
        for name, value in call.scope["headers"]:
            if self._header and name == self._header.encode():
                return self._header, value.decode("latin-1")
        return None


def _administers(call: HttpCall) -> bool:
    """Whether a request has an admin key. Without keys, no client counts as an administrator
    here.
    """
    return call.record.caller.admin and bool(call.record.caller.name)


def _seen_by(owned: OwnedBatch, whose: str | None) -> Batch:
    """A batch as it is described to this owner: to others without what its owner has said, without
    its files and without the faults of its lines.
    """
    if owned.owner == whose:
        return owned.batch
    return msgspec.structs.replace(
        owned.batch,
        metadata=None,
        errors=None,
        input_file_id="",
        output_file_id=None,
        error_file_id=None,
    )


async def _on_disk(function: Callable[..., R], *args: object) -> R:
    """Call a function in a thread. Raises NotReady if the folder cannot be used."""
    try:
        return await in_thread(function, *args)
    except OSError as error:
        raise _unusable(error) from error


def _unusable(error: OSError) -> NotReady:
    return NotReady(f"OPTION_BATCH_FOLDER cannot be used: {error.strerror}")


def _page(call: HttpCall, found: Sequence[T], default: int, most: int) -> dict[str, object]:
    """A page of a list, as `limit`, `after` and `order` ask for it. found: the newest first."""
    query = Request(call.scope).query_params
    given = query.get("limit", str(default))
    limit = _number(given)
    if not 0 < limit <= most:
        raise BadRequest(f"limit={given!r:.40}; it should be from 1 to {most}", "limit")
    match query.get("order", "desc"):
        case "asc":
            found = found[::-1]
        case "desc":
            pass
        case order:
            raise BadRequest(f"order={order!r:.40}; it should be asc or desc", "order")
    if after := query.get("after"):
        places = [place for place, it in enumerate(found) if it.id == after]
        if not places:
            raise BadRequest(
                f"after={after!r:.100} is nothing in this list; it should be an id of it",
                "after",
            )
        found = found[places[0] + 1 :]
    page = found[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": len(page) < len(found),
    }


def _number(text: str) -> int:
    """A whole number of at most 9 digits without leading zeros; -1 if it is not one."""
    digits = text.lstrip("0") or text[:1]
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else -1


def _hours(window: str) -> int:
    matched = WINDOW.fullmatch(window)
    if not matched or int(matched[1]) > MOST_WINDOW:
        raise BadRequest(
            f"completion_window={window!r:.40}; it should be hours, like '24h', and at most "
            f"{MOST_WINDOW}",
            "completion_window",
        )
    return int(matched[1])


def _require_small(metadata: dict[str, str] | None) -> None:
    """Raise BadRequest for more metadata than OpenAI's clients may send."""
    found = metadata or {}
    if len(found) > 16 or any(len(k) > 64 or len(v) > 512 for k, v in found.items()):
        raise BadRequest(
            "metadata may have 16 keys of 64 characters with texts of 512 characters", "metadata"
        )


def _life(fields: dict[str, str]) -> int | None:
    """The lifetime of a file in seconds, if its form sets it."""
    anchor, seconds = (fields.get(f"expires_after[{key}]") for key in ("anchor", "seconds"))
    if seconds is None:
        return None
    return _lives("expires_after", anchor or ANCHOR, _number(seconds))


def _lives(name: str, anchor: str, seconds: int) -> int:
    """The lifetime of a file in seconds, from its creation."""
    if anchor != ANCHOR:
        raise BadRequest(f"{name}: anchor={anchor!r:.40}; it should be {ANCHOR!r}", name)
    if not LEAST_LIFE <= seconds <= MOST_LIFE:
        raise BadRequest(f"{name}: seconds should be from {LEAST_LIFE} to {MOST_LIFE}", name)
    return seconds
