# SPDX-License-Identifier: Apache-2.0
"""The points that are tried, their order, and the choice."""

import pytest

from lmi_config.options import settings
from lmi_config.plan import plan
from serving.tune import points, workload
from serving.tune.load import Measured, Objectives
from serving.tune.points import Axis, Point
from tests.lmi_config.examples import PARTS, machine, model

USUAL = {"isl": 1000, "osl": 200, "concurrency": [8, 64]}
SHARED = {"num_prefix_prompts": 200, "prefix_prompt_length": 8000}
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'


def tried(asked=USUAL, removable=frozenset(), gpus=1, **options):
    """Each option → the values that are tried, and the reason."""
    environ = {"OPTION_MODEL_ID": "some/model", **options}
    made = plan.make(settings.read(environ), machine(gpus), model(), None, environ, PARTS)
    found = points.axes(made, workload.parsed(asked), removable)
    return {it.name: ([*it.values], it.reason) for it in found}


def values(axis, name):
    return [it[name] for it in axis[name][0]]


def test_sequences_stay_within_the_users_and_what_the_kv_cache_holds():
    found, why = tried()["max_num_seqs"]
    assert found == [{"max_num_seqs": 32}, {"max_num_seqs": 16}]
    assert "there are 64 users at most" in why
    many = tried(USUAL | {"concurrency": 4000})
    assert (
        "1,024 as planned; the KV cache holds about 372 requests of 1,200 tokens"
        in (many["max_num_seqs"][1])
    )
    assert values(many, "max_num_seqs") == [372, 186, 93]
    small = tried(USUAL | {"isl": 10, "osl": 10, "concurrency": 4000}, gpus=0)
    assert values(small, "max_num_seqs")[0] > 128  # more users than planned, and room for them


def test_tokens_of_a_step_that_would_change_nothing_are_not_tried():
    assert values(tried(), "max_num_batched_tokens") == [2048, 4096, 16384]
    assert values(tried(USUAL | {"isl": 100}), "max_num_batched_tokens") == [2048, 4096]
    assert tried(USUAL | {"isl": 10})["max_num_batched_tokens"][0] == []
    whole = tried(OPTION_ENABLE_CHUNKED_PREFILL="false")
    assert values(whole, "max_num_batched_tokens") == [16384]


def test_tiers_are_tried_where_prompts_share_more_than_the_engine_holds():
    assert tried()["lmcache_auto_config"] == ([], "no prompt of the workload begins like another")
    found, why = tried(USUAL | SHARED)["lmcache_auto_config"]
    assert found == [
        {"lmcache_auto_config": True},
        {"lmcache_auto_config": True, "kv_disk_size": 0},
    ]
    assert "prompts share 1,600,000 tokens" in why
    few = tried(USUAL | SHARED | {"num_prefix_prompts": 2})["lmcache_auto_config"]
    assert few[0] == []
    assert "prompts share 16,000" in few[1]


def test_a_draft_that_can_be_taken_away_is():
    assert tried()["speculative_config"] == ([], "no draft is named")
    environ = {"OPTION_SPECULATIVE_CONFIG": NGRAM}
    assert tried(**environ)["speculative_config"][0] == []
    found, _ = tried(removable=frozenset({"speculative_config"}), **environ)["speculative_config"]
    gone = dict.fromkeys(points._DRAFT)
    assert found == [
        gone,
        {**gone, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {**gone, "speculative_config": {"method": "ngram", "num_speculative_tokens": 8}},
    ]


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("max_num_seqs", "OPTION_MAX_ROLLING_BATCH_SIZE", "4"),
        ("max_num_batched_tokens", "OPTION_MAX_NUM_BATCHED_TOKENS", "4096"),
        ("lmcache_auto_config", "OPTION_LMCACHE_AUTO_CONFIG", "false"),
    ],
)
def test_what_the_operator_has_set_stays(name, option, value):
    assert tried(USUAL | SHARED, **{option: value})[name] == ([], f"{option} sets it")


NONE = Objectives(None, None)
BOTH = Objectives(ttft=500, itl=50)


def best(*found, objectives=NONE):
    it = points.best(found, objectives)
    assert it
    return it


def level(tokens, ttft=100.0, itl=10.0):
    return Measured("1 users", 10, ttft / 2, ttft, itl / 2, itl, tokens)


def point(*levels, **options):
    return Point(options, levels)


def test_the_best_has_the_most_tokens_at_a_level_that_meets_the_objectives():
    fast = point(level(100), level(900, ttft=501), n=1)
    slow = point(level(100), level(300), n=2)
    assert best(fast, slow, objectives=BOTH) is slow
    assert best(fast, slow) is fast
    assert points.reached(slow, BOTH) == level(300)
    assert points.reached(fast, Objectives(None, 10)) == level(900, ttft=501)


def test_another_has_to_be_better_by_more_than_two_measurements_differ():
    first = point(level(100))
    assert best(first, point(level(104), n=1)) is first
    better = point(level(106), n=2)
    assert best(first, point(level(104), n=1), better) is better


def test_where_none_meets_the_objectives_the_nearest_one_stays():
    far, near = point(level(900, ttft=5000), n=1), point(level(100, itl=60), n=2)
    assert best(far, near, objectives=BOTH) is near
    assert points.reached(near, BOTH) is None
    met = point(level(1), n=3)
    assert best(near, met, objectives=BOTH) is met


def test_what_could_not_be_measured_is_not_chosen():
    assert points.best([Point({}, reason="failed")], NONE) is None
    assert best(Point({}, reason="failed"), point(level(1), n=1)).options == {"n": 1}


AXES = (
    Axis("a", ({"a": 1}, {"a": 2}), ""),
    Axis("b", ({"b": 1},), ""),
    Axis("c", (), ""),
)


def walked(throughput):
    """The points in the order of their trials, and the chosen options."""
    found: list[Point] = []
    while (options := points.walk(AXES, found, NONE)[1]) is not None:
        speed = throughput(options)
        again = not options and bool(found)
        found.append(Point(options, (level(speed),) if speed else (), again=again))
    return [it.options for it in found], points.walk(AXES, found, NONE)[0]


def test_each_option_is_varied_on_top_of_the_best_so_far():
    order, chosen = walked(lambda it: 100 + 50 * it.get("a", 0) + 9 * it.get("b", 0))
    assert order == [{}, {"a": 1}, {"a": 2}, {"a": 2, "b": 1}, {}]
    assert chosen == {"a": 2}  # b brings less than the margin


def test_what_is_planned_may_fail_and_another_be_chosen():
    order, chosen = walked(lambda it: it.get("a") == 1 and 100)
    assert order == [{}, {"a": 1}, {"a": 2}, {"a": 1, "b": 1}, {}]
    assert chosen == {"a": 1}
    assert walked(lambda _: 0) == ([{}, {"a": 1}, {"a": 2}, {"b": 1}], {})


def test_what_only_looked_better_on_a_machine_that_was_busy_at_first_is_not_chosen():
    speeds = iter((10, 90, 91, 92, 89))
    order, chosen = walked(lambda _: next(speeds))
    assert order == [{}, {"a": 1}, {"a": 2}, {"a": 1, "b": 1}, {}]
    assert chosen == {}


def test_a_points_options_replace_and_remove_the_operators():
    own = {"a": 1, "speculative_config": {"x": 1}}
    assert points.applied(own, {"a": 2, "speculative_config": None, "b": 3}) == {"a": 2, "b": 3}
    assert points.key({"a": 1, "b": 2}) == points.key({"b": 2, "a": 1})
