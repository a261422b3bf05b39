# SPDX-License-Identifier: Apache-2.0
"""Adapters of a small Hugging Face hub, by their ids."""

import asyncio
import json

import pytest

from lmi_config.options.declared import SCRIPTS
from lmi_config.options.parsers import HubId, repos
from serving.errors import NoSlot
from serving.lora.adapter_files import AdapterFiles
from serving.lora.adapter_registry import AdapterRegistry
from serving.lora.shared_list import ListFolder, SharedList
from serving.sources import hub_adapter
from serving.sources.source import SourceError
from tests.hub_server import Repo, serving_fake
from tests.serving.lora.test_registry import BASE, ask, register, write

pytestmark = pytest.mark.anyio

ID = "org/french"
COMMIT = "b" * 40


@pytest.fixture(scope="module")
def serving_hub():
    with serving_fake() as server:
        yield server


@pytest.fixture
def hub(serving_hub, monkeypatch, tmp_path):
    """A hub with an adapter, and the files that training programs leave beside it."""
    folder = write(tmp_path / "made")
    files = {it.name: it.read_bytes() for it in folder.iterdir()}
    more = {"README.md": b"# French", "checkpoint-5/adapter_model.safetensors": b"none"}
    serving_hub.repos = {ID: Repo(files | more, commit=COMMIT), "org/other": Repo(dict(more))}
    serving_hub.asked.clear()
    serving_hub.tokens.clear()
    monkeypatch.setenv("HF_ENDPOINT", f"{serving_hub.url}/")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # as it is set for vLLM
    return serving_hub


def files(tmp_path, allowed=(ID,), limit=20_000, controls=(), **more):
    root = tmp_path / "adapters"
    root.mkdir(exist_ok=True)
    return AdapterFiles((root,), (), tmp_path / "store", limit, controls, tuple(allowed), **more)


@pytest.fixture
async def served(shared, tmp_path, hub):
    shared.engine.loads.clear()
    shared.engine.loaded.clear()
    shared.pipeline.adapters = made(shared, files(tmp_path))
    yield shared
    for it in shared.pipeline.adapters.listed():
        await shared.pipeline.adapters.unregister(it.name)
    shared.pipeline.adapters = None


def made(server, found, listed=None):
    given = (2, 2, 100, None, server.engine.names, listed)
    return AdapterRegistry(server.engine, found, BASE, 16, *given)


@pytest.mark.parametrize("src", [ID, f"hf://{ID}", f"{ID}@main", f"hf://{ID}@{COMMIT}"])
async def test_it_is_looked_at_by_its_beginning_and_fetched_when_it_is_used(
    served, hub, src, tmp_path
):
    assert await register(served, "french", src) == {"status": "Adapter french registered"}
    assert not [*(tmp_path / "store").rglob("*.safetensors")]
    assert (await served.client.get("/adapters/french")).json()["src"] == src
    await ask(served, "french")
    place = next((tmp_path / "store").rglob("adapter_model.safetensors"))
    assert place.read_bytes() == hub.repos[ID].files["adapter_model.safetensors"]
    assert {it.name for it in place.parent.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    # All of it is of the commit that was listed, whatever the branch is by then.
    resolved = [it.split("/resolve/")[1] for it in hub.asked if "/resolve/" in it]
    assert {it.partition("/")[0] for it in resolved} == {COMMIT}
    assert hub.tokens == {"Bearer hf_secret"}


@pytest.mark.parametrize(
    ("src", "allowed", "status", "told"),
    [
        (ID, (), 409, "OPTION_ADAPTER_REPOS does not name 'org/french'"),
        (f"hf://{ID}", (), 409, "OPTION_ADAPTER_REPOS does not name 'org/french'"),
        (ID, ("org/other", "french/*", "org/fren*"), 409, "OPTION_ADAPTER_REPOS"),
        ("org2/french", ("org/*",), 409, "OPTION_ADAPTER_REPOS does not name 'org2/french'"),
        (ID, ("org/*",), 200, ""),
        (f"{ID}@{'c' * 40}", (ID,), 424, "it has no such revision"),
        ("org/nothing", ("org/*",), 424, "there is no such adapter on the hub"),
        ("org/other", ("org/*",), 424, "it has no adapter_config.json"),
        ("hf://french", ("org/*",), 409, "hf://org/name only"),
        (f"hf://{ID}/../../x", ("org/*",), 409, "hf://org/name only"),
        (f"hf://{ID}@../../x", ("org/*",), 409, "hf://org/name only"),
        (f"hf://{ID}?x=1", ("org/*",), 409, "hf://org/name only"),
        (f"hf://{ID}.tar.gz", ("org/*",), 409, "hf://org/name only"),
        (f"{ID}/x", ("org/*",), 400, "adapters may be under"),
        ("../french", ("org/*",), 400, "adapters may be under"),
    ],
)
async def test_what_is_allowed(served, tmp_path, src, allowed, status, told):
    served.pipeline.adapters = made(served, files(tmp_path, allowed))
    answer = await register(served, "french", src, status)
    assert told in answer.get("message", "")


async def test_a_folder_of_the_same_name_is_meant(served, tmp_path, hub, monkeypatch):
    monkeypatch.chdir(tmp_path / "adapters")
    write(tmp_path / "adapters" / "org" / "french")
    await register(served, "french", ID)
    assert hub.asked == []


async def test_a_branch_that_has_moved_answers_in_nobodys_place(served, hub, tmp_path):
    await register(served, "french", ID)
    other = write(tmp_path / "other", content=1)
    hub.repos[ID].files["adapter_model.safetensors"] = (
        other / "adapter_model.safetensors"
    ).read_bytes()
    hub.repos[ID].commit = "d" * 40
    answer = await ask(served, "french", 424)
    assert "it has changed since it was registered" in answer["error"]
    update = await served.client.post("/adapters/french/update", params={"src": ID})
    assert update.status_code == 200
    await ask(served, "french")


async def test_what_an_adapter_does_not_have_changes_no_version(served, hub):
    await register(served, "french", ID)
    hub.repos[ID].files["README.md"] = b"# French, more"
    hub.repos[ID].commit = "d" * 40
    await register(served, "french", ID)  # the same content
    await ask(served, "french")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"claims": {"adapter_model.safetensors": 300}}, "bytes, but by its header"),
        ({"claims": {"adapter_config.json": 20}}, "adapter_config.json"),
        ({"claims": {"adapter_config.json": -1}}, "the hub's answer is no list of files"),
        ({"gated": True}, "it is gated"),
        ({"refusal": (401, "")}, "or it is private"),
        ({"refusal": (500, "")}, "the hub answers 500"),
    ],
)
async def test_what_the_hub_says_wrongly_or_refuses(served, hub, change, told):
    for name, value in change.items():
        setattr(hub.repos[ID], name, value)
    assert told in (await register(served, "french", ID, 424))["message"]


