# SPDX-License-Identifier: Apache-2.0
"""Handlers and formatters as LMI's users write them, each in another author's habits.

The shapes come from public notebooks and repositories; the code is our own (compat/public). Each
runs in a separate process, behind a real server with a fake engine.
"""

import asyncio
import contextlib
import io
import json
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from handlers.custom import THREADS
from handlers.djl_python import np_util
from serving.engine.no_engine import NoEngine
from serving.user_code import Limits, start_user_code
from tests.serving.conftest import running
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

PUBLIC = Path(__file__).parent.parent / "compat" / "public"
PROPERTIES = {"model_id": "/opt/ml/model", "tensor_parallel_degree": "2", "device_id": "-1"}


@contextlib.asynccontextmanager
async def served(name, **properties):
    async with running() as it:
        code = await start_user_code(
            PUBLIC / name, PUBLIC, Limits(5, 5, 0), PROPERTIES | properties
        )
        assert code
        it.pipeline.code = code
        try:
            yield it
        finally:
            await code.stop()


def picture():
    file = io.BytesIO()
    PIL.Image.new("RGB", (3, 2)).save(file, "PNG")
    return file.getvalue()


def npz(array):
    file = io.BytesIO()
    np.savez(file, array)
    return file.getvalue()


async def test_echo_by_type():
    array = np.arange(6, dtype="float32").reshape(2, 3)
    async with served("echo_by_type") as it:
        assert it.pipeline.code.alone
        for kind, body in (
            ("application/json", b'{"a": 1}'),
            ("text/plain", b"some text"),
            ("application/octet-stream", b"\x00\xff"),
            ("tensor/ndlist", np_util.to_nd_list(array)),
        ):
            answer = await it.invoke(body, headers={"content-type": kind})
            assert (answer.status_code, answer.content) == (200, body), kind
        answer = await it.invoke(npz(array), headers={"content-type": "tensor/npz"})
        [back] = np_util.from_nd_list(answer.content)
        np.testing.assert_array_equal(back, array)


async def test_globals_and_load():
    """One call at a time: LMI never called such files in parallel."""
    async with served("globals_and_load") as it:
        asked = [it.invoke({"text": "abc", "parameters": {"max_length": 2}}) for _ in range(8)]
        for answer in await asyncio.gather(*asked):
            expected = {"outputs": ["ab"], "at_once": 1, "location": "/opt/ml/model", "tp": 2}
            assert answer.json() == expected


async def test_service_class():
    async with served("service_class", task_name="title") as it:
        answer = await it.invoke({"inputs": ["two words"]}, headers={"accept": "text/csv"})
        assert answer.text == "text\r\nTwo Words\r\n"
        assert (await it.invoke({"inputs": "a"})).json() == [{"text": "A"}]
        failed = await it.invoke({"inputs": 3})
        assert (failed.status_code, failed.json()["message"]) == (424, "invoke handler failure")
        assert "'int' object has no attribute 'title'" in failed.json()["error"]


async def test_dynamic_batch():
    async with served("dynamic_batch") as it:
        assert (await it.invoke({"prompt": "abc"})).json() == {"generated": "cba", "size": 1}
        failed = await it.invoke({"other": 1})
        assert (failed.status_code, list(failed.json())) == (400, ["error"])


async def test_thread_streamer():
    async with served("thread_streamer") as it:
        answer = await it.invoke({"inputs": "one two"})
        assert answer.headers["content-type"] == "application/jsonlines"
        assert answer.text == '{"outputs": ["one"]}\n{"outputs": ["two"]}\n'
        broken = (await it.invoke({"inputs": "one two fail"})).text.splitlines()
        assert json.loads(broken[0]) == {"outputs": ["one"]}
        assert (
            "RuntimeError: the stream broke (model.py, line 25)" in json.loads(broken[2])["error"]
        )
        released = await it.invoke({"released": True})
        assert released.json() == ["one two", "one two fail"]


async def test_default_stream():
    async with served("default_stream") as it:
        answer = await it.invoke({"inputs": "a b"})
        assert answer.text == '{"outputs": ["a"]}\n{"outputs": ["b"]}\n'
        assert answer.headers["content-type"] == "application/jsonlines"


async def test_own_engine():
    """It answers the initialising call, so our engine is not needed; its /v1 is empty."""
    async with served("own_engine") as it:
        assert it.pipeline.code.alone
        answer = await it.invoke({"inputs": "abc", "stream": True})
        assert answer.text == '{"custom_handler_used": true, "generated_text": "ABC"}\n'
        assert it.engine.bodies == []


