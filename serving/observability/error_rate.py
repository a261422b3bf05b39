# SPDX-License-Identifier: Apache-2.0
"""LMI's SERVING_ERROR_RATE_*: after too many errors /ping fails, and the server is replaced."""

import time
from collections import deque
from collections.abc import Callable, Mapping

from lmi_config.options.declared import Settings
from serving.errors import (
    AdapterFailed,
    EngineFailed,
    NotReady,
    Overloaded,
    ServerFailed,
    ServingError,
    TimedOut,
    UserCodeFailed,
)

# LMI's kinds: no capacity or not ready (wlm), failures of the server, and failures of the model.
_KINDS: Mapping[type[ServingError], str] = {
    NotReady: "wlm",
    Overloaded: "wlm",
    ServerFailed: "server",
    EngineFailed: "model",
    TimedOut: "model",
    AdapterFailed: "model",
    UserCodeFailed: "model",
}


def _kind(error: ServingError) -> str | None:
    return next((kind for base, kind in _KINDS.items() if isinstance(error, base)), None)


def is_fault(error: ServingError) -> bool:
    """Whether the server caused an error, and not the client."""
    return _kind(error) is not None


class ErrorRates:
    """Counts errors by LMI's kinds, up to the operator's limits. Clients' errors do not count."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        limits = {
            "wlm": settings.error_rate_wlm,
            "server": settings.error_rate_server,
            "model": settings.error_rate_model,
            "any": settings.error_rate_any,
        }
        self._limits = {kind: limit for kind, limit in limits.items() if limit}
        self._clock = clock
        # The latest limit + 1 times suffice to tell whether the limit is exceeded.
        self._times = {
            kind: deque[float](maxlen=count + 1) for kind, (count, _) in self._limits.items()
        }

    def count(self, error: ServingError) -> None:
        if kind := _kind(error):
            for name in {kind, "any"} & self._times.keys():
                self._times[name].append(self._clock())

    def clear(self) -> None:
        """Forget the errors so far."""
        for times in self._times.values():
            times.clear()

    def exceeded(self) -> str | None:
        """Return a sentence that names the exceeded limit, or None."""
        now = self._clock()
        for kind, times in self._times.items():
            count, seconds = self._limits[kind]
            if len(times) > count and now - times[0] <= seconds:
                return (
                    f"more than {count} errors in {seconds} s; "
                    f"SERVING_ERROR_RATE_{kind.upper()} sets the limit"
                )
        return None
