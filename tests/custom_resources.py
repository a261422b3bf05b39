# SPDX-License-Identifier: Apache-2.0
"""Validates operators' objects by the definitions that their projects publish.

`crds/` has the schemas below `spec`, each with its source. It leaves out descriptions, defaults,
and rules in CEL, which only an API server evaluates. LeaderWorkerSet's schema leaves out its pods,
which Kubernetes' own schemas check.
"""

import json
from pathlib import Path
from typing import Any

import jsonschema

Schema = dict[str, Any]


def _strict(schema: Schema) -> Schema:
    """The same schema, but it refuses unknown fields: an API server drops them."""
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
    """Check an object if its kind has a definition. Returns whether it has one. Raises
    jsonschema.ValidationError if a cluster would refuse the object or would drop a part of it.
    """
    schema = _SCHEMAS.get(f"{document['apiVersion']} {document['kind']}")
    if schema:
        jsonschema.Draft202012Validator(schema).validate(document)
    return schema is not None
