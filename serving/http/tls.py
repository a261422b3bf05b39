# SPDX-License-Identifier: Apache-2.0
"""TLS to clients: a certificate and authorities that are reloaded when their files change."""

import asyncio
import functools
import logging
import ssl
from collections.abc import Awaitable, Callable, Set
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from lmi_config.options.declared import Settings
from lmi_config.options.settings import SettingsError
from serving.follow import FaultLog, changes, content, kept

if TYPE_CHECKING:
    from prometheus_client import Gauge

log = logging.getLogger(__name__)

WARNED_DAYS = (1, 3, 14)
"""A warning is logged this many days before a certificate expires."""
CHECK_S = 600.0
"""Seconds between two checks of the expiry."""
CHAIN = 10
"""Most certificates between a client's and its authority."""


def _now() -> datetime:
    return datetime.now(UTC)


class Authorities:
    """The authorities of clients' certificates, from a PEM file."""

    def __init__(self, content: bytes) -> None:
        try:
            self._all = frozenset(x509.load_pem_x509_certificates(content))
        except ValueError:  # OpenSSL accepts more than this reader
            self._all = frozenset()

    def lacks(self, before: "Authorities") -> bool:
        """Whether an earlier authority is missing."""
        return not before._all or not before._all <= self._all

    def trusted(self, certificates: Set[bytes]) -> set[bytes]:
        """Return the certificates, in DER, that lead to one of these authorities. A certificate
        does not if its client sent intermediate certificates.
        """
        return {it for it in certificates if self._trusts(it)}

    def _trusts(self, content: bytes) -> bool:
        try:
            certificate = x509.load_der_x509_certificate(content)
            return self._leads_here(certificate)
        except Exception as error:  # a client's data, which OpenSSL may read differently
            log.debug("a client's certificate cannot be read: %s", error)
            return False

    def _leads_here(self, certificate: x509.Certificate) -> bool:
        for _ in range(CHAIN):
            signer = next((it for it in self._all if _signed(certificate, it)), None)
            if signer is None:
                return False
            if signer.subject == signer.issuer:
                return True
            certificate = signer
        return False


def _signed(certificate: x509.Certificate, signer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(signer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


class ServerTls:
    """A server's certificate for its clients. Raises SettingsError if it cannot be used."""

    def __init__(self, settings: Settings, now: Callable[[], datetime] = _now) -> None:
        self._now = now
        self.context: ssl.SSLContext | None = None
        """The context of new connections; None without TLS. Each change of the files makes a new
        one, because a context never forgets an authority, and resumes the sessions that it has
        accepted.
        """
        self.on_distrust: Callable[[Authorities], Awaitable[None]] | None = None
        """Called with the remaining authorities of clients after one was removed."""
        given = (settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file)
        if not any(given):
            return
        if not settings.tls_cert_file or not settings.tls_key_file:
            raise SettingsError(["TLS needs both OPTION_TLS_CERT_FILE and OPTION_TLS_KEY_FILE"])
        self._files = [Path(file) for file in given if file]
        self._ca = settings.tls_client_ca_file
        self._warned: int | None = None  # days before the expiry, of the last warning
        try:
            self._content = self._read()
            self._shown = self._load(self._content)
        except (OSError, ValueError) as error:
            raise SettingsError([f"OPTION_TLS_CERT_FILE: {_reason(error)}"]) from None
        self.context = self._shown.context

    async def follow(self) -> None:
        """Reload the certificate when its files change, and warn before it expires, until
        cancelled. Connections stay open, except those of clients that are not trusted any more.
        """
        if self.context:
            await asyncio.gather(
                kept("certificate", self._follow_files), kept("certificate", self._follow_calendar)
            )
        await asyncio.Event().wait()

    async def _follow_files(self) -> None:
        faults = FaultLog("certificate and key", self._files[0], "certificate")
        found = changes(self._read, self._renewed, faults, self._content)
        async with aclosing(found):
            async for shown in found:
                before, self._shown = self._shown, shown
                self.context = shown.context
                log.info("certificate and key were reloaded from %s", self._files[0])
                self._check_calendar()
                if self._ca and self.on_distrust and shown.authorities.lacks(before.authorities):
                    await self.on_distrust(shown.authorities)

    async def _follow_calendar(self) -> None:
        while True:
            self._check_calendar()
            await asyncio.sleep(CHECK_S)

    def _check_calendar(self) -> None:
        _expiry().set(self._shown.expires.timestamp())
        due = warning_due(self._shown.expires, self._now())
        if due and (self._warned is None or due < self._warned):
            cert, expires = self._files[0], self._shown.expires
            log.warning("the certificate %s expires on %s", cert, f"{expires:%Y-%m-%d %H:%M} UTC")
        self._warned = due

    def _read(self) -> list[bytes]:
        return [content(file) for file in self._files]

    def _renewed(self, content: list[bytes]) -> "_Certificate":
        """Load the current content of the files. Raises ValueError."""
        try:
            return self._load(content)
        except (OSError, ValueError) as error:
            raise ValueError(_reason(error)) from None

    def _load(self, content: list[bytes]) -> "_Certificate":
        cert, key, *_ = self._files
        chain = x509.load_pem_x509_certificates(content[0])
        expires = min(certificate.not_valid_after_utc for certificate in chain)
        if expires <= self._now():
            raise ValueError(f"{cert} expired on {expires:%Y-%m-%d}; renew it")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(cert, key)
        if self._ca:
            try:
                context.load_verify_locations(self._ca)
            except ssl.SSLError:
                raise ValueError(f"{self._ca} (OPTION_TLS_CLIENT_CA_FILE) should be PEM") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return _Certificate(context, expires, Authorities(content[2] if self._ca else b""))


class _Certificate(NamedTuple):
    context: ssl.SSLContext
    expires: datetime
    authorities: Authorities


@functools.cache
def _expiry() -> "Gauge":
    """Created only with TLS; without a certificate the series would report an expired one."""
    from prometheus_client import Gauge  # a router sets its environment before this is imported

    return Gauge(
        "slipway_certificate_expiry_timestamp_seconds",
        "When the certificate that clients are shown expires, or the first one of its chain does.",
        multiprocess_mode="mostrecent",
    )


def warning_due(expires: datetime, now: datetime) -> int | None:
    """Return the smallest of WARNED_DAYS that the certificate's expiry has reached, or None."""
    left = (expires - now).total_seconds() / 86400
    return next((days for days in WARNED_DAYS if left <= days), None)


def pair(certificate: Path, key: Path) -> tuple[bytes, bytes]:
    """Read a certificate and its key, in PEM. Raises ValueError if they cannot be used."""
    try:
        found = content(certificate), content(key)
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:
        raise ValueError(_reason(error)) from None
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"certificate and key do not match, or are not PEM ({error.reason})"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return str(error)
