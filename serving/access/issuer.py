# SPDX-License-Identifier: Apache-2.0
"""The issuer of JSON web tokens, whose public keys are fetched from it (OpenID Connect Discovery
1.0, RFC 7517).
"""

import asyncio
import json
import logging
import ssl
import time
from typing import TYPE_CHECKING

from lmi_config.options import parsers
from lmi_config.options.declared import Settings
from lmi_config.options.settings import SettingsError
from serving.access.tokens import Refused, Rules, TokenKey, UnknownKey, Verifier, key_set
from serving.aio import in_thread, set_within
from serving.errors import NotReady
from serving.follow import FaultLog

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

DISCOVERY = "/.well-known/openid-configuration"
REFRESH_S = 300.0
"""Seconds between two fetches of the keys."""
RETRY_S = 10.0
"""The same after a failure, or for a token with an unknown key."""
FETCH_S = 10.0
"""Timeout of a whole fetch."""
MAX_BYTES = 1024 * 1024
"""Most bytes of an answer."""
START_S, START_PAUSE_S = 30.0, 1.0
"""Seconds that a start waits for the keys, and seconds between two attempts."""
NOTED_S = 10.0
"""Seconds between two log lines with the same reason for a refused token."""


class Issuer:
    """Finds the tenants of an issuer's tokens.

    Raises SettingsError if its keys cannot be requested.
    """

    def __init__(self, settings: Settings) -> None:
        assert settings.jwt_issuer
        self._name = settings.jwt_issuer
        self._jwks_url = settings.jwt_jwks_url
        if not settings.jwt_audience:
            raise SettingsError(
                [
                    "OPTION_JWT_ISSUER needs OPTION_JWT_AUDIENCE, the issuer's name of this "
                    "server: without it, the issuer's tokens for other servers would be accepted"
                ]
            )
        if not self._jwks_url:
            try:
                parsers.https_url(self._name)
            except ValueError as error:
                raise SettingsError(
                    [
                        f"OPTION_JWT_ISSUER={self._name!r}: should be a URL, {error}; or set "
                        "OPTION_JWT_JWKS_URL"
                    ]
                ) from None
        rules = Rules(self._name, settings.jwt_audience, settings.jwt_tenant_claim)
        self._verifier = Verifier(rules)
        self._keys: tuple[TokenKey, ...] = ()
        self._faults = FaultLog("the issuer's keys", self._jwks_url or self._name, "issuer")
        self._wanted = asyncio.Event()
        self._noted: dict[str, tuple[float, int]] = {}  # reason → when logged, and its count since

    def tenant(self, token: bytes, now: float) -> str:
        """Return a token's tenant. now: in seconds since 1970. Raises Refused, and NotReady before
        there are keys.
        """
        if not self._verifier.ready:
            raise NotReady(
                "tokens cannot be verified yet: the issuer's keys are missing; try again"
            )
        try:
            return self._verifier.tenant(token, now)
        except Refused as error:
            if isinstance(error, UnknownKey):
                self._wanted.set()
            self._note(error)
            raise

    def _note(self, error: Refused) -> None:
        """Log why a token was refused, without the token; once in NOTED_S for each reason."""
        reason, now = str(error), time.monotonic()
        at, more = self._noted.get(reason, (-NOTED_S, 0))
        if now < at + NOTED_S:
            self._noted[reason] = at, more + 1
            return
        detail = f" ({str(error.detail)!r:.60})" if error.detail is not None else ""
        since = f"; and {more} before it" if more else ""
        log.warning("a token was refused: %s%s%s", reason, detail, since)
        self._noted[reason] = now, 0

    async def require(self) -> None:
        """Fetch the keys, and wait for them for START_S. Raises SettingsError."""
        ended = time.monotonic() + START_S
        while True:
            try:
                return await self._fetch()
            except ValueError as error:
                if time.monotonic() + START_PAUSE_S > ended:
                    source = "OPTION_JWT_JWKS_URL" if self._jwks_url else "OPTION_JWT_ISSUER"
                    raise SettingsError(
                        [f"{source}: {error}; the issuer's tokens need it"]
                    ) from None
            await asyncio.sleep(START_PAUSE_S)

    async def refresh(self) -> bool:
        """Fetch the keys; after a failure they stay as they were. Returns whether it succeeded."""
        try:
            await self._fetch()
        except Exception as error:  # the issuer is asked again after any exception
            self._faults.failed(error)
            return False
        self._faults.recovered()
        return True

    async def follow(self) -> None:
        """Fetch the keys repeatedly until cancelled; at once if there are none yet."""
        fresh = bool(self._keys) or await self.refresh()
        while True:
            await asyncio.sleep(RETRY_S)
            if fresh:
                await set_within(self._wanted, REFRESH_S - RETRY_S)
            self._wanted.clear()
            fresh = await self.refresh()

    async def _fetch(self) -> None:
        """Fetch the keys. Raises ValueError."""
        import httpx  # only needed with an issuer

        try:
            async with (
                asyncio.timeout(FETCH_S),
                httpx.AsyncClient(verify=ssl.create_default_context()) as client,
            ):
                url = self._jwks_url or await self._discovered(client)
                keys = await _get(client, url)
        except TimeoutError:
            raise ValueError(f"{self._name} did not answer within {FETCH_S:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(f"{self._name}: {error or type(error).__name__}") from None
        found = await in_thread(key_set, keys)
        if [it.name for it in found] != [it.name for it in self._keys]:
            names = ", ".join(repr(it.name) for it in found)
            log.info("%s signs tokens with %.500s", self._name, names)
        self._keys = found
        self._verifier.use(found)

    async def _discovered(self, client: "httpx.AsyncClient") -> str:
        """Return the URL of the issuer's keys, from its discovery document. Raises ValueError."""
        url = self._name.rstrip("/") + DISCOVERY
        content = await _get(client, url)
        try:
            said = json.loads(content)
            issuer, found = said["issuer"], said["jwks_uri"]
        except (LookupError, TypeError, RecursionError, ValueError):
            issuer = found = None
        if not isinstance(issuer, str) or not isinstance(found, str):
            raise ValueError(f"{url} should have issuer and jwks_uri")
        if issuer != self._name:
            raise ValueError(f"{url} is of the issuer {issuer!r:.100}, and not {self._name!r}")
        return parsers.https_url(found)


async def _get(client: "httpx.AsyncClient", url: str) -> bytes:
    content = bytearray()
    # A compressed kilobyte could become a megabyte before it is counted.
    headers = {"accept": "application/json", "accept-encoding": "identity"}
    async with client.stream("GET", url, headers=headers) as answer:
        if answer.status_code != 200:
            raise ValueError(f"{url} answered {answer.status_code}")
        async for part in answer.aiter_raw():
            content += part
            if len(content) > MAX_BYTES:
                raise ValueError(f"{url} answered with more than {MAX_BYTES} bytes")
    return bytes(content)
