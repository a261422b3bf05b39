# SPDX-License-Identifier: Apache-2.0
"""The router of a container with several models, in front of a scripted supervisor."""

import asyncio
import contextlib
import json
from contextlib import asynccontextmanager

import pytest

from serving.access import keys
from serving.router.models.model_messages import LONGEST, Answer, Door, Row, Told, line, read_report
from serving.router.models.view import OwnModels
from tests.serving.router.conftest import routing
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

CHAT = {"prompt": "a"}
ADMIN = "an-admin-key-of-a-test"


class Supervisor:
    """The other end of the router's socket."""

    def __init__(self):
        self.rows = {}
        self.revision = 0
        self.report = None
        self.calls = []
        self._writer = None

    async def serve(self, reader, writer):
        self._writer = writer
        self.tell()
        while told := await reader.readline():
            self.report = read_report(told)
            self.calls += self.report.calls
        writer.close()

    def tell(self, *answers):
        if self._writer:
            rows = tuple(self.rows.values())
            self._writer.write(line(Told(self.revision, rows, answers)))

    def enter(self, name, state, trouble=""):
        self.revision += 1
        before = self.rows[name]
        self.rows[name] = Row(
            name=name,
            url=before.url,
            state=state,
            endpoint=before.endpoint,
            running=state in ("ready", "stopping"),
            open=state == "ready",
            trouble=trouble,
        )
        self.tell()

    def work(self, name):
        return self.report.work.get(name) if self.report else None


@asynccontextmanager
async def serving(folder, *, dynamic=False, **settings):
    """A router of the models a and b, both cold, and their servers."""
    boss = Supervisor()
    door = Door(folder=folder, dynamic=dynamic, closed=False)
    listening = await asyncio.start_unix_server(boss.serve, door.socket, limit=LONGEST)
    settings = {"router_hold": 60, **settings}
    async with listening, routing(2, wait=False, models=door, **settings) as it:
        for name, replica in zip("ab", it.fleet, strict=True):
            replica.models = [{"id": "a"}, {"id": "b"}, {"id": "lmi"}]  # names may be equal
            boss.rows[name] = Row(name, f"/{name}", "cold", replica.url[7:], False, False, "")
        boss.tell()
        models = it.router._models
        assert models
        await until_async(lambda: len(models.rows) == 2)
        it.boss = boss  # type: ignore[attr-defined]
        yield it


@pytest.fixture
async def own(tmp_path):
    async with serving(tmp_path) as it:
        yield it


def ask(it, model, path="/v1/completions", **more):
    body = CHAT | ({"model": model} if model else {})
    return asyncio.create_task(it.post(body, path, **more))


async def ready(it, name):
    it.boss.enter(name, "ready")
    models = it.router._models
    await until_async(lambda: name in [models.at(one.name) for one in it.router.pool.ready])


async def test_a_request_waits_until_its_model_runs_and_the_supervisor_knows(own):
    assert (await own.client.get("/ping")).json() == {
        "status": "ready",
        "detail": "0 of 2 models run",
    }
    waits = ask(own, "a")
    await until_async(lambda: own.boss.work("a") and own.boss.work("a").waiting == 1)
    assert own.boss.work("b").waiting == 0
    await ready(own, "b")  # another model's server does not count
    await asyncio.sleep(0.1)
    assert not waits.done()
    await ready(own, "a")
    answer = await waits
    assert answer.json()["replica"] == own.fleet[0].url
    assert "x-slipway-held-ms" in answer.headers
    await until_async(lambda: own.boss.work("a").waiting == 0)
    assert own.boss.work("a").begun == 1


async def test_a_model_that_makes_room_gets_no_more_requests(own):
    await ready(own, "a")
    go = asyncio.Event()

    async def answer(replica, asked, writer):
        await go.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    own.fleet[0].answer = answer
    first = ask(own, "a")
    await until_async(lambda: own.boss.work("a").in_flight == 1)
    own.boss.enter("a", "stopping")
    await until_async(lambda: own.boss.report.seen == own.boss.revision)
    second = ask(own, "a")
    await until_async(lambda: own.boss.work("a").waiting == 1)
    go.set()
    assert (await first).status_code == 200
    await until_async(lambda: own.boss.work("a").in_flight == 0)
    assert not second.done()
    own.boss.enter("a", "cold")
    await ready(own, "a")
    assert (await second).status_code == 200


