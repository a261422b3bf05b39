# SPDX-License-Identifier: Apache-2.0
"""Recognises secrets: a value by the name of its option, and a part of a text by its form. Also
finds the characters that values must not have, and terminals must not get.
"""

import contextlib
import json
import re
import urllib.parse
from collections.abc import Iterator

from lmi_config.options.declared import OPTIONS, PREFIX, VLLM_PREFIX, VLLM_SECRET, vllm_options

HIDDEN = "[secret]"

_OBEYED = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that control a terminal, or cannot be encoded: control characters, text directions,
and halves of surrogate pairs.
"""

_WORDS = re.compile(r"[A-Z0-9]+")
_SECRET = re.compile(
    r".*(?:TOKEN|(?:KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?)|PASS|DSN|AUTHORIZATION"
)
_SECRET_LAST = frozenset(("AUTH", "HEADERS"))  # REDISCLI_AUTH, OTEL_EXPORTER_OTLP_HEADERS
_PLACES = frozenset(("FILE", "PATH", "DIR", "SOCK"))  # AWS_WEB_IDENTITY_TOKEN_FILE, SSH_AUTH_SOCK


def escaped(text: str) -> str:
    """Return a line that is safe for a terminal, also with text from elsewhere."""
    return _OBEYED.sub(lambda it: ascii(it[0])[1:-1], text)


def no_text(value: str) -> str:
    """Return the invalid part of a value, or "". JSON may have it as an escape."""
    if "\\u" in value:
        with contextlib.suppress(ValueError, RecursionError):
            decoded = json.dumps(json.loads(value), ensure_ascii=False)
            value += decoded.replace("\\u0000", "\0")
    if "\0" in value:
        return "a zero byte"
    return "half of a surrogate pair" if re.search("[\ud800-\udfff]", value) else ""


def secret(name: str) -> bool:
    """Whether the value of a variable, an option or a JSON key with this name is secret.

    Slipway's and vLLM's options declare it. Other names are judged by their words.
    """
    option = name.upper().removeprefix(VLLM_PREFIX).removeprefix(PREFIX).lower()
    if name in _DECLARED:
        return _DECLARED[name]
    if option in vllm_options():
        return option in VLLM_SECRET
    words = _WORDS.findall(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper())
    if not words or words[-1] in _PLACES:
        return False
    return (
        any(map(_SECRET.fullmatch, words))
        or words[-1] in _SECRET_LAST
        or (words[-1] == "PWD" and len(words) > 1)  # MYSQL_PWD; alone it is the shell's folder
        or words[-2:] == ["CONNECTION", "STRING"]
    )


_DECLARED = {
    name: option.secret for field, option in OPTIONS.items() for name in (field, *option.all_names)
}


def parts(name: str, value: str) -> Iterator[str]:
    """Yield the secret parts of a variable's value: all of it, its lines, or the login of a URL.

    Headers for collectors are key=value pairs, URL-encoded and separated by commas (OpenTelemetry's
    specification of the OTLP exporter). Each value is a separate secret.
    """
    if secret(name):
        yield value
        yield from value.splitlines()
        if name.upper().endswith("HEADERS"):
            for pair in value.split(","):
                found = pair.partition("=")[2].strip()
                plain = urllib.parse.unquote(found)
                yield from (found, plain, plain.rpartition(" ")[2])  # the last without "Bearer"
    if (login := _LOGIN.match(value)) and login["login"]:
        yield login["password"] or login["login"]
        yield urllib.parse.unquote(login["password"] or login["login"])


# A password may have an unencoded "/" or "@" in it, so it ends at the last "@".
_LOGIN = re.compile(r"[A-Za-z][\w+.-]*://(?P<login>[^\s:@/]*(?::(?P<password>\S+))?)@")

_SHAPES = re.compile(
    r"((?i:bearer)(?:\s+|%20))[^\s\"',}]+"
    r"|((?i:authorization)\W{1,4}b?\W{0,2}(?i:basic|token|apikey)\s+)[^\s\"',}]+"
    r"|((?i:secret[_-]?access[_-]?key|x-amz-security-token|api[_-]key|passwd|password)"
    r"[\"']?\s{0,3}[:=]\s{0,3}[\"']?)(?!should\b|\()[^\s\"',}&]+"
    r"|sagemaker-api-key-[\w+/=.~%-]+"
    r"|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{36,}|\bsk-[\w-]{20,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|(X-Amz-(?:Signature|Security-Token)(?:=|%3D))[^&\s\"']+"
)

# A JSON web token. The match consumes a run of letters even without a token's other parts after it.
# Otherwise each "eyJ" in a run would cause another scan of the run.
_WEB_TOKEN = re.compile(r"\beyJ[\w-]{10,}+(?P<rest>\.[\w-]{10,}+\.[\w-]{2,}+)?")

# The beginning of a login in a URL: the user, without parts of another match. A text that begins
# like a port is not a password. A lookahead does not backtrack. A possessive quantifier would say
# the same, but before Python 3.11.5 it misses matches of alternatives (gh-106052).
_PORT = r"(?=\d{1,5}[/,;?#)])"
_USER = re.compile(
    rf"(?::|%3A)//?(?P<user>(?=(?P<before>(?:(?!%3A)[^\s/:\"']|%3A{_PORT}){{0,200}}))(?P=before)"
    rf"(?::|%3A))(?!/|{_PORT})"
)
_LONGEST_PASSWORD = 500
_PASSWORD = re.compile(rf"[^\s\"']{{1,{_LONGEST_PASSWORD + len('%40')}}}")
_AT = re.compile("@|%40")


def masked(text: str) -> str:
    """Return the text without parts that look like secrets: tokens of known forms, passwords of
    URLs.

    It takes time in proportion to the text's length for any text, because clients can cause log
    lines.
    """
    text = _SHAPES.sub(lambda found: "".join(it or "" for it in found.groups()) + HIDDEN, text)
    text = _WEB_TOKEN.sub(lambda found: HIDDEN if found["rest"] else found[0], text)
    return "".join(_without_logins(text))


def _without_logins(text: str) -> Iterator[str]:
    """Yield the text's pieces around the logins of URLs. A login ends at the last "@" that is near
    enough.
    """
    written, start = 0, 0
    while (at := _AT.search(text, start)) and (found := _USER.search(text, start)):
        if at.start() < found.end():  # it is in the user's name, or before it
            at = _AT.search(text, found.end())
        if not at:
            break
        # A login that begins earlier does not reach that "@".
        start = max(found.end(), at.start() - _LONGEST_PASSWORD - 220)
        if at.start() - found.end() > _LONGEST_PASSWORD:
            continue
        window = _PASSWORD.match(text, found.end())
        password = window[0] if window else ""
        end = max(password.rfind("@", 1, _LONGEST_PASSWORD + 1), password.rfind("%40", 1))
        if end > 0:
            yield text[written : found.start("user")]
            yield HIDDEN
            written = start = found.end() + end
        elif len(password) < _LONGEST_PASSWORD:  # a blank ends all logins that begin before it
            start = found.end() + len(password)
    yield text[written:]
