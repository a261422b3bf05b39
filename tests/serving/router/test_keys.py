# SPDX-License-Identifier: Apache-2.0
"""Keys at the router, and the callers' identities that replicas get."""

import asyncio

import pytest

from serving.access.caller import Caller
from tests.serving.access.test_access import (
    ADMIN,
    KEY,
    ODD_PATHS,
    SECRET,
    bearer,
    status_of,
    written,
)
from tests.serving.conftest import running
from tests.serving.router.conftest import _read, routing, sends, whole
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
NAMES = ("authorization", "x-api-key", "x-slipway-identity")


@pytest.fixture
def options(tmp_path):
    return {"api_keys_file": written(tmp_path / "keys.json"), "router_secret": SECRET}


def sent(asked):
    """The headers about the caller that a replica received."""
    return {name: value for name, value in asked.headers.items() if name in NAMES}


async def test_the_router_asks_for_keys_and_replicas_hear_whose_they_are(options):
    async with routing(1, **options, admin_api_key=ADMIN) as it:
        answer = await it.client.post(COMPLETIONS, json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await it.client.get("/ping")).status_code == 200
        for headers in ({"x-api-key": "team-a"}, bearer("team-a")):
            made_up = {"x-slipway-identity": "team-b"} if "x-api-key" in headers else {}
            answer = await it.client.post(
                COMPLETIONS, json={"prompt": "a"}, headers={**headers, **made_up}
            )
            if made_up:  # with a secret it is read, and belongs to nobody
                assert answer.status_code == 401
                answer = await it.client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
            assert answer.status_code == 200
            (asked,) = [asked for asked in it.fleet[0].asked if asked.method == "POST"][-1:]
            heard = sent(asked)
            assert list(heard) == ["x-slipway-identity"]
            caller = asked.caller(SECRET)
            assert (caller.name, caller.tenant, caller.admin) == ("team-a", "team-a", False)


async def test_administration_is_for_admin_keys(options):
    async with routing(1, **options, admin_api_key=ADMIN) as it:
        for path in ("/replicas", "/metrics", "/server/metrics", "/adapters", "/models"):
            assert (await it.client.get(path)).status_code == 401
            assert (await it.client.get(path, headers=bearer("team-a"))).status_code == 403
            assert (await it.client.get(path, headers=bearer(ADMIN))).status_code == 200
        for headers, status in ((bearer("team-a"), 403), (bearer(ADMIN), 200)):
            answer = await it.client.post("/adapters?name=a&src=b", headers=headers)
            assert answer.status_code == status
        (asked,) = [asked for asked in it.fleet[0].asked if asked.target.startswith("/adapters?")]
        assert list(sent(asked)) == ["x-slipway-identity"]


async def test_no_way_to_the_administration_is_for_other_keys(options):
    async with routing(1, **options) as it:
        before = len(it.fleet[0].asked)
        for target in ODD_PATHS:
            for method in ("GET", "HEAD", "POST", "DELETE", "PUT", "OPTIONS"):
                assert await status_of(it.url, method, target, "team-a") in (400, 403, 404)
        assert len(it.fleet[0].asked) == before


async def test_an_adapter_of_others_is_as_one_that_is_not_here(tmp_path):
    """Otherwise the place of its requests, and their failure while its replica is away, would
    reveal it.
    """
    file = written(tmp_path / "keys.json", {"team-a": {}, "team-b": {"adapters": []}})
    options = {"api_keys_file": file, "router_secret": SECRET, "routing_strategy": "roundrobin"}
    async with routing(2, wait=False, **options) as it:
        it.fleet[1].models.append({"id": "poet", "parent": "base"})
        await it.ready()

        async def replicas(key):
            body = {"prompt": "a", "model": "poet"}
            answers = [
                await it.client.post(COMPLETIONS, json=body, headers=bearer(key)) for _ in range(4)
            ]
            return {answer.json()["replica"] for answer in answers}

        assert await replicas("team-a") == {it.fleet[1].url}
        assert await replicas("team-b") == {replica.url for replica in it.fleet}


async def test_a_server_that_has_just_restarted_does_not_know_the_router(options):
    """Another one does. The client's key is good, so it never hears of it."""
    async with routing(2, **options) as it:
        it.fleet[0].answer = sends(whole(401, b"for another server"))
        for _ in range(20):
            found = await it.post({"prompt": "Hi"}, headers=bearer("team-a"))
            assert found.json()["replica"] == it.fleet[1].url
        assert it.fleet[0].asked


async def test_kubernetes_asks_without_a_key_whether_it_works(options):
    async with routing(1, **options) as it:
        it.fleet[0].ping = 503, {"status": "starting"}
        await until_async(lambda: not it.router.pool.ready)
        assert (await it.client.get("/ping")).status_code == 503
        assert (await it.client.get("/livez")).status_code == 200
        assert (await it.client.post("/livez")).status_code == 405


