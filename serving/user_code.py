# SPDX-License-Identifier: Apache-2.0
"""A folder's model.py, which runs in a process of its own (handlers/custom.py).

A call that nobody waits for any more, because it took too long, its client left or the server
drains, is cancelled, and has to end. Where it does not, a new process replaces the one it is in:

- The process has acknowledged the cancellation, so its other calls go on: it retires, which is to
  say that it gets no new calls, and is ended after the last, or when another one has to retire.
- It has not, so a call blocks its event loop and with it all of its calls: it is killed. Calls that
  it had not begun go to the new one.

So there are at most three processes: one that is called, one that starts, one that retires. A
process that ends by itself, for want of memory for example, is started again at the next call.
"""

import ast
import asyncio
import contextlib
import functools
import io
import itertools
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from handlers import isolation
from handlers.custom import (
    FILE,
    HANDLE_OF_ADAPTER,
    LENGTH,
    WINDOW,
    Head,
    Initial,
    Kind,
    What,
    framed,
    told,
)
from lmi_config.facts.model import Checkpoint
from lmi_config.options.declared import names_option
from serving.aio import in_thread
from serving.errors import UserCodeFailed
from serving.observability.redaction import redacted
from serving.process import kill_all_of

log = logging.getLogger(__name__)

LOAD_S = 120.0
"""For a file to be loaded: it may import large libraries."""
INITIAL_S = 1200.0
"""For the initialising call, which may load a model: LMI's own limit to that."""
GONE_S = 1.0  # for a process to end after it was killed
LAST_S = 0.2  # for what a process sent before it ended to be read, where its connection stays open
GRACE_S = 5.0
"""For a call that took too long to end after it was cancelled, but at most a third of its limit."""
LEFT_S = 30.0
"""The same for a call that might have gone on, had its client not left. An `async def handle` that
blocks while it computes is usual, and no reason to have its model loaded again.
"""
LOSSES = 3
"""Processes that were lost with no answer between them; then the model cannot be served."""
RETRY_S = 5.0  # between tries to start a process for a model that cannot be served without it
MESSAGE = 4096  # characters of what went wrong
LONGEST_FRAME = 256 * 1024**2
"""Bytes that adapters' code may send at a time."""
LONGEST_NOTE = 1024**2
"""Bytes of a frame that carries no data: any kind but DONE and PART, or of a call that is over."""
AT_ONCE = 16
"""Events of a stream that a formatter gets in one call."""
FRAMES = 64
"""Frames that are read in one turn of the event loop."""
OUTPUT = 64 * 1024
"""Bytes that are read at a time of what a process prints."""
PRINTED_S, BURST = 200, 1000
"""Lines of a process that are logged: a second, and at once. A long one counts as its KiB."""
LINE = 8 * 1024
"""Bytes of a line that are logged."""
TOLD_S = 10.0
"""Between two lines of the log that say how many of a process were left out."""
SLOWED_S = 0.01
"""Between two reads of what is not logged: its process waits, not the event loop."""


LONGEST = 1024 * 1024
"""Bytes of an adapter's model.py, which is parsed when the adapter is registered."""
_NO_CODE = (
    f"it has a {FILE}, and its answers would be others without it; OPTION_ADAPTER_CODE=true lets "
    "adapters run code"
)


def faults_of_adapter(checkpoint: Checkpoint, may_run: bool) -> list[str]:
    """What can be said against an adapter's model.py, where it has one, without running it.

    may_run: adapters may have code.
    """
    if FILE not in checkpoint.sizes:
        return []
    if not may_run:
        return [_NO_CODE]
    size = checkpoint.sizes[FILE]
    if size > LONGEST:
        return [f"{FILE} has {size} bytes, more than {LONGEST}"]
    try:
        tree = ast.parse(checkpoint.head(FILE, size), FILE)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [told(error)]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    names = {node.name for node in tree.body if isinstance(node, kinds)}
    return [HANDLE_OF_ADAPTER] if "handle" in names else []


