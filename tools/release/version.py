# SPDX-License-Identifier: Apache-2.0
"""Compare the version in pyproject.toml with the other places that repeat it.

`scripts/check` compares them, and `scripts/check --fix` writes them.
"""

import argparse
import re
import sys
from pathlib import Path

STATED = r'^version = "(.+)"$'
REPEATED = (
    ("serving/__init__.py", r'^VERSION = "(.+)"$'),
    ("docs/reference/openapi.yaml", r"^  version: (.+)$"),
    ("deploy/kubernetes/kustomization.yaml", r'^    newTag: "(.+)"$'),
    ("deploy/kubernetes/hyperpod.yaml", r"^    image: .+/slipway:(.+)$"),
    ("deploy/helm/slipway/Chart.yaml", r"^version: (.+)$"),
    ("deploy/helm/slipway/Chart.yaml", r"^appVersion: (.+)$"),
)
RELEASED = r"^## \[(\d.*)\] - (\d{4}-\d\d-\d\d|not released)$"
"""The heading of a version in CHANGELOG.md. It has a date only once the version is released."""


def found(file: Path, pattern: str) -> re.Match[str]:
    """The first line of a file with a version. Raises SystemExit if there is none."""
    match = re.search(pattern, file.read_text(), re.MULTILINE)
    if not match:
        raise SystemExit(f"{file} has no line like {pattern}")
    return match


def version(root: Path) -> str:
    return found(root / "pyproject.toml", STATED)[1]


def faults(root: Path) -> list[str]:
    """One line for each place with another version."""
    wanted = version(root)
    places = (*REPEATED, ("CHANGELOG.md", RELEASED))
    has = [(name, found(root / name, pattern)[1]) for name, pattern in places]
    return [
        f"{name} has version {it}, pyproject.toml has {wanted}" for name, it in has if it != wanted
    ]


def write(root: Path) -> None:
    """Write the version to every place except CHANGELOG.md, which people write."""
    for name, pattern in REPEATED:
        match = found(root / name, pattern)
        start, end = match.span(1)
        (root / name).write_text(match.string[:start] + version(root) + match.string[end:])


def notes(root: Path) -> str:
    """CHANGELOG.md's section of the version. Raises SystemExit if its heading has no date."""
    heading = found(root / "CHANGELOG.md", RELEASED)
    if heading[2] == "not released":
        raise SystemExit(
            f"CHANGELOG.md: write the date of the release into the heading of {heading[1]}"
        )
    return heading.string[heading.end() :].partition("\n## ")[0].strip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools/release/version.py", description=__doc__)
    parser.add_argument("--fix", action="store_true", help="write the version to all places")
    parser.add_argument("--notes", action="store_true", help="print the version's release notes")
    given = parser.parse_args()
    root = Path(__file__).parents[2]
    if given.fix:
        write(root)
    if wrong := faults(root):
        sys.exit("\n".join([*wrong, "scripts/check --fix writes all but CHANGELOG.md"]))
    print(notes(root) if given.notes else version(root))


if __name__ == "__main__":
    main()
