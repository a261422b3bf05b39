# SPDX-License-Identifier: Apache-2.0
"""Series as scrapers ask for them: Prometheus' text, or OpenMetrics 1.0, which has exemplars."""

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

_OPENMETRICS = b"application/openmetrics-text"


def exposition(registry: Collector, accept: bytes, *, exemplars: bool) -> tuple[bytes, bytes]:
    """The content type and body of an answer. accept: the request's header. exemplars: whether
    there can be any; OpenMetrics has nothing else that the text has not.
    """
    if not (exemplars and _OPENMETRICS in accept):
        return CONTENT_TYPE_PLAIN_0_0_4.encode(), generate_latest(registry)
    # Prometheus' client escapes names for a scraper that knows letters, digits and underscores
    # alone, and takes the colon of vLLM's for one to escape, though `# TYPE` keeps it. Names that
    # need no escaping are the same for a scraper that knows UTF-8.
    escaping = openmetrics.ALLOWUTF8
    body = openmetrics.generate_latest(registry, escaping)  # type: ignore[no-untyped-call]
    return openmetrics.CONTENT_TYPE_LATEST.encode(), body
