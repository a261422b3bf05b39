# SPDX-License-Identifier: Apache-2.0
"""Differences among replicas that should be identical, in words for an operator."""

from collections.abc import Iterable, Mapping, Sequence

from serving.router.fleet.replicas import Replica

SHOWN = 3
"""Maximum number of identical replicas to name."""


def differences(
    replicas: Sequence[Replica], tenant_header: str, *, divides: bool
) -> dict[str, str]:
    """The differences between replicas: name (`roles`, `models`, `tenants`, `chunks`, `stores`) → a
    description with the consequence.

    tenant_header: the router's header for tenants, or "". divides: whether the router has prompts
    computed by prefill replicas. Missing facts are not a difference.
    """
    found = {}
    prefilling = [it for it in replicas if it.role == "prefill"]
    if prefilling and not divides:
        found["roles"] = (
            "servers with the role prefill are not used while others are ready: the router needs "
            "OPTION_ROUTER_SECRET, and the strategy prefixaware or kvaware"
        )
    elif alone := [
        (it.role, it)
        for it in replicas
        if it.role == "decode" and not any(p.hands_over_to(it, fetching=True) for p in prefilling)
    ]:
        found["roles"] = (
            f"{_listed(_by(alone))} share no KV store with a server of the role prefill, and "
            "compute all prompts themselves"
        )
    models = _by((it.model, it) for it in replicas if it.model)
    if len(models) > 1:
        found["models"] = (
            f"replicas serve different models: {_listed(models)}; a request goes to those that "
            "have the model that it names, and one that names none goes to any"
        )
    tenants = _by((it.tenant_header, it) for it in replicas if it.tenant_header is not None)
    if tenants.keys() - {tenant_header}:
        router = tenant_header or "nothing"
        told = {header or "nothing": names for header, names in tenants.items()}
        found["tenants"] = (
            f"tenants are told apart by {_listed(told)}, at the router by {router}: where that is "
            "nothing they share KV caches; set OPTION_CACHE_SALT_HEADER to the same everywhere"
        )
    for model in models or [""]:
        alike = [it for it in replicas if it.model == model]
        chunks = _by((f"{it.chunk} tokens", it) for it in alike if it.chunk)
        stores = _by((it.capacity.store, it) for it in alike if it.capacity.store)
        if len(chunks) > 1:
            found["chunks"] = (
                f"KV cache tiers have chunks of {_listed(chunks)}: what one has stored in a shared "
                "store others do not find; give all one chunk_size (OPTION_LMCACHE_CONFIG_FILE)"
            )
        elif len(stores) > 1:
            found["stores"] = (
                f"shared KV stores are not the same: {_listed(stores)}; their address, the "
                "model's files, its dtype or the versions of vLLM and LMCache differ"
            )
    return found


def _by(described: Iterable[tuple[str, Replica]]) -> Mapping[str, list[str]]:
    """The names of the replicas of each description."""
    found: dict[str, list[str]] = {}
    for description, replica in described:
        found.setdefault(description, []).append(replica.name)
    return found


def _listed(groups: Mapping[str, list[str]]) -> str:
    """`a (http://x, http://y), b (http://z and 4 more)`."""
    return ", ".join(
        f"{description} ({', '.join(names[:SHOWN])}"
        + (f" and {len(names) - SHOWN} more)" if len(names) > SHOWN else ")")
        for description, names in groups.items()
    )
