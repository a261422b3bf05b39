# SPDX-License-Identifier: Apache-2.0
"""What the log says of a source of replicas that cannot be read."""

import logging

log = logging.getLogger(__name__)


class FaultLog:
    """Logs what keeps a source from being read: each reason once, until it can be read again."""

    def __init__(self, source: object) -> None:
        """source: what the log calls it."""
        self._source = source
        self._reason: str | None = None

    def failed(self, reason: str) -> None:
        """It could not be read."""
        if reason != self._reason:
            log.error("the replicas stay as they were, %s: %s", self._source, reason)
        self._reason = reason

    def recovered(self) -> None:
        """It could be read."""
        if self._reason:
            log.warning("the replicas are read from %s again", self._source)
        self._reason = None
