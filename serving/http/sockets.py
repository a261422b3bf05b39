# SPDX-License-Identifier: Apache-2.0
"""Listening, and the descriptors that connections take."""

import asyncio
import resource
import socket
import ssl
from collections.abc import Callable

RESERVED = 256
"""Descriptors for other uses than clients' connections: the engine, handlers, files, media."""
CONNECTIONS = 8_192
"""Clients' connections that every server allows, if the limit of descriptors does."""
ROUTED = 16_384
"""The same for a router's process."""
SPARE = 64
"""Connections beyond the limit. Only /ping is answered on them."""


class CannotListen(Exception):
    """The port cannot be listened on. The message says why."""

    def __init__(self, host: str, port: int, error: OSError) -> None:
        super().__init__(f"cannot listen on port {port} of {host}: {error.strerror}")


def bound(
    host: str, port: int, *, shared: bool = False, backlog: int | None = None
) -> socket.socket:
    """Return a bound socket. host: an address; `::` is all addresses, also those of IPv4. shared:
    whether several processes listen on the port. backlog: the backlog of connections if the socket
    listens, or None. Raises CannotListen.
    """
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
    if made.family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != "::")
    try:
        made.bind((host, port))
        if backlog is not None:
            made.listen(backlog)
    except OSError as error:
        made.close()
        raise CannotListen(host, port, error) from None
    return made


def local_url(host: str, port: int, *, scheme: str = "http", own: str = "localhost") -> str:
    """Return a URL that reaches a listener from its own machine. own: the host's name in it if the
    listener listens on all addresses.
    """
    if host in ("0.0.0.0", "::"):
        host = own
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def raise_open_files() -> int:
    """Raise the limit of open descriptors to its maximum, and return it. Shells and containers
    often set 1,024, fewer than the connections of a server whose queue is full.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def most_connections(queue: int) -> int:
    """Return the most connections of a server with a queue of this length: enough for waiting and
    running requests, and for idle connections; fewer if descriptors are scarce.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(max(CONNECTIONS, 4 * queue), soft - min(RESERVED, soft // 2))


def most_routed() -> int:
    """Return the most connections of a router. Each may need another one to a replica."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(ROUTED, (soft - min(RESERVED, soft // 2)) // 2)


class Place:
    """A connection's place among its server's connections, from `accept` until it is closed."""

    __slots__ = ("_of", "abort", "certificate", "context", "retire", "spare")

    def __init__(self, of: "Connections", context: ssl.SSLContext | None) -> None:
        self._of = of
        self.context = context
        """The TLS context of its handshake, or None without TLS."""
        self.spare = False
        """Whether it uses one of the descriptors that are reserved for /ping."""
        self.abort: Callable[[], object] = _nothing
        """Closes it at once."""
        self.retire: Callable[[], object] = _nothing
        """Closes it after the answers in flight."""
        self.certificate: bytes | None = None
        """The client's certificate, in DER; None without one, or before the handshake."""

    def opened(self, transport: asyncio.Transport, retire: Callable[[], object]) -> None:
        """Note that its protocol has it, after the handshake. It is idle."""
        self.abort, self.retire = transport.abort, retire
        if shaken := transport.get_extra_info("ssl_object"):
            self.certificate = shaken.getpeercert(binary_form=True)
        self.idle()

    def idle(self) -> None:
        """Note that no request is being answered on it."""
        if self in self._of.open:
            self._of.idle.pop(self, None)
            self._of.idle[self] = None

    def busy(self) -> None:
        """Note that a request is being answered on it."""
        self._of.idle.pop(self, None)

    def release(self) -> None:
        """Note that it is closed. It no longer keeps the connection, which keeps it: memory of a
        cycle would stay until Python's collector looks at all objects.
        """
        self._of.idle.pop(self, None)
        self._of.open.discard(self)
        self.abort = self.retire = _nothing

    @property
    def refusal(self) -> str:
        """The reason why it only answers /ping, or ""."""
        most = self._of.most
        if len(self._of.open) > most:
            return f"there are {most} connections, as many as the server accepts"
        if self.spare:
            return "the server has no file descriptor left for more connections"
        return ""


class Connections:
    """The connections of a server: at most `most`, and SPARE more.

    A further connection replaces the one that has been idle for longest. A connection is idle if no
    request is being answered on it, also before its handshake. So open connections alone cannot
    lock out a health check.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.open: set[Place] = set()
        self.idle: dict[Place, None] = {}
        """The idle connections, the longest idle first."""

    def add(self, place: Place, *, scarce: bool, last: bool) -> None:
        """Register an accepted connection, and close an idle one if there is no room for both.

        scarce: whether few descriptors are left. last: whether hardly any are left.
        """
        self.open.add(place)
        self.idle[place] = None
        if len(self.open) <= self.most and not scarce:
            return
        alone = next(iter(self.idle)) is place
        if alone and not last and len(self.open) <= self.most + SPARE:
            place.spare = scarce
        else:
            self.evict()

    def evict(self) -> bool:
        """Close the connection that has been idle for longest. Returns whether there was one."""
        oldest = next(iter(self.idle), None)
        if oldest is None:
            return False
        abort = oldest.abort
        oldest.release()
        abort()
        return True


def _nothing() -> None: ...
