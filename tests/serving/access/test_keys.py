# SPDX-License-Identifier: Apache-2.0
"""The file of keys, and the contents that it may not have."""

import json
from datetime import UTC, datetime

import pytest

from lmi_config.options.redaction import masked
from serving.access import keys
from serving.access.caller import Caller, Limits

HASH = "ab" * 32


def file(**row):
    return json.dumps({"keys": [{"name": "a", "sha256": HASH, **row}]}).encode()


def test_a_key_is_made_and_known_by_its_hash():
    key = keys.made()
    found = keys.parsed(b"keys:\n" + keys.row("team-a", key, "a").encode())
    assert found.by_digest[keys.digest(key.encode())].caller == Caller(name="team-a", tenant="a")
    assert len(key) > 50
    assert masked(f"it was {key}!") == "it was [secret]!"
    assert key not in keys.row("team-a", key)


def test_the_tenant_defaults_to_the_name():
    (key,) = keys.parsed(file()).by_digest.values()
    assert key == keys.Key(Caller(name="a", tenant="a"))


def test_all_that_a_key_can_have():
    content = f"""
    keys:
      - name: team-a
        sha256: {HASH}
        tenant: acme
        models: [lmi]
        adapters: []
        requests_per_minute: 60
        tokens_per_minute: 100000
        concurrent_requests: 4
        priority: -1
        expires: 2027-01-31
        admin: true
    """.encode()
    (key,) = keys.parsed(content).by_digest.values()
    assert key.expires == datetime(2027, 1, 31, tzinfo=UTC)
    assert key.caller == Caller(
        name="team-a",
        tenant="acme",
        models=("lmi",),
        adapters=(),
        priority=-1,
        admin=True,
        limits=Limits(60, 100_000, 4),
    )


@pytest.mark.parametrize("text", ["2027-01-31T12:00:00Z", "2027-01-31 13:00:00+01:00"])
def test_a_time_says_its_zone_or_is_utc(text):
    (key,) = keys.parsed(file(expires=text)).by_digest.values()
    assert key.expires == datetime(2027, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"keys: [", "not YAML in line 1"),
        (b"\xff\xfe\xff", "not YAML"),
        (b"keys: !!bool a", "not YAML"),
        (b"keys: !!timestamp a", "not YAML"),
        (b"", "should have `keys`, a list"),
        (b"keys: {}", "should have `keys`, a list"),
        (file(sha256="sk-plain-text-key-that-is-secret"), r"keys\[0\].sha256"),
        (file(key="sk-plain-text-key-that-is-secret"), "unknown field `key`"),
        (file(name="a b"), r"keys\[0\].name"),
        (file(requests_per_minute=0), "requests_per_minute"),
        (file(tokens_per_minute="many"), "tokens_per_minute"),
        (file(expires="soon"), "a: expires should be a date"),
        (b"{}", "should have `keys`, a list, or `jwt`"),
        (b"jwt: [{}, {}]", "two entries below `jwt` have no tenant"),
        (b"jwt: [{tenant: a}, {tenant: a}]", "two entries below `jwt` have the tenant 'a'"),
        (b"jwt: [{admin: true}]", "needs a tenant"),
        (b"jwt: [{tenant: a, expires: 2027-01-31}]", "unknown field `expires`"),
        # A careless edit would leave the same number of keys, or allow everything.
        (b"keys: []\nkeys: []", "line 2: `keys` is given twice"),
        (f"keys: [{{name: a, sha256: {HASH}, admin: false, admin: true}}]".encode(), "`admin`"),
        (b"keys: []\njwt:\n#  - tenant: a", "`jwt` has no value"),
        (file(adapters=None), "`adapters` has no value"),
        (file(requests_per_minute=None), "`requests_per_minute` has no value"),
        (file(sha256=HASH + "\n"), r"keys\[0\].sha256"),
        (file(name="a\n"), r"keys\[0\].name"),
        (file(sha256=keys.digest(b"")), "a has the sha256 of nothing"),
        (json.dumps({"keys": [{"name": "a", "sha256": HASH}] * 2}).encode(), "two keys"),
        (
            json.dumps({"keys": [{"name": it, "sha256": HASH} for it in "ab"]}).encode(),
            "b has the sha256 of a",
        ),
    ],
)
def test_faults_in_a_file_of_keys_are_refused(content, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        keys.parsed(content)
    assert "secret" not in str(refused.value)
