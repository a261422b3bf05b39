# SPDX-License-Identifier: Apache-2.0
"""Custom handlers, the `handle` of a model.py: hung, slow, without a status, with secrets.

Each is a real process behind a real server with a fake engine.
"""

import asyncio
import contextlib
import json
from pathlib import Path

import psutil
import pytest

from serving import errors, user_code
from serving.api.invocations import Invocations
from serving.api.sessions import Sessions
from serving.errors import UserCodeFailed
from serving.http.bodies import Answer
from serving.inference.request import HttpCall
from serving.observability.access_log import AccessRecord
from serving.user_code import Limits, start_user_code
from tests.serving.conftest import running
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

FILES = Path(__file__).parents[2] / "compat"
HUNG = """
import asyncio, os, pathlib, time

async def handle(inputs):
    if inputs.is_empty():
        return None
    request = inputs.get_as_json()
    if "begun" in request:
        pathlib.Path(request["begun"]).touch()
    match request.get("do"):
        case "hang":
            time.sleep(600)
        case "block":
            time.sleep(request["seconds"])
        case "refuse":
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    pass
        case "wait":
            while not os.path.exists(request["until"]):
                await asyncio.sleep(0.01)
    return {"process": os.getpid()}
"""


@contextlib.asynccontextmanager
async def handling(tmp_path, text, seconds=3, properties=None, **settings):
    """A server whose model has this model.py. seconds: the handler's limit."""
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "model.py").write_text(text)
    limits = Limits(seconds, seconds, 0)
    async with running(**settings) as it:
        code = it.pipeline.code = await start_user_code(folder, FILES, limits, properties)
        assert code
        try:
            yield it
        finally:
            await code.stop()


def processes():
    """The running processes of a model.py. Other tests may have left servers running."""
    there = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "handlers.custom" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                there.append(child)
    return there


async def answered_by(it, **body):
    """The process that answers. It may take longer than the test's limit, on a busy machine."""
    code = it.pipeline.code
    limits, code._limits = code._limits, Limits(60, 60, 0)
    try:
        answer = await it.invoke({"x": 1} | body)
    finally:
        code._limits = limits
    assert answer.status_code == 200, answer.text
    return answer.json()["process"]


async def begun(it, folder, **body):
    """A request that its process works on."""
    file = folder / "begun"
    asked = asyncio.create_task(it.invoke(body | {"begun": str(file)}))
    await until_async(file.exists)
    return asked


async def test_a_hung_handle_wedges_nothing(tmp_path):
    """The limits of the request and of the handler are equal, as OPTION_PREDICT_TIMEOUT
    sets them.
    """
    async with handling(tmp_path, HUNG, 3, predict_timeout=3) as it:
        first = await answered_by(it)
        assert (await it.invoke({"do": "hang"})).status_code == 504
        async with asyncio.timeout(60):  # a busy machine may not start a process within 3 s
            while (answer := await it.invoke({"x": 1})).status_code != 200:
                assert answer.status_code == 504
        assert answer.json()["process"] != first
        assert (await it.client.get("/ping")).status_code == 200
        await until_async(lambda: len(processes()) == 1)


async def test_a_hung_handle_whose_client_has_left_wedges_nothing(tmp_path):
    async with handling(tmp_path, HUNG, 3) as it:
        first = await answered_by(it)
        hung = await begun(it, tmp_path, do="hang")
        hung.cancel()
        assert await it.pipeline.admission.drained(10)
        assert await answered_by(it) != first
        await until_async(lambda: len(processes()) == 1)


async def test_the_server_stops_though_a_handle_hangs(tmp_path):
    async with handling(tmp_path, HUNG, 60) as it:
        hung = asyncio.create_task(it.invoke({"do": "hang"}))
        await until_async(lambda: it.pipeline.code._process._calls)
        it.server.stop()
        it.server.stop()
        answer = await hung
        assert (answer.status_code, answer.json()["error"]) == (503, "the server is stopping")
        assert (await asyncio.wait_for(it.task, 10)).code == 0


async def test_calls_that_a_hung_one_keeps_out_are_answered_by_the_next_process(tmp_path):
    """These calls had not begun: the hung call occupies the event loop."""
    async with handling(tmp_path, HUNG, 2) as it:
        first = await answered_by(it)
        hung = await begun(it, tmp_path, do="hang")
        others = [asyncio.create_task(it.invoke({"x": n})) for n in range(5)]
        assert (await hung).status_code == 424
        assert {(await other).status_code for other in others} <= {200, 424}
        assert await answered_by(it) != first


