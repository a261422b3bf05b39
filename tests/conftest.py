# SPDX-License-Identifier: Apache-2.0
"""Hypothesis everywhere: no time limits on noisy machines, and the same examples in each run of CI,
which is to judge a change and not to find what was there before it.
"""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "random",
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("same", settings.get_profile("random"), derandomize=True)
settings.load_profile("same" if os.environ.get("CI") else "random")
