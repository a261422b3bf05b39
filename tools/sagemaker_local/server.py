# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of the stand-in, for boto3's two clients and for OpenAI's.

`running()` is the door for tests.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import random
import re
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import ClientError, ClientResponse, web

from serving.errors import Forbidden
from serving.http.origins import Origins
from tools.sagemaker_local.container import Limits
from tools.sagemaker_local.control import ControlPlane, Target
from tools.sagemaker_local.store import Failed, Store
from tools.sagemaker_local.wire import (
    Key,
    Refused,
    check,
    check_signature,
    check_token,
    header_members,
    new_key,
    operation,
    part,
    stream_error,
)

log = logging.getLogger(__name__)

REGION = "us-east-1"
ACCOUNT = "123456789012"
MESSAGE = 2048  # characters of a container's answer that ModelError repeats
INVOKE, STREAM = "InvokeEndpoint", "InvokeEndpointWithResponseStream"
ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
VARIANT = "x-Amzn-Invoked-Production-Variant"
CLOSED_SESSION = "X-Amzn-SageMaker-Closed-Session-Id"
NEW_SESSION = "X-Amzn-SageMaker-New-Session-Id"
SESSION = "X-Amzn-SageMaker-Session-Id"
TARGET_MODEL = "X-Amzn-SageMaker-Target-Model"


class Options(NamedTuple):
    """s3: the folder that stands for S3, or the URL of a server that speaks S3. work: for
    containers' files and logs, or None for one that goes away. seed: of random choices.
    duplicate_posts: register adapters twice, since nobody knows that SageMaker does not.
    broken_streams: the share of streams that end early. key: for signatures of requests; None makes
    a new one. programs: that an Image may name as `process:PROGRAM`.
    """

    port: int = 0
    s3: Path | str | None = None
    work: Path | None = None
    limits: Limits = Limits()
    region: str = REGION
    account: str = ACCOUNT
    seed: int = 0
    duplicate_posts: bool = False
    broken_streams: float = 0
    key: Key | None = None
    programs: Sequence[str] = ()


