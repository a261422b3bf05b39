# SPDX-License-Identifier: Apache-2.0
"""One line for a trouble that occurs again and again."""

import logging

from serving.observability.failure_log import FailureLog

log = logging.getLogger(__name__)


def test_a_trouble_is_logged_once_until_it_has_ended(caplog):
    away = FailureLog(log.warning, "the store is away: %s")
    for trouble in (None, "refused", "timed out", None, None, "refused"):
        away.note(trouble)
    assert caplog.messages == ["the store is away: refused"] * 2
    assert {record.funcName for record in caplog.records} == {
        "test_a_trouble_is_logged_once_until_it_has_ended"
    }
