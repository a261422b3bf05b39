# SPDX-License-Identifier: Apache-2.0
"""What a router says to a server of who sends a request: a JSON web token, signed with a secret
that both have.
"""

import functools
import time

import jwt
import msgspec

from serving.access.caller import Caller
from serving.errors import Unauthorized

VALID_S = 300
LEEWAY_S = 60
"""By which two machines' clocks may differ."""
RENEWED_S = 60
"""A token is used for so long by who has signed it."""

_ALGORITHM, _AUDIENCE = "HS256", "slipway"


class Signer:
    """Signs who callers are, and reads what others have signed. secret: theirs and ours."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._signed = functools.lru_cache(4096)(self._sign)
        self._read = functools.lru_cache(4096)(self._decode)

    def signed(self, caller: Caller) -> bytes:
        """A token that says so for the next minutes."""
        return self._signed(caller, int(time.time()) // RENEWED_S)

    def caller(self, token: bytes) -> Caller:
        """Who is meant. Raises Unauthorized for what was not signed with the secret, and for what
        is out of date.
        """
        caller, until = self._read(token)
        if until < time.time():
            raise Unauthorized(
                "the router's identity is out of date; are the clocks of router and server right?"
            )
        return caller

    def _sign(self, caller: Caller, _: int) -> bytes:
        claims = {
            "aud": _AUDIENCE,
            "exp": int(time.time()) + VALID_S,
            "caller": msgspec.to_builtins(caller),
        }
        return jwt.encode(claims, self._secret, _ALGORITHM).encode()

    def _decode(self, token: bytes) -> tuple[Caller, float]:
        try:
            claims = jwt.decode(
                token,
                self._secret,
                [_ALGORITHM],
                audience=_AUDIENCE,
                options={"require": ["exp", "aud"], "verify_exp": False},
            )
            return msgspec.convert(claims["caller"], Caller), float(claims["exp"]) + LEEWAY_S
        except (jwt.PyJWTError, msgspec.ValidationError, LookupError, ValueError, TypeError):
            raise Unauthorized(
                "the router's identity is not valid; OPTION_ROUTER_SECRET has to be the same there "
                "and here"
            ) from None
