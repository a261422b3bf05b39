# SPDX-License-Identifier: Apache-2.0
"""docs/reference/metrics.md lists all series of Slipway's own, with their owners and labels."""

import re
from typing import NamedTuple

from serving.lifecycle import Step
from tests import composed


class Row(NamedTuple):
    """A row of the table."""

    name: str
    labels: frozenset[str]
    owner: str
    bound: str
    description: str


def rows():
    text = (composed.ROOT / "docs/reference/metrics.md").read_text()
    for line in re.findall(r"^\| `(?:slipway_|lmcache:).*\|$", text, re.MULTILINE):
        name, labels, owner, bound, description = (
            cell.strip(" |") for cell in line.strip("|").split(" | ", 4)
        )
        words = frozenset(re.findall(r"\w+", labels))
        yield Row(name.strip("`"), words, owner.strip("`"), bound, description)


def test_the_table_is_complete_and_right():
    declared = {(it.documented, it.labels, it.owner) for it in composed.declared()}
    assert {row[:3] for row in rows()} == declared


def test_each_series_has_one_owner_a_bound_and_a_description():
    names = [row.name for row in rows()]
    assert len(names) == len({*names})
    assert all(row.bound and row.description for row in rows())


def test_each_step_of_the_start_is_named():
    (row,) = [row for row in rows() if row.name == "slipway_start_seconds"]
    assert re.findall(r"`(\w+)`", row.description) == [*Step]
