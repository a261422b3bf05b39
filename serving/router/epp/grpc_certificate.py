# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker's certificate, as gRPC takes it."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lmi_config.options.declared import SELF_SIGNED
from serving.follow import FaultLog
from serving.http.tls import pair

VALID = timedelta(days=3650)
"""A picker makes its certificate when it starts."""


def credentials(certificate: str, private_key: str) -> Any:
    """The certificate that gRPC shows gateways: files, which are reloaded for a connection once
    they have changed, or a generated certificate. Raises ValueError for files that cannot be used.
    """
    if certificate == SELF_SIGNED:
        return grpc.ssl_server_credentials([_self_signed()])
    files = _Files(Path(certificate), Path(private_key))
    return grpc.dynamic_ssl_server_credentials(files.configuration, files.renewed)


class _Files:
    """A certificate and its key. Raises ValueError."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = certificate, key
        self._faults = FaultLog("certificate and key", certificate, "certificate")
        self._known = pair(*self._files)
        self.configuration = _configuration(*self._known)

    def renewed(self) -> Any:
        """The current content of the files; None if it is unchanged or invalid."""
        try:
            found = pair(*self._files)
        except Exception as error:  # gRPC would go on without a word
            self._faults.failed(error)
            return None
        self._faults.recovered()
        if found == self._known:
            return None
        self._known = found
        return _configuration(*found)


def _configuration(certificate: bytes, key: bytes) -> Any:
    return grpc.ssl_server_certificate_configuration([(key, certificate)])


def _self_signed() -> tuple[bytes, bytes]:
    """A key and a self-signed certificate, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "slipway")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + VALID)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8
    plain = serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, form, plain)
    return private, certificate.public_bytes(serialization.Encoding.PEM)
