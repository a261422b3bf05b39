# SPDX-License-Identifier: Apache-2.0
"""Which models run: the rules one by one, and a simulation that decides for whole days."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmi_config.plan.memory import Footprint
from serving.models.swaps import LEAST_WAIT_S, Act, Model, State, Step, fits, steps

GB = 10**9
ROOM = Footprint(10 * GB)
NOW = 1000.0


def model(name, state=State.COLD, size=6, **about):
    return Model(name=name, state=state, awake=Footprint(size * GB), **about)


def up(name, size=6, **about):
    known = {"ready_since": NOW - 500, "start_s": 20.0, "used": NOW - 100, **about}
    return model(name, State.READY, size, **known)


def waits(name, size=6, seconds=1.0, **about):
    return model(name, size=size, waiting_since=NOW - seconds, **about)


def decided(*models, room=ROOM):
    return steps(models, room, NOW)


def test_what_waits_starts_where_there_is_room():
    assert decided(waits("a"), model("b")) == (Step("a", Act.START),)
    assert decided(waits("a", 4), up("b", 6)) == (Step("a", Act.START),)
    assert decided(waits("a", 5), waits("b", 5)) == (Step("a", Act.START), Step("b", Act.START))
    assert decided(model("a"), up("b")) == ()


def test_the_least_recently_used_makes_room_and_no_more_than_needed():
    old, new = up("old", 3, used=NOW - 50), up("new", 3, used=NOW - 10)
    small = up("small", 1, used=NOW - 90)
    assert decided(waits("a", 7), old, new) == (Step("old", Act.STOP),)
    assert decided(waits("a", 9), old, new) == (Step("old", Act.STOP), Step("new", Act.STOP))
    # The oldest one alone would not free enough, and the next one alone does.
    assert decided(waits("a", 6), old, new, small) == (Step("old", Act.STOP),)


@pytest.mark.parametrize(
    "resident",
    [
        up("b", in_flight=1),
        up("b", waiting_since=NOW - 1),
        up("b", ready_since=NOW - 19),
        up("b", pinned=True),
        model("b", State.STARTING),
    ],
)
def test_who_makes_no_room(resident):
    assert decided(waits("a"), resident) == ()


def test_a_wait_forces_a_swap_after_its_bound():
    busy = up("b", in_flight=3)
    assert decided(waits("a", seconds=LEAST_WAIT_S - 1), busy) == ()
    assert decided(waits("a", seconds=LEAST_WAIT_S), busy) == (Step("b", Act.STOP),)
    slow = {"seconds": LEAST_WAIT_S, "start_s": 20.0}
    assert decided(waits("a", **slow), busy) == ()
    assert decided(waits("a", **slow | {"seconds": 40.0}), busy) == (Step("b", Act.STOP),)


@pytest.mark.parametrize(
    "resident", [up("b", ready_since=NOW - 19, in_flight=1), up("b", pinned=True, in_flight=1)]
)
def test_not_even_a_forced_swap_stops_these(resident):
    assert decided(waits("a", seconds=10_000), resident) == ()


def test_an_idle_model_goes_before_a_busy_one():
    busy, idle = up("busy", 5, used=NOW - 99, in_flight=1), up("idle", 5, used=NOW - 1)
    assert decided(waits("a", 5, seconds=999), busy, idle) == (Step("idle", Act.STOP),)


def test_nothing_overtakes_who_is_overdue():
    late, young = waits("late", 9, seconds=31), waits("young", 4)
    stays = up("b", 6, ready_since=NOW - 1)
    assert decided(late, young, stays) == ()
    assert decided(dataclasses.replace(late, waiting_since=NOW - 3), young, stays) == (
        Step("young", Act.START),
    )


def test_freed_room_is_reserved_for_the_model_that_it_is_freed_for():
    stopping = model("b", State.STOPPING, 6)
    assert decided(waits("a", 8, seconds=2), stopping, waits("c", 4)) == ()
    assert decided(waits("a", 8, seconds=2), stopping, waits("c", 1)) == ()
    assert decided(waits("a", 8), model("b", State.STOPPING, 1)) == (Step("a", Act.START),)


SLEEPY = {"asleep": Footprint(2 * GB, 1 * GB)}
GPU = Footprint(10 * GB, 10 * GB)


def gpu(name, state, host=1, size=8, **about):
    awake = Footprint(host * GB, size * GB)
    known = {"ready_since": NOW - 500, "used": NOW - 100, **SLEEPY, **about}
    return Model(name=name, state=state, awake=awake, **known)


def test_a_model_falls_asleep_where_the_host_has_room_for_it_and_else_is_stopped():
    wants = gpu("a", State.COLD, waiting_since=NOW - 1)
    resident = gpu("b", State.READY)
    assert decided(wants, resident, room=GPU) == (Step("b", Act.SLEEP),)
    assert decided(wants, resident, room=Footprint(2 * GB, 10 * GB)) == (Step("b", Act.STOP),)
    assert decided(wants, gpu("b", State.READY, asleep=None), room=GPU) == (Step("b", Act.STOP),)


def test_sleepers_wake_and_make_room_when_memory_of_the_host_is_short():
    sleeper = gpu("b", State.ASLEEP)
    wakes = dataclasses.replace(sleeper, waiting_since=NOW - 1)
    assert decided(wakes, room=GPU) == (Step("b", Act.START),)
    wants = gpu("a", State.COLD, waiting_since=NOW - 1)
    assert decided(wants, sleeper, room=Footprint(2 * GB, 20 * GB)) == (Step("b", Act.STOP),)
    falling = gpu("b", State.STOPPING, falls_asleep=True)
    # Its memory on the host stays, and the memory that it frees on the GPU is not enough.
    assert decided(wants, falling, room=GPU) == ()


def test_a_model_that_wakes_up_soon_makes_room_soon():
    wants = gpu("a", State.ASLEEP, waiting_since=NOW - 1)
    woken = gpu("b", State.READY, start_s=200.0, wake_s=2.0, ready_since=NOW - 3)
    room = Footprint(10 * GB, 9 * GB)
    assert decided(wants, woken, room=room) == (Step("b", Act.SLEEP),)
    assert decided(wants, dataclasses.replace(woken, wake_s=4.0), room=room) == ()
    assert decided(wants, dataclasses.replace(woken, wake_s=0.0), room=room) == ()
    busy = dataclasses.replace(woken, in_flight=1)
    waits_ = dataclasses.replace(wants, start_s=200.0, waiting_since=NOW - LEAST_WAIT_S)
    assert decided(waits_, busy, room=room) == ()
    assert decided(dataclasses.replace(waits_, wake_s=2.0), busy, room=room)


def test_the_hosts_memory_is_kept_for_a_model_that_falls_asleep():
    """Even if the model that it makes room for is no longer wanted."""
    falling = gpu("b", State.STOPPING, falls_asleep=True)
    fitting = gpu("c", State.COLD, host=8, size=2, waiting_since=NOW - 1)
    assert decided(falling, fitting, room=GPU) == (Step("c", Act.START),)
    larger = dataclasses.replace(fitting, awake=Footprint(9 * GB, 2 * GB))
    assert decided(falling, larger, room=GPU) == ()


def test_what_can_never_have_room():
    assert fits(model("a", size=10), [up("b", 9)], ROOM)
    assert not fits(model("a", size=11), [], ROOM)
    assert not fits(model("a", size=2), [up("b", 9, pinned=True)], ROOM)


STATES = [*State]


def every_model(name):
    for state, pinned, flies, waits_, young in itertools.product(
        STATES, (False, True), (0, 1), (None, 5.0, 50.0), (False, True)
    ):
        yield model(
            name,
            state,
            asleep=Footprint(1 * GB) if state is State.ASLEEP else None,
            pinned=pinned,
            in_flight=flies if state in (State.READY, State.STOPPING) else 0,
            waiting_since=None if waits_ is None else NOW - waits_,
            ready_since=NOW - (1 if young else 500),
            start_s=20.0,
        )


def test_in_all_states_of_two_models_the_rules_hold():
    for a, b in itertools.product([*every_model("a")], [*every_model("b")]):
        by_name = {"a": a, "b": b}
        for name, act in decided(a, b):
            it = by_name[name]
            if act is Act.START:
                assert it.state in (State.COLD, State.ASLEEP)
                assert it.waiting_since is not None
                others = Footprint(0)
                for other in (a, b):
                    others += other.awake if other is it else other.occupies
                assert others.fits(ROOM)
            else:
                assert it.state in (State.READY, State.ASLEEP)
                assert not it.pinned
                other = b if it is a else a
                if it.state is State.READY:
                    assert NOW - it.ready_since >= it.start_s
                    assert not it.busy or other.overdue(NOW)
                assert other.waiting_since is not None


# whole days

STOP_S = 3


@dataclasses.dataclass
class Simulated:
    """One model in the simulation: its times, and the waiting and running requests by their
    ends.
    """

    size: int
    takes: int
    pinned: bool
    state: State = State.COLD
    until: int = 0
    start_s: float = 0.0
    ready_since: int = 0
    used: int = 0
    waiting: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    running: list[int] = dataclasses.field(default_factory=list)
    began: int = 0


def look(name, it):
    return Model(
        name=name,
        state=it.state,
        awake=Footprint(it.size),
        pinned=it.pinned,
        start_s=it.start_s,
        ready_since=it.ready_since,
        used=it.used,
        in_flight=len(it.running),
        waiting_since=min((since for since, _ in it.waiting), default=None),
    )


def simulate(models, requests, room):
    """Run a day. requests: (second, model, duration). Returns waits by model, and the swaps."""
    waited, stops = [], []
    end = max((at for at, _, _ in requests), default=0)
    last = end + 3000
    for now in range(last):
        for at, name, duration in requests:
            if at == now:
                models[name].waiting.append((now, duration))
        for name, it in models.items():
            it.running = [ends for ends in it.running if ends > now]
            if it.state is State.STARTING and now >= it.until:
                it.state, it.ready_since, it.start_s = State.READY, now, it.takes
            if it.state is State.STOPPING and not it.running and now >= it.until:
                it.state = State.COLD
            if it.state is State.READY and it.waiting:
                waited += [(name, now - since) for since, _ in it.waiting]
                it.running += [now + duration for _, duration in it.waiting]
                it.waiting, it.used = [], now
        seen = [look(name, it) for name, it in models.items()]
        for name, act in steps(seen, Footprint(room), now):
            it = models[name]
            if act is Act.START:
                assert it.state is State.COLD
                it.state, it.until = State.STARTING, now + it.takes
            else:
                assert it.state is State.READY
                assert not it.pinned
                assert now - it.ready_since >= it.start_s
                stops.append((now, name, now - it.ready_since))
                it.state, it.until = State.STOPPING, now + STOP_S
        assert sum(it.size for it in models.values() if it.state is not State.COLD) <= room
        if now > end and not any(it.waiting or it.running for it in models.values()):
            return waited, stops
    raise AssertionError("some requests were never answered")


DAYS = st.tuples(
    st.lists(st.tuples(st.integers(1, 10), st.integers(1, 60)), min_size=2, max_size=4),
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 3), st.integers(1, 90)),
        min_size=1,
        max_size=40,
    ),
)


@given(DAYS)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_request_of_a_day_is_answered_and_memory_always_suffices(day):
    sizes, load = day
    models = {str(n): Simulated(size, takes, False) for n, (size, takes) in enumerate(sizes)}
    requests = [(at, str(which % len(sizes)), duration) for at, which, duration in load]
    waited, _ = simulate(models, requests, 10)
    assert len(waited) == len(requests)


def test_alternating_load_swaps_no_more_often_than_the_rules_allow():
    """A B A B, a request each second: a model stays up for its start's time, and all waiting
    requests then run at once.
    """
    models = {name: Simulated(6, 20, False) for name in "ab"}
    requests = [(at, "ab"[at % 2], 1) for at in range(600)]
    waited, stops = simulate(models, requests, 10)
    assert len(waited) == 600
    assert all(up_for >= 20 for _, _, up_for in stops)
    assert len(stops) <= 600 / (20 + 20 + STOP_S) + 1
    bound = 2 * 20 + 20 + 20 + 2 * STOP_S + 20  # overdue, stop, start, and its minimum
    assert max(seconds for _, seconds in waited) <= bound


def test_a_model_that_is_never_idle_gives_way_to_a_rare_one():
    models = {name: Simulated(6, 10, False) for name in "ab"}
    requests = [(at, "a", 5) for at in range(0, 600)] + [(100, "b", 1), (400, "b", 1)]
    waited, stops = simulate(models, requests, 10)
    rare = [seconds for name, seconds in waited if name == "b"]
    assert len(rare) == 2
    assert max(rare) <= LEAST_WAIT_S + 5 + STOP_S + 10 + 2
    assert {name for _, name, _ in stops} == {"a", "b"}
