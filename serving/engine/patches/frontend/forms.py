# SPDX-License-Identifier: Apache-2.0
"""vLLM's models of requests read each value as one form, and stop at the first fault in a list."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import SchemaValidator, core_schema

from serving.patching.patch import SERVER, Name, Patch

NO_FORM = "its `type` names none of the forms that it may have"
_NO_TYPE = "[]"
_INSIDE = ("schema", "inner_schema", "model_schema")


def models() -> tuple[Any, ...]:
    """The models of the requests that may have values of many forms."""
    from vllm.entrypoints.anthropic.protocol import (
        AnthropicCountTokensRequest,
        AnthropicMessagesRequest,
    )
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.pooling.classify.protocol import ClassificationChatRequest
    from vllm.entrypoints.pooling.embed.protocol import (
        EmbeddingBatchChatInputRequest,
        EmbeddingBatchChatRequest,
        EmbeddingChatInputRequest,
        EmbeddingChatRequest,
    )
    from vllm.entrypoints.pooling.pooling.protocol import PoolingChatRequest
    from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest

    return (
        *(ChatCompletionRequest, CompletionRequest, ResponsesRequest, TokenizeChatRequest),
        *(AnthropicMessagesRequest, AnthropicCountTokensRequest),
        *(EmbeddingChatRequest, EmbeddingBatchChatRequest, EmbeddingChatInputRequest),
        *(EmbeddingBatchChatInputRequest, ClassificationChatRequest, PoolingChatRequest),
    )


def read_as_one_form(model: Any) -> None:
    """Make a model read its values as one form. May be called again."""
    # FastAPI takes the schema for the model's own, too, where it makes its routes.
    schema = _read_once(model.__pydantic_core_schema__)
    setattr(model, "__pydantic_validator__", SchemaValidator(schema))  # noqa: B010


def _read_once(schema: Any) -> Any:
    """Change a schema of pydantic's in place, and return it."""
    known = {it["ref"]: it for it in _schemas(schema) if "ref" in it}
    for it in [*_schemas(schema)]:
        if it["type"] == "list":
            it["fail_fast"] = True
        elif it["type"] == "union" and (forms := _forms(it["choices"], known)):
            ref = {key: it[key] for key in ("ref", "metadata") if key in it}
            it.clear()
            it.update(_by_type(forms), **ref)
    return schema


def _schemas(value: Any) -> Iterator[dict[str, Any]]:
    """All schemas within one."""
    left, seen = [value], set()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            if isinstance(value.get("type"), str):
                yield value
            left.extend(it for key, it in value.items() if key != "metadata")
        elif isinstance(value, list | tuple):
            left.extend(value)


def _forms(choices: list[Any], known: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Types → the schemas of values that have them. Empty if a value need not have a type."""
    found: dict[str, list[Any]] = {}
    for choice in _flat(choices, known):
        names = _types(_schema(choice), known)
        if not names:
            return {}
        for name in names:
            found.setdefault(name, []).append(choice)
    return found if len(found) > 2 else {}


def _flat(choices: list[Any], known: Mapping[str, Any]) -> Iterator[Any]:
    """The choices of a union, and of unions among them."""
    for choice in choices:
        schema = _schema(choice)
        schema = known.get(schema.get("schema_ref", ""), schema)
        if schema["type"] == "union":
            yield from _flat(schema["choices"], known)
        else:
            yield choice


def _schema(choice: Any) -> Any:
    return choice[0] if isinstance(choice, tuple) else choice


def _types(schema: Any, known: Mapping[str, Any]) -> list[str]:
    """The values that this schema allows for the key `type`, in brackets, and _NO_TYPE if the key
    may be absent.
    """
    while schema["type"] not in ("typed-dict", "model-fields"):
        inside = next((schema[key] for key in _INSIDE if isinstance(schema.get(key), dict)), None)
        if schema["type"] == "definition-ref":
            inside = known.get(schema["schema_ref"])
        if not inside:
            return []
        schema = inside
    field = schema["fields"].get("type")
    if not field:
        return []
    literal, required = field["schema"], field.get("required", schema["type"] == "model-fields")
    while literal["type"] in ("default", "nullable"):
        literal, required = literal["schema"], False
    if literal["type"] != "literal":
        return []
    return [f"[{name}]" for name in literal["expected"]] + ([] if required else [_NO_TYPE])


def _by_type(forms: Mapping[str, list[Any]]) -> Any:
    def form(value: Any) -> str | None:
        found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return _NO_TYPE if found is None else f"[{found}]" if isinstance(found, str) else None

    choices = {
        name: of_it[0] if len(of_it) == 1 and not isinstance(of_it[0], tuple)
        else core_schema.union_schema(of_it)
        for name, of_it in forms.items()
    }  # fmt: skip
    return core_schema.tagged_union_schema(
        choices, form, custom_error_type="no_form", custom_error_message=NO_FORM
    )


def _put() -> None:
    for model in models():
        read_as_one_form(model)


PATCH = Patch(
    name="forms",
    process=SERVER,
    names=(
        Name("pydantic.main:BaseModel", has=("__pydantic_core_schema__", "__pydantic_validator__")),
    ),
    does="Replaces the validators of the request models. A value is validated as the form that "
    "its `type` names, and a list ends at its first fault. The patch runs before the import of "
    "vLLM's routes, because the routes keep the validators of that moment.",
    why="pydantic tries every possible form of a value and records why each one fails: up to 200 "
    "faults for one item of Responses, some 0.5 ms each, all on the event loop.",
    without="a body of many values delays all other requests during its validation",
    closed=False,
    put=_put,
)
