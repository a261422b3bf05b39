# SPDX-License-Identifier: Apache-2.0
"""Every call that reads bytes has a bound: each place is in a row of docs/explanation/security.md's
table of bounds, or has a reason in tests/bounds.py.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bounds import OTHERS, ROWS
from tests.test_security import named_in

ROOT = Path(__file__).parent.parent
OURS = ("serving", "handlers", "lmi_config")
PAGE = (ROOT / "docs" / "explanation" / "security.md").read_text()
TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("## Bounds")[2].partition("\n## ")[0].splitlines()
    if line.startswith("| ")
][1:]
_READING = (
    "recv recv_into recvfrom recv_multipart recvmsg sock_recv sock_recv_into sock_recvfrom "
    "read readline readlines readexactly readuntil "
    "read1 readinto read_text read_bytes receive receive_bytes load loads safe_load full_load "
    "raw_decode json iter_any iter_chunked iter_lines iter_bytes iter_raw aiter_lines aiter_bytes "
    "aiter_raw iter_content getvalue hget hgetall communicate check_output"
)
READING = frozenset(_READING.split())
"""Names of functions that read bytes, or make objects of them; `decode` with a value and `stdin`
also count.
"""


def sites(tree: ast.Module, file: str) -> Iterator[str]:
    """The places that read: `file::function call`. Calls of our functions are left out: these have
    places themselves.
    """
    own = {it.name for it in tree.body if isinstance(it, ast.FunctionDef | ast.AsyncFunctionDef)}
    for it in ast.walk(tree):
        if isinstance(it, ast.ImportFrom) and (it.module or "").partition(".")[0] in OURS:
            own |= {alias.asname or alias.name for alias in it.names}

    def visit(node: ast.AST, inside: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            within = inside
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                within = (*inside, child.name)
            if found := reading(child, node):
                yield f"{file}::{'.'.join(inside) or '-'} {found}"
            yield from visit(child, within)

    def reading(it: ast.AST, parent: ast.AST) -> str:
        if isinstance(it, ast.Attribute) and it.attr in ("decode", "stdin"):
            # A decoder that is kept under a name, and not called here.
            called = isinstance(parent, ast.Call) and parent.func is it
            decoder = it.attr == "decode" and "Decoder" in ast.unparse(it.value)
            stdin = it.attr == "stdin" and ast.unparse(it) == "sys.stdin"
            return ast.unparse(it) if stdin or (decoder and not called) else ""
        if not isinstance(it, ast.Call):
            return ""
        match it.func:
            case ast.Name(id=name):
                base = name
            case ast.Attribute(attr=name, value=ast.Name(id=base)):
                pass
            case ast.Attribute(attr=name):
                base = ""
            case _:
                return ""
        decodes = name == "decode" and it.args and not isinstance(it.args[0], ast.Constant)
        return ast.unparse(it.func) if (name in READING or decodes) and base not in own else ""

    yield from visit(tree, ())


@functools.cache
def all_sites() -> frozenset[str]:
    """The calls in our source: seconds of work."""
    return frozenset(
        site
        for folder in OURS
        for path in (ROOT / folder).rglob("*.py")
        for site in sites(ast.parse(path.read_text()), path.relative_to(ROOT).as_posix())
    )


KNOWN = [
    f"{file}::{place}"
    for files in (*ROWS.values(), OTHERS)
    for file, places in files.items()
    for place in places
]


def test_every_place_that_reads_has_a_bound_or_a_reason():
    missing = sorted(all_sites() - {*KNOWN})
    assert not missing, "these places need a row of tests/bounds.py, or a reason:\n" + "\n".join(
        missing
    )


def test_every_entry_is_of_a_place_that_is_there_once():
    assert sorted({*KNOWN} - all_sites()) == []
    assert sorted({it for it in KNOWN if KNOWN.count(it) > 1}) == []


def test_rows_are_those_of_the_docs_table():
    assert {*ROWS} <= {row[0] for row in TABLE}
    assert len({row[0] for row in TABLE}) == len(TABLE) > 25


@pytest.mark.parametrize("row", TABLE, ids=[row[0] for row in TABLE])
def test_a_row_says_who_how_much_what_then_and_which_test(row):
    assert len(row) == 5
    assert all(row)
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row[4])
    assert len(named) == row[4].count("`") / 2
    assert named or row[4].startswith("none: ")
    for file, test in named:
        assert test in named_in(ROOT / file), f"{file} has no {test}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(a):\n    return json.loads(a.read())", {"x.py::f json.loads", "x.py::f a.read"}),
        ("async def f(a):\n    await a.readline()", {"x.py::f a.readline"}),
        ("class A:\n    def f(self, a):\n        yaml.safe_load(a)", {"x.py::A.f yaml.safe_load"}),
        ("read = msgspec.json.Decoder(int).decode", {"x.py::- msgspec.json.Decoder(int).decode"}),
        ("for it in sys.stdin:\n    pass", {"x.py::- sys.stdin"}),
        ("a.decode()\na.decode('utf-8')\nread_text", set()),
        ("from serving.a import read\nread(1)", set()),
        ("def read():\n    pass\nread()", set()),
    ],
)
def test_what_is_found(source, found):
    assert {*sites(ast.parse(source), "x.py")} == found
