# SPDX-License-Identifier: Apache-2.0
"""A folder's model.py, which runs in a separate process (handlers/custom.py).

A call is cancelled when it takes too long, its client disconnects or the server drains. It must end
after its cancellation. If it does not, a new process replaces its process:

- If the process has acknowledged the cancellation, its other calls still run. The process retires:
  it gets no new calls, and is killed after its last call, or when another process retires.
- If the process has not acknowledged it, a call blocks the event loop and so every other call. The
  process is killed. Calls that it had not begun go to the new process.

So there are at most three processes: one that is called, one that starts and one that retires. If a
process ends by itself, because it ran out of memory for example, the next call starts another.
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
from dataclasses import dataclass
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
"""Limit for loading a file, which may import large libraries."""
INITIAL_S = 1200.0
"""Limit for the initialising call, which may load a model. LMI has the same limit."""
GONE_S = 1.0  # until a killed process has ended
LAST_S = 0.2  # to read the last output of an ended process, if its connection stays open
GRACE_S = 5.0
"""Time that a cancelled call has to end if it took too long; at most a third of its limit."""
LEFT_S = 30.0
"""Time that a cancelled call has to end if only its client disconnected. An `async def handle`
often blocks while it computes, which is no reason to load its model again.
"""
LOSSES = 3
"""The model cannot be served once as many processes were lost without an answer between them."""
RETRY_S = 5.0  # between tries to start a process for a model that cannot be served without it
MESSAGE = 4096  # characters of an error message
LONGEST_FRAME = 256 * 1024**2
"""Most bytes in a frame from adapters' code."""
LONGEST_NOTE = 1024**2
"""Most bytes in a frame without data: any kind but DONE and PART, or of a call that has ended."""
AT_ONCE = 16
"""Events of a stream that a formatter gets in one call."""
FRAMES = 64
"""Frames that are read before the event loop may run other tasks."""
OUTPUT = 64 * 1024
"""Bytes that are read at a time from a process's output."""
PRINTED_S, BURST = 200, 1000
"""Lines of a process that are logged per second, and in a burst. A longer line counts per KiB."""
LINE = 8 * 1024
"""Bytes of a line that are logged."""
TOLD_S = 10.0
"""Seconds between two log lines that give the number of omitted lines."""
SLOWED_S = 0.01
"""Seconds between two reads of output that is not logged. The process waits, not the event loop."""


LONGEST = 1024 * 1024
"""Bytes of an adapter's model.py, which is parsed when the adapter is registered."""
_NO_CODE = (
    f"it has a {FILE}, and its answers would be others without it; OPTION_ADAPTER_CODE=true lets "
    "adapters run code"
)


