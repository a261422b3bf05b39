# SPDX-License-Identifier: Apache-2.0
"""Users' model.py files, in separate processes, behind a real server with a fake engine."""

import asyncio
import contextlib
import io
import json
import logging
import os
import shutil
import sys
from pathlib import Path
from string import ascii_lowercase

import psutil
import pytest
import uvloop

from serving.errors import UserCodeFailed
from serving.observability import logs, redaction
from serving.user_code import Limits, UserCode, start_user_code
from tests.support.harness.wait import turns

pytestmark = pytest.mark.anyio

COMPAT = Path(__file__).parent.parent / "compat"
LIMITS = Limits(formatter_s=3, handler_s=3, memory=2**29)


@contextlib.asynccontextmanager
async def using(served, name):
    """The server with a file of tests/compat."""
    code = await start_user_code(COMPAT / name, COMPAT, LIMITS, {"model_id": "/opt/ml/model"})
    assert code
    served.pipeline.code = code
    served.engine.bodies.clear()
    try:
        yield code
    finally:
        served.pipeline.code = None
        await code.stop()


@pytest.fixture
async def formatted(shared, request):
    async with using(shared, request.param):
        yield shared


def with_code(name):
    return pytest.mark.parametrize("formatted", [name], indirect=True)


def lines(answer):
    return [json.loads(line) for line in answer.text.splitlines()]


@with_code("formatters")
async def test_a_format_of_ones_own_with_a_sibling_module(formatted):
    body = {"inputPrompt": "a b", "parameters": {"maxOutputToken": 7}, "stream": True}
    answer = await formatted.invoke(body)
    assert answer.json() == {"custom_formatter_applied": True, "text": "b a"}
    assert formatted.engine.bodies[-1]["max_tokens"] == 7


@with_code("output_only")
async def test_the_output_formatter_has_the_last_word(formatted):
    for body in ({"inputs": "a b"}, {"prompt": "a b"}):
        answer = await formatted.invoke(body)
        assert answer.json()["custom_final"] == "b a"
        answer = await formatted.invoke(body | {"stream": True})
        assert answer.headers["content-type"] == "application/jsonlines"
        assert lines(answer) == [{"piece": "b"}, {"piece": "a"}]
    answer = await formatted.post("/v1/completions", {"prompt": "a b"})
    assert answer.json()["custom_final"] == "b a"


@with_code("stream_edit")
async def test_events_edited_as_text(formatted):
    assert (await formatted.invoke({"prompt": "a b"})).json()["edited"] is True
    answer = await formatted.invoke({"prompt": "a b", "stream": True})
    events = [line for line in answer.text.splitlines() if line]
    assert [json.loads(event[6:])["edited"] for event in events[:-1]] == [True, True]
    assert events[-1] == "data: [DONE]"
    answer = await formatted.post("/v1/completions", {"prompt": "a b", "stream": True})
    *events, end = answer.text.split("\n\n")[:-1]
    assert [json.loads(event[6:])["edited"] for event in events] == [True, True]
    assert end == "data: [DONE]"


@with_code("stream_edit")
async def test_an_error_is_the_last_line_behind_a_formatter(formatted):
    for path in ("/invocations", "/v1/completions"):
        answer = await formatted.post(path, {"prompt": "a fault b", "stream": True})
        *_, last = [line for line in answer.text.splitlines() if line]
        assert "the engine failed while it generated" in last


@with_code("attributes")
async def test_attributes_that_are_set_are_sent(formatted):
    answer = (await formatted.invoke({"inputs": "a b"})).json()
    assert (answer["processed_by"], answer["choices"][0]["seen"]) == ("base", 1)


