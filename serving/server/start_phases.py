# SPDX-License-Identifier: Apache-2.0
"""The phases of vLLM's start, as its own log lines report them (vLLM 0.32).

Each rank logs its own times, all at once, so a phase takes as long as its slowest rank.
"""

import logging
import re
from collections.abc import Mapping

from prometheus_client import Gauge

from serving.observability import capture

PATTERNS: Mapping[str, tuple[str, re.Pattern[str]]] = {
    "weights": (
        "Model loading took %s GiB memory and %.6f seconds",
        re.compile(r"Model loading took \S+ GiB memory and ([\d.]+) seconds"),
    ),
    "compile": (
        "torch.compile took %.2f s in total",
        re.compile(r"torch\.compile took ([\d.]+) s in total"),
    ),
    "profile": (
        "Initial profiling/warmup run took %.2f s",
        re.compile(r"Initial profiling/warmup run took ([\d.]+) s"),
    ),
    "graphs": (
        "Graph capturing finished in %.0f secs",
        re.compile(r"Graph capturing finished in ([\d.]+) secs"),
    ),
}
"""By phase: vLLM's format string, which a test looks for in its source, and the line's pattern."""
REST = "rest"

_SECONDS = Gauge(
    "slipway_start_loading_seconds",
    "How long each phase of loading the model took, by vLLM's own lines.",
    ["phase"],
)
_found: dict[str, float] = {}


def notice(record: logging.LogRecord) -> None:
    """Take the seconds from a line of vLLM's log, if it has any."""
    if not record.name.startswith("vllm."):
        return
    message = record.getMessage()
    for phase, (_, pattern) in PATTERNS.items():
        if match := pattern.search(message):
            _found[phase] = max(_found.get(phase, 0.0), float(match[1]))


def follow() -> None:
    """Notice vLLM's lines from here on."""
    capture.listen(notice)


def report(loading: float) -> Mapping[str, float]:
    """Set the series, and return the seconds by phase. vLLM does not report the rest.

    loading: the seconds of the whole step.
    """
    phases = dict(_found)
    phases[REST] = max(loading - sum(phases.values()), 0.0)
    for phase, seconds in phases.items():
        _SECONDS.labels(phase).set(seconds)
    return phases
