# SPDX-License-Identifier: Apache-2.0
"""A model that makes room, while its server ends by itself."""

import asyncio
import socket

import pytest

from serving.models import model_supervisor
from serving.models.swaps import State
from serving.router.models.model_messages import Work
from tests.serving.models.test_offered import listed

pytestmark = pytest.mark.anyio


async def test_a_server_that_starts_anew_gets_no_order_to_sleep(tmp_path):
    boss = model_supervisor.Supervisor(listed({"a": {}}), None, tmp_path, ())
    (entry,) = boss._entries.values()
    boss._enter(entry, State.READY)
    boss._servers[entry.number] = object()  # type: ignore[assignment]
    entry.work = Work(0, 1, 1)
    boss._make_room(entry, sleeps=True)
    await asyncio.sleep(0.1)
    boss._enter(entry, State.COLD)  # the server has ended by itself, and there are requests
    boss._enter(entry, State.STARTING)
    entry.work = Work(1, 0, 2)
    entry.orders, theirs = socket.socketpair()
    with entry.orders, theirs:
        for end in (entry.orders, theirs):
            end.setblocking(False)
        await asyncio.wait(boss._works, timeout=1)
        with pytest.raises(BlockingIOError):
            theirs.recv(16)
    await boss._close()