class StandIn:
    """The HTTP side: what boto3's two clients and OpenAI's send."""

    def __init__(self, options: Options, work: Path) -> None:
        self._key = options.key or new_key()
        self._limits = options.limits
        self._random = random.Random(options.seed)
        self._broken_streams = options.broken_streams
        self.control = ControlPlane(
            options.limits,
            Store(options.s3),
            work,
            region=options.region,
            account=options.account,
            duplicate_posts=options.duplicate_posts,
            programs=options.programs,
        )
        self.app = web.Application(
            client_max_size=options.limits.payload_bytes + 1, middlewares=[_from_here]
        )
        endpoint = "/endpoints/{endpoint}"
        openai = "/openai/v1/chat/completions"
        self.app.add_routes(
            [
                web.get("/", self._overview),
                web.post("/", self._control),
                web.post(f"{endpoint}/invocations", self._invoke),
                web.post(f"{endpoint}/invocations-response-stream", self._invoke_stream),
                web.post(f"{endpoint}{openai}", self._openai),
                web.post(f"{endpoint}/inference-components/{{component}}{openai}", self._openai),
            ]
        )

    async def _overview(self, request: web.Request) -> web.Response:
        return web.json_response(self.control.overview())

    async def _control(self, request: web.Request) -> web.Response:
        """JSON 1.1: the operation in a header, its input and output as JSON objects."""
        name = request.headers.get("X-Amz-Target", "").removeprefix("SageMaker.")
        try:
            await self._require_signed(request)
            try:
                parameters = json.loads(await request.read() or b"{}")
            except ValueError:
                raise Refused("The body is not JSON", "SerializationException") from None
            answer, status = self.control.answer(name, parameters), 200
        except Refused as refused:
            code = refused.code or "ValidationException"
            answer, status = {"__type": code, "message": str(refused)}, refused.status
        return web.json_response(answer, status=status, content_type="application/x-amz-json-1.1")

    async def _invoke(self, request: web.Request) -> web.Response:
        try:
            target, headers, body = await self._invocation(request, INVOKE)
            path = await self._path(target, headers)
            try:
                answer = await target.copy.call("POST", path, headers, body)
            except Failed as fault:
                raise self._model_error(target, 0, str(fault)) from None
            if answer.status >= 400:
                raise self._model_error(target, answer.status, _text(answer.body))
        except Refused as refused:
            return _refusal(refused)
        headers = self._answer_headers(target, answer.headers, "Content-Type")
        return web.Response(body=answer.body, headers=headers)

    async def _path(self, target: Target, headers: Mapping[str, str]) -> str:
        """The container's path for an invocation. The model that it names is loaded first. Raises
        Refused.
        """
        if target.copy.recipe.targets is None:
            return "/invocations"
        if not (model := headers.get(TARGET_MODEL)):
            raise Refused("Target model header is required for a multi-model endpoint")
        try:
            return f"/models/{await target.copy.load(model)}/invoke"
        except Failed as fault:
            raise self._model_error(target, 0, str(fault)) from None

    def _answer_headers(
        self, target: Target, headers: Mapping[str, str], kind: str
    ) -> dict[str, str]:
        """The headers of an answer to InvokeEndpoint or its streaming sister.

        kind: the header that carries the container's Content-Type.
        """
        answered = {VARIANT: target.variant}
        for name in ("Content-Type", ATTRIBUTES, CLOSED_SESSION):
            if name in headers:
                answered[kind if name == "Content-Type" else name] = headers[name]
        if closed := headers.get(CLOSED_SESSION):
            target.sessions.pop(closed, None)
        if session := headers.get(NEW_SESSION) or headers.get(SESSION):
            if _NEW_SESSION.fullmatch(session):
                answered[NEW_SESSION] = session
                target.sessions[session.partition(";")[0]] = target.copy
            else:
                log.warning("a new session is not announced as `ID; Expires=…Z`: %.300r", session)
        return answered

    async def _invocation(
        self, request: web.Request, name: str
    ) -> tuple[Target, dict[str, str], bytes]:
        """The copy that answers an invocation, and its input. Raises Refused."""
        body = await self._require_signed(request)
        shape = operation("sagemaker-runtime", name).input_shape
        assert shape
        members = header_members(shape)
        parameters: dict[str, Any] = {
            member: request.headers[header]
            for header, member in members.items()
            if header in request.headers
        }
        parameters["EndpointName"] = request.match_info["endpoint"]
        check(shape, {**parameters, "Body": b""})  # the body has a separate limit
        target = self.control.target(
            parameters["EndpointName"],
            parameters.get("InferenceComponentName"),
            parameters.get("TargetVariant"),
            parameters.get("SessionId"),
        )
        headers = {
            "Accept" if member == "Accept" else header: parameters[member]
            for header, member in members.items()
            if member in parameters
        }
        return target, headers | target.headers, body

    async def _require_signed(self, request: web.Request) -> bytes:
        """A request's body. Raises Refused if a request is not signed with our key."""
        body = await self._body(request)
        url = f"http://{request.host}{request.raw_path}"
        check_signature(self._key, request.method, url, request.headers, body, time.time())
        return body

    async def _body(self, request: web.Request) -> bytes:
        limit = self._limits.payload_bytes
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            body = bytes(limit + 1)
        if len(body) > limit:
            raise Refused(
                "1 validation error detected: Value at 'body' failed to satisfy constraint: "
                f"Member must have length less than or equal to {limit}"
            )
        return body

    def _model_error(self, target: Target, status: int, message: str) -> Refused:
        """A container's failure as clients see it. status: its own, or 0 where it had none."""
        control = self.control
        group = f"arn:aws:logs:{control.region}:{control.account}:log-group:{target.group}"
        log.warning("%s: status %d: log in %s", target.group, status, target.copy.log)
        return Refused(
            f"Received {'client' if 400 <= status < 500 else 'server'} error ({status}) from "
            f'primary with message "{message[:MESSAGE]}".',
            "ModelError",
            424,
            OriginalStatusCode=status,
            OriginalMessage=message[:MESSAGE],
            LogStreamArn=group,
        )

    async def _invoke_stream(self, request: web.Request) -> web.StreamResponse:
        try:
            target, headers, body = await self._invocation(request, STREAM)
            path = await self._path(target, headers)
            calling = target.copy.calling("POST", path, headers, body, self._limits.stream_s)
            async with contextlib.AsyncExitStack() as stack:
                try:
                    answer = await stack.enter_async_context(calling)
                    if answer.status >= 400:
                        message = _text(await answer.read())
                        raise self._model_error(target, answer.status, message)
                except (Failed, ClientError, TimeoutError, OSError) as fault:
                    raise self._model_error(target, 0, str(fault)) from None
                headers = self._answer_headers(
                    target, answer.headers, "X-Amzn-SageMaker-Content-Type"
                )
                response = web.StreamResponse(headers=headers)
                response.content_type = "application/vnd.amazon.eventstream"
                await response.prepare(request)
                await self._stream(answer, response)
        except Refused as refused:
            return _refusal(refused)
        return response

    async def _stream(self, answer: ClientResponse, response: web.StreamResponse) -> None:
        """Pass a container's bytes on, in parts that begin and end anywhere."""
        held = end = b""
        breaks = self._random.random() < self._broken_streams
        try:
            async for data in answer.content.iter_any():
                *parts, held = self._cut(held + data)
                for piece in parts:
                    await response.write(part(piece))
                if breaks:
                    end = stream_error("InternalStreamFailure", Message="The stream failed.")
                    break
        except TimeoutError:
            end = stream_error(
                "ModelStreamError",
                Message=f"The stream took longer than {self._limits.stream_s:g} s",
                ErrorCode="ModelInvocationTimeExceeded",
            )
        except ClientError as error:
            end = stream_error(
                "ModelStreamError",
                Message=f"The container broke the stream off: {error}",
                ErrorCode="StreamBroken",
            )
        if held:
            await response.write(part(held))
        await response.write(end)

    def _cut(self, data: bytes) -> list[bytes]:
        """Pieces of random lengths; the last one, often empty, waits for more bytes."""
        cuts = sorted(self._random.choices(range(len(data) + 1), k=self._random.randint(0, 3)))
        places = [0, *cuts, len(data), *([len(data)] * self._random.randint(0, 1))]
        pieces = [data[a:b] for a, b in itertools.pairwise(places)]
        return [*(it for it in pieces[:-1] if it), pieces[-1]]

    async def _openai(self, request: web.Request) -> web.StreamResponse:
        """OpenAI's path: the body and the answer pass as they are."""
        try:
            check_token(self._key, request.headers.get("Authorization", ""))
            target = self.control.target(
                request.match_info["endpoint"], request.match_info.get("component"), None, None
            )
            body = await self._body(request)
            headers = {
                name: request.headers[name]
                for name in ("Content-Type", "Accept")
                if name in request.headers
            }
            calling = target.copy.calling(
                "POST",
                "/v1/chat/completions",
                headers | target.headers,
                body,
                self._limits.stream_s,
            )
            async with contextlib.AsyncExitStack() as stack:
                try:
                    answer = await stack.enter_async_context(calling)
                except Failed as fault:
                    raise self._model_error(target, 0, str(fault)) from None
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                try:
                    async for data in answer.content.iter_any():
                        await response.write(data)
                except (ClientError, TimeoutError):
                    if request.transport:
                        request.transport.abort()  # the client is to see that it was broken off
        except Refused as refused:
            error = {"message": str(refused), "type": refused.code or "ValidationError"}
            return web.json_response({"error": error}, status=refused.status)
        return response


