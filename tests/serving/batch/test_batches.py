# SPDX-License-Identifier: Apache-2.0
"""Files and batches over HTTP, on the fake engine: answered, kept, refused and resumed."""

import asyncio
import io
import json
import os
import resource
import socket
import stat
import time
import tracemalloc
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from lmi_config.options.declared import Settings
from lmi_config.options.settings import SettingsError
from serving.access.caller import Caller, Limits
from serving.access.keys import digest
from serving.api.backend import Backend
from serving.batch import run as run_module
from serving.batch import runner as runner_module
from serving.batch.lines import LINES, validate
from serving.batch.objects import OwnedBatch, Status
from serving.batch.store import Store
from serving.lifecycle import Lifecycle
from tests.serving.conftest import running
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("serving.batch.run.LOOK_S", 0.02)
    monkeypatch.setattr("serving.batch.run.SETTLES_S", 0.02)
    monkeypatch.setattr("serving.batch.runner.FIND_S", 0.05)
    monkeypatch.setattr("serving.batch.runner.PAUSE_S", 0.05)


@asynccontextmanager
async def batching(folder, **settings):
    async with running(batch_folder=str(folder), **settings) as it:
        yield it


def folder_of(it):
    return Path(it.settings.batch_folder)


@pytest.fixture
async def served(tmp_path):
    async with batching(tmp_path / "batches") as it:
        yield it


def line(custom_id, prompt, url=COMPLETIONS, **more):
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": {"prompt": prompt, **more},
    }


def jsonl(*found):
    return b"".join(
        it if isinstance(it, bytes) else json.dumps(it).encode() + b"\n" for it in found
    )


async def upload(it, content, name="in.jsonl", purpose="batch", **more):
    return await it.client.post(
        "/v1/files", files={"file": (name, content)}, data={"purpose": purpose}, **more
    )


async def create(it, file, endpoint=COMPLETIONS, headers=None, **more):
    body = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h", **more}
    return await it.post("/v1/batches", body, headers=headers)


async def begun(it, *found, **more):
    """The id of a batch of these lines."""
    file = (await upload(it, jsonl(*found))).json()
    made = (await create(it, file["id"], **more)).json()
    assert made["status"] == "validating", made
    return made["id"]


async def ended(it, name, status=None, headers=None):
    """A batch, once it has this status, or has ended."""
    async with asyncio.timeout(60):
        while True:
            batch = (await it.client.get(f"/v1/batches/{name}", headers=headers)).json()
            if batch["status"] == status if status else not Status(batch["status"]).open:
                return batch
            await asyncio.sleep(0.02)


async def answers(it, file, headers=None):
    """custom_id → its entry in a batch's file."""
    if file is None:
        return {}
    content = await it.client.get(f"/v1/files/{file}/content", headers=headers)
    found = [json.loads(entry) for entry in content.text.splitlines()]
    assert len({entry["custom_id"] for entry in found}) == len(found), "an answer appears twice"
    return {entry["custom_id"]: entry for entry in found}


async def test_a_batch_from_its_file_to_its_answers(served):
    name = await begun(
        served,
        line("a", "one two"),
        b"\n",
        line("b", "refuse me"),
        line("c", "three", stream=True),
        line("d", "four", model="none"),
        metadata={"why": "test"},
    )
    batch = await ended(served, name)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 4, "completed": 1, "failed": 3}
    assert batch["metadata"] == {"why": "test"}
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["completed_at"]
    good = await answers(served, batch["output_file_id"])
    assert good.keys() == {"a"}
    assert good["a"]["response"]["body"]["choices"][0]["text"] == "two one"
    assert good["a"]["response"]["status_code"] == 200
    assert good["a"]["error"] is None
    bad = await answers(served, batch["error_file_id"])
    assert {it: entry["response"]["status_code"] for it, entry in bad.items()} == {
        **{"b": 400, "c": 400, "d": 404}
    }
    assert bad["b"]["response"]["body"]["error"]["message"] == "not like this"
    assert bad["b"]["response"]["request_id"] == bad["b"]["id"]
    listed = (await served.client.get("/v1/batches")).json()
    assert [it["id"] for it in listed["data"]] == [name]
    outputs = (await served.client.get("/v1/files?purpose=batch_output")).json()["data"]
    assert {it["id"] for it in outputs} == {batch["output_file_id"], batch["error_file_id"]}
    refused = await served.post(f"/v1/batches/{name}/cancel", b"")
    assert refused.status_code == 409


