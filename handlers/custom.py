# SPDX-License-Identifier: Apache-2.0
"""A user's model.py in a separate process: `python -m handlers.custom SOCKET FOLDER …`.

Here it may block, print, fill memory and import its own modules without harm to the server. The
server ends this process if a call takes too long. The server's side is serving/user_code.py.

Both sides send frames: 4 bytes with the length of the rest, then a msgpack array. The server sends
(call, what, data): a number, one of What, and the function's arguments.
The answer is (call, kind, data), and kind is one of Kind.

Back-pressure: the parts of one call's answer in flight have at most WINDOW bytes, plus the part
that exceeds it, until the server asks for more. Each call has a separate window, so no call waits
for another's client.
"""

import asyncio
import contextlib
import functools
import importlib.util
import inspect
import json
import logging
import os
import re
import resource
import socket
import struct
import sys
import threading
import traceback
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from handlers import djl_python, isolation
from handlers.decorators import marked
from handlers.djl_python import encode_decode
from handlers.djl_python.inputs import Input
from handlers.djl_python.outputs import Output, encoded
from handlers.djl_python.response import Response

FILE = "model.py"
THREADS = 32  # most concurrent calls of sync functions
WINDOW = 256 * 1024
"""Most bytes in flight of one answer's parts."""
TOOLKIT = ("model_fn", "input_fn", "predict_fn", "output_fn", "transform_fn")
"""The functions of SageMaker's inference toolkit. Nothing here calls them."""
CANCELLED = "it was cancelled"
HERE = Path(__file__).parent
RAW = ("image/", "audio/", "tensor/", "application/x-npy")
"""Prefixes of content types that only an input formatter or a handler reads."""
LENGTH = struct.Struct("<I")
HANDLE_OF_ADAPTER = (
    "handle is called in the model's own model.py, never in an adapter's; an adapter may have an "
    "input_formatter and an output_formatter"
)
NO_BODY = (204, 304)
"""Statuses of answers that have no body (RFC 9110, 15.3.5 and 15.4.5)."""
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\xa0-\xff]*")


class What(StrEnum):
    """A call by the server."""

    INPUT = "input"  # data: (a request's body, its Content-Type) → the formatted one's JSON
    WHOLE = "whole"  # data: the engine's JSON answer → the formatted answer
    CHUNKS = "chunks"  # data: events of its stream → Formatted
    HANDLE = "handle"  # data: (properties, body) → a custom handler's answer
    INIT = "init"  # data: (properties, Initial) → handle() is called with them and no content, as
    # in LMI. The result is b"" if handle is the whole service and leaves no request to the engine,
    # otherwise a text for a warning
    MORE = "more"  # data: the number of bytes of the call's parts that have been used
    CANCEL = "cancel"  # the call must end, as no one waits for it: it answers HEARD, and then ends


class Initial(StrEnum):
    """The outcome of a custom handler's initial call."""

    NEEDED = "needed"  # if it fails, the handler fails
    TRIED = "tried"  # the engine starts even if it fails
    LEFT_OUT = "left out"  # an earlier call has hung, or ended its process


class Kind(StrEnum):
    """The answer to a call. The first frame is LOADED or FAILED, of call 0."""

    LOADED = "loaded"  # data: the names of the file's functions
    FAILED = "failed"  # data: the reason, in a line
    DONE = "done"  # data: the result; the call has ended
    BEGUN = "begun"  # a custom handler is called now; before, another process can take the call
    HEARD = "heard"  # acknowledges a CANCEL
    HEAD = "head"  # data: Head, of a handler's answer
    PART = "part"  # data: the next part of a handler's answer


Formatted = tuple[list[bytes], str | None]
"""The output formatter's results, one for each event, and the reason if some are missing."""


Head = tuple[int, dict[str, str], int | None]
"""Status, headers, and the bytes of a body that is one PART; None for a stream."""


class Fault(Exception):
    """A fault of the user's function, in one line."""


