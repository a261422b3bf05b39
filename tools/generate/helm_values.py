# SPDX-License-Identifier: Apache-2.0
"""Write the Helm chart's values.schema.json and its page from the comments of values.yaml, or check
that they are fresh.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from tools.generate.files import ROOT, written

CHART = ROOT / "deploy" / "helm" / "slipway"
SCHEMA = CHART / "values.schema.json"
PAGE = ROOT / "docs" / "reference" / "helm.md"
DESCRIBED = re.compile(r"# -- (?:\(([\w|]+)\) )?(.+)")
TYPES = {str: "string", bool: "boolean", int: "integer", list: "array", dict: "object"}

INTRODUCTION = """\
# Values of the Helm chart

<!-- Written by tools/generate/helm_values.py from the chart's values.yaml; do not edit. -->

`helm install slipway deploy/helm/slipway -f VALUES` takes these
([Kubernetes](../guides/kubernetes.md)). Helm refuses other names and other types, by the chart's
`values.schema.json`. `deploy/helm/slipway/examples` has files of values. An option of `options`
is taken out by `null`.

| value | default | |
|---|---|---|
"""


class Value(NamedTuple):
    """A value of the chart: its path, default, description, and its type or allowed values."""

    path: tuple[str, ...]
    default: Any
    description: str
    kinds: tuple[str, ...]

    def schema(self) -> dict[str, Any]:
        found: dict[str, Any] = {"description": self.description}
        if not self.kinds:
            return found | {"type": TYPES[type(self.default)]}
        if self.kinds == ("server",):
            return found | {"$ref": "#/properties/server"}
        if {*self.kinds} <= {"string", "number", "integer", "boolean"}:
            return found | {"type": [*self.kinds] if len(self.kinds) > 1 else self.kinds[0]}
        return found | {"enum": [*self.kinds]}


def values() -> Iterator[Value]:
    """The values in their order. Raises ValueError for one without a description."""
    text = (CHART / "values.yaml").read_text()
    lines = text.splitlines()
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    yield from _inside(root, (), lines)


def _inside(node: yaml.MappingNode, above: tuple[str, ...], lines: list[str]) -> Iterator[Value]:
    for key, value in node.value:
        path = (*above, str(key.value))
        first = key.start_mark.line
        while first and lines[first - 1].strip().startswith("# "):
            first -= 1
        comment = [line.strip() for line in lines[first : key.start_mark.line]]
        if described := DESCRIBED.fullmatch(comment[0]) if comment else None:
            description = " ".join(
                [described[2], *(line.removeprefix("# ") for line in comment[1:])]
            )
            kinds = tuple((described[1] or "").split("|")) if described[1] else ()
            default = yaml.safe_load(yaml.serialize(value))
            yield Value(path, default, description, kinds)
        elif isinstance(value, yaml.MappingNode):
            yield from _inside(value, path, lines)
        else:
            raise ValueError(f"{'.'.join(path)} has no description")


def schema() -> str:
    """JSON Schema of the values."""
    root: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    root |= {"type": "object", "additionalProperties": False, "properties": {"global": {}}}
    for value in values():
        at = root
        for name in value.path[:-1]:
            made = {"type": "object", "additionalProperties": False, "properties": {}}
            at = at["properties"].setdefault(name, made)
        at["properties"][value.path[-1]] = value.schema()
    return json.dumps(root, indent=2) + "\n"


def page() -> str:
    """The page of the values."""
    rows = []
    for value in values():
        default = json.dumps(value.default) if value.default not in ("", {}, []) else ""
        one_of = " One of " + ", ".join(f"`{it}`" for it in value.kinds) + "."
        shown = value.description + (one_of if "enum" in value.schema() else "")
        rows.append(
            f"| `{'.'.join(value.path)}` | {f'`{default}`' if default else ''} | {shown} |\n"
        )
    return INTRODUCTION + "".join(rows)


def main(*, check: bool) -> int:
    return written({SCHEMA: schema().encode(), PAGE: page().encode()}, check=check)
