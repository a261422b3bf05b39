# SPDX-License-Identifier: Apache-2.0
"""The configurations that are worth measuring, the next one, and the best one. Pure functions.

One option is varied at a time, in the order of `axes`. Its best value is kept while the next option
is varied. So there are about ten starts instead of a hundred combinations.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmi_config.options.declared import OPTIONS
from lmi_config.plan import kv_tiers, memory, preflight
from lmi_config.plan.plan import Plan
from serving.tune.load import Measured, Objectives
from serving.tune.workload import Workload

MARGIN = 1.05
"""A configuration is better than another above this ratio of their throughputs. Two measurements of
the same configuration may differ by less.
"""

Options = Mapping[str, Any]
"""Options by slipway.yaml's names. A point's options extend or replace the operator's; None removes
an option.
"""


@dataclass(frozen=True)
class Axis:
    """The values to try for one option. values: in addition to the planned one. reason: why these
    values, or why none.
    """

    name: str
    values: tuple[Options, ...]
    reason: str


@dataclass(frozen=True)
class Point:
    """A configuration that has been tried. levels: none if it could not be measured. reason: why it
    could not, or why it stopped at its last level. again: whether it is the second measurement of
    the planned configuration.
    """

    options: Options
    levels: tuple[Measured, ...] = ()
    reason: str = ""
    again: bool = False


def axes(plan: Plan, workload: Workload, removable: frozenset[str]) -> tuple[Axis, ...]:
    """Return the configurations to try. plan: the plan without any of them. removable: the
    operator's options that are set only in a replaceable place, so that a file without them removes
    them.
    """
    return (
        _sequences(plan, workload),
        _tokens(plan, workload),
        _tiers(plan, workload),
        _speculation(plan, removable),
    )


def _set(plan: Plan, field: str) -> Axis | None:
    """Return an axis without values if the operator has set the option, or None."""
    if origin := plan.settings.origins.get(field):
        return Axis(OPTIONS[field].vllm or field, (), f"{origin} sets it")
    return None


def _sequences(plan: Plan, workload: Workload) -> Axis:
    name = "max_num_seqs"
    if fixed := _set(plan, "max_rolling_batch_size"):
        return fixed
    default = _default_sequences(plan)
    length = workload.prompt + workload.output
    tokens = _engine_tokens(plan, length)
    held = None if tokens is None else tokens // length
    told = f"{default:,} as planned"
    if held is not None:
        told += f"; the KV cache holds about {held:,} requests of {length:,} tokens"
    usual = min(workload.users or default, default)
    most = min(workload.users or default, max(held or default, 1))
    values = dict.fromkeys(it for it in (most, most // 2, most // 4) if it and it != usual)
    if workload.users:
        told += f", and there are {workload.users} users at most"
    return Axis(name, tuple({name: it} for it in values), told)


def _default_sequences(plan: Plan) -> int:
    return memory.sequences_of_a_step(plan.settings, plan.machine, plan.parallelism)


def _engine_tokens(plan: Plan, length: int) -> int | None:
    """Return the tokens that the engine's KV cache holds in requests of this length; None if
    unknown.
    """
    cache = preflight.engine_cache(
        plan.settings, plan.machine, plan.parallelism, plan.model, plan.memory, plan.gpu
    )
    return cache and cache.tokens(length)


def _tokens(plan: Plan, workload: Workload) -> Axis:
    name = "max_num_batched_tokens"
    if fixed := _set(plan, "max_rolling_batch_prefill_tokens"):
        return fixed
    step = memory.tokens_of_a_step(plan.settings, plan.machine, plan.parallelism)
    default: int = plan.options.get(name, step)
    sequences = _default_sequences(plan)
    waiting = workload.prompt * min(workload.users or sequences, sequences)
    least = sequences
    if plan.settings.engine.get("enable_chunked_prefill") is False or plan.model.heard:
        least = default  # a prompt that is not split must fit
    values = [
        it
        for it in (default // 4, default // 2, default * 2)
        if it >= least and min(it, waiting) != min(default, waiting)
    ]
    told = f"{default:,} as planned; all prompts at once have {waiting:,} tokens"
    return Axis(name, tuple({name: it} for it in values), told)


def _tiers(plan: Plan, workload: Workload) -> Axis:
    name = "lmcache_auto_config"
    if fixed := _set(plan, name):
        return fixed
    if kv_tiers.wanted(plan.settings) or plan.settings.kv_transfer_config:
        return Axis(name, (), "other options say where KV caches are kept")
    shared = workload.prefixes * workload.prefix
    if not shared:
        return Axis(name, (), "no prompt of the workload begins like another")
    held = _engine_tokens(plan, workload.prompt + workload.output)
    if held is not None and held >= shared:
        told = f"the engine holds about {held:,} tokens, and prompts share {shared:,}"
        return Axis(name, (), told)
    values: list[Options] = [{name: True}]
    if "kv_disk_size" not in plan.settings.origins:
        values.append({name: True, "kv_disk_size": 0})
    told = f"prompts share {shared:,} tokens, and the engine holds about {held or 0:,}"
    return Axis(name, tuple(values), told)


_DRAFT = ("speculative_config", "speculative_draft_model", "num_speculative_tokens")


def _speculation(plan: Plan, removable: frozenset[str]) -> Axis:
    name = "speculative_config"
    config = plan.options.get(name)
    if not config:
        return Axis(name, (), "no draft is named")
    tokens = config.get("num_speculative_tokens")
    given = {field for field in _DRAFT if field in plan.settings.origins}
    if not given <= removable:
        return Axis(name, (), "the options of the draft cannot be removed from here")
    gone: Options = dict.fromkeys(_DRAFT)
    values = [gone]
    if isinstance(tokens, int):
        counts = dict.fromkeys(it for it in (tokens // 2, tokens * 2) if it)
        values += [{**gone, name: {**config, "num_speculative_tokens": it}} for it in counts]
    return Axis(name, tuple(values), f"{tokens} tokens as planned")


def key(options: Options) -> str:
    """Return a text that is the same for equal options."""
    return json.dumps(options, sort_keys=True)


def applied(own: Options, point: Options) -> dict[str, Any]:
    """Return the operator's options, overridden by a point's."""
    return {name: it for name, it in {**own, **point}.items() if it is not None}


def best(points: Iterable[Point], objectives: Objectives) -> Point | None:
    """Return the best point, or None if none was measured. A later point must be better by the
    margin.
    """
    found, highest = None, (False, 0.0)
    for point in points:
        worth = score(point, objectives)
        if worth is None:
            continue
        if found is None or worth[0] > highest[0] or _better(worth, highest):
            found, highest = point, worth
    return found


def _better(one: tuple[bool, float], other: tuple[bool, float]) -> bool:
    return one[0] == other[0] and one[1] > MARGIN * other[1]


def score(point: Point, objectives: Objectives) -> tuple[bool, float] | None:
    """Return whether a level of the point meets the objectives, and the point's score. The score is
    the most tokens/s of such a level, or else how near a level came. Returns None for a point
    without measurements.
    """
    if met := reached(point, objectives):
        return True, met.tokens
    excesses = [objectives.excess(it) for it in point.levels]
    return (False, 1 / min(excesses)) if excesses else None


def reached(point: Point, objectives: Objectives) -> Measured | None:
    """Return the level with the most tokens/s among those that meet the objectives, or None."""
    met = [it for it in point.levels if objectives.excess(it) <= 1]
    return max(met, key=lambda it: it.tokens, default=None)


def walk(
    axes: Sequence[Axis], points: Iterable[Point], objectives: Objectives
) -> tuple[Options, Options | None]:
    """Return the best options so far, and those to try next, or None if all have been tried.

    If another configuration would win, the planned one is measured again at the end. Otherwise a
    machine that was busy at first would make all later configurations look better.
    """
    points = list(points)
    tried = {key(point.options): point for point in points if not point.again}
    chosen: Options = {}
    if key(chosen) not in tried:
        return chosen, chosen
    for axis in axes:
        group = [tried[key(chosen)]]
        for value in axis.values:
            options = {**chosen, **value}
            if key(options) not in tried:
                return chosen, options
            group.append(tried[key(options)])
        winner = best(group, objectives)
        chosen = winner.options if winner else chosen
    if not chosen:
        return chosen, None
    again = next((it for it in points if it.again), None)
    if again is None:
        return chosen, {}
    winner = best([again, tried[key(chosen)]], objectives)
    return winner.options if winner else chosen, None
