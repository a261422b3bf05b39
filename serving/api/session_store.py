# SPDX-License-Identifier: Apache-2.0
"""Stateful sessions: ids that SageMaker routes by, with an expiry that each use moves on.

A session is an empty file whose time of modification is its expiry, so that it outlives a restart
where its folder does, and servers that share the folder share its sessions. A file is made, touched
and removed in one step each, and none of these steps brings back what another server has removed.

The folder may be on a network, and slow: it is only touched in threads. Where it does not answer,
what this server remembers counts.
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
"""Steps that may be under way at once, each in a thread of its own; others wait."""

_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def _of(tenant: str | None, session: str) -> str:
    """The id with its tenant in it: its last 12 digits are of the tenant and the others, which stay
    as random as 74 bits are. So whose a session is outlives a restart, and all servers know.
    """
    if tenant is None:
        return session
    start = session[:-12]
    return start + hashlib.sha256(msgspec.json.encode((start, tenant))).hexdigest()[:12]


class SessionStore:
    """The sessions in a folder.

    seconds: how long one lives after its last use. limit: how many are remembered. One more takes
    the place of one that has expired, else of the oldest that was never used, else of the one that
    was not used for longest: beginning sessions ends nobody's but those that were only begun. An
    expired one is remembered for at most `seconds` more, so that its client learns why.
    """

    def __init__(
        self, folder: Path, seconds: int, limit: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder = _Folder(folder)
        self._seconds = seconds
        self._limit = limit
        self._clock = clock
        self._expires: OrderedDict[str, float] = OrderedDict()
        """Sessions, that which expires first being the first."""
        self._unused: dict[str, None] = {}
        """Those that were begun here and have not been used, the oldest first."""
        self._unsaved: set[str] = set()
        """Those that have no file."""
        self._read = False
        self._threads = asyncio.Semaphore(THREADS)

    async def create(self, tenant: str | None = None) -> tuple[str, str]:
        """Begin a session. Returns its id, and the id with its expiry as a header has it.

        tenant: whose it is, None where tenants are not distinguished. Nobody else can use it.
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
            log.warning("a session will not outlive a restart: %s", error or "the disk is slow")
        moment = datetime.fromtimestamp(expires, UTC)
        return session, f"{session}; Expires={moment:%Y-%m-%dT%H:%M:%SZ}"

    async def use(self, session: str, tenant: str | None = None) -> None:
        """Move a session's expiry on.

        Raises BadRequest for one that is unknown, closed, another tenant's or has expired, and
        NotReady where that cannot be known.
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
        """The expiry of a session by its file, which is moved on; None where there is no file."""
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
        """A request of this session was answered: it counts as used."""
        self._unused.pop(session, None)

    async def close(self, session: str, tenant: str | None = None) -> None:
        """End a session. Raises what use() does."""
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
        """Forget what expired long ago, and what has to give way to one more. Returns them."""
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
        """Remember what was there before, as used."""
        with contextlib.suppress(OSError):
            known = await self._on_disk(self._folder.all)
            every = sorted((known | self._expires).items(), key=lambda session: session[1])
            self._expires = OrderedDict(every)

    async def _on_disk(self, step: Callable[..., T], *arguments: object) -> T:
        """Have the folder do something. Raises OSError, TimeoutError too where it is slow."""
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
            task.exception()  # nobody may be waiting for it any more


class _Folder:
    """The files. All of it blocks, and raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def all(self) -> dict[str, float]:
        """The expiry of each session."""
        with os.scandir(self._path) as files:
            return {file.name: file.stat().st_mtime for file in files if _ID.fullmatch(file.name)}

    def create(self, session: str, expires: float, gone: Iterable[tuple[str, float]] = ()) -> None:
        """Make a session's file. gone: sessions to be removed, as remembered: not where another
        server has moved their expiry on.
        """
        folders.make(self._path)
        self._path.chmod(0o700)  # which fails where the folder is another user's
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
        """Move the expiry on, unless it is over. Returns what it was."""
        file = os.open(self._path / session, os.O_RDONLY)  # NFS asks its server at each open()
        try:
            was = os.fstat(file).st_mtime
            if was >= now:
                os.utime(file, (expires, expires))
            return was
        finally:
            os.close(file)

    def remove(self, session: str) -> None:
        (self._path / session).unlink(missing_ok=True)