class Limits(NamedTuple):
    """What a model.py may use, in seconds and bytes."""

    formatter_s: float
    """For one call of a formatter."""
    handler_s: float
    """For a custom handler, between two pieces of its answer."""
    memory: int
    """Of its process, or 0 for no limit."""
    initial_s: float = INITIAL_S
    """For the initialising call of a custom handler."""


async def start_user_code(
    folder: Path,
    tokenizer: Path,
    limits: Limits,
    properties: Mapping[str, str] | None = None,
    of_adapter: bool = False,
    in_front: bool = False,
) -> "UserCode | None":
    """Start the folder's model.py, where it has one and the server calls one of its functions.

    tokenizer: the folder of the model whose tokenizer formatters get. properties: the model's,
    which a custom handler gets. of_adapter: it runs without the server's rights and secrets.
    in_front: an `async def handle` stands in front of the engine, whatever becomes of its
    initialising call. Raises UserCodeFailed.
    """
    if not (folder / FILE).is_file():
        return None
    code = UserCode(folder, tokenizer, limits, properties, of_adapter, in_front)
    try:
        await code.start()
    except BaseException:
        await code.stop()
        raise
    if code.functions:
        return code
    await code.stop()
    return None


class UserCode:
    """The functions of a folder's model.py, and the processes that run them.

    functions: those of `input`, `output` and `handle` that it has. Calls raise UserCodeFailed. The
    parameters are start_user_code()'s.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Path,
        limits: Limits,
        properties: Mapping[str, str] | None = None,
        of_adapter: bool = False,
        in_front: bool = False,
    ) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self._limits = limits
        # LMI's files look for what is beside them there.
        self._properties = {**(properties or {}), "model_dir": str(folder)}
        self._initial = Initial.TRIED if in_front else Initial.NEEDED
        self._user = isolation.take_user() if of_adapter else None
        self._scratch: str | None = None
        """Where an adapter's code with a user of its own may write."""
        # Its processes
        self._process: _Process | None = None
        self._retiring: _Process | None = None
        self._starting: asyncio.Task[_Process] | None = None
        self._retry: asyncio.TimerHandle | None = None
        # How they fare
        self._losses = 0  # processes since the last answer
        self._fault: str | None = None  # of the last start
        self._stopped = False
        self.functions: frozenset[str] = frozenset()
        self.alone = False
        """Whether the custom handler has an engine of its own, and leaves nothing to ours."""

    @property
    def failure(self) -> str | None:
        """Why the model cannot be served now, in a sentence, or None where it may be."""
        if self._fault:
            return f"{FILE} could not be started again: {self._fault}"
        if self._losses >= LOSSES:
            return f"{self._losses} processes of {FILE} were lost with no answer between them"
        return None

    @property
    def handles(self) -> bool:
        """Whether it has a custom handler."""
        return "handle" in self.functions

    async def start(self) -> None:
        """Load the file. Raises UserCodeFailed with what is wrong with it."""
        process = await self._ready_process()
        self.functions, self.alone = process.functions, process.alone

    async def format_request(self, body: bytes, content_type: str) -> bytes:
        """A request as the input formatter makes it, in JSON.

        content_type: the client's. The body is JSON but for what only formatters read.
        """
        return await self._format(What.INPUT, (body, content_type))

    async def format_answer(self, answer: bytes) -> bytes:
        """The engine's JSON answer as the output formatter makes it."""
        return await self._format(What.WHOLE, answer)

    async def format_events(self, events: list[bytes]) -> tuple[list[bytes], UserCodeFailed | None]:
        """Events of the engine's stream as the output formatter makes them, one by one, and why it
        has not made all of them. Each may take as long as a call.
        """
        answer = await self._format(What.CHUNKS, events, len(events))
        try:
            done, fault = _FORMATTED.decode(answer)
        except msgspec.MsgspecError as error:
            raise _failed(What.CHUNKS, f"it sent what is no answer: {error}") from None
        return done, _failed(What.CHUNKS, redacted(fault[:MESSAGE])) if fault else None

    async def handle(
        self, headers: Mapping[str, str], body: bytes
    ) -> AsyncGenerator[tuple[Kind, Any], None]:
        """What the custom handler answers: its head and its parts, or DONE with None.

        headers: the request's. Those by the name of an option are not passed on.
        """
        own = {name.lower() for name in self._properties}
        kept = {
            name: value
            for name, value in headers.items()
            if name.lower() not in own and not names_option(name)
        }
        data = {**kept, **self._properties}, body
        limit = self._limits.handler_s
        for last in (False, True):  # another process where the first does not begin it
            answers = (await self._ready_process()).call(What.HANDLE, data, limit)
            try:
                async with contextlib.aclosing(answers):
                    while True:
                        async with asyncio.timeout(limit):
                            answer = await anext(answers)
                        self._losses = 0
                        yield answer
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise _too_long(What.HANDLE, limit) from None
            except _NotBegun as error:
                if last:
                    raise _failed(What.HANDLE, str(error)) from None

    async def stop(self) -> None:
        """End its processes. Nothing can be called after that."""
        self._stopped = True
        if self._retry:
            self._retry.cancel()
        if self._starting:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        for process in (self._process, self._retiring):
            if process:
                process.kill()
                await process.gone()
        if self._user:
            await in_thread(kill_all_of, self._user)
            if self._scratch:
                await in_thread(shutil.rmtree, self._scratch, True)
            isolation.return_user(self._user)
            self._user = 0

    async def _format(self, what: What, data: Any, calls: int = 1) -> bytes:
        """calls: of the user's function."""
        limit = calls * self._limits.formatter_s
        for last in (False, True):
            answers = (await self._ready_process()).call(what, data, limit)
            try:
                async with asyncio.timeout(limit), contextlib.aclosing(answers):
                    _, result = await anext(answers)
                self._losses = 0
                return bytes(result or b"")
            except TimeoutError:
                raise _too_long(what, limit) from None
            except _NotBegun as error:
                if last:
                    raise _failed(what, str(error)) from None
        raise AssertionError

    async def _ready_process(self) -> "_Process":
        """A process that answers. A start goes on when the request that it is for has left."""
        if self._process and not self._process.ended:
            await self._process.until_responsive()
        if self._process and not self._process.ended:
            return self._process
        return await asyncio.shield(self._begin_start())

    def _begin_start(self) -> "asyncio.Task[_Process]":
        if not self._starting:
            self._starting = asyncio.create_task(self._start_process())
            self._starting.add_done_callback(self._on_started)
        return self._starting

    async def _start_process(self) -> "_Process":
        if self._process:
            await self._process.gone()  # a handler's may have held a GPU's memory
        if self._user and not self._scratch:
            self._scratch = tempfile.mkdtemp(prefix="slipway-adapter-")
            os.chown(self._scratch, self._user, self._user)
        start = functools.partial(
            _start,
            *(self._folder, self._tokenizer, self._limits, self._properties),
            *(self._user, self._scratch, self._replace),
        )
        try:
            self._process = await start(self._initial)
        except InitialCallFailed as error:
            if self._initial != Initial.TRIED:
                raise
            log.warning("%s: %s; it gets no initialising call from now on", FILE, error)
            self._initial = Initial.LEFT_OUT
            self._process = await start(self._initial)
        return self._process

    def _on_started(self, task: "asyncio.Task[_Process]") -> None:
        self._starting = None
        if task.cancelled() or self._stopped:
            return
        error = task.exception()
        self._fault = str(error) if error else None
        if error:
            log.warning("%s could not be started again: %s", self._folder / FILE, error)
            if self.handles:
                self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._start_again)

    def _start_again(self) -> None:
        if not self._process or self._process.ended:
            self._begin_start()

    def _replace(self, process: "_Process", reason: str) -> None:
        """Replace a process that has ended, or retires."""
        if self._stopped or process is not self._process:
            return
        log.warning("a new process for %s: %s", self._folder / FILE, reason)
        self._losses += 1
        if not process.ended:
            if self._retiring:
                self._retiring.kill()
            self._retiring, self._process = process, None
        if self._losses < LOSSES:  # else with the next call
            self._begin_start()