async def test_a_handle_that_blocks_within_its_limit_keeps_its_process(tmp_path):
    """Other clients leave meanwhile, and one of the waiting calls exceeds its limit."""
    async with handling(tmp_path, HUNG, 4) as it:
        first = await answered_by(it)
        blocking = await begun(it, tmp_path, do="block", seconds=2)
        leaving = asyncio.create_task(it.invoke({"x": 1}))
        await until_async(lambda: len(it.pipeline.code._process._calls) == 2)
        leaving.cancel()
        assert (await blocking).json() == {"process": first}
        assert await answered_by(it) == first


async def test_a_call_that_is_slow_but_can_be_cancelled_keeps_its_process(tmp_path):
    async with handling(tmp_path, HUNG, 1) as it:
        first = await answered_by(it)
        answer = await it.invoke({"do": "wait", "until": str(tmp_path / "never")})
        assert answer.status_code == 424
        assert "longer than 1 s; OPTION_PREDICT_TIMEOUT" in answer.json()["error"]
        assert await answered_by(it) == first


async def test_what_does_not_end_lets_the_others_of_its_process_finish(tmp_path):
    async with handling(tmp_path, HUNG, 3) as it:
        it.pipeline.code._limits = Limits(240, 240, 0)  # those below; the first one has 3 s
        first = await answered_by(it)
        waiting = await begun(it, tmp_path, do="wait", until=str(tmp_path / "go"))
        it.pipeline.code._limits = Limits(3, 3, 0)
        assert (await it.invoke({"do": "refuse"})).status_code == 424
        await until_async(lambda: len(processes()) == 2)
        second = await answered_by(it)
        assert second != first
        (tmp_path / "go").touch()
        assert (await waiting).json() == {"process": first}
        await until_async(lambda: len(processes()) == 1)
        assert await answered_by(it) == second


async def test_there_are_never_more_than_three_processes(tmp_path):
    async with handling(tmp_path, HUNG, 0.5) as it:
        most = 0
        for _ in range(4):
            asked = [asyncio.create_task(it.invoke({"do": "refuse"})) for _ in range(3)]
            for task in asked:
                most = max(most, len(processes()))
                assert (await task).status_code == 424
            await asyncio.sleep(0.2)
            most = max(most, len(processes()))
        assert most <= 3
        await answered_by(it)


async def test_ping_tells_of_a_handler_that_can_never_work(tmp_path):
    async with handling(tmp_path, HUNG, 0.5) as it:
        for _ in range(user_code.LOSSES):
            assert (await it.client.get("/ping")).status_code == 200
            await until_async(processes)  # on a slow machine, the next process may not be there yet
            before = processes()
            assert (await it.invoke({"do": "hang"})).status_code == 424
            await until_async(lambda before=before: not {*before} & {*processes()})
        answer = await it.client.get("/ping")
        assert (answer.status_code, answer.json()["status"]) == (503, "failing")
        assert "processes of model.py were lost with no answer" in answer.json()["detail"]
        await answered_by(it)
        assert (await it.client.get("/ping")).status_code == 200


async def test_ping_tells_of_a_handler_that_does_not_start_again(tmp_path, monkeypatch):
    monkeypatch.setattr(user_code, "RETRY_S", 0.1)
    flag = tmp_path / "broken"
    text = f"""
import os
async def handle(inputs):
    if inputs.is_empty():
        if os.path.exists({str(flag)!r}):
            raise RuntimeError("no GPU")
        return None
    os._exit(1)
"""
    async with handling(tmp_path, text) as it:
        flag.touch()
        assert (await it.invoke({"x": 1})).status_code == 424

        async def pinged():
            return await it.client.get("/ping")

        async with asyncio.timeout(20):
            while (answer := await pinged()).status_code == 200:
                await asyncio.sleep(0.01)
        assert "RuntimeError: no GPU (model.py, line 6)" in answer.json()["detail"]
        flag.unlink()  # there are no calls, and it comes back
        async with asyncio.timeout(20):
            while (await pinged()).status_code != 200:
                await asyncio.sleep(0.01)


SERVICE = """
import asyncio
calls = []

async def handle(inputs):
    calls.append([inputs.is_empty(), inputs.get_property("model_id"),
                  inputs.get_property("trust_remote_code"), inputs.get_property("model_dir")])
    if inputs.is_empty():
        return None
    return calls
"""


async def test_the_operators_options_come_before_clients_headers(tmp_path):
    """Handlers' files initialise themselves from the operator's options, and may run code that
    comes with a model.
    """
    properties = {"model_id": "/opt/ml/model", "trust_remote_code": "false"}
    evil = {"model_id": "evil/repo", "Trust_Remote_Code": "true", "Model_Dir": "/tmp/evil"}
    async with handling(tmp_path, SERVICE, properties=properties) as it:
        (_, *found), (empty, *again) = (await it.invoke({"x": 1}, headers=evil)).json()
        expected = ["/opt/ml/model", "false", str(tmp_path / "model")]
        assert (found, again, empty) == (expected, expected, False)


