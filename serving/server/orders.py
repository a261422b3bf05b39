# SPDX-License-Identifier: Apache-2.0
"""Orders of the supervisor of several models to a model's server: let the engine sleep, wake it up.

The two processes have a pair of sockets, which no other process has. An order is answered before
the next one comes.
"""

import asyncio
import logging
import socket

from serving.engine.base import Engine

log = logging.getLogger(__name__)

SLEEP, WAKE = b"sleep", b"wake"
DONE, FAILED = b"done", b"failed"
LONGEST = 16
"""Maximum bytes of an order, and of an answer."""


async def give(orders: socket.socket, order: bytes) -> bool:
    """Give an order. Returns whether it was carried out. orders: the supervisor's socket."""
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(orders, order)
        return await loop.sock_recv(orders, LONGEST) == DONE
    except OSError:  # the server has ended
        return False


async def obey(orders: socket.socket, engine: Engine) -> None:
    """Carry out orders until the supervisor's end is closed. orders: the server's socket."""
    loop = asyncio.get_running_loop()
    while order := await loop.sock_recv(orders, LONGEST):
        try:
            await (engine.sleep() if order == SLEEP else engine.wake_up())
        except Exception:
            log.exception("the engine did not %s", order.decode(errors="replace"))
            await loop.sock_sendall(orders, FAILED)
        else:
            await loop.sock_sendall(orders, DONE)
