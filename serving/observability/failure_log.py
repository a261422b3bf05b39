# SPDX-License-Identifier: Apache-2.0
"""One log line for a repeated failure."""

from collections.abc import Callable


class FailureLog:
    """Logs a failure when it begins, and not again before it has ended.

    log: a logger's method. message: with one `%s`, for the failure.
    """

    def __init__(self, log: Callable[..., None], message: str) -> None:
        self._log = log
        self._message = message
        self._logged = False

    def note(self, trouble: object | None) -> None:
        """Note the result of one try: its failure, or None."""
        if trouble is not None and not self._logged:
            self._log(self._message, trouble, stacklevel=2)
        self._logged = trouble is not None
