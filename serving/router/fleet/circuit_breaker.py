# SPDX-License-Identifier: Apache-2.0
"""Outlier ejection keeps requests away from a replica that fails while others work.

The figures are Envoy's (config.cluster.v3.OutlierDetection: consecutive_5xx, base_ejection_time,
max_ejection_time), except max_ejection_percent, because a fleet of models is small. This module
does no I/O and reads no clock.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

IN_A_ROW = 5
"""Server errors one after the other, after which a replica is ejected."""
UNREACHABLE = 3
"""Failures to reach it in a row, after which it is."""
WINDOW_S = 10.0
ANSWERS = 20
"""Answers in a window, before their share of errors says anything."""
ERRORS = 0.5
"""The share of errors beyond which it is ejected."""
SUSPECT = 2
"""Consecutive errors after which the next one is compared with the answer of another replica."""
COMPARED = 20
TIMES = 4
"""The error rate of this many of its latest answers must be this many times the others'; otherwise
a client's requests may be the reason.
"""
FIRST_S, LONGEST_S = 30.0, 300.0
"""The first and the longest ejection in seconds. It doubles each time, unless the replica has
served since for as long as it was ejected.
"""
STALLED = 4
"""Number of hanging requests in flight that eject a replica."""
STALLED_S = 30.0
SLOWER = 10
"""A request hangs after STALLED_S seconds without progress, or after SLOWER times the 90th
percentile of the fleet's times to the first byte, if that is longer.
"""


def is_error(status: int) -> bool:
    """Whether an answer is a fault of the replica's. A slow one is not (504), nor is that it is
    busy (503): such requests go elsewhere one by one.
    """
    return status >= 500 and status not in (503, 504)


def longest_still(first_bytes: Iterable[float]) -> float:
    """Seconds that requests may hang. first_bytes: seconds that the fleet's latest answers took to
    begin.
    """
    waits = sorted(first_bytes)
    return max(STALLED_S, SLOWER * waits[len(waits) * 9 // 10]) if waits else STALLED_S


Peers = Callable[[], Sequence["CircuitBreaker"]]


def _alone() -> Sequence["CircuitBreaker"]:
    return ()


def _untold(reason: str) -> None:
    pass


def _unchanged() -> None:
    pass


class CircuitBreaker:
    """The facts about one replica's answers, and its ejection.

    At most half of a fleet is ejected at a time, and never the last. Failures on all replicas eject
    none, because a client's requests may be the reason. An ejected replica gets one request at a
    time as a trial, the first after its time; the trial's answer readmits it, or ejects it for
    longer.
    """

    def __init__(
        self,
        peers: Peers = _alone,
        told: Callable[[str], None] = _untold,
        changed: Callable[[], None] = _unchanged,
    ) -> None:
        """peers: the other replicas that could answer its requests, as they are now. told: is
        called with the reason when it is ejected, and with "" when it is readmitted. changed: is
        called when allows_at() has another answer than before.
        """
        self._peers = peers
        self._told = told
        self._changed = changed
        self._errors: deque[bool] = deque(maxlen=COMPARED)  # of the latest answers
        self._row = 0  # errors
        self._unreachable = 0  # in a row
        self._window_start = 0.0
        self._window_answers = self._window_errors = 0
        # when one of its answers last moved
        self._moved_at = 0.0
        # ejection
        self.reason = ""
        """The reason of its ejection, or ""."""
        self._until = 0.0  # when its next trial may begin
        self._served_since = 0.0
        self._pause = FIRST_S  # of the ejection that is, or was the last
        self._trial = False  # whether one is under way

    def anew(self) -> "CircuitBreaker":
        """The breaker of the same replica, with its history forgotten."""
        return CircuitBreaker(self._peers, self._told, self._changed)

    @property
    def ejected(self) -> bool:
        return bool(self.reason)

    @property
    def suspect(self) -> bool:
        """Whether its next error may well be its own fault, and not the request's."""
        return self.ejected or self._row >= SUSPECT

    def allows(self, now: float) -> bool:
        """Whether a request may go to the replica now."""
        return not self.reason or (now >= self._until and not self._trial)

    def allows_at(self, now: float) -> float:
        """From when on allows() has another answer, as far as is known."""
        return self._until if self.reason and now < self._until and not self._trial else math.inf

    # results of its requests

    def begin(self, now: float) -> bool:
        """A request goes to the replica. Whether it is a trial, whose end must be reported."""
        trial = self.ejected and self.allows(now)
        if trial:
            self._trial = True
            self._changed()
        return trial

    def abandoned(self, now: float) -> None:
        """End a trial without a result for the replica."""
        self._trial = False
        self._until = now + self._pause
        self._changed()

    def moved(self, now: float) -> None:
        """There was more of an answer at that time."""
        self._moved_at = max(self._moved_at, now)

    def answered(self, status: int, now: float, *, trial: bool = False) -> None:
        """The replica has begun an answer."""
        self.moved(now)
        self._unreachable = 0
        error = is_error(status)
        self._errors.append(error)
        if self.ejected:
            if trial:
                self._tried(now, failed=error)
            return
        if now - self._window_start > WINDOW_S:
            self._window_start, self._window_answers, self._window_errors = now, 0, 0
        self._window_answers += 1
        self._window_errors += error
        self._row = self._row + 1 if error else 0
        if error and (reason := self._failing()):
            self._eject(reason, now)

    def unreachable(self, now: float, *, trial: bool = False) -> None:
        """The replica took no connection, or broke one off before it had answered."""
        self._errors.append(True)
        if self.ejected:
            if trial:
                self._tried(now, failed=True)
            return
        self._unreachable += 1
        if self._unreachable >= UNREACHABLE:
            self._eject(f"it could not be reached {self._unreachable} times in a row", now)

    def excused(self, now: float, *, trial: bool = False) -> None:
        """It has answered with an error, and so has another replica: it is the request's fault."""
        self.moved(now)
        self._errors.append(True)
        if trial:
            self.abandoned(now)

    def look(self, now: float, standing: int, still: float) -> None:
        """Eject it if it stands still while others answer, and readmit it when it moves again.

        still: as longest_still() has it. standing: its requests that have hung for too long.
        """
        if self.reason == _STILL and self._moved_at > self._until - self._pause:
            self._readmit(now)
        elif (
            not self.ejected
            and standing >= STALLED
            and now - self._moved_at > still
            and any(now - peer._moved_at <= still for peer in self._peers() if not peer.ejected)
        ):
            self._eject(_STILL, now)

    # decisions

    def _failing(self) -> str:
        """The reason why it seems to fail, or ""."""
        if self._row >= IN_A_ROW:
            return f"{self._row} server errors in a row"
        answers, errors = self._window_answers, self._window_errors
        if answers >= ANSWERS and errors > ERRORS * answers:
            return f"{errors} of {answers} answers were server errors"
        return ""

    def _eject(self, reason: str, now: float) -> None:
        peers = self._peers()
        out = [peer for peer in peers if peer.ejected]
        others = [peer for peer in peers if not peer.ejected]
        if len(out) + 1 > (len(peers) + 1) // 2:
            # What took the others out goes on without them.
            if all(peer._failing() for peer in others):
                for peer in out:
                    peer._readmit(now)
            return
        if reason != _STILL and not self._stands_out(others):
            return
        grows = self._served_since and now - self._served_since < self._pause
        self._pause = min(self._pause * 2, LONGEST_S) if grows else FIRST_S
        self._out(reason, now)

    def _stands_out(self, others: Iterable["CircuitBreaker"]) -> bool:
        """Whether its share of errors is so many times that of the others."""
        theirs = [error for other in others for error in other._errors]
        share = sum(theirs) / len(theirs) if theirs else 0.0
        return share < sum(self._errors) / len(self._errors) / TIMES

    def _out(self, reason: str, now: float) -> None:
        self.reason, self._until = reason, now + self._pause
        self._row = self._unreachable = 0
        self._window_start = 0.0
        self._changed()
        self._told(reason)

    def _tried(self, now: float, *, failed: bool) -> None:
        self._trial = False
        if failed:
            self._pause = min(self._pause * 2, LONGEST_S)
            self._out(self.reason, now)
        else:
            self._errors.clear()
            self._readmit(now)

    def _readmit(self, now: float) -> None:
        self.reason, self._trial = "", False
        self._served_since = now
        self._changed()
        self._told("")


_STILL = "its requests stand still"
