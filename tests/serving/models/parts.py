# SPDX-License-Identifier: Apache-2.0
"""A container with several models whose engine is the fake one, as in tests/serving/copies.

MODEL_SLOW has seconds that an answer takes. A model starts only if its folder has no file FAULT;
its content is the reason.
"""

import asyncio
import os
import sys
import time

from lmi_config.options.settings import SettingsError
from serving.copies.__main__ import be, run
from serving.copies.part import CopyPart, take
from serving.engine.base import EngineError
from serving.exit import failure, report
from serving.http.sockets import bound
from serving.observability import logs
from serving.process import adopt_orphans
from serving.protocol import COMPLETIONS
from serving.server.server import Server
from serving.server.startup import Runtime
from tests.fake_engine import FakeEngine

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
        engine = FakeEngine(settings.model_names)
        completions = engine.completions

        async def slowly(call, sink, usage):
            await asyncio.sleep(float(os.environ.get("MODEL_SLOW", "0")))
            await completions(call, sink, usage)

        engine.answers[COMPLETIONS] = slowly
        return Runtime(engine=engine, adapters=None, code=None, cache=None)

    async def live(listener):
        return await Server(listener, settings, start).run()

    adopt_orphans()
    with bound(settings.host, settings.port, backlog=100) as listener:
        return asyncio.run(live(listener))


def main():
    from serving.models import model_supervisor, offered, swaps  # whose series no child has

    logs.configure(os.environ)
    swaps.LEAST_WAIT_S = float(os.environ.get("LEAST_WAIT_S", "2"))
    model_supervisor.TROUBLE_S = float(os.environ.get("TROUBLE_S", "1"))
    try:
        found = offered.offers(dict(os.environ), {})
        assert found
        end = model_supervisor.supervise(found, PROGRAM)
    except SettingsError as error:
        end = failure(error)
    report(end)
    logs.flush()
    os._exit(end.code)


if __name__ == "__main__":
    if sys.argv[1:]:
        code = run(take(int(sys.argv[1])), child)
        time.sleep(0)
        os._exit(code)
    main()
