# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy with a limit on bytes per second, for tests and benchmarks.

As a program: `slow_link.py PORT BYTES_PER_SECOND OWN_PORT`.
"""

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future

PIECE = 64 * 1024


@contextlib.contextmanager
def slow_link(port: int, bytes_per_second: float, own: int = 0) -> Iterator[int]:
    """A port that leads to `port`, both on this machine. All connections share the limit.

    own: its number, or None for a free port.
    """
    opened: Future[int] = Future()
    loop, done = asyncio.new_event_loop(), asyncio.Event()

    def run() -> None:
        # Sockets, not asyncio's streams: its server loses a connection that comes as it is closed,
        # and those that have something to send.
        with (
            contextlib.ExitStack() as sockets,
            asyncio.Runner(loop_factory=lambda: loop) as runner,
        ):
            runner.run(_Link(port, bytes_per_second, sockets).serve(own, opened, done))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield opened.result()
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()


class _Link:
    def __init__(self, port: int, rate: float, sockets: contextlib.ExitStack) -> None:
        self._port = port
        self._rate = rate
        self._sockets = sockets
        self._free_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def serve(self, own: int, opened: "Future[int]", done: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        listening = self._own(socket.create_server(("127.0.0.1", own)))
        loop.add_reader(listening, self._accept, listening)
        opened.set_result(listening.getsockname()[1])
        await done.wait()
        loop.remove_reader(listening)

    def _own(self, sock: socket.socket) -> socket.socket:
        sock.setblocking(False)
        return self._sockets.enter_context(sock)

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it has left
            client = self._own(listening.accept()[0])
            self._tasks.append(asyncio.create_task(self._connected(client)))

    async def _connected(self, client: socket.socket) -> None:
        with client, self._own(socket.socket()) as back, contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_connect(back, ("127.0.0.1", self._port))
            try:
                async with asyncio.TaskGroup() as ways:
                    ways.create_task(self._passed(client, back))
                    ways.create_task(self._passed(back, client))
            except* OSError:
                pass

    async def _passed(self, source: socket.socket, target: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(source, PIECE):
            self._free_at = max(self._free_at, loop.time()) + len(data) / self._rate
            await asyncio.sleep(self._free_at - loop.time())
            await loop.sock_sendall(target, data)
        target.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    with slow_link(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])):
        signal.pause()
