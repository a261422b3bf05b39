# SPDX-License-Identifier: Apache-2.0
"""Values that are secret by their names, and parts of a text that are secret by their shapes."""

import random
import re
import time

import pytest

from lmi_config.options import redaction
from lmi_config.options.declared import OPTIONS, vllm_options
from lmi_config.options.redaction import HIDDEN, masked, parts, secret

SECRET = """
HF_TOKEN HUGGING_FACE_HUB_TOKEN AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN
AWS_CONTAINER_AUTHORIZATION_TOKEN OPTION_API_KEY OPTION_HF_TOKEN SM_VLLM_HF_TOKEN api_key hf_token
OPTION_KV_L2_URL kv_l2_url OTEL_EXPORTER_OTLP_HEADERS OTEL_EXPORTER_OTLP_TRACES_HEADERS
REDIS_PASSWORD DB_PASSWD MYSQL_PWD PGPASSWORD REDISCLI_AUTH BASIC_AUTH DATABASE_DSN SENTRY_DSN
AZURE_STORAGE_CONNECTION_STRING AZURE_STORAGE_KEY APIKEY API_KEYS HONEYCOMB_WRITEKEY password token
valkey_password secretAccessKey aws_secret_access_key GOOGLE_CREDENTIALS SSH_PASSPHRASE
"""
PLAIN = """
OPTION_TOKENIZER OPTION_TOKENIZER_MODE SM_VLLM_TOKENIZER_REVISION OPTION_SESSION_KEY SESSION_KEY
session_key AWS_ENDPOINT_URL AWS_WEB_IDENTITY_TOKEN_FILE SSH_AUTH_SOCK PWD OLDPWD HOME PATH LANG
OPTION_SKIP_TOKENIZER_INIT OPTION_LONG_PREFILL_TOKEN_THRESHOLD OPTION_NUM_SPECULATIVE_TOKENS
OPTION_RETURN_TOKENS_AS_TOKEN_IDS OPTION_CACHE_SALT_HEADER max_tokens
num_speculative_tokens SERVING_MAX_REQUEST_SIZE MONKEYS_DIR OTEL_EXPORTER_OTLP_ENDPOINT
"""


@pytest.mark.parametrize("name", SECRET.split())
def test_a_name_of_a_secret(name):
    assert secret(name)


@pytest.mark.parametrize("name", PLAIN.split())
def test_a_name_that_only_looks_like_one(name):
    assert not secret(name)


def test_only_options_that_say_so_are_secret():
    own = {name for name, option in OPTIONS.items() if option.secret}
    vllms = {name for name in vllm_options() if secret(f"OPTION_{name.upper()}")}
    keys = {
        "api_key",
        "admin_api_key",
        "router_replica_key",
        "router_secret",
        "limits_url",
        "adapter_list",
    }
    assert (own, vllms) == ({"kv_l2_url", *keys}, {"hf_token"})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://user:pa/ss@host:6379", f"redis://{HIDDEN}@host:6379"),
        ("redis://user:p@ss@host:6379/0", f"redis://{HIDDEN}@host:6379/0"),
        ("BEARER abc", f"BEARER {HIDDEN}"),
        ("Authorization: Basic dXNlcjpwYXNz", f"Authorization: Basic {HIDDEN}"),
        ("{'authorization': 'Basic dXNlcjpwYXNz'}", f"{{'authorization': 'Basic {HIDDEN}'}}"),
        ("(b'Authorization', b'Basic dXNl')", f"(b'Authorization', b'Basic {HIDDEN}')"),
        ("api-key=0123456789abcdef,a=b", f"api-key={HIDDEN},a=b"),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG", f"aws_secret_access_key = {HIDDEN}"),
        ("x-amz-security-token: FQoGZXIvYXdzE", f"x-amz-security-token: {HIDDEN}"),
        ("ghp_abcdefghijklmnopqrstuvwxyz0123456789", HIDDEN),
        ("see sk-proj-abcdefghijklmnop1234567890", f"see {HIDDEN}"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.sig", HIDDEN),
        ("id-eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.sig, eyJhbGciOiJI", f"id-{HIDDEN}, eyJhbGciOiJI"),
        ("a://u:p@h b://v:q@h,c", f"a://{HIDDEN}@h b://{HIDDEN}@h,c"),
        ("redis%3A//user%3Apa%2Fss%40host%3A6379", f"redis%3A//{HIDDEN}%40host%3A6379"),
        ("http://user%40corp:pass@proxy:80/", f"http://{HIDDEN}@proxy:80/"),
        (
            "http://h:80/, a://u:@ and " + "x" * 600 + " s3://key:se/cret@h",
            "http://h:80/, a://u:@ and " + "x" * 600 + f" s3://{HIDDEN}@h",
        ),
        ("a@b " * 200 + "a://u:p@h", "a@b " * 200 + f"a://{HIDDEN}@h"),
        (
            "a://u:@" + "x" * 495 + ":/v:p" + "y" * 20 + "@h",
            "a://u:@" + "x" * 495 + f":/{HIDDEN}@h",
        ),
    ],
)
def test_what_looks_like_a_secret_is_masked(text, shown):
    assert masked(text) == shown


