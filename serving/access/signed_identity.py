# SPDX-License-Identifier: Apache-2.0
"""The identity of a request's sender, from a router to a server: a JSON web token (RFC 7519),
signed with a shared secret, for that one server.

A server proves in its answer to /ping that it has the secret, and gives its name: it signs the
router's challenge. An address without this proof gets no signed identity. An attacker in the middle
can pass a challenge on to a server, but only gets identities for that server; TLS prevents this.
"""

import functools
import re
import secrets
import time
from collections.abc import Sequence

import jwt
import msgspec

from serving.access.caller import Caller
from serving.errors import Unauthorized

VALID_S = 30
LEEWAY_S = 30
"""Allowed difference of two machines' clocks. A token is refused VALID_S + LEEWAY_S after it was
signed.
"""
RENEWED_S = 15
"""The router uses a signed token for this long."""

_ALGORITHM = "HS256"
_INTRODUCTION = "slipway-router"
"""The audience of a server's introduction."""
_ANYBODY = "slipway"
"""The audience of routers before 0.2. Servers accept it, so that they can be updated first."""
_CHALLENGE = re.compile(rb"[0-9a-f]{32}")


def new_name() -> str:
    """A unique name, for a server or a challenge."""
    return secrets.token_hex(16)


class _Introduction(msgspec.Struct):
    sub: str
    nonce: str


class Signer:
    """Signs callers' identities, and verifies those of others.

    secret: the shared secret. name: this server's name, the audience of identities for it.
    """

    def __init__(self, secret: str, name: str = "") -> None:
        self._secret = secret
        self.name = name or new_name()
        self._signed = functools.lru_cache(4096)(self._sign)
        self._read = functools.lru_cache(4096)(self._decode)
        self._period = 0

    def signed(self, caller: Caller, names: Sequence[str]) -> bytes:
        """Return a caller's identity for the servers of these names; it expires after VALID_S."""
        self._forget_old()
        return self._signed(caller, tuple(names))

    def caller(self, token: bytes) -> Caller:
        """Return the caller of an identity. Raises Unauthorized for a token that was not signed
        with the secret, is for another server, or has expired.
        """
        self._forget_old()
        caller, until = self._read(token)
        if until < time.time():
            raise Unauthorized(
                "the router's identity is out of date; are the clocks of router and server right?"
            )
        return caller

    def introduced(self, challenge: bytes) -> bytes | None:
        """Return a proof, for the sender of a challenge, that we have the secret, with our name;
        None if the challenge is malformed.
        """
        if not _CHALLENGE.fullmatch(challenge):
            return None
        claims = {"aud": _INTRODUCTION, "sub": self.name, "nonce": challenge.decode()}
        return jwt.encode(claims, self._secret, _ALGORITHM).encode()

    def name_of(self, introduction: str, challenge: str) -> str:
        """Return the server's name in its answer to our challenge, or "" if that proves nothing."""
        try:
            claims = jwt.decode(
                introduction,
                self._secret,
                [_ALGORITHM],
                audience=_INTRODUCTION,
                options={"require": ["aud", "sub"]},
            )
            found = msgspec.convert(claims, _Introduction)
        except (jwt.PyJWTError, msgspec.ValidationError, ValueError):
            return ""
        return found.sub if found.nonce == challenge else ""

    def _forget_old(self) -> None:
        """Forget all tokens every RENEWED_S: no router uses one for longer."""
        if (period := int(time.time()) // RENEWED_S) != self._period:
            self._period = period
            self._signed.cache_clear()
            self._read.cache_clear()

    def _sign(self, caller: Caller, names: tuple[str, ...]) -> bytes:
        now = int(time.time())
        claims = {
            "aud": list(names),
            "iat": now,
            "exp": now + VALID_S,
            "caller": msgspec.to_builtins(caller),
        }
        return jwt.encode(claims, self._secret, _ALGORITHM).encode()

    def _decode(self, token: bytes) -> tuple[Caller, float]:
        try:
            claims = jwt.decode(
                token,
                self._secret,
                [_ALGORITHM],
                audience=(self.name, _ANYBODY),
                leeway=LEEWAY_S,
                options={"require": ["exp", "aud"], "verify_exp": False},
            )
            return msgspec.convert(claims["caller"], Caller), float(claims["exp"]) + LEEWAY_S
        except jwt.ImmatureSignatureError:
            raise Unauthorized(
                "the router's identity is not valid yet; are the clocks of router and server right?"
            ) from None
        except jwt.InvalidAudienceError:
            raise Unauthorized("the router's identity is for another server") from None
        except (jwt.PyJWTError, msgspec.ValidationError, LookupError, ValueError, TypeError):
            raise Unauthorized(
                "the router's identity is not valid; OPTION_ROUTER_SECRET must be the same there "
                "and here"
            ) from None
