# SPDX-License-Identifier: Apache-2.0
"""The hints of a server's requests, read and counted."""

import functools
from collections.abc import Callable, Iterable

from prometheus_client import Counter

from serving.cache_hints.intent import CacheIntent, HintKeys, own_key, read

_HINTS = Counter(
    "slipway_cache_hints",
    "Hints about KV caches in requests, by field, and by whether they were understood.",
    ["field", "taken"],
)
_counter = functools.cache(_HINTS.labels)  # a look-up of prometheus_client costs 2 µs


class Hints:
    """Reads the hints of requests. session_key: the header or body's key that the operator has
    named for a conversation's id, or None.
    """

    def __init__(self, session_key: str | None) -> None:
        self._own = own_key(session_key)

    def of(
        self,
        headers: Iterable[tuple[bytes, bytes]],
        keys: HintKeys,
        body: bytes,
        tenant: str | None,
        *,
        low: bool,
        order: Callable[[], bool],
    ) -> CacheIntent:
        """Return what a request says, and count its fields. As intent.read() has it.

        order: puts the documents into canonical order, by the client's consent, and returns whether
        it has done so.
        """
        named = dict(headers)
        intent = read(named, keys, body, tenant, own=self._own(named, body), low=low)
        if intent.any_order and not order():
            intent = intent.in_given_order()
        count(intent)
        return intent


def count(intent: CacheIntent) -> None:
    """Count the fields of a request, each once."""
    add(intent.taken, intent.ignored, 1)


def add(taken: Iterable[str], ignored: Iterable[str], requests: int) -> None:
    """Count the fields of equal requests. taken, ignored: as CacheIntent has them."""
    for fields, understood in ((taken, "true"), (ignored, "false")):
        for field in dict.fromkeys(fields):
            _counter(field, understood).inc(requests)
