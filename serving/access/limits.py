# SPDX-License-Identifier: Apache-2.0
"""How much a caller may ask for: requests and tokens in a minute, and requests at once.

A window begins with its first request and ends a minute later. Counts are in this process's memory,
or in a Valkey or Redis that processes and machines share. While that does not answer, each process
counts by itself.
"""

import asyncio
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Coroutine
from typing import Any, NamedTuple

from limits import RateLimitItemPerMinute
from limits.aio.storage import RedisStorage, Storage
from limits.aio.strategies import FixedWindowRateLimiter
from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import RedisError

from serving.access.caller import Caller
from serving.errors import RateLimited
from serving.protocol import RATE_LIMIT

log = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]

LEASE_S = 60
"""A process that has died gives its requests' places back after so long."""
RENEWED_S = 20.0
STORE_S = 1.0
"""For an answer of the store."""
CONNECTIONS, POOL_S = 32, 10.0
"""To the store at most, and for how many seconds one is waited for."""
PAUSE_S = 5.0
"""After the store has failed it is not asked for so long."""
WINDOWS = 1000
"""In memory, before those that have ended are let go: tokens name tenants without end."""
NAMESPACE = "slipway-limits"
"""What keys in the store begin with."""

_TAKE = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[3]), ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
"""
_RENEW = """
local time = redis.call('TIME')
redis.call('ZADD', KEYS[1], 'XX', time[1] + time[2] / 1000000 + tonumber(ARGV[2]), ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
"""


class Taken(NamedTuple):
    """A request that was let in. headers: what its answer says of the limits. place: in the store,
    among the caller's requests at once; "" where it is counted in memory.
    """

    caller: Caller
    headers: Headers
    place: str = ""


class Memory(Storage):
    """Counts in this process. Its clock does not step, unlike the one of the library's own."""

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[str, tuple[float, int]] = {}  # their ends and counts
        self._most = WINDOWS

    @property
    def base_exceptions(self) -> type[Exception]:
        return RuntimeError

    async def incr(self, key: str, expiry: int, amount: int = 1) -> int:
        now = time.monotonic()
        end, count = self._windows.get(key, (0.0, 0))
        if end <= now:
            end, count = now + expiry, 0
            if len(self._windows) >= self._most:
                left = {name: window for name, window in self._windows.items() if window[0] > now}
                self._windows = left
                self._most = max(2 * len(self._windows), WINDOWS)
        self._windows[key] = end, count + amount
        return count + amount

    async def get(self, key: str) -> int:
        end, count = self._windows.get(key, (0.0, 0))
        return count if end > time.monotonic() else 0

    async def get_expiry(self, key: str) -> float:
        left = self._windows.get(key, (0.0, 0))[0] - time.monotonic()
        return time.time() + max(left, 0.0)

    async def check(self) -> bool:
        return True

    async def reset(self) -> int | None:
        count = len(self._windows)
        self._windows.clear()
        return count

    async def clear(self, key: str) -> None:
        self._windows.pop(key, None)


class Limiter:
    """Holds callers to their limits. url: of a store that others share, or None."""

    def __init__(self, url: str | None) -> None:
        self._own = FixedWindowRateLimiter(Memory())
        self._shared: FixedWindowRateLimiter | None = None
        self._store: Redis | None = None
        if url:
            pool: Any = BlockingConnectionPool.from_url(
                "redis" + url.removeprefix("valkey").removeprefix("redis"),
                max_connections=CONNECTIONS,
                timeout=POOL_S,
                socket_timeout=STORE_S,
                socket_connect_timeout=STORE_S,
            )
            storage = RedisStorage(
                "async+redis://",
                implementation="redispy",
                key_prefix=NAMESPACE,
                connection_pool=pool,
            )
            self._shared = FixedWindowRateLimiter(storage)
            self._store = Redis(connection_pool=pool)
        self._silent_until = 0.0
        self._at_once: Counter[str] = Counter()  # in this process alone
        self._places: dict[str, str] = {}  # in the store: place → its key there
        self._renewing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._warned: set[str] = set()

    async def take(self, caller: Caller) -> Taken:
        """Let a request in, which has to be given back. Raises RateLimited."""
        limits = caller.limits
        if not caller.limited:
            return Taken(caller, [])
        headers: Headers = []
        if limits.tokens:
            remaining, reset = await self._window("tokens", caller.name, limits.tokens)
            headers += _said("tokens", limits.tokens, remaining, reset)
            if remaining <= 0:
                raise RateLimited("tokens", f"{limits.tokens} tokens a minute", reset, headers)
        if limits.requests:
            let_in, remaining, reset = await self._hit(caller.name, limits.requests)
            headers += _said("requests", limits.requests, remaining, reset)
            if not let_in:
                what = f"{limits.requests} requests a minute"
                raise RateLimited("requests", what, reset, headers)
        place = ""
        if limits.concurrent:
            headers.append((RATE_LIMIT + b"limit-concurrent", b"%d" % limits.concurrent))
            found = await self._place(caller.name, limits.concurrent)
            if found is None:
                what = f"{limits.concurrent} requests at once"
                raise RateLimited("requests", what, 1, headers)
            place = found
        return Taken(caller, headers, place)

    def give_back(self, taken: Taken) -> None:
        """A request that was let in is over."""
        if taken.place:
            key = self._places.pop(taken.place, None)
            if key and self._store:
                self._spawn(self._leave(self._store, key, taken.place))
        elif taken.caller.limits.concurrent and not taken.caller.counted:
            self._at_once[taken.caller.name] -= 1
            if not self._at_once[taken.caller.name]:
                del self._at_once[taken.caller.name]

    def charge(self, caller: Caller, tokens: int) -> None:
        """A caller has used so many tokens. What exceeds a minute's is not carried over."""
        limit = caller.limits.tokens
        if not limit or not tokens:
            return
        if caller.counted and not self._shared:
            self._warn("without OPTION_LIMITS_URL here the router does not hear of keys' tokens")
            return
        self._spawn(self._charge(caller.name, limit, tokens))

    async def _charge(self, name: str, limit: int, tokens: int) -> None:
        item = RateLimitItemPerMinute(limit)
        if shared := self._asked:
            try:
                await shared.hit(item, "tokens", name, cost=tokens)
                return
            except (RedisError, OSError) as error:
                self._failed(error)
        await self._own.hit(item, "tokens", name, cost=tokens)

    async def _hit(self, name: str, limit: int) -> tuple[bool, int, int]:
        """Count a request. Whether it is within the limit, and what _window() returns."""
        item = RateLimitItemPerMinute(limit)
        if shared := self._asked:
            try:
                let_in = await shared.hit(item, "requests", name)
                return let_in, *await self._window("requests", name, limit)
            except (RedisError, OSError) as error:
                self._failed(error)
        let_in = await self._own.hit(item, "requests", name)
        return let_in, *await self._window("requests", name, limit)

    async def _window(self, what: str, name: str, limit: int) -> tuple[int, int]:
        """What is left in this minute, and seconds until it ends."""
        item = RateLimitItemPerMinute(limit)
        if shared := self._asked:
            try:
                stats = await shared.get_window_stats(item, what, name)
                self._warned.discard(_ALONE)
                return stats.remaining, _until(stats.reset_time)
            except (RedisError, OSError) as error:
                self._failed(error)
        stats = await self._own.get_window_stats(item, what, name)
        return stats.remaining, _until(stats.reset_time)

    async def _place(self, name: str, limit: int) -> str | None:
        """A place among the caller's requests at once; None where there is none."""
        if self._asked and self._store:
            key, place = f"{NAMESPACE}:at-once:{name}", uuid.uuid4().hex
            self._places[place] = key  # so that it is given back whatever becomes of this
            try:
                if await self._store.eval(_TAKE, 1, key, str(limit), place, str(LEASE_S)):
                    if not self._renewing:
                        self._renewing = asyncio.create_task(self._renew(self._store))
                    return place
                del self._places[place]
                return None
            except (RedisError, OSError) as error:
                del self._places[place]
                self._failed(error)
            except asyncio.CancelledError:
                self.give_back(Taken(Caller(), [], place))
                raise
        if self._at_once[name] >= limit:
            return None
        self._at_once[name] += 1
        return ""

    async def _leave(self, store: Redis, key: str, place: str) -> None:
        try:
            await store.zrem(key, place)
        except (RedisError, OSError) as error:
            self._failed(error)

    async def _renew(self, store: Redis) -> None:
        """Keep the places of requests that are under way."""
        while True:
            await asyncio.sleep(RENEWED_S)
            try:
                for place, key in [*self._places.items()]:
                    await store.eval(_RENEW, 1, key, place, str(LEASE_S))
            except (RedisError, OSError) as error:
                self._failed(error)

    @property
    def _asked(self) -> FixedWindowRateLimiter | None:
        """What counts for all, unless there is none or it has just failed."""
        return self._shared if time.monotonic() >= self._silent_until else None

    def _failed(self, error: Exception) -> None:
        self._silent_until = time.monotonic() + PAUSE_S
        log.debug("OPTION_LIMITS_URL", exc_info=error)
        self._warn(_ALONE)

    def _warn(self, trouble: str) -> None:
        """Log a trouble once, until it is over."""
        if trouble not in self._warned:
            log.error("%s", trouble)
        self._warned.add(trouble)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Finish what is under way, and let the store go."""
        if self._renewing:
            self._renewing.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._store:
            await self._store.connection_pool.aclose()


_ALONE = "what OPTION_LIMITS_URL names does not answer: each process counts by itself"


def _until(moment: float) -> int:
    """Whole seconds until a time, at least one."""
    return max(math.ceil(moment - time.time()), 1)


def _said(what: str, limit: int, remaining: int, reset: int) -> Headers:
    """OpenAI's headers of a limit (platform.openai.com/docs/guides/rate-limits)."""
    values = {"limit": f"{limit}", "remaining": f"{remaining}", "reset": f"{reset}s"}
    return [
        (RATE_LIMIT + f"{name}-{what}".encode(), value.encode()) for name, value in values.items()
    ]
