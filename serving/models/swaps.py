# SPDX-License-Identifier: Apache-2.0
"""Which models run: a model's states, and the decision which of them start and which make room.

All is pure: the decision follows from the models' states, the requests that wait or run, the
measured times of starts, and the memory. Times are in seconds of one monotonic clock.
"""

import enum
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lmi_config.plan.memory import NO_MEMORY, Footprint

LEAST_WAIT_S = 30.0
"""A swap is forced after this wait, or after two starts of the waiting model if that is longer."""


class State(enum.StrEnum):
    """The state of a model. COLD: no process. ASLEEP: a process without memory on the GPU."""

    COLD = "cold"
    STARTING = "starting"
    READY = "ready"
    ASLEEP = "asleep"
    STOPPING = "stopping"


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model at the time of a decision.

    awake: its memory while it starts, is ready, or stops. asleep: its memory while it sleeps; None
    if it can only be stopped. pinned: whether it never makes room. start_s, wake_s: the measured
    seconds of its last start and of its last waking up; 0 before the first. ready_since: when it
    became ready. used: when it last had a request. in_flight: requests that it works on.
    waiting_since: when the oldest request began to wait for it; None without one. falls_asleep:
    whether it is STOPPING in order to sleep.
    """

    name: str
    state: State = State.COLD
    awake: Footprint
    asleep: Footprint | None = None
    pinned: bool = False
    start_s: float = 0.0
    wake_s: float = 0.0
    ready_since: float = 0.0
    used: float = 0.0
    in_flight: int = 0
    waiting_since: float | None = None
    falls_asleep: bool = False

    @property
    def occupies(self) -> Footprint:
        """Its memory in this state."""
        if self.state is State.COLD:
            return NO_MEMORY
        if self.state is State.ASLEEP:
            assert self.asleep is not None
            return self.asleep
        if self.state is State.STOPPING and self.falls_asleep and self.asleep:
            # Its weights are coming to the host while they are on the GPU.
            return Footprint(
                max(self.awake.host, self.asleep.host), max(self.awake.gpu, self.asleep.gpu)
            )
        return self.awake

    @property
    def return_s(self) -> float:
        """The seconds that it takes to be ready again, once it has made room."""
        return self.start_s if self.state is State.COLD else self.wake_s or self.start_s

    @property
    def busy(self) -> bool:
        return self.in_flight > 0 or self.waiting_since is not None

    def gives(self, *, sleeps: bool) -> Footprint:
        """The memory that becomes free when it stops, or falls asleep."""
        left = self.asleep if sleeps and self.asleep is not None else NO_MEMORY
        return self.occupies - left

    def may_go(self, now: float) -> bool:
        """Whether it may make room, apart from requests that it works on. A model that is up for
        less than its return takes would only be started again: A-B-A-B.
        """
        if self.pinned:
            return False
        if self.state is State.ASLEEP:
            return self.waiting_since is None
        return self.state is State.READY and now - self.ready_since >= self.return_s

    def overdue(self, now: float) -> bool:
        """Whether the wait for it forces a swap."""
        if self.waiting_since is None:
            return False
        return now - self.waiting_since >= max(2 * self.return_s, LEAST_WAIT_S)


class Act(enum.StrEnum):
    """An act on a model. START: start its process, or wake it. SLEEP and STOP: let requests
    in flight end, and then free its memory.
    """

    START = "start"
    SLEEP = "sleep"
    STOP = "stop"


class Step(NamedTuple):
    """One act of a decision. name: the model's."""

    name: str
    act: Act


def steps(models: Sequence[Model], room: Footprint, now: float) -> tuple[Step, ...]:
    """Decide the next steps; empty if there is nothing to do yet.

    The model with the oldest waiting request comes first. Idle models make room, the least recently
    used first. Models with requests make room only for one that is overdue. Nothing overtakes an
    overdue model.
    """
    return tuple(_steps(models, room, now))


def _steps(models: Sequence[Model], room: Footprint, now: float) -> Iterator[Step]:
    free, coming = room, NO_MEMORY
    for it in models:
        free -= it.occupies
        if it.state is State.STOPPING:
            coming += it.gives(sleeps=it.falls_asleep)
    going: set[str] = set()
    waiting = [
        it
        for it in models
        if it.waiting_since is not None and it.state in (State.COLD, State.ASLEEP)
    ]
    for it in sorted(waiting, key=lambda it: it.waiting_since or 0.0):
        need = it.awake - it.occupies
        if need.fits(free):
            yield Step(it.name, Act.START)
            free -= need
            continue
        missing = need - free - coming
        others = [other for other in models if other.name not in going and other is not it]
        victims = _victims(others, missing, now, forced=it.overdue(now))
        if victims is None:
            if it.overdue(now):
                return
            continue
        for victim in victims:
            yield victim
            going.add(victim.name)
            found = next(other for other in others if other.name == victim.name)
            coming += found.gives(sleeps=victim.act is Act.SLEEP)
        free -= need  # kept for it until the others have gone


def _victims(
    models: Sequence[Model], missing: Footprint, now: float, *, forced: bool
) -> list[Step] | None:
    """Choose the models that make room; empty if there is enough, None if it is not possible.

    forced: whether models with requests may be chosen.
    """
    if missing.fits(NO_MEMORY):
        return []
    able = sorted((it for it in models if it.may_go(now)), key=lambda it: it.used)
    idle = [it for it in able if not it.busy]
    for chosen in (idle, [*idle, *(it for it in able if it.busy)] if forced else []):
        for sleeping in (True, False):
            if found := _enough(chosen, missing, sleeping=sleeping):
                return found
    return None


def _enough(models: Sequence[Model], missing: Footprint, *, sleeping: bool) -> list[Step]:
    """Return the first of these models that give enough, without those that are not needed; empty
    if all together do not. sleeping: whether they fall asleep if they can.
    """
    taken: list[tuple[Step, Footprint]] = []
    left = missing
    for it in models:
        sleeps = sleeping and it.asleep is not None and it.state is State.READY
        gives = it.gives(sleeps=sleeps)
        taken.append((Step(it.name, Act.SLEEP if sleeps else Act.STOP), gives))
        left -= gives
        if left.fits(NO_MEMORY):
            break
    else:
        return []
    for one in reversed([*taken]):
        if (left + one[1]).fits(NO_MEMORY):
            left += one[1]
            taken.remove(one)
    return [step for step, _ in taken]


def fits(model: Model, others: Collection[Model], room: Footprint) -> bool:
    """Whether there can be room for a model: beside all models that never make room."""
    for it in others:
        if it.pinned and it.name != model.name:
            room -= it.awake
    return model.awake.fits(room)