HOSTILE = [
    *(":/" + "%3A" * 66, "%3A/%3A", "://aaaaaaa:bbbbbbbbbbbbbbbbbbb", ":/:x", ":/:x" * 120 + " @"),
    *(":/:x:/:x@ ", "://u:" + "p" * 498 + " @", "://" + "a" * 199, "://" + ":" * 200, "@", "%40"),
    *(
        "eyJ-",
        "eyJaaaaaaaaaa.eyJ-",
        "eyJaaaaaaaaaaa.",
        "-eyJ.",
        "bearer ",
        "bearer%20",
        "hf_",
        "-sk-",
    ),
    *("authorization:   basic  ", "api_key:   ", "password=", "AKIA", "X-Amz-Signature=", " ", "a"),
    *(
        " bearer" + " " * 1000,
        "authorization" + ":" * 5,
        "sagemaker-api-key-",
        "://a:b@",
        "%3A/a%3A80,",
    ),
]


@pytest.mark.parametrize("first", HOSTILE)
def test_no_line_takes_long(first):
    """256 KB, as long as a line of the log may be; plain text of that length takes some 50 ms."""
    mixed = random.Random(first).choices(HOSTILE, k=40_000)
    for unit in (first, f"x{first}", "".join(mixed)):
        text = (unit * (256_000 // len(unit) + 1))[:256_000]
        begun = time.process_time()
        masked(text)
        assert time.process_time() - begun < 1


@pytest.mark.parametrize(
    "text",
    [
        "https://example.org:8080/a@b",
        "http://localhost:8080/adapters?name=one@0123",
        "one@0123456789 is loaded",
        "OPTION_PASSWORD=(hidden): should be text",
        "s3://bucket/models@v2",
        "the tokenizer's key, a password, basic authorization",
    ],
)
def test_what_is_harmless_stays(text):
    assert masked(text) == text


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("HF_TOKEN", "abc", {"abc"}),
        ("HOME", "/root", set()),
        ("DATABASE_URL", "postgres://me:pa/s%2Fs@db/x", {"pa/s%2Fs", "pa/s/s"}),
        ("AWS_ENDPOINT_URL", "http://localhost:9000", set()),
        ("PROXY", "http://token@proxy:80", {"token"}),
        (
            "OTEL_EXPORTER_OTLP_HEADERS",
            "api-key=one,authorization=Bearer%20two",
            {"api-key=one,authorization=Bearer%20two", "one", "Bearer%20two", "Bearer two", "two"},
        ),
    ],
)
def test_what_of_a_variable_is_secret(name, value, expected):
    assert {*parts(name, value)} - {""} == expected


def test_patterns_match_alike_in_the_images_python():
    """Python 3.11.2 has a fault in possessive groups: such a pattern may miss a secret."""
    for name, it in vars(redaction).items():
        if isinstance(it, re.Pattern):
            assert not re.search(r"\)(?:[*+?]|\{[\d,]+\})\+", it.pattern), name
