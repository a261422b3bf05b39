# SPDX-License-Identifier: Apache-2.0
"""A server with the fake engine, or a router, without Python's garbage collector.

`python -m tests.serving.garbage serve` or `… route REPLICA` sends requests of many kinds, and
prints as JSON how many objects each kind of request has left in cycles.
"""

import collections
import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
import time

import uvloop

from lmi_config.options import settings
from serving.http.sockets import bound
from serving.router.router import Router
from serving.server.server import Server
from serving.server.startup import Runtime
from tests.fake_engine import FakeEngine

TIMES = 5
SETTLED_S = 0.1


def post(path: str, body: bytes, *headers: str) -> bytes:
    head = (
        f"POST {path} HTTP/1.1",
        *("host: a", "connection: close", "content-type: application/json"),
        f"content-length: {len(body)}",
        *headers,
    )
    return "\r\n".join((*head, "", "")).encode() + body


COMPLETION = b'{"prompt": "a b", "max_tokens": 2}'
STREAM = b'{"prompt": "a b", "max_tokens": 2, "stream": true}'
REQUESTS = {
    "ping": b"GET /ping HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
    "completion": post("/v1/completions", COMPLETION),
    "stream": post("/v1/completions", STREAM),
    "LMI": post("/invocations", b'{"inputs": "a b"}'),
    "LMI stream": post("/invocations", b'{"inputs": "a b", "stream": true}'),
    "chat": post("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}]}'),
    "unknown model": post("/v1/completions", b'{"model": "other", "prompt": "a"}'),
    "invalid JSON": post("/invocations", b'{"inputs": '),
    "unknown path": post("/nothing", b"{}"),
    "invalid HTTP": b"\x00garbage\r\n\r\n",
    "long head": b"GET /ping HTTP/1.1\r\na: " + b"b" * 100_000 + b"\r\n\r\n",
    "other host": post("/v1/completions", COMPLETION, "origin: http://other.example"),
}


def send(port: int, data: bytes, *, leaves: bool) -> None:
    """Send a request on a separate connection. leaves: do not wait for the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(data)
        with contextlib.suppress(OSError):
            while not leaves and connection.recv(65536):
                pass


def collected() -> dict[str, int]:
    """Run the collector, and count the collected objects by their types."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    found = collections.Counter(type(it).__qualname__ for it in gc.garbage)
    gc.set_debug(0)
    gc.garbage.clear()
    gc.collect()
    return dict(found)


def ask(port: int) -> None:
    left = {}
    for warming in (True, False):
        gc.collect()
        gc.freeze()  # a collection looks only at what is made from now on
        for leaves in (False, True):
            for name, data in REQUESTS.items():
                for _ in range(TIMES):
                    send(port, data[:-5] if leaves else data, leaves=leaves)
                time.sleep(SETTLED_S)
                found = collected()
                # Single objects come from elsewhere, such as the server's own tasks.
                many = {kind: count for kind, count in found.items() if count >= TIMES}
                if many and not warming:
                    left[name + (", cut off" if leaves else "")] = many
    sys.stdout.write(json.dumps(left) + "\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


async def main() -> None:
    gc.disable()
    mode, *replicas = sys.argv[1:]
    named = {"OPTION_ROUTER_REPLICAS": replicas[0]} if replicas else {"OPTION_MODEL_ID": "/model"}
    asked = settings.read(named)

    async def start(note: object) -> Runtime:
        return Runtime(engine=FakeEngine(asked.model_names), adapters=None, code=None, cache=None)

    with bound("127.0.0.1", 0, backlog=100) as listener:
        port = listener.getsockname()[1]
        asking = threading.Timer(1, ask, [port])
        asking.start()
        if mode == "serve":
            await Server(listener, asked, start).run()
        else:
            await Router(asked, {}).run(listener)


if __name__ == "__main__":
    uvloop.run(main())
