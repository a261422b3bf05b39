# SPDX-License-Identifier: Apache-2.0
"""Separation of caches: only requests with the same salt share them.

vLLM and LMCache make a request's `cache_salt` part of every key. A client's salt or a gateway's
name of a tenant can be a secret, and would become part of file names. So the engine only gets a
digest. vLLM's caches of media have no salt, so the digest is part of each medium's uuid.
"""

import hashlib
import json
from collections.abc import Iterable

import msgspec

from serving.access.caller import Caller
from serving.errors import BadRequest


class Tenants:
    """Finds a request's tenant: by its key, or else by a header of the gateway's. header: the
    header's name, or None if only keys have tenants.
    """

    def __init__(self, header: str | None) -> None:
        self._header = header
        self._name = (header or "").lower().encode()

    def tenant(self, caller: Caller, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Return a request's tenant, or None without tenants. Raises BadRequest if the request
        names several.
        """
        if caller.tenant is not None:
            return f"\0{caller.tenant}"  # a header cannot have a NUL, so it names no key's tenant
        if not self._name:
            return None
        names = [value for key, value in headers if key == self._name]
        if len(names) > 1:
            raise BadRequest(
                f"the request has {self._header} {len(names)} times; the gateway must replace the "
                "client's header, not add another"
            )
        return names[0].decode("latin-1") if names else ""


def digest(tenant: str | None, salt: str | None, adapter: str | None) -> str | None:
    """Return the engine's salt, which is equal for requests that share caches; None if all do.

    tenant: None without tenants. salt: the client's, or None. adapter: its inner name, which
    differs for each version, or None for the base model. It is part of the salt because LMCache's
    keys have no adapter.
    """
    if salt is None and tenant is None and adapter is None:
        return None
    names = (tenant, salt) if adapter is None else (tenant, salt, adapter)
    return hashlib.sha256(msgspec.json.encode(names)).hexdigest()[:32]


def scoped_name(salt: str | None, *names: str) -> str:
    """Return a name for these names that is only equal among requests with the same salt."""
    return hashlib.sha256(json.dumps([salt, *names]).encode()).hexdigest()[:32]
