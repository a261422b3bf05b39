# SPDX-License-Identifier: Apache-2.0
"""Authentication: a request's headers → its sender."""

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from lmi_config.options.declared import Settings
from lmi_config.options.settings import SettingsError
from serving.access import keys
from serving.access.caller import OPERATOR, Caller, Phase
from serving.access.issuer import Issuer
from serving.access.keys import Key, Keys
from serving.access.signed_identity import Signer, new_name
from serving.access.tokens import Refused
from serving.errors import Unauthorized
from serving.follow import FaultLog, changes, content, kept
from serving.protocol import API_KEY, AUTHORIZATION, CHALLENGE, IDENTITY, INTRODUCTION

log = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]

CREDENTIALS = frozenset((AUTHORIZATION, API_KEY, IDENTITY))
"""Headers that identify a request's sender. They are removed here."""


def _now() -> datetime:
    return datetime.now(UTC)


class Access:
    """Authenticates requests by the operator's settings.

    Raises SettingsError if the keys file or the issuer of tokens cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        routes: bool = False,
        name: str = "",
        closed: bool = False,
        now: Callable[[], datetime] = _now,
    ) -> None:
        """routes: whether requests go to other servers. name: the name that routers sign for; a new
        one if it is "". closed: whether every request needs a key or a router's identity, even if
        no keys are set.
        """
        self._now = now
        self._file = Path(settings.api_keys_file) if settings.api_keys_file else None
        self._option = settings.named("api_keys_file")
        self._signer = Signer(settings.router_secret, name) if settings.router_secret else None
        self._single: dict[str, Key] = {}
        if settings.api_key:
            self._single[keys.digest(settings.api_key.encode())] = Key(Caller(name="default"))
        if settings.admin_api_key:
            admin = Caller(name="admin", tenant=OPERATOR, admin=True)
            self._single[keys.digest(settings.admin_api_key.encode())] = Key(admin)
        self._routes = routes
        self._issuer = Issuer(settings) if settings.jwt_issuer else None
        self._alone = not settings.limits_url
        self._processes = settings.router_processes if routes else 1
        self._content = b""
        self._listed = self._read() if self._file else Keys()
        if routes and (self._file or self._issuer) and not self._signer:
            named = self._option if self._file else "OPTION_JWT_ISSUER"
            raise SettingsError(
                [
                    f"{named} needs OPTION_ROUTER_SECRET, here and on the servers: the router "
                    "signs the sender of each request with it (`openssl rand -hex 32` makes one)"
                ]
            )
        # A server with a secret requires a router's identity.
        asked = self._signer and (closed or not routes)
        others = bool(settings.api_key or self._listed.by_digest or asked)
        self._only_tokens = bool(self._issuer) and not others
        self.closed = others or bool(self._file or self._issuer)
        """Whether every request needs a key."""
        self._anybody = Caller(admin=not settings.admin_api_key and not self.closed)
        self._replica_key = f"Bearer {it}" if (it := settings.router_replica_key) else None
        own = settings.admin_api_key or settings.api_key
        self._own = f"Bearer {own}" if own else None

    def caller(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Return the sender of a request with these headers. Raises Unauthorized."""
        identities: set[bytes] = set()
        given: set[bytes] = set()
        for name, value in [header for header in headers if header[0] in CREDENTIALS]:
            if name == AUTHORIZATION:
                scheme, _, key = value.partition(b" ")
                given.add(key.strip() if scheme.lower() == b"bearer" else b"")
            elif name == API_KEY:
                given.add(value)
            else:
                identities.add(value)
        if self._signer and identities:
            if len(identities) > 1:
                raise Unauthorized("the request has several identities of a router; send one")
            return self._signer.caller(identities.pop())
        if len(given) == 1 and (found := self._named(given.pop())):
            return found
        if not self.closed:
            return self._anybody
        if len(given) > 1:
            raise Unauthorized("the request has several keys; send one")
        raise Unauthorized("send a valid API key, as `Authorization: Bearer KEY` or `x-api-key`")

    def _named(self, given: bytes) -> Caller | None:
        """Return the owner of a key or token, or None. Raises ServingError."""
        digest = keys.digest(given)
        key = self._single.get(digest) or self._listed.by_digest.get(digest)
        if key is None:
            return self._of_token(given) if self._issuer and given.count(b".") == 2 else None
        if key.expires and key.expires <= self._now():
            raise Unauthorized(f"the key {key.caller.name} has expired; ask for a new one")
        return key.caller

    def _of_token(self, given: bytes) -> Caller | None:
        assert self._issuer
        try:
            tenant = self._issuer.tenant(given, self._now().timestamp())
        except Refused:  # the log has the reason, and the client gets none
            return None
        return self._listed.of_token(tenant)

    def without_credentials(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return a request's headers without keys, for all further steps."""
        hidden = CREDENTIALS if self._guards else {IDENTITY}
        return [header for header in headers if header[0] not in hidden]

    @property
    def _guards(self) -> bool:
        return self.closed or bool(self._single)

    def identity(self, caller: Caller, names: Sequence[str], phase: Phase = "") -> bytes | None:
        """Sign the sender of a request that goes to one of the servers of these names. The identity
        also says that the sender's limits were checked, and which phase the server must run.

        Returns b"" if a name is not known: such a server gets no identity. Returns None if the
        server reads the client's credentials itself.
        """
        if not self._signer:
            return None
        if not all(names):
            return b""
        whole = msgspec.structs.replace(caller, counted=True, phase=phase)
        return self._signer.signed(whole, names)

    def own_headers(self, name: str, path: str) -> dict[str, str]:
        """Return a router's headers for its own request to a server, for one path. name: the
        server's; "" if it is not known, because the server has not proven the secret.
        """
        if self._replica_key and not (self._signer and name):
            return {AUTHORIZATION.decode(): self._replica_key}
        if self._signer:
            asks = Caller(paths=(path,))
            return {IDENTITY.decode(): self._signer.signed(asks, (name,)).decode()} if name else {}
        return {AUTHORIZATION.decode(): self._own} if self._own else {}

    def challenge(self) -> dict[str, str]:
        """Return a router's headers that ask a server to prove that it has the secret."""
        return {CHALLENGE.decode(): new_name()} if self._signer else {}

    def introduction(self, challenge: bytes) -> Headers:
        """Return a server's headers that prove it."""
        proof = self._signer.introduced(challenge) if self._signer and challenge else None
        return [(INTRODUCTION, proof)] if proof else []

    def name_of(self, challenge: Mapping[str, str], answer: Mapping[str, str]) -> str:
        """Return the name that a server's answer to a challenge proves, or "". Both are headers."""
        proof = answer.get(INTRODUCTION.decode(), "")
        if not self._signer or not proof:
            return ""
        return self._signer.name_of(proof, challenge[CHALLENGE.decode()])

    async def require(self) -> None:
        """Wait for the issuer's keys if they are the only credentials. Raises SettingsError if they
        cannot be fetched.
        """
        if self._issuer and self._only_tokens:
            await self._issuer.require()

    async def open(self) -> None:
        """Fetch the issuer's keys for the first request. A failure is logged."""
        if self._issuer:
            await self._issuer.refresh()

    async def follow(self) -> None:
        """Reload the file's keys and the issuer's, until cancelled."""
        works = [kept("keys", self._follow_file)] if self._file else []
        works += [kept("issuer", self._issuer.follow)] if self._issuer else []
        await asyncio.gather(*works)
        await asyncio.Event().wait()

    async def _follow_file(self) -> None:
        assert self._file
        faults = FaultLog("the keys", self._file, "keys")
        read = functools.partial(content, self._file)
        found = changes(read, self._parsed, faults, self._content)
        async with aclosing(found):
            async for self._listed in found:
                log.info("the keys in %s were reloaded", self._file)

    def _parsed(self, text: bytes) -> Keys:
        """Parse the keys. Raises ValueError, also if their limits cannot be counted here."""
        found = keys.parsed(text)
        if found.by_tenant is not None and not self._issuer:
            raise ValueError("`jwt` needs OPTION_JWT_ISSUER")
        for caller in found.callers:
            if self._alone and self._routes and caller.limits.tokens:
                raise ValueError(
                    f"{caller.name} has tokens_per_minute, which a router counts only "
                    "with OPTION_LIMITS_URL, here and on the servers: they know the tokens"
                )
            if self._alone and self._processes > 1 and caller.limited:
                raise ValueError(
                    f"{caller.name} has limits, which {self._processes} processes count only "
                    "with OPTION_LIMITS_URL"
                )
        return found

    def _read(self) -> Keys:
        assert self._file
        try:
            self._content = content(self._file)
            return self._parsed(self._content)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise SettingsError([f"{self._option}={str(self._file)!r}: {reason}"]) from None