async def test_which_model_a_request_is_for(own):
    await ready(own, "a")
    await ready(own, "b")
    for path in ("/models/b/invoke", "/predictions/b"):
        answer = await ask(own, "a", path)  # the path decides, not the body
        assert answer.json()["replica"] == own.fleet[1].url
    for n in range(3):
        assert (await ask(own, "ab"[n % 2])).json()["replica"] == own.fleet[n % 2].url
    assert (await ask(own, "c")).status_code == 404
    assert (await ask(own, "lmi")).status_code == 404
    nameless = await ask(own, "")
    assert nameless.status_code == 400
    assert nameless.json()["error"]["param"] == "model"


async def test_an_adapters_name_means_its_model_while_that_runs(own):
    own.fleet[1].models = [{"id": "b"}, {"id": "tuned", "parent": "b"}]
    await ready(own, "b")
    assert (await ask(own, "tuned")).json()["replica"] == own.fleet[1].url
    listed = (await own.client.get("/v1/models")).json()["data"]
    assert [(it["id"], it["parent"]) for it in listed] == [
        ("a", None),
        ("b", None),
        ("tuned", "b"),
    ]


async def test_a_change_of_adapters_goes_to_the_model_in_its_path(own):
    await ready(own, "a")
    await ready(own, "b")
    answer = await own.post({"name": "x", "src": "/x"}, "/models/b/adapters")
    assert answer.json()["replica"] == own.fleet[1].url
    assert own.fleet[0].asked == []
    assert (await own.post({"name": "x", "src": "/x"}, "/adapters")).status_code == 400


async def test_a_model_makes_room_when_its_adapters_are_not_being_changed(own):
    await ready(own, "b")
    go = asyncio.Event()

    async def answer(replica, asked, writer):
        await go.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    own.fleet[1].answer = answer
    changes = asyncio.create_task(own.post({"name": "x", "src": "/x"}, "/models/b/adapters"))
    await until_async(lambda: own.fleet[1].asked and own.boss.work("b").in_flight == 1)
    own.boss.enter("b", "stopping")
    await until_async(lambda: own.boss.report.seen == own.boss.revision)
    refused = await own.post({"name": "y", "src": "/y"}, "/models/b/adapters")
    assert refused.status_code == 503
    assert "the model b does not run" in refused.text
    assert (len(own.fleet[1].asked), own.boss.work("b").in_flight) == (1, 1)
    go.set()
    assert (await changes).status_code == 200
    await until_async(lambda: own.boss.work("b").in_flight == 0)


async def test_requests_for_a_model_that_cannot_start_do_not_wait(own):
    waits = ask(own, "a")
    await until_async(lambda: own.boss.work("a") and own.boss.work("a").waiting == 1)
    own.boss.enter("a", "cold", "the weights are torn")
    answer = await waits
    assert answer.status_code == 503
    assert "the weights are torn" in answer.text
    assert (await ask(own, "a")).status_code == 503
    own.boss.enter("a", "cold")
    waits = ask(own, "a")
    await until_async(lambda: own.boss.work("a").waiting == 1)
    del own.boss.rows["a"]
    own.boss.tell()
    assert (await waits).status_code == 404


@pytest.fixture
def keyed(tmp_path):
    """Keys: one for the model b only, and an admin's."""
    key = keys.made()
    file = tmp_path / "keys.yaml"
    row = keys.row("one", key, None)
    file.write_text(f"keys:\n{row}\n  models: [b]\n")
    return key, {
        "api_keys_file": str(file),
        "admin_api_key": ADMIN,
        "router_secret": "0123456789abcdef" * 2,
    }


def bearer(key):
    return {"authorization": f"Bearer {key}"}


async def test_a_key_starts_only_its_models(tmp_path, keyed):
    key, settings = keyed
    async with serving(tmp_path, **settings) as it:
        assert (await ask(it, "a", headers=bearer(key))).status_code == 403
        assert it.boss.work("a").begun == 0
        listed = await it.client.get("/v1/models", headers=bearer(key))
        assert [row["id"] for row in listed.json()["data"]] == ["b"]
        waits = ask(it, "b", headers=bearer(key))
        await until_async(lambda: it.boss.work("b") and it.boss.work("b").waiting == 1)
        waits.cancel()
        await until_async(lambda: it.boss.work("b").waiting == 0)


async def test_only_an_admin_key_may_load_models(tmp_path, keyed):
    key, settings = keyed
    async with serving(tmp_path, dynamic=True, **settings) as it:
        body = json.dumps({"model_name": "c", "url": "/opt/ml/models/c/model"})
        for method, path in (("POST", "/models"), ("GET", "/models"), ("DELETE", "/models/a")):
            for headers, status in (({}, 401), (bearer(key), 403)):
                answer = await it.client.request(method, path, content=body, headers=headers)
                assert answer.status_code == status
        assert it.boss.calls == []
        loads = asyncio.create_task(
            it.client.post("/models", content=body, headers=bearer(ADMIN), timeout=60)
        )
        await until_async(lambda: it.boss.calls)
        it.boss.tell(Answer(it.boss.calls[0].number, 507, "there is room for 1 GiB"))
        assert (await loads).status_code == 507


