import itertools

import pytest

from serving.errors import NotReady
from serving.lifecycle import Lifecycle, Stage

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
    it = Lifecycle(clock=itertools.chain([10.0], itertools.repeat(12.34)).__next__)
    for step in WAYS[stage]:
        it.enter(Stage(step), "because")
    return it


@pytest.mark.parametrize(("here", "there"), list(itertools.product(WAYS, WAYS)))
def test_stages_follow_each_other_or_refuse(here, there):
    it = life(here)
    if (here, there) in ALLOWED:
        it.enter(Stage(there))
        assert it.stage == there
    else:
        with pytest.raises(RuntimeError, match=f"cannot go from {here} to {there}"):
            it.enter(Stage(there))
        assert it.stage == here


@pytest.mark.parametrize(
    ("stage", "status"),
    [("starting", 503), ("ready", 200), ("draining", 503), ("stopped", 503), ("failed", 500)],
)
def test_ping_tells_the_stage(stage, status):
    detail = "beginning" if stage == "starting" else "because"
    told = {"status": stage, "elapsed_s": 2.3, "detail": detail}
    assert life(stage).ping() == (status, told)


def test_only_ready_serves():
    life("ready").require_ready()
    for stage in ("starting", "draining", "stopped", "failed"):
        with pytest.raises(NotReady):
            life(stage).require_ready()


def test_the_start_is_measured_by_its_steps():
    now = [10.0]
    it = Lifecycle(clock=lambda: now[0])
    for took, detail in (
        (1, "fetching a model: 2 GB"),
        (2, "fetched a model: 2 GB in 9 s"),
        (3, "importing vLLM"),
        (4, "loading the model"),
        (5, "warming up"),
    ):
        now[0] += took
        it.note(detail)
    now[0] += 6
    it.enter(Stage.READY)
    assert it.steps == {
        "beginning": 1,
        "fetching": 5,
        "importing": 4,
        "loading": 5,
        "warming_up": 6,
    }
    assert sum(it.steps.values()) == it.elapsed
