# SPDX-License-Identifier: Apache-2.0
"""Listening, and the descriptors that connections take."""

import asyncio
import resource
import socket
from typing import Any, Protocol

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
    several processes listen on the port. backlog: of connections, where it is to listen already.
    Raises CannotListen.
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
    """What reaches a listener from its own machine. own: what names that where it listens on all
    addresses.
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


class Connection(Protocol):
    """A client's connection."""

    transport: asyncio.Transport

    def __hash__(self) -> int: ...


class Connections:
    """The connections of a server, of which there are `most` and SPARE.

    One more takes the place of the one that has been idle for longest, that is, on which no request
    is being answered. So nobody can keep a health check out with connections alone.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.idle: dict[Connection, None] = {}
        """Those on which no request is being answered, the longest idle first."""

    def make_room(self, newest: "Connection", all_of_them: set[Any]) -> None:
        if len(all_of_them) <= self.most:
            return
        oldest = next(iter(self.idle))
        if oldest is newest and len(all_of_them) <= self.most + SPARE:
            return
        self.idle.pop(oldest)
        all_of_them.discard(oldest)
        oldest.transport.abort()
