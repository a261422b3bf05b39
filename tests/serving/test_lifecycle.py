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
    it = Lifecycle(clock=iter([10.0, 12.34]).__next__)
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
