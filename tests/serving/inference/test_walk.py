# SPDX-License-Identifier: Apache-2.0
"""One request's walk through the server: the modules that it enters, and how often its body is
read.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import BuiltinFunctionType, FrameType
from typing import Any

import msgspec
import pytest

from serving.user_code import Limits, start_user_code
from tests.serving.conftest import running
from tests.serving.lora.test_registry import register, registry, write

pytestmark = pytest.mark.anyio

SERVING = Path(__file__).parents[3] / "serving"
GROUND = {"aio", "cancellation", "errors", "lifecycle", "protocol"}
"""Every module may use them at any time."""
ASKING = {"takes", "needs_no_result"}
"""These ask whether the client keeps up, and get no token."""
CODE = """
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter

@input_formatter
async def parse(payload):
    return payload | {"rewritten": True}

@output_formatter
async def render(output):
    return output
"""
BODY = {"inputs": "a b c", "stream": True, "parameters": {"max_new_tokens": 3, "details": True}}
HEADER = {"X-Amzn-SageMaker-Adapter-Identifier": "one"}


@contextmanager
def entered(*more: Path) -> Iterator[list[str]]:
    """The modules of serving/, and of more folders, that a request enters: another module calls one
    of their functions.
    """
    folders = (SERVING, *more)
    names = tuple(map(str, folders))
    rooms: list[str] = []

    def room(frame: FrameType | None) -> str | None:
        """The module of the innermost function in one of the folders."""
        while frame:
            file = Path(frame.f_code.co_filename)
            for folder in folders:
                if file.is_relative_to(folder):
                    return str(file.relative_to(folder).with_suffix(""))
            frame = frame.f_back
        return None

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(names):
            return
        if frame.f_code.co_code[frame.f_lasti + 1]:  # RESUME's argument: the function resumes
            return
        if frame.f_code.co_name in ASKING:
            return
        here = room(frame)
        if here not in GROUND and here != room(frame.f_back):
            rooms.append(str(here))

    sys.setprofile(look)
    try:
        yield rooms
    finally:
        sys.setprofile(None)


@pytest.fixture
def decoded(monkeypatch):
    """The texts that serving/ and handlers/ decode."""
    texts: list[bytes] = []

    def counting(decode: Any) -> Any:
        def counted(text: Any, *given: Any, **named: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"].startswith(("serving.", "handlers.")):
                texts.append(text.encode() if isinstance(text, str) else bytes(text))
            return decode(text, *given, **named)

        return counted

    for name, module in list(sys.modules.items()):
        if not name.startswith(("serving.", "handlers.")):
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, BuiltinFunctionType) and value.__name__ == "decode":
                monkeypatch.setattr(module, key, counting(value))
    monkeypatch.setattr(msgspec.json, "decode", counting(msgspec.json.decode))
    monkeypatch.setattr(json, "loads", counting(json.loads))
    return texts


async def walked(
    tmp_path: Path,
    decoded: list[bytes],
    code: str,
    path: str = "/invocations",
    body: Mapping[str, object] = BODY,
) -> list[str]:
    """The modules that a request with an adapter enters. The texts that are decoded meanwhile are
    in `decoded`.

    code: the text of the model's model.py, which has formatters; "" for no file.
    """
    async with running() as served:
        engine = served.engine
        served.pipeline.adapters = registry(engine, tmp_path / "adapters", slots=(4, 4))
        folder = write(tmp_path / "adapters" / "one", 0)
        await register(served, "one", folder, preload="true")
        if code:
            (tmp_path / "model.py").write_text(code)
            served.pipeline.code = await start_user_code(tmp_path, tmp_path, Limits(20, 20, 0))
        decoded.clear()
        with entered() as rooms:
            answer = await served.post(path, body, headers=HEADER)
        assert (answer.status_code, len(engine.bodies)) == (200, 1)
        if served.pipeline.code:
            await served.pipeline.code.stop()
        return rooms


WALK = [
    "http/connections",
    "http/sockets",
    "api/app",
    "api/endpoint",
    "observability/access_log",
    "http/bodies",
    "http/origins",
    "access/access",
    "access/caller",
    "api/backend",
    "api/invocations",
    "inference/pipeline",
    "inference/admission",
    "lora/adapter_registry",
    "lora/slots",
    "inference/queue",
    "access/limits",
    "inference/request",
    "api/sessions",
    "inference/content/fields",
    "lora/adapter",
    "inference/prepared",
    "user_code",
    "inference/content/checks",
    "inference/content/media",
    "kv_cache/salt",
    "inference/isolated",
    "cache_hints/hints",
    "cache_hints/intent",
    "waiting/turns",
    "inference/relay",
    "engine/base",
    "observability/latency_targets",
    "observability/logs",
    "observability/redaction",
]
"""The modules in the order of their first entry. Admission asks the slots and the queue for their
waiting requests, long before the request reaches these modules.
"""
AGAIN = {
    "http/sockets": "the connection is idle again once it was answered",
    "http/connections": "each message goes out by the connection on which the request came",
    "access/access": "who sends it is read, and then hidden",
    "access/caller": "what its key allows: the path, the adapter",
    "access/limits": "a request is let in, given back, and charged for its tokens",
    "engine/base": "the tokens are added up",
    "api/app": "it finds the route, which has the request's record and then asks the handler",
    "api/invocations": "the body comes, and then what is to be done with it",
    "inference/pipeline": "it is the way itself: received, answered once, run",
    "inference/isolated": "what separates it from others, and the call once its turn has come",
    "inference/admission": "a request is admitted, under way, and at its end",
    "inference/queue": "its turn comes and ends",
    "waiting/turns": "the queue asks it for the next turn",
    "cache_hints/intent": "the id by the operator's key is read before all other hints",
    "inference/relay": "the engine calls it for each message",
    "kv_cache/salt": "the tenant is read from the head, the salt made from all",
    "api/sessions": "a body may be a call for a session; a request may be within one",
    "lora/adapter_registry": "an adapter is looked up by name, and kept while it is used",
    "lora/slots": "a place is taken and given back",
    "user_code": "the input's formatter, and the output's for each event",
    # Values that go with the request; their methods are called in every module.
    "http/bodies": "the share of memory, and headers",
    "inference/request": "the request",
    "inference/content/fields": "what its body says",
    "lora/adapter": "the adapter it goes to",
    "observability/access_log": "its record",
    "observability/logs": "its time as a line has it, and the line",
}
"""Modules that a request enters more than once, with the reasons."""


async def test_a_streamed_request_with_an_adapter_and_formatters_walks_one_way(tmp_path, decoded):
    rooms = await walked(tmp_path, decoded, CODE)
    assert list(dict.fromkeys(rooms)) == WALK
    assert {room for room, times in Counter(rooms).items() if times > 1} == AGAIN.keys()


OPENAI = {"prompt": "a b c", "stream": True}


@pytest.mark.parametrize(
    ("path", "body", "formatter", "decodes"),
    [
        ("/v1/completions", OPENAI, "", (2, 0, 0)),
        ("/v1/completions", OPENAI, CODE, (1, 2, 0)),
        ("/invocations", OPENAI, "", (2, 0, 0)),
        ("/invocations", BODY, "", (3, 0, 0)),
        ("/invocations", BODY, CODE, (1, 3, 0)),
    ],
)
async def test_how_often_bodies_are_decoded(tmp_path, decoded, path, body, formatter, decodes):
    """Three bodies: the client's, the formatter's result, and a body that was made for the engine.

    OpenAI's bodies are decoded twice: for their fields, whose limits protect all later steps, and
    for the engine, which gets values. LMI's bodies are decoded for their fields, and by the format,
    which makes the engine's values of them. To decode the fields' values one by one would read
    every byte just as often. No body is made for the engine.
    """
    await walked(tmp_path, decoded, formatter, path, body)
    rewritten = body | {"rewritten": True}
    texts = [
        found
        for text in decoded
        if isinstance(found := json.JSONDecoder().decode(text.decode()), dict)
    ]
    calls = [it for it in texts if "prompt" in it and it not in (body, rewritten)]
    assert (texts.count(body), texts.count(rewritten), len(calls)) == decodes