async def test_an_option_that_is_not_set_is_no_clients_to_set(tmp_path):
    text = "async def handle(inputs):\n    return dict(inputs.get_properties()) or None\n"
    names = ["option.entryPoint", "ENTRYPOINT", "Revision", "tensor_parallel_size", "seed"]
    headers = dict.fromkeys(names, "evil") | {"x-mine": "kept"}
    async with handling(tmp_path, text) as it:
        found = (await it.invoke({"x": 1}, headers=headers)).json()
        assert "evil" not in found.values()
        assert found["x-mine"] == "kept"


async def test_a_handler_is_initialised_before_its_first_request_and_in_each_process(tmp_path):
    async with handling(tmp_path, SERVICE) as it:
        for _ in range(2):
            first, second = (await it.invoke({"x": 1})).json()
            assert (first[0], second[0]) == (True, False)
            it.pipeline.code._process.kill()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "async def handle(inputs):\n    return inputs.get_as_json()['x']\n",
            "Custom handler failed: JSONDecodeError",
        ),
        (
            "async def handle(inputs):\n    raise RuntimeError('no GPU')\n",
            "Custom handler failed: RuntimeError: no GPU (model.py, line 2) in the initialising "
            "call, whose inputs.is_empty()",
        ),
        (
            "from djl_python import Output\nasync def handle(inputs):\n"
            "    return Output().error('no weights', 500)\n",
            "handle answered 500 in the initialising call, whose inputs.is_empty(): "
            '{"code": 500, "message": "invoke handler failure", "error": "no weights"}',
        ),
        (
            "import time\nasync def handle(inputs):\n    time.sleep(600)\n",
            "model.py was not initialised after 1 s",
        ),
        (
            "def handle(inputs):\n    yield {}\n",
            "handle yields, and would not be called; have it return Output().add_stream_content(",
        ),
        (
            "async def handle(inputs):\n    yield {}\n",
            "handle yields, and would not be called; have it return an async generator",
        ),
        (
            "def model_fn(model_dir):\n    pass\ndef predict_fn(data, model):\n    pass\n",
            "model_fn, predict_fn would not be called: SageMaker's inference toolkit is not here",
        ),
    ],
)
async def test_a_handler_that_would_not_work_is_told_at_the_start(tmp_path, text, told):
    (tmp_path / "model.py").write_text(text)
    with pytest.raises(UserCodeFailed) as error:
        await start_user_code(tmp_path, FILES, Limits(3, 3, 0, initial_s=1))
    assert told in str(error.value)
    await until_async(lambda: not processes())


FLOOD = """
import os
from djl_python.async_utils import create_stream_chunk_output

async def handle(inputs):
    if inputs.is_empty():
        return None
    made = 0
    async def pieces():
        nonlocal made
        for _ in range(400):
            yield create_stream_chunk_output("x" * 2**20)
            made += 1
            with open(os.environ["MADE"], "w") as file:
                file.write(str(made))
    async def one():
        yield create_stream_chunk_output("alone")
    return pieces() if inputs.get_as_json().get("flood") else one()
"""


async def test_a_stream_is_held_back_where_its_client_is_slow(tmp_path, monkeypatch):
    """No other call of the process waits for that client."""
    made = tmp_path / "made"
    monkeypatch.setenv("MADE", str(made))
    async with handling(tmp_path, FLOOD, 30) as it:
        host, port = it.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = b'{"flood": 1}'
        writer.write(b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % 12)
        writer.write(body)
        await until_async(made.exists)
        for _ in range(10):  # these calls continue although the other one waits
            assert (await it.invoke({"flood": 0})).text == "alone\n"
        before = -1
        while before != (before := int(made.read_text() or 0)):
            await asyncio.sleep(0.5)
        assert before < 30  # out of 400 MiB, besides the bytes in the sockets
        size = 0
        async with asyncio.timeout(30):
            while size < 400 * 2**20:
                size += len(await reader.read(2**20))
        writer.close()


@pytest.mark.parametrize("code", ["700", "42", "101", "199", "None", "200.5", "'OK'", "10**400"])
async def test_what_is_no_status(tmp_path, code):
    text = (
        "from djl_python import Output\nasync def handle(inputs):\n"
        f"    return None if inputs.is_empty() else Output({code}).add('body')\n"
    )
    async with handling(tmp_path, text) as it:
        answer = await it.invoke({"x": 1})
        assert answer.status_code == 424
        assert "as the status; it should be a number from 200 to 599" in answer.json()["error"]


