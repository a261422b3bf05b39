# SPDX-License-Identifier: Apache-2.0
"""A container with several models and the fake engine, as in tests/serving/copies.

MODEL_SLOW: the seconds that an answer takes. A model whose folder has a file FAULT does not start;
the file's content is the reason. If it has a file INSOMNIA, its engine cannot sleep. FAKE_GPU: the
GiB of a GPU that the plan sees; the machine has then 64 GiB.
"""

import asyncio
import dataclasses
import os
import sys

from lmi_config.facts import machine
from serving.copies.__main__ import be, orders
from serving.copies.part import CopyPart
from serving.engine.base import EngineError
from serving.http.sockets import bound
from serving.process import adopt_orphans
from serving.server.server import Server
from tests.lmi_config.examples import GIB, H100
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
        runtime = slow_runtime(settings, float(os.environ.get("MODEL_SLOW", "0")))
        runtime.engine.insomnia = (settings.model_folder / "INSOMNIA").exists()
        return runtime

    async def serve(listener):
        return await Server(listener, settings, start, orders=orders(part)).run()

    adopt_orphans()
    with bound(settings.host, settings.port, backlog=100) as listener:
        return asyncio.run(serve(listener))


def with_gpu(found, gib):
    """The machine, with a GPU. gib: the size of its memory."""
    gpu = dataclasses.replace(H100, memory=gib * GIB)
    return dataclasses.replace(found, gpus=(gpu,), memory=64 * GIB, memory_free=64 * GIB)


def supervise():
    from serving.models import model_supervisor, offered, swaps  # whose series no child has

    swaps.LEAST_WAIT_S = float(os.environ.get("LEAST_WAIT_S", "2"))
    model_supervisor.TROUBLE_S = float(os.environ.get("TROUBLE_S", "1"))
    if gib := int(os.environ.get("FAKE_GPU", "0")):
        look = machine.look
        machine.look = lambda *given, **named: with_gpu(look(*given, **named), gib)
    found = offered.offers(dict(os.environ), {})
    assert found
    return model_supervisor.supervise(found, PROGRAM)


if __name__ == "__main__":
    live(child, supervise)
