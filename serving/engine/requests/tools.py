# SPDX-License-Identifier: Apache-2.0
"""Forced tool calls fit their function's schema, by vLLM's grammars.

vLLM binds the arguments of a forced call only if the function has `"strict": true`, and it forces
no call without a parser of the model's own format. Here a forced call is bound unless the function
has `"strict": false`. Its arguments are then any object. If vLLM has no grammar for the model's
format, the model writes the call as JSON. A forced call is one with `tool_choice` `required` or a
function's name, Anthropic's `any` and `tool`, and a forced function of Responses.
"""

import contextlib
import copy
import json
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

import xgrammar
from openai.types.responses import FunctionTool, ToolChoiceCustom, ToolChoiceFunction
from starlette.datastructures import State
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionToolsParam,
)
from vllm.exceptions import VLLMValidationError
from vllm.parser.abstract_parser import DelegatingParser
from vllm.tool_parsers import ToolParser
from vllm.utils.mistral import is_mistral_tool_parser

_NAMED = (ChatCompletionNamedToolChoiceParam, ToolChoiceFunction, ToolChoiceCustom)
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}}

_UNKNOWN = (
    *("$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired"),
    *("dependentSchemas", "else", "if", "maxContains", "minContains", "not", "then"),
    "unevaluatedItems",
)
"""Keywords that xgrammar 0.2 ignores, or that it reads as something else."""
_NEED_TYPE = (
    *("exclusiveMaximum", "exclusiveMinimum", "maximum", "maxItems", "maxLength", "minimum"),
    *("minItems", "minLength", "multipleOf", "pattern"),
)
"""Keywords that xgrammar ignores in a schema without `type`."""
_ANNOTATIONS = {
    *("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated"),
    *("description", "discriminator", "example", "examples", "format", "nullable"),
    *("readOnly", "title", "writeOnly"),
}
_ALONE = ("$ref", "anyOf", "oneOf", "allOf")
"""Keywords beside which xgrammar ignores all constraints."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONES = ("items", "additionalProperties", "unevaluatedProperties")


class JsonCalls(ToolParser):  # type: ignore[misc]  # vLLM is not type-checked
    """Reads forced calls that are JSON, as vLLM's grammar then has the model write them."""


def bind(state: State, args: Namespace) -> None:
    """Bind the forced calls that vLLM's serving objects are asked for from now on.

    args: vLLM's arguments. `tool_strict_level` is the operator's choice and decides alone.
    """
    renderer = state.online_renderer
    for name, create, holds in (
        ("anthropic_serving_messages", "create_chat_completion", "parser_cls"),
        ("openai_serving_responses", "create_responses", "parser"),
    ):
        serving = getattr(state, name, None)
        if serving is None or renderer.use_harmony:  # which has one format, and its grammar
            continue
        if parser := forced_parser(getattr(serving, holds), args):
            _redirect(serving, create, holds, parser)
    if args.tool_strict_level == "auto" and renderer.parser is not None:
        renderer.parser = _bound(renderer.parser)


def forced_parser(parser: Any, args: Namespace) -> Any:
    """Return the parser of forced calls that replaces this parser of the model's format, or None if
    the given parser reads them. parser: may be None.
    """
    return None if _has_grammar(parser) else _in_json(parser, args.tool_strict_level == "auto")


def _has_grammar(parser: Any) -> bool:
    """Whether vLLM can bind a forced call in the format that this parser reads."""
    calls: Any = parser and parser.tool_parser_cls
    return bool(calls) and (
        calls.supports_required_and_named
        or calls.structural_tag_model is not None
        or is_mistral_tool_parser(calls)
    )


def _in_json(parser: Any, bound: bool) -> Any:
    """A parser of forced calls in JSON, and of thoughts as this one, which may be None."""

    class InJson(DelegatingParser):  # type: ignore[misc]  # vLLM is not type-checked
        reasoning_parser_cls = parser and parser.reasoning_parser_cls
        tool_parser_cls = JsonCalls

    return _bound(InJson) if bound else InJson


def _redirect(serving: Any, create: str, holds: str, parser: Any) -> None:
    """Let a twin with this parser answer forced calls. create: the method that answers. holds: the
    attribute that holds the parser.
    """
    twin = copy.copy(serving)
    twin.online_renderer = copy.copy(serving.online_renderer)
    twin.online_renderer.parser = parser
    setattr(twin, holds, parser)

    def answer(request: Any, raw_request: Any, *rest: Any, **more: Any) -> Any:
        chosen = raw_request.own(twin if is_forced(request) else serving)  # calls.RequestStandIn
        return getattr(type(chosen), create)(chosen, request, raw_request, *rest, **more)

    setattr(serving, create, answer)


def is_forced(request: Any) -> bool:
    """Whether the model has to call a tool."""
    choice = request.tool_choice
    return bool(request.tools) and (choice == "required" or isinstance(choice, _NAMED))


