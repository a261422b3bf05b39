# SPDX-License-Identifier: Apache-2.0
"""Free ports of this machine."""

import contextlib
import itertools
import os
import random
import socket

PORTS = 1_500  # of one process; scripts/test knows it


def _first() -> int:
    """The first port of this process. It is below the ports of outgoing connections, so that none
    of these takes a port before its program uses it, or while the program is down. Each process of
    one test run has a separate range.

    SLIPWAY_FIRST_PORT is below 15,000 and begins the ranges of a run beside another one. Without
    it, the ranges of a run begin at random.
    """
    run = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))  # None: a random seed
    first = int(os.environ.get("SLIPWAY_FIRST_PORT") or run.randrange(15_000))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return 15_000 + (first + PORTS * worker) % 15_000


_CANDIDATES = itertools.count(_first())


def free(count: int = 1) -> int:
    """The first of `count` free ports in a row. No port is returned twice."""
    while True:
        found = list(itertools.islice(_CANDIDATES, count))
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in found:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return found[0]
