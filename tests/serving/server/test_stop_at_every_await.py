# SPDX-License-Identifier: Apache-2.0
"""SIGTERM while a request waits, at every place where a request can wait.

A first run of a request finds these places: the functions of serving/ whose awaits suspended its
tasks. Then, for each place, the test stops a separate server when a request is there: by one
signal, and by two. After one signal, the request is answered as usual. After two, it may be ended,
with an error in the shape of its API. An answer is never truncated, and never has another shape.
"""

import asyncio
import contextlib
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

from serving.user_code import Limits, start_user_code
from tests.serving.conftest import Running, running
from tests.serving.inference.test_media import Web, reachable  # noqa: F401
from tests.serving.lora.test_registry import register, registry, write

pytestmark = pytest.mark.anyio

SERVING = Path(__file__).parents[3] / "serving"
READING = "OpenAI.answer"
"""The place that awaits the body. No stop waits for bytes that a client has not sent."""
STOPPING = "the server is stopping"
HELD_S = 0.3  # by then, a request has reached the place that holds it,
HELD_TURNS = 200  # or after so many turns of the event loop in which the engine had it
PATIENCE_S = 60.0
BESIDE = 2  # the engine's requests in flight when it does one thing at a time
CODE = """
import asyncio
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter

@input_formatter
async def parse(payload):
    await asyncio.sleep(0.05)
    return payload

@output_formatter
async def render(output):
    await asyncio.sleep(0.05)
    return output
"""
HANDLE = """
import asyncio

async def handle(inputs):
    if not inputs.is_empty():
        await asyncio.sleep(0.05)
        return {"handled": True}
"""


@dataclass(frozen=True)
class Kind:
    """A request. code: the model's model.py. adapters: whether there are adapters, which take long
    to load. slow: the body comes in two pieces. beside: a request that keeps the engine busy.
    """

    name: str
    path: str
    body: Any
    headers: dict[str, str] = field(default_factory=dict)
    code: str = ""
    adapters: bool = False
    slow: bool = False
    beside: "Kind | None" = None
    settings: dict[str, Any] = field(default_factory=dict)


CHAT, COMPLETIONS, INVOCATIONS = "/v1/chat/completions", "/v1/completions", "/invocations"
STEP = {"inputs": "a step"}
STREAM = {"inputs": "a wait b", "stream": True, "parameters": {"details": True}}
STREAMED_CHAT = {"messages": [{"role": "user", "content": "a wait b"}], "stream": True}
LINES = b'{"inputs": "a step"}\n{"inputs": "b step"}'
PICTURE = {"type": "image_url", "image_url": {"url": "http://media.test:PORT/pixel"}}
BY_ADAPTER = {"X-Amzn-SageMaker-Adapter-Identifier": "one"}
OTHER = Kind("", COMPLETIONS, {"prompt": "wait"})
OTHER_ADAPTER = Kind("", COMPLETIONS, {"prompt": "wait", "model": "two"})
KINDS = (
    Kind("completion", COMPLETIONS, {"prompt": "a step"}),
    Kind("sent slowly", COMPLETIONS, {"prompt": "a step"}, slow=True),
    Kind("queued", COMPLETIONS, {"prompt": "a"}, beside=OTHER),
    Kind("streamed chat", CHAT, STREAMED_CHAT),
    Kind("streamed LMI", INVOCATIONS, STREAM, BY_ADAPTER, CODE, adapters=True),
    Kind("LMI", INVOCATIONS, STEP, code=CODE),
    Kind("handler", INVOCATIONS, {"inputs": "a"}, code=HANDLE),
    Kind("list", INVOCATIONS, {"inputs": ["a", "b"], "adapters": ["one", "two"]}, adapters=True),
    Kind("lines", INVOCATIONS, LINES, {"content-type": "application/jsonlines"}),
    Kind("with an id", INVOCATIONS, STEP, {"X-Amzn-SageMaker-Inference-Id": "id"}),
    Kind(
        "in a session",
        INVOCATIONS,
        STEP,
        {"X-Amzn-SageMaker-Session-Id": "NEW_SESSION"},
        settings={"enable_stateful_sessions": True},
    ),
    Kind(
        "picture",  # the engine refuses it after it has been fetched
        CHAT,
        {"messages": [{"role": "user", "content": [PICTURE]}]},
        settings={"allowed_media_domains": ("media.test",)},
    ),
    Kind("no slot", INVOCATIONS, {"inputs": "a"}, BY_ADAPTER, adapters=True, beside=OTHER_ADAPTER),
    Kind(
        "adapter registered",
        "/adapters?name=three&preload=true&src=SOURCES/three",
        {},
        adapters=True,
    ),
    Kind("adapter updated", "/adapters/one/update", {"preload": True}, adapters=True),
)