@with_code("handler")
async def test_a_custom_handler(formatted):
    answer = await formatted.invoke({"custom": "x"}, headers={"content-type": "application/json"})
    model = "/opt/ml/model"
    assert answer.json() == {"custom_handler_used": True, "echo": "x", "model": model}
    assert answer.headers["x-made-by"] == "handle"
    assert answer.headers["content-length"] == str(len(answer.content))
    answer = await formatted.invoke({"inputs": "a b"})
    assert answer.json() == {"generated_text": "b a"}


@with_code("handler_stream")
async def test_a_custom_handler_that_streams(formatted):
    answer = await formatted.invoke({"count": 2})
    assert answer.headers["content-type"] == "application/jsonlines"
    assert lines(answer) == [{"number": 0}, {"number": 1}]
    *pieces, error = lines(await formatted.invoke({"count": 5}))
    assert len(pieces) == 3
    assert (
        error["error"]
        == "Custom handler failed: RuntimeError: three is too many (model.py, line 17)"
    )


@with_code("handler_stream")
async def test_a_handler_without_a_word_and_one_whose_client_leaves(formatted):
    answer = await formatted.invoke({"count": 0})
    assert (answer.status_code, answer.content) == (200, b"")
    leaves = {"count": 2, "wait": str(COMPAT)}
    async with formatted.client.stream("POST", "/invocations", json=leaves) as answer:
        await anext(answer.aiter_bytes())
    assert await formatted.pipeline.admission.drained(60)
    answer = await formatted.invoke({"count": 1, "wait": ""})
    assert lines(answer) == [{"number": 0}, {"left": 1}]


@with_code("handler")
async def test_headers_that_cannot_be_sent(formatted):
    answer = await formatted.invoke({"custom": 1, "header": "a\r\nb: c"})
    assert answer.status_code == 424
    assert "a header that cannot be sent: 'x-more'" in answer.json()["error"]
    answer = await formatted.invoke({"custom": 1, "header": "ü"})
    assert answer.headers["x-more"] == "ü"


@with_code("handler_raises")
async def test_a_custom_handler_that_raises(formatted):
    answer = await formatted.invoke({"inputs": "a"})
    assert (answer.status_code, answer.json()) == (
        424,
        {
            "code": 424,
            "error": "Custom handler failed: RuntimeError: not today (model.py, line 3)",
        },
    )


async def test_a_file_without_functions_for_us_changes_nothing():
    assert await start_user_code(COMPAT / "handler_missing", COMPAT, LIMITS) is None
    assert await start_user_code(COMPAT, COMPAT, LIMITS) is None


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("syntax_error", "model.py, line 1: expected ':': 'def helper()'"),
        (
            "import_error",
            "ModuleNotFoundError: No module named 'no_such_module' (model.py, line 1)",
        ),
    ],
)
async def test_what_cannot_be_loaded_is_told_with_file_and_line(name, told):
    with pytest.raises(UserCodeFailed) as error:
        await start_user_code(COMPAT / name, COMPAT, LIMITS)
    assert str(error.value) == told


@with_code("input_raises")
async def test_an_input_formatter_that_raises(formatted):
    told = "Custom formatter failed: ValueError: no field named 'x' (model.py, line 6)"
    for path in ("/invocations", "/v1/completions"):
        answer = await formatted.post(path, {"prompt": "a", "wanted": "x"})
        assert answer.status_code == 424
        assert told in answer.text
    assert formatted.engine.bodies == []


