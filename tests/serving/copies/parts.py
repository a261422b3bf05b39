# SPDX-License-Identifier: Apache-2.0
"""A container with copies whose engine is the fake one: the supervisor, or one of its children.

`python -m tests.serving.copies.parts` is the supervisor; with a descriptor, as the supervisor
starts it, a child. COPY_FAILS has the copies of these numbers fail at their start, with the reason
COPY_FAULT. Copies that start while there is a file COPIES_END end a moment later. COPY_SLOW has
seconds that an answer takes.
"""

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from lmi_config.options.settings import SettingsError
from serving.copies import life, supervisor
from serving.copies.__main__ import be, run
from serving.copies.part import CopyPart, take
from serving.engine.base import EngineError
from serving.exit import failure, report
from serving.http.sockets import bound
from serving.observability import logs
from serving.process import adopt_orphans
from serving.protocol import COMPLETIONS
from serving.server.prepare import prepare
from serving.server.server import Server
from serving.server.startup import Runtime
from tests.fake_engine import FakeEngine

PROGRAM = (sys.executable, "-P", "-m", "tests.serving.copies.parts")


def child(part):
    if not isinstance(part, CopyPart):
        return be(part)
    settings = part.deployment.plan.settings
    number = str(part.number)
    subprocess.Popen(["sleep", "1000"])  # a worker of the copy's

    async def start(note):
        if without := part.deployment.shared.without_tiers:
            logging.getLogger("serving.copies").info("without tiers: %s", without)
        if number in os.environ.get("COPY_FAILS", "").split(","):
            raise EngineError(os.environ.get("COPY_FAULT", "CUDA out of memory"))
        if Path(os.environ.get("COPIES_END", "/nowhere")).exists():
            threading.Timer(0.2, os._exit, [7]).start()
        engine = FakeEngine(settings.model_names)
        completions = engine.completions

        async def slowly(call, sink, usage):
            await asyncio.sleep(float(os.environ.get("COPY_SLOW", "0")))
            await completions(call, sink, usage)

        engine.answers[COMPLETIONS] = slowly
        return Runtime(engine=engine, adapters=None, code=None, cache=None)

    async def live(listener):
        shared = part.deployment.shared
        others = shared.others if shared else None
        return await Server(listener, settings, start, others=others).run()

    adopt_orphans()
    with bound("127.0.0.1", settings.port, backlog=100) as listener:
        return asyncio.run(live(listener))


def main():
    logs.configure(os.environ)
    life.RESTART_S = 0.1
    supervisor.PATIENCE_S = float(os.environ.get("PATIENCE_S", "600"))
    try:
        end = supervisor.supervise(prepare(dict(os.environ)), {}, PROGRAM)
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
