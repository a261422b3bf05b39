# SPDX-License-Identifier: Apache-2.0
"""The tests' engine keeps the port's contract."""

import pytest

from serving.errors import EngineFailed
from tests.fake_engine import FakeEngine
from tests.serving.engine import contract

pytestmark = pytest.mark.anyio


class Fake(contract.Subject):
    def __init__(self):
        self.engine = FakeEngine()
        self.engine.loaded.append("one@1")
        self.engine.gate.clear()
        self.adapter = "one@1"

    def body(self, tokens):
        # A long answer takes time: it waits at the engine's gate.
        words = ["a"] * (tokens - 1) + ["wait" if tokens == 100 else "a"]
        return {"prompt": " ".join(words), "max_tokens": tokens}

    def faulty(self):
        return {"prompt": "a fault b c"}

    def is_idle(self):
        return self.engine.running == 0

    async def kill(self):
        self.engine.failure = "it died"

        async def dead(call, sink, usage):
            raise EngineFailed("it died")

        self.engine.answers = dict.fromkeys(self.engine.answers, dead)
        self.engine.gate.set()


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda it: it.__name__)
async def test_contract(check):
    await check(Fake())
