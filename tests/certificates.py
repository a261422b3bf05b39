# SPDX-License-Identifier: Apache-2.0
"""Certificates of servers on this machine."""

import subprocess
from pathlib import Path


def certify(folder: Path) -> None:
    """Make a certificate in the folder, and its authority: ca.pem."""
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    key = "-newkey rsa:2048 -nodes -keyout"
    for command in (
        f"req -x509 {key} ca.key -out ca.pem -subj /CN=authority -days 2",
        f"req {key} own.key -out own.csr -subj /CN=localhost",
        "x509 -req -in own.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names "
        "-out own.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
