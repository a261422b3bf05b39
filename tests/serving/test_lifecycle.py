# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest

from serving.errors import NotReady
from serving.lifecycle import Lifecycle, Stage, Step

ALLOWED = {
    ("starting", "ready"),
    ("starting", "stopped"),
    ("starting", "failed"),
    ("ready", "draining"),
    ("ready", "failed"),
    ("draining", "stopped"),
    ("draining", "failed"),
}
WAYS = {
    "starting": [],
    "ready": ["ready"],
    "draining": ["ready", "draining"],
    "stopped": ["stopped"],
    "failed": ["failed"],
}


def life(stage):
    lifecycle = Lifecycle(clock=itertools.chain([10.0], itertools.repeat(12.34)).__next__)
    for step in WAYS[stage]:
        lifecycle.enter(Stage(step), "because")
    return lifecycle


@pytest.mark.parametrize(("here", "there"), list(itertools.product(WAYS, WAYS)))
def test_stages_follow_each_other_or_refuse(here, there):
    lifecycle = life(here)
    if (here, there) in ALLOWED:
        lifecycle.enter(Stage(there))
        assert lifecycle.stage == there
    else:
        with pytest.raises(RuntimeError, match=f"cannot go from {here} to {there}"):
            lifecycle.enter(Stage(there))
        assert lifecycle.stage == here


@pytest.mark.parametrize(
    ("stage", "status"),
    [("starting", 503), ("ready", 200), ("draining", 503), ("stopped", 503), ("failed", 500)],
)
def test_ping_tells_the_stage(stage, status):
    detail = "beginning" if stage == "starting" else "because"
    body = {"status": stage, "elapsed_s": 2.3, "detail": detail}
    assert life(stage).ping() == (status, body)


def test_only_ready_serves():
    life("ready").require_ready()
    for stage in ("starting", "draining", "stopped", "failed"):
        with pytest.raises(NotReady):
            life(stage).require_ready()


def test_the_start_is_measured_by_its_steps():
    now = [10.0]
    lifecycle = Lifecycle(clock=lambda: now[0])
    details = []
    for took, step, text in (
        (1, Step.FETCHING, "fetching a model: 2 GB"),
        (2, Step.FETCHING, "fetched a model: 2 GB in 9 s"),
        (3, Step.IMPORTING, ""),
        (4, Step.LOADING, ""),
        (5, Step.WARMING_UP, ""),
    ):
        now[0] += took
        lifecycle.note(step, text)
        details.append(lifecycle.detail)
    now[0] += 6
    lifecycle.enter(Stage.READY)
    assert lifecycle.steps == {
        "beginning": 1,
        "fetching": 5,
        "importing": 4,
        "loading": 5,
        "warming_up": 6,
    }
    assert sum(lifecycle.steps.values()) == lifecycle.elapsed
    assert details == [
        "fetching a model: 2 GB",
        "fetched a model: 2 GB in 9 s",
        "importing vLLM",
        "loading the model",
        "warming up",
    ]
