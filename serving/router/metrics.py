"""The router's series."""

from collections import Counter as Counts

from prometheus_client import Counter, Gauge, Histogram

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
PROMPT_TOKENS = Counter("slipway_router_prompt_tokens", "Prompt tokens, about.")
CACHED_TOKENS = Counter(
    "slipway_router_cached_tokens", "Prompt tokens that their replica was expected to have cached."
)
FALLBACKS = Counter(
    "slipway_router_fallbacks",
    "Requests for which kvaware knew no more than prefixaware.",
    ["reason"],
)
READY = Gauge(
    "slipway_router_replica_ready",
    "Whether the replica takes requests.",
    ["replica"],
    multiprocess_mode="livemin",
)
IN_FLIGHT = Gauge(
    "slipway_router_in_flight",
    "Requests under way.",
    ["replica"],
    multiprocess_mode="livesum",
)


class Tally:
    """What is counted for every request, kept as plain numbers until it is asked for.

    requests: by replica, status of its answer (0 without) and how they ended.
    """

    def __init__(self) -> None:
        self.requests: Counts[tuple[str, int, str]] = Counts()
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def flush(self) -> None:
        """Add it to the series."""
        for (replica, status, end), count in self.requests.items():
            REQUESTS.labels(replica, str(status or ""), end).inc(count)
        PROMPT_TOKENS.inc(self.prompt_tokens)
        CACHED_TOKENS.inc(self.cached_tokens)
        self.requests.clear()
        self.prompt_tokens = self.cached_tokens = 0
