# SPDX-License-Identifier: Apache-2.0
"""Processes that tokenise requests, so that one that hangs or grows can be ended.

Chat templates are programs: no limit holds in the process that runs one. A parent loads the
tokenizer once and forks the workers. The kernel ends a worker that takes too long over a request or
wants too much memory, whatever it is doing, and the parent forks another in its place.

Wire format: 4 bytes with the length of the rest, then the rest. A request is a msgpack array of
path, content type and body; its answer is the prompt's tokens as 32-bit integers, or empty. A new
worker sends an empty answer first: at the start that says that it is ready, later it answers the
request that its predecessor was ended over. If the tokenizer cannot be loaded, the reason comes
instead.
"""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import struct
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec

from serving.process import end_with_parent
from serving.protocol import CHAT_COMPLETIONS
from serving.router.kv.tokenizer import Tokenizer

log = logging.getLogger(__name__)

WORKERS = 2
LARGEST = 1024**2
"""Bytes of a body that is tokenised."""
LONGEST = 32
"""Requests that wait for a worker."""
WAIT_S = 0.1
"""Seconds that a request waits for its tokens, plus its size divided by BYTES_PER_S."""
BYTES_PER_S = 1_000_000
"""A rate that slow cores reach under other load; idle cores are five times as fast."""
RUNAWAY_S, RUNAWAY_WALL_S = 3, 30
"""Limits for one request, after which its worker is ended: seconds of CPU time, which do not depend
on the machine's load, and seconds of wall time, for a worker that waits.
"""
MEMORY = 512 * 1024**2
"""Bytes that a worker may take beyond what the tokenizer has; 1 MiB of text takes half of it."""
FIRST_S, LONGEST_S = 1.0, 60.0
"""Before the processes are started again, at first and at most."""

# What the process is given of the environment: no secrets. Models' own code is kept below HF_HOME.
_ENVIRON = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR", "HF_HOME")
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
# Signals that end a worker only because of its request: timers, or lack of memory in a library.
_OVER_ITS_REQUEST = (
    *(signal.SIGPROF, signal.SIGALRM),
    *(signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS),
)

_FIRST = msgspec.msgpack.encode(
    (CHAT_COMPLETIONS, "", b'{"messages": [{"role": "user", "content": "a"}]}')
)
LONGEST_ANSWER = 16 * 2**20
"""Bytes of one: four for each token, of a body of at most LARGEST."""
_LENGTH = struct.Struct("<I")
_Worker = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class CannotLoad(Exception):
    """The folder has no tokenizer that can be used. The message says why."""


class TokenWorkers:
    """The processes, as the event loop sees them."""

    def __init__(self) -> None:
        self._free: asyncio.Queue[_Worker] = asyncio.Queue()
        self._waiting = 0
        self._asking: set[asyncio.Task[bytes]] = set()
        self.ready = asyncio.Event()
        """Set while they take requests."""
        self.process: asyncio.subprocess.Process | None = None
        """The workers' parent."""

    async def run(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        """Keep the processes running until cancelled. folder: what tokenizer.fetch() has brought.
        Raises CannotLoad.
        """
        wait = FIRST_S
        while True:
            began = time.monotonic()
            await self._run_once(folder, trust_remote_code)
            if time.monotonic() - began > LONGEST_S:
                wait = FIRST_S
            log.warning("the tokenizer's processes ended, and are started again in %g s", wait)
            await asyncio.sleep(wait)
            wait = min(wait * 2, LONGEST_S)

    async def tokens(self, path: str, body: bytes, content_type: str) -> Sequence[int] | None:
        """The tokens of a request's prompt, or None if they are uncertain.

        Raises TimeoutError if it would take too long.
        """
        if not self.ready.is_set() or len(body) > LARGEST or self._waiting >= LONGEST:
            return None
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_S + len(body) / BYTES_PER_S):
                worker = await self._free.get()
                request = _framed(msgspec.msgpack.encode((path, content_type, body)))
                task = asyncio.create_task(_ask(worker, request, self._free))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)
                answer = await asyncio.shield(task)  # it stays busy with it, whoever waits
        finally:
            self._waiting -= 1
        tokens = array("i")
        tokens.frombytes(answer)
        return tokens or None

    async def _run_once(self, folder: Path, trust_remote_code: bool) -> None:
        pairs = [socket.socketpair() for _ in range(WORKERS)]
        descriptors = [worker_end.fileno() for _, worker_end in pairs]
        self.process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__),
            *(str(folder), "trusted" if trust_remote_code else "", *map(str, descriptors)),
            pass_fds=descriptors,
            cwd=Path(__file__).parents[3],
            env={name: os.environ[name] for name in _ENVIRON if name in os.environ} | _OFFLINE,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,  # tracebacks may repeat prompts
        )
        workers: list[_Worker] = []
        try:
            for own_end, worker_end in pairs:
                worker_end.close()
                workers.append(await asyncio.open_connection(sock=own_end))
            with contextlib.suppress(asyncio.IncompleteReadError):
                for reader, _ in workers:
                    if failure := await _frame(reader):
                        raise CannotLoad(failure.decode())
                self._free = asyncio.Queue()
                for worker in workers:
                    self._free.put_nowait(worker)
                self.ready.set()
            await process.wait()
        finally:
            self.ready.clear()
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # its workers end with it
            for _, writer in workers:
                writer.close()
            await process.wait()


