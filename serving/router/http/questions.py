# SPDX-License-Identifier: Apache-2.0
"""A router's own questions to a server, over a connection that is kept between them."""

import asyncio
import ssl
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from serving.router.http.upstream import IdleConnections, Upstream, connect


class Told(NamedTuple):
    """A whole answer. headers: by their names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Questions:
    """Asks one server, one question at a time."""

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        """tls: for a server whose URL is encrypted."""
        self._url = urlsplit(url)
        self._tls = tls if self._url.scheme == "https" else None
        self._idle = IdleConnections()

    async def get(self, path: str, headers: Mapping[str, str], most: int, within: float) -> Told:
        """Ask for a path. most: bytes of an answer's body. within: seconds for the whole answer.
        Raises OSError, with TimeoutError among them.
        """
        # A decompressed answer could be a thousand times as large as the received bytes.
        lines = {"host": self._url.netloc, "accept-encoding": "identity", **headers}
        said = "".join([f"{name}: {value}\r\n" for name, value in lines.items()])
        head = f"GET {path} HTTP/1.1\r\n{said}\r\n".encode("latin-1")
        async with asyncio.timeout(within):
            if kept := self._idle.take():
                try:
                    return await _answered(kept, head, most)
                except ConnectionError:  # the replica closed it just as it was used again
                    pass
            host, port = self._url.hostname or "", self._url.port or 80
            new = await connect(host, port, self._tls, self._idle, decoding=True)
            return await _answered(new, head, most)

    def close(self) -> None:
        """Close the connection, and let no other be kept."""
        self._idle.close()


async def _answered(upstream: Upstream, head: bytes, most: int) -> Told:
    answer = _Answer(most)
    upstream.send(answer, head, b"", head_only=False, complete=True)
    try:
        return await answer.told
    except BaseException:
        upstream.drop()
        raise


class _Answer:
    """Receives an answer: the Listener of its connection."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._status = 0
        self._headers: Mapping[bytes, bytes] = {}
        self._body = bytearray()
        self.told: asyncio.Future[Told] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, head: bytes, headers: dict[bytes, bytes], body: bytes) -> bool:
        self._status, self._headers = status, headers
        self.on_data(body)
        return True

    def on_data(self, data: bytes) -> None:
        if self.told.done():  # its connection is about to be dropped
            return
        self._body += data
        if len(self._body) > self._most:
            self.told.set_exception(OSError(f"its answer has more than {self._most:,} bytes"))

    def on_end(self, *, keep_alive: bool) -> None:
        if not self.told.done():
            pairs = self._headers.items()
            named = {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}
            self.told.set_result(Told(self._status, named, bytes(self._body)))

    def on_lost(self, reason: str) -> None:
        if not self.told.done():
            self.told.set_exception(ConnectionError(reason))

    def on_writable(self) -> None:
        pass
