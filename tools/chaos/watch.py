# SPDX-License-Identifier: Apache-2.0
"""Whether /ping is answered in time under any load, measured from separate processes."""

import asyncio
import contextlib
import functools
import http.client
import json
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

PING_S = 1.0
"""That an answer of /ping may take. SageMaker's limit is 2 s."""


@dataclass
class Target:
    """The target of attacks. limit: file descriptors that its process may have. tls: how clients
    verify it, if it uses TLS. key: the key that it requires. answers: further statuses that attacks
    may get from it.

    pings: seconds of each /ping. slowest: the longest of them, and the time of its answer.
    failures: missing answers of /ping, and answers other than 200.
    """

    name: str
    port: int
    limit: int
    pings: list[float] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    failures: list[str] = field(default_factory=list)
    tls: ssl.SSLContext | None = None
    key: str = ""
    answers: frozenset[int] = frozenset()


async def watch(target: Target) -> None:
    """Ask for /ping, until this is cancelled.

    This runs in a separate process, so that delays of the attackers do not count.
    """
    kind = "https" if target.tls else "http"
    command = (sys.executable, "-m", __name__, "ping", kind, str(target.port))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout
    try:
        async for line in process.stdout:
            took, failure = json.loads(line)
            target.pings.append(took)
            if took > target.slowest[0]:
                target.slowest = took, time.strftime("%H:%M:%S")
            if failure:
                target.failures.append(failure)
    finally:
        process.kill()
        await process.wait()


def ping(kind: str, port: int) -> None:
    """Ask for /ping four times a second, each time on a new connection. Prints the seconds that
    each took, and its fault.
    """
    connecting: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
    if kind == "https":
        trusting = ssl._create_unverified_context()  # only the time is measured, not who answers
        connecting = functools.partial(http.client.HTTPSConnection, context=trusting)
    while True:
        time.sleep(0.25)
        failure = ""
        began = time.monotonic()
        connection = connecting("127.0.0.1", port, timeout=8 * PING_S)
        try:
            connection.request("GET", "/ping")
            answer = connection.getresponse()
            body = answer.read()
            if answer.status != 200:
                failure = f"{answer.status} {body[:100]!r}"
        except (OSError, http.client.HTTPException) as error:
            failure = repr(error)
        finally:
            connection.close()
        print(json.dumps([time.monotonic() - began, failure]), flush=True)


def pings(targets: list[Target], bystander: Target) -> tuple[str, list[str]]:
    """The answers of /ping as a table, and their faults.

    bystander: a process that only answers. Its time is the delay of the machine, which has fewer
    CPUs than there are processes here.
    """
    lines = [f"{'/ping':12}{'asked':>10}{'median ms':>12}{'worst ms':>12}{'failed':>10}"]
    problems = []
    allowed = PING_S + bystander.slowest[0]
    for it in (*targets, bystander):
        took = sorted(it.pings)
        median, worst = took[len(took) // 2], took[-1]
        cells = f"{len(took):>10}{1000 * median:>12.0f}{1000 * worst:>12.0f}"
        lines.append(f"{it.name:12}{cells}{len(it.failures):>10}")
        if worst > allowed:
            problems.append(f"/ping of {it.name} took {worst:.1f} s, until {it.slowest[1]}")
        if it.failures:
            told = f"{len(it.failures)} times: {it.failures[0]}"
            problems.append(f"/ping of {it.name} was not answered with 200 {told}")
    return "\n".join(lines), problems


async def answer_only(port: int) -> None:
    """Answer whatever is asked with 200, and do nothing else."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["ping", kind, port]:
            ping(kind, int(port))
        case ["answer", port]:
            asyncio.run(answer_only(int(port)))
