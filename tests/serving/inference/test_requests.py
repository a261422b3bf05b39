# SPDX-License-Identifier: Apache-2.0
"""A request from its head to its end: its bounds, the causes of its end, and the errors it
reports.
"""

import asyncio
import contextlib
import json
from pathlib import Path

import pytest

from handlers import lmi
from handlers.records import FormatError
from serving.errors import NotFound
from serving.user_code import Limits, start_user_code
from tests.serving.api.test_app import JSONL, lines
from tests.serving.conftest import running
from tests.serving.inference.test_media import Web, reachable  # noqa: F401
from tests.serving.inference.test_queue import SHARE, WAIT, ask
from tests.serving.lora.test_registry import register, registry, write
from tests.serving.observability.test_access_log import logged, told  # noqa: F401 - a fixture
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

STOPPING = {"code": 503, "error": "the server is stopping"}
TOO_LATE = "the request took longer than 1 s; OPTION_PREDICT_TIMEOUT sets the limit"

HELD = """
import asyncio
import pathlib

from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter

HERE = pathlib.Path(__file__).parent

async def held():
    with (HERE / "entered").open("a") as entered:
        entered.write(".")
    while not (HERE / "go").exists():
        await asyncio.sleep(0.01)
"""
INPUT = f"""{HELD}
@input_formatter
async def parse(payload):
    if payload.pop("hold", None):
        await held()
    return payload
"""
OUTPUT = f"""{HELD}
@output_formatter
async def render(output):
    await held()
    return output
"""
HANDLE = f"""{HELD}
async def handle(inputs):
    if not inputs.is_empty():
        await held()
"""
MANY = """
from djl_python.input_parser import input_formatter

@input_formatter
def parse(payload):
    return {"prompt": ["wait"] * payload["many"], "max_tokens": 1}
"""
HOLD = {"inputs": "a b", "hold": True}