class Lazy:
    """The model's tokenizer, loaded at its first use, because that takes seconds."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._found: Any = None

    def _get(self) -> Any:
        if self._found is None:
            from transformers import AutoTokenizer

            if not os.access(self._folder, os.R_OK | os.X_OK):
                raise PermissionError(f"{self._folder}: user {os.getuid()} may not read it")
            self._found = AutoTokenizer.from_pretrained(self._folder)
        return self._found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._get(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._get()(*args, **kwargs)

    def __len__(self) -> int:
        return len(self._get())


class _Threads:
    """Runs functions in threads, up to THREADS at once.

    A thread that is free takes one waiting function after the other. Another thread is woken only
    while functions wait, in case the first one blocks. So many short functions need few switches
    of threads.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS)
        self._pool.submit(int)  # so that there is a thread, even if no memory is left for another
        self._lock = threading.Lock()
        self._jobs: deque[_Job] = deque()
        self._woken = False
        """Whether a thread has been woken that has not looked for a function yet."""
        self._done: deque[tuple[_Job, Any, BaseException | None]] = deque()
        self._told = False
        """Whether the event loop has been told of results."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(self, function: Callable[[], Any], on_done: "_OnDone") -> "_Job":
        """Run a function. on_done: gets its result, and its exception or None, on the event loop
        that runs now.
        """
        self._loop = asyncio.get_running_loop()
        job = _Job(function, on_done)
        with self._lock:
            self._jobs.append(job)
            self._wake()
        return job

    def withdraw(self, job: "_Job") -> bool:
        """Forget a function that no thread has begun. Returns whether it could."""
        with self._lock:
            if job not in self._jobs:
                return False
            self._jobs.remove(job)
            return True

    def _wake(self) -> None:
        if self._jobs and not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # there may be no memory for one thread more
                self._pool.submit(self._run)

    def _run(self) -> None:
        arrives = True
        while True:
            with self._lock:
                if arrives:
                    self._woken = arrives = False
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._wake()
            result, failure = None, None
            try:
                result = job.function()
            except BaseException as error:
                failure = error.with_traceback(None)  # its frames may hold much memory
            self._done.append((job, result, failure))
            if not self._told:
                self._told = True
                assert self._loop
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._told = False  # before it looks, so that no result is missed
        while self._done:
            job, result, failure = self._done.popleft()
            job.on_done(result, failure)


_OnDone = Callable[[Any, BaseException | None], None]


@dataclass(eq=False)
class _Job:
    """A function that is to run in a thread."""

    function: Callable[[], Any]
    on_done: _OnDone


class Code:
    """The functions of a loaded file. Raises Fault if one of them would never be called."""

    def __init__(
        self, module: ModuleType, folder: Path, tokenizer: Lazy, of_adapter: bool = False
    ) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self._threads = _Threads()
        handle = getattr(module, "handle", None)
        called = callable(handle) and not inspect.isgeneratorfunction(handle) and not of_adapter
        self.functions: dict[str, Callable[..., Any]] = {
            name: function
            for name, function in (
                ("input", marked(module, "input_formatter")),
                ("output", marked(module, "output_formatter")),
                ("handle", handle if called and not inspect.isasyncgenfunction(handle) else None),
            )
            if function
        }
        if reason := _never_called(module, self.functions, of_adapter):
            raise Fault(reason)
        self._extras = _extras(self.functions.get("input"), tokenizer, {})
        # A file with a sync handle was written for LMI's sync mode, which makes one call at a time.
        self._sync = "handle" in self.functions and not inspect.iscoroutinefunction(handle)
        self._turn = asyncio.Lock() if self._sync else contextlib.nullcontext()

    async def answer(self, what: str, data: Any) -> AsyncGenerator[tuple[Kind, Any], None]:
        """Call a function. Raises Fault."""
        if what == What.HANDLE:
            async with self._turn:
                yield Kind.BEGUN, None
                async with contextlib.aclosing(self._handled(*data)) as parts:
                    async for kind, part in parts:
                        yield kind, part
            return
        if what == What.INIT:
            properties, initial = data
            self._extras = _extras(self.functions.get("input"), self._tokenizer, properties)
            yield Kind.DONE, await self._began(properties, Initial(initial))
            return
        if what == What.INPUT:
            result = await self._called("input", _payload(*data), **self._extras)
            if not isinstance(result, dict):
                raise Fault(_returned("input_formatter", result, "a dict"))
        elif what == What.CHUNKS:
            yield Kind.DONE, await self._formatted(data)
            return
        else:
            result = await self._called("output", Response(json.loads(data)))
        yield Kind.DONE, _encoded("the formatter", result)

    def format_soon(self, events: list[bytes], on_done: "_OnDone") -> "_Job | None":
        """Format a stream's events in a thread, one after the other. on_done: gets the packed
        Formatted. Returns None for an async formatter, which answer() calls.
        """
        function = self.functions["output"]
        if inspect.iscoroutinefunction(function):
            return None

        def run() -> bytes:
            done: list[bytes] = []
            fault: str | None = None
            try:
                for event in events:
                    done.append(_encoded("the formatter", function(event.decode())))
            except Fault as error:
                fault = str(error)
            except BaseException as error:
                fault = told(error, self._folder)
            return _packed(done, fault)

        return self._threads.add(run, on_done)

    def withdraw(self, job: "_Job") -> bool:
        """Forget a function that no thread has begun. Returns whether it could."""
        return self._threads.withdraw(job)

    async def _formatted(self, events: list[bytes]) -> bytes:
        """Format a stream's events with an async formatter. Returns the packed Formatted."""
        done: list[bytes] = []
        fault: str | None = None
        try:
            for event in events:
                result = await self._called("output", event.decode())
                done.append(_encoded("the formatter", result))
        except Fault as error:
            fault = str(error)
        return _packed(done, fault)

    async def _called(self, name: str, *args: Any, **kwargs: Any) -> Any:
        function = self.functions[name]
        if inspect.iscoroutinefunction(function):
            try:
                return await function(*args, **kwargs)
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                raise Fault(told(error, self._folder)) from None
        return await self._in_thread(function, *args, **kwargs)

    async def _in_thread(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a sync function of the user's. Raises Fault."""
        done: asyncio.Future[tuple[Any, BaseException | None]]
        done = asyncio.get_running_loop().create_future()

        def run() -> Any:
            try:
                return function(*args, **kwargs)
            except BaseException as error:  # a future refuses some exceptions, like StopIteration
                raise Fault(told(error, self._folder)) from None

        job = self._threads.add(run, lambda *outcome: done.set_result(outcome))
        try:
            result, failure = await asyncio.shield(done)
        finally:
            if not done.done() and not self._threads.withdraw(job):
                await asyncio.wait([done])  # it was cancelled, but a thread cannot be ended
        if failure:
            raise failure
        return result

    async def _began(self, properties: Mapping[str, str], initial: Initial) -> bytes | None:
        """Make the initial call, if there is a handler. Returns the data of INIT's DONE.

        Raises Fault if the call was needed and failed.
        """
        if "handle" not in self.functions:
            return None
        if initial == Initial.LEFT_OUT:
            return b"" if self._sync else None
        try:
            alone = await self._initialised(properties)
        except Fault as fault:
            if initial == Initial.NEEDED or self._sync:
                raise
            return str(fault).encode()
        if alone and initial == Initial.TRIED and not self._sync:
            return b"handle answered the initialising call, whose inputs.is_empty()"
        return b"" if alone else None

    async def _initialised(self, properties: Mapping[str, str]) -> bool:
        """Let the handler initialise itself. As in LMI, it gets an empty Input.

        Returns whether it answers all requests itself: if it is a sync handler, as in LMI, or if it
        has an answer to this call.
        """
        what = "in the initialising call, whose inputs.is_empty()"
        try:
            result = await self._called("handle", _input(properties))
        except Fault as fault:
            raise Fault(f"{fault} {what}") from None
        if isinstance(result, Output):
            if not 200 <= _status(result.code) < 300:
                said = result.body.decode(errors="replace")
                raise Fault(f"handle answered {result.code} {what}: {said:.500}")
            await self._finalized(result)
        return self._sync or result is not None

    async def _handled(
        self, properties: Mapping[str, str], body: bytes
    ) -> AsyncGenerator[tuple[Kind, Any], None]:
        """Yield a custom handler's answer; DONE with None to leave the request to the engine."""
        result = await self._called("handle", _input(properties, body))
        if result is None:
            yield Kind.DONE, None
            return
        pieces = result if hasattr(result, "__aiter__") else self._pieces(result)
        streams = pieces is result or getattr(result, "stream_content", None) is not None
        begun = False
        try:
            async for piece in pieces:
                status, headers, content = _piece(piece)
                last = not streams or (isinstance(piece, Output) and piece.last)
                if not begun:
                    yield Kind.HEAD, (status, headers, len(content) if last else None)
                    begun = True
                if status in NO_BODY:
                    break
                if content:
                    yield Kind.PART, content
                if last:
                    break
        except (Fault, GeneratorExit, asyncio.CancelledError):
            raise
        except BaseException as error:
            raise Fault(told(error, self._folder)) from None
        else:
            yield Kind.DONE, b""
        finally:
            if hasattr(pieces, "aclose"):
                await pieces.aclose()
            await self._finalized(result)

    async def _pieces(self, result: Any) -> AsyncGenerator[Any, None]:
        """Yield the chunks of an answer. A non-streamed answer is one chunk."""
        if not isinstance(result, Output) or result.stream_content is None:
            yield result
            return
        iterator, formatted = result.stream_content, result.stream_output_formatter
        headers = result.properties
        if "content-type" not in headers:
            headers["content-type"] = "application/jsonlines"

        def step() -> Any:
            try:
                piece = next(iterator)
            except StopIteration:
                return None
            return formatted(piece) if formatted else piece

        while (piece := await self._in_thread(step)) is not None:
            output = Output(result.code).add(piece)
            output.properties = headers
            yield output

    async def _finalized(self, result: Any) -> None:
        """Call the answer's finalizer after the answer was sent. A failure is only printed."""
        if not isinstance(result, Output):
            return
        try:
            await self._in_thread(result.execute_finalize)
        except Fault as fault:
            logging.getLogger(__name__).warning("the function of finalize() failed: %s", fault)


def _never_called(module: ModuleType, functions: Collection[str], of_adapter: bool) -> str | None:
    """Return why a function of the file would never be called, or None. It would go unnoticed."""
    handle = getattr(module, "handle", None)
    if callable(handle) and "handle" not in functions:
        if of_adapter:
            return HANDLE_OF_ADAPTER
        asynchronous = inspect.isasyncgenfunction(handle)
        return (
            "handle yields, and would not be called; have it return an async generator"
            if asynchronous
            else "handle yields, and would not be called; have it return "
            "Output().add_stream_content(...) of a generator"
        )
    toolkit = [name for name in TOOLKIT if callable(getattr(module, name, None))]
    if toolkit and not functions:
        return (
            f"{', '.join(toolkit)} would not be called: SageMaker's inference toolkit is not "
            "here; write `async def handle(inputs)`, or an input_formatter and an output_formatter"
        )
    return None


def _extras(
    formatter: Callable[..., Any] | None, tokenizer: Lazy, properties: Mapping[str, str]
) -> dict[str, Any]:
    """Return the keyword arguments of the input formatter.

    The tokenizer, if it has that parameter; the properties, if it takes any keywords. Properties
    never replace its own parameters, as in LMI.
    """
    if not formatter:
        return {}
    parameters = inspect.signature(formatter).parameters
    takes_any = any(it.kind is it.VAR_KEYWORD for it in parameters.values())
    extras: dict[str, Any] = {}
    if takes_any:
        extras = {name: value for name, value in properties.items() if name not in parameters}
    return extras | ({"tokenizer": tokenizer} if takes_any or "tokenizer" in parameters else {})


def _input(properties: Mapping[str, str], body: bytes | None = None) -> Input:
    """Return a custom handler's argument for a request."""
    request = Input(properties, body)
    request.function_name = "handle"
    return request


def _payload(body: bytes, content_type: str) -> dict[str, Any]:
    """Return an input formatter's argument for a request, without the fields that name an adapter.

    Text is in a list, as in LMI.
    """
    kind = content_type.lower()
    try:
        if kind.startswith(RAW):
            properties = {"content-type": content_type}
            payload = encode_decode.decode(Input(properties, body), kind)
        else:
            payload = json.loads(body)
    except (OSError, ValueError, RecursionError) as error:
        what = content_type if kind.startswith(RAW) else "JSON"
        raise Fault(f"the body is not {what:.100}: {error}") from None
    if not isinstance(payload, dict):
        raise Fault("the body should be a JSON object")
    payload.pop("adapters", None)
    if kind.startswith("text/plain") and payload.keys() == {"inputs"}:
        payload["inputs"] = [payload["inputs"]]
    return payload


def _packed(done: list[bytes], fault: str | None) -> bytes:
    """Return Formatted in msgpack. fault: why results are missing, or None."""
    formatted: Formatted = done, fault
    return msgspec.msgpack.encode(formatted)


def _encoded(what: str, result: Any) -> bytes:
    known = isinstance(result, str | bytes | dict | list) or hasattr(result, "model_dump_json")
    if not known:
        raise Fault(_returned(what, result, "a dict, a string or the response it was given"))
    try:
        return encoded(result)
    except (TypeError, ValueError, RecursionError) as error:
        raise Fault(f"what {what} returned is not JSON: {error}") from None


def _piece(result: Any) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and content of a handler's answer, or of a part of it."""
    if isinstance(result, Output):
        headers = {"content-type": "application/json"}
        for name, value in result.properties.items():
            if not _HEADER.fullmatch(f"{name}:{value}"):
                raise Fault(f"the handler set a header that cannot be sent: {name!r:.100}")
            headers[name.lower()] = value
        return _status(result.code), headers, result.body
    return 200, {"content-type": "application/json"}, _encoded("the handler", result)


def _status(code: Any) -> int:
    """Return an answer's status. Raises Fault for an invalid one; 1xx only precede an answer."""
    try:
        status = int(code)
        fits = 200 <= status <= 599 and status == float(code)
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise Fault(
            f"the handler set {code!r:.50} as the status; it should be a number from 200 to 599"
        )
    return status


def _returned(name: str, result: Any, wanted: str) -> str:
    return f"{name} returned {type(result).__name__}; it should return {wanted}"


def told(error: BaseException, folder: Path = Path(FILE)) -> str:
    """Return an exception as a line: type, message, and its place in the folder's files."""
    # The failed code's frames may hold all the memory that this process has.
    traceback.clear_frames(error.__traceback__)
    try:
        message = " ".join(str(error).split())
    except BaseException as failure:
        message = f"its __str__ raises {type(failure).__name__}"
    if isinstance(error, SyntaxError) and error.filename:
        text = (error.text or "").strip()
        return f"{Path(error.filename).name}, line {error.lineno}: {error.msg}: {text!r}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(folder)
    ]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message}{where}"