def _bound(parser: Any) -> Any:
    class Bound(parser):  # type: ignore[misc]  # vLLM is not type-checked
        def adjust_request(self, request: Any) -> Any:
            if not is_forced(request):
                return super().adjust_request(request)
            with _bound_tools(request):
                return super().adjust_request(request)

    return Bound


@contextlib.contextmanager
def _bound_tools(request: Any) -> Iterator[None]:
    """Show vLLM the bound functions while it makes the grammar. Prompts show the client's
    functions.
    """
    sent = request.tools
    request.tools = [
        _with_schema(tool, number, request.tool_choice) for number, tool in enumerate(sent)
    ]
    try:
        yield
    finally:
        request.tools = sent


def _with_schema(tool: Any, number: int, choice: Any) -> Any:
    """The same function with the schema that its arguments are bound to."""
    if isinstance(tool, ChatCompletionToolsParam):
        function = _function(tool.function, number, choice)
        return tool.model_copy(update={"function": function})
    return _function(tool, number, choice) if isinstance(tool, FunctionTool) else tool


def _function(function: Any, number: int, choice: Any) -> Any:
    if isinstance(choice, _NAMED) and function.name != _name(choice):
        return function
    schema = copy.deepcopy(function.parameters) or dict(_NOTHING)  # vLLM takes "$defs" out of it
    if function.strict is False:
        schema = dict(_ANY_OBJECT)
    elif fault := unsupported(schema):
        raise VLLMValidationError(
            f"tools[{number}]: its parameters have {fault}, which a grammar cannot enforce; "
            'leave it out, or set "strict": false on the function for any object',
            parameter="tools",
        )
    return function.model_copy(update={"strict": True, "parameters": schema})


def _name(choice: Any) -> str:
    inner = getattr(choice, "function", choice)
    return str(inner.name)


def unsupported(schema: dict[str, Any]) -> str | None:
    """The keyword that keeps a grammar from enforcing this JSON schema, in words; or None.

    Changes the schema so that xgrammar's grammar for it writes valid JSON: for strings with a
    length limit, the grammar would allow control characters.
    """
    kind = schema.setdefault("type", "object") if not _is_composed(schema) else "object"
    if kind != "object":
        return "a `type` other than object"
    left: list[Any] = [schema]
    while left:
        one = left.pop()
        if not isinstance(one, dict):
            continue
        if fault := _fault(one):
            return fault
        least, most = one.pop("minLength", 0), one.pop("maxLength", "")
        if least or most != "":
            one["pattern"] = f"^.{{{least},{most}}}$"
        for name in _MAPS:
            left += one[name].values() if isinstance(one.get(name), dict) else ()
        for name in _LISTS:
            left += one[name] if isinstance(one.get(name), list) else ()
        left += [one[name] for name in _ONES if name in one]
        if isinstance(names := one.get("propertyNames"), dict):
            left.append(names)
            names.setdefault("type", "string")
    try:
        xgrammar.Grammar.from_json_schema(json.dumps(schema))
    except RuntimeError as error:
        said = str(error).strip().splitlines()[-1]
        reason = re.sub(r"^\[[^]]*\] \S+: ", "", said)
        return f"{'a `pattern`' if 'egex' in reason else 'a schema'} that it rejects ({reason})"
    return None


def _is_composed(schema: Mapping[str, Any]) -> bool:
    return any(name in schema for name in _ALONE)


def _fault(one: Mapping[str, Any]) -> str | None:
    """A part of one schema that xgrammar would ignore, in words; or None. Schemas within it are not
    read.
    """
    for name in _UNKNOWN:
        if name in one:
            return f"`{name}`"
    if one.get("uniqueItems"):
        return "`uniqueItems`"
    reference = one.get("$ref")
    if isinstance(reference, str) and not (reference == "#" or reference.startswith("#/")):
        return "a `$ref` to somewhere else"
    if len(one.get("allOf") or ()) > 1:
        return "an `allOf` of several"
    constraints = one.keys() - _ANNOTATIONS
    for name in _ALONE:
        if name in one and (beside := sorted(constraints - {name})):
            return f"`{beside[0]}` beside `{name}`"
    if ("pattern" in one or "format" in one) and (lengths := _lengths(one)):
        return f"`{lengths}` beside `{'pattern' if 'pattern' in one else 'format'}`"
    if not one.keys() & {"type", "enum", "const"} and (
        needing := [it for it in _NEED_TYPE if it in one]
    ):
        return f"`{needing[0]}` without `type`"
    known = one.get("properties")
    missing = [it for it in one.get("required") or () if it not in (known or ())]
    if missing:
        return "a `required` name that is not among its `properties`"
    if one.get("type") == "number" and "multipleOf" in one:
        return "`multipleOf` of a number"
    return None


def _lengths(one: Mapping[str, Any]) -> str | None:
    return next((name for name in ("minLength", "maxLength") if name in one), None)