async def test_files(served):
    content = os.urandom(3_000_000)
    made = (await upload(served, content, name='a"\r\nb.jsonl')).json()
    assert made["bytes"] == len(content)
    assert made["object"] == "file"
    assert made["status"] == "processed"
    path = f"/v1/files/{made['id']}"
    assert (await served.client.get(path)).json() == made
    answer = await served.client.get(f"{path}/content")
    assert answer.content == content
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-disposition"].startswith("attachment")
    second = (await upload(served, b"{}", name="second")).json()
    page = (await served.client.get("/v1/files?limit=1&order=asc")).json()
    assert page["has_more"] is True
    rest = (await served.client.get(f"/v1/files?order=asc&after={page['last_id']}")).json()
    assert {page["data"][0]["id"], rest["data"][0]["id"]} == {made["id"], second["id"]}
    gone = await served.client.delete(path)
    assert gone.json() == {"id": made["id"], "object": "file", "deleted": True}
    for method in ("GET", "DELETE"):
        assert (await served.client.request(method, path)).status_code == 404
    assert (await served.client.get(f"{path}/content")).status_code == 404


async def test_what_a_file_may_not_be(tmp_path):
    async with batching(tmp_path, batch_file_size=100, batch_files=2, batch_storage=100_000) as it:
        assert "purpose='fine-tune'" in (await upload(it, b"a", purpose="fine-tune")).text
        assert (await upload(it, b"a" * 100)).status_code == 200
        large = await upload(it, b"a" * 101)
        assert large.status_code == 413
        assert "100 bytes; OPTION_BATCH_FILE_SIZE sets the limit" in large.text
        assert (await upload(it, b"a" * 100_000)).status_code == 413
        assert (await upload(it, b"a")).status_code == 200
        third = await upload(it, b"a")
        assert third.status_code == 413
        assert "there may be 2 files (OPTION_BATCH_FILES)" in third.text
        (tmp_path / "files" / "file-x").write_bytes(b"a" * 100_000)
        assert "OPTION_BATCH_STORAGE" in (await upload(it, b"a")).text
        assert not [path for path in (tmp_path / "files").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("name", ["other", "file-1", "file-" + "G" * 32, "..%2ffiles%2fother"])
async def test_ids_are_no_paths(served, name):
    file = (await upload(served, b"a")).json()["id"]
    for folder in ("files", "batches"):
        record = folder_of(served) / "files" / f"{file}.json"
        (folder_of(served) / folder / f"{name}.json").write_bytes(record.read_bytes())
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
        assert (await served.client.get(path)).status_code == 404
    assert (await create(served, name)).status_code == 404


async def test_the_folder_is_for_the_servers_user_alone(served):
    await upload(served, b"a")
    assert stat.S_IMODE((folder_of(served) / "files").stat().st_mode) == 0o700
    for path in (folder_of(served) / "files").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"endpoint": "/v1/load_lora_adapter"}, "endpoint='/v1/load_lora_adapter'"),
        ({"endpoint": "/v1/rerank"}, "it should be one of /v1/chat/completions"),
        ({"completion_window": "1d"}, "completion_window='1d'"),
        ({"completion_window": "721h"}, "at most 720"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "should be 'created_at'"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "3600 to 2592000"),
        ({"endpoint": "/v1/embeddings"}, "the model does not answer /v1/embeddings"),
        ({"metadata": {"a": "a" * 513}}, "metadata may have 16 keys"),
        ({"input_file_id": None}, "input_file_id"),
    ],
)
async def test_what_a_batch_may_not_be(served, more, told):
    file = (await upload(served, jsonl(line("a", "a")))).json()["id"]
    answer = await create(served, **({"file": file} | more))
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


