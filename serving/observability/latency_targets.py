# SPDX-License-Identifier: Apache-2.0
"""Service level objectives: counts the requests that met the operator's latency targets."""

from prometheus_client import Counter

from lmi_config.options.declared import Settings
from serving.observability.access_log import AccessRecord
from serving.observability.error_rate import is_fault

_REQUESTS = Counter(
    "slipway_slo_requests",
    "Requests for text by whether they met an objective: ttft, itl, or all that are set.",
    ["objective", "result"],
)
ALL = "all"


class Objectives:
    """The operator's latency targets for requests that generate text, and their counters.

    A request that fails, unless by its client's fault, misses every objective. A request that ends
    before its first token is not counted. A request with a single token does not count for `itl`.
    """

    def __init__(self, settings: Settings) -> None:
        targets = {"ttft": settings.slo_ttft_ms, "itl": settings.slo_itl_ms}
        self._targets = {name: ms / 1000 for name, ms in targets.items() if ms}
        self._series = {
            (name, met): _REQUESTS.labels(name, "met" if met else "missed")
            for name in (*self._targets, ALL)
            for met in (True, False)
            if self._targets
        }

    def count(self, record: AccessRecord) -> None:
        """Count a request that has ended."""
        if not (self._targets and record.generates):
            return
        if record.error and is_fault(record.error):
            met = dict.fromkeys(self._targets, False)
        else:
            slowest = {"ttft": record.first_token_s, "itl": record.between_tokens_s}
            met = {
                name: took <= target
                for name, target in self._targets.items()
                if (took := slowest[name]) is not None
            }
        for name, it in met.items():
            self._series[name, it].inc(exemplar=record.exemplar)
        if met:
            self._series[ALL, all(met.values())].inc(exemplar=record.exemplar)
