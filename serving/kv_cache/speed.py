# SPDX-License-Identifier: Apache-2.0
"""How fast something is, as measured on the work itself."""

from dataclasses import dataclass


@dataclass
class Speed:
    """A running average of the seconds that a unit of work takes. Recent work weighs more."""

    fades: float
    """What is left of a measurement's weight after the next one."""
    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self.amount = self.fades * self.amount + amount
        self.seconds = self.fades * self.seconds + seconds

    @property
    def seconds_per_unit(self) -> float:
        """0 while nothing was measured."""
        return self.seconds / self.amount if self.amount else 0.0
