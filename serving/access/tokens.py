# SPDX-License-Identifier: Apache-2.0
"""JSON web tokens of an issuer: their validity and their tenants (RFC 7519, RFC 8725).

Only asymmetric signatures are accepted, and each key only verifies algorithms of its type. A token
cannot choose how it is verified.
"""

import functools
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

LEEWAY_S = 60
"""Allowed difference between the issuer's clock and ours."""
MAX_TOKEN = 8192
"""In bytes."""
MAX_TENANT = 256
"""In characters."""
RSA_BITS, MOST_RSA_BITS = 2048, 16_384
"""Bits of an RSA key: the minimum (RFC 7518, 3.3), and OpenSSL's maximum."""
MOST_KEYS = 100
"""Maximum keys of an issuer, because parsing each takes time."""

_ALGORITHMS: Mapping[tuple[str, str | None], tuple[str, ...]] = {
    ("RSA", None): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
}
"""The algorithms of a key, by its type and curve (RFC 7518, RFC 8037)."""


class Refused(Exception):
    """A token is not valid. The message is for the log. detail: the wrong part of the token."""

    def __init__(self, message: str, detail: object = None) -> None:
        super().__init__(message)
        self.detail = detail


class UnknownKey(Refused):
    """A token is signed with a key that is not among the issuer's fetched keys."""


class TokenKey(NamedTuple):
    """A public key of the issuer. name: its `kid`, or None."""

    name: str | None
    key: Any
    algorithms: tuple[str, ...]


def key_set(content: bytes) -> tuple[TokenKey, ...]:
    """Return the keys of a JWKS (RFC 7517) that can verify tokens. Raises ValueError if there are
    none.
    """
    try:
        listed = json.loads(content)["keys"]
    except (ValueError, RecursionError, LookupError, TypeError):
        raise ValueError("it should be a JWKS") from None
    if not isinstance(listed, list):
        listed = []
    if len(listed) > MOST_KEYS:
        raise ValueError(f"it has more than {MOST_KEYS} keys")
    found = [it for it in map(_token_key, listed) if it]
    if not found:
        raise ValueError(
            f"it has no key for signatures by RSA with {RSA_BITS} bits, ECDSA or Ed25519; add one"
        )
    return tuple(found)


def _token_key(given: Any) -> TokenKey | None:
    """Return a key of a JWKS, or None if it cannot verify tokens."""
    if not isinstance(given, dict) or given.get("use", "sig") != "sig" or "d" in given:
        return None
    try:
        algorithms = _ALGORITHMS.get((given["kty"], given.get("crv")), ())
        if (said := given.get("alg")) is not None:
            algorithms = tuple({said} & {*algorithms})
        if not algorithms:
            return None
        key = jwt.PyJWK(given, algorithms[0]).key
    except (jwt.PyJWTError, LookupError, TypeError, ValueError):  # for example, a list as a name
        return None
    if isinstance(key, RSAPublicKey) and not RSA_BITS <= key.key_size <= MOST_RSA_BITS:
        return None
    name = given.get("kid")
    return TokenKey(name if isinstance(name, str) else None, key, algorithms)


class Rules(NamedTuple):
    """The required claims of a token. tenant: the claim that names it."""

    issuer: str
    audiences: tuple[str, ...]
    tenant: str


class Verified(NamedTuple):
    """A token's tenant, and when it is valid, in seconds since 1970."""

    tenant: str
    begins: float
    ends: float


class Verifier:
    """Verifies tokens, and finds their tenant, with keys that the issuer publishes."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._keys: tuple[TokenKey, ...] = ()
        self._verified = functools.lru_cache(4096)(self._verify)

    @property
    def ready(self) -> bool:
        """Whether it knows any keys."""
        return bool(self._keys)

    def use(self, keys: tuple[TokenKey, ...]) -> None:
        """Verify with these keys only from now on."""
        self._keys = keys
        self._verified.cache_clear()

    def tenant(self, token: bytes, now: float) -> str:
        """Return a token's tenant. now: in seconds since 1970. Raises Refused."""
        if len(token) > MAX_TOKEN:
            raise Refused(f"it is longer than {MAX_TOKEN} bytes")
        found = self._verified(token)
        if found.ends + LEEWAY_S <= now:
            raise Refused("it has expired")
        if found.begins - LEEWAY_S > now:
            raise Refused("it is not valid yet; are the clocks of the issuer and here right?")
        return found.tenant

    def _verify(self, token: bytes) -> Verified:
        """Verify a token's signature and claims, but not its times. Raises Refused."""
        try:
            key = self._key(jwt.get_unverified_header(token))
            claims = jwt.decode(
                token,
                key.key,
                key.algorithms,
                audience=self._rules.audiences,
                issuer=self._rules.issuer,
                options={
                    "require": ["exp", "iss", "aud"],
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                    "verify_sub": False,
                    "verify_jti": False,
                },
            )
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
            raise _refused(error) from None
        tenant = claims.get(self._rules.tenant)
        if not isinstance(tenant, str) or not 0 < len(tenant) <= MAX_TENANT:
            raise Refused(f"its claim {self._rules.tenant!r}, the tenant, is missing or no name")
        if not tenant.isprintable():
            raise Refused("its tenant has characters that cannot be printed")
        return Verified(tenant, _time(claims.get("nbf", 0)), _time(claims["exp"]))

    def _key(self, head: Mapping[str, Any]) -> TokenKey:
        """Return the key that a token's head names, or the only key. Raises Refused."""
        name = head.get("kid")
        named = [it for it in self._keys if name is None or it.name == name]
        if len(named) != 1:
            raise UnknownKey("its key is not one of the issuer's", name)
        if head.get("alg") not in named[0].algorithms:
            raise Refused("its algorithm is not one of its key's", head.get("alg"))
        return named[0]


def _refused(error: Exception) -> Refused:
    """Return the reason, without the token's text, which the library repeats."""
    match error:
        case jwt.InvalidAudienceError():
            return Refused("it is for another audience")
        case jwt.InvalidIssuerError():
            return Refused("it is of another issuer")
        case jwt.MissingRequiredClaimError():
            return Refused("a claim is missing", error.claim)
        case jwt.InvalidSignatureError():
            return Refused("its signature is not its key's")
    return Refused("it is malformed")


def _time(claim: Any) -> float:
    try:
        found = math.nan if isinstance(claim, bool | str) else float(claim)
    except (TypeError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise Refused("a time in it is no number")
    return found
