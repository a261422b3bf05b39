# SPDX-License-Identifier: Apache-2.0
"""The router's series."""

import warnings
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterator, Mapping, Set
from typing import NamedTuple

import prometheus_client
from prometheus_client import Counter, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from serving.cache_hints import hints


class Histogram(prometheus_client.Histogram):
    """A histogram that buffers observations as plain numbers until its series are read."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._counts = [0] * len(self._buckets)
        self._total = 0.0

    def add(self, amount: float) -> None:
        """Observe it, without an exemplar."""
        self._counts[bisect_left(self._upper_bounds, amount)] += 1
        self._total += amount

    def flush(self) -> None:
        """Add the gathered numbers to the series."""
        self._sum.inc(self._total)
        for bucket, count in zip(self._buckets, self._counts, strict=True):
            bucket.inc(count)
        self._counts = [0] * len(self._buckets)
        self._total = 0.0


REQUESTS = Counter(
    "slipway_router_requests",
    "Requests that are over: finished, cut off by the replica, cancelled by the client, failed.",
    ["replica", "status", "end"],
)
RETRIES = Counter("slipway_router_retries", "Requests sent to another replica.", ["reason"])
DECISION = Histogram(
    "slipway_router_decision_seconds",
    "What it took to choose a replica.",
    buckets=(2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3),
)
FIRST_BYTE = Histogram(
    "slipway_router_first_byte_seconds",
    "From a whole request to the first byte of its answer.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
FORECAST = Histogram(
    "slipway_router_first_token_forecast_ratio",
    "Forecast / measured time to the first token of streamed answers.",
    buckets=(0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.7, 2, 4),
)
PROMPT_TOKENS = Counter("slipway_router_prompt_tokens", "Prompt tokens, about.")
CACHED_TOKENS = Counter(
    "slipway_router_cached_tokens", "Prompt tokens that their replica was expected to have cached."
)
TURN_RECOMPUTED = Histogram(
    "slipway_turn_recomputed_tokens",
    "Prompt tokens that the conversation's last turn had as well, and that are computed again.",
    buckets=(0, 256, 1024, 4096, 16_384, 65_536, 262_144),
)
MOVES = Counter(
    "slipway_router_session_moves",
    "Turns of conversations that went to another replica than the last one, by the reason.",
    ["reason"],
)
PREFILLS = Counter(
    "slipway_router_prefills",
    "Long prompts for servers that decode: handed over by one that prefills, or why that was not.",
    ["end"],
)
PREFILL = Histogram(
    "slipway_router_prefill_seconds",
    "What it took to have a prompt computed that was handed over.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
HELD = Histogram(
    "slipway_router_held_wait_seconds",
    "How long those requests were held that got their turn.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
UNHELD = Counter(
    "slipway_router_held_refused",
    "Requests that were held, or were to be, and did not get their turn.",
    ["reason"],
)
USAGE = Counter(
    "slipway_router_usage_tokens",
    "Tokens that answers say they have used, as an endpoint picker sees them pass.",
    ["kind"],
)
FALLBACKS = Counter(
    "slipway_router_fallbacks",
    "Requests for which kvaware knew no more than prefixaware.",
    ["reason"],
)


class ReplicaState(NamedTuple):
    """The values of a replica's series: role and kv_usage as its Facts have them. queued: prompt
    tokens to compute there. seconds_per_token: 0 while unknown. seconds: that the queued tokens
    take.
    """

    ready: bool
    in_flight: int
    role: str
    queued: int
    seconds_per_token: float
    seconds: float
    kv_usage: float | None


class HeldWork(NamedTuple):
    """requests: number of requests that wait for a replica. seconds: time to compute their
    prompts.
    """

    requests: int
    seconds: float


class CurrentSeries(Collector):
    """All series, except those of replicas that have long left.

    Prometheus' client cannot remove series from the files that several processes share, so they are
    filtered when they are read.
    """

    def __init__(
        self,
        source: Collector,
        states: Mapping[str, ReplicaState],
        held: HeldWork,
        counted: Set[str],
    ) -> None:
        """source: all series. states: by replica. counted: the replicas whose series are shown."""
        self._source = source
        self._states = states
        self._held = held
        self._counted = counted

    def collect(self) -> Iterator[Metric]:
        """The series, as Prometheus' client wants them."""
        shown = {None, "", *self._counted}
        for metric in self._source.collect():
            metric.samples = [it for it in metric.samples if it.labels.get("replica") in shown]
            yield metric
        ready = GaugeMetricFamily(
            "slipway_router_replica_ready",
            "Whether the replica takes requests.",
            labels=["replica"],
        )
        in_flight = GaugeMetricFamily(
            "slipway_router_in_flight", "Requests under way.", labels=["replica"]
        )
        tokens = GaugeMetricFamily(
            "slipway_router_backlog_tokens",
            "Prompt tokens that the replica has to compute before answers can begin, about.",
            labels=["replica", "role"],
        )
        seconds = GaugeMetricFamily(
            "slipway_router_backlog_seconds",
            "What the replica takes to compute them.",
            labels=["replica", "role"],
        )
        rate = GaugeMetricFamily(
            "slipway_router_prefill_tokens_per_second",
            "Prompt tokens that the replica computes in a second, as measured; 0 while unknown.",
            labels=["replica"],
        )
        usage = GaugeMetricFamily(
            "slipway_router_kv_usage",
            "The share of the replica's KV cache that is in use, as it said last.",
            labels=["replica"],
        )
        for name, it in self._states.items():
            ready.add_metric([name], it.ready)
            in_flight.add_metric([name], it.in_flight)
            tokens.add_metric([name, it.role], it.queued)
            seconds.add_metric([name, it.role], it.seconds)
            rate.add_metric([name], 1 / it.seconds_per_token if it.seconds_per_token else 0)
            if it.kv_usage is not None:
                usage.add_metric([name], it.kv_usage)
        held = GaugeMetricFamily(
            "slipway_router_held",
            "Requests that wait in the router for a replica.",
            self._held.requests,
        )
        held_seconds = GaugeMetricFamily(
            "slipway_router_held_seconds",
            "What one replica takes to compute the prompts of those requests.",
            self._held.seconds,
        )
        yield from (ready, in_flight, tokens, seconds, rate, usage, held, held_seconds)


def forget(replica: str) -> None:
    """Drop this process's series of a replica."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the shared files keep it
        REQUESTS.remove_by_labels({"replica": replica})


class Tally:
    """Counters of every request, kept as plain numbers until a scrape."""

    def __init__(self) -> None:
        self.requests: Counts[tuple[str, int, str]] = Counts()
        """By replica, status of its answer (0 without) and how they ended."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.hints: Counts[tuple[tuple[str, ...], tuple[str, ...]]] = Counts()
        """Requests with hints, by the fields `taken` and `ignored` of their CacheIntent."""

    def flush(self) -> None:
        """Add it to the series."""
        for (replica, status, end), count in self.requests.items():
            REQUESTS.labels(replica, str(status or ""), end).inc(count)
        for fields, count in self.hints.items():
            hints.add(*fields, count)
        PROMPT_TOKENS.inc(self.prompt_tokens)
        CACHED_TOKENS.inc(self.cached_tokens)
        DECISION.flush()
        TURN_RECOMPUTED.flush()
        FIRST_BYTE.flush()
        FORECAST.flush()
        HELD.flush()
        self.requests.clear()
        self.hints.clear()
        self.prompt_tokens = self.cached_tokens = 0