FAULTS = [
    (b"not json\n", "invalid_json_line", None),
    (b'{"custom_id": "b"}\n', "invalid_request", None),
    (jsonl(line("a", "again")), "duplicate_custom_id", "custom_id"),
    (jsonl(line("", "b")), "invalid_request", "custom_id"),
    (jsonl(line("b", "b") | {"method": "GET"}), "invalid_method", "method"),
    (jsonl(line("b", "b", url="/v1/embeddings")), "url_mismatch", "url"),
    (jsonl(line("b", "b") | {"body": [1]}), "invalid_request", "body"),
    (jsonl(line("b", "b" * 40_000)), "invalid_request", None),
    (b"\xff\xfe\n", "invalid_json_line", None),
]


@pytest.mark.parametrize(("broken", "code", "parameter"), FAULTS)
async def test_a_broken_line_fails_the_batch_before_it_begins(served, broken, code, parameter):
    served.engine.bodies.clear()
    batch = await ended(served, await begun(served, line("a", "a"), broken, line("c", "c")))
    assert batch["status"] == "failed"
    (fault,) = batch["errors"]["data"]
    assert (fault["code"], fault["line"], fault["param"]) == (code, 2, parameter)
    assert batch["output_file_id"] is None
    assert served.engine.bodies == []


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"\n", [("empty_file", None)]),
        (b"\n" * (2 * LINES + 1), [("too_many_tasks", 2 * LINES + 1)]),
        (b"a" * 10_000 + b"\n\nb\n", [("invalid_request", 1), ("invalid_json_line", 3)]),
        (b"a" * 1_000 + b"\nb\n", [("invalid_request", 1), ("invalid_json_line", 2)]),
        (b"b\n" * 200, [("invalid_json_line", n) for n in range(1, 101)]),
    ],
)
def test_how_many_lines_there_may_be_and_how_long(content, found):
    faults = validate(io.BytesIO(content), COMPLETIONS, 1000)[1]
    assert [(it.code, it.line) for it in faults] == found


def test_an_input_has_not_too_many_lines():
    content = jsonl(*(line(str(n), "a") for n in range(LINES + 1)))
    assert validate(io.BytesIO(content), COMPLETIONS, 1000)[1][0].code == "too_many_tasks"


async def test_interactive_requests_go_first_and_have_room(served):
    served.engine.concurrency = 4
    name = await begun(served, *(line(str(n), f"wait {n}") for n in range(9)))
    while served.engine.running < 2:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert served.engine.running == 2  # half of the engine
    assert served.pipeline.waiting == 0
    answer = await served.post(COMPLETIONS, {"prompt": "now"})
    assert answer.status_code == 200
    served.engine.gate.set()
    assert (await ended(served, name))["request_counts"]["completed"] == 9


async def test_lines_wait_in_the_background(tmp_path):
    async with batching(tmp_path, batch_concurrency=20) as it:
        it.engine.concurrency = 1  # and one request queued ahead fills it
        first = [asyncio.create_task(it.post(COMPLETIONS, {"prompt": "step"})) for _ in range(2)]
        while it.engine.running < 2:
            await asyncio.sleep(0.01)
        name = await begun(it, line("a", "batch"))
        await ended(it, name, "in_progress")
        later = asyncio.create_task(it.post(COMPLETIONS, {"prompt": "later step"}))
        while not it.pipeline.waiting:
            await asyncio.sleep(0.01)
        it.engine.bodies.clear()
        for _ in range(3):
            it.engine.steps.release()
        await asyncio.gather(*first, later)
        await ended(it, name)
        assert [body["prompt"] for body in it.engine.bodies] == ["later step", "batch"]


async def test_a_stop_leaves_the_batch_to_be_taken_up(tmp_path):
    async with batching(tmp_path, batch_concurrency=1) as it:
        name = await begun(it, line("a", "a"), line("b", "step"), line("c", "c"))
        while not it.engine.running:
            await asyncio.sleep(0.01)
        it.server.stop()
        await asyncio.wait_for(it.task, 10)
        assert it.engine.running == 0
    async with batching(tmp_path) as it:
        it.engine.steps.release()
        batch = await ended(it, name)
        assert batch["status"] == "completed"
        assert (await answers(it, batch["output_file_id"])).keys() == {"a", "b", "c"}
        assert sorted(body["prompt"] for body in it.engine.bodies) == ["c", "step"]


