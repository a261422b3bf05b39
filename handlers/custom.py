"""A user's model.py in a process of its own: `python -m handlers.custom SOCKET FOLDER …`.

Here it may block, print, fill memory and bring modules of its own without harm to the server, which
ends this process where a call takes too long. The server's side is serving/user_code.py.

Both sides send frames: 4 bytes with the length of the rest, then a msgpack array. From the server
(call, what, data): call is a number, data what the function gets. Back (call, kind, data), where
kind is one of Kind.
"""

import asyncio
import contextlib
import ctypes
import importlib.util
import inspect
import json
import os
import re
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from handlers import djl_python
from handlers.decorators import marked
from handlers.djl_python.inputs import Input
from handlers.djl_python.outputs import Output, encoded
from handlers.djl_python.response import Response

FILE = "model.py"
THREADS = 32  # calls of sync functions at a time
LENGTH = struct.Struct("<I")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\xa0-\xff]*")


class What(StrEnum):
    """What the server asks for."""

    INPUT = "input"  # data: a request's JSON → the formatted one's
    WHOLE = "whole"  # data: the engine's JSON answer → the formatted answer
    CHUNK = "chunk"  # data: an event of its stream → the formatted one
    HANDLE = "handle"  # data: (properties, body) → a custom handler's answer
    CANCEL = "cancel"  # nobody waits for the call any more; it has no answer


class Kind(StrEnum):
    """What comes back. The first frame is LOADED or FAILED, of call 0."""

    LOADED = "loaded"  # data: the names of the functions that the file has
    FAILED = "failed"  # data: why, in a line
    DONE = "done"  # data: the result, and the end of the call
    HEAD = "head"  # data: (status, headers) of a handler's answer
    PART = "part"  # data: the next piece of a handler's answer


class Fault(Exception):
    """What the user's function did wrong, in a line."""


class Lazy:
    """The model's tokenizer, loaded when it is first touched: that takes seconds."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._found: Any = None

    def _get(self) -> Any:
        if self._found is None:
            from transformers import AutoTokenizer

            self._found = AutoTokenizer.from_pretrained(self._folder)
        return self._found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._get(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._get()(*args, **kwargs)

    def __len__(self) -> int:
        return len(self._get())


class Code:
    """The functions of a loaded file."""

    def __init__(self, module: ModuleType, folder: Path, tokenizer: Lazy) -> None:
        self._folder = folder
        self._threads = ThreadPoolExecutor(THREADS)
        handle = getattr(module, "handle", None)
        self.functions: dict[str, Callable[..., Any]] = {
            name: function
            for name, function in (
                ("input", marked(module, "input_formatter")),
                ("output", marked(module, "output_formatter")),
                ("handle", handle if inspect.iscoroutinefunction(handle) else None),
            )
            if function
        }
        self._extras = _extras(self.functions.get("input"), tokenizer)

    async def answer(self, what: str, data: Any) -> AsyncIterator[tuple[Kind, Any]]:
        """Call a function. Raises Fault."""
        if what == What.HANDLE:
            async for kind, part in self._handled(*data):
                yield kind, part
            return
        if what == What.INPUT:
            result = await self._called("input", _payload(data), **self._extras)
            if not isinstance(result, dict):
                raise Fault(_returned("input_formatter", result, "a dict"))
        else:
            given = Response(json.loads(data)) if what == What.WHOLE else data.decode()
            result = await self._called("output", given)
        yield Kind.DONE, _encoded("the formatter", result)

    async def _called(self, name: str, *args: Any, **kwargs: Any) -> Any:
        function = self.functions[name]
        try:
            if inspect.iscoroutinefunction(function):
                return await function(*args, **kwargs)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))
        except BaseException as error:
            raise Fault(told(error, self._folder)) from None

    async def _handled(
        self, properties: dict[str, str], body: bytes
    ) -> AsyncIterator[tuple[Kind, Any]]:
        """What a custom handler answers; DONE with None where it leaves that to the engine."""
        result = await self._called("handle", Input(properties, body))
        if result is None:
            yield Kind.DONE, None
            return
        pieces = result if hasattr(result, "__aiter__") else _once(result)
        begun = False
        try:
            async for piece in pieces:
                status, headers, content = _piece(piece)
                if not begun:
                    yield Kind.HEAD, (status, headers)
                    begun = True
                yield Kind.PART, content
                if isinstance(piece, Output) and piece.last:
                    break
        except Fault:
            raise
        except BaseException as error:
            raise Fault(told(error, self._folder)) from None
        yield Kind.DONE, b""


def _extras(formatter: Callable[..., Any] | None, tokenizer: Lazy) -> dict[str, Any]:
    """What of our keyword arguments the input formatter takes."""
    if not formatter:
        return {}
    parameters = inspect.signature(formatter).parameters
    takes_any = any(it.kind is it.VAR_KEYWORD for it in parameters.values())
    return {"tokenizer": tokenizer} if takes_any or "tokenizer" in parameters else {}


def _payload(body: bytes) -> dict[str, Any]:
    """A request as an input formatter gets it: what says which adapter is meant is left out."""
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Fault(f"the body is not JSON: {error}") from None
    if not isinstance(payload, dict):
        raise Fault("the body should be a JSON object")
    payload.pop("adapters", None)
    return payload


def _encoded(what: str, result: Any) -> bytes:
    known = isinstance(result, str | bytes | dict | list) or hasattr(result, "model_dump_json")
    if not known:
        raise Fault(_returned(what, result, "a dict, a string or the response it was given"))
    try:
        return encoded(result)
    except (TypeError, ValueError, RecursionError) as error:
        raise Fault(f"what {what} returned is not JSON: {error}") from None


def _piece(result: Any) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and content of what a handler answers, or of a part of it."""
    if isinstance(result, Output):
        headers = {"content-type": "application/json"}
        for name, value in result.properties.items():
            if not _HEADER.fullmatch(f"{name}:{value}"):
                raise Fault(f"the handler set a header that cannot be sent: {name!r:.100}")
            headers[name.lower()] = value
        return int(result.code), headers, result.body
    return 200, {"content-type": "application/json"}, _encoded("the handler", result)


