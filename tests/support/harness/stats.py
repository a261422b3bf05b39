# SPDX-License-Identifier: Apache-2.0
"""Figures of rounds of load, compared pair by pair."""

import statistics
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar


class Measured(Protocol):
    """One round. rate: requests or tokens per second. cpu: seconds for each of them."""

    @property
    def rate(self) -> float: ...
    @property
    def cpu(self) -> float: ...


Round = TypeVar("Round", bound=Measured)


def spread(values: Sequence[float], form: str) -> str:
    """The median and, in brackets, the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return f"{middle:{form}} [{low:{form}} … {high:{form}}]"


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """P50 and P99."""
    cuts = statistics.quantiles(values, n=100) if len(values) > 1 else [*values] * 99
    return cuts[49], cuts[98]


def paired(
    figure: Callable[[Round, Round], float], measured: Sequence[Round], base: Sequence[Round]
) -> list[float]:
    """A figure for each round and the base's round at the same time."""
    return [figure(*pair) for pair in zip(measured, base, strict=True)]


def rate_ratio(one: Measured, base: Measured) -> float:
    return one.rate / base.rate


def cpu_ratio(one: Measured, base: Measured) -> float:
    return one.cpu / base.cpu


def print_changes(rounds: dict[str, list[Round]]) -> None:
    """Print the change of each arm that was also measured with another version, as `before:
    NAME`.
    """
    for name, measured in rounds.items():
        if before := rounds.get(f"before: {name}"):
            rate = spread(paired(rate_ratio, measured, before), ".3f")
            cpu = spread(paired(cpu_ratio, measured, before), ".3f")
            print(f"{name} ÷ before: rate {rate}, CPU {cpu}", flush=True)
