# SPDX-License-Identifier: Apache-2.0
"""The schema of an InferenceEndpointConfig.

`inferenceendpointconfig.json` is the resource's definition as aws/sagemaker-hyperpod-cli publishes
it (2026-06); the models of the package `sagemaker-hyperpod` 3.12.0 have a part of its fields. Newer
fields are added here as AWS's documentation has them. No definition with them has been published.
"""

import copy
import json
from pathlib import Path
from typing import Any

PUBLISHED = json.loads(Path(__file__).with_name("inferenceendpointconfig.json").read_text())
_ENABLED = {"type": "boolean", "default": False}
_SPEC = PUBLISHED["properties"]["spec"]["properties"]
_RESOURCES = _SPEC["worker"]["properties"]["resources"]
DOCUMENTED: dict[tuple[str, ...], dict[str, Any]] = {
    # sagemaker-hyperpod-model-deployment-model-caching.md
    ("modelCacheConfig",): {
        "type": "object",
        "properties": {
            "weightsCache": {
                "type": "object",
                "properties": {
                    "enabled": _ENABLED,
                    "hostPath": {
                        "type": "string",
                        "default": "/opt/dlami/nvme",
                        "pattern": "^/",
                        "maxLength": 255,
                    },
                },
            },
            "imageCache": {"type": "object", "properties": {"enabled": _ENABLED}},
        },
    },
    # sagemaker-hyperpod-inference-release-notes.md: operator 3.3
    ("loadBalancer", "idleTimeoutSeconds"): {
        "type": "integer",
        "minimum": 1,
        "maximum": 4000,
        "default": 60,
    },
    # The same, operator 3.4. Where they stand is not shown.
    ("metricsSidecarResources",): _RESOURCES,
    ("metricsCollectorResources",): _RESOURCES,
    ("s3UploaderResources",): _RESOURCES,
    # sagemaker-hyperpod-model-deployment-dynamo.md. It is refused, whatever it has.
    ("dynamoSpec",): {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
}
"""Fields of `spec` that only documentation shows: path → schema."""


def _complete() -> dict[str, Any]:
    found: dict[str, Any] = copy.deepcopy(PUBLISHED)
    for (*outer, name), field in DOCUMENTED.items():
        inner = found["properties"]["spec"]
        for step in outer:
            inner = inner["properties"][step]
        inner["properties"][name] = field
    return found


SCHEMA = _complete()


def strict(schema: Any) -> Any:
    """A schema that refuses fields which Kubernetes drops, as kubectl does."""
    if isinstance(schema, list):
        return [strict(it) for it in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    closed = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if closed and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


def with_defaults(value: Any, schema: dict[str, Any]) -> Any:
    """A value with the schema's defaults, in objects that are there."""
    if isinstance(value, list):
        return [with_defaults(it, schema.get("items", {})) for it in value]
    if not isinstance(value, dict):
        return value
    known = schema.get("properties", {})
    defaults = {name: copy.deepcopy(it["default"]) for name, it in known.items() if "default" in it}
    return {
        name: with_defaults(it, known.get(name, {})) for name, it in {**defaults, **value}.items()
    }
