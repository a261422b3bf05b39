# SPDX-License-Identifier: Apache-2.0
"""Which configurations are worth measuring, which one is next, and which one is best. Pure.

One option is varied at a time, in the order of `axes`, and what was best stays while the next one
is: some ten starts in place of a hundred combinations.
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
"""One configuration is better than another from so much more throughput on: two measurements of the
same one differ by as much.
"""

Options = Mapping[str, Any]
"""By slipway.yaml's names. Options of a point extend or replace the operator's; None removes
one.
"""


@dataclass(frozen=True)
class Axis:
    """The values to try for one option. values: besides the planned one. reason: why these, or why
    none.
    """

    name: str
    values: tuple[Options, ...]
    reason: str


@dataclass(frozen=True)
class Point:
    """A configuration that has been tried. levels: none where it could not be measured; reason:
    why, or why it was left at that level. again: whether it is the second measurement of the
    planned configuration.
    """

    options: Options
    levels: tuple[Measured, ...] = ()
    reason: str = ""
    again: bool = False


def axes(plan: Plan, workload: Workload, removable: frozenset[str]) -> tuple[Axis, ...]:
    """The configurations to try. plan: without any of it. removable: options of the operator's that
    are in no other place than slipway.yaml, so that a file without them takes them away.
    """
    return (
        _sequences(plan, workload),
        _tokens(plan, workload),
        _tiers(plan, workload),
        _speculation(plan, removable),
    )


def _set(plan: Plan, field: str) -> Axis | None:
    """Options that the operator has set are not tried."""
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
    """The tokens in requests of this length that the engine's KV cache holds; None: not known."""
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
        least = default  # what is not split has to fit
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
        return Axis(name, (), "what names the draft cannot be taken away from here")
    gone: Options = dict.fromkeys(_DRAFT)
    values = [gone]
    if isinstance(tokens, int):
        counts = dict.fromkeys(it for it in (tokens // 2, tokens * 2) if it)
        values += [{**gone, name: {**config, "num_speculative_tokens": it}} for it in counts]
    return Axis(name, tuple(values), f"{tokens} tokens as planned")


def key(options: Options) -> str:
    """One text for equal options."""
    return json.dumps(options, sort_keys=True)


def applied(own: Options, point: Options) -> dict[str, Any]:
    """The operator's options with a point's on top."""
    return {name: it for name, it in {**own, **point}.items() if it is not None}


def best(points: Iterable[Point], objectives: Objectives) -> Point | None:
    """The first that no later one is better than by the margin; None where none was measured."""
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
    """Whether a level meets the objectives, and how good it is: then its tokens/s, at the level
    where they are most; else how near it came. None where nothing was measured.
    """
    if met := reached(point, objectives):
        return True, met.tokens
    excesses = [objectives.excess(it) for it in point.levels]
    return (False, 1 / min(excesses)) if excesses else None


def reached(point: Point, objectives: Objectives) -> Measured | None:
    """The level with the most tokens/s of those that meet the objectives."""
    met = [it for it in point.levels if objectives.excess(it) <= 1]
    return max(met, key=lambda it: it.tokens, default=None)


def walk(
    axes: Sequence[Axis], points: Iterable[Point], objectives: Objectives
) -> tuple[Options, Options | None]:
    """The best options so far, and those to try next; None where all has been tried.

    If another configuration would win, the planned one is measured again at the end, because a
    machine that was busy at first makes all later measurements look better.
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
