# SPDX-License-Identifier: Apache-2.0
"""What a router says of callers, and what is made up."""

import time

import jwt
import pytest

from serving.access import identity
from serving.access.caller import Caller, Limits
from serving.access.identity import Signer
from serving.errors import Unauthorized

SECRET = "s" * 32
WHO = Caller(name="a", tenant="t", adapters=("poet",), limits=Limits(1, 2, 3), counted=True)


def test_what_is_signed_is_read():
    assert Signer(SECRET).caller(Signer(SECRET).signed(WHO)) == WHO


def token(secret=SECRET, algorithm="HS256", **claims):
    whole = {"aud": "slipway", "exp": time.time() + 60, "caller": {"name": "a"}, **claims}
    return jwt.encode({k: v for k, v in whole.items() if v is not None}, secret, algorithm).encode()


@pytest.mark.parametrize(
    "made_up",
    [
        token("t" * 32),
        token("", "none"),
        token(aud="other"),
        token(aud=None),
        token(exp=None),
        token(exp="never"),
        token(caller=None),
        token(caller={"tenant": 5}),
        token(exp=time.time() - identity.LEEWAY_S - 1),
        b"",
        b"nonsense",
        b"\xff.\xff.\xff",
    ],
)
def test_what_is_made_up_is_refused(made_up):
    with pytest.raises(Unauthorized):
        Signer(SECRET).caller(made_up)


def test_it_ends_where_it_was_read_before(monkeypatch):
    signer = Signer(SECRET)
    signed = signer.signed(WHO)
    assert signer.caller(signed) == WHO
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + identity.VALID_S + identity.LEEWAY_S + 1)
    with pytest.raises(Unauthorized, match="clocks"):
        signer.caller(signed)


def test_a_new_token_is_signed_long_before_the_old_one_ends(monkeypatch):
    signer = Signer(SECRET)
    signed, now = signer.signed(WHO), time.time()
    monkeypatch.setattr(time, "time", lambda: now + identity.RENEWED_S)
    assert signer.signed(WHO) != signed
    assert 2 * identity.RENEWED_S < identity.VALID_S
