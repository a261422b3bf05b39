# SPDX-License-Identifier: Apache-2.0
"""The measured speed of work."""

from dataclasses import dataclass


@dataclass
class Speed:
    """A running average of the seconds that a unit of work takes. Recent work weighs more."""

    fades: float
    """Each measurement multiplies the weight of the earlier ones by this factor."""
    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self.amount = self.fades * self.amount + amount
        self.seconds = self.fades * self.seconds + seconds

    @property
    def seconds_per_unit(self) -> float:
        """Seconds per unit; 0 before the first measurement."""
        return self.seconds / self.amount if self.amount else 0.0
