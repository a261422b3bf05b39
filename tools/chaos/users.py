# SPDX-License-Identifier: Apache-2.0
"""Who ask in chaos: users who know the right answers, and clients that do other things."""

import asyncio
import contextlib
import itertools
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from typing import Any

from tools.chaos.ledger import End, Ledger, Verdict
from tools.chaos.parts import ADAPTERS, FORMATTED
from tools.chaos.traffic import (
    ADAPTER,
    SESSION,
    Answer,
    Ask,
    Client,
    cases,
    drop,
    fresh,
    garbage,
    lmi,
    send_garbage,
    whole,
    words,
)
from tools.chaos.world import OPERATOR, World


class Users:
    """The traffic through the router, which can be paused.

    known: the requests, with the right answers. of_source: the right answers of the adapter that
    changes, by its source.
    """

    def __init__(self, world: World, ledger: Ledger, seed: int) -> None:
        self.world = world
        self.ledger = ledger
        self.seed = seed
        self.client = Client(world.router.url, ledger)
        self.known: list[tuple[Ask, Any]] = []
        self.of_source: dict[str, Any] = {}
        self.going = asyncio.Event()
        self.under_way = 0
        self.asked_before: list[tuple[Ask, Any]] = []

    async def record(self) -> int:
        """Ask everything of a server that does nothing else, then all of it at once of every one:
        where answers depend on what else is computed there is nothing to compare with. How many
        of the answers are different ones.
        """
        asks = cases(self.seed, ADAPTERS, FORMATTED)
        clients = [Client(it.url, Ledger(), headers=OPERATOR) for it in self.world.servers]
        for ask in asks:
            self.known.append((ask, await self._right(clients[0], ask)))
        for name in ("first", "second"):
            source = str(self.world.folder / "sources" / name)
            found = await clients[0].send("POST", f"/adapters?name=changing&src={source}")
            if found.status != 200:
                sys.exit(f"an adapter cannot be registered: {found}")
            self.of_source[name] = await self._right(clients[0], self.of_changing())
            await clients[0].send("DELETE", "/adapters/changing")
        for client in clients:
            await asyncio.gather(*(client.judge(*it) for it in self.known))
            await client.close()
            if not client.ledger.good:
                sys.exit(f"the same prompts get different answers:\n{client.ledger.text()}")
        return len({json.dumps(expected) for _, expected in self.known})

    async def _right(self, client: Client, ask: Ask) -> Any:
        _, answer = await client.answer(ask)
        if answer.status != 200 or answer.failure:
            sys.exit(f"{ask.kind} cannot be asked: {answer}")
        return ask.read(answer.body)

    def acting(self, count: int) -> Iterator[Coroutine[Any, Any, None]]:
        """The work of `count` users and of the other clients, until cancelled."""
        drawn = random.Random(self.seed)
        users = [self._user(random.Random(drawn.random())) for _ in range(count)]
        for it in (*users, self._changing(), self._sending_garbage(), self._dropping()):
            yield self._on(it)

    async def _on(self, acting: Awaitable[None]) -> None:
        try:
            await acting
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.ledger.problems.append(f"the harness failed: {error!r}")
            raise

    async def pause(self) -> None:
        """Begin nothing more, and let all that is under way end."""
        self.going.clear()
        while self.under_way:
            await asyncio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        await self.going.wait()
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1

    async def _user(self, drawn: random.Random) -> None:
        while True:
            async with self._turn():
                what = drawn.random()
                if what < 0.8:
                    ask, expected = drawn.choice(self.known)
                    await self.client.judge(ask, expected)
                elif what < 0.93:
                    await self._fresh(drawn)
                else:
                    await self._session(drawn)
            pause = 2.0 if time.monotonic() > self.client.stopped_at else 0.5
            await asyncio.sleep(drawn.random() * pause)

    async def _fresh(self, drawn: random.Random) -> None:
        """Send a new request, or repeat an earlier one, whose KV may be in any tier or in none."""
        if self.asked_before and drawn.random() < 0.6:
            await self.client.judge(*drawn.choice(self.asked_before))
            return
        ask = fresh(f"{drawn.random()}", drawn.choice(["", *ADAPTERS]))
        number, answer = await self.client.answer(ask)
        text = json.loads(ask.body)["prompt"]
        expected = None
        with contextlib.suppress(ValueError, LookupError, TypeError):
            found = whole(answer.body)
            if found["choices"][0]["text"].startswith(text):
                expected = found
        self.client.enter(ask, expected, number, answer)
        if expected:
            self.asked_before = [*self.asked_before[-100:], (ask, expected)]

    async def _session(self, drawn: random.Random) -> None:
        """Begin a session, use it, end it, and see that it has ended."""
        client, kind = self.client, "session"
        body = json.dumps({"requestType": "NEW_SESSION"}).encode()
        made = await client.send("POST", "/invocations", body)
        told = made.headers.get(SESSION, "").partition(";")[0]
        if not client.expect(kind, lambda it: it.status == 200 and bool(told), made):
            return
        since, header = made.began, {SESSION: told}
        plain = [it for it in self.known if it[0].kind in ("LMI", "completion, SSE", "chat")]
        for ask, expected in drawn.sample(plain, 3):
            await client.judge(ask, expected, since, **header)
        body = json.dumps({"requestType": "CLOSE"}).encode()
        closed = await client.send("POST", "/invocations", body, header)
        if client.expect(kind, lambda it: it.status == 200, closed, since):
            after = await client.send("POST", "/invocations", body, header)
            client.expect(kind, lambda it: it.status == 424, after, since)

    def of_changing(self) -> Ask:
        """A request for the adapter that changes."""
        body = json.dumps(lmi(words("changing", 12))).encode()
        return Ask("adapter that changes", "/invocations", body, whole, {ADAPTER: "changing"})

    async def _changing(self) -> None:
        """Register an adapter, change it, and take it away, and ask for it in between."""
        ask, client, kind = self.of_changing(), self.client, "changes of adapters"
        also = frozenset((404, 409, 424))
        sources = {it: f"src={self.world.folder / 'sources' / it}" for it in self.of_source}

        def done(answer: Answer) -> bool:
            return answer.status == 200

        while True:
            async with self._turn():
                began = time.monotonic()
                calls = (
                    "?name=changing&" + sources["first"],
                    "/changing/update?" + sources["second"],
                )
                for source, call in zip(sources, calls, strict=True):
                    sent = await client.send("POST", "/adapters" + call)
                    if not client.expect(kind, done, sent, began, also):
                        break
                    for _ in range(3):
                        number, answer = await client.answer(ask)
                        expected = self.of_source[source]
                        client.enter(ask, expected, number, answer, began, also)
                sent = await client.send("DELETE", "/adapters/changing")
                if client.expect(kind, done, sent, began, also):
                    sent = await client.send("POST", ask.path, ask.body, ask.headers)
                    client.expect(kind, lambda it: it.status == 424, sent, began)
            await asyncio.sleep(1)

    async def _sending_garbage(self) -> None:
        for it in itertools.cycle(garbage()):
            async with self._turn():
                await send_garbage(self.client, self.world.router.port, it)
            await asyncio.sleep(0.5)

    async def _dropping(self) -> None:
        drawn = random.Random(self.seed)
        while True:
            async with self._turn():
                await drop(self.world.router.port, drawn)
                self.ledger.count("client that leaves", Verdict(End.DROPPED))
            await asyncio.sleep(0.5)