async def _start(
    folder: Path,
    tokenizer: Path,
    limits: Limits,
    properties: Mapping[str, str],
    user: int | None,
    scratch: str | None,
    on_lost: Callable[["_Process", str], None],
    initial: Initial,
) -> "_Process":
    """Start a process, load the file in it, and initialise its custom handler if it has one.

    Raises UserCodeFailed, and InitialCallFailed where the initialising call hung or ended it.
    user: as whom an adapter's code runs, 0 for ourselves; None for the model's own code. scratch:
    the folder for its temporary files, where it has one of its own.
    """
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()  # of our own: asyncio's cannot be closed while others write to it
    output = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    # uvloop closes the descriptor, and then the file once more (handles/handle.pyx): what a thread
    # has opened in between would be closed, since it has the same number.
    file = os.fdopen(reading, "rb", 0, closefd=isinstance(loop, asyncio.BaseEventLoop))
    printed, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), file)
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-u", "-m", "handlers.custom"),
            *(str(theirs.fileno()), str(folder), str(tokenizer), str(limits.memory)),
            "" if user is None else str(user),
            pass_fds=[theirs.fileno()],
            cwd=Path(__file__).parent.parent,
            env=None if user is None else isolation.environment(os.environ, scratch),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=writing,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except BaseException:
        printed.close()
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(writing)
    ours.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=ours)
    longest_frame = 2**32 if user is None else LONGEST_FRAME
    code = _Process(process, reader, writer, output, printed, folder.name, longest_frame, on_lost)
    try:
        async with _within(LOAD_S, "loaded"):
            await code.load()
        handles = "handle" in code.functions
        if handles and initial != Initial.LEFT_OUT:
            log.info("%s: handle is called with an empty Input, to initialise it", folder / FILE)
        limit_s = limits.initial_s if handles else LOAD_S
        if initial == Initial.TRIED:
            limit_s = limits.formatter_s
        async with _within(limit_s, "initialised", InitialCallFailed):
            await code.initialise(properties, initial)
    except BaseException:
        code.kill()
        await code.gone()
        raise
    return code


