# SPDX-License-Identifier: Apache-2.0
"""In LMCache's server: series of its look-ups, with the names of LMCache inside an engine.

Source: `lmcache/observability.py` of 0.5.6. LMCache's dashboards use these names.
"""

from collections.abc import Callable

from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.mp_observability.event_bus import EventSubscriber
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

_RATES = tuple(tenth / 10 for tenth in range(1, 11))


class Lookups(EventSubscriber):  # type: ignore[misc]  # not type-checked
    """Counts the tokens that were looked up, and those that were found."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._tokens = Counter(
            "lmcache:num_lookup_tokens",
            "Tokens of prompts that were looked up in the tiers.",
            registry=registry,
        )
        self._hits = Counter(
            "lmcache:num_lookup_hits", "Those of them that a tier had.", registry=registry
        )
        self._rates = Histogram(
            "lmcache:request_cache_hit_rate",
            "The part of a prompt that the tiers had, of prompts of which they had any.",
            buckets=_RATES,
            registry=registry,
        )

    def get_subscriptions(self) -> dict[EventType, Callable[[Event], None]]:
        return {EventType.MP_LOOKUP_PREFETCH_END: self._count}

    def _count(self, event: Event) -> None:
        wanted, hits = (event.metadata[name] for name in ("requested_tokens", "hit_tokens"))
        self._tokens.inc(wanted)
        self._hits.inc(hits)
        if hits:
            self._rates.observe(hits / wanted)
