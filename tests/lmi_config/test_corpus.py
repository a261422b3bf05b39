# SPDX-License-Identifier: Apache-2.0
"""What people come with runs, or is refused with a reason, on a machine with 8 GPUs or one."""

import pytest

from lmi_config.options.settings import SettingsError
from tests.lmi_config.corpus import corpus, planned

EIGHT_ONLY = "runs on 8 GPUs"


@pytest.mark.parametrize("gpus", [8, 1])
def test_what_people_come_with(tmp_path, gpus):
    wrong = []
    for number, (line, verdict) in enumerate(corpus()):
        store = tmp_path / str(number)
        store.mkdir()
        expected = verdict.removeprefix("refused: ")
        if verdict == EIGHT_ONLY:
            expected = "runs" if gpus == 8 else "GPUs, but this machine shows 1"
        try:
            planned(line, gpus, store)
            found = "runs"
        except SettingsError as error:
            found = "\n".join(error.faults)
        if gpus == 1 and "this machine shows 1" in found and verdict != "runs":
            continue  # that is found before what else is wrong
        if expected not in found:
            wrong.append((line, expected, found))
    assert not wrong


def test_no_line_is_there_twice():
    lines = [line for line, _ in corpus()]
    assert len({*lines}) == len(lines)
