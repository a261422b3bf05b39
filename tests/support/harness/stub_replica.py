# SPDX-License-Identifier: Apache-2.0
"""A model server without a model, as fast as Python can be: `python stub_replica.py PORT`.

It measures and tests programs in front of servers. It answers GET /ping, /health, /v1/models and
/metrics as vLLM does. POST /v1/chat/completions, /v1/completions and /invocations get 0.6 KB at
once or, with `"stream": true`, `max_tokens` events of about 250 bytes. A stream has --rate events
per second, and its first event comes after at least --first seconds. All streams step together,
like a batch in an engine. With --slots, /metrics reports the number of requests that have room.
POST /v1/traces takes spans, as a collector does. Every answer names its replica in the header
x-replica.
"""

import argparse
import asyncio
import json
import re
import time
from typing import Any, cast

import httptools
import uvloop

MODEL = "stub"
POSTS = ("/v1/chat/completions", "/v1/completions", "/invocations")
TOKENS = 16
"""The events of a stream whose request does not say."""
FIELD = re.compile(rb'"(stream|max_tokens)"\s*:\s*(true|\d+)')
"""A prompt cannot contain one, because its quotes are escaped."""


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def choice(path: str, text: str, *, stream: bool) -> bytes:
    """An answer, or an event's data, with this text."""
    said: dict[str, Any] = {"text": text}
    if path != "/v1/completions":
        said = {"delta" if stream else "message": {"role": "assistant", "content": text}}
    kind = "text_completion" if path == "/v1/completions" else "chat.completion"
    body: dict[str, Any] = {
        "id": "stub-0123456789abcdef0123456789abcdef",
        "object": kind + ".chunk" * (stream and kind != "text_completion"),
        "created": 1_700_000_000,
        "model": MODEL,
        "choices": [{"index": 0, **said, "finish_reason": None if stream else "length"}],
    }
    if not stream:
        body["usage"] = {"prompt_tokens": 64, "completion_tokens": 64, "total_tokens": 128}
    return json.dumps(body).encode()


ANSWER = {path: choice(path, "word " * 60, stream=False) for path in POSTS}
EVENT = {path: b"data: %b\n\n" % choice(path, " token", stream=True) for path in POSTS}
TRACES = "/v1/traces"
DONE = b"data: [DONE]\n\n"
MODELS = {"id": MODEL, "object": "model", "owned_by": "stub", "max_model_len": 131_072}


def collects(url: str) -> dict[str, str]:
    """Environment variables that make a program send its spans to the replica at this address."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }


class Replica:
    """State that all connections share. left: the remaining events of each stream."""

    def __init__(self, port: int, rate: float, first: float = 0.0, slots: int = 0) -> None:
        self.port, self.step, self.first, self.slots = port, 1 / rate, first, slots
        self.began, self.requests, self.next = time.time(), 0, 0.0
        self.blocks = 20_000
        self.left: dict[Connection, int] = {}
        self.loop = asyncio.get_running_loop()
        self.answers = {path: self.answer(ANSWER[path]) for path in POSTS}
        self.stream = self.head(
            200, b"text/event-stream; charset=utf-8", b"transfer-encoding: chunked"
        )

    def head(self, status: int, kind: bytes, length: bytes) -> bytes:
        form = b"HTTP/1.1 %d -\r\ncontent-type: %b\r\nx-replica: %d\r\n%b\r\n\r\n"
        return form % (status, kind, self.port, length)

    def answer(self, body: bytes, status: int = 200, kind: bytes = b"application/json") -> bytes:
        return self.head(status, kind, b"content-length: %d" % len(body)) + body

    def get(self, path: str) -> bytes:
        if path in ("/ping", "/health"):
            return self.answer(b"{}")
        if path == "/v1/models":
            return self.answer(json.dumps({"object": "list", "data": [MODELS]}).encode())
        if path == "/metrics":
            return self.answer(self.metrics().encode(), kind=b"text/plain; version=0.0.4")
        if path == TRACES:
            return self.answer(b"", kind=b"application/x-protobuf")
        return self.answer(b'{"error":{"message":"Not Found"}}', 404)

    def metrics(self) -> str:
        label = f'{{engine="0",model_name="{MODEL}"}}'
        return (
            'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",'
            f'num_gpu_blocks="{self.blocks}"}} 1.0\n'
            f"vllm:num_requests_running{label} {len(self.left)}.0\n"
            f"vllm:num_requests_waiting{label} 0.0\n"
            f"vllm:request_success_total{label} {self.requests}.0\n"
            f"process_start_time_seconds {self.began:.2f}\n"
            f"slipway_request_slots {self.slots}\n"
        )

    def begin(self, connection: "Connection", events: int) -> None:
        if connection.transport.is_closing():
            return
        if not self.left:
            self.next = self.loop.time() + self.step
            self.loop.call_at(self.next, self.tick)
        self.left[connection] = events

    def tick(self) -> None:
        """Send one event to every stream. The next ticks make up for a late one."""
        for connection, left in list(self.left.items()):
            connection.event(last=left <= 1)
            if left <= 1:
                del self.left[connection]
            else:
                self.left[connection] = left - 1
        if self.left:
            self.next += self.step
            self.loop.call_at(self.next, self.tick)


class Connection(asyncio.Protocol):
    """One connection, which stays open. Its client sends a request only after the last answer."""

    transport: asyncio.Transport
    path = ""

    def __init__(self, replica: Replica) -> None:
        self.replica, self.body = replica, b""
        self.parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.replica.left.pop(self, None)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.close()

    def on_message_begin(self) -> None:
        self.path, self.body = "", b""

    def on_url(self, url: bytes) -> None:
        self.path += url.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        replica = self.replica
        if self.path not in POSTS:
            self.transport.write(replica.get(self.path))
            return
        replica.requests += 1
        fields = dict(FIELD.findall(self.body))
        if fields.get(b"stream") == b"true":
            self.chunk = chunk(EVENT[self.path])
            self.transport.write(replica.stream)
            events = int(fields.get(b"max_tokens", TOKENS))
            if replica.first:
                replica.loop.call_later(replica.first, replica.begin, self, events)
            else:
                replica.begin(self, events)
        else:
            self.transport.write(replica.answers[self.path])

    def event(self, *, last: bool) -> None:
        end = chunk(DONE) + b"0\r\n\r\n" if last else b""
        self.transport.write(self.chunk + end)


async def serve(host: str, port: int, rate: float, first: float, slots: int) -> None:
    replica = Replica(port, rate, first, slots)
    server = await replica.loop.create_server(lambda: Connection(replica), host, port, backlog=4096)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("port", type=int)
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--rate", type=float, default=50, help="events per second of each stream")
    parser.add_argument(
        "--first", type=float, default=0.0, help="seconds before a stream's first event"
    )
    parser.add_argument(
        "--slots", type=int, default=0, help="the number of requests with room, for /metrics"
    )
    options = parser.parse_args()
    uvloop.run(serve(options.host, options.port, options.rate, options.first, options.slots))


if __name__ == "__main__":
    main()
