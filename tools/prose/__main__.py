# SPDX-License-Identifier: Apache-2.0
"""Find hard English: the habits of rules.txt, and sentences of more than 40 words.

Reads the documentation, the help of the options and the docstrings. allowed.txt has the number of
findings that a folder may still have. It may only fall: `--fix` lowers it.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
RULES, ALLOWED = Path(__file__).with_name("rules.txt"), Path(__file__).with_name("allowed.txt")
GENERATED = ("docs/reference/options.md", "docs/reference/helm.md", "tests/compat")
FILES = ["git", "ls-files", "-co", "--exclude-standard", "*.md", "*.py"]
FILES += [f":!{it}" for it in GENERATED]
LONG = re.compile(r"(\S+ ){40}\S")
CODE = re.compile(r"^ *```.*?^ *```$|^---$.*?^---$|<!--.*?-->|^#.*?$", re.MULTILINE | re.DOTALL)
BREAK = re.compile(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) |\n?\|[\s:|-]*|(?<=[.!?])\s")


def rules() -> Iterator[tuple[str, re.Pattern[str]]]:
    for line in RULES.read_text().splitlines():
        if not line.startswith("#"):
            name, advice, pattern = re.split(r" {2,}", line, maxsplit=2)
            start = r"(?:^|(?<=[:;] ))[*\"(]*"
            yield f"{name} ({advice})", re.compile(pattern.replace("^^", start))
    yield "long (split it)", LONG


def texts_of(name: str, text: str) -> Iterator[tuple[int, str]]:
    """The prose of a file, each part with its line."""
    if name.endswith(".md"):
        yield 1, CODE.sub(lambda it: "\n" * it[0].count("\n"), text)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr):
            node = node.value
        elif not name.endswith("declared.py"):
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def sentences(line: int, text: str) -> Iterator[tuple[int, str]]:
    """Each sentence, and each cell of a table, with its line."""
    start = 0
    for end in [*(it.span() for it in BREAK.finditer(text)), (len(text), 0)]:
        plain = re.sub(r"!?\[([^]]*)]\([^)]*\)", r"\1", text[start : end[0]])
        yield line + text.count("\n", 0, start), " ".join(re.sub("`[^`]*`", "CODE", plain).split())
        start = end[1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.prose", description=__doc__)
    parser.add_argument("--fix", action="store_true", help="lower the allowed numbers")
    parser.add_argument("show", nargs="*", help="print the findings in these files and folders")
    given = parser.parse_args()
    words, found, known = Counter[str](), Counter[str](), [*rules()]
    listed = subprocess.run(FILES, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    for name in listed.splitlines():
        folder = re.sub(r"^(docs/[^/]+(?=/)|[^/]+).*", r"\1", name)
        parts = texts_of(name, (ROOT / name).read_text())
        for line, sentence in (it for text in parts for it in sentences(*text)):
            words[folder] += len(sentence.split())
            for rule in (rule for rule, pattern in known if pattern.search(sentence)):
                found[folder] += 1
                if name.startswith(tuple(given.show)):
                    print(f"{name}:{line}: {rule}: {sentence}")
    rows = (line.split() for line in ALLOWED.read_text().splitlines())
    allowed = {name: int(number) for number, name in rows}
    print("findings  allowed  per 1,000 words")
    for it in sorted(words):
        print(f"{found[it]:8} {allowed.get(it, 0):8} {1000 * found[it] / words[it]:6.1f}  {it}")
    if given.fix:
        ALLOWED.write_text("".join(f"{min(n, found[it])} {it}\n" for it, n in allowed.items()))
    if over := [it for it in words if found[it] > allowed.get(it, 0)]:
        sys.exit(f"hard English; to see it: python -m tools.prose {' '.join(over)}")


if __name__ == "__main__":
    main()
