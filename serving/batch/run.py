# SPDX-License-Identifier: Apache-2.0
"""One batch, from its input's validation to its end. Each line is a separate request, below all
other traffic.

A batch may begin anywhere: its files say which lines have answers.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import BinaryIO

import msgspec
from prometheus_client import Counter
from starlette.types import Scope

from handlers import openai
from lmi_config.options.declared import Settings
from serving import errors
from serving.access.limits import Taken
from serving.aio import in_thread
from serving.batch import lines
from serving.batch.lanes import SETTLES_S, EngineLost, Lane, Lanes
from serving.batch.lines import Line
from serving.batch.objects import OUTPUT, Counts, Fault, Faults, OwnedBatch, OwnedFile, Status
from serving.batch.results import Results
from serving.batch.store import Store
from serving.cancellation import Cancellation, ClientLeft
from serving.errors import (
    BadRequest,
    EngineFailed,
    NoSlot,
    NotReady,
    Overloaded,
    RateLimited,
    ServerFailed,
    ServingError,
    StorageFull,
)
from serving.http.bodies import Answer, Collected
from serving.inference.admission import Admitted
from serving.inference.pipeline import Pipeline
from serving.inference.request import (
    JSON_LINES,
    BodyPart,
    ClientRequest,
    InferenceRequest,
    inference_request,
)
from serving.observability.access_log import AccessRecord
from serving.protocol import BATCHES, REQUEST_ID

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Seconds between two checks for the end of a batch; each also writes the progress."""
ROOM_LOOKS = 20
"""One check in this many also measures the folder."""
STARTS = 3
"""After this many starts without a new answer, a batch has ended its process each time, and
fails.
"""
READ = 64 * 1024
"""Bytes of bodies that are read at a time."""
AGAIN_S = 1.0
"""After which a line is tried again that there was no room for."""
LOSSES = 3
"""The line has an error after this number of engines has ended during it."""

_LINES = Counter("slipway_batch_lines", "Lines of batches that were answered.", ["outcome"])
_COMPLETED, _FAILED = _LINES.labels("completed"), _LINES.labels("failed")


_GONE = Fault("missing_input_file", "the input file is gone")


class _Ends(ServingError):
    """A batch ends before all its lines have answers. status: its last one; None if another run
    resumes it.
    """

    def __init__(self, status: Status | None, fault: Fault | None = None) -> None:
        super().__init__(status or "left")
        self.status = status
        self.fault = fault


