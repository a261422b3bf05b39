# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from handlers.payloads import requests
from handlers.records import FormatError


@pytest.mark.parametrize(
    ("content_type", "body", "found"),
    [
        ("application/json", b'{"inputs": "a"}', [{"inputs": "a"}]),
        ("", b'{"inputs": "a"}', [{"inputs": "a"}]),
        ("application/x-www-form-urlencoded", b'{"inputs": "a"}', [{"inputs": "a"}]),
        ("text/plain; charset=utf-8", "Grüße\n".encode(), [{"inputs": "Grüße\n"}]),
        ("text/plain", b'{"inputs": "a"}', [{"inputs": "a"}]),
        ("text/plain", b'{"a": 1}', [{"inputs": '{"a": 1}'}]),
        ("text/plain", b"", [{"inputs": ""}]),
        ("Text/CSV", b'id,inputs\n1,"a, ""b"""\n2,c\n', [{"inputs": ['a, "b"', "c"]}]),
        ("text/csv", b"inputs\r\na\r\n", [{"inputs": ["a"]}]),
        ("text/csv", b"\xef\xbb\xbfinputs\r\na\r\n", [{"inputs": ["a"]}]),  # as Excel writes it
        (
            "application/jsonlines",
            b'{"inputs": "a"}\n\n {"prompt": "b"} \r\n',
            [{"inputs": "a"}, {"prompt": "b"}],
        ),
    ],
)
def test_bodies_of_every_type_become_requests(content_type, body, found):
    assert [json.loads(request) for request in requests(body, content_type)] == found


@pytest.mark.parametrize(
    ("content_type", "body", "told"),
    [
        ("text/csv", b"a b c\n", "should name a column `inputs`"),
        ("text/csv", b"", "should name a column `inputs`"),
        ("text/csv", b"question,context\na,b\n", "should name a column `inputs`"),
        ("text/csv", b"inputs\n", "there should be one"),
        ("text/csv", b"id,inputs\n1\n", "every row of the CSV should have `inputs`"),
        ("text/csv", b'inputs\n"a\n', "the body is not CSV"),
        ("text/csv", b"inputs\n\xff\n", "the body is not UTF-8"),
        ("text/plain", b"\xff", "the body is not UTF-8"),
        ("application/jsonlines", b"\n\n", "the body has no lines; send at least one"),
    ],
)
def test_bodies_that_are_not_of_their_type(content_type, body, told):
    with pytest.raises(FormatError, match=told):
        requests(body, content_type)
