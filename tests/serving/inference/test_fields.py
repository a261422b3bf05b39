# SPDX-License-Identifier: Apache-2.0
"""The fields that the server reads of a body."""

import json

import pytest

from handlers import payloads
from serving.errors import BadRequest
from serving.inference.content import checks
from serving.inference.content.fields import RequestFields, fields, fields_of, formats


@pytest.mark.parametrize(
    ("body", "sequences"),
    [
        ({"inputs": "a"}, 1),
        ({"inputs": ["a", "b", "c"]}, 3),
        ({"inputs": ["a", "b"], "parameters": {"n": 3, "details": True}}, 6),
        ({"inputs": "a", "n": 5}, 1),
        ({"prompt": ["a", "b"], "n": 2}, 4),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": []}, 1),
        ({"messages": [{}, {}], "n": 4}, 4),
    ],
)
def test_how_many_sequences_a_request_is(body, sequences):
    content = json.dumps(body, indent=1).encode()
    call = fields(content).parser(formats(embeds=False, normalize=True))(content)
    found = fields(call.body) if isinstance(call.body, bytes) else fields_of(call.body)
    assert found.sequences(call.path) == sequences
    assert fields(b'{"input": ["a", "b"]}').sequences("/v1/embeddings") == 2


@pytest.mark.parametrize(
    ("body", "sequences"),
    [
        ({"query": "a", "documents": "b"}, 1),
        ({"query": "a", "documents": []}, 1),
        ({"query": "a", "documents": ["b", "c"], "messages": [{}]}, 2),
        ({"query": "a", "documents": [{"content": []}] * 3}, 3),
        ({"text_1": ["a", "b", "c"], "text_2": ["a", "b", "c"]}, 3),
        ({"queries": "a", "items": ["b"] * 100_000}, 2049),
    ],
)
def test_how_many_sequences_a_comparison_is(body, sequences):
    content = json.dumps(body).encode()
    assert fields(content).sequences("/v1/rerank") == sequences
    assert fields(content).sequences("/v1/chat/completions") == 1


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"messages": [], "inputs": "a", "prompt": "a"}', "prompt"),
        (b'{"messages": [], "inputs": "a", "prompt": null}', "inputs"),
        (b'{"inputs": null, "messages": []}', "messages"),
    ],
)
def test_the_first_key_in_lmis_order_says_the_format(body, key):
    known = formats(embeds=False, normalize=True)
    assert fields(body).parser(known) is known[key]


def test_text_that_is_a_request_after_all_is_known_by_the_same_keys():
    assert (*formats(embeds=False, normalize=True), "requestType") == payloads.KEYS


def test_every_key_that_has_a_limit_is_read():
    known = set(RequestFields.__struct_fields__)
    assert {*checks._INTERNAL, *checks._LONGEST} <= known


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"model": 5}', "Expected `str | null`, got `int` - at `$.model`"),
        (b'{"adapters": 5}', "got `int` - at `$.adapters`"),
        (b'{"adapters": ["a", 5]}', "got `int` - at `$.adapters[1]`"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"a": }', "the body is not JSON"),
        (b'{"prompt": ' + b"[" * 10**5, "nested too deeply"),
    ],
)
def test_what_cannot_be_read_is_said(body, message):
    with pytest.raises(BadRequest) as refused:
        fields(body).adapter_names()
    assert message in str(refused.value)