async def test_a_torn_answer_is_computed_again(tmp_path):
    """A SIGKILL leaves this state: half of the last answer is written, and the batch has no end."""
    async with batching(tmp_path, batch_concurrency=1) as it:
        name = await begun(it, line("a", "a"), line("b", "b"), line("c", "wait"))
        while not it.engine.running:
            await asyncio.sleep(0.01)
        it.server.stop()
        await asyncio.wait_for(it.task, 10)
    owned = msgspec.json.decode((tmp_path / f"batches/{name}.json").read_bytes(), type=OwnedBatch)
    output = tmp_path / "files" / owned.output
    whole = output.read_bytes()
    output.write_bytes(whole[:-10] + b"a" * 5000)
    async with batching(tmp_path) as it:
        it.engine.gate.set()
        batch = await ended(it, name)
        assert (await answers(it, batch["output_file_id"])).keys() == {"a", "b", "c"}
        assert sorted(body["prompt"] for body in it.engine.bodies) == ["b", "wait"]


async def test_two_servers_of_a_folder_answer_each_line_once(tmp_path):
    async with batching(tmp_path) as one, batching(tmp_path) as other:
        names = [await begun(one, *(line(str(n), f"{n}") for n in range(20))) for _ in range(4)]
        for name in names:
            batch = await ended(other, name)
            assert len(await answers(other, batch["output_file_id"])) == 20
        assert len(one.engine.bodies) + len(other.engine.bodies) == 80


async def test_cancel(served):
    name = await begun(served, line("a", "a"), *(line(f"{n}", "wait") for n in range(20)))
    while served.engine.running < 2:
        await asyncio.sleep(0.01)
    file = (await served.client.get(f"/v1/batches/{name}")).json()["input_file_id"]
    assert (await served.client.delete(f"/v1/files/{file}")).status_code == 409
    cancelling = await served.post(f"/v1/batches/{name}/cancel", b"")
    assert cancelling.json()["status"] == "cancelling"
    batch = await ended(served, name)
    assert batch["status"] == "cancelled"
    assert batch["cancelled_at"] >= batch["cancelling_at"]
    assert (await answers(served, batch["output_file_id"])).keys() == {"a"}
    assert batch["error_file_id"] is None
    assert served.engine.running == 0
    assert (await served.client.delete(f"/v1/files/{file}")).status_code == 200


async def test_what_there_is_no_time_for_expires(served, monkeypatch):
    name = await begun(served, line("a", "a"), line("b", "wait"), line("c", "wait"))
    while served.engine.running < 2:
        await asyncio.sleep(0.01)
    monkeypatch.setattr(Store, "now", lambda _: int(time.time()) + 24 * 3600)
    batch = await ended(served, name)
    assert batch["status"] == "expired"
    assert (await answers(served, batch["output_file_id"])).keys() == {"a"}
    errors = await answers(served, batch["error_file_id"])
    assert errors.keys() == {"b", "c"}
    assert errors["b"]["error"]["code"] == "batch_expired"
    assert errors["b"]["response"] is None
    assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 2}


async def test_a_full_folder_fails_the_batch_with_what_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "ROOM_LOOKS", 1)
    async with batching(tmp_path, batch_storage=8_000) as it:
        name = await begun(it, line("a", "a"), line("b", "wait"))
        while not it.engine.running:
            await asyncio.sleep(0.01)
        (tmp_path / "files" / "file-x").write_bytes(b"a" * 8_000)
        batch = await ended(it, name)
        assert batch["status"] == "failed"
        assert batch["errors"]["data"][0]["code"] == "storage_full"
        assert (await answers(it, batch["output_file_id"])).keys() == {"a"}


async def test_a_full_disk_is_tried_again_and_leaves_nothing_half_written(served):
    """The system's limit on the size of files simulates a full disk."""
    name = await begun(served, line("a", "a"), line("b", "step"), line("c", "step"))
    content = jsonl(line("a", "a" * 1000))
    file = (await upload(served, content)).json()["id"]
    while served.engine.running < 1:
        await asyncio.sleep(0.01)
    with largest_file(500):
        served.engine.steps.release()
        for _ in range(5):
            assert (await upload(served, content)).status_code == 503
        answer = await create(served, file)
        assert answer.status_code == 503
        assert "OPTION_BATCH_FOLDER cannot be used: File too large" in answer.text
        await asyncio.sleep(0.3)  # while it is tried again
    for _ in range(9):
        served.engine.steps.release()
    batch = await ended(served, name)
    assert (await answers(served, batch["output_file_id"])).keys() == {"a", "b", "c"}
    assert half_written(served) == []


