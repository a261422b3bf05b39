# SPDX-License-Identifier: Apache-2.0
"""What people come with (corpus.txt), and what becomes of it here."""

from collections.abc import Iterator
from pathlib import Path

from lmi_config.options.settings import read
from lmi_config.plan import plan
from lmi_config.plan.plan import Plan
from tests.lmi_config.examples import PARTS, machine, model


def corpus() -> Iterator[tuple[str, str]]:
    """Each line with its verdict."""
    verdict = ""
    for line in Path(__file__).with_name("corpus.txt").read_text().splitlines():
        if line.startswith("== "):
            verdict = line.removeprefix("== ")
        elif line and not line.startswith("#"):
            yield line, verdict


def planned(line: str, gpus: int, store: Path) -> Plan:
    """The plan for a line on a machine with so many GPUs. Raises SettingsError.

    store: an empty folder, for serving.properties.
    """
    kind, _, given = line.partition(": ")
    pairs = dict(pair.split("=", 1) for pair in given.split("; "))
    environ = {"SERVING_MODEL_STORE": str(store)}
    if kind == "properties":
        lines = "\n".join(f"{name}={value}" for name, value in pairs.items())
        (store / "serving.properties").write_text(lines)
    else:
        environ |= pairs
    facts = model(2, attention_heads=32)
    return plan.make(read(environ), machine(gpus), facts, None, environ, PARTS)
