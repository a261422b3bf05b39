# SPDX-License-Identifier: Apache-2.0
"""Accepts connections. A connection counts from then on, before its handshake, and its handshake
uses the certificates and authorities of that moment.

The event loops' own servers do not count connections during handshakes, and never change their TLS
context. When no descriptor is left, uvloop refuses all connections, and asyncio logs each attempt.
"""

import asyncio
import errno
import logging
import os
import resource
import socket
import time
from collections.abc import Callable

from serving.aio import in_thread
from serving.http.http1 import HANDSHAKE_S
from serving.http.sockets import Connections, Place
from serving.http.tls import Authorities, ServerTls

log = logging.getLogger(__name__)

TURN = 32
"""Connections that are accepted in one iteration of the event loop."""
KEPT = 64
"""The last descriptors of a process, or an eighth of all of them. Connections get only the first
half of them, for /ping. The rest is for requests in flight (to replicas, of files).
"""
HELD = 8
"""Descriptors that are held open, so that some can be freed when no other is left."""
PAUSE_S = 0.1
"""Seconds between two attempts to accept when no descriptor is left."""
WARNED_S = 10.0
"""Seconds between two warnings that descriptors are scarce."""
RETIRED_S = 50.0
"""Seconds for the answers on a connection whose client is not trusted any more."""
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """Accepts connections on a listening socket, until it is closed."""

    def __init__(
        self,
        listening: socket.socket,
        connections: Connections,
        protocol: Callable[[Place], asyncio.Protocol],
        tls: ServerTls,
    ) -> None:
        """protocol: makes the protocol of each connection, which notes in the connection's place
        when it is opened, idle, busy and released. Raises OSError if the socket cannot listen.
        """
        self._socket = listening
        self._connections = connections
        self._protocol = protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._shaking: dict[Place, asyncio.Task[None]] = {}
        self._most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._kept = min(KEPT, self._most // 8)
        self._held: list[int] = []
        self._pausing: asyncio.TimerHandle | None = None
        self._filling: asyncio.TimerHandle | None = None
        self._warned_at = -WARNED_S
        listening.setblocking(False)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
        listening.listen(2048)
        tls.on_distrust = self._distrust
        self._fill()
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Stop accepting, and break off handshakes. Connections stay open."""
        self._loop.remove_reader(self._socket)
        for timer in (self._pausing, self._filling):
            if timer:
                timer.cancel()
        for place in [*self._shaking]:
            place.release()
            place.abort()
        self._socket.close()
        while self._held:
            os.close(self._held.pop())

    async def wait_closed(self) -> None:
        """Return at once. Uvicorn calls it on its servers."""

    def _accept(self) -> None:
        for _ in range(TURN):
            try:
                accepted, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in SCARCE:
                    continue  # a client has already disconnected
                self._warn()
                if not self._held:
                    self._connections.evict()
                    self._pause()
                    return
                os.close(self._held.pop())
                self._filling = self._filling or self._loop.call_later(PAUSE_S, self._fill)
            else:
                self._take(accepted)

    def _take(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        # A new descriptor gets the lowest free number.
        left = self._most - accepted.fileno()
        if left <= self._kept:
            self._warn()
        place = Place(self._connections, self._tls.context)
        self._shaking[place] = self._loop.create_task(self._connect(place, accepted))
        scarce, last = left <= self._kept, left <= self._kept // 2
        self._connections.add(place, scarce=scarce, last=last)

    async def _connect(self, place: Place, accepted: socket.socket) -> None:
        """Run the handshake, and give the connection to its protocol."""
        if place not in self._connections.open:  # it was evicted before this task began
            accepted.close()
            del self._shaking[place]
            return
        place.abort = self._shaking[place].cancel
        limit = HANDSHAKE_S if place.context else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._protocol(place),
                accepted,
                ssl=place.context,
                ssl_handshake_timeout=limit,
                ssl_shutdown_timeout=limit,
            )
        except OSError as error:  # also errors of TLS
            log.debug("a connection could not be established: %s", error)
            place.release()
        except BaseException:
            place.release()
            raise
        finally:
            del self._shaking[place]

    # descriptors

    def _pause(self) -> None:
        self._loop.remove_reader(self._socket)
        self._pausing = self._loop.call_later(PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._pausing = None
        self._loop.add_reader(self._socket, self._accept)

    def _fill(self) -> None:
        """Open descriptors until HELD are held, now or as soon as there are free ones."""
        self._filling = None
        try:
            while len(self._held) < HELD:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            self._filling = self._loop.call_later(PAUSE_S, self._fill)

    def _warn(self) -> None:
        now = time.monotonic()
        if now - self._warned_at < WARNED_S:
            return
        self._warned_at = now
        log.warning(
            "file descriptors are scarce: hardly any of %d is left, and new connections are only "
            "answered on /ping if no other connection is idle; raise the limit (ulimit -n), or "
            "lower the number of clients",
            self._most,
        )

    # authorities

    async def _distrust(self, authorities: Authorities) -> None:
        """Close the connections of clients that these authorities do not trust."""
        older = [it for it in self._connections.open if it.context is not self._tls.context]
        for place in older:
            if place.certificate is None:  # its handshake uses the authorities of before
                place.abort()
        shown = {it.certificate for it in older if it.certificate is not None}
        trusted = await in_thread(authorities.trusted, shown)
        ended = [it for it in older if it.certificate not in trusted]
        for place in ended:
            place.retire()
            self._loop.call_later(RETIRED_S, place.abort)
        log.info(
            "an authority was removed from OPTION_TLS_CLIENT_CA_FILE: %d connections end",
            len(ended),
        )