def faults_of_adapter(checkpoint: Checkpoint, may_run: bool) -> list[str]:
    """Check an adapter's model.py, if it has one, without running it. Returns its faults.

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
    """The limits of a model.py, in seconds and bytes."""

    formatter_s: float
    """For one call of a formatter."""
    handler_s: float
    """Between two parts of a custom handler's answer."""
    memory: int
    """The memory of its process; 0 for no limit."""
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
    """Start the folder's model.py. Returns None without one, or if it has no function that we call.

    tokenizer: the folder of the model whose tokenizer formatters get. properties: the model's
    properties, which a custom handler gets. of_adapter: run it without the server's rights and
    secrets. in_front: an `async def handle` runs before the engine, even if its initialising call
    fails. Raises UserCodeFailed.
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

    functions: the names that it defines among `input`, `output` and `handle`. Calls raise
    UserCodeFailed. The parameters are those of start_user_code().
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
        # LMI's model.py files find their neighbouring files by this property.
        self._properties = {**(properties or {}), "model_dir": str(folder)}
        self._initial = Initial.TRIED if in_front else Initial.NEEDED
        self._user = isolation.take_user() if of_adapter else None
        self._scratch: str | None = None
        """The folder that an adapter's code may write to if it runs as a separate user."""
        # Its processes
        self._process: _Process | None = None
        self._retiring: _Process | None = None
        self._starting: asyncio.Task[_Process] | None = None
        self._retry: asyncio.TimerHandle | None = None
        # Their failures
        self._losses = 0  # processes lost since the last answer
        self._fault: str | None = None  # why the last start failed
        self._stopped = False
        self.functions: frozenset[str] = frozenset()
        self.alone = False
        """Whether the custom handler has its own engine, so that ours is not needed."""

    @property
    def failure(self) -> str | None:
        """The reason why the model cannot be served now, in a sentence, or None."""
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
        """Load the file. Raises UserCodeFailed if it cannot be loaded."""
        process = await self._ready_process()
        self.functions, self.alone = process.functions, process.alone

    async def format_request(self, body: bytes, content_type: str) -> bytes:
        """Return the JSON request that the input formatter makes of the body.

        content_type: the client's. The body is JSON, unless only a formatter can read it.
        """
        return await self._format(What.INPUT, (body, content_type))

    async def format_answer(self, answer: bytes) -> bytes:
        """Return the output formatter's version of the engine's JSON answer."""
        return await self._format(What.WHOLE, answer)

    async def format_events(self, events: list[bytes]) -> tuple[list[bytes], UserCodeFailed | None]:
        """Format events of the engine's stream one by one.

        Returns the formatted events, and the failure if the formatter did not format all of them.
        Each event has the time limit of one call.
        """
        answer = await self._format(What.CHUNKS, events, len(events))
        try:
            done, fault = _FORMATTED.decode(answer)
        except msgspec.MsgspecError as error:
            raise _failed(What.CHUNKS, f"it sent an invalid answer: {error}") from None
        return done, _failed(What.CHUNKS, redacted(fault[:MESSAGE])) if fault else None

    async def handle(
        self, headers: Mapping[str, str], body: bytes
    ) -> AsyncGenerator[tuple[Kind, Any], None]:
        """Yield the custom handler's answer: its head and its parts, or DONE with None.

        headers: the request's. A header that has the name of an option is not passed on.
        """
        own = {name.lower() for name in self._properties}
        kept = {
            name: value
            for name, value in headers.items()
            if name.lower() not in own and not names_option(name)
        }
        data = {**kept, **self._properties}, body
        limit = self._limits.handler_s
        for last in (False, True):  # a second process if the first does not begin the call
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
        """End its processes. No function can be called after that."""
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
        """calls: the number of calls of the user's function."""
        limit = calls * self._limits.formatter_s
        for last in (False, True):
            process = await self._ready_process()
            try:
                result = await process.ask(what, data, limit)
                self._losses = 0
                return result or b""
            except TimeoutError:
                raise _too_long(what, limit) from None
            except _NotBegun as error:
                if last:
                    raise _failed(what, str(error)) from None
        raise AssertionError

    async def _ready_process(self) -> "_Process":
        """Return a responsive process. A start continues if its request ends early."""
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
            await self._process.gone()  # a handler's process may have held GPU memory
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
            log.warning("%s: %s; it gets no initialising call any more", FILE, error)
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
        """Replace a process that has ended or retires."""
        if self._stopped or process is not self._process:
            return
        log.warning("a new process for %s: %s", self._folder / FILE, reason)
        self._losses += 1
        if not process.ended:
            if self._retiring:
                self._retiring.kill()
            self._retiring, self._process = process, None
        if self._losses < LOSSES:  # otherwise the next call starts a process
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

    Raises UserCodeFailed, and InitialCallFailed if the initialising call hung or ended the process.
    user: the id of the user that runs an adapter's code, 0 for our own user; None for the model's
    code. scratch: a separate folder for its temporary files, or None.
    """
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()  # asyncio's pipe cannot be closed while others write to it
    output = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    # uvloop closes the descriptor, and then the file (handles/handle.pyx). The second close would
    # hit a file that a thread has opened in between, since it gets the same number.
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
    """Raise the failure if the block takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise failure(f"{FILE} was not {participle} after {seconds:g} s") from None


