# SPDX-License-Identifier: Apache-2.0
"""API keys: how they are made, and the file that has their hashes.

A key has 256 random bits, so its SHA-256 tells nothing of it and needs neither salt nor stretching.
Keys are looked up by their hash: what the time of a look-up could tell is about hashes, which
nobody can choose.
"""

import hashlib
import json
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import yaml

from serving.access.caller import Caller, Limits

PREFIX = "sk-slipway-"
"""What keys begin with, so that they are known for secrets wherever they turn up."""

_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
_Amount = Annotated[int, msgspec.Meta(ge=1)]


class Key(NamedTuple):
    """What a key is for, and when it ends."""

    caller: Caller
    expires: datetime | None = None


Keys = Mapping[str, Key]
"""By the SHA-256 of the key, in hexadecimal digits."""


class _Row(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A key in the file."""

    name: _Name
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    tenant: _Name | None = None
    models: tuple[str, ...] | None = None
    adapters: tuple[str, ...] | None = None
    requests_per_minute: _Amount | None = None
    tokens_per_minute: _Amount | None = None
    concurrent_requests: _Amount | None = None
    priority: int = 0
    expires: str | None = None
    admin: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[_Row]


def digest(key: bytes) -> str:
    """A key's SHA-256, in hexadecimal digits."""
    return hashlib.sha256(key).hexdigest()


def made() -> str:
    """A new key."""
    return PREFIX + secrets.token_urlsafe(32)


def read(path: Path) -> Keys:
    """The keys in a file of YAML or JSON. Raises ValueError for what cannot be used, without
    repeating it, and OSError.
    """
    return parsed(path.read_bytes())


def parsed(content: bytes) -> Keys:
    """The same from a file's content."""
    try:
        file = msgspec.convert(_dates_as_text(yaml.safe_load(content)), _File)
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"it is not YAML{line}: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        raise ValueError("it is not YAML") from None
    except msgspec.ValidationError as error:
        raise ValueError(f"it should have `keys`, a list: {error}") from None
    found: dict[str, Key] = {}
    names: set[str] = set()
    for row in file.keys:
        if row.name in names:
            raise ValueError(f"two keys are called {row.name}")
        if row.sha256 in found:
            raise ValueError(f"{row.name} has the sha256 of {found[row.sha256].caller.name}")
        names.add(row.name)
        found[row.sha256] = _key(row)
    return found


def _key(row: _Row) -> Key:
    limits = Limits(row.requests_per_minute, row.tokens_per_minute, row.concurrent_requests)
    caller = Caller(
        name=row.name,
        tenant=row.tenant or row.name,
        models=row.models,
        adapters=row.adapters,
        priority=row.priority,
        admin=row.admin,
        limits=limits,
    )
    if row.expires is None:
        return Key(caller)
    try:
        expires = datetime.fromisoformat(row.expires)
    except ValueError:
        raise ValueError(
            f"{row.name}: expires should be a date or time, like 2027-01-31T12:00:00Z"
        ) from None
    return Key(caller, expires if expires.tzinfo else expires.replace(tzinfo=UTC))


def _dates_as_text(value: Any) -> Any:
    """YAML makes dates of what looks like one."""
    if isinstance(value, dict):
        return {str(key): _dates_as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_dates_as_text(item) for item in value]
    return value.isoformat() if hasattr(value, "isoformat") else value


def row(name: str, key: str, tenant: str | None = None) -> str:
    """The lines of a key in the file. Raises ValueError for a name that cannot be one."""
    fields = {"name": name, "sha256": digest(key.encode())} | ({"tenant": tenant} if tenant else {})
    parsed(json.dumps({"keys": [fields]}).encode())
    return "- " + "\n  ".join(f"{field}: {value}" for field, value in fields.items())
