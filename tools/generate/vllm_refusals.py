# SPDX-License-Identifier: Apache-2.0
"""Write vllm.tsv of tests/lmi_config/refusals: every place where the pinned vLLM refuses a
configuration, from its source.

A row has a key without a line number, the exception and the message. For each key, classified.tsv
beside it records whether the plan reports the refusal. Run whenever the pin moves: a test fails
when the file is stale or a key is not classified. The diff shows the refusals of the next version.
"""

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent.parent.parent / "tests" / "lmi_config" / "refusals"
PATH = FOLDER / "vllm.tsv"

_FILES = ("config/*.py", "engine/arg_utils.py", "platforms/cpu.py", "platforms/cuda.py")
"""Below vLLM's package: its configuration and the checks of its platforms."""
_PROXIES = ("NVIDIAPlatform", "__getattr__")


class Refusal(NamedTuple):
    """key: file, qualified function and the first digits of the message's SHA-256; a second refusal
    with the same message in a function has "+" behind it. message: with {…} for inserted values.
    """

    key: str
    exception: str
    message: str


def _package() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec
    assert spec.origin
    return Path(spec.origin).parent


def _raises(node: ast.AST, within: tuple[str, ...] = ()) -> Iterator[tuple[str, ast.Raise]]:
    """Qualified function and statement, in the file's order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _raises(child, (*within, child.name))
        else:
            if isinstance(child, ast.Raise):
                yield ".".join(within) or "<module>", child
            yield from _raises(child, within)


def _template(node: ast.expr | None) -> str:
    """A message's text, without what depends on the values."""
    match node:
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=values):
            return "".join(_template(it) for it in values)
        case ast.FormattedValue(value=value):
            return "{" + ast.unparse(value) + "}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _template(left) + _template(right)
        case ast.Call(func=ast.Attribute(value=ast.Constant() as text, attr="format")):
            return _template(text)
        case None:
            return ""
    return "{" + ast.unparse(node) + "}"


def refusals() -> list[Refusal]:
    package = _package()
    found: dict[str, Refusal] = {}
    for pattern in _FILES:
        for file in sorted(package.glob(pattern)):
            name = file.relative_to(package)
            for function, node in _raises(ast.parse(file.read_text())):
                match node.exc:
                    case ast.Call(func=func, args=args):
                        exception = ast.unparse(func)
                        message = " ".join(" ".join(map(_template, args)).split())
                    case raised:
                        exception, message = ast.unparse(raised) if raised else "(again)", ""
                digest = hashlib.sha256(f"{exception} {message}".encode()).hexdigest()[:6]
                key = f"{name}:{function}:{digest}"
                while key in found:
                    key += "+"
                found[key] = Refusal(key, exception, message)
    return [*found.values()]


def text() -> str:
    return "".join("\t".join(row) + "\n" for row in refusals())


if __name__ == "__main__":
    PATH.write_text(text())
