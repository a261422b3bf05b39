# SPDX-License-Identifier: Apache-2.0
"""`serve`, in front of the fake engine, or `route`, as a process with uvloop and few descriptors.

python -m tests.few_descriptors serve|route DESCRIPTORS SETTINGS, which are JSON. It prints its
port. SIGRTMIN makes it open files until no descriptor is left, and SIGRTMAX makes it close them.
"""

import json
import os
import resource
import signal
import socket
import sys
from typing import Any

import uvloop

from lmi_config.options.declared import Settings

taken: list[int] = []


def take(*_: object) -> None:
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        pass


def give(*_: object) -> None:
    while taken:
        os.close(taken.pop())


async def served(listener: socket.socket, settings: Settings) -> None:
    from serving.server.server import Server
    from serving.server.startup import Runtime
    from tests.fake_engine import FakeEngine

    async def start(note: Any) -> Runtime:
        engine = FakeEngine()
        engine.names = settings.model_names
        return Runtime(engine=engine, adapters=None, code=None, cache=None)

    await Server(listener, settings, start).run()


async def routed(listener: socket.socket, settings: Settings) -> None:
    from serving.router.router import Router

    await Router(settings, {}).run(listener)


def main(verb: str, descriptors: str, settings: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(descriptors),) * 2)
    signal.signal(signal.SIGRTMIN, take)
    signal.signal(signal.SIGRTMAX, give)
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    uvloop.run((served if verb == "serve" else routed)(listener, Settings(**json.loads(settings))))


if __name__ == "__main__":
    main(*sys.argv[1:])
