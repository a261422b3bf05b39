# SPDX-License-Identifier: Apache-2.0
"""The folder of a sweep: its parameters, and a line of JSON for each finished point. An interrupted
sweep continues from it.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serving.tune.load import Measured
from serving.tune.points import Point

_FILE = "sweep.jsonl"


class SweepError(Exception):
    """A sweep's folder cannot be used. The message says why."""


class Sweep:
    """A sweep in its folder. points: the finished points, in order."""

    def __init__(self, folder: Path, question: Mapping[str, Any]) -> None:
        """question: the parameters; a sweep only continues with equal ones. Raises SweepError if
        the folder has another sweep, or cannot be written.
        """
        self.folder = folder
        self.points: list[Point] = []
        self._path = folder / _FILE
        asked = json.loads(json.dumps(question))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lines = _lines(self._path)
            if lines and lines[0] != asked:
                keys = {*lines[0]} | {*asked}
                other = sorted(it for it in keys if lines[0].get(it) != asked.get(it))
                raise SweepError(
                    f"{folder} has a sweep with other {', '.join(other)}; name another folder "
                    "with --results, or remove it"
                )
            self.points = [_point(line) for line in lines[1:]]
            # This drops an incomplete last line.
            whole = [asked, *map(dataclasses.asdict, self.points)]
            new = self._path.with_suffix(".new")
            new.write_text("".join(f"{json.dumps(it)}\n" for it in whole))
            new.replace(self._path)
        except OSError as error:
            raise SweepError(f"{folder}: {error.strerror}; name a folder with --results") from None
        except (TypeError, KeyError, AttributeError):
            raise SweepError(f"{self._path}: is not the file of a sweep") from None

    def add(self, point: Point) -> None:
        self.points.append(point)
        with self._path.open("a") as file:
            file.write(f"{json.dumps(dataclasses.asdict(point))}\n")
            file.flush()
            os.fsync(file.fileno())

    def file(self, suffix: str) -> Path:
        """Return the path of a file of the next point."""
        return self.folder / f"{len(self.points) + 1}.{suffix}"


def _lines(path: Path) -> list[Any]:
    """Return the file's lines before the first incomplete one."""
    found: list[Any] = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
    return found


def _point(line: Mapping[str, Any]) -> Point:
    levels = tuple(Measured(**it) for it in line["levels"])
    return Point(options=line["options"], levels=levels, reason=line["reason"], again=line["again"])