@contextlib.asynccontextmanager
async def _within(
    seconds: float, participle: str, failure: type[UserCodeFailed] = UserCodeFailed
) -> AsyncGenerator[None, None]:
    """Raise the failure where the block takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise failure(f"{FILE} was not {participle} after {seconds:g} s") from None


class InitialCallFailed(UserCodeFailed):
    """The initialising call of a custom handler hung, or ended its process."""


class _NotBegun(Exception):
    """A call whose process has ended before it began. The message says why it has ended."""


@dataclass(eq=False)
class _Call:
    """A call that a process has not answered yet."""

    what: What
    limit: float
    active: float | None
    """When it began, or its last piece came; None while it has not begun."""
    answers: "asyncio.Queue[tuple[Kind, Any] | Exception]" = field(default_factory=asyncio.Queue)
    abandoned: bool = False
    """Nobody waits for it any more, and the process was sent its cancellation."""
    acknowledged: bool = False
    """The process has read the cancellation."""
    timer: asyncio.TimerHandle | None = None

    @property
    def may_block(self) -> bool:
        """Whether it may be what keeps the process from reading what it is sent."""
        return self.abandoned and self.active is not None and not self.acknowledged


class _Process:
    """A process that runs a model.py, and its calls.

    output, printed: what it prints, and the transport that brings it. name: in the log.
    longest_frame: bytes that it may send at a time. on_lost: called with the reason when it has
    ended, or retires.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        output: asyncio.StreamReader,
        printed: asyncio.ReadTransport,
        name: str,
        longest_frame: int,
        on_lost: Callable[["_Process", str], None],
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._output = output
        self._printed = printed
        self._name = name
        self._longest_frame = longest_frame
        self._on_lost = on_lost
        self._now = asyncio.get_running_loop().time
        # Its calls
        self._numbers = itertools.count(1)
        self._latest = 0
        self._calls: dict[int, _Call] = {}
        # Its state
        self.functions: frozenset[str] = frozenset()
        self.alone = False
        self.ended = False
        self._retires = False
        self._responsive = asyncio.Event()
        self._responsive.set()
        self._exit = asyncio.create_task(self._notice_exit())
        self._tasks = [asyncio.create_task(self._pass_on_output())]

    async def load(self) -> None:
        """Wait until the file is loaded. Raises UserCodeFailed."""
        reading = asyncio.create_task(self._read_frame())
        try:
            ends = (reading, self._exit)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise UserCodeFailed(f"{FILE} ended its process while it was loaded")
            _, kind, data = reading.result()
            if kind not in (Kind.FAILED, Kind.LOADED):
                raise _BadFrame(f"{FILE} sent what is no answer: {kind} before it was loaded")
            found = _decoded(kind, data)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise UserCodeFailed(f"{FILE} ended its process while it was loaded") from None
        except _BadFrame as error:
            raise UserCodeFailed(str(error)) from None
        finally:
            reading.cancel()
        if kind == Kind.FAILED:
            raise UserCodeFailed(redacted(found[:MESSAGE]))
        self.functions = frozenset(found)
        self._tasks.append(asyncio.create_task(self._read_answers()))

    async def initialise(self, properties: Mapping[str, str], initial: Initial) -> None:
        """Say the properties, and make the custom handler's initialising call.

        Raises UserCodeFailed, and InitialCallFailed where the process ends.
        """
        data = properties, initial
        try:
            async with contextlib.aclosing(self.call(What.INIT, data, 0)) as answers:
                _, result = await anext(answers)
        except (_NotBegun, UserCodeFailed) as error:
            if not self.ended:
                raise
            raise InitialCallFailed(f"{error} while it was initialised") from None
        self.alone = result == b""
        if result:
            said = redacted(result.decode(errors="replace")[:MESSAGE])
            log.warning("%s: %s; vLLM starts, and gets what handle leaves to it", FILE, said)

    async def until_responsive(self) -> None:
        """Wait until no call may block it any more, or it has ended."""
        await self._responsive.wait()

    async def call(
        self, what: What, data: Any, limit: float
    ) -> AsyncGenerator[tuple[Kind, Any], None]:
        """Call a function; yields what comes back of it, DONE as the last.

        limit: seconds that it may take, which the caller enforces. Raises _NotBegun.
        """
        if self.ended:
            raise _NotBegun(_DIED)
        self._latest = number = next(self._numbers)
        call = _Call(what, limit, None if what == What.HANDLE else self._now())
        self._calls[number] = call
        self._send(number, what, data)
        used = 0
        try:
            while True:
                answer = await call.answers.get()
                if isinstance(answer, Exception):
                    raise answer
                yield answer
                kind, piece = answer
                if kind == Kind.DONE:
                    return
                if kind == Kind.PART:
                    used += len(piece)
                if used >= WINDOW // 2:
                    self._send(number, What.MORE, used)
                    used = 0
        finally:
            if number in self._calls:
                self._abandon(number, call)

    def kill(self, reason: str = "") -> None:
        """Kill it. reason: for those who wait for an answer."""
        self.ended = True
        self._responsive.set()
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for number, call in [*self._calls.items()]:
            reason = reason or _DIED
            begun = call.active is not None
            self._finish(number, _failed(call.what, reason) if begun else _NotBegun(reason))

    async def gone(self) -> None:
        """Wait until the process has ended, but not for what it may have started itself."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), GONE_S)
        # What it started may hold its connection and its output open.
        await asyncio.wait(self._tasks, timeout=LAST_S)
        for task in (*self._tasks, self._exit):
            task.cancel()
        self._printed.close()

    def _send(self, number: int, what: What, data: Any) -> None:
        if not self.ended:
            self._writer.write(framed((number, what, data)))

    def _abandon(self, number: int, call: _Call) -> None:
        """Cancel a call that nobody waits for any more."""
        call.abandoned = True
        self._send(number, What.CANCEL, None)
        self._watch(call)
        self._end_if_retired()

    def _watch(self, call: _Call) -> None:
        """Give an abandoned call so much time to end."""
        if call.active is None:  # it may begin before its cancellation is read
            return
        remaining = call.active + call.limit - self._now()
        seconds = max(min(GRACE_S, call.limit / 3), min(LEFT_S, remaining))
        loop = asyncio.get_running_loop()
        call.timer = loop.call_later(seconds, self._overdue, call)
        self._update_responsive()

    def _overdue(self, call: _Call) -> None:
        """Retire, or end, because an abandoned call did not end."""
        if call.acknowledged:
            self._retires = True
            self._on_lost(self, "a call that was cancelled did not end")
            self._end_if_retired()
        else:
            self.kill(_BLOCKED)
            self._on_lost(self, _BLOCKED)

    def _finish(self, number: int, answer: tuple[Kind, Any] | Exception) -> None:
        call = self._calls.pop(number)
        if call.timer:
            call.timer.cancel()
        call.answers.put_nowait(answer)
        self._update_responsive()
        self._end_if_retired()

    def _update_responsive(self) -> None:
        if self.ended or not any(call.may_block for call in self._calls.values()):
            self._responsive.set()
        else:
            self._responsive.clear()

    def _end_if_retired(self) -> None:
        """End a process that retires, when nobody waits for any of its calls."""
        waited_for = any(not call.abandoned for call in self._calls.values())
        if self._retires and not self.ended and not waited_for:
            self.kill()

    async def _read_frame(self) -> tuple[int, Kind, memoryview | bytes]:
        """What the process sends next, which may be anything: its call, its kind, and its data in
        msgpack, which _decoded() reads; of large data the bytes that it holds. Nothing is decoded
        before it is known to be wanted: an empty list is one byte here, and 56 as an object.

        Raises asyncio.IncompleteReadError or ConnectionError at the end, and _BadFrame.
        """
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if length > self._longest_frame:
            limit = self._longest_frame
            raise _BadFrame(f"{FILE} sent {length} bytes at once; {limit} are the limit")
        frame = await self._reader.readexactly(min(length, _LONGEST_HEAD + 5))
        head = _HEAD.match(frame)
        if not head:
            raise _BadFrame(f"{FILE} sent what is no answer: it begins with {frame!r:.80}")
        number, kind = msgspec.msgpack.decode(head["call"]), Kind(head["kind"][1:].decode())
        if length > LONGEST_NOTE and not (kind in _WITH_DATA and number in self._calls):
            raise _BadFrame(
                f"{FILE} sent {length} bytes at once; {LONGEST_NOTE} are the limit for {kind}"
            )
        if length <= LONGEST_NOTE:
            frame += await self._reader.readexactly(length - len(frame))
            return number, kind, memoryview(frame)[head.end() :]
        size, begun = length - head.end() - 5, frame[head.end() :]
        if begun[0] != _BIN32 or int.from_bytes(begun[1:5]) != size:
            raise _BadFrame(f"{FILE} sent what is no answer: {kind} of {length} bytes is no bytes")
        return number, kind, await self._read_large(begun[5:], size)

    async def _read_large(self, begun: bytes, size: int) -> bytes:
        """So many bytes, of which the first are here. A piece at a time and with no copy of all,
        for which the event loop would stand still.
        """
        data = io.BytesIO()
        data.write(begun)
        while left := size - data.tell():
            piece = await self._reader.read(min(left, OUTPUT))
            if not piece:
                raise asyncio.IncompleteReadError(b"", size)
            data.write(piece)
            await asyncio.sleep(0)
        return data.getvalue()

    async def _read_answers(self) -> None:
        reason = _DIED
        idle = 0
        try:
            for count in itertools.count(1):
                number, kind, data = await self._read_frame()
                call = self._calls.get(number)
                headed = call and call.what == What.HANDLE
                answer = _decoded(kind, data) if headed or kind != Kind.HEAD else None
                if not call or not self._receive(number, call, kind, answer):
                    idle += 1
                # A call that is cancelled as it ends has at most two more.
                if idle > _MOST_IDLE + 2 * self._latest:
                    raise _BadFrame(f"{FILE} sent {idle} answers that nobody waits for")
                if count % FRAMES == 0 or len(data) > OUTPUT:
                    await asyncio.sleep(0)  # to read what is there already gives up no turn
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except _BadFrame as error:
            reason = str(error)
        self._lose(reason)

    async def _notice_exit(self) -> None:
        """Wait for the end of the process itself: processes that it forked may keep its connection
        open, and what they do is no answer.
        """
        await self._process.wait()
        await asyncio.sleep(LAST_S)  # what it sent before is most often still to be read
        self._lose(_DIED)

    def _lose(self, reason: str) -> None:
        if not self.ended:
            self.kill(reason)
            self._on_lost(self, reason)

    def _receive(self, number: int, call: _Call, kind: Kind, answer: Any) -> bool:
        """Take an answer; say whether it is one that the call can have."""
        match kind:
            case Kind.DONE:
                self._finish(number, (kind, answer))
            case Kind.FAILED:
                self._finish(number, _failed(call.what, redacted(answer[:MESSAGE])))
            case Kind.HEARD if call.abandoned and not call.acknowledged:
                call.acknowledged = True
                self._update_responsive()
            case Kind.BEGUN | Kind.HEAD | Kind.PART if call.what == What.HANDLE:
                call.active = self._now()
                if call.abandoned:
                    if not call.timer:
                        self._watch(call)
                elif kind != Kind.BEGUN:
                    call.answers.put_nowait((kind, answer))
            case _:
                return False
        return True

    async def _pass_on_output(self) -> None:
        """Log what the user's code prints, a line at a time and without secrets."""
        output = _Output(self._now())
        told = self._now() - TOLD_S
        while data := await self._output.read(OUTPUT):
            for number, line in enumerate(output.lines(data, self._now())):
                self._log(line)
                if number % 8 == 7:
                    await asyncio.sleep(0)
            if output.dropped and self._now() - told > TOLD_S:
                told = self._now()
                self._tell_dropped(output)
            # To read what is there already gives up no turn of the event loop.
            await asyncio.sleep(SLOWED_S if output.dropping else 0)
        if line := output.rest():
            self._log(line)
        self._tell_dropped(output)

    def _log(self, line: str) -> None:
        # No template: by one, different lines would count as repetitions of the first.
        log.info(redacted(f"{self._name}: {line}"))

    def _tell_dropped(self, output: "_Output") -> None:
        if output.dropped:
            text = f"{self._name} printed {output.dropped} lines more than are logged of it"
            log.warning(text)
            output.dropped = 0