def load(folder: Path, tokenizer: Lazy, of_adapter: bool = False) -> Code:
    """Run the folder's model.py. Raises Fault with the reason."""
    sys.modules["djl_python"] = djl_python  # customers' files import LMI's package
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("model", folder / FILE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["model"] = module
    try:
        spec.loader.exec_module(module)
        return Code(module, folder, tokenizer, of_adapter)
    except Fault:
        raise
    except BaseException as error:
        raise Fault(told(error, folder)) from None


class _Window:
    """The window of a call's answer: limits its bytes in flight to the server."""

    def __init__(self) -> None:
        self._left = WINDOW
        self._more = asyncio.Event()

    async def take(self, size: int) -> None:
        while self._left <= 0:
            self._more.clear()
            await self._more.wait()
        self._left -= size

    def give(self, size: int) -> None:
        self._left += size
        self._more.set()


async def serve(connection: socket.socket, code: Code) -> None:
    """Answer calls until the server has gone."""
    reader, writer = await asyncio.open_connection(sock=connection)
    tasks: dict[int, asyncio.Task[None]] = {}
    windows: dict[int, _Window] = {}
    jobs: dict[int, _Job] = {}
    """The calls that format events in a thread."""
    formatted: list[bytes] = []
    """Their answers, which are written together."""

    def send(call: int, kind: Kind, data: Any) -> None:
        writer.write(framed((call, kind, data)))

    def write_formatted() -> None:
        writer.write(b"".join(formatted))
        formatted.clear()

    def take(call: int, result: bytes, failure: BaseException | None) -> None:
        del jobs[call]
        if not formatted:
            loop.call_soon(write_formatted)
        answer = (Kind.FAILED, told(failure, HERE)) if failure else (Kind.DONE, result)
        formatted.append(framed((call, *answer)))

    async def answer(call: int, what: str, data: Any) -> None:
        try:
            async with contextlib.aclosing(code.answer(what, data)) as parts:
                async for kind, part in parts:
                    if kind == Kind.PART:
                        await windows[call].take(len(part))
                    send(call, kind, part)
                    await writer.drain()
        except Fault as fault:
            send(call, Kind.FAILED, str(fault))
        except Exception as error:
            send(call, Kind.FAILED, told(error, HERE))

    def end(call: int, task: asyncio.Task[None]) -> None:
        del tasks[call], windows[call]
        if task.cancelled():
            send(call, Kind.FAILED, CANCELLED)
        elif task.exception():  # no memory was left to send the failure, or the server has gone
            os._exit(1)

    def end_without_memory(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), MemoryError):
            os._exit(1)
        loop.default_exception_handler(context)

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(end_without_memory)

    send(0, Kind.LOADED, [*code.functions])
    while True:
        call, what, data = await frame(reader)
        if what == What.CANCEL:
            if call in tasks:
                send(call, Kind.HEARD, None)
                tasks[call].cancel()
            elif call in jobs:  # what a thread has begun cannot be ended
                send(call, Kind.HEARD, None)
                if code.withdraw(jobs[call]):
                    del jobs[call]
                    send(call, Kind.FAILED, CANCELLED)
        elif what == What.MORE:
            if call in windows:
                windows[call].give(data)
        elif what == What.CHUNKS and (job := code.format_soon(data, functools.partial(take, call))):
            jobs[call] = job
        else:
            windows[call] = _Window()
            task = tasks[call] = asyncio.create_task(answer(call, what, data))
            task.add_done_callback(functools.partial(end, call))


