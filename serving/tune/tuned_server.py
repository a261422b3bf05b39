# SPDX-License-Identifier: Apache-2.0
"""A server of `tune`: `serve` in a separate process, from its start to its end."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import httpx

from serving.lifecycle import GRACE_S
from serving.process import begin
from serving.protocol import PING

_EVERY_S = 0.2
_STOP_S = GRACE_S + 10
"""Seconds after which a server that does not end is killed."""
_HOST = "127.0.0.1"


class StartError(Exception):
    """A server did not become ready. The message is the server's own reason."""


class Server:
    """A running server, as a context manager.

    options: the file of its options. environ: its variables. log: gets its output. scheme: http or
    https, by its options.
    """

    def __init__(
        self, options: Path, environ: Mapping[str, str], log: Path, scheme: str = "http"
    ) -> None:
        with socket.socket() as found:
            found.bind((_HOST, 0))
            port = found.getsockname()[1]
        self.url = f"{scheme}://{_HOST}:{port}"
        self._environ, self._log = environ, log
        self._command = [sys.executable, "-P", "-m", "serving", "serve", "--config", str(options)]
        self._command += ["--host", _HOST, "--port", str(port), "--log-format", "json"]

    def __enter__(self) -> Self:
        with self._log.open("wb") as output:
            self._process = begin(self._command, self._environ, output)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()

    def ready(self) -> None:
        """Wait until it is ready. Raises StartError if it has ended; the server itself limits the
        time of its start.
        """
        with httpx.Client(base_url=self.url, timeout=10, verify=False) as client:
            while self._process.poll() is None:
                with contextlib.suppress(httpx.TransportError):
                    if client.get(PING).status_code == 200:
                        return
                time.sleep(_EVERY_S)
        raise StartError(self.reason())

    def ended(self) -> bool:
        return self._process.poll() is not None

    def reason(self) -> str:
        """Return the reason of its end, from its last line."""
        for line in reversed(self._log.read_text(errors="replace").splitlines()):
            with contextlib.suppress(ValueError, AttributeError):
                if reason := json.loads(line).get("reason"):
                    return str(reason)
        return f"exit code {self._process.poll()}; see {self._log}"
