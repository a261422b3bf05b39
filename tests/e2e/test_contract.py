# SPDX-License-Identifier: Apache-2.0
"""vLLM keeps the port's contract, with a model and with an engine core that has none."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_calls import NO_MODEL, running
from tests.serving.engine import contract
from tests.support.models import tiny_lora

ADAPTER = "one@1"
ENGINES: dict[str, dict[str, Any]] = {
    "a model": {
        "distributed_executor_backend": None,
        "enable_lora": True,
        "max_lora_rank": 8,
        "disable_log_stats": None,
    },
    "no model": {"distributed_executor_backend": NO_MODEL},
}


class Vllm(contract.Subject):
    def __init__(self, engine: Any, adapter: str | None) -> None:
        self.engine = engine
        self.adapter = adapter

    def faulty(self) -> dict[str, Any]:
        # vLLM reads it after the stream has begun.
        return self.body(contract.LONG) | {"logit_bias": {"999999": 1}}

    def is_idle(self) -> bool:
        return not self.engine._client.get_num_unfinished_requests()

    async def kill(self) -> None:
        for process in self.engine._processes:
            os.kill(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module", params=ENGINES)
def check(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Any], None]]:
    """Runs a check with one engine."""
    options = {key: it for key, it in ENGINES[request.param].items() if it is not None}
    folder: Path = tmp_path_factory.mktemp("adapter")
    with running(**options, without=ENGINES[request.param].keys() - options.keys()) as run:
        has_adapters = options.get("enable_lora", False)
        if has_adapters:
            tiny_lora.write(folder, 1)
            run(lambda engine: engine.load_adapter(ADAPTER, folder))

        def of_engine(check: Any) -> None:
            adapter = ADAPTER if has_adapters else None
            run(lambda engine: asyncio.wait_for(check(Vllm(engine, adapter)), 200))

        yield of_engine


@pytest.mark.parametrize("number", range(len(contract.CHECKS)))
def test_contract(check: Callable[[Any], None], number: int) -> None:
    check(contract.CHECKS[number])
