# SPDX-License-Identifier: Apache-2.0
"""Counters of servers, read from Prometheus' text format."""

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def samples(text: str, *names: str) -> Iterator[Sample]:
    """The samples of these names. Other lines are not parsed, which would take longer than the
    rest.
    """
    lines = [line for line in text.splitlines() if line.startswith(names)]
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        yield from (sample for sample in family.samples if sample.name in names)


def total(text: str, name: str) -> float:
    """The sum over a series' labels; 0 if there is none."""
    return sum(sample.value for sample in samples(text, name))