async def test_without_keys_of_its_own_it_passes_credentials_on(caplog):
    async with routing(1) as it:
        headers = {**bearer("mine"), "x-api-key": "mine", "x-slipway-identity": "made-up"}
        await it.client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
        assert sent(it.fleet[0].asked[-1]) == {**bearer("mine"), "x-api-key": "mine"}
        await it.client.post("/adapters?name=a&src=b", headers=headers)
        assert sent(it.fleet[0].asked[-1]) == {**bearer("mine"), "x-api-key": "mine"}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"router_secret": SECRET}, "x-slipway-identity"),
        ({"api_key": KEY}, "authorization"),
        ({"admin_api_key": ADMIN}, "authorization"),
        ({"router_secret": SECRET, "api_key": KEY}, "x-slipway-identity"),
    ],
)
async def test_its_own_questions_have_a_key(options, name):
    async with routing(1, **options) as it:
        replica = it.fleet[0]
        await until_async(lambda: {"/metrics", "/v1/models"} <= {*replica.probed})
        for path in ("/metrics", "/v1/models"):
            assert list(sent(replica.probed[path])) == [name]
        if name == "x-slipway-identity":
            for path in ("/metrics", "/v1/models"):
                assert replica.probed[path].caller(SECRET) == Caller(paths=(path,))


async def test_tenants_are_apart_in_what_it_knows_of_caches(options):
    async with routing(2, **options) as it:
        body = {"prompt": "word " * 2000}

        async def decision(key):
            headers = {**bearer(key), "x-slipway-route": "1"}
            answer = await it.client.post(COMPLETIONS, json=body, headers=headers)
            return answer.headers["x-slipway-route"]

        assert "engine 0 of" in await decision("team-a")
        assert "engine 0 of" not in await decision("team-a-too")
        assert "engine 0 of" in await decision("team-b")


async def test_an_address_that_does_not_prove_the_secret_gets_nothing_that_is_signed(options):
    """It gets no signed header, neither with the router's own probes nor with clients' requests,
    and no client's key.
    """
    async with routing(1, knows=False, **options, admin_api_key=ADMIN) as it:
        replica = it.fleet[0]
        for path in ("/metrics", "/v1/models"):
            assert not sent(replica.probed[path])
        for target in (COMPLETIONS, "/adapters?name=a&src=b"):
            await it.client.post(target, json={"prompt": "a"}, headers=bearer(ADMIN))
            assert not sent(replica.asked[-1])
        replica.secret = "t" * 32  # another's
        before = replica.pings
        await until_async(lambda: replica.pings > before + 2)
        await it.client.post(COMPLETIONS, json={"prompt": "a"}, headers=bearer("team-a"))
        assert not sent(replica.asked[-1])


async def test_an_address_that_another_server_takes_over_gets_nothing_any_more(options):
    async with routing(1, **options) as it:
        replica = it.fleet[0]
        await it.client.post(COMPLETIONS, json={"prompt": "a"}, headers=bearer("team-a"))
        assert sent(replica.asked[-1])
        replica.secret, before = None, replica.pings
        await until_async(lambda: replica.pings > before + 2)
        await it.client.post(COMPLETIONS, json={"prompt": "a"}, headers=bearer("team-a"))
        assert not sent(replica.asked[-1])


async def test_what_is_signed_for_one_server_is_worth_nothing_at_another(options, monkeypatch):
    """A server in the middle gets the requests for the server behind it, and no admin
    rights there.
    """
    async with (
        running(router_secret=SECRET) as server,
        routing(1, knows=False, **options, admin_api_key=ADMIN) as it,
    ):
        middle = it.fleet[0]
        taken: dict[str, str] = {}

        async def relays(reader, writer):
            """Passes requests on to the server, and keeps the signed identities."""
            try:
                asked = await _read(reader)
            except asyncio.IncompleteReadError:  # the router may close a connection unused
                writer.close()
                return
            assert asked
            if token := sent(asked).get("x-slipway-identity"):
                taken[asked.target] = token
            answer = await server.client.request(
                asked.method, asked.target, headers=asked.headers, content=asked.body
            )
            proof = answer.headers.get("x-slipway-introduction")
            lines = [f"x-slipway-introduction: {proof}"] if proof else []
            writer.write(whole(answer.status_code, answer.content, *lines))
            writer.close()

        monkeypatch.setattr(middle, "_serve", relays)
        await middle.stop()
        await it.ready(0)
        await middle.start()
        await it.ready()
        await it.client.post(COMPLETIONS, json={"prompt": "a"}, headers=bearer("team-a"))

        async def status(client, path, identity):
            return (await client.get(path, headers={"x-slipway-identity": identity})).status_code

        assert taken["/metrics"] != taken["/v1/models"]
        async with running(router_secret=SECRET) as other:
            for token in (taken["/metrics"], taken["/v1/models"], taken[COMPLETIONS]):
                for path in ("/metrics", "/v1/models", "/adapters"):
                    assert await status(other.client, path, token) == 401
                    assert await status(it.client, path, token) == 401
        assert await status(server.client, "/metrics", taken["/metrics"]) == 200
        for path in ("/v1/models", "/adapters", "/server/metrics", "/ui/status"):
            assert await status(server.client, path, taken["/metrics"]) == 403
        answer = await server.client.post(
            COMPLETIONS, json={"prompt": "a"}, headers={"x-slipway-identity": taken["/metrics"]}
        )
        assert answer.status_code == 403


async def test_routers_before_routers_are_servers_too(options):
    async with routing(1, **options) as inner:
        outer = {**options, "router_replicas": inner.url}
        async with routing(0, wait=False, **outer) as it:
            await it.ready(1)
            answer = await it.client.post(
                COMPLETIONS, json={"prompt": "a"}, headers=bearer("team-a")
            )
            assert answer.status_code == 200
            assert inner.fleet[0].asked[-1].caller(SECRET).tenant == "team-a"
