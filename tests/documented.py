# SPDX-License-Identifier: Apache-2.0
"""The documentation as data: its pages, their code blocks, and the commands in those."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
_FILES = (
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(it for of in ("scripts", "tools") for it in (ROOT / of).rglob("*.md")),
)
PAGES = {str(it.relative_to(ROOT)): it.read_text() for it in sorted(_FILES)}
"""Path → text."""
_FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_SEPARATORS = {"|", "||", "&&", ";", "&"}
_REDIRECTION = re.compile(r"\d*[<>]&?\s*(\d|[\w.]+)(?=\s|$)")
_ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)


class Block(NamedTuple):
    """A code block of a page."""

    page: str
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


class Command(NamedTuple):
    """A line `$ …` of a console block, and the output below it."""

    where: str
    line: str
    output: str


class Call(NamedTuple):
    """One program of a command: its environment, and its words with the program's name first."""

    environ: dict[str, str]
    words: list[str]


def blocks(*languages: str) -> Iterator[Block]:
    for page, text in PAGES.items():
        for found in _FENCE.finditer(text):
            if not languages or found[2] in languages:
                line = text.count("\n", 0, found.start()) + 1
                yield Block(page, line, found[2], found[3])


def prose(text: str) -> str:
    """A page without its code blocks."""
    return _FENCE.sub("", text)


def commands() -> Iterator[Command]:
    for block in blocks("console"):
        text = block.text.replace("\\\n", "")
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            size = next(n for n in range(1, len(lines) + 1) if _whole("\n".join(lines[:n])))
            yield Command(block.name, "\n".join(lines[:size]), "\n".join(lines[size:]))


def _whole(line: str) -> bool:
    """Whether the line is complete: a shell would not wait for more."""
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return False
    return True


def calls(line: str) -> Iterator[Call]:
    """The programs of a shell's line: those of a pipe, a list or a loop's body."""
    lexer = shlex.shlex(_REDIRECTION.sub("", line), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    simple: list[list[str]] = [[]]
    for word in lexer:
        if word in _SEPARATORS:
            simple.append([])
        else:
            simple[-1].append(word)
    for words in simple:
        if words[:1] == ["do"]:
            words = words[1:]
        environ = {}
        while words and (assigned := _ASSIGNMENT.fullmatch(words[0])):
            environ[assigned[1]] = assigned[2]
            words = words[1:]
        if words and words[0] not in ("for", "done"):
            yield Call(environ, words)
