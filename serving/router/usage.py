# SPDX-License-Identifier: Apache-2.0
"""Counts of tokens, as answers say them: they may come from a formatter or a bad replica."""

from typing import Any

MOST = 2**40


def counted(value: Any) -> int:
    """A count of tokens. Raises ValueError for all but whole numbers from 0 to MOST."""
    if type(value) is not int or not 0 <= value <= MOST:  # True and 1.0 are none either
        raise ValueError("not a count of tokens")
    return value
