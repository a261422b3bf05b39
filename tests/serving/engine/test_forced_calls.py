# SPDX-License-Identifier: Apache-2.0
"""Which schemas of arguments a grammar enforces: every keyword, checked against xgrammar itself."""

import json
from typing import Any

import pytest
import xgrammar

from serving.engine.requests.tools import unsupported

_END = 256


def accepts(schema: Any, value: Any) -> bool:
    """Whether xgrammar's grammar of the schema lets a model write this text."""
    vocabulary = [bytes([it]) for it in range(256)] + [b"<end>"]
    known = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[_END])
    compiled = xgrammar.GrammarCompiler(known).compile_json_schema(json.dumps(schema))
    matcher = xgrammar.GrammarMatcher(compiled)
    text = (value if isinstance(value, str) else json.dumps(value)).encode()
    return all(matcher.accept_token(it) for it in text) and matcher.accept_token(_END)


def of(**a: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": a}, "required": ["a"]}


ENFORCED = {
    "minItems": (of(type="array", items={"type": "integer"}, minItems=2), [1]),
    "maxItems": (of(type="array", items={"type": "integer"}, maxItems=1), [1, 2]),
    "maxLength": (of(type="string", maxLength=2), "abc"),
    "minLength": (of(type="string", minLength=2), "a"),
    "pattern": (of(type="string", pattern="^[ab]+$"), "c"),
    "format": (of(type="string", format="date"), "c"),
    "enum": (of(enum=["x", None]), "y"),
    "const": (of(const="x"), "y"),
    "minimum": (of(type="integer", minimum=5), 3),
    "exclusiveMaximum": (of(type="number", exclusiveMaximum=5), 5.0),
    "anyOf": (of(anyOf=[{"type": "integer"}, {"type": "null"}]), "x"),
    "one allOf": (of(allOf=[{"type": "integer"}]), "x"),
    "minProperties": (of(type="object", minProperties=1, properties={"x": {}}), {}),
    "patternProperties": (of(type="object", patternProperties={"^x": {"type": "null"}}), {"x": 1}),
    "propertyNames": (of(type="object", propertyNames={"maxLength": 1}), {"xx": 1}),
    "prefixItems": (of(type="array", prefixItems=[{"type": "null"}], items=False), [1]),
    "types": (of(type=["integer", "null"]), "x"),
    "$ref": ({**of(**{"$ref": "#/$defs/T"}), "$defs": {"T": {"type": "integer"}}}, "x"),
    "described $ref": (
        {**of(**{"$ref": "#/$defs/T", "description": "d"}), "$defs": {"T": {"type": "null"}}},
        1,
    ),
    "a property called not": (of(type="object", properties={"not": {"type": "null"}}), {"not": 1}),
}


@pytest.mark.parametrize(("schema", "wrong"), ENFORCED.values(), ids=ENFORCED)
def test_a_supported_schema_is_enforced(schema, wrong):
    assert unsupported(schema) is None
    assert not accepts(schema, {"a": wrong})


@pytest.mark.parametrize("lengths", [{"maxLength": 5}, {"minLength": 1}, {"minLength": 0}])
@pytest.mark.parametrize("kind", ["string", ["string", "null"]])
def test_a_string_has_no_control_characters(kind, lengths):
    schema = of(type=kind, **lengths)
    assert unsupported(schema) is None
    assert accepts(schema, {"a": "abc"})
    assert not accepts(schema, {"a": "abcdef"}) or "maxLength" not in lengths
    assert not accepts(schema, '{"a": "a\x07b"}')


NOT_ENFORCED = {
    "`not`": (of(type="string", **{"not": {"const": "x"}}), "x"),
    "`else`": (of(type="integer", **{"if": {"const": 1}, "else": {"const": 2}}), 3),
    "`uniqueItems`": (of(type="array", items={"type": "integer"}, uniqueItems=True), [1, 1]),
    "`dependentRequired`": (
        of(type="object", properties={"x": {}, "y": {}}, dependentRequired={"x": ["y"]}),
        {"x": 1},
    ),
    "an `allOf` of several": (of(allOf=[{"type": "integer"}, {"minimum": 5}]), 1),
    "`maxLength` beside `pattern`": (of(type="string", pattern="^a+$", maxLength=2), "aaa"),
    "`maxLength` beside `format`": (of(type="string", format="date", maxLength=2), "2020-01-01"),
    "`minimum` beside `$ref`": (
        {**of(**{"$ref": "#/$defs/T", "minimum": 5}), "$defs": {"T": {"type": "integer"}}},
        1,
    ),
    "`type` beside `anyOf`": (of(type="string", anyOf=[{"maxLength": 1}, {"pattern": "^z"}]), "aa"),
    "`minimum` without `type`": (of(minimum=5), 1),
    "`multipleOf` of a number": (of(type="number", multipleOf=0.5), 0.3),
    "a `$ref` to somewhere else": (of(**{"$ref": "https://example.com/y"}), 1),
}


@pytest.mark.parametrize(("fault", "case"), NOT_ENFORCED.items(), ids=NOT_ENFORCED)
def test_what_xgrammar_ignores_is_named(fault, case):
    schema, wrong = case
    assert accepts(schema, {"a": wrong})
    assert unsupported(schema) == fault


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"type": "string"}, "a `type` other than object"),
        (of(type="array", contains={"const": 1}), "`contains`"),
        ({"properties": {"a": {}}, "required": ["b"]}, "a `required` name that is not among"),
        (of(type="string", pattern=r"^a\b$"), "a `pattern` that it rejects (Regex parsing error"),
        (of(type="array", prefixItems=[], items=False, minItems=1), "a schema that it rejects"),
    ],
)
def test_what_xgrammar_cannot_do_is_named(schema, fault):
    assert str(unsupported(schema)).startswith(fault)


def test_arguments_are_an_object_where_the_schema_says_nothing_of_it():
    schema: dict[str, Any] = {"properties": {"a": {}}}
    assert unsupported(schema) is None
    assert schema == {"type": "object", "properties": {"a": {}}}
