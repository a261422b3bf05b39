# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the daemon of HyperPod's tiered storage, `ai-toolkit`, which runs on each node.

    PUT  /v1/kv/{bucket}/{key}                               200; 409 it is there; 507 no room
    POST /v1/kv/{bucket}/{key}/leases?timeout_ms=&ttl_s=     200 {"id", "offsets": [{"offset",
                                                             "len"}]}; 504 it is not there
    POST /v1/leases/{id}/release                             200; 404 no such lease
    GET  /stats                                              ours alone: its contents and counts

An object's pieces are in the shared memory segment, at the places in a lease. An object with a
lease stays; the least recently used of the other objects make room. A daemon that starts again has
a new, empty segment. Written from LMCache's public client (LMCache 0.5.6,
`l2_adapters/sagemaker_hyperpod_client.py`); the daemon itself is not public.

As a program: `python -m tests.support.harness.tiered_storage PORT [--segment FILE] [--mib SIZE]`.
SIGUSR1 makes it lie about the places of pieces, or stop lying.
"""

import argparse
import asyncio
import contextlib
import itertools
import mmap
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from aiohttp import web

SEGMENT = Path("/dev/shm/ai_toolkit_cache")
PIECE = 256 << 10
"""The size of an object's pieces in bytes."""
Pieces = list[dict[str, Any]]
"""The offset of each page of an object, in bytes."""


def misplaced(lease: dict[str, Any]) -> dict[str, Any]:
    """A lease that swaps the places of its pieces."""
    pieces = [{**it, "offset": abs(it["offset"] - PIECE)} for it in lease["offsets"]]
    return {**lease, "offsets": pieces}


def honest(lease: dict[str, Any]) -> dict[str, Any]:
    return lease


class _Object:
    def __init__(self, size: int, pages: list[int]) -> None:
        self.size = size
        self.pages = pages
        self.leases: dict[str, float] = {}  # id → when it ends
        self.used = time.monotonic()

    def pinned(self) -> bool:
        return any(ends > time.monotonic() for ends in self.leases.values())

    def pieces(self) -> Pieces:
        sizes = (min(PIECE, self.size - PIECE * n) for n in range(len(self.pages)))
        return [{"offset": p * PIECE, "len": n} for p, n in zip(self.pages, sizes, strict=True)]


class Daemon:
    """The daemon's objects, and its API.

    size: bytes of the segment. miss_s: time to look for a missing object. answered: may change the
    answer to a lease, for tests of a client's checks.
    """

    def __init__(self, segment: Path = SEGMENT, size: int = 64 << 20, miss_s: float = 0) -> None:
        self.segment = segment
        self.port = 0
        self.miss_s = miss_s
        self.answered: Callable[[dict[str, Any]], object] = honest
        self.counts: Counter[str] = Counter()
        self._objects: dict[tuple[str, str], _Object] = {}
        self._leases: dict[str, _Object] = {}
        self._ids = itertools.count(1)
        segment.unlink(missing_ok=True)
        with segment.open("w+b") as file:
            file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        self._free = list(range(size // PIECE))

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_put("/v1/kv/{bucket}/{key}", self._put)
        app.router.add_post("/v1/kv/{bucket}/{key}/leases", self._lease)
        app.router.add_post("/v1/leases/{id}/release", self._release)
        app.router.add_get("/stats", self._stats)
        return app

    async def _put(self, request: web.Request) -> web.Response:
        name = request.match_info["bucket"], request.match_info["key"]
        content = await request.read()
        if name in self._objects:
            self.counts["conflicts"] += 1
            return web.Response(status=409)
        pages = self._room(-(-len(content) // PIECE))
        if pages is None:
            self.counts["refused"] += 1
            return web.Response(status=507)
        found = self._objects[name] = _Object(len(content), pages)
        start = 0
        for piece in found.pieces():
            end = start + piece["len"]
            self._memory[piece["offset"] : piece["offset"] + piece["len"]] = content[start:end]
            start = end
        self.counts["stored"] += 1
        self.counts["bytes"] += len(content)
        return web.Response()

    def _room(self, count: int) -> list[int] | None:
        """Free pages, or None if there are too few."""
        unused = sorted((it.used, name) for name, it in self._objects.items() if not it.pinned())
        for _, name in unused:
            if len(self._free) >= count:
                break
            self._free += self._objects.pop(name).pages
            self.counts["evicted"] += 1
        if len(self._free) < count:
            return None
        pages, self._free = self._free[:count], self._free[count:]
        return pages

    async def _lease(self, request: web.Request) -> web.Response:
        found = self._objects.get((request.match_info["bucket"], request.match_info["key"]))
        if found is None:
            self.counts["misses"] += 1
            await asyncio.sleep(min(self.miss_s, float(request.query["timeout_ms"]) / 1000))
            return web.Response(status=504)
        lease = f"lease-{next(self._ids)}"
        found.used = time.monotonic()
        found.leases[lease] = found.used + float(request.query["ttl_s"])
        self._leases[lease] = found
        self.counts["leased"] += 1
        return web.json_response(self.answered({"id": lease, "offsets": found.pieces()}))

    async def _release(self, request: web.Request) -> web.Response:
        lease = request.match_info["id"]
        if found := self._leases.pop(lease, None):
            del found.leases[lease]
            self.counts["released"] += 1
        return web.Response(status=200 if found else 404)

    async def _stats(self, _: web.Request) -> web.Response:
        return web.json_response({"objects": len(self._objects), **self.counts})


async def _serve(daemon: Daemon, port: int, opened: "Future[int]", stop: asyncio.Event) -> None:
    runner = web.AppRunner(daemon.app())
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        opened.set_result(runner.addresses[0][1])
        await stop.wait()
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def running(daemon: Daemon, port: int = 0) -> Iterator[int]:
    """Run the daemon on this machine. Yields its port. Its segment ends with it."""
    opened: Future[int] = Future()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            try:
                runner.run(_serve(daemon, port, opened, stop))
            except OSError as error:
                opened.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        daemon.port = opened.result()
        yield daemon.port
    finally:
        with contextlib.suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(stop.set)
        thread.join()
        daemon.segment.unlink(missing_ok=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("port", type=int)
    parser.add_argument("--segment", type=Path, default=SEGMENT)
    parser.add_argument("--mib", type=int, default=256)
    options = parser.parse_args()
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    daemon = Daemon(options.segment, options.mib << 20)
    with running(daemon, options.port):
        while signal.sigwait(signals) == signal.SIGUSR1:
            daemon.answered = misplaced if daemon.answered is honest else honest
