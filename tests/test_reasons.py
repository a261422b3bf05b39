# SPDX-License-Identifier: Apache-2.0
"""Every refusal says why: each message of an error names the fault, and the fix.

The test finds in the source every place that makes such an error: an exception of
serving/errors.py, one that becomes such or ends a start, and a fault of lmi_config's. The patterns
below do not recognise all messages. The others are in reasons.txt: each line has the place and the
text, below the reason why the message is clear.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from serving import errors

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).with_name("reasons.txt")
FILES = [it for room in ("handlers", "lmi_config", "serving") for it in (ROOT / room).rglob("*.py")]
ERRORS = ROOT / "serving" / "errors.py"
OTHERS = {
    *("ArchiveError", "EngineError", "Fault", "FileFault", "FormatError", "ModelError", "NotYAML"),
    *("SettingsError", "SoundError", "SourceError", "Unusable", "VLLMValidationError", "fault"),
}
"""Exceptions that become one of serving/errors.py or end a start, and makers of a ModelError."""
WITHIN: Mapping[str, str] = {
    "lmi_config/facts/adapter.py": "adapter {name} cannot be used: ",
    "lmi_config/facts/draft.py": "{draft}: ",
    "lmi_config/facts/strict_yaml.py": "{file}: ",
    "lmi_config/options/arguments.py::_model.fault": "-m {models}: ",
    "lmi_config/options/arguments.py::_model": "-m {models}: ",
    "lmi_config/options/parsers.py": "{option}={value}: should be ",
    "lmi_config/plan/lmcache.py::_folder": "{option}={value}: should be ",
    "lmi_config/plan/lmcache.py::_sift": "{option}={value}: should be ",
    "lmi_config/plan/lmcache.py::_policy": "{option}={value}: should be ",
    "lmi_config/plan/lmcache.py::_remote": "{remote_url}: ",
    "lmi_config/plan/shared_store.py": "OPTION_KV_L2_URL: ",
    "lmi_config/plan/shared_store.py::_query": "OPTION_KV_L2_URL: {key}={value} should be ",
    "lmi_config/plan/vllm.py::_lora_module": "{option}={word}: ",
    "serving/access/keys.py": "{option}={file}: ",
    "serving/access/objectives.py": "{option}={file}: ",
    "serving/access/tokens.py": "{url}: ",
    "serving/lora/archives.py": "{src}: {reason}; pack it again: ",
    "serving/tune/workload.py": "{name}={value}: should be ",
}
"""Prefixes that the callers of a file or of one of its functions put before its messages."""
FAULTS = re.compile(r"(?:lmi_config|__main__).*(?<!de)fault")
"""A list of faults, recognised by its function's name or by its own."""
NOUNS = (
    r"adapter|body|bytes|chat|CSV|custom_id|engine|file|folder|form|header|HTTP/1\.0|input|key|line"
    r"|list|log|media|method|model's|name|number|page|part|picture|prompt|query|replicas|requests?"
    r"|router|server|texts?|tokens?|Transfer-Encoding|URL|value"
)
AT_FAULT = re.compile(
    r"\{|`|\b(?:AWS|HF|NODE|OPTION|SAGEMAKER|SERVING)_[A-Z]|^(?:an? |each |every |one |the |this "
    rf"|there are more |too many )?(?:first )?(?:{NOUNS})\b|^\w+(?:=|\.[\w.]+\b)"
)
"""A value, a name of an option or key, or the part of the request, at the start of the text."""
FIX = re.compile(
    r"\b(?:should|may (?:be|come|have|name|not)|at (?:most|least)|from \S+ to|ha(?:s|ve) to|needs?"
    r"|(?:larger|less|longer|more) than|after \{|within \{|lists? (?:those|the)|sets (?:the|how)"
    r"|(?:it|that) answers|does not name|expected|forbids|goes into|ignores|lets?|like|must|names"
    r"|only|takes|try again|turns)\b|\?"
    r"|(?:^|[;,:.(] |and |else |or |first )(?:add|ask|build|call|cancel|check|choose|close|convert"
    r"|correct|delete|drop|fetch|free|give|have|install|keep|leave|list|load|lower|make|merge|mount"
    r"|name|pack|pass|put|raise|remove|rename|renew|restart|run|save|say|send|set|shorten|simplify|start|stop"
    r"|take|train|unpack|upgrade|use|wait|write)\b",
    re.IGNORECASE,
)
"""The right value, the limit, the likely cause as a question, or the remedy."""


