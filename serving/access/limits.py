# SPDX-License-Identifier: Apache-2.0
"""Callers' limits: requests and tokens in a minute, and concurrent requests.

A window begins with its first request and ends a minute later. Counts are in this process's memory,
or in a Valkey or Redis that processes and machines share. While the store does not answer, each
process counts by itself.
"""

import asyncio
import logging
import math
import time
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from limits import RateLimitItemPerMinute
from limits.aio.storage import RedisStorage, Storage
from limits.aio.strategies import FixedWindowRateLimiter

from serving.access.caller import Caller
from serving.errors import RateLimited
from serving.follow import count, kept
from serving.protocol import RATE_LIMIT

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]

LEASE_S = 60
"""A dead process's concurrent requests are released after this long."""
RENEWED_S = 20.0
STORE_S = 1.0
"""Timeout of one call of the store."""
CONNECTIONS, TURN_S = 32, 2.0
"""Most connections to the store, and the time that a request waits for one. Then it counts here."""
PAUSE_S = 5.0
"""The store is not called for this long after a failure. Then one request tries it, and the others
count here until the store has answered.
"""
LATE = 1000
"""Most places that the store may have granted after a timeout. They are released once it answers.
"""
WINDOWS = 1000
"""Ended windows in memory are removed above this number. Tokens may name any number of tenants."""
NAMESPACE = "slipway-limits"
"""The prefix of keys in the store."""

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