class InitialCallFailed(UserCodeFailed):
    """The initialising call of a custom handler hung, or ended its process."""


class _NotBegun(Exception):
    """The process ended before it began the call. The message says why the process ended."""


_Take = Callable[[tuple[Kind, Any] | Exception], None]


@dataclass(eq=False, slots=True)
class _Call:
    """A call that a process has not answered yet."""

    what: What
    limit: float
    active: float | None
    """When it began, or its last part arrived; None while it has not begun."""
    take: _Take
    """Gets the parts of its answer, or the exception that ends it."""
    abandoned: bool = False
    """It is cancelled: the process was sent its cancellation."""
    acknowledged: bool = False
    """The process has read the cancellation."""
    timer: asyncio.TimerHandle | None = None

    @property
    def may_block(self) -> bool:
        """Whether this call may block the process, which then reads no messages."""
        return self.abandoned and self.active is not None and not self.acknowledged


class _Process:
    """A process that runs a model.py, and its calls.

    output, printed: its standard output, and the transport of it. name: its name in the log.
    longest_frame: the most bytes that it may send in a frame. on_lost: called with the reason when
    the process has ended or retires.
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
        self._unsent: list[bytes] = []
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
                raise _BadFrame(f"{FILE} sent an invalid answer: {kind} before it was loaded")
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
        """Send the properties, and make the custom handler's initialising call.

        Raises UserCodeFailed, and InitialCallFailed if the process ends.
        """
        try:
            result = await self.ask(What.INIT, (properties, initial), 0)
        except (_NotBegun, UserCodeFailed) as error:
            if not self.ended:
                raise
            raise InitialCallFailed(f"{error} while it was initialised") from None
        self.alone = result == b""
        if result:
            said = redacted(result.decode(errors="replace")[:MESSAGE])
            log.warning("%s: %s; vLLM starts, and gets what handle leaves to it", FILE, said)

    async def until_responsive(self) -> None:
        """Wait until no call may block the process, or the process has ended."""
        await self._responsive.wait()

    async def ask(self, what: What, data: Any, limit: float) -> bytes | None:
        """Call a function whose answer is one result. limit: seconds that it may take; 0 without a
        limit. Raises TimeoutError, _NotBegun and UserCodeFailed.
        """
        # asyncio.timeout() takes longer: streams call this for each token
        loop = asyncio.get_running_loop()
        result: asyncio.Future[tuple[Kind, Any] | Exception] = loop.create_future()

        def take(answer: tuple[Kind, Any] | Exception) -> None:
            if not result.done():
                result.set_result(answer)

        number = self._begin(what, data, limit, take)
        timer = loop.call_later(limit, take, TimeoutError()) if limit else None
        try:
            answer = await result
        finally:
            if timer:
                timer.cancel()
            self._leave(number)
        if isinstance(answer, Exception):
            raise answer
        found: bytes | None = answer[1]
        return found

    async def call(
        self, what: What, data: Any, limit: float
    ) -> AsyncGenerator[tuple[Kind, Any], None]:
        """Call a function whose answer has parts. Yields them; DONE is the last.

        limit: seconds that it may take, which the caller enforces. Raises _NotBegun and
        UserCodeFailed.
        """
        answers: asyncio.Queue[tuple[Kind, Any] | Exception] = asyncio.Queue()
        used = 0
        number = self._begin(what, data, limit, answers.put_nowait)
        try:
            while True:
                answer = await answers.get()
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
            self._leave(number)

    def _begin(self, what: What, data: Any, limit: float, take: _Take) -> int:
        """Begin a call. Returns its number, for _leave()."""
        if self.ended:
            raise _NotBegun(_DIED)
        self._latest = number = next(self._numbers)
        call = _Call(what, limit, None if what == What.HANDLE else self._now(), take)
        self._calls[number] = call
        self._send(number, what, data)
        return number

    def _leave(self, number: int) -> None:
        """Cancel a call that has not ended, as its caller no longer waits for it."""
        if not (call := self._calls.get(number)):
            return
        call.abandoned = True
        self._send(number, What.CANCEL, None)
        self._watch(call)
        self._end_if_retired()

    def kill(self, reason: str = "") -> None:
        """Kill the process. reason: for the callers that wait for an answer."""
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
        """Wait until the process has ended, but not for processes that it started."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GONE_S):
                await self._process.wait()
        # Processes that it started may hold its connection and its output open.
        await asyncio.wait(self._tasks, timeout=LAST_S)
        for task in (*self._tasks, self._exit):
            task.cancel()
        self._printed.close()

    def _send(self, number: int, what: What, data: Any) -> None:
        """Send a frame, together with the others of this iteration of the event loop."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._write)
        self._unsent.append(framed((number, what, data)))

    def _write(self) -> None:
        frames, self._unsent = self._unsent, []
        if not self.ended:
            self._writer.write(b"".join(frames))

    def _watch(self, call: _Call) -> None:
        """Start the timer of an abandoned call."""
        if call.active is None:  # it may begin before its cancellation is read
            return
        remaining = call.active + call.limit - self._now()
        seconds = max(min(GRACE_S, call.limit / 3), min(LEFT_S, remaining))
        loop = asyncio.get_running_loop()
        call.timer = loop.call_later(seconds, self._overdue, call)
        self._update_responsive()

    def _overdue(self, call: _Call) -> None:
        """Retire or kill the process, because an abandoned call did not end."""
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
        call.take(answer)
        if call.abandoned:
            self._update_responsive()
        self._end_if_retired()

    def _update_responsive(self) -> None:
        if self.ended or not any(call.may_block for call in self._calls.values()):
            self._responsive.set()
        else:
            self._responsive.clear()

    def _end_if_retired(self) -> None:
        """Kill a retired process whose calls are all abandoned."""
        if self._retires and not self.ended and all(it.abandoned for it in self._calls.values()):
            self.kill()

    async def _read_frame(self) -> tuple[int, Kind, memoryview | bytes]:
        """Read the next frame, whose content is not trusted. Returns its call, kind and data.

        The data are in msgpack, for _decoded(), or already the bytes themselves if they are large.
        No data are decoded before they are known to be expected: an empty list takes one byte
        here, and 56 as an object.

        Raises asyncio.IncompleteReadError or ConnectionError at the end, and _BadFrame.
        """
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if length > self._longest_frame:
            limit = self._longest_frame
            raise _BadFrame(f"{FILE} sent {length} bytes at once; {limit} are the limit")
        frame = await self._reader.readexactly(min(length, _LONGEST_HEAD + 5))
        head = _HEAD.match(frame)
        if not head:
            raise _BadFrame(f"{FILE} sent an invalid answer: it begins with {frame!r:.80}")
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
            raise _BadFrame(f"{FILE} sent an invalid answer: {length} bytes of {kind} are no bytes")
        return number, kind, await self._read_large(begun[5:], size)

    async def _read_large(self, begun: bytes, size: int) -> bytes:
        """Read `size` bytes that start with `begun`, a piece at a time and without a copy of them
        all, which would block the event loop.
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
                # A call that is cancelled as it ends sends at most two more answers.
                if idle > _MOST_IDLE + 2 * self._latest:
                    raise _BadFrame(f"{FILE} sent {idle} answers to no call")
                if count % FRAMES == 0 or len(data) > OUTPUT:
                    await asyncio.sleep(0)  # reading buffered data does not yield to other tasks
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except _BadFrame as error:
            reason = str(error)
        self._lose(reason)

    async def _notice_exit(self) -> None:
        """Wait for the end of the process itself. Processes that it forked may keep its connection
        open, but they do not answer its calls.
        """
        await self._process.wait()
        await asyncio.sleep(LAST_S)  # its last frames are usually still unread
        self._lose(_DIED)

    def _lose(self, reason: str) -> None:
        if not self.ended:
            self.kill(reason)
            self._on_lost(self, reason)

    def _receive(self, number: int, call: _Call, kind: Kind, answer: Any) -> bool:
        """Take an answer. Returns whether the call can have such an answer."""
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
                    call.take((kind, answer))
            case _:
                return False
        return True

    async def _pass_on_output(self) -> None:
        """Log the output of the user's code, a line at a time and without secrets."""
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
            # Reading buffered data does not yield to other tasks.
            await asyncio.sleep(SLOWED_S if output.dropping else 0)
        if line := output.rest():
            self._log(line)
        self._tell_dropped(output)

    def _log(self, line: str) -> None:
        # No template: different lines with one template would count as repetitions of the first.
        log.info(redacted(f"{self._name}: {line}"))

    def _tell_dropped(self, output: "_Output") -> None:
        if output.dropped:
            text = f"{self._name} printed {output.dropped} more lines, which are not logged"
            log.warning(text)
            output.dropped = 0


