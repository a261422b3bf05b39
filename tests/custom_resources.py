# SPDX-License-Identifier: Apache-2.0
"""Objects of operators, held against the definitions that their projects publish.

`crds/` has the schemas of what is below `spec`, each with its source. Left out are descriptions,
defaults, and rules in CEL, which only an API server evaluates; and of LeaderWorkerSet its pods,
which Kubernetes' own schemas check.
"""

import json
from pathlib import Path
from typing import Any

import jsonschema

Schema = dict[str, Any]


def _strict(schema: Schema) -> Schema:
    """The same, where a field that is not known is refused: an API server drops it."""
    found = dict(schema)
    if "properties" in schema:
        named = schema["properties"].items()
        found["properties"] = {name: _strict(value) for name, value in named}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            found.setdefault("additionalProperties", False)
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), dict):
            found[inner] = _strict(schema[inner])
    return found


def _read(file: Path) -> tuple[str, Schema]:
    found = json.loads(file.read_text())
    whole = {
        "type": "object",
        "required": ["metadata", "spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _strict(found["spec"]),
        },
        "additionalProperties": False,
    }
    return f"{found['apiVersion']} {found['kind']}", whole


_SCHEMAS = dict(_read(file) for file in (Path(__file__).parent / "crds").glob("*.json"))


def checked(document: dict[str, Any]) -> bool:
    """Check an object, where there is a definition of its kind; whether there is. Raises
    jsonschema.ValidationError for what a cluster would not take, or would drop.
    """
    schema = _SCHEMAS.get(f"{document['apiVersion']} {document['kind']}")
    if schema:
        jsonschema.Draft202012Validator(schema).validate(document)
    return schema is not None
