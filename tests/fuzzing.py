# SPDX-License-Identifier: Apache-2.0
"""How long fuzzers run: SLIPWAY_FUZZ=20 for twenty times the examples."""

import os
from typing import Any

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("SLIPWAY_FUZZ", "1"))


def examples(count: int) -> Any:
    return settings(
        max_examples=count * TIMES,
        suppress_health_check=[*HealthCheck],
    )