@pytest.mark.parametrize("code", [204, 304])
async def test_a_status_without_a_body(tmp_path, code):
    """Bytes after it on the connection would be read as the next answer."""
    text = (
        "from djl_python import Output\nasync def handle(inputs):\n"
        f"    return None if inputs.is_empty() else Output({code}).add('body')\n"
    )
    async with handling(tmp_path, text) as it:
        host, port = it.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        request = b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
        for _ in range(2):
            writer.write(request)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 15)
            assert head.startswith(b"HTTP/1.1 %d " % code)
            assert b"content-length" not in head
            assert b"transfer-encoding" not in head
        writer.close()


async def test_a_request_that_is_cancelled_is_cancelled(tmp_path):
    """uvicorn does this at the end: whoever cancels a request must see it cancelled."""
    async with handling(tmp_path, HUNG, 30) as it:
        body = json.dumps({"do": "wait", "until": str(tmp_path / "never")}).encode()
        messages = [{"type": "http.request", "body": body}]

        async def receive():
            await asyncio.sleep(0 if messages else 600)
            return messages.pop()

        async def send(message):
            raise AssertionError(message)

        path = {"path": "/invocations", "path_params": {}, "method": "POST"}
        scope = {"type": "http", "headers": [], **path}
        record, shape = AccessRecord("/invocations", scope), errors.shape("/invocations")
        call = HttpCall(scope, receive, Answer(send), record, shape)
        answer = Invocations(it.settings, Sessions(None)).answer(call, it.pipeline)
        task = asyncio.create_task(answer)
        await until_async(lambda: it.pipeline.code._process._calls)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_sync_formatter_that_hangs_for_nobody_gives_way(tmp_path, monkeypatch):
    """Threads cannot be ended, and their number is limited."""
    monkeypatch.setattr(user_code, "LEFT_S", 0.5)
    text = """
import os, time
from djl_python.input_parser import input_formatter
@input_formatter
def parse(payload):
    if begun := payload.get("begun"):
        open(begun, "w").close()
        time.sleep(600)
    return {"prompt": "a", "user": str(os.getpid())}
"""
    async with handling(tmp_path, text, 30) as it:
        await it.invoke({"x": 1})
        code = it.pipeline.code
        for n in range(2):
            begun = tmp_path / f"begun-{n}"
            body = json.dumps({"begun": str(begun)}).encode()
            call = asyncio.create_task(code.format_request(body, ""))
            await until_async(begun.exists)
            call.cancel()
            before = {*processes()}
            await until_async(lambda before=before: not before & {*processes()})
        assert (await it.invoke({"x": 1})).status_code == 200


async def test_an_error_that_no_future_takes_is_told(tmp_path):
    text = """
from djl_python.input_parser import input_formatter
@input_formatter
def parse(payload):
    return next(iter([]))
"""
    async with handling(tmp_path, text) as it:
        answer = await it.invoke({"inputs": "a"})
        assert (
            answer.json()["error"] == "Custom formatter failed: StopIteration:  (model.py, line 5)"
        )


FORKING = """
import os, time

async def handle(inputs):
    if inputs.is_empty():
        return None
    match inputs.get_as_json().get("do"):
        case "fork":
            if not os.fork():
                os.setsid()
                time.sleep(40)
                os._exit(0)
        case "die":
            os._exit(1)
    return {"process": os.getpid()}
"""


async def test_the_end_of_a_process_is_noticed_although_its_child_lives(tmp_path):
    """The child still has its connection and its output open."""
    async with handling(tmp_path, FORKING, seconds=30) as it:
        first = (await it.invoke({"do": "fork"})).json()
        async with asyncio.timeout(15):
            ended, waits = await asyncio.gather(it.invoke({"do": "die"}), it.invoke({}))
        assert ended.status_code == 424
        assert "the process of model.py ended" in ended.json()["error"]
        assert waits.status_code in (200, 424)
        assert (await it.invoke({})).json()["process"] != first["process"]


PIECES = """
import asyncio, os

async def handle(inputs):
    if inputs.is_empty():
        return None
    request = inputs.get_as_json()
    async def pieces():
        yield {"piece": 1}
        while not os.path.exists(request["until"]):
            await asyncio.sleep(0.01)
        if request.get("fails"):
            raise ValueError("no second one")
        yield {"piece": 2}
    return pieces()
"""


@pytest.mark.parametrize("fails", [False, True])
async def test_a_piece_is_not_held_back_until_the_next(tmp_path, fails):
    until = tmp_path / "until"
    async with handling(tmp_path, PIECES, seconds=10) as it:
        body = {"until": str(until), "fails": fails}
        async with it.client.stream("POST", "/invocations", json=body) as answer:
            pieces = answer.aiter_raw()
            assert answer.status_code == 200
            assert await anext(pieces) == b'{"piece": 1}'
            until.touch()
            rest = b"".join([piece async for piece in pieces])
        assert (b"no second one" if fails else b'{"piece": 2}') in rest