async def _once(result: Any) -> AsyncIterator[Any]:
    yield result


def _returned(name: str, result: Any, wanted: str) -> str:
    return f"{name} returned {type(result).__name__}; it should return {wanted}"


def told(error: BaseException, folder: Path = Path(FILE)) -> str:
    """An exception in a line: its type, its message, and where in the folder's files it was."""
    message = " ".join(str(error).split())
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


def load(folder: Path, tokenizer: Lazy) -> Code:
    """Run the folder's model.py. Raises Fault with what is wrong with it."""
    sys.modules["djl_python"] = djl_python  # what customers' files import is LMI's package
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("model", folder / FILE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["model"] = module
    try:
        spec.loader.exec_module(module)
        return Code(module, folder, tokenizer)
    except BaseException as error:
        raise Fault(told(error, folder)) from None


async def serve(connection: socket.socket, code: Code) -> None:
    """Answer calls until the server has gone."""
    reader, writer = await asyncio.open_connection(sock=connection)
    tasks: dict[int, asyncio.Task[None]] = {}

    def send(call: int, kind: Kind, data: Any) -> None:
        writer.write(framed((call, kind, data)))

    async def answer(call: int, what: str, data: Any) -> None:
        try:
            async for kind, part in code.answer(what, data):
                send(call, kind, part)
                await writer.drain()
        except Fault as fault:
            send(call, Kind.FAILED, str(fault))
        except Exception as error:
            send(call, Kind.FAILED, told(error, Path(__file__).parent))
        finally:
            del tasks[call]

    send(0, Kind.LOADED, [*code.functions])
    while True:
        call, what, data = await frame(reader)
        if what == What.CANCEL:
            if call in tasks:
                tasks[call].cancel()
            continue
        tasks[call] = asyncio.create_task(answer(call, what, data))


def framed(content: Any) -> bytes:
    body = msgspec.msgpack.encode(content)
    return LENGTH.pack(len(body)) + body


async def frame(reader: asyncio.StreamReader) -> Any:
    """The next frame. Raises asyncio.IncompleteReadError when there is none."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return msgspec.msgpack.decode(await reader.readexactly(length))


def main(socket_number: str, folder: str, tokenizer: str, memory: str) -> None:
    # The end of the connection tells that the server has gone, but blocked code would not hear it.
    pr_set_pdeathsig = 1  # prctl(2)
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    connection = socket.socket(fileno=int(socket_number))
    limit = int(memory)
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    os.chdir(folder)
    try:
        code = load(Path(folder), Lazy(tokenizer))
    except Fault as fault:
        connection.sendall(framed((0, Kind.FAILED, str(fault))))
        return
    if "handle" in code.functions:
        # It may well have a model of its own, and on a GPU address space that it never fills.
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        asyncio.run(serve(connection, code))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # threads of the user's may never end