class Reason(NamedTuple):
    place: str  # file::function
    text: str  # with {expression} for each value
    field: bool  # whether the exception names the request's field beside its text

    @property
    def key(self) -> str:
        return f"{self.place}: {self.text}"

    @property
    def clear(self) -> bool:
        file = self.place.partition("::")[0]
        text = WITHIN.get(self.place, WITHIN.get(file, "")) + self.text
        return bool((self.field or AT_FAULT.search(text)) and FIX.search(text))


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def constants(file: Path) -> Mapping[str, ast.expr]:
    """Values that are assigned once to a module's names, including its imports from other files."""
    found: dict[str, ast.expr] = {}
    for node in parsed(file).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            other = ROOT.joinpath(*node.module.split(".")).with_suffix(".py")
            if other in FILES and other != file:
                theirs = constants(other) if other != ERRORS else {}
                names = {it.asname or it.name: it.name for it in node.names}
                found |= {own: theirs[it] for own, it in names.items() if it in theirs}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
    return found


def texts(node: ast.expr, known: Mapping[str, list[ast.expr]], deep: int = 0) -> list[str]:
    """The possible texts of an expression, with {expression} for each value that only a run
    knows.
    """
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.Name(id=name) if name in known and deep < 4:
            return [it for one in known[name] for it in texts(one, known, deep + 1)]
        case ast.JoinedStr(values=parts):
            found = [""]
            for part in parts:
                said = texts(part, known, deep)
                found = [before + it for before in found for it in said]
            return found
        case ast.FormattedValue(value=value):
            said = texts(value, known, deep + 1)
            return [f"{{{ast.unparse(value)}}}"] if said == [""] else said
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [a + b for a in texts(left, known, deep) for b in texts(right, known, deep)]
        case ast.IfExp(body=body, orelse=other):
            return texts(body, known, deep) + texts(other, known, deep)
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [it for part in parts for it in texts(part, known, deep)]
        case ast.ListComp(elt=part):
            return texts(part, known, deep)
    return [f"{{{ast.unparse(node)}}}"]


def functions(node: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Each function below a node with its name; nested functions also count."""
    for child in ast.iter_child_nodes(node):
        within = name
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            within = f"{name}.{child.name}".lstrip(".")
            if not isinstance(child, ast.ClassDef):
                yield within, child
        yield from functions(child, within)


def own(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of nested functions."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from own(child)


@cache
def classes() -> Mapping[str, bool]:
    """Exceptions → whether their class has the text, instead of the place that raises them."""
    found = {}
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.ServingError):
            init: Any = vars(kind).get("__init__")
            found[name] = bool(init) and "message" not in init.__code__.co_varnames
    return found


def in_file(file: Path) -> Iterator[Reason]:
    for name, function in functions(parsed(file)):
        known = {key: [value] for key, value in constants(file).items()}
        for node in own(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                known.setdefault(node.targets[0].id, []).append(node.value)
        for node in own(function):
            for parts, field in messages(file, name, node):
                said = [texts(it, known) for it in parts]
                for text in {"; ".join(it) for it in zip(*said, strict=False)} if said else ():
                    yield Reason(f"{file.relative_to(ROOT)}::{name}", text, field)


def messages(file: Path, name: str, node: ast.AST) -> Iterator[tuple[list[ast.expr], bool]]:
    """The expressions that a node makes a message of, and whether it also names a field."""
    match node:
        case ast.Call(func=func, args=[*given], keywords=keywords) if given:
            called = ast.unparse(func).rpartition(".")[2]
            if ast.unparse(func) == "super().__init__" and file == ERRORS:
                yield given[:1], False
            elif called == "SourceError" or called == "Unusable":
                yield given[1:], True
            elif called == "fault" and len(given) > 1:  # ModelConfig.fault
                yield given[2:], True
            elif called == "Fault" and len(given) > 1:  # a line of a batch: its code comes first
                yield given[1:2], False
            elif called in ("ValueError", *OTHERS) or classes().get(called) is False:
                yield given[:1], len(given) > 1 or any(it.arg == "parameter" for it in keywords)
            elif called == "append" and FAULTS.search(f"{file}::{name} {ast.unparse(func)}"):
                yield given, False
        case ast.Yield(value=ast.Constant() | ast.JoinedStr() | ast.BinOp() | ast.IfExp() as value):
            if "lmi_config" in file.parts:
                yield [value], False


@cache
def found() -> dict[str, Reason]:
    every = (it for file in sorted(FILES) for it in in_file(file))
    return {it.key: it for it in every if it.text != "{message}"}


@cache
def table() -> dict[str, str]:
    """The rows of reasons.txt: place and text → why it is clear."""
    found: dict[str, str] = {}
    for paragraph in TABLE.read_text().split("\n\n")[1:]:
        why, *keys = paragraph.strip().split("\n    ")
        found |= dict.fromkeys(keys, why)
    return found


def test_every_reason_names_what_is_at_fault_and_the_fix():
    unclear = {key: it for key, it in found().items() if not it.clear}
    missing = [f"    {key}" for key in unclear if key not in table()]
    assert not missing, "\n".join(["reword these, or add their lines to reasons.txt:", *missing])
    assert sorted(table().keys() - unclear.keys()) == [], "these lines are no longer needed"


def test_all_were_found():
    assert len(found()) > 400
