# SPDX-License-Identifier: Apache-2.0
"""Who shares caches with whom: requests of the same salt, and nobody else.

vLLM and LMCache make a request's `cache_salt` part of every key. What clients choose as a salt, or
a gateway as the name of a tenant, can be a secret, and would become part of file names; so the
engine only ever gets a digest. vLLM's caches of media know no salt; there the digest is part of the
name by which the engine knows a medium.
"""

import hashlib
import json
from collections.abc import Iterable

import msgspec

from serving.access.caller import Caller
from serving.errors import BadRequest


class Tenants:
    """Knows whose a request is: its key says so, or else a header of the gateway's. header: its
    name, or None where keys alone distinguish tenants.
    """

    def __init__(self, header: str | None) -> None:
        self._header = header
        self._name = (header or "").lower().encode()

    def tenant(self, caller: Caller, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """The tenant of a request, None where tenants are not distinguished. Raises BadRequest
        where several are named.
        """
        if caller.tenant is not None:
            return f"\0{caller.tenant}"  # no header has a NUL, so none names a key's tenant
        if not self._name:
            return None
        names = [value for key, value in headers if key == self._name]
        if len(names) > 1:
            raise BadRequest(
                f"{self._header} is there {len(names)} times; what names the tenant has to replace "
                "the client's own header, not add to it"
            )
        return names[0].decode("latin-1") if names else ""


def digest(tenant: str | None, salt: str | None, adapter: str | None) -> str | None:
    """The salt that the engine gets: equal for requests that share caches. None where all share.

    tenant: None where tenants are not distinguished. salt: the client's, None where it has none.
    adapter: as the engine calls it, which differs for each version, or None for the base model:
    LMCache's keys know no adapters.
    """
    if salt is None and tenant is None and adapter is None:
        return None
    names = (tenant, salt) if adapter is None else (tenant, salt, adapter)
    return hashlib.sha256(msgspec.json.encode(names)).hexdigest()[:32]


def scoped_name(salt: str | None, *names: str) -> str:
    """A name that stands for these names among requests of this salt, and nowhere else."""
    return hashlib.sha256(json.dumps([salt, *names]).encode()).hexdigest()[:32]
