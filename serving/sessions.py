"""Stateful sessions: ids that SageMaker routes by, with an expiry that each use moves on.

A session is a JSON file, so that it outlives a restart where its folder does, and servers that
share the folder know each other's. Nothing but the expiry is in it.
"""

import contextlib
import logging
import re
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from serving.errors import BadRequest, NotReady

log = logging.getLogger(__name__)

_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class _Stored(msgspec.Struct):
    expires: float  # seconds since the epoch


class Sessions:
    """The sessions in a folder.

    seconds: how long one lives after its last use. limit: how many may live at once. An expired one
    is remembered for as long again, so that its client is told what has become of it.
    """

    def __init__(
        self, folder: Path, seconds: int, limit: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder
        self._seconds = seconds
        self._limit = limit
        self._clock = clock
        self._expires: dict[str, float] = {}
        for file in folder.glob("*.json"):
            self._read(file)

    def create(self) -> tuple[str, str]:
        """Begin a session. Returns its id, and the id with its expiry as a header tells it.

        Raises NotReady where there are as many as there may be.
        """
        now = self._clock()
        for session, expires in [*self._expires.items()]:
            if expires + self._seconds < now:
                self._read(self._file(session))
                if self._expires[session] + self._seconds < now:
                    self._remove(session)
        if sum(expires >= now for expires in self._expires.values()) >= self._limit:
            raise NotReady(f"there are {self._limit} sessions; OPTION_MAX_SESSIONS sets the limit")
        session = str(uuid.uuid4())
        self._store(session)
        moment = datetime.fromtimestamp(self._expires[session], UTC)
        return session, f"{session}; Expires={moment:%Y-%m-%dT%H:%M:%SZ}"

    def use(self, session: str) -> None:
        """Move a session's expiry on. Raises BadRequest for one that is unknown or has expired."""
        if not _ID.fullmatch(session):
            raise BadRequest(f"session not found: {session!r:.300}")
        if self._expires.get(session, 0) < self._clock():
            self._read(self._file(session))  # another server on the same folder may know more
        if session not in self._expires:
            raise BadRequest(f"session not found: {session!r:.300}")
        if self._expires[session] < self._clock():
            raise BadRequest(f"session expired: {session}")
        self._store(session)

    def close(self, session: str) -> None:
        """End a session. Raises BadRequest as use() does."""
        self.use(session)
        self._remove(session)

    def _read(self, file: Path) -> None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            stored = msgspec.json.decode(file.read_bytes(), type=_Stored)
            self._expires[file.stem] = stored.expires

    def _store(self, session: str) -> None:
        self._expires[session] = expires = self._clock() + self._seconds
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._folder.chmod(0o700)  # which fails where the folder is another user's
            self._file(session).write_bytes(msgspec.json.encode(_Stored(expires)))
        except OSError as error:
            log.warning("a session will not outlive a restart: %s", error)

    def _remove(self, session: str) -> None:
        del self._expires[session]
        with contextlib.suppress(OSError):
            self._file(session).unlink(missing_ok=True)

    def _file(self, session: str) -> Path:
        return self._folder / f"{session}.json"
