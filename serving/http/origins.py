# SPDX-License-Identifier: Apache-2.0
"""Which web pages may call. A browser sends the requests of any page, even to servers that listen
only on its own machine. A page can do harm without seeing the answer.
"""

import functools
import ipaddress
from collections.abc import Mapping

from serving.errors import Forbidden

_SAFE = ("GET", "HEAD", "OPTIONS")


class Origins:
    """The origins from which requests are taken: our own, none (what is no browser sends none), and
    those that are allowed.

    allowed: like `https://app.example`; `*` is any. host: the address that is listened on. Where it
    is the loopback address, requests have to name this machine by a name that nobody else can
    have: a page whose name leads to a server at first, and then to 127.0.0.1 (DNS rebinding), has
    our origin for a browser.
    """

    def __init__(self, allowed: tuple[str, ...], host: str) -> None:
        self._any = "*" in allowed
        self._allowed = {origin.rstrip("/").lower() for origin in allowed}
        self._hosts = {_host_of(origin) for origin in self._allowed}
        self._loopback = _is_loopback(host)

    def require(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise Forbidden where a foreign page sends the request, and it may change something."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self._loopback and not (_is_local(host) or host in self._hosts):
            raise Forbidden(
                f"the host {host!r:.100} is not this machine's: the server listens on a loopback "
                "address; OPTION_HOST=0.0.0.0 has it listen on all, and take any name"
            )
        if method in _SAFE or self._any:
            return
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if origin in self._allowed:
            return
        if origin:
            foreign = _host_of(origin) != host
        else:
            foreign = headers.get(b"sec-fetch-site") == b"cross-site"
        if foreign:
            raise Forbidden(
                f"a page of {origin or 'another site'!r:.200} may not do this; "
                "SERVING_CORS_ALLOWED_ORIGIN lists the origins that may"
            )


def _host_of(origin: str) -> str:
    """`app.example:80` of `http://app.example:80`; "" of `null`, which is nobody's."""
    return origin.partition("://")[2]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@functools.lru_cache(maxsize=256)  # a client names one host; heads bound its length
def _is_local(host: str) -> bool:
    """Whether no public name is meant: such a name has a dot in it, and is no address."""
    if host.startswith("["):
        return True
    name = host.partition(":")[0]
    if "." not in name or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