class Held:
    """A model.py whose calls wait until the test releases them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        entered = self._folder / "entered"
        return len(entered.read_text()) if entered.exists() else 0

    async def entered(self, calls: int = 1) -> None:
        await until_async(lambda: self.calls >= calls)

    def go(self) -> None:
        (self._folder / "go").touch()


@contextlib.asynccontextmanager
async def coded(served, folder, text):
    (folder / "model.py").write_text(text)
    code = await start_user_code(folder, folder, Limits(formatter_s=30, handler_s=30, memory=0))
    assert code
    served.pipeline.code = code
    try:
        yield Held(folder)
    finally:
        served.pipeline.code = None
        await code.stop()


def stop(served, times=1):
    """Stop as SIGTERM does."""
    for _ in range(times):
        served.server.stop()


async def connected(served, head, body=b""):
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
    await writer.drain()
    return reader, writer


def requests_of(count, word="wait"):
    return b"\n".join(b'{"inputs": "%s %d"}' % (word.encode(), n) for n in range(count))


# Lists.


async def test_a_list_of_adapters_has_a_limit_before_it_is_looked_at():
    async with running(max_request_size=2**24) as served:
        for count in (1025, 4_000, 400_000):
            body = {"inputs": ["x"] * count, "adapters": [""] * count}
            answer = await served.invoke(body, timeout=60)
            assert (answer.status_code, "at most 1024" in answer.text) == (424, True)


async def test_a_list_of_adapters_asks_for_all_its_places_first():
    async with running(job_queue_size=3) as served:
        count = SHARE + 4
        body = {"inputs": ["x"] * count, "adapters": [""] * count}
        answer = await served.invoke(body)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert not served.engine.bodies
        body = {"inputs": ["x"] * 8, "adapters": [""] * 8}
        assert (await served.invoke(body)).json() == [{"generated_text": "x"}] * 8


def test_parts_of_a_list_are_as_large_as_the_list():
    request = {"inputs": ["x"] * 1000, "adapters": [""] * 1000, "parameters": {"n": 1}}
    body = json.dumps(request).encode()
    parts = lmi.split(body, 1000)
    assert sum(map(len, parts)) < 10 * len(body)
    assert json.loads(parts[0]) == {"inputs": "x", "parameters": {"n": 1}}
    large = json.dumps(request | {"more": "x" * lmi.BESIDE}).encode()
    with pytest.raises(FormatError, match="may have 131072 bytes beside"):
        lmi.split(large, 1000)


@pytest.mark.parametrize("key", ["inputs", "prompt", "input"])
async def test_a_list_of_a_million_is_refused_unread(key):
    async with running(max_request_size=2**24) as served:
        for one in ('"a,"', "[1,2]"):
            body = f'{{"{key}": [{",".join([one] * 300_000)}]}}'.encode()
            for path in ("/invocations", "/v1/completions", "/v1/embeddings"):
                answer = await served.post(path, body)
                assert answer.status_code == (424 if path == "/invocations" else 400)
                assert "at most 2048 inputs" in answer.text
        assert not served.engine.bodies


# The queue.


async def test_one_large_request_keeps_nobody_out(served):
    long = ask(served, {"prompt": "wait long"})
    await until_async(lambda: served.engine.running == 1)
    large = ask(served, {"prompt": ["a"] * (SHARE + 1)})
    small = [ask(served, {"prompt": "x"}) for _ in range(6)]
    async with asyncio.timeout(15):
        assert [(await it).status_code for it in (large, *small)] == [200] * 7
    assert not long.done()
    served.engine.gate.set()
    assert (await long).status_code == 200


async def test_what_is_before_the_queue_counts(tmp_path):
    async with running(job_queue_size=2) as served, coded(served, tmp_path, INPUT) as held:
        served.engine.concurrency = 1  # and one more is queued ahead
        asked = [ask(served, HOLD) for _ in range(20)]
        await until_async(lambda: sum(it.done() for it in asked) + held.calls == 20)
        held.go()
        statuses = [(await it).status_code for it in asked]
        assert sorted(statuses) == [200] * 4 + [503] * 16


async def test_a_body_that_is_not_there_yet_has_a_place():
    async with running(job_queue_size=2) as served:
        served.engine.concurrency = 1
        head = "POST /invocations HTTP/1.1\nhost: x\ncontent-length: 15"
        held = [await connected(served, head, b'{"inputs": "a"') for _ in range(4)]
        await until_async(lambda: served.pipeline.admission.waiting == 4)
        assert (await served.invoke({"inputs": "b"})).status_code == 503
        for reader, writer in held:
            writer.write(b"}")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert (await served.invoke({"inputs": "b"})).status_code == 200
        for _, writer in held:
            writer.close()


async def test_bodies_are_kept_up_to_a_sum():
    size = 2**20
    async with running(max_request_size=size) as served:
        room = served.pipeline.bodies.limit = 4 * size
        head = f"POST /invocations HTTP/1.1\nhost: x\ncontent-length: {size}"
        held = [await connected(served, head, b" " * (size - 1)) for _ in range(4)]
        await until_async(lambda: served.pipeline.bodies.held > room - 2**19)
        body = b'{"inputs": "a"}'
        answer = await served.invoke(body.rjust(size))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "bytes of bodies are held" in answer.json()["error"]
        assert (await served.invoke(body)).status_code == 200  # which is small
        for _, writer in held:
            writer.close()
        await until_async(lambda: not served.pipeline.bodies.held)
        assert (await served.invoke(body.rjust(size))).status_code == 200
        assert not served.pipeline.bodies.held


async def test_the_queue_counts_what_the_formatter_made(served, tmp_path):
    async with coded(served, tmp_path, MANY):
        asked = [ask(served, {"many": 50}) for _ in range(6)]
        await until_async(lambda: served.pipeline._queue.waiting)
        assert len(served.engine.bodies) < 6
        refused = await served.invoke({"many": 1025})
        assert (refused.status_code, "at most 1024" in refused.text) == (424, True)
        served.engine.gate.set()
        assert [(await it).status_code for it in asked] == [200] * 6


# Bodies that are not JSON.


async def test_a_csv_has_a_limit(shared):
    async with running(max_request_size=2**22) as served:
        kind = {"content-type": "text/csv"}
        answer = await served.invoke(b"inputs\n" + b"a\n" * 2**20, headers=kind)
        assert (answer.status_code, "more than 1024 rows" in answer.text) == (424, True)
        answer = await served.invoke(b"inputs\n" + b"," * 2**21 + b"\n", headers=kind)
        assert (answer.status_code, "a line of the CSV" in answer.text) == (424, True)
        answer = await served.invoke(b"inputs\n" + b"a b\n" * 1024, headers=kind)
        assert answer.json() == [{"generated_text": "b a"}] * 1024


async def test_json_lines_have_a_limit():
    async with running(max_request_size=2**22) as served:
        answer = await served.invoke(b"{}\n" * 100_001, headers={"content-type": JSONL})
        assert (answer.status_code, "more than 100000 lines" in answer.text) == (424, True)


async def test_lines_end_with_their_client(served):
    served.engine.concurrency = 1
    body = b"\n".join(b'{"inputs": "step %d"}' % n for n in range(500))
    head = f"POST /invocations HTTP/1.1\nhost: x\ncontent-type: {JSONL}\ncontent-length: "
    _, writer = await connected(served, f"{head}{len(body)}", body)
    await until_async(lambda: served.engine.running == 1)
    writer.transport.abort()
    await until_async(lambda: not served.engine.running)
    given = len(served.engine.bodies)
    for _ in range(500):
        served.engine.steps.release()
    assert await served.pipeline.admission.drained(60)
    assert len(served.engine.bodies) == given == 1


# The end of a server.


async def test_lines_that_were_admitted_are_finished(served):
    served.engine.concurrency = 1
    asked = asyncio.create_task(served.invoke(requests_of(6), headers={"content-type": JSONL}))
    await until_async(lambda: served.engine.running == 1)
    stop(served)
    served.engine.gate.set()
    assert lines(await asked) == [{"generated_text": f"{n} wait"} for n in range(6)]


async def test_lines_are_told_that_the_server_stops(served):
    served.engine.concurrency = 1
    asked = asyncio.create_task(served.invoke(requests_of(1000), headers={"content-type": JSONL}))
    await until_async(lambda: served.engine.running == 1)
    stop(served, 2)
    assert lines(await asked) == [STOPPING] * 1000


async def test_what_a_handler_leaves_to_the_engine_is_finished(served, tmp_path):
    async with coded(served, tmp_path, HANDLE) as held:
        asked = ask(served, {"inputs": "a b"})
        await held.entered()
        stop(served)
        held.go()
        assert (await asked).json() == {"generated_text": "b a"}


async def test_a_body_that_was_on_its_way_is_answered(served):
    head = "POST /invocations HTTP/1.1\nhost: x\ncontent-length: 15"
    other = ask(served)
    await until_async(lambda: served.engine.running == 1)
    reader, writer = await connected(served, head, b'{"inputs": "a"')
    await until_async(lambda: served.pipeline.admission.waiting)
    stop(served)
    await until_async(lambda: served.server.lifecycle.stage == "draining")
    writer.write(b"}")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    served.engine.gate.set()
    assert (await other).status_code == 200


@contextlib.asynccontextmanager
async def kept(served, tmp_path, where):
    """A body whose request waits at the given place, and a check whether it has arrived there."""
    if where == "media":
        web = Web()
        try:
            part = {"type": "image_url", "image_url": {"url": web.url("silent")}}
            yield {"messages": [{"role": "user", "content": [part]}]}, lambda: web.asked
        finally:
            web.stop()
        return
    text = {"input": INPUT, "output": OUTPUT, "handle": HANDLE}[where]
    async with coded(served, tmp_path, text) as held:
        yield HOLD, lambda: held.calls


WHERE = pytest.mark.parametrize("where", ["input", "output", "handle", "media"])


@WHERE
async def test_a_second_signal_is_told_in_the_apis_shape(tmp_path, reachable, where):  # noqa: F811
    async with (
        running(allowed_media_domains=("media.test",)) as served,
        kept(served, tmp_path, where) as (body, waits),
    ):
        asked = ask(served, body)
        await until_async(waits)
        stop(served, 2)
        answer = await asked
        assert (answer.status_code, answer.json()) == (503, STOPPING)
        assert (await asyncio.wait_for(served.task, 15)).code == 0


@WHERE
async def test_a_deadline_is_heard_everywhere(tmp_path, reachable, where):  # noqa: F811
    async with (
        running(allowed_media_domains=("media.test",), predict_timeout=1) as served,
        kept(served, tmp_path, where) as (body, waits),
    ):
        asked = ask(served, body)
        await until_async(waits)
        async with asyncio.timeout(15):
            answer = await asked
        assert (answer.status_code, answer.json()) == (504, {"code": 504, "error": TOO_LATE})


@WHERE
async def test_a_client_that_leaves_is_heard_everywhere(tmp_path, reachable, where, told):  # noqa: F811
    async with (
        running(allowed_media_domains=("media.test",)) as served,
        kept(served, tmp_path, where) as (body, waits),
    ):
        asked = ask(served, body)
        await until_async(waits)
        asked.cancel()
        assert await served.pipeline.admission.drained(60)
        assert (await logged(told))["status"] == 499


async def test_a_change_of_adapters_is_told_that_the_server_stops(tmp_path, told):  # noqa: F811
    async with running() as served:
        engine = served.engine
        served.pipeline.adapters = registry(engine, tmp_path / "adapters")
        await register(served, "one", write(tmp_path / "adapters" / "one"))
        engine.may_load.clear()
        asked = ask(served, {"preload": True}, "/adapters/one/update")
        await until_async(lambda: engine.loads)
        stop(served, 2)
        answer = await asked
        assert (answer.status_code, answer.json()["message"]) == (503, STOPPING["error"])
        facts = await logged(told, 2)
        assert (facts["status"], facts["error"]) == (503, "NotReady")
        engine.may_load.set()


# Deadlines and clients.


async def test_a_handler_and_the_engine_have_one_deadline(tmp_path):
    async with running(predict_timeout=5) as served, coded(served, tmp_path, HANDLE) as held:
        first = ask(served, WAIT)
        await held.entered()
        second = ask(served, {"prompt": "wait"}, "/v1/completions")
        await until_async(lambda: served.engine.running == 1)
        await asyncio.sleep(0.5)  # the first one's deadline does not free it
        held.go()
        done, _ = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        assert first in done
        assert ((await first).status_code, (await second).status_code) == (504, 504)


async def test_a_deadline_begins_with_the_head(told):  # noqa: F811
    async with running(predict_timeout=1) as served:
        head = "POST /invocations HTTP/1.1\nhost: x\ncontent-length: 20"
        reader, writer = await connected(served, head, b'{"inputs": "a"')
        async with asyncio.timeout(15):
            assert (await reader.readline()).startswith(b"HTTP/1.1 504")
        writer.close()


async def test_a_client_that_leaves_while_it_sends_is_no_fault(served, told):  # noqa: F811
    head = "POST /invocations HTTP/1.1\nhost: x\ncontent-length: 20"
    _, writer = await connected(served, head, b'{"inputs"')
    await until_async(lambda: served.pipeline.admission.waiting)
    writer.transport.abort()
    assert (await logged(told))["status"] == 499


async def test_an_engine_that_cannot_list_its_models(served):
    async def models():
        raise NotFound("Not Found")

    served.engine.models = models
    answer = await served.client.get("/v1/models")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NotFoundError")