def framed(content: Any) -> bytes:
    body = msgspec.msgpack.encode(content)
    return LENGTH.pack(len(body)) + body


async def frame(reader: asyncio.StreamReader) -> Any:
    """Read the next frame. Raises asyncio.IncompleteReadError if there is none."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return msgspec.msgpack.decode(await reader.readexactly(length))


def _isolated(folder: Path, tokenizer: Path, user: int, memory: int) -> tuple[Path, Path]:
    """Give up the rights that an adapter's code must not have. Returns the paths of the folders.

    Raises Fault if the code could not be read after that.
    """
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    try:
        moved = isolation.give_up(user, [folder, tokenizer])
    except OSError as error:
        raise Fault(f"cannot become user {user}, who runs adapters' code: {error}") from None
    if not os.access(moved[folder] / FILE, os.R_OK):
        raise Fault(
            f"{folder / FILE} cannot be read by user {user}, who runs adapters' code; "
            f"`chmod -R a+rX {folder}` lets it"
        )
    return moved[folder], moved[tokenizer]


def main(socket_number: str, folder: str, tokenizer: str, memory: str, user: str = "") -> None:
    """Run the process. user: the user of an adapter's code, 0 for the server's own user; empty for
    the model's code.
    """
    connection = socket.socket(fileno=int(socket_number))
    limit = int(memory)
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    os.chdir(folder)
    here, there = Path(folder), Path(tokenizer)
    try:
        if user:
            here, there = _isolated(here, there, int(user), limit)
        # The connection's end shows this too, but blocked code would not notice it.
        isolation.end_with_parent()
        code = load(here, Lazy(str(there)), of_adapter=bool(user))
    except Fault as fault:
        connection.sendall(framed((0, Kind.FAILED, str(fault))))
        return
    if "handle" in code.functions:
        # It may have its own model, and on a GPU much more address space than memory.
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
    try:
        asyncio.run(serve(connection, code))
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    except MemoryError:
        os._exit(1)  # no memory is left for a message


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # the user's threads may never end