class Run:
    """A batch that only this process runs.

    lanes: for lines of all batches that it runs. run() raises OSError if the batch's files cannot
    be read or written.
    """

    def __init__(
        self,
        owned: OwnedBatch,
        store: Store,
        settings: Settings,
        pipeline: Pipeline,
        lanes: Lanes,
    ) -> None:
        self._owned = owned
        self._batch = owned.batch
        self._store = store
        self._pipeline = pipeline
        self._lanes = lanes
        self._longest = settings.max_request_size
        self._shape = errors.shape(self._batch.endpoint, errors.codes(settings))
        self._caller = msgspec.structs.replace(owned.caller, counted=False, phase="")
        self._input = store.content(self._batch.input_file_id)
        self._results = Results(store.content(owned.output), store.content(owned.errors))
        self._end = Admitted(pipeline.admission)  # without a place, unlike interactive ones
        self._broken: OSError | None = None
        self._looks = 0

    def leave(self) -> None:
        """Cancel the lines in flight, and leave the batch for another run."""
        self._end.cancel(_Ends(None))

    async def run(self) -> None:
        if self._batch.status is Status.VALIDATING:
            await self._validate()
        if not self._batch.status.open:
            return
        try:
            await in_thread(self._results.open)
            await self._begin()
            await self._answer_lines()
            await self._results.written()
            if self._broken:
                raise self._broken
            await self._over()
        finally:
            self._owned.starts = 0  # it did not end this process
            with contextlib.suppress(OSError):
                await self._save()
            await self._results.written()
            self._results.close()

    async def _validate(self) -> None:
        total, faults = await in_thread(self._faults)
        batch = self._batch
        if faults:
            self._fail(faults)
        else:
            batch.request_counts.total = total
            batch.status, batch.in_progress_at = Status.IN_PROGRESS, self._store.now()
        await self._save()

    def _faults(self) -> tuple[int, list[Fault]]:
        try:
            with self._input.open("rb") as file:
                return lines.validate(file, self._batch.endpoint, self._longest)
        except FileNotFoundError:
            return 0, [_GONE]

    def _fail(self, faults: list[Fault]) -> None:
        batch = self._batch
        batch.status, batch.failed_at = Status.FAILED, self._store.now()
        batch.errors = Faults(faults)

    async def _begin(self) -> None:
        """Record the start, and fail the batch if it has ended this process too often."""
        owned, answered = self._owned, sum(self._results.counts)
        owned.starts = 1 if answered > owned.answered else owned.starts + 1
        owned.answered = answered
        if owned.starts > STARTS:
            message = f"the server ended {STARTS} times while it answered the same lines"
            self._end.cancel(_Ends(Status.FAILED, Fault("server_error", message)))
        if not await in_thread(self._input.exists):
            self._end.cancel(_Ends(Status.FAILED, _GONE))
        await self._save()
        await self._look()

    async def _answer_lines(self) -> None:
        if self._end.cause:
            return
        watching = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as tasks, contextlib.aclosing(self._left()) as left:
                async for line in left:
                    turn = await self._turn()
                    if not turn:
                        break
                    tasks.create_task(self._line(line, *turn))
        finally:
            watching.cancel()

    async def _left(self) -> AsyncGenerator[Line]:
        """Lines without an answer."""
        with await in_thread(self._opened) as file:
            requests = lines.requests(file)

            def some() -> list[Line]:
                found: list[Line] = []
                size = 0
                while size < READ and (line := next(requests, None)):
                    found.append(line)
                    size += len(line.body)
                return found

            while found := await in_thread(some):
                for line in found:
                    if lines.digest(line.custom_id) not in self._results.answered:
                        yield line

    def _opened(self) -> BinaryIO:
        return self._input.open("rb")

    async def _turn(self) -> tuple[Taken, Lane] | None:
        """A line's share of its caller's limits, and an engine; None if the batch ends first.

        While the caller may not ask for more, others have the engine.
        """
        with contextlib.suppress(_Ends), self._end.raising():
            while True:
                lane = await self._lanes.take()
                try:
                    return await self._pipeline.limiter.take(self._caller), lane
                except RateLimited as error:
                    self._lanes.give_back(lane)
                    await asyncio.sleep(error.retry_after)
                except BaseException:
                    self._lanes.give_back(lane)
                    raise
        return None

    async def _line(self, line: Line, taken: Taken, lane: Lane) -> None:
        try:
            if found := await self._answered(line, lane):
                entry, failed = found
                await self._results.add(line.custom_id, entry, failed)
                (_FAILED if failed else _COMPLETED).inc()
        except OSError as error:
            self._broke(error)
        finally:
            self._pipeline.limiter.give_back(taken)

    async def _answered(self, line: Line, first: Lane) -> tuple[bytes, bool] | None:
        """The answer to a line, and whether it is an error; None if the batch ends before. first:
        an engine for the line, which is given back.
        """
        request = lines.new_request()
        lane: Lane | None = first
        lost = 0
        error: ServingError | ClientLeft
        while True:
            try:
                with self._end.part() as cancellation:
                    answer = Collected()
                    if not lane:
                        with cancellation.raising():
                            lane = await self._lanes.take()
                    await lane.answer(self._request(request, line, cancellation, answer))
                    status = answer.status
                return lines.answer(request, line, status, bytes(answer.body)), status >= 400
            except EngineLost:
                lost += 1
                if lost < LOSSES:
                    continue
                error = EngineFailed(f"{lost} engines ended while they answered this line")
            except (ServingError, ClientLeft) as found:
                error = found
            except Exception:
                error = errors.unforeseen()
            finally:
                if lane:
                    self._lanes.give_back(lane)
                lane = None
            if isinstance(error, (EngineFailed, ServerFailed)):
                await asyncio.sleep(SETTLES_S)
            if self._pipeline.engine.failure:
                self.leave()
            if self._end.cause:
                return None
            if not isinstance(error, (NoSlot, NotReady, Overloaded, ClientLeft)):
                status, body = self._shape.status(error), self._shape.body(error)
                return lines.answer(request, line, status, body), True
            with contextlib.suppress(_Ends), self._end.raising():
                await asyncio.sleep(AGAIN_S)

    def _request(
        self, request: str, line: Line, cancellation: Cancellation, answer: Collected
    ) -> InferenceRequest:
        """Raises ServingError."""
        headers = [(REQUEST_ID, request.encode()), (b"content-type", b"application/json")]
        if self._owned.tenant:
            name, value = self._owned.tenant
            headers.append((name.encode("latin-1"), value.encode("latin-1")))
        scope: Scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "client": None,
            "server": None,
            "path": self._batch.endpoint,
            "query_string": b"",
            "headers": headers,
        }
        record = AccessRecord(BATCHES, scope)
        record.caller = self._caller
        sent = Answer(answer)
        client = ClientRequest(scope, sent, self._end, record, self._shape, line.body)
        if client.fields.streamed:
            raise BadRequest("a line of a batch cannot be streamed; leave stream out", "stream")
        return inference_request(
            *(client, self._pipeline.adapters),
            BodyPart(line.body, answer, cancellation, lambda: None),
            framing=JSON_LINES,
            parse=openai.on(self._batch.endpoint),
            refusable=False,
            background=True,
        )

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
                if self._counted() != self._batch.request_counts:
                    await self._save(durable=False)
            except OSError as error:
                self._broke(error)

    async def _look(self) -> None:
        """End the batch if a client has asked for it, its time is over, or the folder is full."""
        store, batch = self._store, self._batch
        if await in_thread(store.cancel_asked, batch.id):
            self._end.cancel(_Ends(Status.CANCELLED))
        if store.now() >= batch.expires_at:
            self._end.cancel(_Ends(Status.EXPIRED))
        if self._looks % ROOM_LOOKS == 0:
            try:
                await in_thread(store.require_space, self._owned.owner)
            except StorageFull as error:
                self._end.cancel(_Ends(Status.FAILED, Fault("storage_full", str(error))))
        self._looks += 1

    def _broke(self, error: OSError) -> None:
        self._broken = error
        self.leave()

    def _counted(self) -> Counts:
        completed, failed = self._results.counts
        return Counts(self._batch.request_counts.total, completed, failed)

    async def _save(self, *, durable: bool = True) -> None:
        if self._batch.status.open:
            self._batch.request_counts = self._counted()
        await in_thread(lambda: self._store.save(self._owned, durable=durable))

    async def _over(self) -> None:
        """Publish its files, and end it, unless another run resumes it."""
        end = self._end.cause
        status = end.status if isinstance(end, _Ends) else Status.COMPLETED
        if not status:
            return
        batch, results = self._batch, self._results
        if status is Status.COMPLETED and sum(results.counts) != batch.request_counts.total:
            raise RuntimeError("lines have no answers")
        if status is Status.EXPIRED:
            async with contextlib.aclosing(self._left()) as left:
                async for line in left:
                    results.soon(line.custom_id, lines.expired(line))
            await results.written()
        if status is Status.CANCELLED:
            batch.cancelling_at = await in_thread(self._store.cancel_asked, batch.id)
        batch.status, batch.finalizing_at = Status.FINALIZING, self._store.now()
        await self._save()
        batch.output_file_id = await in_thread(self._file, self._owned.output, "output", 0)
        batch.error_file_id = await in_thread(self._file, self._owned.errors, "error", 1)
        batch.status = status
        if isinstance(end, _Ends) and end.fault:
            self._fail([end.fault])
        else:
            setattr(batch, f"{status}_at", self._store.now())
        await self._save()
        counts = msgspec.structs.asdict(batch.request_counts)
        log.info("batch", extra={"facts": {"batch": batch.id, "status": status, **counts}})

    def _file(self, name: str, what: str, number: int) -> str | None:
        """Publish one of its files; None if it is empty."""
        size = self._results.sizes[number]
        if not size:
            self._store.content(name).unlink(missing_ok=True)
            return None
        filename = f"{self._batch.id}_{what}.jsonl"
        file = self._store.described(name, filename, OUTPUT, size, self._owned.lives)
        self._store.add(OwnedFile(file, self._owned.owner))
        return name