async def _ask(worker: _Worker, request: bytes, free: asyncio.Queue[_Worker]) -> bytes:
    """A worker's answer; then it is free again."""
    reader, writer = worker
    try:
        writer.write(request)
        await writer.drain()
        answer = await _frame(reader)
    except (OSError, EOFError):  # the processes have ended, or it is of no use
        return b""
    free.put_nowait(worker)
    return answer


def _framed(content: bytes) -> bytes:
    return _LENGTH.pack(len(content)) + content


async def _frame(reader: asyncio.StreamReader) -> bytes:
    """Raises OSError if a worker announces more bytes than an answer can have."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > LONGEST_ANSWER:
        raise OSError(f"a tokenizer's answer has {length} bytes")
    return await reader.readexactly(length)


# The processes' side


def main(folder: str, trusted: str, *connections: str) -> None:
    """Load the tokenizer, and fork workers until one ends that is not to be replaced."""
    end_with_parent(signal.SIGKILL)
    sockets = [socket.socket(fileno=int(descriptor)) for descriptor in connections]
    if not trusted:  # a model's own code may need torch
        # Otherwise transformers would import it, which takes seconds and hundreds of megabytes.
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        tokenizer = Tokenizer.load(Path(folder), trust_remote_code=bool(trusted))
    except Exception as error:  # of transformers, or of code that came with the model
        sockets[0].sendall(_framed(str(error).encode() or b"it cannot be loaded"))
        return
    _answer(tokenizer, _FIRST)  # loads and compiles now, instead of at each worker's first request
    gc.freeze()  # else the collector's marks would copy memory that workers share
    workers = {_fork(tokenizer, connection): connection for connection in sockets}
    while True:
        number, status = os.wait()
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) not in _OVER_ITS_REQUEST:
            return
        connection = workers.pop(number)
        workers[_fork(tokenizer, connection)] = connection


def _fork(tokenizer: Tokenizer, connection: socket.socket) -> int:
    parent = os.getpid()
    number = os.fork()
    if not number:
        try:
            end_with_parent(signal.SIGKILL, parent)
            _limit_memory()
            _work(tokenizer, connection)
        finally:
            os._exit(0)
    return number


def _work(tokenizer: Tokenizer, connection: socket.socket) -> None:
    """Answer requests until the router has gone."""
    for timer in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(timer, signal.SIG_DFL)  # the kernel's: Python's could not interrupt C
    with connection.makefile("rb") as reader:
        connection.sendall(_framed(b""))
        while length := reader.read(_LENGTH.size):
            content = reader.read(_LENGTH.unpack(length)[0])
            signal.setitimer(signal.ITIMER_PROF, RUNAWAY_S)
            signal.alarm(RUNAWAY_WALL_S)
            answer = _answer(tokenizer, content)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
            connection.sendall(answer)


def _answer(tokenizer: Tokenizer, content: bytes) -> bytes:
    try:
        path, content_type, body = msgspec.msgpack.decode(content)
        return _framed(array("i", tokenizer.tokens(path, body, content_type) or ()).tobytes())
    except Exception:
        # Templates and tokenizers are code that came with the model, and may want more memory than
        # there is. Their messages can repeat the prompt, so they are not logged.
        return _framed(b"")


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it would have prompts in it


if __name__ == "__main__":
    main(*sys.argv[1:])