class _Output:
    """What a process prints, in lines; as many as PRINTED_S and BURST allow.

    now: seconds, of the clock that lines() is told.
    """

    def __init__(self, now: float) -> None:
        self.dropped = 0
        """Lines that were left out."""
        self._left, self._since = float(BURST), now
        self._line, self._size = b"", 0  # what has no end yet: its beginning, all of its bytes
        self._skips = False  # the rest of a line of which the beginning was left out

    @property
    def dropping(self) -> bool:
        """Whether what comes now is left out."""
        return self._left < 1 or self._skips or self._size > LINE

    def lines(self, data: bytes, now: float) -> Iterator[str]:
        """The lines that end in this, each at most LINE bytes."""
        self._left = min(BURST, self._left + (now - self._since) * PRINTED_S)
        self._since = now
        at = 0
        while self._left >= 1 and (end := data.find(b"\n", at)) >= 0:
            self._add(data[at:end])
            at = end + 1
            if self._skips:
                self.dropped += 1
                self._skips = False
            else:
                self._left -= max(1.0, len(self._line) / 1024)
                yield self.rest()
        rest = data[at:]
        if self._left >= 1:
            self._add(rest)
        elif rest:  # in one go, however many lines it has
            self.dropped += rest.count(b"\n")
            self._skips = not rest.endswith(b"\n")
            self._line, self._size = b"", 0

    def rest(self) -> str:
        """The line that has begun, which is then over."""
        line, size, self._line, self._size = self._line, self._size, b"", 0
        if size <= LINE:
            return line.decode(errors="replace").rstrip()
        # A secret that is cut does not look like one: the last word goes.
        whole, _, word = line.rpartition(b" ")
        kept = whole if len(word) < 1024 else line[:-1024]
        return f"{kept.decode(errors='replace')} … ({size - len(kept)} bytes more)"

    def _add(self, piece: bytes) -> None:
        if not self._skips:
            self._line += piece[: LINE - len(self._line)]
            self._size += len(piece)


