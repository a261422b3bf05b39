# SPDX-License-Identifier: Apache-2.0
"""A replica that harms its router: `python -m tools.chaos.hostile.replica PORT KIND`.

errors: reports ready, and answers every request with 500. endless: never ends an answer. silent:
accepts connections and sends no bytes. lies: reports ready, but its readiness, usage and KV cache
events have odd values, far too many of them; its streams have an event without an end.
"""

import argparse
import asyncio
import json
import random
from typing import Any

import uvloop
import zmq
import zmq.asyncio

from tests.support.harness import ports
from tests.support.harness.stub_replica import POSTS, Connection, Replica

PIECE = 64 * 1024


class Errors(Replica):
    """500 to all that is posted."""

    def __init__(self, port: int) -> None:
        super().__init__(port, rate=50)
        body = b'{"error":{"message":"no","type":"InternalServerError","code":500}}'
        refused = self.answer(body, 500)
        self.answers = dict.fromkeys(POSTS, refused)
        self.stream = refused

    def begin(self, connection: Connection, events: int) -> None:
        """Nothing follows an error."""


class Lies(Replica):
    """Odd values wherever a router reads one."""

    def __init__(self, port: int) -> None:
        super().__init__(port, rate=50)
        self.events = ports.free(2)
        usage = {"prompt_tokens": -1, "completion_tokens": 2**80, "total_tokens": "many"}
        body = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}], "usage": usage}
        self.answers = dict.fromkeys(POSTS, self.answer(json.dumps(body).encode()))

    def get(self, path: str) -> bytes:
        if path == "/v1/models":
            cards = [{"id": f"{n}", "max_model_len": -1} for n in range(5_000)]
            return self.answer(json.dumps({"data": cards}).encode())
        if path == "/metrics":
            text = "".join(f'vllm:num_requests_running{{e="{n}"}} 1e999\n' for n in range(15_000))
            return self.answer(text.encode(), kind=b"text/plain; version=0.0.4")
        if path == "/kv_event_sources":
            first = self.events
            source = {
                "endpoint": f"tcp://*:{first}",
                "replay_endpoint": f"tcp://*:{first + 1}",
            }
            return self.answer(json.dumps(dict.fromkeys(map(str, range(8)), source)).encode())
        return super().get(path)

    def begin(self, connection: Connection, events: int) -> None:
        """An event that does not end, a piece every 10 ms."""
        transport = connection.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() < 16 * PIECE:
            transport.write(b"%x\r\n%b\r\n" % (PIECE, b"data: ".ljust(PIECE, b"x")))
        self.loop.call_later(0.01, self.begin, connection, events)

    async def publish(self) -> None:
        """KV events that are none, and answers to whoever asks for the log of them."""
        context = zmq.asyncio.Context()
        live, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        live.bind(f"tcp://127.0.0.1:{self.events}")
        replay.bind(f"tcp://127.0.0.1:{self.events + 1}")
        drawn = random.Random(0)
        while True:
            await asyncio.sleep(0.02)
            await live.send_multipart(self._nonsense(drawn))
            if await replay.poll(0):
                who, *_ = await replay.recv_multipart()
                await replay.send_multipart([who, b"", *self._nonsense(drawn)])

    def _nonsense(self, drawn: random.Random) -> list[bytes]:
        number = drawn.choice((b"", drawn.randbytes(8), (2**63).to_bytes(8, "big"), bytes(8)))
        lists = b"\xdd\x00\x04\x00\x00" + b"\x90" * 2**18
        payload = drawn.choice((b"", drawn.randbytes(100), lists, b"\x91" * 2**18, bytes(8 << 20)))
        parts = [b"", number, payload]
        return parts[: drawn.choice((1, 2, 3, 3, 3))] * drawn.choice((1, 1, 2))


async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A body without an end to whoever asks."""
    try:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
        writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"%x\r\n%b\r\n" % (PIECE, b"[" * PIECE))
            await writer.drain()
            await asyncio.sleep(0.005)
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        writer.close()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read all bytes, and answer none."""
    try:
        while await reader.read(PIECE):
            pass
    except OSError:
        pass
    writer.close()


async def serve(port: int, kind: str) -> None:
    loop = asyncio.get_running_loop()
    if kind in ("endless", "silent"):
        talk: Any = endless if kind == "endless" else silent
        async with await asyncio.start_server(talk, "127.0.0.1", port) as server:
            await server.serve_forever()
    replica: Replica = Errors(port) if kind == "errors" else Lies(port)
    listening = await loop.create_server(lambda: Connection(replica), "127.0.0.1", port)
    if isinstance(replica, Lies):
        await replica.publish()
    await listening.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("port", type=int)
    parser.add_argument("kind", choices=("errors", "endless", "silent", "lies"))
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.kind))


if __name__ == "__main__":
    main()
