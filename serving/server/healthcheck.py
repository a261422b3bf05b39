# SPDX-License-Identifier: Apache-2.0
"""`python -m serving.server.healthcheck`: the image's health check. Its exit code is 0 if the
container's /ping answers that it is ready.
"""

import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmi_config.options import arguments, settings
from serving.http.sockets import local_url
from serving.observability import redaction
from serving.protocol import PING

PING_S = 4
"""Less than the 5 s after which the container engine ends the check."""

LARGEST = 64 * 1024
"""Bytes of an answer that are reported."""


def url(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the URL of a container's /ping.

    command: the command line of its PID 1: entrypoint.sh, Python, or an init that starts one of
    them. Raises SettingsError.
    """
    starts = [n for n, word in enumerate(command) if word.endswith(("/entrypoint.sh", "serving"))]
    words = command[starts[0] + 1 :] if starts else []
    verb, words, environ = arguments.called(words, environ) or ("serve", [], environ)
    argued = arguments.read(verb, words)
    redaction.hide(environ, argued)  # an error may quote the value
    read = settings.read(environ, argued)
    scheme = "https" if read.tls_cert_file else "http"
    return local_url(read.host, read.port, scheme=scheme, own="127.0.0.1") + PING


def fault(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Ask /ping. Returns the error, or None."""
    own = ssl.create_default_context()
    own.check_hostname = False  # its certificate is for another name than 127.0.0.1
    own.verify_mode = ssl.CERT_NONE
    direct = urllib.request.ProxyHandler({})
    opener = urllib.request.build_opener(direct, urllib.request.HTTPSHandler(context=own))
    try:
        with opener.open(url(command, environ), timeout=PING_S):
            return None
    except urllib.error.HTTPError as error:
        return error.read(LARGEST).decode(errors="replace")
    except (OSError, settings.SettingsError) as error:
        return redaction.redacted(str(error))


if __name__ == "__main__":
    sys.exit(fault(Path("/proc/1/cmdline").read_text().split("\0")[:-1], os.environ))
