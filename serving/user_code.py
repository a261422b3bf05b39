"""A folder's model.py in a process of its own (handlers/custom.py): started, called, ended.

A call that takes too long is answered with an error, and its process makes room for another one; a
process that ends by itself, for want of memory for example, is started again at the next call.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, NamedTuple

from handlers.custom import FILE, Kind, What, frame, framed
from serving.errors import UserCodeFailed
from serving.logs import redacted

log = logging.getLogger(__name__)

LOAD_S = 120.0
"""For a file to be loaded: it may import large libraries."""
GONE_S = 1.0  # after it was killed


class Limits(NamedTuple):
    """seconds: for one call of a formatter. handler_seconds: for a custom handler, between two
    pieces of its answer. memory: bytes, or 0 for no limit.
    """

    seconds: float
    handler_seconds: float
    memory: int


async def started(folder: Path, tokenizer: Path, limits: Limits) -> "UserCode | None":
    """The folder's model.py, where it has one, and one of its functions is for us.

    tokenizer: the folder of the model whose tokenizer formatters get. Raises UserCodeFailed.
    """
    if not (folder / FILE).is_file():
        return None
    code = UserCode(folder, tokenizer, limits)
    await code.start()
    if code.functions:
        return code
    await code.stop()
    return None


class UserCode:
    """The functions of a folder's model.py.

    functions: those of `input`, `output` and `handle` that it has. Calls raise UserCodeFailed.
    """

    def __init__(self, folder: Path, tokenizer: Path, limits: Limits) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self._limits = limits
        self._process: _Process | None = None
        self._starting = asyncio.Lock()
        self.functions: frozenset[str] = frozenset()

    async def start(self) -> None:
        """Load the file. Raises UserCodeFailed with what is wrong with it."""
        self.functions = (await self._running()).functions

    async def input(self, body: bytes) -> bytes:
        """A request's JSON as the input formatter makes it."""
        return await self._formatted(What.INPUT, body)

    async def whole(self, answer: bytes) -> bytes:
        """The engine's JSON answer as the output formatter makes it."""
        return await self._formatted(What.WHOLE, answer)

    async def chunk(self, event: bytes) -> bytes:
        """One event of the engine's stream as the output formatter makes it."""
        return await self._formatted(What.CHUNK, event)

    async def handle(
        self, properties: dict[str, str], body: bytes
    ) -> AsyncGenerator[tuple[Kind, Any], None]:
        """What the custom handler answers: its head and its parts, or DONE with None."""
        process = await self._running()
        answers = process.call(What.HANDLE, (properties, body))
        async with contextlib.aclosing(answers):
            while True:
                try:
                    async with asyncio.timeout(self._limits.handler_seconds):
                        kind, data = await anext(answers)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise self._too_long(
                        process, What.HANDLE, self._limits.handler_seconds
                    ) from None
                yield kind, data

    async def stop(self) -> None:
        if self._process:
            self._process.kill()
            await self._process.gone()

    async def _formatted(self, what: What, data: bytes) -> bytes:
        process = await self._running()
        try:
            async with (
                asyncio.timeout(self._limits.seconds),
                contextlib.aclosing(process.call(what, data)) as answers,
            ):
                _, found = await anext(answers)
        except TimeoutError:
            raise self._too_long(process, what, self._limits.seconds) from None
        return bytes(found)

    def _too_long(self, process: "_Process", what: What, seconds: float) -> UserCodeFailed:
        process.retire()
        if self._process is process:
            self._process = None
        option = "PREDICT" if what == What.HANDLE else "FORMATTER"
        reason = f"it took longer than {seconds:g} s; OPTION_{option}_TIMEOUT sets the limit"
        return _failed(what, reason)

    async def _running(self) -> "_Process":
        async with self._starting:
            if not self._process or self._process.ended:
                self._process = await _start(self._folder, self._tokenizer, self._limits.memory)
            return self._process


async def _start(folder: Path, tokenizer: Path, memory: int) -> "_Process":
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-u", "-m", "handlers.custom"),
            *(str(theirs.fileno()), str(folder), str(tokenizer), str(memory)),
            pass_fds=[theirs.fileno()],
            cwd=Path(__file__).parent.parent,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    ours.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=ours)
    started = _Process(process, reader, writer, folder.name)
    try:
        async with asyncio.timeout(LOAD_S):
            await started.load()
    except TimeoutError:
        raise UserCodeFailed(f"{FILE} was not loaded after {LOAD_S:g} s") from None
    finally:
        if not started.functions:
            started.kill()
    return started


class _Process:
    """A running process and the calls that wait for it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        name: str,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._name = name
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Queue[tuple[Kind, Any]]] = {}
        self._retired = False
        self._tasks = [asyncio.create_task(self._log())]
        self.functions: frozenset[str] = frozenset()
        self.ended = False

    async def load(self) -> None:
        try:
            _, kind, data = await frame(self._reader)
        except asyncio.IncompleteReadError:
            raise UserCodeFailed(f"{FILE} ended its process while it was loaded") from None
        if kind == Kind.FAILED:
            raise UserCodeFailed(redacted(data))
        self.functions = frozenset(data)
        self._tasks.append(asyncio.create_task(self._read()))

    async def call(self, what: What, data: Any) -> AsyncGenerator[tuple[Kind, Any], None]:
        """Call a function; yields what comes back of it, DONE as the last."""
        number = next(self._numbers)
        answers = self._calls[number] = asyncio.Queue()
        done = False
        try:
            if self.ended:
                answers.put_nowait((Kind.FAILED, _DIED))
            else:
                self._writer.write(framed((number, what, data)))
            while not done:
                kind, found = await answers.get()
                done = kind in (Kind.DONE, Kind.FAILED)
                if kind == Kind.FAILED:
                    raise _failed(what, redacted(found))
                yield kind, found
        finally:
            del self._calls[number]
            if not done:
                self._writer.write(framed((number, What.CANCEL, None)))
            if self._retired and not self._calls:
                self.kill()

    def retire(self) -> None:
        """End the process when the calls that are under way have been answered or given up."""
        self._retired = True
        if not self._calls:
            self.kill()

    def kill(self) -> None:
        self.ended = True
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def gone(self) -> None:
        """Wait until the process has ended, but not for what it may have started itself."""
        await asyncio.wait(self._tasks, timeout=GONE_S)

    async def _read(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                number, kind, data = await frame(self._reader)
                if number in self._calls:
                    self._calls[number].put_nowait((Kind(kind), data))
        self.ended = True
        for answers in self._calls.values():
            answers.put_nowait((Kind.FAILED, _DIED))
        self.kill()

    async def _log(self) -> None:
        """Pass on what the user's code prints, a line at a time and without secrets."""
        assert self._process.stdout
        lines = self._process.stdout
        while True:
            try:
                line = await lines.readuntil()
            except asyncio.IncompleteReadError as rest:
                line = rest.partial
                if not line:
                    break
            except asyncio.LimitOverrunError as overrun:
                line = await lines.read(overrun.consumed)
            log.info("%s: %s", self._name, redacted(line.decode(errors="replace").rstrip()))
        await self._process.wait()


_DIED = (
    f"the process of {FILE} ended; it may have run out of memory, which OPTION_FORMATTER_MEMORY "
    "limits"
)


def _failed(what: What, reason: str) -> UserCodeFailed:
    part = "handler" if what == What.HANDLE else "formatter"
    return UserCodeFailed(f"Custom {part} failed: {reason}")
