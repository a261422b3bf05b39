"""What becomes of a body's cache_salt, by the bodies that the engine gets."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.cache_salt import salted
from serving.errors import BadRequest

PLAIN = b'{"prompt": "a"}'


def salt(body: bytes, tenant: str | None = None) -> str:
    found: str = json.loads(salted(body, tenant))["cache_salt"]
    return found


def body(cache_salt: object) -> bytes:
    return json.dumps({"prompt": "a", "cache_salt": cache_salt}).encode()


def test_without_a_salt_a_body_stays_as_it_is():
    assert salted(PLAIN, None) == PLAIN
    assert salted(body(None), None) == body(None)


def test_all_who_differ_have_another_salt():
    cases = [(body("a"), None), (body("b"), None), (PLAIN, "a"), (PLAIN, ""), (body("a"), "b")]
    cases += [(body("b"), "a"), (body("a"), "")]
    salts = [salt(*case) for case in cases]
    assert len({*salts}) == len(cases)
    assert salts == [salt(*case) for case in cases]


def test_the_engine_gets_a_digest():
    assert salt(body("secret")) != "secret"
    assert len(salt(body("../../etc"))) == 32


@pytest.mark.parametrize("untouched", [b"", b"[]", b'{"cache_salt": ""}', b"\xff}"])
def test_what_has_no_salt_stays_as_it_is(untouched):
    assert salted(untouched, None) == untouched


@pytest.mark.parametrize("refused", [b"nonsense cache_salt", b'{"cache_salt": 3}'])
def test_a_salt_that_is_no_text_is_refused(refused):
    with pytest.raises(BadRequest, match="cache_salt should be a text"):
        salted(refused, None)


@given(st.dictionaries(st.text(), st.none() | st.integers() | st.text()), st.text())
def test_nothing_else_changes(found, tenant):
    found.pop("cache_salt", None)
    whole = json.dumps(found, indent=1).encode() + b" \n"
    assert json.loads(salted(whole, tenant)) == {**found, "cache_salt": salt(whole, tenant)}


def test_escapes_hide_no_salt():
    hidden = b'{"prompt": "a", "cache\\u005fsalt": "b"}'
    for tenant in ("mine", None):
        assert json.loads(salted(hidden, tenant))["cache_salt"] == salt(body("b"), tenant)
