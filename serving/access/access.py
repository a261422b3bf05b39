# SPDX-License-Identifier: Apache-2.0
"""Who may ask: a request's headers → who sends it."""

import asyncio
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from lmi_config.options.declared import Settings
from lmi_config.options.settings import SettingsError
from serving.access import keys
from serving.access.caller import ANYBODY, Caller, Phase
from serving.access.follow import follow
from serving.access.identity import Signer
from serving.access.keys import Key, Keys
from serving.errors import Unauthorized
from serving.protocol import API_KEY, AUTHORIZATION, IDENTITY

CREDENTIALS = frozenset((AUTHORIZATION, API_KEY, IDENTITY))
"""Headers that say who sends a request. They go no further than here."""

_NO_KEYS: Keys = {}


def _now() -> datetime:
    return datetime.now(UTC)


class Access:
    """Who may ask, as the operator has it.

    Raises SettingsError where the file of keys cannot be used.
    """

    def __init__(
        self, settings: Settings, *, routes: bool = False, now: Callable[[], datetime] = _now
    ) -> None:
        """routes: whether requests go to other servers."""
        self._now = now
        self._file = Path(settings.api_keys_file) if settings.api_keys_file else None
        self._option = settings.named("api_keys_file")
        self._signer = Signer(settings.router_secret) if settings.router_secret else None
        self._single: dict[str, Key] = {}
        if settings.api_key:
            self._single[keys.digest(settings.api_key.encode())] = Key(Caller(name="default"))
        if settings.admin_api_key:
            admin = Caller(name="admin", tenant="admin", admin=True)
            self._single[keys.digest(settings.admin_api_key.encode())] = Key(admin)
        self._routes = routes
        self._alone = not settings.limits_url
        self._processes = settings.router_processes if routes else 1
        self._picks = routes and settings.epp
        self._listed = self._read() if self._file else _NO_KEYS
        if routes and self._file and not self._signer:
            raise SettingsError(
                [
                    f"{self._option} needs OPTION_ROUTER_SECRET, here and on the servers: by it "
                    "the router tells them whose request it is (`openssl rand -hex 32` makes one)"
                ]
            )
        # Of a server that has a secret the router's identity is asked for.
        self.closed = bool(settings.api_key or self._file or (self._signer and not routes))
        """Whether nobody is answered without a key."""
        self._anybody = Caller(admin=not settings.admin_api_key and not self.closed)
        own = settings.admin_api_key or settings.api_key
        self._own = f"Bearer {own}" if own else None

    def caller(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Who sends a request with these headers. Raises Unauthorized."""
        identities: set[bytes] = set()
        given: set[bytes] = set()
        for name, value in headers:
            if name == AUTHORIZATION:
                scheme, _, key = value.partition(b" ")
                given.add(key.strip() if scheme.lower() == b"bearer" else b"")
            elif name == API_KEY:
                given.add(value)
            elif name == IDENTITY:
                identities.add(value)
        if self._signer and identities:
            if len(identities) > 1:
                raise Unauthorized("the request has several identities of a router")
            return self._signer.caller(identities.pop())
        if len(given) == 1 and (found := self._key(given.pop())):
            return found
        if not self.closed:
            return self._anybody
        if len(given) > 1:
            raise Unauthorized("the request has several keys; send one")
        raise Unauthorized("send a valid API key, as `Authorization: Bearer KEY` or `x-api-key`")

    def _key(self, given: bytes) -> Caller | None:
        digest = keys.digest(given)
        key = self._single.get(digest) or self._listed.get(digest)
        if key is None:
            return None
        if key.expires and key.expires <= self._now():
            raise Unauthorized(f"the key {key.caller.name} has expired; ask for a new one")
        return key.caller

    def without_credentials(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """A request's headers for all that works on it, in which nobody's key is."""
        hidden = CREDENTIALS if self._guards else {IDENTITY}
        return [header for header in headers if header[0] not in hidden]

    @property
    def _guards(self) -> bool:
        return self.closed or bool(self._single)

    def identity(self, caller: Caller, phase: Phase = "") -> bytes | None:
        """What tells a server who sends the request that is passed on to it, that its limits were
        looked at, and which phase of it the server is to do; None where it reads the client's
        credentials itself.
        """
        if not self._signer:
            return None
        return self._signer.signed(msgspec.structs.replace(caller, counted=True, phase=phase))

    def own_headers(self) -> dict[str, str]:
        """The headers by which a router may ask its servers what it wants to know."""
        if self._signer:
            return {IDENTITY.decode(): self._signer.signed(ANYBODY).decode()}
        return {AUTHORIZATION.decode(): self._own} if self._own else {}

    async def follow(self) -> None:
        """Read the file of keys anew whenever it changes, until cancelled."""
        if self._file:
            await follow(self._file.read_bytes, self._set, f"the keys' file {self._file}")
        await asyncio.Event().wait()

    def _set(self, content: bytes) -> None:
        self._listed = self._counted(keys.parsed(content))

    def _counted(self, found: Keys) -> Keys:
        """The keys, once it is certain that their limits can be counted. Raises ValueError."""
        for key in found.values():
            limited = key.caller.limited
            if self._picks and limited:
                raise ValueError(
                    f"{key.caller.name} has limits, which are not counted for gateways (OPTION_EPP)"
                )
            if self._alone and self._routes and key.caller.limits.tokens:
                raise ValueError(
                    f"{key.caller.name} has tokens_per_minute, which a router counts with "
                    "OPTION_LIMITS_URL alone, here and on the servers: they know the tokens"
                )
            if self._alone and self._processes > 1 and limited:
                raise ValueError(
                    f"{key.caller.name} has limits, which {self._processes} processes count with "
                    "OPTION_LIMITS_URL alone"
                )
        return found

    def _read(self) -> Keys:
        assert self._file
        try:
            return self._counted(keys.read(self._file))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise SettingsError([f"{self._option}={str(self._file)!r}: {reason}"]) from None