class _Output:
    """The output of a process in lines, at most as many as PRINTED_S and BURST allow.

    now: seconds, of the same clock as the `now` of lines().
    """

    def __init__(self, now: float) -> None:
        self.dropped = 0
        """Omitted lines."""
        self._left, self._since = float(BURST), now
        self._line, self._size = b"", 0  # the unfinished line: its first bytes, its full size
        self._skips = False  # whether to skip the rest of a line whose beginning was omitted

    @property
    def dropping(self) -> bool:
        """Whether the next output is omitted."""
        return self._left < 1 or self._skips or self._size > LINE

    def lines(self, data: bytes, now: float) -> Iterator[str]:
        """Yield the lines that end in these data, each with at most LINE bytes."""
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
        elif rest:  # counted at once, for any number of lines
            self.dropped += rest.count(b"\n")
            self._skips = not rest.endswith(b"\n")
            self._line, self._size = b"", 0

    def rest(self) -> str:
        """Return the unfinished line, and clear it."""
        line, size, self._line, self._size = self._line, self._size, b"", 0
        if size <= LINE:
            return line.decode(errors="replace").rstrip()
        # Redaction does not recognise part of a secret, so the last word is cut off.
        whole, _, word = line.rpartition(b" ")
        kept = whole if len(word) < 1024 else line[:-1024]
        return f"{kept.decode(errors='replace')} … ({size - len(kept)} bytes more)"

    def _add(self, piece: bytes) -> None:
        if not self._skips:
            self._line += piece[: LINE - len(self._line)]
            self._size += len(piece)


class _BadFrame(Exception):
    """A frame is not in the format of handlers/custom.py. The message says why."""


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
"""Each kind of frame → the decoder of its data."""
_BIN32 = 0xC6
"""The first byte of long bytes in msgpack. Four bytes with their length follow."""
_WITH_DATA = (Kind.DONE, Kind.PART)
_MOST_IDLE = 1000

# The beginning of a frame in msgpack: an array of three, the call's number and the kind.
_HEAD = re.compile(
    rb"\x93(?P<call>[\x00-\x7f]|\xcc.|\xcd.{2}|\xce.{4}|\xcf.{8})"
    rb"(?P<kind>" + b"|".join(msgspec.msgpack.encode(kind) for kind in Kind) + rb")",
    re.DOTALL,
)
_LONGEST_HEAD = 17


def _decoded(kind: Kind, data: memoryview | bytes) -> Any:
    """Return the data of a frame. Raises _BadFrame."""
    if isinstance(data, bytes):
        return data
    try:
        return _DATA[kind].decode(data)
    except msgspec.MsgspecError as error:
        raise _BadFrame(f"{FILE} sent an invalid answer: {kind}: {error}") from None


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