class _BadFrame(Exception):
    """A frame that is not of handlers/custom.py's format. The message says why."""


_FORMATTED = msgspec.msgpack.Decoder(
    tuple[Annotated[list[bytes], msgspec.Meta(max_length=AT_ONCE)], str | None]
)
_DATA: Mapping[Kind, msgspec.msgpack.Decoder[Any]] = {
    Kind.LOADED: msgspec.msgpack.Decoder(
        Annotated[list[Literal["input", "output", "handle"]], msgspec.Meta(max_length=3)]
    ),
    Kind.FAILED: msgspec.msgpack.Decoder(str),
    Kind.DONE: msgspec.msgpack.Decoder(bytes | None),
    Kind.BEGUN: msgspec.msgpack.Decoder(None),
    Kind.HEARD: msgspec.msgpack.Decoder(None),
    Kind.HEAD: msgspec.msgpack.Decoder(Head),
    Kind.PART: msgspec.msgpack.Decoder(bytes),
}
"""What the data of each kind is."""
_BIN32 = 0xC6
"""What bytes begin with in msgpack that have so many; four with their number follow."""
_WITH_DATA = (Kind.DONE, Kind.PART)
_MOST_IDLE = 1000

# What a frame begins with, in msgpack: an array of three, the call's number and the kind.
_HEAD = re.compile(
    rb"\x93(?P<call>[\x00-\x7f]|\xcc.|\xcd.{2}|\xce.{4}|\xcf.{8})"
    rb"(?P<kind>" + b"|".join(msgspec.msgpack.encode(kind) for kind in Kind) + rb")",
    re.DOTALL,
)
_LONGEST_HEAD = 17


def _decoded(kind: Kind, data: memoryview | bytes) -> Any:
    """Raises _BadFrame."""
    if isinstance(data, bytes):
        return data
    try:
        return _DATA[kind].decode(data)
    except msgspec.MsgspecError as error:
        raise _BadFrame(f"{FILE} sent what is no answer: {kind}: {error}") from None


_DIED = (
    f"the process of {FILE} ended; it may have run out of memory, which OPTION_FORMATTER_MEMORY "
    "limits"
)
_BLOCKED = (
    f"another call blocked the process of {FILE} for longer than it may, and the process was ended"
)


def _too_long(what: What, seconds: float) -> UserCodeFailed:
    option = "PREDICT" if what == What.HANDLE else "FORMATTER"
    reason = f"it took longer than {seconds:g} s; OPTION_{option}_TIMEOUT sets the limit"
    return _failed(what, reason)


def _failed(what: What, reason: str) -> UserCodeFailed:
    part = "handler" if what in (What.HANDLE, What.INIT) else "formatter"
    return UserCodeFailed(f"Custom {part} failed: {reason}")
