# SPDX-License-Identifier: Apache-2.0
"""Compares the installed versions of vLLM and LMCache with those that Slipway supports."""

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
    """Versions of a library. oldest, newest: the bounds of the supported versions, inclusive; a
    bound of two numbers covers all versions that begin with them. seen: version → the tests that it
    passed. limits: version → its known differences. broken: version → the reason.
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
    """A version's fault, in a sentence, and whether the start is refused for it."""

    refused: bool
    told: str


def judge(name: str, version: str, known: Range) -> Verdict | None:
    """The fault of an installed version; None if it is supported.

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
    """The table's entry for a version, or for the numbers that it begins with."""
    fitting = (told for it, told in of_versions.items() if _cut(version, it) == _numbers(it))
    return next(fitting, None)


def _numbers(version: str) -> tuple[int, ...]:
    """A version's numbers, without a suffix: `0.33.0rc1+cpu` is (0, 33, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


def _cut(version: str, bound: str) -> tuple[int, ...]:
    """A version's numbers, truncated to the length of a bound."""
    return _numbers(version)[: len(_numbers(bound))]


def check(version: Callable[[str], str] = installed) -> None:
    """Compare the installed versions with the table, and log a warning for each unsupported one.
    Raises Unfit for a version that is known not to work. version: returns a package's version.
    """
    for package, known in read().items():
        found = version(package)
        if not _numbers(found):  # not installed: the code that needs it reports that
            continue
        verdict = judge(NAMES[package], found, known)
        if verdict and verdict.refused:
            raise Unfit(verdict.told)
        if verdict:
            log.warning("%s", verdict.told)
