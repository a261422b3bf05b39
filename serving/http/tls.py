# SPDX-License-Identifier: Apache-2.0
"""TLS towards clients: a certificate that is read anew when its files change."""

import asyncio
import logging
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from lmi_config.options.declared import Settings
from lmi_config.options.settings import SettingsError
from serving.access.follow import follow

log = logging.getLogger(__name__)


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
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            self._load(context)
        except (OSError, ValueError) as error:
            raise SettingsError([f"OPTION_TLS_CERT_FILE: {_reason(error)}"]) from None
        self.context = context

    async def follow(self) -> None:
        """Show a new certificate once its files change, until cancelled. Connections stay."""
        if self.context:
            what = f"the certificate {self._files[0]}"
            await follow(self._read, lambda _: self._renew(), what)
        await asyncio.Event().wait()

    def _read(self) -> list[bytes]:
        return [file.read_bytes() for file in self._files]

    def _renew(self) -> None:
        assert self.context
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # what fails leaves half of it
            self._load(self.context)
        except (OSError, ValueError) as error:
            raise ValueError(_reason(error)) from None

    def _load(self, context: ssl.SSLContext) -> None:
        cert, key, *_ = self._files
        for certificate in x509.load_pem_x509_certificates(cert.read_bytes()):
            if certificate.not_valid_after_utc <= self._now():
                raise ValueError(f"{cert} expired on {certificate.not_valid_after_utc:%Y-%m-%d}")
        context.load_cert_chain(cert, key)
        if self._ca:
            context.load_verify_locations(self._ca)
            context.verify_mode = ssl.CERT_REQUIRED


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"certificate and key do not go together, or are not PEM ({error.reason})"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return str(error)
