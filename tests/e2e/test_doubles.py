# SPDX-License-Identifier: Apache-2.0
"""The tests' engine answers as the real one does: both get the same calls, and their answers are
compared in status and shape.
"""

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from serving.engine.vllm import VllmEngine
from serving.errors import ServingError
from tests.fake_engine import FakeEngine
from tests.serving.conftest import running
from tests.support.models import tiny_lora

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
FEW = {"max_tokens": 2, "temperature": 0}
MESSAGES = [{"role": "user", "content": "a b"}]
CALLS: list[tuple[str, str, Any]] = [
    ("GET", "/v1/models", None),
    ("GET", "/v1/nothing", None),
    ("GET", TEXT, None),
    ("POST", TEXT, {"prompt": "a b", **FEW}),
    ("POST", TEXT, {"prompt": ["a b", "c d"], **FEW}),
    ("POST", TEXT, {"prompt": [5, 6], **FEW}),
    ("POST", TEXT, {"prompt": "a b", "model": "lmi", **FEW}),
    ("POST", TEXT, {"prompt": "a b", "no_such_key": 1, **FEW}),
    ("POST", TEXT, {"prompt": "a b", "model": "other", **FEW}),
    ("POST", TEXT, {"prompt": "a b", "model": 5}),
    ("POST", TEXT, {"prompt": 5}),
    ("POST", TEXT, {"prompt": {"a": 1}}),
    ("POST", TEXT, {"prompt": None}),
    ("POST", TEXT, {}),
    ("POST", TEXT, []),
    ("POST", TEXT, b"{"),
    ("POST", TEXT, {"prompt": "a", "max_tokens": "many"}),
    ("POST", TEXT, {"prompt": "a", "temperature": "hot"}),
    ("POST", TEXT, {"prompt": "a", "stop": 5}),
    ("POST", CHAT, {"messages": MESSAGES, **FEW}),
    ("POST", CHAT, {"messages": MESSAGES, "model": "other"}),
    ("POST", CHAT, {"messages": "a b"}),
    ("POST", CHAT, {"messages": [5]}),
    ("POST", CHAT, {"prompt": "a b"}),
    ("POST", CHAT, {"messages": MESSAGES, "stream": "perhaps"}),
    ("POST", "/v1/embeddings", {"input": "a"}),
    ("POST", "/invocations", {"inputs": "a b", "parameters": {"max_new_tokens": 2}}),
    ("POST", "/invocations", {"inputs": "a b", "parameters": {"max_new_tokens": "many"}}),
    ("POST", "/invocations", {"prompt": "a b", "model": "other"}),
]


def content(body: Any) -> dict[str, Any]:
    return {"content": body} if isinstance(body, bytes) else {"json": body}


@pytest.fixture(scope="module")
def of_the_double() -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        async with running(model_id="tiny") as it:
            return [await it.client.request(m, p, **content(body)) for m, p, body in CALLS]

    return asyncio.run(ask())


def strays(double: Any, real: Any, where: str = "answer") -> list[str]:
    """The parts of the double's answer that the real answer lacks or has with another type."""
    if isinstance(double, dict) and isinstance(real, dict):
        found = [f"{where}.{key} is not there" for key in double.keys() - real.keys()]
        for key in double.keys() & real.keys():
            found += strays(double[key], real[key], f"{where}.{key}")
        return found
    if isinstance(double, list) and isinstance(real, list):
        return strays(double[0], real[0], f"{where}[0]") if double and real else []
    if double is None or real is None or isinstance(double, type(real)):
        return []
    return [f"{where} is {type(real).__name__}, not {type(double).__name__}"]


@pytest.mark.parametrize("number", range(len(CALLS)), ids=lambda it: f"{CALLS[it][1:]}"[:60])
def test_calls(server, of_the_double, number):
    method, path, body = CALLS[number]
    double, real = of_the_double[number], server.client.request(method, path, **content(body))
    assert double.status_code == real.status_code, (double.text, real.text)
    assert strays(double.json(), real.json()) == []


class _Client:
    """The part of vLLM's client that its registry of adapters calls."""

    model_config = SimpleNamespace(runner_type="generate", max_model_len=10, model="model")
    renderer = input_processor = None
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=1),
    )
    engine_core = SimpleNamespace(
        resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=[]))
    )

    async def add_lora(self, request):
        return True

    async def remove_lora(self, number):
        return True

    async def pin_lora(self, number):
        return True


def test_what_is_refused_of_adapters(tmp_path):
    """vLLM's own registry of adapters, without an engine below it."""
    tiny_lora.write(tmp_path, 1)
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    client = _Client()
    models = OpenAIServingModels(client, [BaseModelPath(name="model", model_path="model")])
    app = SimpleNamespace(state=SimpleNamespace(openai_serving_models=models))
    calls = ["load a", "load a", "pin a", "pin b", "unload b", "unload a", "unload a", "pin a"]
    calls += ["load a", "load b", "unload a", "load a", "unload b", "unload a"]

    async def outcomes(engine: Any) -> list[str]:
        found = []
        for call in calls:
            what, name = call.split()
            arguments = (name, tmp_path) if what == "load" else (name,)
            try:
                await getattr(engine, f"{what}_adapter")(*arguments)
                found.append("done")
            except ServingError as error:
                found.append(f"{type(error).__name__}: {error}")
        return found

    async def both() -> tuple[list[str], list[str]]:
        real = VllmEngine(app.state, None, client, "generate", False, None)  # type: ignore[arg-type]
        return await outcomes(FakeEngine()), await outcomes(real)

    double, real = asyncio.run(both())
    assert double == real
    assert double.count("done") == 9


def test_vllm_sleeps_as_the_engine_asks_it_to():
    """On a CPU vLLM refuses to sleep, so only the calls are compared."""
    from vllm.v1.engine.async_llm import AsyncLLM

    inspect.signature(AsyncLLM.sleep).bind(None, level=1)
    inspect.signature(AsyncLLM.wake_up).bind(None)
