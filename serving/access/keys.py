# SPDX-License-Identifier: Apache-2.0
"""API keys: how they are made, and the file that has their hashes.

A key has 256 random bits, so its SHA-256 reveals nothing about it and needs neither salt nor
stretching. Keys are looked up by their hash. The time of a lookup only reveals facts about hashes,
and clients cannot choose a key's hash.
"""

import hashlib
import json
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple

import msgspec

from lmi_config.facts import strict_yaml
from serving.access.caller import Caller, Limits
from serving.errors import NotPermitted

PREFIX = "sk-slipway-"
"""The prefix of keys, which marks them as secrets everywhere."""
TOKEN = "jwt:"
"""The prefix of a caller's name with a token of an issuer. No key's name has a colon."""

_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
_Amount = Annotated[int, msgspec.Meta(ge=1)]


class Key(NamedTuple):
    """A key's rights and its expiry."""

    caller: Caller
    expires: datetime | None = None


class Keys(NamedTuple):
    """The content of a keys file. by_digest: keys by their SHA-256, in hexadecimal digits.
    by_tenant: the rights of an issuer's tokens, "" for unnamed tenants; None if the file has none.
    """

    by_digest: Mapping[str, Key] = {}
    by_tenant: Mapping[str, Caller] | None = None

    @property
    def callers(self) -> list[Caller]:
        return [*(it.caller for it in self.by_digest.values()), *(self.by_tenant or {}).values()]

    def of_token(self, tenant: str) -> Caller:
        """Return the sender of a token of this tenant's. Raises NotPermitted."""
        if self.by_tenant is None:
            return Caller(name=TOKEN + tenant, tenant=tenant)
        found = self.by_tenant.get(tenant) or self.by_tenant.get("")
        if found is None:
            raise NotPermitted("the token's tenant may not use this server")
        return msgspec.structs.replace(found, name=TOKEN + tenant, tenant=tenant)


class _Allowed(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The rights of an entry in the file."""

    models: tuple[str, ...] | None = None
    adapters: tuple[str, ...] | None = None
    requests_per_minute: _Amount | None = None
    tokens_per_minute: _Amount | None = None
    concurrent_requests: _Amount | None = None
    priority: int = 0
    admin: bool = False

    def caller(self, name: str, tenant: str) -> Caller:
        return Caller(
            name=name,
            tenant=tenant,
            models=self.models,
            adapters=self.adapters,
            priority=self.priority,
            admin=self.admin,
            limits=Limits(
                self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests
            ),
        )


class _Row(_Allowed, forbid_unknown_fields=True, kw_only=True):
    """A key in the file."""

    name: _Name
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    tenant: _Name | None = None
    expires: str | None = None


class _TokenRow(_Allowed, forbid_unknown_fields=True, kw_only=True):
    """The rights of a tenant's tokens, or of all unnamed tenants."""

    tenant: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[_Row] | msgspec.UnsetType = msgspec.UNSET
    jwt: list[_TokenRow] | None = None


def digest(key: bytes) -> str:
    """A key's SHA-256, in hexadecimal digits."""
    return hashlib.sha256(key).hexdigest()


_OF_NOTHING = digest(b"")


def made() -> str:
    """A new key."""
    return PREFIX + secrets.token_urlsafe(32)


def parsed(content: bytes) -> Keys:
    """The keys in a file of YAML or JSON. Raises ValueError for an invalid file, without repeating
    its values.
    """
    try:
        file = msgspec.convert(_plain(strict_yaml.read(content)), _File)
    except strict_yaml.NotYAML as error:
        raise ValueError(f"it is {error}") from None
    except msgspec.ValidationError as error:
        raise ValueError(f"it should have `keys`, a list: {error}") from None
    if file.keys is msgspec.UNSET and file.jwt is None:
        raise ValueError("it should have `keys`, a list, or `jwt`")
    found: dict[str, Key] = {}
    names: set[str] = set()
    for row in file.keys or ():
        if row.name in names:
            raise ValueError(f"two keys are called {row.name}; rename one")
        if row.sha256 in found:
            other = found[row.sha256].caller.name
            raise ValueError(f"{row.name} has the sha256 of {other}; give each a separate key")
        if row.sha256 == _OF_NOTHING:  # a request without a key would have it
            raise ValueError(f"{row.name} has the sha256 of nothing; write that of a key")
        names.add(row.name)
        found[row.sha256] = _key(row)
    return Keys(found, None if file.jwt is None else _of_tokens(file.jwt))


def _key(row: _Row) -> Key:
    caller = row.caller(row.name, row.tenant or row.name)
    if row.expires is None:
        return Key(caller)
    try:
        expires = datetime.fromisoformat(row.expires)
    except ValueError:
        raise ValueError(
            f"{row.name}: expires should be a date or time, like 2027-01-31T12:00:00Z"
        ) from None
    return Key(caller, expires if expires.tzinfo else expires.replace(tzinfo=UTC))


def _of_tokens(rows: list[_TokenRow]) -> Mapping[str, Caller]:
    """The rights of tokens, by tenant. Raises ValueError."""
    found: dict[str, Caller] = {}
    for row in rows:
        tenant = row.tenant or ""
        if tenant in found:
            raise ValueError(
                f"two entries below `jwt` have the tenant {tenant!r}; keep one"
                if tenant
                else "two entries below `jwt` have no tenant; keep one"
            )
        if row.admin and not tenant:
            raise ValueError("`admin: true` below `jwt` needs a tenant")
        found[tenant] = row.caller(TOKEN + tenant, tenant)
    return found


def _plain(value: Any) -> Any:
    """The parsed YAML, with dates turned back into text.

    Raises ValueError for a name without a value: `adapters:` with all of its lines commented out is
    not meant to allow every adapter.
    """
    if isinstance(value, dict):
        if empty := [name for name, item in value.items() if item is None]:
            raise ValueError(f"`{empty[0]}` has no value; leave it out, or write [] for none")
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.isoformat() if hasattr(value, "isoformat") else value


def row(name: str, key: str, tenant: str | None = None) -> str:
    """The lines of a key in the file. Raises ValueError for a name that cannot be one."""
    fields = {"name": name, "sha256": digest(key.encode())} | ({"tenant": tenant} if tenant else {})
    parsed(json.dumps({"keys": [fields]}).encode())
    return "- " + "\n  ".join(f"{field}: {value}" for field, value in fields.items())