class World:
    """A server, and one request of the kind."""

    def __init__(self, server: Running, kind: Kind, sources: Path, port: int) -> None:
        self.server, self.kind = server, kind
        self.others = asyncio.all_tasks()
        body = kind.body if isinstance(kind.body, bytes) else json.dumps(kind.body).encode()
        self.body = body.replace(b"PORT", b"%d" % port)
        self.path = kind.path.replace("SOURCES", str(sources))

    async def ask(self) -> httpx.Response:
        """The complete answer. Raises httpx.HTTPError if the answer is truncated or missing."""

        async def pieces() -> AsyncIterator[bytes]:
            yield self.body[:5]
            await asyncio.sleep(0.1)
            yield self.body[5:]

        content = pieces() if self.kind.slow else self.body
        headers = {"content-length": str(len(self.body))} | self.kind.headers
        client = self.server.client
        return await client.post(self.path, content=content, headers=headers, timeout=PATIENCE_S)

    @property
    def tasks(self) -> "set[asyncio.Task[Any]]":
        return asyncio.all_tasks() - self.others

    @property
    def held(self) -> bool:
        """Whether the engine has the request, or it waits for the engine."""
        engine = self.server.engine
        beside = BESIDE if self.kind.beside else 0
        loading = bool(engine.loads) and not engine.may_load.is_set()
        waits = engine.running > beside or loading or self.server.pipeline.waiting > 0
        return waits and not engine.gate.is_set()

    def go_on(self) -> None:
        """Let the engine generate, and load."""
        self.server.engine.gate.set()
        self.server.engine.may_load.set()
        for _ in range(10):
            self.server.engine.steps.release()


@contextlib.asynccontextmanager
async def world(kind: Kind, folder: Path) -> AsyncIterator[World]:
    folder.mkdir()
    sources = folder / "adapters"
    settings = {"sessions_path": str(folder / "sessions")} | kind.settings
    async with contextlib.AsyncExitStack() as stack:
        web = Web()
        stack.callback(web.stop)
        server = await stack.enter_async_context(running(**settings))
        engine = server.engine
        if kind.adapters:
            server.pipeline.adapters = registry(engine, sources, slots=(1, 1))
            for n, name in enumerate(("one", "two", "three")):
                write(sources / name, n)
            for name in ("one", "two"):
                await register(server, name, sources / name)
        if kind.code:
            (folder / "model.py").write_text(kind.code)
            code = await start_user_code(folder, folder, Limits(PATIENCE_S, PATIENCE_S, 0))
            assert code
            server.pipeline.code = code
            stack.push_async_callback(code.stop)
        if kind.beside:
            engine.concurrency = 1
            for _ in range(BESIDE):
                other = asyncio.create_task(World(server, kind.beside, sources, 0).ask())
                stack.callback(other.cancel)
            while engine.running < BESIDE:
                await asyncio.sleep(0.01)
        elif kind.adapters:
            engine.may_load.clear()
        yield World(server, kind, sources, web.server_port)


