# SPDX-License-Identifier: Apache-2.0
"""What keeps requests from a replica that does not do its work."""


class CircuitBreaker:
    """What keeps requests from a replica that cannot be reached, or answers mostly with errors.

    Slow answers (504 too) are no reason. A replica that says it is busy (503, 429) is none either:
    such requests go elsewhere one by one.
    """

    UNREACHABLE = 3
    """Failures to reach it in a row, after which it opens."""
    WINDOW_S = 10.0
    ANSWERS = 20
    """Answers in a window, before their share of errors says anything."""
    ERRORS = 0.5
    """The share of errors beyond which it opens."""
    FIRST_S, LONGEST_S = 1.0, 30.0
    """It stays open for so long at first, and at most: twice as long each time in a row."""

    def __init__(self) -> None:
        self._open_until = 0.0
        self._pause = self.FIRST_S
        self._unreachable = 0
        self._window_start = 0.0
        self._answers = self._errors = 0

    def is_open(self, now: float) -> bool:
        """Whether no requests should go to the replica now."""
        return now < self._open_until

    def unreachable(self, now: float) -> None:
        """The replica took no connection, or broke one off before it had answered."""
        self._unreachable += 1
        if self._unreachable >= self.UNREACHABLE and not self.is_open(now):
            self._open(now)

    def answered(self, status: int, now: float) -> None:
        """The replica has begun an answer."""
        self._unreachable = 0
        if now - self._window_start > self.WINDOW_S:
            self._window_start, self._answers, self._errors = now, 0, 0
        self._answers += 1
        if status >= 500 and status not in (503, 504):
            self._errors += 1
            enough = self._answers >= self.ANSWERS
            if enough and self._errors > self.ERRORS * self._answers and not self.is_open(now):
                self._open(now)
        else:
            self._pause = self.FIRST_S

    def _open(self, now: float) -> None:
        self._open_until = now + self._pause
        self._pause = min(self._pause * 2, self.LONGEST_S)
        self._window_start = 0.0
