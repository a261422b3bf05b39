# SPDX-License-Identifier: Apache-2.0
"""Free ports of this machine."""

import contextlib
import itertools
import random
import socket

# Below the ports of outgoing connections, so that none takes a port before it is used, or while
# its program is down. The system's randomness: tests seed the other.
_CANDIDATES = itertools.count(random.SystemRandom().randrange(15_000, 30_000))


def free(count: int = 1) -> int:
    """The first of so many in a row. None is returned twice."""
    while True:
        found = list(itertools.islice(_CANDIDATES, count))
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in found:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return found[0]