async def test_a_server_without_an_engine_says_so():
    async with served("own_engine") as it:
        it.pipeline.engine = NoEngine(THREADS)
        assert (await it.invoke({"inputs": "a"})).status_code == 200
        for path in ("/v1/completions", "/v1/chat/completions"):
            missing = await it.post(path, {"prompt": "a", "messages": []})
            assert missing.status_code == 404
            assert "answered by the handle of its model.py alone" in missing.text
        assert (await it.client.get("/v1/models")).status_code == 404
        assert (await it.client.get("/ping")).status_code == 200
        assert (await it.client.get("/models/lmi")).status_code == 200
        parameters = (await it.client.get("/execution-parameters")).json()
        assert parameters["MaxConcurrentTransforms"] == THREADS


async def test_by_hand():
    async with served("by_hand") as it:
        answer = await it.invoke({"inputs": "a end b"})
        assert answer.text == '{"text": "a"}\n{"text": "end"}\n'
        full = await it.invoke({"full": True})
        assert (full.status_code, full.json()) == (429, {"code": 429, "error": "too many"})


async def test_image_in_image_out():
    async with served("image_in_image_out") as it:
        assert it.pipeline.code.alone
        answer = await it.invoke(picture(), headers={"content-type": "image/png"})
        assert answer.headers["content-type"] == "image/png"
        assert PIL.Image.open(io.BytesIO(answer.content)).size == (6, 2)
        assert "cannot identify image" in (await it.invoke(b"none")).json()["error"]


async def test_guard():
    async with served("guard") as it:
        assert not it.pipeline.code.alone
        assert (await it.invoke({"inputs": "a b"})).json() == {"generated_text": "b a"}
        refused = await it.invoke({"inputs": "forbidden"})
        assert refused.status_code == 400
        assert refused.json() == {"code": 400, "error": "the prompt is not allowed"}
        assert (await it.invoke({"inputs": "teapot"})).status_code == 418


async def test_configured_formatter():
    options = {"prompt_prefix": "say ", "default_new_tokens": "7"}
    async with served("configured_formatter", **options) as it:
        assert (await it.invoke({"query": "it"})).json() == {"generated_text": "it say"}
        sent = it.engine.bodies[-1]
        assert (sent["max_tokens"], sent["seed"]) == (7, len("/opt/ml/model"))


async def test_question_and_context():
    async with served("question_and_context") as it:
        body = {"question": "who was it", "context": "c"}
        assert (await it.invoke(body)).json()["answer"] == "it was who"
        lines = (await it.invoke(body | {"stream": True})).text.splitlines()
        assert "".join(json.loads(line)["delta"] for line in lines) == "itwaswho"


async def test_picture_formatter():
    async with served("picture_formatter") as it:
        for kind, body, said in (
            ("image/png", picture(), "PNG 2 by 3"),
            ("text/plain", b"some text", "str of 1"),
            ("tensor/npz", npz(np.zeros(3)), "ndarray of 1"),
            ("tensor/ndlist", np_util.to_nd_list(np.zeros(3)), "ndarray of 1"),
        ):
            answer = await it.invoke(body, headers={"content-type": kind})
            assert answer.json() == {"generated_text": said}, kind
        broken = await it.invoke(b"PK broken", headers={"content-type": "image/png"})
        assert broken.status_code == 424
        assert "the body is not image/png: cannot identify image" in broken.json()["error"]


async def test_a_picture_without_a_formatter_for_it():
    async with running() as it:
        answer = await it.invoke(picture(), headers={"content-type": "image/png"})
        assert answer.status_code == 424
        assert "the body is image/png, which only an @input_formatter" in answer.json()["error"]


async def test_a_handle_that_is_the_whole_service_leaves_nothing_to_an_engine(tmp_path):
    (tmp_path / "model.py").write_text("def handle(inputs):\n    return None\n")
    async with running() as it:
        code = it.pipeline.code = await start_user_code(tmp_path, PUBLIC, Limits(5, 5, 0))
        assert code
        answer = await it.invoke({"inputs": "a b"})
        assert (answer.status_code, answer.content) == (204, b"")
        assert it.engine.bodies == []
        await code.stop()


async def test_a_process_without_memory_ends_at_once(tmp_path):
    """A report of the error also needs memory, and the call would wait for its time-out."""
    (tmp_path / "model.py").write_text("""
import asyncio, sys

async def handle(inputs):
    if inputs.is_empty():
        return None
    if inputs.get_as_json().get("loop"):
        def fail():
            raise MemoryError
        asyncio.get_running_loop().call_soon(fail)
        await asyncio.sleep(60)
    def no_memory(*_):
        raise MemoryError
    sys.modules["__main__"].told = no_memory
    raise ValueError
""")
    async with running() as it:
        code = it.pipeline.code = await start_user_code(tmp_path, PUBLIC, Limits(60, 60, 0))
        assert code
        for body in ({"loop": True}, {"loop": False}):
            process = code._process
            async with asyncio.timeout(5):
                answer = await it.invoke(body)
            assert answer.status_code == 424
            assert "the process of model.py ended; it may have run out of memory" in answer.text
            await until_async(lambda process=process: code._process not in (None, process))
        await code.stop()
