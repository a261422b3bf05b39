# SPDX-License-Identifier: Apache-2.0
"""The replica of each stateful SageMaker session, learned from its answers."""

from collections import OrderedDict
from collections.abc import Mapping

from serving.cache_hints.intent import as_text, digest
from serving.protocol import CLOSED_SESSION_ID, NEW_SESSION_ID

LIMIT = 100_000
"""Sessions that are remembered."""


class SessionAffinity:
    """The replicas of the sessions that were used last, by the digests of their names."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[str, str] = OrderedDict()

    def replica(self, session: str) -> str | None:
        """The name of the session's replica, if known."""
        if session not in self._replicas:
            return None
        self._replicas.move_to_end(session)
        return self._replicas[session]

    def learn(self, headers: Mapping[bytes, bytes], replica: str, tenant: str | None) -> str | None:
        """Read an answer's head. Returns the session that the replica has begun or ended, if any.
        tenant: of the request.
        """
        if begun := headers.get(NEW_SESSION_ID):
            name = begun.partition(b";")[0]
        elif not (name := headers.get(CLOSED_SESSION_ID, b"")):
            return None
        session = digest(tenant, as_text(name.strip()))
        self.bind(session, replica if begun else "")
        return session

    def bind(self, session: str, replica: str) -> None:
        """The replica has the session; "" if the session has ended."""
        self._replicas.pop(session, None)
        if not replica:
            return
        self._replicas[session] = replica
        if len(self._replicas) > LIMIT:
            self._replicas.popitem(last=False)
