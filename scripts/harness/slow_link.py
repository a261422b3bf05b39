# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy that lets only so many bytes through in a second, for tests and benchmarks.

As a program: `slow_link.py PORT BYTES_PER_SECOND OWN_PORT`.
"""

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future

PIECE = 64 * 1024


@contextlib.contextmanager
def slow_link(port: int, bytes_per_second: float, own: int = 0) -> Iterator[int]:
    """A port that leads to `port`, both on this machine; all connections share the limit.

    own: its number, where that matters.
    """
    opened: Future[int] = Future()
    loop = asyncio.new_event_loop()
    done = asyncio.Event()

    async def serve() -> None:
        link = _Link(port, bytes_per_second)
        server = await asyncio.start_server(link.connected, "127.0.0.1", own)
        opened.set_result(server.sockets[0].getsockname()[1])
        await done.wait()
        server.close()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield opened.result()
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()


class _Link:
    def __init__(self, port: int, bytes_per_second: float) -> None:
        self._port = port
        self._rate = bytes_per_second
        self._free_at = 0.0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):  # the end of the link
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
            await asyncio.gather(self._passed(reader, back), self._passed(there, writer))
        writer.close()

    async def _passed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        now = asyncio.get_running_loop().time
        try:
            while data := await reader.read(PIECE):
                self._free_at = max(self._free_at, now()) + len(data) / self._rate
                await asyncio.sleep(self._free_at - now())
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()


if __name__ == "__main__":
    with slow_link(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])):
        signal.pause()
