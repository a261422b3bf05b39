# SPDX-License-Identifier: Apache-2.0
"""A stand-in model server with a prefix cache: `python -m tools.bench.router.caching_replica PORT`.

It is the stub replica with an engine of the routing simulator, in real time. Four bytes of text are
a token. A chat's stream has two events: the first token, and the rest of the answer with the usage.
POST /v1/chat/completions/render answers with a chat's tokens, as a vLLM with --enable-scale-out
does. /metrics counts these renders.
"""

import argparse
import asyncio
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import uvloop

from serving.router.policy import hash_chain
from serving.router.policy.kv_index import BlockRemoved, BlockStored
from serving.router.policy.prefix_index import BYTES_PER_TOKEN, CHUNK
from serving.router.policy.replica_load import Load
from serving.router.policy.tiers import NOTHING
from tests.support.harness.stub_replica import DONE, Connection, Replica, choice, chunk
from tools.routing_sim.engine import Engine, Run
from tools.routing_sim.model import Profile, Request

CHAT = "/v1/chat/completions"
RENDER = f"{CHAT}/render"
PROFILE = Profile(20_000, 0.010, 4e-8, 0.0, 80_000, 0)
BLOCK_SIZE = 16
"""Tokens of a block, in /metrics."""
TOKEN_IDS = 150_000
TOKEN = " tok"
"""The text of each token of an answer."""


def text_of(messages: Sequence[Mapping[str, str]], answer: int = 0) -> bytes:
    """A chat as a prompt, and this number of tokens of its answer."""
    said = "".join(f"<{it['role']}>{it['content']}" for it in messages)
    return f"{said}<assistant>{TOKEN * answer}".encode()


def token_ids(text: bytes) -> list[int]:
    """Equal beginnings have equal ids."""
    return [it % TOKEN_IDS for (it,) in struct.iter_unpack("<I", text[: len(text) // 4 * 4])]


def links_of(text: bytes) -> list[int]:
    """A hash for each block of the engine. Two processes have different hashes."""
    return hash_chain.links(text, CHUNK, 0)


class LoopTime:
    """The event loop's time, for an engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    @property
    def now(self) -> float:
        return self._loop.time()

    def at(self, time: float, do: Callable[[], None]) -> None:
        self._loop.call_at(time, do)


class Answers:
    """Sends chats to the engine, and answers when it has computed them: its listener."""

    def __init__(self, replica: Replica) -> None:
        self._loop, self._head = replica.loop, replica.stream
        self._load = Load("engine")
        self._engine = Engine("engine", PROFILE, LoopTime(self._loop), self)
        self._connections: dict[Run, Connection] = {}

    def begin(self, connection: Connection, chat: Mapping[str, Any]) -> None:
        prompt, output = text_of(chat["messages"]), chat["max_tokens"]
        tokens, now = len(prompt) // BYTES_PER_TOKEN, self._loop.time()
        run = Run(
            Request(now, ((0, tokens),), output),
            tokens,
            links_of(text_of(chat["messages"], output)),
            self._engine,
            self._load,
            self._load.begin(tokens, NOTHING, streamed=True, now=now),
        )
        self._connections[run] = connection
        self._engine.receive(run)

    def first(self, run: Run) -> None:
        event = b"data: %b\n\n" % choice(CHAT, TOKEN, stream=True)
        self._connections[run].transport.write(self._head + chunk(event))

    def ended(self, run: Run) -> None:
        self._load.end(run.work)
        rest = json.loads(choice(CHAT, TOKEN * (run.request.output - 1), stream=True))
        rest["usage"] = {
            "prompt_tokens": run.tokens,
            "completion_tokens": run.request.output,
            "prompt_tokens_details": {"cached_tokens": run.request.cached},
        }
        event = b"data: %b\n\n%b" % (json.dumps(rest).encode(), DONE)
        self._connections.pop(run).transport.write(chunk(event) + b"0\r\n\r\n")

    def published(self, engine: Engine, events: list[BlockStored | BlockRemoved]) -> None:
        """Nobody listens to its KV events."""


class CachingReplica(Replica):
    def __init__(self, port: int) -> None:
        super().__init__(port, rate=1)
        self.blocks = PROFILE.kv_tokens // BLOCK_SIZE
        self.renders = 0
        self.chats = Answers(self)

    def metrics(self) -> str:
        return f"{super().metrics()}stub_renders_total {self.renders}\n"


class CachingConnection(Connection):
    replica: CachingReplica

    def on_message_complete(self) -> None:
        if self.path == CHAT:
            self.replica.requests += 1
            self.replica.chats.begin(self, json.loads(self.body))
        elif self.path == RENDER:
            self.replica.renders += 1
            ids = token_ids(text_of(json.loads(self.body)["messages"]))
            self.transport.write(self.replica.answer(json.dumps({"token_ids": ids}).encode()))
        else:
            super().on_message_complete()


async def serve(port: int) -> None:
    replica = CachingReplica(port)
    server = await replica.loop.create_server(
        lambda: CachingConnection(replica), "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("port", type=int)
    uvloop.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
