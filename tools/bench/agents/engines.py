# SPDX-License-Identifier: Apache-2.0
"""The same sessions on real servers of a tiny model, behind a real router.

Each arm and seed has new servers, whose caches are empty. A server's KV cache tier in memory has
the arm's size, and its engine's memory room for one prompt of the longest kind. A prompt's text has
one token for each word, and equal chunks are equal texts. The next turn has the trace's own answer,
not the server's. Pauses are divided by --speed.

Hits are the cached tokens that the servers report for each answer.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from tokenizers import Tokenizer

from lmi_config.plan.memory import GIB
from tests.support.models import tiny
from tools.bench import endpoint, strategies
from tools.bench.agents.fleet import Arm, Figures, Found
from tools.bench.agents.sessions import CHUNK, Maker, Session, Turn, known_first

STRATEGIES = (
    ("roundrobin", False, False),
    ("prefixaware", False, False),
    ("prefixaware", True, True),
)
"""As for the stand-in engines. Real tiers retain the conversations that hints name."""
SPARE = 64
"""Tokens of the context beyond the longest prompt: the chat template's, and an answer's."""


class Request(NamedTuple):
    """conversation: the turn's; "" for a one-shot. headers: that hint at its parent."""

    turn: Turn
    conversation: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]


class Answered(NamedTuple):
    """ttft: seconds. cached: prompt tokens."""

    ttft: float
    cached: int
    replica: str


