# SPDX-License-Identifier: Apache-2.0
"""Reads YAML files of operators within bounds, or refuses them with one exception."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

LARGEST = 2**20
"""Most bytes of a file."""
NODES, DEPTH = 100_000, 100
"""Most values of a file, and the deepest nesting of lists and mappings."""
LONGEST_NUMBER = 100
"""Most characters of a number. PyYAML takes hours for a megabyte in base 60, like 1:30:00."""
_MERGE = "tag:yaml.org,2002:merge"


class NotYAML(ValueError):
    """The message has the fault and, if known, the line."""


_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader is twenty times as fast."""


class _Loader(_Base):  # type: ignore[misc]  # one of two classes
    """Refuses repeated keys; PyYAML lets the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[Hashable] = set()
        for key, _ in node.value:
            if key.tag == _MERGE:
                raise yaml.constructor.ConstructorError(
                    problem="`<<` merges another part; write it out", problem_mark=key.start_mark
                )
            if not isinstance(key, yaml.ScalarNode):
                continue  # such a key is not hashable in Python
            if key.value in names:
                raise yaml.constructor.ConstructorError(
                    problem=f"`{key.value}` is given twice", problem_mark=key.start_mark
                )
            names.add(key.value)
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        if len(node.value) > LONGEST_NUMBER:
            raise yaml.constructor.ConstructorError(
                problem=f"a number has more than {LONGEST_NUMBER} digits",
                problem_mark=node.start_mark,
            )
        if node.tag.endswith(":int"):
            return self.construct_yaml_int(node)
        return self.construct_yaml_float(node)


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)


def read_file(path: Path) -> Any:
    """The content of a file. Raises NotYAML and OSError."""
    with path.open("rb") as file:
        return read(file.read(LARGEST + 1))


def read(content: bytes) -> Any:
    """The content; None if it is empty. Raises NotYAML, also for more than one document."""
    documents = read_all(content)
    if len(documents) > 1:
        raise NotYAML("not YAML of one document; remove the lines from the second `---` on")
    return documents[0] if documents else None


def read_all(content: bytes) -> list[Any]:
    """The content of each document. Raises NotYAML."""
    if len(content) > LARGEST:
        raise NotYAML(f"longer than {LARGEST} bytes")
    try:
        _require_small(content)
        return [*yaml.load_all(content, _Loader)]
    except NotYAML:
        raise
    except yaml.MarkedYAMLError as error:
        line = ""
        if error.problem_mark:  # libyaml counts one line more for a fault at the end of the file
            last = max(len(content.splitlines()), 1)
            line = f" in line {min(error.problem_mark.line + 1, last)}"
        raise NotYAML(f"not YAML{line}: {error.problem}") from None
    except yaml.reader.ReaderError as error:  # a byte or a character that YAML forbids
        raise NotYAML(f"not YAML at position {error.position}: {error.reason}") from None
    except (ValueError, AttributeError, LookupError):  # for `!!int a`, `!!timestamp a`, `!!bool a`
        raise NotYAML("not YAML: a value is not of its type") from None
    except (yaml.YAMLError, RecursionError):
        raise NotYAML("not YAML") from None


def _require_small(content: bytes) -> None:
    """Raise NotYAML for a file whose construction would take long, or much memory: 500 bytes with
    nested aliases can take gigabytes.
    """
    depth = nodes = 0
    for event in yaml.parse(content, _Base):
        if isinstance(event, yaml.NodeEvent):
            nodes += 1
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        fault = ""
        if isinstance(event, yaml.AliasEvent):
            fault = f"`*{event.anchor:.40}` repeats another part; write it out"
        elif depth > DEPTH:
            fault = f"it is nested more than {DEPTH} deep"
        elif nodes > NODES:
            fault = f"it has more than {NODES:,} values"
        if fault:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise NotYAML(f"not YAML in line {line}: {fault}")