@with_code("output_raises")
async def test_an_output_formatter_that_raises(formatted):
    told = "Custom formatter failed: RuntimeError: cannot format (model.py, line 10)"
    answer = await formatted.invoke({"inputs": "a"})
    assert (answer.status_code, answer.json()) == (424, {"code": 424, "error": told})
    # The second call of a stream begins with the first chunk, the third fails on the second.
    answer = await formatted.invoke({"inputs": "a"})
    answer = await formatted.invoke({"inputs": "a b c", "stream": True})
    assert answer.status_code == 200
    assert answer.text.splitlines()[0] == "first"
    assert json.loads(answer.text.splitlines()[-1]) == {"code": 424, "error": told}
    assert formatted.engine.running == 0
    answer = await formatted.invoke({"inputs": "a"})
    answer = await formatted.invoke({"inputs": "a b c", "stream": True})
    assert (answer.status_code, answer.json()) == (424, {"code": 424, "error": told})


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ("none", "input_formatter returned NoneType; it should return a dict"),
        ("list", "input_formatter returned list; it should return a dict"),
        ("set", "what the formatter returned is not JSON"),
        ("block", "it took longer than 3 s; OPTION_FORMATTER_TIMEOUT sets the limit"),
        ("spin", "it took longer than 3 s; OPTION_FORMATTER_TIMEOUT sets the limit"),
        ("allocate", "MemoryError"),
        ("die", "the process of model.py ended"),
        ("exit", "SystemExit: enough (model.py, line 23)"),
    ],
)
@with_code("misbehaving")
async def test_one_that_misbehaves_harms_only_its_own_request(formatted, order, told):
    others = []
    if order != "die":
        others = [asyncio.create_task(formatted.invoke({"inputs": "wait"})) for _ in range(3)]
        while formatted.engine.running < 3:
            await asyncio.sleep(0.01)
    answer = await formatted.invoke({"inputs": "a", "do": order})
    assert answer.status_code == 424
    assert told in answer.json()["error"]
    formatted.engine.gate.set()
    assert [(await other).status_code for other in others] == [200] * len(others)
    formatted.engine.gate.clear()
    assert (await formatted.invoke({"inputs": "a b"})).json() == {"generated_text": "b a"}


async def test_secrets_that_it_prints_or_raises_are_hidden(shared, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_very-secret")
    monkeypatch.setattr(redaction, "_values", None)
    monkeypatch.setattr(logs, "_handler", None)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logs.configure(os.environ)
    async with using(shared, "misbehaving"):
        answer = await shared.invoke({"inputs": "a", "do": "print"})
        assert "ValueError: [secret] (model.py" in answer.json()["error"]
    assert "the token is [secret]" in capsys.readouterr().err


async def test_all_that_it_prints_is_logged(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        logging.getLogger(), "handlers", [logs.Handler(sys.stderr, logging.Formatter())]
    )
    printed = [f"{first}{second}" for first in ascii_lowercase for second in ascii_lowercase]
    (tmp_path / "model.py").write_text(f"print(*{printed}, sep='\\n')\ndef handle(inputs): ...")
    code = await start_user_code(tmp_path, COMPAT, LIMITS)
    assert code
    await code.stop()
    logged = capsys.readouterr().err
    assert [word for word in printed if f": {word}\n" not in logged] == []


async def test_it_is_started_again_when_it_has_ended(tmp_path):
    folder = tmp_path / "code"
    shutil.copytree(COMPAT / "attributes", folder)
    code = UserCode(folder, COMPAT, LIMITS)
    await code.start()
    first = code._process
    assert first
    first.kill()
    assert b"processed_by" in await code.format_answer(b'{"choices": [{}]}')
    assert code._process is not first
    await code.stop()


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_descriptors_are_closed_once(monkeypatch, new_loop):
    """A second close would close a file that another thread has just opened."""
    twice = []

    class File(io.FileIO):
        def close(self):
            if not self.closed and self.closefd:
                try:
                    os.fstat(self.fileno())
                except OSError:
                    twice.append(self)
            with contextlib.suppress(OSError):
                super().close()

    async def opened():
        code = await start_user_code(COMPAT / "formatters", COMPAT, LIMITS, {})
        assert code
        await code.stop()
        await turns()

    monkeypatch.setattr(os, "fdopen", lambda fd, mode, _, closefd: File(fd, mode, closefd))
    loop = new_loop()
    loop.run_until_complete(opened())
    before = psutil.Process().num_fds()
    loop.run_until_complete(opened())
    assert psutil.Process().num_fds() <= before
    loop.close()
    assert not twice
