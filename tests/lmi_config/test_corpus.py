# SPDX-License-Identifier: Apache-2.0
"""What people come with runs, or is refused with a reason, on a machine with 8 GPUs or one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi_config.options.settings import SettingsError, read
from lmi_config.plan import plan
from tests.lmi_config.examples import PARTS, machine, model

EIGHT_ONLY = "runs on 8 GPUs"


def corpus() -> Iterator[tuple[str, str]]:
    verdict = ""
    for line in Path(__file__).with_name("corpus.txt").read_text().splitlines():
        if line.startswith("== "):
            verdict = line.removeprefix("== ")
        elif line and not line.startswith("#"):
            yield line, verdict


@pytest.mark.parametrize("gpus", [8, 1])
def test_what_people_come_with(tmp_path, gpus):
    wrong = []
    for number, (line, verdict) in enumerate(corpus()):
        kind, _, given = line.partition(": ")
        pairs = dict(pair.split("=", 1) for pair in given.split("; "))
        store = tmp_path / str(number)
        store.mkdir()
        environ = {"SERVING_MODEL_STORE": str(store)}
        if kind == "properties":
            lines = "\n".join(f"{name}={value}" for name, value in pairs.items())
            (store / "serving.properties").write_text(lines)
        else:
            environ |= pairs
        expected = verdict.removeprefix("refused: ")
        if verdict == EIGHT_ONLY:
            expected = "runs" if gpus == 8 else "GPUs, but this machine shows 1"
        try:
            facts = model(2, attention_heads=32)
            plan.make(read(environ), machine(gpus), facts, None, environ, PARTS)
            found = "runs"
        except SettingsError as error:
            found = "\n".join(error.faults)
        if gpus == 1 and "this machine shows 1" in found and verdict != "runs":
            continue  # that is found before what else is wrong
        if expected not in found:
            wrong.append((line, expected, found))
    assert not wrong
