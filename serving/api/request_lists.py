# SPDX-License-Identifier: Apache-2.0
"""Bodies with several requests for the engine: JSON lines, or a list with an adapter for each."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from handlers import lmi
from handlers.records import FormatError
from serving import errors
from serving.cancellation import ClientLeft
from serving.errors import BadRequest, ServingError
from serving.http.bodies import Collected
from serving.inference.content.fields import bad_request
from serving.inference.pipeline import Pipeline
from serving.inference.request import JSON_LINES, BodyPart, ClientRequest, inference_request


async def answer_lines(client: ClientRequest, lines: Iterator[bytes], pipeline: Pipeline) -> None:
    """Answer several requests in order, with a line for each; an error is also a line.

    Only one line waits for the engine at a time, in the body's place of the queue. The cancellation
    of the body cancels each of its lines, and this function waits for them.
    """
    headers = [(b"content-type", JSON_LINES.content_type)]
    send = client.answer
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    answers: deque[asyncio.Task[bytes]] = deque()

    async def write(part: bytes) -> None:
        await send({"type": "http.response.body", "body": part, "more_body": True})

    async with asyncio.TaskGroup() as tasks:
        for number, line in enumerate(lines):
            begun = asyncio.Event()
            answer = _line(client, line, begun.set, pipeline, first=number == 0)
            answers.append(tasks.create_task(answer))
            await begun.wait()
            if len(answers) >= pipeline.engine.concurrency:
                await write(await answers.popleft())
            if client.admitted.cause:
                break
        while answers:
            await write(await answers.popleft())
    cause = client.admitted.cause
    if isinstance(cause, ClientLeft):
        raise cause
    if cause:
        await write(JSON_LINES.frame(client.errors.body(cause)) * sum(1 for _ in lines))
    await send({"type": "http.response.body", "body": b""})


async def _line(
    client: ClientRequest,
    line: bytes,
    begun: Callable[[], None],
    pipeline: Pipeline,
    *,
    first: bool,
) -> bytes:
    """Return the answer to a line. begun: called when the engine gets it, or will not get it.
    first: whether it is the body's first line.
    """
    answer = Collected()
    try:
        with client.admitted.part() as cancellation:
            part = BodyPart(line, answer, cancellation, begun)
            request = inference_request(
                *(client, pipeline.adapters, part), framing=JSON_LINES, refusable=False, first=first
            )
            if request.fields.streamed:
                raise BadRequest(
                    "one of several lines cannot be streamed; leave stream out", "stream"
                )
            await pipeline.run(request)
            return JSON_LINES.frame(bytes(answer.body))
    except ClientLeft:
        return JSON_LINES.frame(b"")
    except ServingError as error:
        return JSON_LINES.frame(client.errors.body(error))
    except Exception:
        return JSON_LINES.frame(client.errors.body(errors.unforeseen()))
    finally:
        begun()


async def answer_list(client: ClientRequest, adapters: list[str], pipeline: Pipeline) -> None:
    """Answer a request with a list of inputs, each with its own adapter, concurrently.

    The first error ends all inputs, and is raised.
    """
    admitted = client.admitted
    pipeline.admission.require_places(len(adapters) - 1)
    try:
        parts = lmi.split(client.body, len(adapters))
    except FormatError as error:
        raise bad_request(error) from None
    admitted.take(len(parts) - 1)

    async def answered(number: int, body: bytes, adapter: str) -> bytes:
        answer = Collected()
        try:
            part = BodyPart(body, answer, admitted, admitted.release_place)
            request = inference_request(
                *(client, pipeline.adapters, part),
                adapter=adapter,
                framing=JSON_LINES,
                first=number == 0,
            )
            await pipeline.run(request)
        except (ServingError, ClientLeft) as error:
            admitted.cancel(error)
        except Exception:
            admitted.cancel(errors.unforeseen())
        return bytes(answer.body)

    async with asyncio.TaskGroup() as tasks:
        answers = [
            tasks.create_task(answered(number, *each))
            for number, each in enumerate(zip(parts, adapters, strict=True))
        ]
    if admitted.cause:
        raise admitted.cause
    whole = b"[" + b",".join(answer.result() for answer in answers) + b"]"
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(whole))]
    await client.answer({"type": "http.response.start", "status": 200, "headers": headers})
    await client.answer({"type": "http.response.body", "body": whole})
