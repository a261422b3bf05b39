# SPDX-License-Identifier: Apache-2.0
"""How long fuzzers run: SLIPWAY_FUZZ=20 for twenty times the examples. The default is a quarter:
the examples are the same in each ordinary run, and find the defects of a change.
"""

import os
from typing import Any

from hypothesis import HealthCheck, settings

TIMES = float(os.environ.get("SLIPWAY_FUZZ", "0.25"))
FEWEST = 10


def examples(count: int) -> Any:
    return settings(
        max_examples=max(round(count * TIMES), min(count, FEWEST)),
        suppress_health_check=[*HealthCheck],
    )
