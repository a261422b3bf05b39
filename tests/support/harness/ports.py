# SPDX-License-Identifier: Apache-2.0
"""Free ports of this machine."""

import contextlib
import itertools
import os
import random
import socket

PORTS = 1_500  # of one process; scripts/test knows it


def _first() -> int:
    """Somewhere below the ports of outgoing connections, so that none takes a port before it is
    used, or while its program is down; of its own for each process of one run of the tests.

    SLIPWAY_FIRST_PORT, a number below 15,000, is where the ports of a run begin that has another
    one beside it; without it, chance says so.
    """
    run = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))  # None: as chance has it
    first = int(os.environ.get("SLIPWAY_FIRST_PORT") or run.randrange(15_000))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return 15_000 + (first + PORTS * worker) % 15_000


_CANDIDATES = itertools.count(_first())


def free(count: int = 1) -> int:
    """The first of so many in a row. None is returned twice."""
    while True:
        found = list(itertools.islice(_CANDIDATES, count))
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in found:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return found[0]
