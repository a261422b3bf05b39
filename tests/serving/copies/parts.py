# SPDX-License-Identifier: Apache-2.0
"""A container with copies and the fake engine: the supervisor, or one of its children.

`python -m tests.serving.copies.parts` is the supervisor, or a server if there is one copy; with a
descriptor, as the supervisor starts it, it is a child. COPY_FAILS: the numbers of the copies that
fail at their start, with the reason COPY_FAULT. If the file COPIES_END exists, copies that start
end a moment later. COPY_SLOW: the seconds that an answer takes. COPY_LONGEST: the maximum bytes of
another copy's answer to a line of a batch.
"""

import asyncio
import dataclasses
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

from serving.batch import lanes
from serving.copies import life, supervisor
from serving.copies.__main__ import be
from serving.copies.part import CopyPart
from serving.engine.base import EngineError
from serving.http.sockets import bound
from serving.process import adopt_orphans
from serving.server.prepare import prepare
from serving.server.server import Server
from serving.server.startup import _register_adapters
from tests.serving.copies.fake_child import live, slow_runtime

PROGRAM = (sys.executable, "-P", "-m", "tests.serving.copies.parts")


def child(part):
    if not isinstance(part, CopyPart):
        return be(part)
    number = str(part.number)
    subprocess.Popen(["sleep", "1000"])  # a worker of the copy's

    async def start(note):
        assert part.deployment.shared
        if without := part.deployment.shared.without_tiers:
            logging.getLogger("serving.copies").info("without tiers: %s", without)
        if number in os.environ.get("COPY_FAILS", "").split(","):
            raise EngineError(os.environ.get("COPY_FAULT", "CUDA out of memory"))
        if Path(os.environ.get("COPIES_END", "/nowhere")).exists():
            threading.Timer(0.2, os._exit, [7]).start()
        return await runtime(part.deployment)

    return serve(part.deployment, start)


async def runtime(deployment):
    settings = deployment.plan.settings
    found = slow_runtime(settings, float(os.environ.get("COPY_SLOW", "0")))
    folder = Path(settings.model_id)
    adapters = await _register_adapters(deployment.plan, folder, found.engine)
    return dataclasses.replace(found, adapters=adapters)


def serve(deployment, start):
    """A server with the fake engine."""
    settings = deployment.plan.settings

    async def run(listener):
        others = deployment.shared.others if deployment.shared else None
        return await Server(listener, settings, start, others=others).run()

    lanes.LARGEST = int(os.environ.get("COPY_LONGEST", lanes.LARGEST))
    adopt_orphans()
    with bound("127.0.0.1", settings.port, backlog=100) as listener:
        return asyncio.run(run(listener))


def supervise():
    life.RESTART_S = 0.1
    supervisor.PATIENCE_S = float(os.environ.get("PATIENCE_S", "600"))
    deployment = prepare(dict(os.environ))
    if deployment.plan.copies:
        return supervisor.supervise(deployment, {}, PROGRAM)
    return serve(deployment, lambda note: runtime(deployment))


if __name__ == "__main__":
    live(child, supervise)
