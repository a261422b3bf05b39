# SPDX-License-Identifier: Apache-2.0
"""An endpoint that is applied to the stand-in for HyperPod's operator, which keeps it running."""

import contextlib
import threading
from collections.abc import Iterator

from tests.support.harness.wait import until
from tools.hyperpod_local.operator import Operator


@contextlib.contextmanager
def kept(operator: Operator, seconds: float = 60) -> Iterator[list[str]]:
    """The endpoint, once it is complete, and the stand-in's report on it."""
    said: list[str] = []
    ending = threading.Event()
    with operator:
        keeping = threading.Thread(target=operator.keep, args=(said.append, ending.wait))
        keeping.start()
        try:
            until(lambda: operator.complete, seconds)
            yield said
        finally:
            ending.set()
            keeping.join()