_NEW_SESSION = re.compile(
    r"[a-zA-Z0-9](-*[a-zA-Z0-9])*;\sExpires=[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z"
)
"""The pattern of NewSessionId in the service model."""


HOST = "127.0.0.1"
_ORIGINS = Origins((), HOST)


@web.middleware
async def _from_here(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuse what web pages send, and those whose names lead to this machine."""
    headers = {
        name.lower().encode(): value.encode(errors="surrogateescape")
        for name, value in request.headers.items()
    }
    try:
        _ORIGINS.require(request.method, headers)
    except Forbidden:
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin", "none")
        told = f"only programs of this machine may call: host {host!r:.100}, origin {origin!r:.100}"
        return _refusal(Refused(told, "AccessDeniedException", 403))
    return await handler(request)


def _text(body: bytes) -> str:
    return body.decode(errors="replace")


def _refusal(refused: Refused) -> web.Response:
    """An error as boto3's runtime client reads it."""
    return web.json_response(
        {"Message": str(refused), **refused.more},
        status=refused.status,
        headers={"x-amzn-ErrorType": refused.code or "ValidationError"},
    )


async def serve(options: Options, opened: "Future[str]", stop: asyncio.Event) -> None:
    with contextlib.ExitStack() as stack:
        work = options.work or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="sagemaker-local-"))
        )
        stand_in = StandIn(options, work.resolve())
        runner = web.AppRunner(
            stand_in.app, handler_cancellation=True, access_log=None, shutdown_timeout=1
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, HOST, options.port)
            await site.start()
            opened.set_result(f"http://127.0.0.1:{runner.addresses[0][1]}")
            await stop.wait()
        finally:
            await stand_in.control.close()
            await runner.cleanup()


@contextlib.contextmanager
def running(**options: Any) -> Iterator[str]:
    """A stand-in on a separate thread: the URL for boto3's endpoint_url.

    options: the fields of Options and of Limits. Running containers are stopped at the end.
    """
    limits = Limits(**{name: options.pop(name) for name in Limits._fields if name in options})
    whole = Options(limits=limits, **options)
    opened: Future[str] = Future()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            try:
                runner.run(serve(whole, opened, stop))
            except BaseException as error:
                if opened.done():
                    raise
                opened.set_exception(error)

    thread = threading.Thread(target=run, name="sagemaker-local")
    thread.start()
    try:
        yield opened.result()
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
