"""Who shares KV caches with whom: requests of the same salt, and nobody else.

vLLM and LMCache make a request's `cache_salt` part of every key. What clients choose as a salt, or
a gateway as the name of a tenant, can be a secret, and would become part of file names; so the
engine only ever gets a digest.
"""

import hashlib

import msgspec


class _Salt(msgspec.Struct):
    cache_salt: msgspec.Raw = msgspec.Raw(b"null")


_read = msgspec.json.Decoder(_Salt).decode


def salted(body: bytes, tenant: str | None) -> bytes:
    """The JSON body with its cache_salt replaced by a digest of it and of the tenant.

    tenant: None where tenants are not told apart. A body that the engine will refuse stays as it
    is. The last of two equal keys counts (vLLM reads bodies with Python's json).
    """
    salt = None
    if b"cache_salt" in body:
        try:
            salt = msgspec.json.decode(_read(body).cache_salt, type=str | None)
        except msgspec.MsgspecError:
            return body
        if salt == "":
            return body
    start = body.rstrip()
    if (salt is None and tenant is None) or not start.endswith(b"}"):
        return body
    start = start[:-1].rstrip()
    comma = b"" if start.endswith(b"{") else b","
    digest = hashlib.sha256(msgspec.json.encode((tenant, salt))).hexdigest()[:32]
    return start + comma + b'"cache_salt":"' + digest.encode() + b'"}'
