# SPDX-License-Identifier: Apache-2.0
"""The verdict on a run of a container with several models: its swaps, waits and faults."""

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from typing import NamedTuple

LEAST_WAIT_S = 30.0
"""Seconds after which a waiting request forces a swap, if two starts are shorter."""
ROUNDING_S = 0.5
"""Tolerated in comparisons of the log's times with times that other processes have measured."""


class Asked(NamedTuple):
    """One request. status: of the answer; 0 without one. named: the model in the answer. held_s:
    seconds in the router's queue, or those until the error.
    """

    model: str
    status: int
    named: str
    held_s: float


class Up(NamedTuple):
    """One start of a model, until it makes room: seconds since the epoch. ready, stopping: None if
    it has not come to that.
    """

    model: str
    starting: float
    ready: float | None
    stopping: float | None

    @property
    def start_s(self) -> float:
        return self.ready - self.starting if self.ready else 0.0


def ups(log: str) -> list[Up]:
    """The starts in a container's log."""
    found: list[Up] = []
    for model, state, at in _states(log):
        last = next((n for n, it in reversed([*enumerate(found)]) if it.model == model), None)
        if state == "starting":
            found.append(Up(model, at, None, None))
        elif last is not None and state == "ready":
            found[last] = found[last]._replace(ready=at)
        elif last is not None and state == "stopping":
            found[last] = found[last]._replace(stopping=at)
    return found


def _states(log: str) -> Iterator[tuple[str, str, float]]:
    for text in log.splitlines():
        line = json.loads(text) if text.startswith("{") and '"state"' in text else {}
        if line.get("message") == "model":
            yield line["model"], line["state"], datetime.fromisoformat(line["time"]).timestamp()


def longest_wait(found: Sequence[Up]) -> float:
    """The bound of a request's wait, in seconds: until a swap may be forced, and the swap. Another
    swap comes before it if the request's model was just stopped.
    """
    start_s = max((it.start_s for it in found), default=0.0)
    swaps = [
        next_.ready - one.stopping
        for one, next_ in pairwise(found)
        if one.stopping and next_.ready and next_.ready > one.stopping
    ]
    return max(2 * start_s, LEAST_WAIT_S) + 2 * max(swaps, default=start_s)


def unanswered(asked: Sequence[Asked]) -> Iterator[str]:
    """Yield the requests that were not answered by their model."""
    for it in asked:
        if (it.status, it.named) != (200, it.model):
            yield f"a request for {it.model} got {it.status} of {it.named or 'no model'}"


def unfair(asked: Sequence[Asked], found: Sequence[Up]) -> Iterator[str]:
    """Yield the models that made room earlier than their start took, and the requests that waited
    beyond the bound.
    """
    for up in found:
        if up.ready and up.stopping and up.stopping - up.ready < up.start_s - ROUNDING_S:
            yield (
                f"{up.model} started for {up.start_s:.1f} s and made room after "
                f"{up.stopping - up.ready:.1f} s"
            )
    bound = longest_wait(found)
    for it in asked:
        if it.held_s > bound + ROUNDING_S:
            yield f"a request for {it.model} waited {it.held_s:.1f} s, beyond {bound:.1f} s"


def row(name: str, asked: Sequence[Asked], found: Sequence[Up]) -> str:
    """One line of the table. found: the starts during these requests."""
    held = sorted(it.held_s for it in asked) or [0.0]
    p50, p99 = (held[int(share * len(held))] for share in (0.5, 0.99))
    waited = sum(it > 0 for it in held)
    failed = sum(it.status != 200 for it in asked)
    cells = (
        *(name, len(asked), failed, len(found), waited),
        *(f"{it:.1f}" for it in (p50, p99, held[-1], longest_wait(found))),
    )
    return f"| {' | '.join(map(str, cells))} |"


HEAD = (
    "| load | requests | failed | starts | waited | P50 s | P99 s | longest s | bound s |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
