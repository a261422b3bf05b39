# SPDX-License-Identifier: Apache-2.0
"""The supervisor's view of its copies: their readiness, and the work of their engines."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from urllib.parse import urlencode

from lmi_config.options.declared import Settings
from serving.access.access import Access
from serving.engine.base import Hits, Prefilled
from serving.protocol import METRICS, PING
from serving.router.http.questions import Questions

TIMEOUT_S = 2.0
COUNTS_S = 2.0
"""Seconds between two reads of the engines' work; the cache server's decisions use it."""
LARGEST = 8 << 20
"""Maximum bytes of an answer."""

_PREFILLED = (
    "vllm:request_prefill_kv_computed_tokens_count",
    "vllm:request_prefill_kv_computed_tokens_sum",
    "vllm:request_prefill_time_seconds_sum",
)
_HITS = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
"""The series that serving.engine.vllm also reads, from its engine."""
_COUNTS = f"{METRICS}?{urlencode([('name[]', it) for it in (*_PREFILLED, *_HITS)])}"


class Looks:
    """Asks the copies. ready: a copy's number → the monotonic time since which it is ready."""

    def __init__(self, urls: Mapping[int, str], router: Settings) -> None:
        """urls: the copies' addresses by their numbers. router: the router's settings; the copies
        answer its secret.
        """
        self.ready: dict[int, float] = {}
        self._questions = {number: Questions(url) for number, url in urls.items()}
        self._names: dict[int, str] = {}
        self._access = Access(router, routes=True)
        self._sums = dict.fromkeys((*_PREFILLED, *_HITS), 0.0)
        self._last: dict[tuple[int, str], float] = {}
        self._counted = 0.0

    def close(self) -> None:
        for questions in self._questions.values():
            questions.close()

    def gone(self, number: int) -> float:
        """Record the end of a copy. Returns the seconds that it had been ready."""
        self._names.pop(number, None)
        for key in [key for key in self._last if key[0] == number]:
            del self._last[key]
        since = self.ready.pop(number, None)
        return 0.0 if since is None else time.monotonic() - since

    async def look(self, *, counts: bool) -> None:
        """Ask all copies whether they are ready, and every COUNTS_S for their engines' work if that
        counts.
        """
        await asyncio.gather(*map(self._ping, self._questions))
        if counts and time.monotonic() - self._counted > COUNTS_S:
            self._counted = time.monotonic()
            await asyncio.gather(*map(self._count, [*self.ready]))

    async def _ping(self, number: int) -> None:
        challenge = self._access.challenge()
        try:
            answer = await self._questions[number].get(PING, challenge, LARGEST, TIMEOUT_S)
        except OSError:
            self.ready.pop(number, None)
            return
        self._names[number] = self._access.name_of(challenge, answer.headers)
        if answer.status == 200:
            self.ready.setdefault(number, time.monotonic())
        else:
            self.ready.pop(number, None)

    async def _count(self, number: int) -> None:
        """Add a copy's work since the last read. Its counters restart at 0 with the copy."""
        headers = self._access.own_headers(self._names.get(number, ""), METRICS)
        try:
            answer = await self._questions[number].get(_COUNTS, headers, LARGEST, TIMEOUT_S)
        except OSError:
            return
        for name, value in _sums(answer.body.decode(errors="replace"), self._sums).items():
            before = self._last.get((number, name), 0.0)
            self._sums[name] += value - before if value >= before else value
            self._last[number, name] = value

    def prefilled(self) -> Prefilled:
        """The prefill work of all engines; serving.engine.vllm.prefilled() has that of one."""
        return Prefilled(*(self._sums[name] for name in _PREFILLED))

    def hits(self) -> Hits:
        """The cache hits of all engines."""
        return Hits(*(self._sums[name] for name in _HITS))


def _sums(text: str, names: Mapping[str, float]) -> dict[str, float]:
    """The sums of these series over their labels, in Prometheus' text format."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in names:
            with contextlib.suppress(ValueError):
                found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found
