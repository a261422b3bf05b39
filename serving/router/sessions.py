"""Which replica has which of SageMaker's stateful sessions: its answer says so."""

from collections import OrderedDict
from collections.abc import Mapping

_NEW = b"x-amzn-sagemaker-new-session-id"
_CLOSED = b"x-amzn-sagemaker-closed-session-id"
LIMIT = 100_000


class Sessions:
    """Session → replica, for the sessions that were used last."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[str, str] = OrderedDict()

    def replica(self, session: str) -> str | None:
        """The name of the replica that has the session, where that is known."""
        if session not in self._replicas:
            return None
        self._replicas.move_to_end(session)
        return self._replicas[session]

    def learn(self, headers: Mapping[bytes, bytes], replica: str) -> str | None:
        """Read an answer's head. Gives the session that the replica has begun, if it has."""
        if _NEW in headers:
            session = headers[_NEW].partition(b";")[0].strip().decode("latin-1")
            self.bind(session, replica)
            return session
        if _CLOSED in headers:
            self._replicas.pop(headers[_CLOSED].strip().decode("latin-1"), None)
        return None

    def bind(self, session: str, replica: str) -> None:
        self._replicas[session] = replica
        if len(self._replicas) > LIMIT:
            self._replicas.popitem(last=False)