def half_written(served):
    return [path for path in folder_of(served).rglob(".*") if path.is_file()]


@contextmanager
def largest_file(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_folder_that_is_gone_for_a_while(served):
    name = await begun(served, line("a", "a"), line("b", "wait"))
    while not served.engine.running:
        await asyncio.sleep(0.01)
    folder, away = folder_of(served), folder_of(served).with_name("away")
    folder.rename(away)
    assert (await upload(served, b"a")).status_code == 503
    assert (await create(served, "file-" + "a" * 32)).status_code == 503
    assert (await served.client.get(f"/v1/batches/{name}")).status_code == 404
    served.engine.gate.set()
    while served.engine.running:
        await asyncio.sleep(0.01)
    away.rename(folder)
    batch = await ended(served, name)
    assert (await answers(served, batch["output_file_id"])).keys() == {"a", "b"}


async def test_so_many_batches_of_a_tenant_run_at_once_and_any_can_be_cancelled(
    served, monkeypatch
):
    monkeypatch.setattr("serving.batch.runner.BATCHES", 2)
    names = {await begun(served, line("a", f"wait {n}")) for n in range(4)}
    while served.engine.running < 2:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    listed = (await served.client.get("/v1/batches")).json()["data"]
    waiting = [batch["id"] for batch in listed if batch["status"] == "validating"]
    assert len(waiting) == 2
    await served.post(f"/v1/batches/{waiting[0]}/cancel", b"")
    assert (await ended(served, waiting[0]))["status"] == "cancelled"
    served.engine.gate.set()
    for name in names - {waiting[0]}:
        assert (await ended(served, name))["status"] == "completed"


async def test_a_batch_that_ends_its_server_each_time_fails(served):
    served.engine.gate.clear()
    name = await begun(served, line("a", "wait"))
    await ended(served, name, "in_progress")
    path = folder_of(served) / "batches" / f"{name}.json"
    while not msgspec.json.decode(path.read_bytes(), type=OwnedBatch).starts:
        await asyncio.sleep(0.01)
    killed = msgspec.json.decode(path.read_bytes(), type=OwnedBatch)
    await served.server.backend.files.runner.stop()
    killed.starts = run_module.STARTS
    path.write_bytes(msgspec.json.encode(killed))
    async with batching(folder_of(served)) as it:
        batch = await ended(it, name)
    assert batch["status"] == "failed"
    assert batch["errors"]["data"][0]["code"] == "server_error"


async def test_a_dead_engine_is_no_error_of_a_line(served):
    generate = served.engine.generate

    async def dies(call, sink):
        served.engine.failure = "it died"
        return await generate(call, sink)

    served.engine.generate = dies
    name = await begun(served, line("a", "break"))
    await asyncio.wait_for(served.task, 30)
    owned = Store(folder_of(served), served.settings).any_batch(name)
    assert owned
    assert owned.batch.status.open
    assert (folder_of(served) / "files" / owned.errors).read_bytes() == b""


async def test_a_file_outlives_its_retention_only_while_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("serving.batch.runner.SWEEP_S", 0.05)
    async with batching(tmp_path, batch_retention=60) as it:
        other = (await upload(it, b"a")).json()["id"]
        name = await begun(it, line("a", "wait"))
        file = (await it.client.get(f"/v1/batches/{name}")).json()["input_file_id"]
        clock = time.time
        it.server.backend.files._found._clock = lambda: clock() + 61
        while (tmp_path / "files" / other).exists():
            await asyncio.sleep(0.02)
        assert (tmp_path / "files" / file).exists()
        assert (await it.client.get("/v1/files")).json()["data"] == []


KEYS = {
    "one": Caller(name="one", tenant="one", limits=Limits(requests=3)),
    "two": Caller(name="two", tenant="two", models=("other",)),
    "three": Caller(name="three", tenant="three"),
}


@pytest.fixture
def keys(monkeypatch):
    def caller(self, headers):
        given = dict(headers).get(b"authorization", b"Bearer one").decode()
        return KEYS[given.removeprefix("Bearer ")]

    monkeypatch.setattr("serving.access.access.Access.caller", caller)


async def test_files_and_batches_are_their_tenants(served, keys):
    two = {"authorization": "Bearer two"}
    file = (await upload(served, jsonl(line("a", "a")))).json()["id"]
    name = (await create(served, file)).json()["id"]
    for path in (f"/v1/files/{file}", f"/v1/files/{file}/content", f"/v1/batches/{name}"):
        assert (await served.client.get(path)).status_code == 200
        assert (await served.client.get(path, headers=two)).status_code == 404
    assert (await served.client.delete(f"/v1/files/{file}", headers=two)).status_code == 404
    assert (await served.client.post(f"/v1/batches/{name}/cancel", headers=two)).status_code == 404
    assert (await create(served, file, headers=two)).status_code == 404
    for path in ("/v1/files", "/v1/batches"):
        assert (await served.client.get(path, headers=two)).json()["data"] == []
    theirs = (await upload(served, jsonl(line("a", "a")), headers=two)).json()["id"]
    name = (await create(served, theirs, headers=two)).json()["id"]
    batch = await ended(served, name, headers=two)
    errors = await answers(served, batch["error_file_id"], headers=two)
    assert errors["a"]["response"]["status_code"] == 403


async def test_a_tenant_has_half_of_the_room(tmp_path, keys):
    two = {"authorization": "Bearer two"}
    async with batching(tmp_path, batch_files=4, batch_storage=20_000) as it:
        it.client.headers["authorization"] = "Bearer three"
        content = jsonl(line("a", "a"))
        for _ in range(2):
            file = (await upload(it, content)).json()["id"]
        assert "there may be 4 files (OPTION_BATCH_FILES)" in (await upload(it, content)).text
        made = []
        for _ in range(3):
            made.append((await create(it, file)).json()["id"])
            output = (await ended(it, made[-1]))["output_file_id"]
            assert (await it.client.delete(f"/v1/files/{output}")).status_code == 200
        listed = [each["id"] for each in (await it.client.get("/v1/batches")).json()["data"]]
        assert len(listed) == 2  # one of them has replaced an ended batch
        assert made[-1] in listed
        for _ in range(2):
            made = (await create(it, file)).json()["id"]
            await ended(it, made)
        full = await create(it, file)
        assert full.status_code == 413
        assert "there are 4 files with inputs and answers" in full.text

        assert (await upload(it, b"a" * 11_000, headers=two)).status_code == 200
        full = await upload(it, content, headers=two)
        assert full.status_code == 413
        assert "20000 bytes together (OPTION_BATCH_STORAGE), half of them" in full.text


async def test_lines_count_against_their_callers_limits_and_wait_for_them(
    served, keys, monkeypatch
):
    slept, sleep = [], asyncio.sleep

    async def quick_sleep(seconds, *result):
        slept.append(seconds)
        await sleep(min(seconds, 0.02), *result)

    name = await begun(served, *(line(f"{n}", f"{n}") for n in range(5)))
    monkeypatch.setattr("serving.batch.run.asyncio.sleep", quick_sleep)
    # A line that waits for the end of the minute may do so before the third reaches the engine.
    while not [it for it in slept if it > 10] or len(served.engine.bodies) < 3:
        await sleep(0.02)
    assert len(served.engine.bodies) == 3
    refused = await served.post(COMPLETIONS, {"prompt": "a"})
    assert refused.status_code == 429
    await served.pipeline.limiter._own.storage.reset()
    batch = await ended(served, name)
    assert batch["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
    assert batch["error_file_id"] is None


async def test_without_a_folder_there_are_none(shared):
    for path in ("/v1/files", "/v1/batches", "/v1/files/a/content"):
        answer = await shared.client.get(path)
        assert answer.status_code == 404
        assert "OPTION_BATCH_FOLDER turns them on" in answer.json()["error"]["message"]


def test_a_folder_that_cannot_be_used_stops_the_start(tmp_path):
    (tmp_path / "file").touch()
    settings = Settings(batch_folder=str(tmp_path / "file" / "batches"))
    with pytest.raises(SettingsError, match=r"OPTION_BATCH_FOLDER=.*: Not a directory"):
        Backend(Lifecycle(), settings)


def held(folder):
    """Bytes of deleted files that this process still has open."""
    found = {}
    for it in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            status = it.stat()
            if str(it.readlink()).startswith(str(folder)) and not status.st_nlink:
                found[status.st_ino] = status.st_size
    return sum(found.values())


async def test_deleted_files_that_are_still_read_count(tmp_path):
    most, size = 20_000_000, 9_000_000
    async with batching(tmp_path, batch_storage=most, batch_file_size=size + 1000) as it:
        host, port = it.url.removeprefix("http://").split(":")
        readers = []
        for _ in range(6):
            made = await upload(it, b"x" * size)
            if made.status_code != 200:
                break
            name = made.json()["id"]
            reader = socket.socket()
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect((host, int(port)))
            reader.sendall(
                f"GET /v1/files/{name}/content HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
            )
            readers.append(reader)
            await until_async(lambda n=name: any(n in str(f.readlink()) for f in descriptors()))
            assert (await it.client.delete(f"/v1/files/{name}")).status_code == 200
        assert (made.status_code, "OPTION_BATCH_STORAGE" in made.text) == (413, True)
        assert size <= held(tmp_path) <= most + size
        for reader in readers:
            reader.close()
        await until_async(lambda: not held(tmp_path))
        assert (await upload(it, b"x" * size)).status_code == 200


def descriptors():
    for it in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            it.readlink()
            yield it


async def test_a_deleted_file_is_read_to_its_end(tmp_path):
    content = os.urandom(3_000_000)
    async with batching(tmp_path) as it:
        name = (await upload(it, content)).json()["id"]
        async with it.client.stream("GET", f"/v1/files/{name}/content") as answer:
            assert (await it.client.delete(f"/v1/files/{name}")).status_code == 200
            assert b"".join([part async for part in answer.aiter_bytes()]) == content
        assert (await it.client.get(f"/v1/files/{name}/content")).status_code == 404


@pytest.mark.parametrize("range_", ["bytes=2-5", "bytes=-3", "bytes=0-0,2-2", "bytes=9-"])
async def test_ranges_of_a_file_are_answered(served, range_):
    name = (await upload(served, b"0123456789")).json()["id"]
    headers = {"range": range_}
    answer = await served.client.get(f"/v1/files/{name}/content", headers=headers)
    assert answer.status_code == 206
    assert len(answer.content) < 10 or "multipart" in answer.headers["content-type"]


async def test_a_refused_batch_changes_nothing(tmp_path):
    async with batching(tmp_path, batch_files=2) as it:
        file = (await upload(it, jsonl(line("a", "a")))).json()["id"]
        for _ in range(2):
            batch = await ended(it, (await create(it, file)).json()["id"])
            await it.client.delete(f"/v1/files/{batch['output_file_id']}")
        before = (await it.client.get("/v1/batches")).json()["data"]
        assert len(before) == 2
        for body in (
            {"file": f"file-{'0' * 32}"},
            {"file": "../../etc/passwd"},
            {"file": file, "endpoint": "/v1/embeddings"},
            {"file": file, "metadata": {str(n): "" for n in range(17)}},
            {"file": file, "output_expires_after": {"anchor": "created_at", "seconds": 1}},
        ):
            assert (await create(it, **body)).status_code in (400, 404)
            assert (await it.client.get("/v1/batches")).json()["data"] == before
        assert (await create(it, file)).status_code == 200
        assert len((await it.client.get("/v1/batches")).json()["data"]) == 2


NO_LIMITS = (
    *("0", "-1", "+1", "1e2", " 5 ", "5 ", "٣", "²", "", "x", "101", "00001000000"),
    *("000001000", "1" * 9, "000001" + "0" * 5000, "9" * 5000, "5\0", "0x10", "1_0"),
)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
async def test_the_limit_of_a_page_is_a_number(served, path):
    for limit in NO_LIMITS:
        if path == "/v1/files" and limit in ("101", "000001000"):
            continue
        answer = await served.client.get(path, params={"limit": limit})
        assert answer.status_code == 400, limit[:20]
        assert "it should be from 1 to " in answer.text
    for limit in ("1", "20", "0007", "100"):
        assert (await served.client.get(path, params={"limit": limit})).status_code == 200


@pytest.mark.parametrize("seconds", ["000003600" + "0" * 9, "0" * 5000 + "1", "9" * 5000, "3600.0"])
async def test_the_life_of_a_file_is_a_number(served, seconds):
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": seconds}
    answer = await served.client.post(
        "/v1/files", files={"file": ("a", b"x")}, data={"purpose": "batch", **fields}
    )
    assert answer.status_code == 400


def test_ids_take_little_memory():
    """As texts, 50,000 ids of 512 characters outside of Latin-1 take more than 50 MB."""
    content = b"".join(
        json.dumps(line(f"{n:06}" + "\U0001f600" * 506, "a"), ensure_ascii=False).encode() + b"\n"
        for n in range(5_000)
    )
    tracemalloc.start()
    try:
        assert validate(io.BytesIO(content), COMPLETIONS, 10_000) == (5_000, [])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2_000_000


async def test_so_many_batches_of_all_owners_run_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(runner_module, "BATCHES", 2)
    monkeypatch.setattr(runner_module, "ALL_BATCHES", 4)
    most = 0

    async def counted(self, *_):
        nonlocal most
        most = max(most, self._running.total())
        await asyncio.sleep(0.05)

    monkeypatch.setattr(runner_module.Runner, "_run", counted)
    async with batching(tmp_path, cache_salt_header="x-tenant") as it:
        for tenant in range(5):
            headers = {"x-tenant": f"t{tenant}"}
            file = (await upload(it, jsonl(line("a", "a")), headers=headers)).json()["id"]
            for _ in range(2):
                assert (await create(it, file, headers=headers)).status_code == 200
        await until_async(lambda: most >= 4)
        await asyncio.sleep(0.3)
        assert most == 4


@pytest.fixture
def admins(tmp_path):
    rows = [
        {"name": "team", "sha256": digest(b"team")},
        {"name": "operator", "sha256": digest(b"operator"), "admin": True},
    ]
    file = tmp_path / "admins.json"
    file.write_text(json.dumps({"keys": rows}))
    return str(file)


async def test_an_administrator_lists_and_cancels_any_batch_and_reads_none(tmp_path, admins):
    team, operator = ({"x-api-key": it} for it in ("team", "operator"))
    async with batching(tmp_path / "b", api_keys_file=admins) as it:
        lines = [line(f"{n}", "wait secret words") for n in range(4)]
        file = (await upload(it, jsonl(*lines), headers=team)).json()["id"]
        made = await create(it, file, headers=team, metadata={"of": "the team"})
        name = made.json()["id"]
        (listed,) = (await it.client.get("/v1/batches", headers=operator)).json()["data"]
        assert (listed["id"], listed["metadata"], listed["input_file_id"]) == (name, None, "")
        for path in (f"/v1/batches/{name}", f"/v1/files/{file}", f"/v1/files/{file}/content"):
            assert (await it.client.get(path, headers=operator)).status_code == 404
        assert (await it.client.get("/v1/files", headers=operator)).json()["data"] == []
        assert (await it.client.delete(f"/v1/files/{file}", headers=operator)).status_code == 404
        answer = await it.client.post(f"/v1/batches/{name}/cancel", headers=operator)
        assert answer.status_code == 200, answer.text
        assert "the team" not in answer.text
        batch = await ended(it, name, headers=team)
        assert (batch["status"], batch["metadata"]) == ("cancelled", {"of": "the team"})


async def test_without_keys_nobody_administers_other_tenants_batches(tmp_path):
    one, two = ({"x-tenant": it} for it in ("one", "two"))
    async with batching(tmp_path, cache_salt_header="x-tenant") as it:
        file = (await upload(it, jsonl(line("a", "a")), headers=one)).json()["id"]
        name = (await create(it, file, headers=one)).json()["id"]
        assert (await it.client.get("/v1/batches", headers=two)).json()["data"] == []
        answer = await it.client.post(f"/v1/batches/{name}/cancel", headers=two)
        assert answer.status_code == 404
