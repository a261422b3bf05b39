# SPDX-License-Identifier: Apache-2.0
"""A plot of a sweep, in SVG: for each configuration, the tokens/s of its levels against their 99th
percentiles of TTFT and ITL. Points at the lower right are the best.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from serving.tune.load import Measured, Objectives
from serving.tune.points import Point

_WIDTH, _HEIGHT = 400, 300  # of a panel's axes, in px
_LEFT, _TOP, _GAP, _RIGHT, _BOTTOM = 70, 40, 90, 30, 60
_CHOSEN, _OTHERS, _TEXT = "#0f766e", "#9ca3af", "#374151"

Value = Callable[[Measured], float]


def svg(points: Sequence[Point], chosen: int | None, objectives: Objectives) -> str:
    """Return the plot. chosen: the number of the chosen point, counted from 1, or None."""
    panels: list[tuple[str, Value, int | None]] = [
        ("TTFT P99, ms", lambda it: it.ttft_p99, objectives.ttft),
        ("ITL P99, ms", lambda it: it.itl_p99, objectives.itl),
    ]
    width = _LEFT + len(panels) * _WIDTH + _GAP + _RIGHT
    height = _TOP + _HEIGHT + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12" fill="{_TEXT}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for place, (title, value, objective) in enumerate(panels):
        parts.append(f'<g transform="translate({_LEFT + place * (_WIDTH + _GAP)},{_TOP})">')
        parts += _panel(points, chosen, title, value, objective)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


def _panel(
    points: Sequence[Point], chosen: int | None, title: str, value: Value, objective: int | None
) -> Iterator[str]:
    measured = [it for point in points for it in point.levels]
    across = _ticks(max((it.tokens for it in measured), default=1))
    up = _ticks(max([objective or 0, *map(value, measured)], default=1))

    def at(it: Measured) -> tuple[float, float]:
        return it.tokens / across[-1] * _WIDTH, _HEIGHT - value(it) / up[-1] * _HEIGHT

    yield f'<text x="0" y="-14" font-weight="bold">{escape(title)}</text>'
    for tick in across:
        x = tick / across[-1] * _WIDTH
        yield f'<text x="{x:.1f}" y="{_HEIGHT + 18}" text-anchor="middle">{tick:g}</text>'
    for tick in up:
        y = _HEIGHT - tick / up[-1] * _HEIGHT
        yield f'<line x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>'
        yield f'<text x="-8" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
    yield f'<text x="{_WIDTH / 2}" y="{_HEIGHT + 42}" text-anchor="middle">tokens/s</text>'
    if objective:
        y = _HEIGHT - objective / up[-1] * _HEIGHT
        yield (
            f'<line x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#b91c1c" '
            f'stroke-dasharray="6 4"><title>objective: {objective} ms</title></line>'
        )
    numbered = sorted(enumerate(points, 1), key=lambda it: it[0] == chosen)  # chosen one on top
    for number, point in numbered:
        if not point.levels:
            continue
        color = _CHOSEN if number == chosen else _OTHERS
        line = " ".join("{:.1f},{:.1f}".format(*at(it)) for it in point.levels)
        yield f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        for it in point.levels:
            x, y = at(it)
            told = escape(f"{number}: {it.level}: {it.tokens:,.1f} tokens/s, {value(it):,.1f} ms")
            circle = f'cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"'
            yield f"<circle {circle}><title>{told}</title></circle>"
        x, y = at(point.levels[-1])
        yield f'<text x="{x + 7:.1f}" y="{y + 4:.1f}" fill="{color}">{number}</text>'


def _ticks(most: float) -> list[float]:
    """Return round numbers from 0 to at least this value."""
    step = 10 ** math.floor(math.log10(most or 1))
    step = next(it for it in (step / 5, step / 2, step, step * 2) if most / it <= 6)
    return [step * n for n in range(math.ceil((most or 1) / step) + 1)]
