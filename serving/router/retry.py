# SPDX-License-Identifier: Apache-2.0
"""How many requests may be sent to a second replica."""


class RetryBudget:
    """The retry budget, which keeps retries from overloading the fleet: a tenth of the requests,
    and 100 in a row for the death of a replica.
    """

    SHARE = 0.1
    RESERVE = 100.0

    def __init__(self) -> None:
        self._left = self.RESERVE

    def earn(self) -> None:
        """One more request has come."""
        self._left = min(self._left + self.SHARE, self.RESERVE)

    def spend(self) -> bool:
        """Take one retry, if there is one."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
