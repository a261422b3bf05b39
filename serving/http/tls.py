# SPDX-License-Identifier: Apache-2.0
"""TLS towards clients: a certificate that is read anew when its files change."""

import asyncio
import functools
import logging
import ssl
from collections.abc import Callable
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509

from lmi_config.options.declared import Settings
from lmi_config.options.settings import SettingsError
from serving.follow import FaultLog, changes

if TYPE_CHECKING:
    from prometheus_client import Gauge

log = logging.getLogger(__name__)

WARNED_DAYS = (1, 3, 14)
"""Before a certificate expires there is a warning at each of these."""
CHECK_S = 600.0
"""Between two looks at the calendar."""


def _now() -> datetime:
    return datetime.now(UTC)


class ServerTls:
    """What a server shows its clients. Raises SettingsError where it cannot be used."""

    def __init__(self, settings: Settings, now: Callable[[], datetime] = _now) -> None:
        self._now = now
        self.context: ssl.SSLContext | None = None
        """None where there is no TLS."""
        given = (settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file)
        if not any(given):
            return
        if not settings.tls_cert_file or not settings.tls_key_file:
            raise SettingsError(["TLS needs both OPTION_TLS_CERT_FILE and OPTION_TLS_KEY_FILE"])
        self._files = [Path(file) for file in given if file]
        self._ca = settings.tls_client_ca_file
        self._warned: int | None = None  # days before the end
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            self._content = self._read()
            self._expires = self._load(context)
        except (OSError, ValueError) as error:
            raise SettingsError([f"OPTION_TLS_CERT_FILE: {_reason(error)}"]) from None
        self.context = context

    async def follow(self) -> None:
        """Show a new certificate once its files change, and warn before it expires, until
        cancelled. Connections stay.
        """
        if self.context:
            await asyncio.gather(self._follow_files(), self._follow_calendar())
        await asyncio.Event().wait()

    async def _follow_files(self) -> None:
        faults = FaultLog("certificate and key", self._files[0])
        found = changes(self._read, lambda _: self._renewed(), faults, self._content)
        async with aclosing(found):
            async for self._expires in found:
                log.info("certificate and key were read anew from %s", self._files[0])
                self._check_calendar()

    async def _follow_calendar(self) -> None:
        while True:
            self._check_calendar()
            await asyncio.sleep(CHECK_S)

    def _check_calendar(self) -> None:
        _expiry().set(self._expires.timestamp())
        due = warning_due(self._expires, self._now())
        if due and (self._warned is None or due < self._warned):
            cert, expires = self._files[0], self._expires
            log.warning("the certificate %s expires on %s", cert, f"{expires:%Y-%m-%d %H:%M} UTC")
        self._warned = due

    def _read(self) -> list[bytes]:
        return [file.read_bytes() for file in self._files]

    def _renewed(self) -> datetime:
        """Show what is in the files from now on. Returns when it expires. Raises ValueError."""
        assert self.context
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # what fails leaves half of it
            return self._load(self.context)
        except (OSError, ValueError) as error:
            raise ValueError(_reason(error)) from None

    def _load(self, context: ssl.SSLContext) -> datetime:
        cert, key, *_ = self._files
        chain = x509.load_pem_x509_certificates(cert.read_bytes())
        expires = min(certificate.not_valid_after_utc for certificate in chain)
        if expires <= self._now():
            raise ValueError(f"{cert} expired on {expires:%Y-%m-%d}")
        context.load_cert_chain(cert, key)
        if self._ca:
            context.load_verify_locations(self._ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return expires


@functools.cache
def _expiry() -> "Gauge":
    """Made where there is TLS: without a certificate the series would say that it expired."""
    from prometheus_client import Gauge  # a router sets its environment before this is imported

    return Gauge(
        "slipway_certificate_expiry_timestamp_seconds",
        "When the certificate that clients are shown expires, or the first one of its chain does.",
        multiprocess_mode="mostrecent",
    )


def warning_due(expires: datetime, now: datetime) -> int | None:
    """Which of WARNED_DAYS has come before a certificate expires; None where none has."""
    left = (expires - now).total_seconds() / 86400
    return next((days for days in WARNED_DAYS if left <= days), None)


def pair(certificate: Path, key: Path) -> tuple[bytes, bytes]:
    """A certificate and its key, in PEM. Raises ValueError where they cannot be used."""
    try:
        found = certificate.read_bytes(), key.read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:
        raise ValueError(_reason(error)) from None
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"certificate and key do not go together, or are not PEM ({error.reason})"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return str(error)