async def test_the_list_of_models_has_pages(own):
    for name in "dc":
        own.boss.rows[name] = Row(name, f"/{name}", "cold", "127.0.0.1:1", False, False, "")
    own.boss.tell()
    await until_async(lambda: len(own.router._models.rows) == 4)

    async def page(query):
        found = (await own.client.get(f"/models?{query}")).json()
        return [it["modelName"] for it in found["models"]], found.get("nextPageToken")

    assert await page("") == (["a", "b", "c", "d"], None)
    assert await page("limit=4") == (["a", "b", "c", "d"], None)
    assert await page("limit=1000") == (["a", "b", "c", "d"], None)
    names, token = await page("limit=2")
    assert names == ["a", "b"]
    del own.boss.rows["a"], own.boss.rows["b"]  # no model is left out for it
    own.boss.tell()
    await until_async(lambda: len(own.router._models.rows) == 2)
    assert await page(f"limit=1&next_page_token={token}") == (["c"], "c")
    assert await page("next_page_token=c") == (["d"], None)
    assert await page("next_page_token=z") == ([], None)
    for limit in ("0", "-1", "x", ""):
        answer = await own.client.get(f"/models?limit={limit}")
        assert answer.status_code == 400
        assert f"limit={limit!r}" in answer.json()["message"]
    assert (await own.client.get(f"/models?limit={'0' * 5000}1")).status_code == 400


@pytest.mark.parametrize(
    ("query", "body"),
    [("model_name=c&url=/c&synchronous=perhaps", ""), ("", '{"model_name": "c", "url": 5}')],
)
async def test_a_call_with_an_invalid_value_is_told_which(tmp_path, query, body):
    async with serving(tmp_path, dynamic=True) as it:
        answer = await it.client.post(f"/models?{query}", content=body)
    assert answer.status_code == 400
    assert ("$.synchronous" if query else "$.url") in answer.json()["message"]


async def test_when_the_supervisor_is_gone_calls_are_answered(tmp_path):
    async with serving(tmp_path, dynamic=True) as it:
        unloads = asyncio.create_task(it.client.delete("/models/a", timeout=60))
        await until_async(lambda: it.boss.calls)
        it.boss._writer.close()
        assert (await unloads).status_code == 503
        loads = asyncio.create_task(it.client.delete("/models/b", timeout=60))
        await until_async(lambda: len(it.boss.calls) == 2)  # the router connects again
        it.boss.tell(Answer(it.boss.calls[1].number, 200, ""))
        assert (await loads).status_code == 200


async def test_requests_for_one_model_leave_room_for_those_of_another(tmp_path, monkeypatch):
    monkeypatch.setattr("serving.router.router.MOST_HELD", 4)
    async with serving(tmp_path) as it:
        for_a = [ask(it, "a") for _ in range(4)]
        await until_async(lambda: it.boss.work("a") and it.boss.work("a").waiting == 4)
        assert (await ask(it, "a")).status_code == 503
        for_b = [ask(it, "b") for _ in range(2)]
        await until_async(lambda: it.boss.work("b").waiting == it.boss.work("a").waiting == 2)
        assert (await ask(it, "b")).status_code == 503  # each has its half
        await until_async(lambda: sum(one.done() for one in for_a) == 2)
        refused = [(await one).status_code for one in for_a if one.done()]
        assert refused == [503, 503]
        await ready(it, "a")
        await ready(it, "b")
        answers = [await one for one in (*for_a, *for_b)]
        assert sorted(one.status_code for one in answers) == [200] * 4 + [503] * 2


async def test_a_drain_refuses_those_that_wait(own):
    waits = ask(own, "a")
    await until_async(lambda: own.boss.work("a") and own.boss.work("a").waiting == 1)
    own.router.stop()
    assert (await waits).status_code == 503


async def test_a_line_without_end_is_not_read(tmp_path):
    closed = asyncio.Event()

    async def endless(reader, writer):
        writer.write(b"x" * (LONGEST + 2))
        await reader.read()
        writer.transport.abort()  # it would wait until what is left has been sent
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        closed.set()

    door = Door(folder=tmp_path, dynamic=False, closed=False)
    async with await asyncio.start_unix_server(endless, door.socket):
        with pytest.raises(ValueError, match="limit"):
            await OwnModels(door).follow(dict, lambda before: None)
        await closed.wait()
