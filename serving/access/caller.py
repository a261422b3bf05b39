# SPDX-License-Identifier: Apache-2.0
"""The sender of a request and its rights, a value made from keys and from identities that a router
has signed.
"""

import re
from typing import Literal

import msgspec

from serving.errors import NotPermitted
from serving.protocol import (
    EXECUTION_PARAMETERS,
    INVOCATIONS_PATH,
    KV_PREFETCH_PATH,
    KV_SESSION_PATH,
    PROBES,
    is_api,
)

_FOR_ALL = re.compile(
    "|".join((INVOCATIONS_PATH, EXECUTION_PARAMETERS, KV_SESSION_PATH, KV_PREFETCH_PATH))
)


class Limits(msgspec.Struct, frozen=True, omit_defaults=True):
    """A caller's limits; None is no limit. requests, tokens: in a minute. concurrent: requests at
    once.
    """

    requests: int | None = None
    tokens: int | None = None
    concurrent: int | None = None


Phase = Literal["", "prefill", "decode"]
"""The part of a request that this server runs, if a router uses two: one computes the prompt, and
the other loads its KV. "" for all of it.
"""


class HandOver(msgspec.Struct, frozen=True):
    """The address of the prompt's KV, which a router puts in front of a request's body.

    size: bytes. digest: their SHA-256, in hex digits.
    """

    size: int
    digest: str


OPERATOR = "\0operator"
"""The tenant of OPTION_ADMIN_API_KEY. No key's, token's or header's name has a NUL."""


class Caller(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who sends a request.

    name: its key's, "" if no keys are needed. tenant: clients of one tenant share caches; None if
    the key names none. models, adapters: the allowed names, None for all. priority: at the engine,
    the lowest first. sheddable: whether its requests are refused when the engine has no room for
    them. admin: whether it may administer. counted: whether a router has already applied its
    limits. phase: the part of its request that a router lets a server run. hand_over: the address
    of the KV. paths: the only allowed paths; None for all. background: whether its requests are
    lines of a batch of another copy, which wait for all other requests.
    """

    name: str = ""
    tenant: str | None = None
    models: tuple[str, ...] | None = None
    adapters: tuple[str, ...] | None = None
    priority: int = 0
    sheddable: bool = False
    admin: bool = False
    limits: Limits = Limits()
    counted: bool = False
    phase: Phase = ""
    hand_over: HandOver | None = None
    paths: tuple[str, ...] | None = None
    background: bool = False

    @property
    def is_client(self) -> bool:
        """Whether a client sends it. A router's own questions, and lines of another copy's batch,
        are no client's.
        """
        return self.paths is None and not self.background

    @property
    def limited(self) -> bool:
        """Whether limits apply to it here."""
        return not self.counted and self.limits != _UNLIMITED

    @property
    def shown_tenant(self) -> str:
        """Its tenant's readable name, or ""."""
        return "" if self.tenant is None or self.tenant == OPERATOR else self.tenant

    def require_path(self, path: str, *, inference: bool = False) -> None:
        """Raise NotPermitted for an administrative path without an admin key, or for a path that is
        not one of `paths`. inference: whether the path is known not to be administrative.
        """
        if self.paths is not None:
            if path not in self.paths:
                raise NotPermitted(f"the router's own identity is not valid for {path:.100}")
        elif not self.admin and not inference and administers(path):
            raise NotPermitted(
                f"{path:.100} needs an admin key: OPTION_ADMIN_API_KEY, or one with `admin: true` "
                "in OPTION_API_KEYS_FILE"
            )

    def may_use(self, adapter: str) -> bool:
        return self.adapters is None or adapter in self.adapters

    def require_model(self, names: tuple[str, ...]) -> None:
        """Raise NotPermitted if its key does not allow the base model. names: the model's names."""
        if self.models is not None and not set(self.models) & set(names):
            raise NotPermitted(f"this key may not use the model {names[0]!r:.100}")


_UNLIMITED = Limits()
ANYBODY = Caller(admin=True)
"""The sender of a request if no keys are required."""


def administers(path: str) -> bool:
    """Whether a path is only for admin keys: all paths except inference, health checks, and a
    tenant's own conversations.
    """
    return not (is_api(path) or _FOR_ALL.fullmatch(path) or path in PROBES)
