# SPDX-License-Identifier: Apache-2.0
"""Keys at the router, and what replicas hear of them."""

import pytest

from scripts.harness.wait import until_async
from serving.access.caller import ANYBODY
from serving.access.identity import Signer
from tests.serving.access.test_access import (
    ADMIN,
    KEY,
    ODD_PATHS,
    SECRET,
    bearer,
    status_of,
    written,
)
from tests.serving.router.conftest import routing

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
NAMES = ("authorization", "x-api-key", "x-slipway-identity")


@pytest.fixture
def options(tmp_path):
    return {"api_keys_file": written(tmp_path / "keys.json"), "router_secret": SECRET}


def sent(asked):
    """What a replica heard of who asks."""
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
            if made_up:  # with a secret it is read, and is nobody's
                assert answer.status_code == 401
                answer = await it.client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
            assert answer.status_code == 200
            (asked,) = [asked for asked in it.fleet[0].asked if asked.method == "POST"][-1:]
            heard = sent(asked)
            assert list(heard) == ["x-slipway-identity"]
            caller = Signer(SECRET).caller(heard["x-slipway-identity"].encode())
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
    """Where its requests go, and that they fail while its replica is away, would tell of it."""
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
            heard = sent(replica.probed["/metrics"])[name].encode()
            assert Signer(SECRET).caller(heard) == ANYBODY


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
