# SPDX-License-Identifier: Apache-2.0
"""The web pages that may send requests. A browser sends the requests of any page, even to servers
that only listen on the browser's machine. A page can do harm without seeing the answer.
"""

import functools
import ipaddress
from collections.abc import Mapping

from serving.errors import Forbidden

_SAFE = ("GET", "HEAD", "OPTIONS")
_FROM_PAGES = frozenset((b"origin", b"sec-fetch-site"))
"""Headers that only browsers send."""


class Origins:
    """The accepted origins of requests: our own, the allowed ones, and none, because only browsers
    send an origin.

    allowed: like `https://app.example`; `*` is any. host: the address that the server listens on.
    If it is the loopback address, a request's Host must be a name that only this machine can have.
    Otherwise DNS rebinding would work: a page whose name first leads to its own server, and then to
    127.0.0.1, has our origin for a browser.
    """

    def __init__(self, allowed: tuple[str, ...], host: str) -> None:
        self._any = "*" in allowed
        self._allowed = {origin.rstrip("/").lower() for origin in allowed}
        self._hosts = {_host_of(origin) for origin in self._allowed}
        self._loopback = _is_loopback(host)

    def require(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise Forbidden if a foreign page sends a request that may have effects."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self._loopback and not (_is_local(host) or host in self._hosts):
            raise Forbidden(
                f"the host {host!r:.100} is not this machine's: the server listens on a loopback "
                "address; OPTION_HOST=0.0.0.0 lets it listen on all, and accept any name"
            )
        if method in _SAFE or self._any or _FROM_PAGES.isdisjoint(headers):
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
    """Return `app.example:80` for `http://app.example:80`; "" for `null`, an unnamed origin."""
    return origin.partition("://")[2]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@functools.lru_cache(maxsize=256)  # a client names one host; heads bound its length
def _is_local(host: str) -> bool:
    """Whether the host is not a public DNS name, which has a dot in it, and is not an address."""
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
