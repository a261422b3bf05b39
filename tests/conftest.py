"""Hypothesis everywhere: the same examples in each run, and no time limit on noisy machines."""

from hypothesis import settings

settings.register_profile("steady", derandomize=True, database=None, deadline=None)
settings.load_profile("steady")