class Writer:
    """Writes requests whose prompts have exactly the tokens of turns."""

    def __init__(self, model: Path) -> None:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        words = sorted(it.replace("Ġ", " ") for it in tokenizer.get_vocab())
        words = [it for it in words if it.startswith(" ") and it[1:].isalpha()]
        encoded = tokenizer.encode_batch(words)
        self._words = [it for it, code in zip(words, encoded, strict=True) if len(code.ids) == 1]
        self._role = len(tokenizer.encode("<|user|>").ids)  # before the text
        self._chunk = cache(self._drawn)
        self._number = itertools.count()

    def requests(self, session: Session, arm: Arm, maker: Maker) -> Iterator[Request]:
        """A session's requests, and one-shots between them."""
        last: dict[str, Sequence[int]] = {}
        owed = 0.0
        for turn in session.turns:
            conversation = turn.agent or session.name
            yield self._request(turn, conversation, session.name if turn.agent else "", arm)
            same = known_first(turn.chain, dict.fromkeys(last.get(conversation, ())))
            last[conversation] = turn.chain
            owed += arm.one_shots * max(turn.tokens - same * CHUNK, 0)
            while owed > 0:
                shot = maker.one_shot()
                owed -= shot.tokens
                yield self._request(shot, "", "", arm)

    def _request(self, turn: Turn, conversation: str, parent: str, arm: Arm) -> Request:
        body: dict[str, Any] = {
            "model": "lmi",
            "messages": [{"role": "user", "content": self._text(turn)}],
            "max_tokens": max(min(turn.output, SPARE // 2), 1),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not (arm.hinted and conversation):
            return Request(turn, conversation, body, {})
        body["session_id"] = conversation
        if turn.ends:
            body["nvext"] = {"agent_hints": {"final": True}}
        return Request(turn, conversation, body, {"x-parent-session-id": parent} if parent else {})

    def _text(self, turn: Turn) -> str:
        words = [word for link in turn.chain for word in self._chunk(str(link))]
        words += self._drawn(f"end {next(self._number)}")[: max(turn.tokens - len(words), 0)]
        return "".join(words[self._role :])

    def _drawn(self, name: str) -> list[str]:
        return random.Random(name).choices(self._words, k=CHUNK)


def run(
    arm: Arm,
    sessions: Sequence[Session],
    maker: Maker,
    room: int,
    options: argparse.Namespace,
    start: strategies.Start,
) -> Figures:
    """Return the figures of an arm. room: of each server's tier, in chunks. Exits if a request
    fails.
    """
    model = tiny.make_long()
    longest = max(turn.tokens for it in sessions for turn in it.turns)
    if longest + SPARE > tiny.LONG_POSITIONS:
        sys.exit(f"a prompt has {longest} tokens, too many for the model; raise --scale")
    writer = Writer(model)
    scripts = [[*writer.requests(it, arm, maker)] for it in sessions]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        environ = _environ(model, room, folder)
        servers = [start(folder / f"{n}.log", environ) for n in range(options.engines)]
        with (
            strategies.running(servers),
            strategies.routed(folder, arm.strategy, servers) as router,
        ):
            before = strategies.counted(servers)
            began = time.monotonic()
            answered = asyncio.run(replayed(router.url, scripts, options))
            took = time.monotonic() - began
            sent = sum(map(len, scripts))
            after = strategies.counted(servers, before[strategies.ANSWERED] + sent)
    prompts = {name: after[it] - before[it] for name, it in strategies.PROMPTS.items()}
    ttfts = [
        answer.ttft
        for script, each in zip(scripts, answered, strict=True)
        for it, answer in zip(script, each, strict=True)
        if it.conversation
    ]
    cuts = statistics.quantiles(ttfts, n=10, method="inclusive")
    figures = counted(scripts, answered).figures(sessions, options.scale)
    figures = figures._replace(
        ttft_p50_ms=1e3 * cuts[4],
        ttft_p90_ms=1e3 * cuts[8],
        of_tiers=prompts["tiers"] / sum(prompts.values()),
    )
    cached = sum(it.cached for each in answered for it in each)
    print(
        f"{arm.strategy}{' with hints' * arm.hinted}: {sent} requests in {took:.0f} s; {cached} "
        f"tokens cached by the answers, {prompts['engines'] + prompts['tiers']:.0f} by the "
        f"servers' counters; {figures}",
        file=sys.stderr,
        flush=True,
    )
    return figures


def _environ(model: Path, room: int, folder: Path) -> dict[str, str]:
    """A server's options. room: of its tier, in chunks."""
    token = strategies.kv_of_token(model)
    file = folder / "lmcache.yaml"
    tier = room * CHUNK * token / strategies.FULL
    file.write_text(json.dumps({"max_local_cpu_size": tier / GIB}))
    return {
        **strategies.FLOAT32,
        "OPTION_MODEL_ID": str(model),
        "OPTION_MAX_MODEL_LEN": str(tiny.LONG_POSITIONS),
        "OPTION_KV_CACHE_MEMORY_BYTES": str((tiny.LONG_POSITIONS + CHUNK) * token),
        "OPTION_LMCACHE_CONFIG_FILE": str(file),
    }


def counted(scripts: Sequence[Sequence[Request]], answered: Sequence[Sequence[Answered]]) -> Found:
    """Count the sessions' turns."""
    found = Found()
    for script, each in zip(scripts, answered, strict=True):
        for it, answer in zip(script, each, strict=True):
            if it.conversation:
                found.count(it.turn, it.conversation, answer.replica, answer.cached)
    return found


async def replayed(
    url: str, scripts: Sequence[Sequence[Request]], options: argparse.Namespace
) -> list[list[Answered]]:
    """Send all sessions' requests, --live sessions at a time. No session waits for one-shots."""
    tasks: list[list[asyncio.Task[Answered]]] = [[] for _ in scripts]
    left = iter([*zip(scripts, tasks, strict=True)])

    async def send(it: Request) -> Answered:
        began = time.monotonic()
        headers = {"x-slipway-route": "1", **it.headers}
        try:
            answer = await endpoint.ask(client, url, json.dumps(it.body).encode(), headers)
        except (endpoint.Failed, aiohttp.ClientError) as error:
            sys.exit(f"a request failed: {error}")
        details: Any = answer.usage.get("prompt_tokens_details") or {}
        _, replica, *_ = answer.route.split()  # after the strategy
        return Answered(answer.times[0] - began, details.get("cached_tokens") or 0, replica)

    async def user() -> None:
        for script, own in left:
            for it in script:
                if it.conversation:
                    await asyncio.sleep(it.turn.pause / options.speed)
                own.append(group.create_task(send(it)))
                if it.conversation:
                    await own[-1]

    headers = {"Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(options.live):
            group.create_task(user())
    return [[it.result() for it in own] for own in tasks]
