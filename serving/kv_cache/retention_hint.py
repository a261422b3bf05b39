# SPDX-License-Identifier: Apache-2.0
"""A request's hint to the cache server: how long its conversation's KV stays useful.

The hint is a value of vLLM's `kv_transfer_params`. LMCache's connector hands keys that begin with
`lmcache.` to its server with each look-up, and they change no key of the KV cache (0.5.6,
`extract_request_configs_from_sampling_params`).
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from serving.cache_hints.intent import CacheIntent

KEY = "lmcache.slipway"
_UNREADABLE = (msgspec.ValidationError, TypeError)


class RetentionHint(msgspec.Struct, frozen=True, omit_defaults=True):
    """The worth of a request's chunks to a cache server.

    tenant: a digest, "" without tenants. session: of the conversation, "" without one. seconds: how
    long the KV of the whole prompt stays useful after the request. low: whether the KV is worth
    less than that of others. final: whether the conversation has ended.
    """

    tenant: str = ""
    session: str = ""
    seconds: int = 0
    low: bool = False
    final: bool = False


def told(intent: CacheIntent, tenant: str | None, most: int) -> Mapping[str, object]:
    """Return a request's hint as a part of `kv_transfer_params`, empty if it has none.

    most: seconds that a lifetime is cut to; 0 if the server keeps to no lifetimes.
    """
    if not most or not (intent.seconds or intent.low or intent.final):
        return {}
    hint = RetentionHint(
        tenant=hashlib.sha256(tenant.encode()).hexdigest()[:16] if tenant else "",
        session=intent.session,
        seconds=min(intent.seconds, most),
        low=intent.low,
        final=intent.final,
    )
    return {KEY: msgspec.to_builtins(hint)}


def read(configs: Mapping[str, Any] | None) -> RetentionHint | None:
    """Return the hint of a request in the cache server. configs: LMCache's `request_configs`."""
    if not configs or KEY not in configs:
        return None
    try:
        return msgspec.convert(configs[KEY], RetentionHint)
    except _UNREADABLE:  # of a server of another version
        return None
