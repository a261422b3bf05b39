# SPDX-License-Identifier: Apache-2.0
"""Whether Slipway fits a version of vLLM or LMCache: `python -m tools.engines.judge FOLDER
[PACKAGE...]`.

FOLDER is an unpacked wheel. The check reads its files and imports none of them. It prints each name
that Slipway imports and the wheel lacks. It also prints each patch that does not fit, with the
consequence. The exit code is 1 if there is any.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from serving.engine.patches.engine_core import registry as engine
from serving.engine.patches.frontend import registry as frontend
from serving.engine.versions import moved
from serving.http.patches import registry as http
from serving.kv_cache.patches import registry as cache_server
from serving.patching.patch import Absent, Patch, definition

ROOT = Path(__file__).parent.parent.parent
PATCHES: Sequence[Patch] = (
    *(*frontend.PATCHES, *engine.PATCHES),
    *(*cache_server.PATCHES, *http.PATCHES),
)
"""The patches of all processes."""


class Unpacked:
    """The libraries of a folder, by their files (serving.patching.patch.Library)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def file(self, module: str) -> Path | None:
        """A module's file, which may be compiled, or its folder; None if it has neither."""
        place = self._folder.joinpath(*module.split("."))
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                return file
        compiled = next(place.parent.glob(f"{place.name}.*so"), None)
        return compiled or (place if place.is_dir() else None)

    def source(self, module: str) -> str:
        file = self.file(module)
        if not file:
            raise Absent(f"there is no module {module}")
        return file.read_text() if file.suffix == ".py" else ""

    def parameters(self, module: str, path: str) -> list[str] | None:
        source = self.source(module)
        if not path or not source:
            return None
        if "." not in path and path in names(source):
            try:
                node = definition(source, path)
            except Absent:  # a value, or imported from elsewhere
                return None
        else:
            node = definition(source, path)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        given = node.args
        parameters = [it.arg for it in (*given.posonlyargs, *given.args)]
        parameters += [given.vararg.arg] if given.vararg else []
        parameters += [it.arg for it in given.kwonlyargs]
        parameters += [given.kwarg.arg] if given.kwarg else []
        bound = any(ast.unparse(it) == "classmethod" for it in node.decorator_list)
        return parameters[1:] if bound else parameters


def names(source: str) -> set[str]:
    """The names that a module defines or imports; `*` if it makes names on demand."""
    found: set[str] = set()
    left: list[ast.stmt] = [*ast.parse(source).body]
    while left:
        node = left.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add("*" if name == "__getattr__" else name)
            case ast.ClassDef(name=name):
                found.add(name)
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {
                    it.id for one in targets for it in ast.walk(one) if isinstance(it, ast.Name)
                }
            case ast.Import(names=those) | ast.ImportFrom(names=those):
                found |= {(it.asname or it.name).split(".")[0] for it in those}
            case _:
                for part in ("body", "orelse", "finalbody"):
                    left += getattr(node, part, [])
                left += [it for one in getattr(node, "handlers", ()) for it in one.body]
    return found


def imports(file: Path, package: str) -> Iterator[tuple[str, str]]:
    """Module and name (or nothing) of each import of a package in a file, and of each attribute of
    a module that was imported.
    """
    tree = ast.parse(file.read_text())
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((it.name, "") for it in node.names if it.name.split(".")[0] == package)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            for it in node.names:
                yield str(node.module), it.name
                modules[it.asname or it.name] = f"{node.module}.{it.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            yield from ((module, node.attr),) if module else ()


def lost_imports(library: Unpacked, package: str) -> Iterator[str]:
    """Slipway's imports from a package that the folder lacks."""
    for file in sorted((ROOT / "serving").rglob("*.py")):
        where = file.relative_to(ROOT)
        for module, name in imports(file, package):
            found = library.file(module)
            if not found:
                # `name` is an attribute of what a module has, not of a module.
                if library.file(module.rpartition(".")[0]) is None or not name:
                    yield f"{where}: there is no module {module}"
            elif name and found.suffix == ".py" and library.file(f"{module}.{name}") is None:
                known = names(found.read_text())
                if not known & {name, "*"}:
                    yield f"{where}: {module} has no {name}"
    for name, places in moved.PLACES.items():
        if package == "vllm" and not any(library.file(it) for it in places):
            yield f"serving/engine/versions/moved.py: {name} is in none of {', '.join(places)}"


def lost_patches(library: Unpacked, package: str) -> Iterator[str]:
    """The patches of a package that do not fit, with the consequences."""
    for patch in PATCHES:
        for name in patch.names:
            if name.place.split(".")[0] == package and (why := name.missing(library)):
                end = "the start is refused" if patch.closed else f"left out: {patch.without}"
                yield f"{patch.name} ({patch.process}): {why}; {end}"
                break


def main(folder: str, *packages: str) -> int:
    """Returns the exit code."""
    library, faults = Unpacked(Path(folder)), 0
    for package in packages or ("vllm", "lmcache"):
        if not library.file(package):
            continue
        for fault in (*lost_imports(library, package), *lost_patches(library, package)):
            print(fault)
            faults += 1
    print(f"{faults} faults")
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
