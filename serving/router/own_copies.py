# SPDX-License-Identifier: Apache-2.0
"""What a router knows that stands before the copies of its own container."""

import dataclasses
from pathlib import Path


@dataclasses.dataclass(kw_only=True)
class OwnCopies:
    """urls: of the copies, in their order. series: a file with the supervisor's series, in
    Prometheus' text, which may not be there yet. least: how many have to be ready once all have
    been. met: whether they have. closed: whether requests need a key or another router's word, as
    those of one server would whose operator has set OPTION_ROUTER_SECRET.
    """

    urls: tuple[str, ...]
    least: int
    series: Path
    met: bool = False
    closed: bool = False

    @property
    def count(self) -> int:
        return len(self.urls)

    def supervisors_series(self) -> str:
        """The supervisor's series, as it has written them last."""
        try:
            return self.series.read_text()
        except OSError:
            return ""

    def enough(self, ready: int) -> bool:
        """Whether the container is ready with so many copies. A single one would get the requests
        of all, so at first all have to be.
        """
        self.met = self.met or ready >= self.count
        return ready >= (min(self.least, self.count) if self.met else self.count)
