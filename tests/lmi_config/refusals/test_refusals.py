# SPDX-License-Identifier: Apache-2.0
"""What vLLM refuses of a configuration is known: each line of its that does is classified, and what
can be told before the start is told by the plan.
"""

from collections import Counter

import pytest

from lmi_config.options.settings import SettingsError
from tests.lmi_config.refusals.situations import FOLDER, ROWS, TOLD, planned

MOST_OPEN = 0.1


def test_every_refusal_of_vllms_is_classified():
    listed = [line.partition("\t")[0] for line in (FOLDER / "vllm.tsv").read_text().splitlines()]
    assert [*ROWS] == listed


def test_few_are_open():
    states = Counter(row["state"] for row in ROWS.values())
    assert states.keys() == {"told", "unknowable", "open"}
    assert states["open"] <= MOST_OPEN * states.total()
    assert all(row["why"] for row in ROWS.values() if row["state"] != "told")


@pytest.mark.parametrize("row", TOLD.values(), ids=TOLD)
def test_the_plan_tells(row):
    with pytest.raises(SettingsError) as refused:
        planned(row)
    assert row["says"] in "\n".join(refused.value.faults)


def test_the_list_is_that_of_the_installed_vllm():
    pytest.importorskip("vllm")
    from scripts.generate import vllm_limits, vllm_refusals

    assert vllm_refusals.PATH.read_text() == vllm_refusals.text(), (
        "run it, and classify what is new"
    )
    assert vllm_limits.PATH.read_text() == vllm_limits.text(), (
        "run python -m scripts.generate.vllm_limits"
    )
