# SPDX-License-Identifier: Apache-2.0
"""LMCache's server as a child process: started before the engine, watched, restarted, stopped last.

While it does not run, the engine's connector notices that, and the engine serves without it. When
it runs again, the connector registers again, and there are hits again. So no request ever waits for
this module.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import httpx
from prometheus_client import REGISTRY, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from lmi_config.plan.kv_tiers import STORES
from serving.engine.base import Hits, Prefilled
from serving.follow import count, kept
from serving.observability.failure_log import FailureLog

log = logging.getLogger(__name__)

START_S = 120.0
TERM_S = 1.0  # between SIGTERM and SIGKILL
WATCH_S = 2.0  # between two checks; also the age of its metrics
HUNG_S = 15.0  # after this long without an answer, it is killed
METRICS_BYTES = 4 << 20  # of its metrics; 10 times the size with every kind of store
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before a restart; doubled each time
STEADY_S = 300.0  # after this long without a failure, the next pause is the first again
LONG = 384  # average tokens to compute; for shorter prompts, overhead dominates the time
FADES = 0.7  # the weight of the engine's earlier speed after the next measurement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
    """The capacity of the tiers. sizes: bytes of each. kept: bytes of each tier that keeps KV, if
    known. token: bytes of one token's KV, or None if unknown. store: a name of the shared store and
    the model, equal on all servers that share it, or "".
    """

    sizes: Mapping[str, int]
    kept: Mapping[str, int]
    token: int | None
    store: str = ""


class CacheServerError(Exception):
    """The cache server did not start. The message says why."""


class CacheServer(Collector):
    """`lmcache server`, kept running from start() to stop(), and its series for Prometheus.

    arguments: of `lmcache`. environ: variables in addition to our own; they may hold secrets.
    http_port: the port of its /metrics. prefilled, hits: return the tokens that the engine has
    computed and those that it found in caches. The server compares the engine's speed with that of
    loading. chunk_size: in tokens. pool: the file of its memory, which remains if it is killed.
    """

    def __init__(
        self,
        *,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        http_port: int,
        capacity: Capacity,
        prefilled: Callable[[], Prefilled],
        hits: Callable[[], Hits],
        chunk_size: int,
        pool: Path | None = None,
    ) -> None:
        self._arguments = arguments
        self._environ = environ
        self._url = f"http://127.0.0.1:{http_port}"
        self._capacity = capacity
        self._prefilled = prefilled
        self._hits = hits
        self._found = Hits(0, 0)
        self._chunk_size = chunk_size
        self._pool = pool
        self._counted = Prefilled(0, 0, 0)
        self._seconds_per_token = 0.0  # of the engine; 0 before the first measurement
        self._client = httpx.AsyncClient(trust_env=False, timeout=WATCH_S)
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._series: list[Metric] = []
        self._unreadable = FailureLog(log.warning, "the cache server's metrics cannot be read: %s")
        self._restarts = 0
        self.up = False

    async def start(self) -> None:
        """Start the server and wait until it answers. Raises CacheServerError; the series then
        show that it is down.
        """
        REGISTRY.register(self)
        try:
            await self._launch()
        except BaseException:
            await self._end()
            raise
        self._keeping = asyncio.create_task(kept("cache_server", self._keep))

    async def stop(self) -> None:
        if self._keeping:
            self._keeping.cancel()
        await self._end()
        await self._client.aclose()
        with contextlib.suppress(KeyError):
            REGISTRY.unregister(self)

    async def _launch(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "serving.kv_cache.lmcache", *self._arguments),
            env={**os.environ, "LMCACHE_DISABLE_BANNER": "1", **self._environ},
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,  # only we get Ctrl-C
        )
        deadline = time.monotonic() + START_S
        while self._process.returncode is None:
            if await self._answers():
                self.up = True
                return
            if time.monotonic() > deadline:
                await self._end()
                raise CacheServerError(f"it does not answer after {START_S:.0f} s")
            await asyncio.sleep(0.25)
        raise CacheServerError(f"it ended with exit code {self._process.returncode}")

    async def _keep(self) -> None:
        """Watch the server, and restart it when it has ended or hangs. Never returns."""
        pause, began = FIRST_PAUSE_S, time.monotonic()
        while True:
            try:
                if self.up:
                    trouble = await self._trouble()
                    self.up = False
                    self._series = []
                    await self._end()
                    if time.monotonic() - began > STEADY_S:
                        pause = FIRST_PAUSE_S
                    log.error(
                        "the cache server is away; requests are served without it: %s",
                        trouble,
                        extra={"facts": {"again_in_s": pause}},
                    )
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                self._restarts += 1
                await self._launch()
                began = time.monotonic()
                log.warning("the cache server is back")
            except Exception as error:  # for example, a fork without memory: try again
                facts = {"facts": {"again_in_s": pause, "kind": type(error).__name__}}
                log.error("the cache server did not start: %s", error, extra=facts)
                count("cache_server")

    async def _trouble(self) -> str:
        """Wait until the server has ended or hangs. Returns the reason."""
        assert self._process
        answered = time.monotonic()
        # One wait() for all iterations: the process keeps every cancelled wait().
        ended = asyncio.ensure_future(self._process.wait())
        try:
            while not ended.done():
                if await self._answers():
                    answered = time.monotonic()
                    self._pass_on_speed()
                    # Not in collect(): the registry of the engine's series may be locked then.
                    self._found = self._hits()
                    await self._read_series()
                elif time.monotonic() - answered > HUNG_S:
                    return f"it has not answered for {HUNG_S:.0f} s"
                await asyncio.wait({ended}, timeout=WATCH_S)
        finally:
            ended.cancel()
        return f"it ended with exit code {self._process.returncode}"

    def _pass_on_speed(self) -> None:
        """Measure the engine's speed of computing prompts, and write it to the server's input."""
        early, late = self._counted, self._prefilled()
        requests, tokens, seconds = (new - old for new, old in zip(late, early, strict=True))
        self._counted = late
        if requests and tokens / requests >= LONG:
            now = seconds / tokens
            last = self._seconds_per_token or now
            self._seconds_per_token = FADES * last + (1 - FADES) * now
        if self._seconds_per_token:
            assert self._process
            assert self._process.stdin
            self._process.stdin.write(b"%f\n" % (self._seconds_per_token * self._chunk_size))

    async def _answers(self) -> bool:
        try:
            async with self._client.stream("GET", f"{self._url}/healthcheck") as answer:
                return answer.status_code == 200
        except httpx.HTTPError:
            return False

    async def _read_series(self) -> None:
        """Read the series of the server's metrics. A failure has no other effect."""
        text = bytearray()
        try:
            async with self._client.stream("GET", f"{self._url}/metrics") as answer:
                answer.raise_for_status()
                async for piece in answer.aiter_bytes():
                    text += piece
                    if len(text) > METRICS_BYTES:
                        raise ValueError(f"they are longer than {METRICS_BYTES} bytes")
            self._series = await asyncio.to_thread(_series, text.decode())
        except (httpx.HTTPError, ValueError) as error:
            self._series = []
            self._unreadable.note(error)
        else:
            self._unreadable.note(None)

    async def _end(self) -> None:
        process = self._process
        if process and process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(TERM_S):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if self._pool:
            self._pool.unlink(missing_ok=True)

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "slipway_kv_cache_server_up",
            "Whether the cache server answers; requests are served without tiers while it is 0.",
            int(self.up),
        )
        yield CounterMetricFamily(
            "slipway_kv_cache_server_restarts", "Starts after the first.", self._restarts
        )
        yield _filled(
            GaugeMetricFamily(
                "slipway_kv_tier_capacity_bytes", "The size of each KV cache tier.", labels=["tier"]
            ),
            self._capacity.sizes,
        )
        yield from self._for_routers()
        # LMCache's names (0.5.6, `lmcache/observability.py`) of the same series in an engine.
        yield CounterMetricFamily(
            "lmcache:num_vllm_hit_tokens", "Tokens that the engine had itself.", self._found.engine
        )
        yield CounterMetricFamily(
            "lmcache:num_hit_tokens", "Tokens that were loaded from the tiers.", self._found.tiers
        )
        yield from self._series

    def _for_routers(self) -> Iterable[Metric]:
        """Yield the tiers' series for routers, in tokens."""
        capacity = self._capacity
        if capacity.token:
            tokens = {tier: size // capacity.token for tier, size in capacity.kept.items()}
            yield _filled(
                GaugeMetricFamily(
                    "slipway_kv_tier_capacity_tokens",
                    "The tokens whose KV each tier keeps.",
                    labels=["tier"],
                ),
                tokens,
            )
            loads = {
                sample.labels["l2_name"]: sample.value * capacity.token
                for family in self._series
                if family.name == "slipway_kv_load_seconds_per_byte"
                for sample in family.samples
            }
            yield _filled(
                GaugeMetricFamily(
                    "slipway_kv_tier_load_seconds_per_token",
                    "What loading a token's KV from a tier takes, as measured last.",
                    labels=["tier"],
                ),
                {"disk" if name == "disk" else "shared": load for name, load in loads.items()},
            )
        yield GaugeMetricFamily(
            "slipway_kv_chunk_tokens",
            "The tokens of a chunk, by which the tiers find KV.",
            self._chunk_size,
        )
        if self._seconds_per_token:
            yield GaugeMetricFamily(
                "slipway_prefill_seconds_per_token",
                "What the engine takes to compute a prompt token, as measured last.",
                self._seconds_per_token,
            )
        if capacity.store:
            yield _filled(
                GaugeMetricFamily(
                    "slipway_kv_shared_store_info",
                    "Servers with the same store share what is in it.",
                    labels=["store"],
                ),
                {capacity.store: 1},
            )


def _filled(family: GaugeMetricFamily, values: Mapping[str, float]) -> GaugeMetricFamily:
    """Add a value for each label to the family, and return it."""
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def _series(text: str) -> list[Metric]:
    """Return the series for operators, with our names of stores. Raises ValueError.

    Times of counters' creation are left out: the text has them as gauges, which OpenMetrics
    forbids.
    """
    families = []
    for family in text_string_to_metric_families(text):
        # Without the series of its process, which this process also has.
        ours = family.name.startswith(("lmcache", "slipway_kv"))
        if ours and not family.name.endswith("_created"):
            family.samples = [
                sample._replace(
                    labels={name: STORES.get(label, label) for name, label in sample.labels.items()}
                )
                for sample in family.samples
            ]
            families.append(family)
    return families
