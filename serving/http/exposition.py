# SPDX-License-Identifier: Apache-2.0
"""Series in the scraper's format: Prometheus' text, or OpenMetrics 1.0, which has exemplars."""

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

_OPENMETRICS = b"application/openmetrics-text"


def exposition(registry: Collector, accept: bytes, *, exemplars: bool) -> tuple[bytes, bytes]:
    """Return the content type and body of an answer. accept: the request's header. exemplars:
    whether there can be any; OpenMetrics only adds these to the text format.
    """
    if not (exemplars and _OPENMETRICS in accept):
        return CONTENT_TYPE_PLAIN_0_0_4.encode(), generate_latest(registry)
    # For a scraper that only accepts letters, digits and underscores, Prometheus' client escapes
    # names. It would also escape the colon of vLLM's names, although `# TYPE` keeps it. Names
    # without escapes are the same for a scraper that accepts UTF-8.
    escaping = openmetrics.ALLOWUTF8
    body = openmetrics.generate_latest(registry, escaping)  # type: ignore[no-untyped-call]
    return openmetrics.CONTENT_TYPE_LATEST.encode(), body
