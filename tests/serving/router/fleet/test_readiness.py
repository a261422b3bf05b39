# SPDX-License-Identifier: Apache-2.0
"""The readiness of foreign servers: /ping, /health or /v1/models shows it, whichever they have."""

import pytest

from tests.serving.router.conftest import routing, sends, whole
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

PING, HEALTH, MODELS = "/ping", "/health", "/v1/models"
KEY = "a-key-of-the-servers"


def state(it):
    """The replica's state; None until it is known."""
    return next((one.state for one in it.router.pool.replicas), None)


async def states(it):
    found = await it.client.get("/replicas")
    return [(one["state"], one["detail"]) for one in found.json()["replicas"]]


@pytest.mark.parametrize("absent", [404, 405, 501])
@pytest.mark.parametrize("paths", [(PING,), (PING, HEALTH)])
async def test_the_first_path_that_is_there_says_it(paths, absent):
    """vLLM's Rust front end has no /ping; other servers have /v1/models only."""
    async with routing(1, wait=False) as it:
        it.fleet[0].statuses = dict.fromkeys(paths, absent)
        await it.ready()
        assert (await it.post({"prompt": "a"})).status_code == 200
        assert (await it.client.get("/ping")).status_code == 200


@pytest.mark.parametrize("status", [503, 500, 401, 302])
@pytest.mark.parametrize("path", [PING, HEALTH, MODELS])
async def test_any_other_answer_of_that_path_is_not_ready(path, status):
    async with routing(1, wait=False) as it:
        replica = it.fleet[0]
        before = [PING, HEALTH, MODELS][: [PING, HEALTH, MODELS].index(path)]
        replica.statuses = {**dict.fromkeys(before, 404), path: status}
        replica.ping = status, {}
        await until_async(lambda: path in replica.probed)
        await until_async(lambda: state(it) == "failed")
        (found,) = await states(it)
        assert found[1].startswith(f"{path} answered {status}")
        assert (await it.post({"prompt": "a"})).status_code == 503
        replica.statuses[path], replica.ping = 200, (200, {})
        await it.ready()


@pytest.mark.parametrize("status", [200, 204, 299])
async def test_any_success_is_ready(status):
    async with routing(1, wait=False) as it:
        it.fleet[0].statuses = {PING: 404, HEALTH: status}
        await it.ready()


async def test_a_server_with_none_of_them_is_asked_until_it_has_one():
    async with routing(1, wait=False) as it:
        replica = it.fleet[0]
        replica.statuses = dict.fromkeys((PING, HEALTH, MODELS), 404)
        await until_async(lambda: state(it) == "failed")
        assert await states(it) == [("failed", "it has neither /ping nor /health nor /v1/models")]
        del replica.statuses[MODELS]
        await it.ready()


async def test_the_path_is_kept_while_it_answers_and_then_searched_again():
    async with routing(1, wait=False) as it:
        replica = it.fleet[0]
        replica.statuses = {PING: 404}
        await it.ready()
        replica.probed.clear()
        replica.statuses[PING] = 503  # that is not its path
        for _ in range(3):
            replica.probed.pop(HEALTH, None)
            await until_async(lambda: HEALTH in replica.probed)
        assert PING not in replica.probed
        assert state(it) == "ready"
        await replica.stop()
        await until_async(lambda: state(it) == "down")
        await replica.start()  # another server has its address now
        await until_async(lambda: state(it) == "failed")
        assert await states(it) == [("failed", "/ping answered 503")]


async def test_a_path_that_is_gone_is_looked_for_anew():
    async with routing(1, wait=False) as it:
        replica = it.fleet[0]
        replica.statuses = {PING: 404}
        await it.ready()
        replica.statuses = {HEALTH: 404}
        replica.probed.clear()
        await until_async(lambda: replica.pings > 2)
        assert state(it) == "ready"


async def test_a_change_of_adapters_does_not_take_a_server_without_ping_for_one_that_has_ended():
    async with routing(1, wait=False) as it:
        it.fleet[0].statuses = {PING: 404}
        await it.ready()
        it.fleet[0].answer = sends(whole(503, b'{"error":"busy"}'))
        answer = await it.client.post("/adapters?name=a&src=b")
        assert (answer.status_code, answer.text) == (503, '{"error":"busy"}')


@pytest.mark.parametrize("secret", [None, "s" * 32])
async def test_the_routers_own_questions_have_the_servers_key(secret):
    """Clients' requests carry their own keys, as always."""
    options = {"router_secret": secret} if secret else {}
    async with routing(1, wait=False, knows=False, router_replica_key=KEY, **options) as it:
        replica = it.fleet[0]
        replica.statuses = {PING: 404, HEALTH: 404}
        await it.ready()
        await until_async(lambda: {"/metrics", MODELS} <= {*replica.probed})
        for path in ("/metrics", MODELS):
            assert replica.probed[path].headers["authorization"] == f"Bearer {KEY}"
        for path in (PING, HEALTH):
            assert "authorization" not in replica.probed[path].headers
        await it.post({"prompt": "a"})
        assert "authorization" not in replica.asked[-1].headers
        assert KEY not in (await it.client.get("/replicas")).text


async def test_a_server_that_proves_the_secret_is_not_sent_the_others_key():
    async with routing(1, router_secret="s" * 32, router_replica_key=KEY) as it:
        await until_async(lambda: {"/metrics", MODELS} <= {*it.fleet[0].probed})
        for path in ("/metrics", MODELS):
            assert "authorization" not in it.fleet[0].probed[path].headers


async def test_a_server_that_wants_a_key_says_which_option_has_it():
    async with routing(1, wait=False) as it:
        it.fleet[0].statuses = {PING: 404, HEALTH: 404, MODELS: 401}
        await until_async(lambda: state(it) == "failed")
        ((_, detail),) = await states(it)
        assert detail == "/v1/models answered 401; OPTION_ROUTER_REPLICA_KEY is for servers' keys"
