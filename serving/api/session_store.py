# SPDX-License-Identifier: Apache-2.0
"""Stateful sessions: ids that SageMaker routes by, with an expiry that each use extends.

A session is an empty file whose modification time is its expiry. So sessions survive a restart if
their folder does, and servers that share the folder share its sessions. Creating, touching and
removing a file are atomic, and none of them restores a session that another server has removed.

The folder may be on a network, and slow. So only threads access it, and this server relies on its
memory while the folder does not answer.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from serving import folders
from serving.aio import in_thread
from serving.errors import BadRequest, NotReady

log = logging.getLogger(__name__)

T = TypeVar("T")

ANSWERS_S = 2.0
"""Seconds that a request waits for the folder."""
THREADS = 16
"""Most concurrent operations on the folder, each in a separate thread. Others wait."""

_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def _of(tenant: str | None, session: str) -> str:
    """Return a session's id with its tenant in it: its last 12 digits are a hash of the tenant and
    of the other digits, which keep 74 random bits. So the tenant survives a restart, and all
    servers can check it.
    """
    if tenant is None:
        return session
    start = session[:-12]
    return start + hashlib.sha256(msgspec.json.encode((start, tenant))).hexdigest()[:12]


class SessionStore:
    """The sessions in a folder.

    seconds: a session's lifetime after its last use. limit: the most remembered sessions. One more
    replaces an expired session, or else the oldest unused one, or else the least recently used one.
    So a client that only begins sessions ends no used session. An expired session is remembered for
    at most `seconds` more, so that its client learns the reason.
    """

    def __init__(
        self, folder: Path, seconds: int, limit: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder = _Folder(folder)
        self._seconds = seconds
        self._limit = limit
        self._clock = clock
        self._expires: OrderedDict[str, float] = OrderedDict()
        """Sessions and their expiry, the earliest first."""
        self._unused: dict[str, None] = {}
        """Sessions that were begun here and never used, the oldest first."""
        self._unsaved: set[str] = set()
        """Sessions without a file."""
        self._read = False
        self._threads = asyncio.Semaphore(THREADS)

    async def create(self, tenant: str | None = None) -> tuple[str, str]:
        """Begin a session. Returns its id, and the header's value with the id and its expiry.

        tenant: its tenant, or None without tenants. No other tenant can use the session.
        """
        if not self._read:
            self._read = True
            await self._read_folder()
        gone = self._make_room()
        session = _of(tenant, str(uuid.uuid4()))
        expires = self._keep(session)
        self._unused[session] = None
        try:
            await self._on_disk(self._folder.create, session, expires, gone)
        except OSError as error:
            self._unsaved.add(session)
            log.warning("a session will not survive a restart: %s", error or "the disk is slow")
        moment = datetime.fromtimestamp(expires, UTC)
        return session, f"{session}; Expires={moment:%Y-%m-%dT%H:%M:%SZ}"

    async def use(self, session: str, tenant: str | None = None) -> None:
        """Extend a session's expiry.

        Raises BadRequest for a session that is unknown, closed, expired or another tenant's, and
        NotReady if that cannot be known.
        """
        if not _ID.fullmatch(session) or session != _of(tenant, session):
            raise BadRequest(f"session not found: {session!r:.300}")
        now = self._clock()
        expires = self._expires.get(session)
        if session not in self._unsaved:
            expires = await self._used(session, now, expires)
        if expires is None:
            self._forget(session)
            raise BadRequest(f"session not found: {session!r:.300}")
        if expires < now:
            raise BadRequest(f"session expired: {session}")
        self._keep(session)

    async def _used(self, session: str, now: float, remembered: float | None) -> float | None:
        """Extend the expiry of a session's file. Returns the old one, or None without a file."""
        try:
            return await self._on_disk(self._folder.use, session, now, now + self._seconds)
        except FileNotFoundError:
            return None
        except OSError as error:
            if remembered is None and isinstance(error, TimeoutError):
                raise NotReady("the folder with the sessions does not answer; try again") from None
            log.warning("a session's file cannot be used: %s", error or "the disk is slow")
            return remembered

    def answered(self, session: str) -> None:
        """Note that a request of the session was answered: it counts as used."""
        self._unused.pop(session, None)

    async def close(self, session: str, tenant: str | None = None) -> None:
        """End a session. Raises what use() raises."""
        await self.use(session, tenant)
        self._forget(session)
        try:
            await self._on_disk(self._folder.remove, session)
        except OSError as error:
            log.warning("a session's file cannot be removed: %s", error or "the disk is slow")

    def _keep(self, session: str) -> float:
        expires = self._clock() + self._seconds
        self._expires[session] = expires
        self._expires.move_to_end(session)
        return expires

    def _forget(self, session: str) -> float | None:
        self._unused.pop(session, None)
        self._unsaved.discard(session)
        return self._expires.pop(session, None)

    def _make_room(self) -> list[tuple[str, float]]:
        """Forget sessions that expired long ago, and others until one more fits. Returns them."""
        now = self._clock()
        gone = []
        while self._expires:
            session, expires = next(iter(self._expires.items()))
            if expires + self._seconds >= now:
                if len(self._expires) < self._limit:
                    break
                if expires >= now:
                    session = next(iter(self._unused), session)
            gone.append((session, self._expires[session]))
            self._forget(session)
        return gone

    async def _read_folder(self) -> None:
        """Remember the folder's sessions, as used ones."""
        with contextlib.suppress(OSError):
            known = await self._on_disk(self._folder.all)
            every = sorted((known | self._expires).items(), key=lambda session: session[1])
            self._expires = OrderedDict(every)

    async def _on_disk(self, step: Callable[..., T], *arguments: object) -> T:
        """Run an operation on the folder. Raises OSError, which includes TimeoutError."""
        async with asyncio.timeout(ANSWERS_S):
            await self._threads.acquire()
        task = asyncio.ensure_future(in_thread(step, *arguments))
        task.add_done_callback(self._answered)
        await asyncio.wait({task}, timeout=ANSWERS_S)
        if not task.done():
            raise TimeoutError
        return task.result()

    def _answered(self, task: "asyncio.Future[T]") -> None:
        self._threads.release()
        if not task.cancelled():
            task.exception()  # retrieved here, because its caller may have left


class _Folder:
    """The files of sessions. Its methods block, and raise OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def all(self) -> dict[str, float]:
        """Return the expiry of each session."""
        with os.scandir(self._path) as files:
            return {file.name: file.stat().st_mtime for file in files if _ID.fullmatch(file.name)}

    def create(self, session: str, expires: float, gone: Iterable[tuple[str, float]] = ()) -> None:
        """Make a session's file. gone: forgotten sessions to remove, with their remembered expiry,
        unless another server has extended it.
        """
        folders.make(self._path)
        self._path.chmod(0o700)  # fails if the folder is another user's
        for other, known in gone:
            with contextlib.suppress(OSError):
                if (self._path / other).stat().st_mtime < known + 1:
                    self.remove(other)
        file = os.open(self._path / session, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.utime(file, (expires, expires))
        finally:
            os.close(file)

    def use(self, session: str, now: float, expires: float) -> float:
        """Extend the expiry, unless it has passed. Returns the old expiry."""
        file = os.open(self._path / session, os.O_RDONLY)  # NFS revalidates at each open()
        try:
            was = os.fstat(file).st_mtime
            if was >= now:
                os.utime(file, (expires, expires))
            return was
        finally:
            os.close(file)

    def remove(self, session: str) -> None:
        (self._path / session).unlink(missing_ok=True)
