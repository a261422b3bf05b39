# SPDX-License-Identifier: Apache-2.0
"""LMCache counts all tenants together."""

from typing import Any

from serving.patching.patch import CACHE_SERVER, Name, Patch, replace


class _AllLabelsBut(set[str]):
    """The set of all labels except these, for a View."""

    def __contains__(self, label: object) -> bool:
        return not super().__contains__(label)


def _put() -> None:
    import opentelemetry.sdk.metrics
    from lmcache.v1.mp_observability.subscribers.metrics.sm_lifecycle import SMLifecycleSubscriber
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.view import View

    class SummedTenants(MeterProvider):
        """A provider of meters that count all tenants together, and leave out the model's name."""

        def __init__(self, **more: Any) -> None:
            labels = _AllLabelsBut({"cache_salt", "model_name"})
            kept = View(instrument_name="*", attribute_keys=labels)
            super().__init__(views=[kept], **more)

    # LMCache looks up the class of its meters at its start.
    opentelemetry.sdk.metrics.MeterProvider = SummedTenants  # type: ignore[misc, assignment]
    replace(
        SMLifecycleSubscriber,
        "_bump_salt_counter",
        lambda count: lambda self, _: count(self, ""),
    )


PATCH = Patch(
    name="summed_tenants",
    process=CACHE_SERVER,
    names=(
        Name("opentelemetry.sdk.metrics:MeterProvider"),
        Name(
            "lmcache.v1.mp_observability.subscribers.metrics.sm_lifecycle:"
            "SMLifecycleSubscriber._bump_salt_counter",
            "self, salt",
        ),
    ),
    does="Sums LMCache's series over tenants.",
    why="LMCache keeps separate series for each cache_salt without end, because it expects salts "
    "from an operator. In Slipway, clients choose them.",
    without="clients could make the cache server's series grow without limit",
    closed=True,
    put=_put,
)
