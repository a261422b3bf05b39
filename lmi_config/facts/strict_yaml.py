# SPDX-License-Identifier: Apache-2.0
"""YAML that people write: read, or refused in one way."""

from typing import Any

import yaml


class NotYAML(ValueError):
    """Says what is wrong and, where that is known, in which line."""


class _Loader(yaml.SafeLoader):
    """Refuses what is given twice, of which PyYAML lets the last win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: list[Any] = []
        for key, _ in node.value:
            if key.value in names:
                raise yaml.constructor.ConstructorError(
                    problem=f"`{key.value}` is given twice", problem_mark=key.start_mark
                )
            names.append(key.value)
        return super().construct_mapping(node, deep)


def read(content: bytes) -> Any:
    """What it holds; None where it is empty. Raises NotYAML, also for more than one document."""
    documents = read_all(content)
    if len(documents) > 1:
        raise NotYAML("not YAML of one document")
    return documents[0] if documents else None


def read_all(content: bytes) -> list[Any]:
    """What each of its documents holds. Raises NotYAML."""
    try:
        return [*yaml.load_all(content, _Loader)]
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise NotYAML(f"not YAML{line}: {error.problem}") from None
    except yaml.reader.ReaderError as error:  # a byte or a character that no YAML has
        raise NotYAML(f"not YAML at position {error.position}: {error.reason}") from None
    except (ValueError, AttributeError, LookupError):  # of `!!int a`, `!!timestamp a`, `!!bool a`
        raise NotYAML("not YAML: a value is not of its type") from None
    except (yaml.YAMLError, RecursionError):
        raise NotYAML("not YAML") from None
