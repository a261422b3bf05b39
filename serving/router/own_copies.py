# SPDX-License-Identifier: Apache-2.0
"""What a router knows that stands before the copies of its own container."""

import dataclasses


@dataclasses.dataclass(kw_only=True)
class OwnCopies:
    """count: of the copies. least: how many have to be ready once all have been. met: whether they
    have. closed: whether requests need a key or another router's word, as those of one server would
    whose operator has set OPTION_ROUTER_SECRET.
    """

    count: int
    least: int
    met: bool = False
    closed: bool = False

    def enough(self, ready: int) -> bool:
        """Whether the container is ready with so many copies. A single one would get the requests
        of all, so at first all have to be.
        """
        self.met = self.met or ready >= self.count
        return ready >= (min(self.least, self.count) if self.met else self.count)
