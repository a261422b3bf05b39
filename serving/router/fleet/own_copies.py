# SPDX-License-Identifier: Apache-2.0
"""The router of a container with several copies: its view of the copies, and their series, which
cannot be read from outside the container.
"""

import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path

COPY = "copy"
"""The label with the number of a series' copy ..."""
MODEL = "model"
"""... and that with the name of its model, in a container with several."""
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(\{)?")
_SUFFIXES = ("_total", "_created", "_bucket", "_count", "_sum", "_info")


@dataclasses.dataclass(kw_only=True)
class OwnCopies:
    """urls: the copies' addresses, in order. folder: the supervisor's, for the files below. least:
    OPTION_COPIES_LEAST. met: whether all copies that are not left out have been ready at once.
    closed: whether requests need a key or another router's signature, as for one server with
    OPTION_ROUTER_SECRET.
    """

    urls: tuple[str, ...]
    least: int
    folder: Path
    met: bool = False
    closed: bool = False

    @property
    def count(self) -> int:
        return len(self.urls)

    @property
    def numbers(self) -> dict[str, int]:
        """The copies' numbers by their addresses."""
        return {url: number for number, url in enumerate(self.urls)}

    @property
    def series(self) -> Path:
        """The file with the supervisor's series, in Prometheus' text format."""
        return self.folder / "series"

    @property
    def _without(self) -> Path:
        return self.folder / "left-out"

    def supervisors_series(self) -> str:
        """The supervisor's series, as last written."""
        try:
            return self.series.read_text()
        except OSError:
            return ""

    def leave_out(self, reasons: Mapping[int, str]) -> None:
        """Tell the router which copies are not started any more. reasons: by the copy's number."""
        new = self._without.with_suffix(".new")
        new.write_text(json.dumps(reasons))
        new.replace(self._without)

    def left_out(self) -> dict[int, str]:
        """The reasons of the copies that are not started any more, by the copy's number."""
        try:
            return {int(it): why for it, why in json.loads(self._without.read_bytes()).items()}
        except OSError:
            return {}

    def enough(self, ready: int) -> bool:
        """Whether the container is ready with this number of ready copies. At first all must be
        ready, because a single copy would get all requests.
        """
        at_first = max(self.count - len(self.left_out()), 1)
        self.met = self.met or ready >= at_first
        return ready >= (min(self.least, self.count) if self.met else at_first)


def described(copies: Mapping[int, bytes], left_out: Collection[int] = ()) -> bytes:
    """LMI's description of a model (GET /models/{model}) with a worker for each copy, in one group,
    as LMI has one for each kind of device. left_out: the numbers of copies that have failed for
    good. Raises ValueError, LookupError or TypeError if an answer is not such a description.
    """
    found = {number: json.loads(body) for number, body in copies.items()}
    whole = next(iter(found.values()))
    model = whole[0]["models"][0]
    group = model["workerGroups"][0]
    models = {number: it[0]["models"][0] for number, it in found.items()}
    group["workers"] = [
        {**worker, "id": number + 1}
        for number, it in models.items()
        for worker in it["workerGroups"][0]["workers"]
    ]
    group["workers"] += [
        {"id": number + 1, "startTime": None, "status": "FAILED"} for number in sorted(left_out)
    ]
    group["minWorkers"] = group["maxWorkers"] = len(group["workers"])
    for name in ("queueSize", "requestInQueue"):
        model[name] = sum(it[name] for it in models.values())
    return json.dumps(whole, separators=(",", ":")).encode()


def merged(own: str, servers: Mapping[str, str], label: str = COPY) -> str:
    """All series as one text. A family's lines stand together, with one HELP and one TYPE; a
    server's samples get a label with its number or name. Nothing is summed: most of them are no
    sums.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    texts = {"": own, **servers}
    for number, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                _, kind, name, *_ = line.split(" ", 3)
                if kind in ("HELP", "TYPE"):
                    family = name
                    described = heads.setdefault(family, [])
                    if not any(it.startswith(f"# {kind} ") for it in described):
                        described.append(line)
            elif line and (found := _SAMPLE.match(line)):
                if not _of(found[1], family):
                    family = found[1]
                labelled = _labelled(line, found, label, number)
                samples.setdefault(family, []).append(labelled)
    lines = []
    for family, values in samples.items():
        lines += [*heads.get(family, ()), *values]
    return "".join(f"{line}\n" for line in lines)


def _of(sample: str, family: str) -> bool:
    """Whether a sample belongs to a family."""
    return sample == family or any(sample == family + suffix for suffix in _SUFFIXES)


def _labelled(line: str, found: "re.Match[str]", label: str, number: str) -> str:
    if not number:
        return line
    name, rest = found[1], line[found.end() :]
    if not found[2]:
        return f'{name}{{{label}="{number}"}}{rest}'
    comma = "" if rest.startswith("}") else ","
    return f'{name}{{{label}="{number}"{comma}{rest}'
