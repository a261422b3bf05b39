# SPDX-License-Identifier: Apache-2.0
"""A container with several models and the fake engine, as in tests/serving/copies.

MODEL_SLOW: the seconds that an answer takes. A model whose folder has a file FAULT does not start;
the file's content is the reason.
"""

import asyncio
import os
import sys

from serving.copies.__main__ import be
from serving.copies.part import CopyPart
from serving.engine.base import EngineError
from serving.http.sockets import bound
from serving.process import adopt_orphans
from serving.server.server import Server
from tests.serving.copies.fake_child import live, slow_runtime

PROGRAM = (sys.executable, "-P", "-m", "tests.serving.models.parts")


def child(part):
    if not isinstance(part, CopyPart):
        return be(part)
    settings = part.deployment.plan.settings

    async def start(note):
        assert settings.model_folder
        fault = settings.model_folder / "FAULT"
        if fault.exists():
            raise EngineError(fault.read_text())
        return slow_runtime(settings, float(os.environ.get("MODEL_SLOW", "0")))

    async def serve(listener):
        return await Server(listener, settings, start).run()

    adopt_orphans()
    with bound(settings.host, settings.port, backlog=100) as listener:
        return asyncio.run(serve(listener))


def supervise():
    from serving.models import model_supervisor, offered, swaps  # whose series no child has

    swaps.LEAST_WAIT_S = float(os.environ.get("LEAST_WAIT_S", "2"))
    model_supervisor.TROUBLE_S = float(os.environ.get("TROUBLE_S", "1"))
    found = offered.offers(dict(os.environ), {})
    assert found
    return model_supervisor.supervise(found, PROGRAM)


if __name__ == "__main__":
    live(child, supervise)