def frames(task: "asyncio.Task[Any]") -> Iterator[FrameType]:
    """The frames of a suspended task, from the outermost on."""
    awaited: Any = task.get_coro()
    while awaited is not None:
        if inspect.iscoroutine(awaited):
            frame, awaited = awaited.cr_frame, awaited.cr_await
        elif inspect.isgenerator(awaited):
            frame, awaited = awaited.gi_frame, awaited.gi_yieldfrom
        else:
            return
        if frame:
            yield frame


def place_of(task: "asyncio.Task[Any]") -> str | None:
    """The place where a request waits: our innermost function, in a task that answers a request."""
    files = [
        (Path(it.f_code.co_filename).relative_to(SERVING), it.f_code.co_qualname)
        for it in frames(task)
        if it.f_code.co_filename.startswith(str(SERVING))
    ]
    if not {file.parts[0] for file, _ in files} & {"api", "inference"}:
        return None
    file, name = files[-1]
    return f"{file}:{name}"


async def watched(it: World, look: Callable[[set[str]], bool], seconds: float) -> bool:
    """Call `look` with the request's places at each turn of the event loop, until it returns true;
    False if it never did within `seconds`, or if the engine holds the request.
    """
    held = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not look({name for task in it.tasks if (name := place_of(task))}):
                held = held + 1 if it.held else 0
                if held > HELD_TURNS:
                    return False
                await asyncio.sleep(0)
            return True
    return False


async def answer_of(it: World) -> tuple[httpx.Response, set[str]]:
    """An answer, and the places where its request has waited."""
    places: set[str] = set()
    asking = asyncio.create_task(it.ask())

    def look(now: set[str]) -> bool:
        places.update(now)
        return asking.done()

    await watched(it, look, HELD_S)
    it.go_on()
    await watched(it, look, PATIENCE_S)
    return await asking, places


async def stopped_at(place: str, signals: int, it: World) -> httpx.Response:
    """The answer to a request if the server gets signals while the request waits at that place."""
    asking = asyncio.create_task(it.ask())

    def look(now: set[str]) -> bool:
        return place in now or asking.done()

    if not await watched(it, look, HELD_S):
        it.go_on()  # the request has passed the engine
        assert await watched(it, look, PATIENCE_S)
    for _ in range(signals):
        it.server.server.stop()
    if signals == 1:
        it.go_on()
    return await asking


def same(it: World, one: httpx.Response, other: httpx.Response) -> bool:
    """Whether the answers are equal. Answers about adapters contain the folders' names, so they are
    not compared.
    """
    if one.status_code != other.status_code:
        return False
    return it.path.startswith("/adapters") or one.content == other.content


def is_refusal(it: World, answer: httpx.Response) -> bool:
    """Whether an answer reports, in the shape of its API, that the server is stopping."""
    if STOPPING not in answer.text:
        return False
    if answer.status_code == 200:  # the answer had begun: within the stream, or on a line
        return answer.text.rstrip().endswith(("}", "[DONE]"))
    told = answer.json()
    if it.path.startswith("/v1/"):
        return answer.status_code == 503 and told["error"]["message"] == STOPPING
    return answer.status_code == 503 and STOPPING in (told.get("error"), told.get("message"))


@pytest.mark.parametrize("kind", KINDS, ids=lambda it: it.name)
async def test_sigterm_at_every_await(tmp_path, kind, reachable):  # noqa: F811
    async with world(kind, tmp_path / "first") as it:
        right, places = await answer_of(it)
    assert places
    for n, place in enumerate(sorted(places)):
        for signals in (1, 2):
            async with world(kind, tmp_path / f"{n} {signals}") as it:
                answer = await stopped_at(place, signals, it)
                may_end = signals == 2 or (kind.slow and READING in place)
                fits = same(it, answer, right) or (may_end and is_refusal(it, answer))
                assert fits, f"{place}, {signals}: {answer.status_code} {answer.text}"
                assert (await asyncio.wait_for(it.server.task, PATIENCE_S)).code == 0
