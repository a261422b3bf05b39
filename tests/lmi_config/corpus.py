# SPDX-License-Identifier: Apache-2.0
"""Configurations that people bring (corpus.txt, public.txt), and their expected plans here."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lmi_config.facts import strict_yaml
from lmi_config.options import arguments
from lmi_config.options.settings import read
from lmi_config.plan import plan
from lmi_config.plan.kv_tiers import Tiers
from lmi_config.plan.plan import Plan
from tests.lmi_config.examples import GIB, PARTS, machine, model

FOLDER = Path(__file__).parent


def corpus() -> Iterator[tuple[str, str]]:
    """Each line with its verdict."""
    verdict = ""
    for line in (FOLDER / "corpus.txt").read_text().splitlines():
        if line.startswith("== "):
            verdict = line.removeprefix("== ")
        elif line and not line.startswith("#"):
            yield line, verdict


def planned(line: str, gpus: int, store: Path) -> Plan:
    """The plan for a line on a machine with this number of GPUs. Raises SettingsError.

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


class Published(NamedTuple):
    """A configuration that somebody has published.

    address: its source. machine: `gpus`, and the container's `memory` in GiB if its manifest limits
    it. command: what the container runs. lmcache: the lines of LMCACHE_CONFIG_FILE. expected: the
    expected parts of the plan, by the names of `told`; or "refused" and the sentence.
    """

    address: str
    machine: Mapping[str, int]
    command: str
    environ: Mapping[str, str]
    properties: Mapping[str, str]
    lmcache: str
    expected: Mapping[str, str]

    def plan(self, store: Path) -> Plan:
        """Its plan. Raises SettingsError. store: an empty folder."""
        environ = {"SERVING_MODEL_STORE": str(store / "model"), **self.environ}
        (store / "model").mkdir()
        if self.properties:
            lines = "\n".join(f"{name}={value}" for name, value in self.properties.items())
            (store / "model" / "serving.properties").write_text(lines)
        content = None
        if self.lmcache:
            file = store / "lmcache.yaml"
            file.write_text(self.lmcache)
            environ["LMCACHE_CONFIG_FILE"] = str(file)
            content = strict_yaml.read_file(file)
            assert isinstance(content, dict)
        found = arguments.called(shlex.split(self.command), environ)
        assert found, self.command
        _, words, variables = found
        settings = read(variables, arguments.read("serve", words))
        there: dict[str, Any] = {"memory": self.machine["memory"] * GIB}
        here = machine(self.machine["gpus"], **(there if there["memory"] else {}))
        facts = model(2, attention_heads=32)
        return plan.make(settings, here, facts, None, variables, PARTS, content)


def published() -> Iterator[Published]:
    """The configurations of public.txt."""
    repository = ""
    for block in (FOLDER / "public.txt").read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        if lines and lines[0].startswith("== "):
            repository, _, _ = lines.pop(0).removeprefix("== ").partition(" ")
        if not lines:
            continue
        file, _, sizes = lines[0].partition("  ")
        given: dict[str, list[str]] = {kind: [] for kind in "$@.|>"}
        for line in lines[1:]:
            kind, _, text = line.partition(" ")
            given[kind] += [text] if kind in "$|" else text.split("; ")
        pairs = {kind: dict(it.split("=", 1) for it in given[kind]) for kind in "@.>"}
        yield Published(
            address=f"https://github.com/{repository}/{file}",
            machine={"gpus": 1, "memory": 0} | {k: int(v) for k, v in _pairs(sizes.split())},
            command=" ".join(given["$"]),
            environ=pairs["@"],
            properties=pairs["."],
            lmcache="\n".join(given["|"]),
            expected=pairs[">"],
        )


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        name, _, value = word.partition("=")
        yield name, value


def told(made: Plan) -> dict[str, str]:
    """A plan in the words of public.txt: vLLM's options by their names, and these besides.

    - `gpus`: those of a copy
    - `keys`: whether they are asked for
    - `l1`, `disk`: the tiers' sizes in GiB
    - `chunk`: in tokens
    - `shared`: the store
    - `no_tiers`: the reason
    - `notes`
    """
    found = {name: str(value) for name, value in made.options.items()}
    found["keys"] = "asked for" if made.settings.api_key else "none"
    found["gpus"] = str(made.parallelism.tensor * made.parallelism.pipeline)
    found["notes"] = "\n".join((*made.settings.notes, *made.findings))
    tiers = made.tiers
    if isinstance(tiers, Tiers):
        found["l1"] = f"{tiers.l1 / GIB:g}"
        found["chunk"] = str(tiers.chunk_size)
        found["disk"] = f"{tiers.disk.size / GIB:g}" if tiers.disk else "none"
        found["shared"] = tiers.shared.shown if tiers.shared else "none"
    else:
        found["no_tiers"] = tiers.word
    return found
