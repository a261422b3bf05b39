# SPDX-License-Identifier: Apache-2.0
"""Which versions of vLLM and LMCache Slipway runs with, compared with what is installed."""

import logging
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from serving.patching.patch import Unfit, installed

FILE = Path(__file__).with_name("versions.toml")
NAMES = {"vllm": "vLLM", "lmcache": "LMCache"}
PAGE = "docs/explanation/patches.md"

log = logging.getLogger(__name__)


class Range(NamedTuple):
    """Versions of a library. oldest, newest: supported, with all between them; a bound of two
    numbers stands for all versions that begin with them. seen: version → with what. limits: version
    → what is not as with others. broken: version → why.
    """

    oldest: str
    newest: str
    seen: Mapping[str, str]
    limits: Mapping[str, str]
    broken: Mapping[str, str]


def read(file: Path = FILE) -> dict[str, Range]:
    """The table, by package."""
    return {name: Range(**it) for name, it in tomllib.loads(file.read_text()).items()}


class Verdict(NamedTuple):
    """What is wrong with a version, in a sentence, and whether the start is refused for it."""

    refused: bool
    told: str


def judge(name: str, version: str, known: Range) -> Verdict | None:
    """What is wrong with an installed version; None where it is supported.

    name: the library's, for people.
    """
    span = f"{known.oldest} to {known.newest}" if known.oldest != known.newest else known.oldest
    if why := _said(known.broken, version):
        return Verdict(True, f"{name} {version} does not work with Slipway: {why}; install {span}")
    old = _cut(version, known.oldest) < _numbers(known.oldest)
    if not old and _cut(version, known.newest) <= _numbers(known.newest):
        limit = _said(known.limits, version)
        return Verdict(False, f"{name} {version} works but for this: {limit}") if limit else None
    seen = _said(known.seen, version)
    told = f"of it was seen: {seen}" if seen else "nothing was seen of it"
    return Verdict(
        False, f"{name} {version} is outside the versions that Slipway supports, {span}; {told}"
    )


def _said(of_versions: Mapping[str, str], version: str) -> str | None:
    """What is said of a version, by itself or by the numbers that it begins with."""
    fitting = (told for it, told in of_versions.items() if _cut(version, it) == _numbers(it))
    return next(fitting, None)


def _numbers(version: str) -> tuple[int, ...]:
    """A version's numbers, without what may follow: `0.33.0rc1+cpu` is (0, 33, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


def _cut(version: str, bound: str) -> tuple[int, ...]:
    """As many of a version's numbers as a bound has."""
    return _numbers(version)[: len(_numbers(bound))]


def check(version: Callable[[str], str] = installed) -> None:
    """Compare what is installed with the table: warn of what is not supported, a line each. Raises
    Unfit for what is known not to work. version: of a package.
    """
    for package, known in read().items():
        found = version(package)
        if not _numbers(found):  # it is not installed: whoever needs it says so
            continue
        verdict = judge(NAMES[package], found, known)
        if verdict and verdict.refused:
            raise Unfit(verdict.told)
        if verdict:
            log.warning("%s", verdict.told)
