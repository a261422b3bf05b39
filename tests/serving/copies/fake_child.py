# SPDX-License-Identifier: Apache-2.0
"""The fake child that the tests' supervisors share, and the end of their programs."""

import asyncio
import os
import sys

from lmi_config.options.settings import SettingsError
from serving.copies.__main__ import run
from serving.copies.part import take
from serving.exit import failure, report
from serving.observability import logs
from serving.protocol import COMPLETIONS
from serving.server.startup import Runtime
from tests.fake_engine import FakeEngine


def slow_runtime(settings, seconds):
    """A server's runtime whose completions take some seconds."""
    engine = FakeEngine(settings.model_names)
    completions = engine.completions

    async def slowly(call, sink, usage):
        await asyncio.sleep(seconds)
        await completions(call, sink, usage)

    engine.answers[COMPLETIONS] = slowly
    return Runtime(engine=engine, adapters=None, code=None, cache=None)


def live(child, supervise):
    """Run the child that a descriptor on the command line describes, or else the supervisor."""
    if sys.argv[1:]:
        os._exit(run(take(int(sys.argv[1])), child))
    logs.configure(os.environ)
    try:
        end = supervise()
    except SettingsError as error:
        end = failure(error)
    report(end)
    logs.flush()
    os._exit(end.code)
