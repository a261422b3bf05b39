# SPDX-License-Identifier: Apache-2.0
"""Listening, and the descriptors that connections take."""

import asyncio
import resource
import socket
import ssl
from collections.abc import Callable

RESERVED = 256
"""Descriptors for all but clients' connections: the engine, handlers, files, media."""
CONNECTIONS = 8_192
"""Clients' connections that any server has room for, where the limit of descriptors allows it."""
ROUTED = 16_384
"""The same for a router's process."""
SPARE = 64
"""Connections beyond the limit, which are answered on /ping alone."""


class CannotListen(Exception):
    """Nobody can listen on the port. The message says why."""

    def __init__(self, host: str, port: int, error: OSError) -> None:
        super().__init__(f"cannot listen on port {port} of {host}: {error.strerror}")


def bound(
    host: str, port: int, *, shared: bool = False, backlog: int | None = None
) -> socket.socket:
    """A socket that is bound. host: an address; `::` is all, also those of IPv4. shared: whether
    several processes listen on the port. backlog: of connections, if it already listens. Raises
    CannotListen.
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
    """An address that reaches a listener from its own machine. own: what names that where it
    listens on all addresses.
    """
    if host in ("0.0.0.0", "::"):
        host = own
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def raise_open_files() -> int:
    """Raise the limit of open descriptors as far as it goes, and return it: shells and containers
    often begin with 1,024, fewer than the connections that a server has when its queue is full.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def most_connections(queue: int) -> int:
    """How many connections a server may have with a queue of this length: as many as wait and are
    worked on, and more that are idle; fewer where descriptors are scarce.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(max(CONNECTIONS, 4 * queue), soft - min(RESERVED, soft // 2))


def most_routed() -> int:
    """How many connections a router may have: each may need another one to a replica."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(ROUTED, (soft - min(RESERVED, soft // 2)) // 2)


class Place:
    """A connection's among those of its server, from `accept` until it is closed."""

    __slots__ = ("_of", "abort", "certificate", "context", "retire", "spare")

    def __init__(self, of: "Connections", context: ssl.SSLContext | None) -> None:
        self._of = of
        self.context = context
        """The transport of its handshake."""
        self.spare = False
        """Whether it has one of the descriptors that are kept for /ping."""
        self.abort: Callable[[], object] = _nothing
        """Ends it at once."""
        self.retire: Callable[[], object] = _nothing
        """Ends it after the answers that are under way."""
        self.certificate: bytes | None = None
        """The client's, in DER. None if it has shown none, or not yet."""

    def opened(self, transport: asyncio.Transport, retire: Callable[[], object]) -> None:
        """Its protocol has it, after the handshake. It is idle."""
        self.abort, self.retire = transport.abort, retire
        if shaken := transport.get_extra_info("ssl_object"):
            self.certificate = shaken.getpeercert(binary_form=True)
        self.idle()

    def idle(self) -> None:
        """No request is being answered on it, from now on."""
        if self in self._of.open:
            self._of.idle.pop(self, None)
            self._of.idle[self] = None

    def busy(self) -> None:
        """A request is."""
        self._of.idle.pop(self, None)

    def release(self) -> None:
        """It is closed."""
        self._of.idle.pop(self, None)
        self._of.open.discard(self)

    @property
    def refusal(self) -> str:
        """Why no request but /ping is answered on it; "" where one is."""
        most = self._of.most
        if len(self._of.open) > most:
            return f"there are {most} connections, as many as the server takes"
        if self.spare:
            return "the server has no file descriptor left for more connections"
        return ""


class Connections:
    """The connections of a server, of which there are `most` and SPARE.

    One more takes the place of the one that has been idle for longest, that is, on which no request
    is being answered: also one that has not shaken hands. So connections alone cannot lock out a
    health check.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.open: set[Place] = set()
        self.idle: dict[Place, None] = {}
        """The idle connections, the longest idle first."""

    def add(self, place: Place, *, scarce: bool, last: bool) -> None:
        """Register an accepted connection, and close an idle one if there is no room for both.
        scarce: whether few descriptors are left. last: whether hardly any are.
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
        """Let the one go that has been idle for longest. Whether there was one."""
        oldest = next(iter(self.idle), None)
        if oldest is None:
            return False
        oldest.release()
        oldest.abort()
        return True


def _nothing() -> None: ...