async def test_what_comes_is_what_was_listed(served, hub, tmp_path):
    hub.repos[ID].hashes = {"adapter_model.safetensors": "0" * 64}
    await register(served, "french", ID)
    answer = await ask(served, "french", 424)
    assert "a file is not as the hub listed it" in answer["error"]
    assert not [*(tmp_path / "store").rglob("adapter_model.safetensors*")]


async def test_a_file_longer_than_the_hub_said_is_not_kept(hub, tmp_path):
    found = files(tmp_path)
    located = found.locate(ID)
    hub.repos[ID].files["adapter_model.safetensors"] += bytes(10**6)
    with pytest.raises(SourceError, match="a file is not as the hub listed it"):
        found.fetch(located)
    sizes = [it.stat().st_size for it in (tmp_path / "store").rglob("*") if it.is_file()]
    assert sum(sizes) < 10_000


async def test_its_files_count_and_have_a_limit(hub, tmp_path):
    found = files(tmp_path, limit=100)
    with pytest.raises(NoSlot, match="OPTION_ADAPTER_DISK"):
        found.fetch(found.locate(ID))
    assert [it for it in hub.asked if "/resolve/" in it] == []


async def test_a_list_without_end_is_not_read(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_adapter, "LONGEST_LIST", 100)
    with pytest.raises(SourceError, match="an answer is longer than 100 bytes"):
        files(tmp_path).locate(ID)


async def test_the_token_stays_with_the_hub(hub, tmp_path):
    with serving_fake() as cdn:
        cdn.repos = {ID: Repo(dict(hub.repos[ID].files), commit=COMMIT)}
        hub.repos[ID].elsewhere = f"http://localhost:{cdn.server_port}"
        found = files(tmp_path)
        found.fetch(found.locate(ID)).release()
        assert cdn.tokens == {None}
    assert "hf_secret" not in repr(
        hub_adapter.adapter(HubId(ID, None), {"HF_TOKEN": "hf_secret"}, False)
    )


async def test_where_the_operator_keeps_the_hub_out(hub, tmp_path):
    with pytest.raises(SourceError, match="HF_HUB_OFFLINE is set"):
        files(tmp_path, offline=True).locate(ID)
    assert hub.asked == []


async def test_secure_mode_looks_at_them(served, hub, tmp_path):
    hub.repos[ID].files["model.py"] = b""
    controls = (SCRIPTS,)
    served.pipeline.adapters = made(served, files(tmp_path, controls=controls))
    answer = await register(served, "french", ID, 400)
    assert "model.py" in answer["message"]


async def test_servers_share_a_list_with_them(served, hub, tmp_path):
    (tmp_path / "list").mkdir()
    first, second = (
        made(served, files(tmp_path), SharedList(ListFolder(tmp_path / "list"))) for _ in range(2)
    )
    served.pipeline.adapters = first
    await register(served, "french", ID)
    await second.catch_up()
    assert [(it.name, it.src) for it in second.listed()] == [("french", ID)]
    assert second.get("french").digest == first.get("french").digest


@pytest.mark.parametrize("value", ["org", "org/", "*/x", "*", "org/na*", "hf://a/b", "a/b@main"])
async def test_repositories_that_no_list_can_name(value):
    with pytest.raises(ValueError, match="org/name or org/"):
        repos(value)


async def test_an_answer_that_is_no_list(hub, tmp_path, monkeypatch):
    for answer in ([], {"sha": "a"}, {"sha": "a", "siblings": [5]}, {"siblings": []}):
        text = json.dumps(answer).encode()
        monkeypatch.setattr(hub_adapter.HubAdapter, "read", lambda *_, text=text: text)
        with pytest.raises(SourceError, match="no list of files"):
            await asyncio.to_thread(files(tmp_path).locate, ID)
