# SPDX-License-Identifier: Apache-2.0
"""Free ports of this machine."""

import contextlib
import itertools
import os
import random
import socket

PORTS = 1_500  # of one process


def _first() -> int:
    """The first port of this process. It is below the ports of outgoing connections, so that none
    of these takes a port before its program uses it, or while the program is down. Each process of
    one test run has a separate range.
    """
    run = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))  # None: a random seed
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return 15_000 + (run.randrange(15_000) + PORTS * worker) % 15_000


_CANDIDATES = itertools.count(_first())


def free(count: int = 1) -> int:
    """The first of `count` free ports in a row. No port is returned twice."""
    while True:
        found = list(itertools.islice(_CANDIDATES, count))
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in found:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return found[0]
