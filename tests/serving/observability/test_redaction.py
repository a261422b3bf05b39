# SPDX-License-Identifier: Apache-2.0
"""No secret reaches standard error."""

import io
import json
import logging
import urllib.parse
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lmi_config.options.option_files import Given
from serving.observability import redaction
from serving.observability.logs import Handler, JsonFormatter, TextFormatter
from serving.observability.redaction import hide, redacted

PRINTABLE = st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_categories=["C", "Z"])
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="§"), max_size=40)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(redaction, "_values", None)


def line(message, *arguments, facts=None, error=None, formatter=None):
    """The line that a call of the log would write."""
    written = io.StringIO()
    logger = logging.Logger("serving.test")
    logger.addHandler(Handler(written, formatter or JsonFormatter()))
    info = (type(error), error, error.__traceback__) if error else None
    logger.error(message, *arguments, exc_info=info, extra={"facts": facts or {}})
    return written.getvalue()


def places(secret, before, after):
    """The secret in every part of a line, as text, and as other types show it."""
    text = f"{before}{secret}{after}"
    try:
        raise ValueError(text) from KeyError({"inner": [text]})
    except ValueError as error:
        raised = error
    yield line(text.replace("%", "%%"))
    yield line("%s and %r", text, [text])
    yield line("it", facts={text: text, "deep": [{"a": (text, {text})}, Path(text), {"k": text}]})
    yield line("it", facts={"json": json.dumps({"a": text}), "plain": json.dumps(text)})
    yield line("it", facts={"url": f"https://a/?q={urllib.parse.quote(text)}"})
    yield line("it", error=raised)
    yield line("%r", text, error=raised, formatter=TextFormatter())


@given(st.text(PRINTABLE, min_size=8, max_size=50), WORDS, WORDS)
def test_no_secret_of_the_environment_comes_out(value, before, after):
    assume(value not in before + after)
    secret = f"§{value}"  # so that it is no word of the log's own
    hide({"HF_TOKEN": secret, "HOME": "/root"})
    for written in places(secret, before, after):
        assert secret not in written
        assert value not in written
        if written.startswith("{"):
            parsed = json.loads(written)
            assert secret not in "".join(texts(parsed))
            assert secret not in urllib.parse.unquote(str(parsed.get("url")))


def texts(value):
    if isinstance(value, dict):
        yield from (text for pair in value.items() for part in pair for text in texts(part))
    elif isinstance(value, list):
        yield from (text for part in value for text in texts(part))
    else:
        yield str(value)


TOKEN = st.text("abcXYZ0189", min_size=20, max_size=40)
SHAPED = st.one_of(
    TOKEN.map(lambda secret: (f"Bearer {secret}", secret)),
    TOKEN.map(lambda secret: (f"sagemaker-api-key-{secret}==", secret)),
    TOKEN.map(lambda secret: (f"hf_{secret}", secret)),
    TOKEN.map(lambda secret: (f"redis://user:{secret}@host:6379/0", secret)),
    TOKEN.map(lambda secret: (f"https://b/k?X-Amz-Signature={secret}&a=b", secret)),
    st.text("ABCXYZ0189", min_size=16, max_size=16).map(lambda secret: (f"AKIA{secret}", secret)),
)


@given(SHAPED, st.text(" ,;:'\"[]{}\n", max_size=5), st.text(" ,;'\"[]{}\n", max_size=5))
def test_nothing_that_looks_like_a_secret_comes_out(shaped, before, after):
    text, hidden = shaped
    for written in places(text, before, after):
        assert hidden not in written


def test_what_is_harmless_stays():
    text = "https://example.org:8080/a@b hf_transfer bearer of AKIA news"
    assert redacted(text) == text.replace("of", "[secret]")


def test_a_secret_within_a_longer_one_leaves_no_rest():
    hide({"A_TOKEN": "abcdefgh", "B_TOKEN": "abcdefghijkl", "C_KEY": "short", "D_URL": ""})
    assert redacted("abcdefghijkl abcdefgh short") == "[secret] [secret] short"


def test_the_command_lines_secret_and_the_one_that_it_replaces():
    hide({"OPTION_API_KEY": "the-old-one"}, {"OPTION_API_KEY": Given("the-new-one", "--api-key")})
    assert "-one" not in redacted("the-old-one the-new-one")


def test_each_line_of_a_secret_with_several_is_hidden():
    hide({"PEM_KEY": "-----BEGIN-----\nMIIEvQIBADANBg\n"})
    assert redacted("then MIIEvQIBADANBg") == "then [secret]"