_FAULTS = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""The exceptions of a store that is unreachable, or answers with invalid data; also RedisError."""
_LEAVE = "return redis.call('ZREM', KEYS[1], ARGV[1])"

T = TypeVar("T")


class Taken(NamedTuple):
    """An admitted request.

    headers: the limits' headers of its answer. place: the request's place in the store; "" if it is
    counted in memory.
    """

    caller: Caller
    headers: Headers
    place: str = ""


class StoreUnavailable(Exception):
    """The store was not called, or has not answered."""


class Memory(Storage):
    """Counts in this process. Its clock is monotonic, unlike that of the library's class."""

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[str, tuple[float, int]] = {}  # key → the window's end and count
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
    """Enforces callers' limits. url: the URL of a shared store, or None."""

    def __init__(self, url: str | None) -> None:
        self._own = FixedWindowRateLimiter(Memory())
        self._shared: FixedWindowRateLimiter | None = None
        self._store: Redis | None = None
        self._faults: tuple[type[Exception], ...] = _FAULTS
        if url:
            import redis.asyncio as redis  # which takes a fifth of a router's start

            self._faults += (redis.RedisError,)
            pool: Any = redis.ConnectionPool.from_url(
                "redis" + url.removeprefix("valkey").removeprefix("redis"),
                max_connections=CONNECTIONS,
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
            self._store = redis.Redis(connection_pool=pool)
        self._turns = asyncio.Semaphore(CONNECTIONS)
        self._silent_until = 0.0
        self._doubtful = False  # whether the store has not answered since its last failure
        self._trying = False  # whether a request is trying the store
        self._at_once: Counter[str] = Counter()  # concurrent requests, counted in this process
        self._places: dict[str, str] = {}  # in the store: place → its key there
        self._late: deque[tuple[str, str]] = deque(maxlen=LATE)  # key and place, to release
        self._renewing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._warned: set[str] = set()

    async def take(self, caller: Caller) -> Taken:
        """Admit a request, which must be released later. Raises RateLimited."""
        limits = caller.limits
        if not caller.limited:
            return Taken(caller, [])
        headers: Headers = []
        until = asyncio.get_running_loop().time() + TURN_S
        if limits.tokens:
            remaining, reset = await self._window("tokens", caller.name, limits.tokens, until)
            headers += _said("tokens", limits.tokens, remaining, reset)
            if remaining <= 0:
                raise RateLimited("tokens", f"{limits.tokens} tokens a minute", reset, headers)
        if limits.requests:
            let_in, remaining, reset = await self._hit(caller.name, limits.requests, until)
            headers += _said("requests", limits.requests, remaining, reset)
            if not let_in:
                what = f"{limits.requests} requests a minute"
                raise RateLimited("requests", what, reset, headers)
        place = ""
        if limits.concurrent:
            headers.append((RATE_LIMIT + b"limit-concurrent", b"%d" % limits.concurrent))
            found = await self._place(caller.name, limits.concurrent, until)
            if found is None:
                what = f"{limits.concurrent} requests at once"
                raise RateLimited("requests", what, 1, headers)
            place = found
        return Taken(caller, headers, place)

    def give_back(self, taken: Taken) -> None:
        """Release an admitted request that has ended."""
        if taken.place:
            key = self._places.pop(taken.place, None)
            if key:
                self._spawn(self._leave(key, taken.place))
        elif taken.caller.limits.concurrent and not taken.caller.counted:
            self._at_once[taken.caller.name] -= 1
            if not self._at_once[taken.caller.name]:
                del self._at_once[taken.caller.name]

    def charge(self, caller: Caller, tokens: int) -> None:
        """Count tokens that a caller has used. Usage above a minute's limit is not carried over."""
        limit = caller.limits.tokens
        if not limit or not tokens:
            return
        if caller.counted and not self._shared:
            self._warn("tokens of keys are not counted: the servers also need OPTION_LIMITS_URL")
            return
        self._spawn(self._charge(caller.name, limit, tokens))

    async def _charge(self, name: str, limit: int, tokens: int) -> None:
        item = RateLimitItemPerMinute(limit)
        try:
            await self._ask(lambda it: it.hit(item, "tokens", name, cost=tokens))
        except StoreUnavailable:
            await self._own.hit(item, "tokens", name, cost=tokens)

    async def _hit(self, name: str, limit: int, until: float) -> tuple[bool, int, int]:
        """Count a request. Returns whether it is within the limit, and the result of _window()."""
        item = RateLimitItemPerMinute(limit)
        try:
            let_in = await self._ask(lambda it: it.hit(item, "requests", name), until)
        except StoreUnavailable:
            let_in = await self._own.hit(item, "requests", name)
        return let_in, *await self._window("requests", name, limit, until)

    async def _window(self, what: str, name: str, limit: int, until: float) -> tuple[int, int]:
        """Return the rest of this minute's quota, and the seconds until the minute ends."""
        item = RateLimitItemPerMinute(limit)
        try:
            stats = await self._ask(lambda it: it.get_window_stats(item, what, name), until)
        except StoreUnavailable:
            stats = await self._own.get_window_stats(item, what, name)
        return min(stats.remaining, limit), _until(stats.reset_time)

    async def _place(self, name: str, limit: int, until: float) -> str | None:
        """Take a place among the caller's concurrent requests. Returns it, or None if all are
        taken.
        """
        if self._store:
            key, place = f"{NAMESPACE}:at-once:{name}", uuid.uuid4().hex
            self._places[place] = key  # so that it is released in any case
            try:
                if await self._run(_TAKE, key, str(limit), place, str(LEASE_S), until=until):
                    if not self._renewing:
                        self._renewing = asyncio.create_task(kept("limits", self._renew))
                    return place
                del self._places[place]
                return None
            except StoreUnavailable as error:
                del self._places[place]
                if error.__cause__:  # the store was called
                    self._late.append((key, place))
            except asyncio.CancelledError:
                self.give_back(Taken(Caller(), [], place))
                raise
        if self._at_once[name] >= limit:
            return None
        self._at_once[name] += 1
        return ""

    async def _leave(self, key: str, place: str) -> None:
        try:
            await self._run(_LEAVE, key, place)
        except StoreUnavailable:
            self._late.append((key, place))

    async def _renew(self) -> None:
        """Renew the places of requests in flight."""
        while True:
            await asyncio.sleep(RENEWED_S)
            try:
                for place, key in [*self._places.items()]:
                    await self._run(_RENEW, key, place, str(LEASE_S))
            except StoreUnavailable:
                count("limits")

    async def _run(self, script: str, key: str, *more: str, until: float | None = None) -> Any:
        """Run a script on a key in the store. Returns its answer. Raises StoreUnavailable."""
        store = self._store
        return await self._ask(lambda _: store.eval(script, 1, key, *more), until)  # type: ignore[union-attr]

    async def _ask(
        self, ask: Callable[[FixedWindowRateLimiter], Awaitable[T]], until: float | None = None
    ) -> T:
        """Call the store. Returns its answer. until: the deadline for a free connection, by the
        event loop's clock.

        Raises StoreUnavailable, with the store's failure as its cause, or without one if it was not
        called.
        """
        trying = self._require_answering()
        try:
            answer = await self._in_turn(ask, until, trying=trying)
        finally:
            if trying:
                self._trying = False
        self._doubtful = False
        self._warned.discard(_ALONE)
        if self._late:
            self._spawn(self._leave(*self._late.popleft()))
        return answer

    async def _in_turn(
        self,
        ask: Callable[[FixedWindowRateLimiter], Awaitable[T]],
        until: float | None,
        *,
        trying: bool,
    ) -> T:
        try:
            async with asyncio.timeout_at(until or asyncio.get_running_loop().time() + TURN_S):
                await self._turns.acquire()
        except TimeoutError:
            raise StoreUnavailable from None
        try:
            if not trying:
                self._require_answering(again=True)  # calls of other requests may have failed
            assert self._shared
            async with asyncio.timeout(STORE_S):
                return await ask(self._shared)
        except self._faults as error:
            self._failed(error)
            raise StoreUnavailable from error
        finally:
            self._turns.release()

    def _require_answering(self, *, again: bool = False) -> bool:
        """Raise StoreUnavailable if the store must not be called. Returns whether this call tries
        whether the store answers again. again: whether this is the second check of the same call,
        which then may not try.
        """
        if not self._shared or time.monotonic() < self._silent_until:
            raise StoreUnavailable
        if not self._doubtful:
            return False
        if self._trying or again:
            raise StoreUnavailable
        self._trying = True
        return True

    def _failed(self, error: Exception) -> None:
        self._silent_until = time.monotonic() + PAUSE_S
        self._doubtful = True
        log.debug("OPTION_LIMITS_URL", exc_info=error)
        self._warn(_ALONE)

    def _warn(self, trouble: str) -> None:
        """Log a failure once, until it has ended."""
        if trouble not in self._warned:
            log.error("%s", trouble)
        self._warned.add(trouble)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Finish pending calls, and close the store."""
        if self._renewing:
            self._renewing.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._store:
            await self._store.connection_pool.aclose()


_ALONE = "the store of OPTION_LIMITS_URL does not answer: each process counts by itself"


def _until(moment: float) -> int:
    """Return the whole seconds until a window's end: from 1 to the 60 of a window."""
    return min(max(math.ceil(moment - time.time()), 1), 60)


def _said(what: str, limit: int, remaining: int, reset: int) -> Headers:
    """Return OpenAI's headers of a limit (platform.openai.com/docs/guides/rate-limits)."""
    values = {"limit": f"{limit}", "remaining": f"{remaining}", "reset": f"{reset}s"}
    return [
        (RATE_LIMIT + f"{name}-{what}".encode(), value.encode()) for name, value in values.items()
    ]
