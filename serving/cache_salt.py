"""Who shares KV caches with whom: requests of the same salt, and nobody else.

vLLM and LMCache make a request's `cache_salt` part of every key. What clients choose as a salt, or
a gateway as the name of a tenant, can be a secret, and would become part of file names; so the
engine only ever gets a digest.
"""

import hashlib

import msgspec

from serving.errors import BadRequest


class _Salt(msgspec.Struct):
    cache_salt: msgspec.Raw = msgspec.Raw(b"null")


_read = msgspec.json.Decoder(_Salt).decode


def salted(body: bytes, tenant: str | None, adapter: str | None = None) -> bytes:
    """The JSON body with its cache_salt replaced by a digest of it, the tenant and the adapter.

    tenant: None where tenants are not told apart. adapter: as the engine calls it, which differs
    for each version, or None for the base model: LMCache's keys know no adapters. A body with an
    empty salt stays as it is; the engine refuses it. Raises BadRequest for a salt that is no text.
    """
    salt = None
    if b"cache_salt" in body or b"\\u00" in body:  # the key may be written with escapes
        try:
            salt = msgspec.json.decode(_read(body).cache_salt, type=str | None)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise BadRequest("cache_salt should be a text", "cache_salt") from None
        if salt == "":
            return body
    found = digest(tenant, salt, adapter)
    return with_text(body, "cache_salt", found) if found else body


def digest(tenant: str | None, salt: str | None, adapter: str | None) -> str | None:
    """What the engine gets as the salt, or None where it gets none. adapter: as it calls it."""
    if salt is None and tenant is None and adapter is None:
        return None
    names = (tenant, salt) if adapter is None else (tenant, salt, adapter)
    return hashlib.sha256(msgspec.json.encode(names)).hexdigest()[:32]


def with_text(body: bytes, key: str, value: str) -> bytes:
    """The JSON object with this key, whatever it had under it: the last of two equal keys counts
    (vLLM reads bodies with Python's json). What is no object stays as it is.
    """
    start = body.rstrip()
    if not start.endswith(b"}"):
        return body
    start = start[:-1].rstrip()
    comma = b"" if start.endswith(b"{") else b","
    return start + comma + msgspec.json.encode(key) + b":" + msgspec.json.encode(value) + b"}"
