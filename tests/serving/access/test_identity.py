# SPDX-License-Identifier: Apache-2.0
"""Callers' identities as a router signs them, the servers that accept them, and forged ones."""

import time

import jwt
import pytest

from serving.access import signed_identity as identity
from serving.access.caller import Caller, Limits
from serving.access.signed_identity import Signer, new_name
from serving.errors import Unauthorized

SECRET = "s" * 32
WHO = Caller(name="a", tenant="t", adapters=("poet",), limits=Limits(1, 2, 3), counted=True)
NAME = "me"


def test_what_is_signed_is_read_by_those_it_is_for():
    signed = Signer(SECRET).signed(WHO, (NAME, "another"))
    for name in (NAME, "another"):
        assert Signer(SECRET, name).caller(signed) == WHO
    for name in ("", "m", "slipway", "slipway-router"):
        with pytest.raises(Unauthorized, match="for another server"):
            Signer(SECRET, name).caller(signed)


def token(secret=SECRET, algorithm="HS256", **claims):
    now = time.time()
    whole = {"aud": [NAME], "iat": now, "exp": now + 30, "caller": {"name": "a"}, **claims}
    return jwt.encode({k: v for k, v in whole.items() if v is not None}, secret, algorithm).encode()


@pytest.mark.parametrize(
    "made_up",
    [
        token("t" * 32),
        token("", "none"),
        token(aud="other"),
        token(aud=None),
        token(aud=[]),
        token(exp=None),
        token(exp="never"),
        token(iat=time.time() + 2 * identity.LEEWAY_S),
        token(caller=None),
        token(caller={"tenant": 5}),
        token(exp=time.time() - identity.LEEWAY_S - 1),
        Signer(SECRET, NAME).introduced(b"0" * 32),
        b"",
        b"nonsense",
        b"\xff.\xff.\xff",
    ],
)
def test_what_is_made_up_is_refused(made_up):
    with pytest.raises(Unauthorized):
        Signer(SECRET, NAME).caller(made_up)


def test_what_a_router_before_names_has_signed_is_read():
    """Servers are updated before their routers."""
    assert Signer(SECRET, NAME).caller(token(aud="slipway", iat=None)) == Caller(name="a")


def test_it_ends_within_a_minute_where_it_was_read_before(monkeypatch):
    signer = Signer(SECRET, NAME)
    signed = signer.signed(WHO, (NAME,))
    assert signer.caller(signed) == WHO
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61)
    with pytest.raises(Unauthorized, match="clocks"):
        signer.caller(signed)


def test_a_new_token_is_signed_before_the_old_one_ends(monkeypatch):
    signer = Signer(SECRET)
    signed, now = signer.signed(WHO, (NAME,)), time.time()
    monkeypatch.setattr(time, "time", lambda: now + identity.RENEWED_S)
    assert signer.signed(WHO, (NAME,)) != signed
    assert identity.RENEWED_S < identity.VALID_S


def introduced(secret, challenge):
    proof = Signer(secret, NAME).introduced(challenge.encode())
    assert proof
    return proof.decode()


def test_a_name_is_believed_of_who_has_the_secret_and_our_challenge():
    challenge = new_name()
    proof = introduced(SECRET, challenge)
    router = Signer(SECRET)
    assert router.name_of(proof, challenge) == NAME
    assert router.name_of(proof, new_name()) == ""
    for wrong in (
        introduced("t" * 32, challenge),
        Signer(SECRET).signed(WHO, (NAME,)).decode(),
        jwt.encode({"aud": "slipway-router", "nonce": challenge}, SECRET, "HS256"),
        jwt.encode({"aud": "slipway-router", "sub": NAME, "nonce": challenge}, "", "none"),
        *("", "nonsense", "\xff", "a" * 100_000),
    ):
        assert router.name_of(wrong, challenge) == ""
    for odd in (b"", b"a" * 33, b"A" * 32, b"0" * 31 + b"\n", b"\xff" * 32, b"0" * 100_000):
        assert Signer(SECRET).introduced(odd) is None


def test_old_identities_are_forgotten(monkeypatch):
    """A router makes new ones every few seconds, for as long as it runs."""
    now = time.time() - 20 * identity.RENEWED_S
    monkeypatch.setattr(time, "time", lambda: now)
    router, server = Signer(SECRET), Signer(SECRET, NAME)
    for _ in range(20):
        now += identity.RENEWED_S
        assert server.caller(router.signed(WHO, (NAME,))) == WHO
    assert router._signed.cache_info().currsize == 1
    assert server._read.cache_info().currsize == 1
