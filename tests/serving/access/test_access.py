# SPDX-License-Identifier: Apache-2.0
"""Keys, through a real server and a real socket; only the engine is a fake."""

import asyncio
import json
import logging
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from lmi_config.options.declared import Settings
from lmi_config.options.settings import SettingsError
from serving import follow
from serving.access import keys
from serving.access.access import Access
from serving.access.caller import Caller
from serving.access.signed_identity import Signer, new_name
from serving.errors import Unauthorized
from serving.protocol import ENGINE_PATHS
from tests.serving.conftest import running
from tests.serving.lora.test_registry import registry, write
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

KEY, ADMIN, SECRET = "the-key-of-all-clients", "the-key-of-the-operator", "secret" * 8
ROWS = {
    "team-a": {},
    "team-a-too": {"tenant": "team-a"},
    "team-b": {},
    "old": {"expires": "2020-01-01"},
    "operator": {"admin": True},
    "adapters-only": {"models": [], "adapters": ["poet"]},
}
MESSAGES = {"model": "lmi", "max_tokens": 1, "messages": []}


def written(path, rows=ROWS):
    listed = [{"name": it, "sha256": keys.digest(it.encode()), **row} for it, row in rows.items()]
    path.write_text(json.dumps({"keys": listed}))
    return str(path)


def bearer(key):
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
async def kept(anyio_backend, folder):
    """A server with the keys above, for tests that leave it unchanged."""
    options = {"api_keys_file": written(folder / "keys.json"), "admin_api_key": ADMIN}
    async with running(**options, sessions_path=str(folder / "sessions")) as it:
        yield it


async def test_without_a_key_nothing_but_health_is_answered(kept):
    for path in ("/ping", "/health"):
        assert (await kept.client.get(path)).status_code == 200
    for path in ("/v1/models", "/metrics", "/server/metrics", "/adapters", "/models", "/nothing"):
        assert (await kept.client.get(path)).status_code == 401
    for path in ("/invocations", "/v1/completions"):
        answer = await kept.post(path, {"prompt": "a"})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"


async def test_each_api_has_its_own_error(kept):
    answer = await kept.post("/v1/completions", {"prompt": "a"}, headers=bearer("wrong-key"))
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert "wrong-key" not in answer.text
    answer = await kept.post("/v1/messages", MESSAGES, headers={"x-api-key": "wrong-key"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
    answer = await kept.invoke({"inputs": "a"}, headers=bearer("wrong-key"))
    assert (answer.status_code, answer.json()["code"]) == (401, 401)


@pytest.mark.parametrize(
    "headers",
    [
        bearer("team-a"),
        {"authorization": "bearer  team-a"},
        {"x-api-key": "team-a"},
        {"x-api-key": "team-a", **bearer("team-a")},
    ],
)
async def test_a_key_is_sent_in_either_header(kept, headers):
    answer = await kept.post("/v1/completions", {"prompt": "a"}, headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Basic team-a"},
        {"authorization": "team-a"},
        {"authorization": ""},
        {"x-api-key": "team-b", **bearer("team-a")},
        {"x-api-key": keys.digest(b"team-a")},
        {"x-slipway-identity": "team-a"},
        bearer("old"),
    ],
)
async def test_invalid_keys_are_refused(kept, headers):
    answer = await kept.post("/v1/completions", {"prompt": "a"}, headers=headers)
    assert answer.status_code == 401


async def test_administration_is_for_admin_keys(kept):
    for path in ("/metrics", "/adapters", "/models", "/server/metrics", "/kv_event_sources"):
        answer = await kept.client.get(path, headers=bearer("team-a"))
        assert answer.status_code == 403
        assert "admin key" in answer.text
        for key in (ADMIN, "operator"):
            answer = await kept.client.get(path, headers=bearer(key))
            assert answer.status_code in (200, 400, 404)  # 400: LoRA is not on
    for path in ("/v1/models", "/execution-parameters"):
        assert (await kept.client.get(path, headers=bearer("team-a"))).status_code == 200


ODD_PATHS = (
    *("//adapters", "/adapters/", "/./adapters", "/%61dapters", "/adapters%0a", "/ADAPTERS"),
    *("/v1/../adapters", "/v1/%2e%2e/adapters", "/v1/..%2fadapters", "/ping/../adapters"),
    *("/adapters;/v1/", "/adapters#/v1/", "/adapters?/v1/", "/invocations/../adapters"),
    *("http://a/adapters", "http:///adapters", "/models/v1/adapters", "/ui/../adapters"),
)
"""Paths that lead to /adapters, or past its guard."""


async def status_of(url, method, target, key):
    """The status of the answer to a request whose target no client has normalised."""
    where = httpx.URL(url)
    reader, writer = await asyncio.open_connection(where.host, where.port)
    body = b'{"name": "poet", "src": "/"}'
    head = (
        f"{method} {target} HTTP/1.1\r\nhost: {where.host}:{where.port}\r\nconnection: close\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ")[1])


@pytest.mark.parametrize("target", ODD_PATHS)
async def test_no_way_to_the_administration_is_for_other_keys(kept, target):
    for method in ("GET", "HEAD", "POST", "DELETE", "PUT", "OPTIONS"):
        assert await status_of(kept.url, method, target, "team-a") in (400, 403, 404)


@pytest.mark.parametrize("path", ["/v1/completions", "/invocations", "/ping"])
async def test_a_newline_behind_a_path_makes_it_another(kept, path):
    assert await status_of(kept.url, "POST", f"{path}%0a", ADMIN) == 404


@pytest.mark.parametrize("path", ENGINE_PATHS)
async def test_what_the_engine_answers_is_for_every_key(kept, path):
    answer = await kept.post(path, {"prompt": "a"}, headers=bearer("team-a"))
    assert "admin key" not in answer.text
    assert (await kept.post(path, {"prompt": "a"})).status_code == 401


async def test_a_key_for_adapters_alone_does_not_get_the_model(kept):
    for path in ("/v1/completions", "/invocations"):
        answer = await kept.post(path, {"prompt": "a"}, headers=bearer("adapters-only"))
        assert answer.status_code == 403
        assert "may not use the model" in answer.text
    answer = await kept.post("/v1/completions", {"prompt": "a"}, headers=bearer("adapters-only"))
    assert answer.json()["error"]["code"] == "insufficient_permissions"


ADAPTER_HEADER = "x-amzn-sagemaker-adapter-identifier"


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/v1/completions", {"prompt": "a", "model": "{}"}, {}),
        ("/v1/completions", {"prompt": "a"}, {ADAPTER_HEADER: "{}"}),
        ("/v1/completions?adapter={}", {"prompt": "a"}, {}),
        ("/invocations", {"inputs": "a", "adapters": "{}"}, {}),
        ("/invocations", {"inputs": ["a", "b"], "adapters": ["poet", "{}"]}, {}),
    ],
)
async def test_an_adapter_of_others_is_as_one_that_is_not_here(kept, folder, path, body, headers):
    root = folder / "adapters"
    if not root.exists():
        kept.pipeline.adapters = registry(kept.engine, root)
        for name in ("poet", "lawyer"):
            write(root / name)
            where = {"name": name, "src": str(root / name)}
            made = await kept.client.post("/adapters", params=where, headers=bearer(ADMIN))
            assert made.status_code == 200

    async def ask(key, adapter):
        filled = {name: value.replace("{}", adapter) for name, value in headers.items()}
        content = json.dumps(body).replace("{}", adapter).encode()
        answer = await kept.post(
            path.replace("{}", adapter), content, headers={**filled, **bearer(key)}
        )
        return answer.status_code, answer.text.replace(adapter, "NAME")

    assert await ask("adapters-only", "lawyer") == await ask("adapters-only", "absent")
    assert (await ask("adapters-only", "lawyer"))[0] != 200
    assert (await ask("team-a", "lawyer"))[0] == (await ask("adapters-only", "poet"))[0] == 200


async def salt(served, key, **more):
    answer = await served.post("/v1/completions", {"prompt": "a", **more}, headers=bearer(key))
    assert answer.status_code == 200
    return served.engine.bodies[-1]["cache_salt"]


async def test_a_tenant_shares_caches_with_itself_alone(kept):
    one = await salt(kept, "team-a")
    assert await salt(kept, "team-a-too") == one
    assert await salt(kept, "team-b") != one
    assert await salt(kept, "team-a", cache_salt="mine") != one


async def test_a_key_overrules_the_header_that_names_tenants(folder):
    path = written(folder / "both.json")
    async with running(api_keys_file=path, api_key=KEY, cache_salt_header="X-Tenant") as it:
        one = await salt(it, "team-a")
        for name in ("team-a", "team-b"):
            await it.post(
                "/v1/completions", {"prompt": "a"}, headers={"x-tenant": name, **bearer("team-a")}
            )
            assert it.engine.bodies[-1]["cache_salt"] == one
            # The key that all clients have says nothing of tenants, and reaches no key's caches.
            await it.post(
                "/v1/completions", {"prompt": "a"}, headers={"x-tenant": name, **bearer(KEY)}
            )
            assert it.engine.bodies[-1]["cache_salt"] != one


async def test_no_header_has_what_keys_tenants_begin_with(kept):
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(kept.url).port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: a\r\nx-tenant: \x00team-a\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 400")
    writer.close()


async def test_retries_are_shared_within_a_tenant_only(kept):
    kept.engine.gate.clear()
    before = len(kept.engine.bodies)
    headers = {"x-amzn-sagemaker-inference-id": "one"}
    names = ("team-a", "team-a-too", "team-b")
    calls = [
        asyncio.create_task(kept.invoke({"inputs": "wait"}, headers={**headers, **bearer(name)}))
        for name in names
    ]
    await until_async(lambda: len(kept.engine.bodies) == before + 2)
    kept.engine.gate.set()
    assert [(await call).status_code for call in calls] == [200, 200, 200]
    assert len(kept.engine.bodies) == before + 2


async def test_a_session_is_its_tenants(kept):
    name = "X-Amzn-SageMaker-Session-Id"

    async def invoke(key, session, **body):
        return await kept.invoke(body, headers={name: session, **bearer(key)})

    begun = await invoke("team-a", "NEW_SESSION", requestType="NEW_SESSION")
    session = begun.headers[name].partition(";")[0]
    assert (await invoke("team-a-too", session, inputs="a")).status_code == 200
    for body in ({"inputs": "a"}, {"requestType": "CLOSE"}):
        answer = await invoke("team-b", session, **body)
        assert answer.status_code == 424
        assert "session not found" in answer.text
    assert (await invoke("team-a", session, requestType="CLOSE")).status_code == 200


async def test_no_key_is_in_a_log(kept, caplog, capfd):
    caplog.set_level(logging.INFO)
    await kept.invoke({"inputs": "a"}, headers=bearer("team-a-too"))
    await kept.invoke({"inputs": "a"}, headers=bearer("a-wrong-key-of-somebodys"))
    logged = caplog.text + "".join(capfd.readouterr())
    assert "a-wrong-key-of-somebodys" not in logged
    facts = [it.facts for it in caplog.records if it.name == "serving.access"]
    assert (facts[0]["key"], facts[0]["tenant"]) == ("team-a-too", "team-a")
    assert (facts[1]["status"], "key" in facts[1]) == (401, False)


async def test_one_key_for_all(folder):
    async with running(api_key=KEY) as it:
        assert (await it.invoke({"inputs": "a"}, headers=bearer(KEY))).status_code == 200
        assert (await it.invoke({"inputs": "a"})).status_code == 401
        assert (await it.client.get("/metrics", headers=bearer(KEY))).status_code == 403
        assert "cache_salt" not in it.engine.bodies[-1]


async def test_an_admin_key_alone_leaves_inference_open():
    async with running(admin_api_key=ADMIN) as it:
        for headers in ({}, bearer("none"), {"x-api-key": "none"}):
            assert (await it.invoke({"inputs": "a"}, headers=headers)).status_code == 200
            assert (await it.client.get("/metrics", headers=headers)).status_code == 403
        assert (await it.client.get("/metrics", headers=bearer(ADMIN))).status_code == 200


async def identity_for(it, caller, secret=SECRET):
    """The identity that a router with this secret signs for a server."""
    challenge = new_name()
    answer = await it.client.get("/ping", headers={"x-slipway-challenge": challenge})
    name = Signer(SECRET).name_of(answer.headers["x-slipway-introduction"], challenge)
    return Signer(secret).signed(caller, (name,)).decode()


async def test_a_server_with_a_secret_answers_its_router():
    async with running(router_secret=SECRET) as it:
        assert (await it.invoke({"inputs": "a"})).status_code == 401
        caller = Caller(name="team-a", tenant="team-a")
        identity = await identity_for(it, caller)
        answer = await it.invoke({"inputs": "a"}, headers={"x-slipway-identity": identity})
        assert answer.status_code == 200
        assert it.engine.bodies[-1]["cache_salt"]
        answer = await it.client.get("/metrics", headers={"x-slipway-identity": identity})
        assert answer.status_code == 403
        other = await identity_for(it, caller, "t" * 32)
        assert (
            await it.invoke({"inputs": "a"}, headers={"x-slipway-identity": other})
        ).status_code == 401


async def test_without_a_secret_an_identity_means_nothing():
    async with running() as it:
        identity = Signer(SECRET).signed(Caller(tenant="team-a"), ("anybody",)).decode()
        answer = await it.invoke({"inputs": "a"}, headers={"x-slipway-identity": identity})
        assert answer.status_code == 200
        assert "cache_salt" not in it.engine.bodies[-1]


async def test_keys_are_read_anew_and_a_broken_file_changes_nothing(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(follow, "LOOK_S", 0.01)
    caplog.set_level(logging.INFO)
    file = tmp_path / "keys.json"
    async with running(api_keys_file=written(file)) as it:

        async def status(key):
            return (await it.invoke({"inputs": "a"}, headers=bearer(key))).status_code

        async def until(key, code):
            while await status(key) != code:
                await asyncio.sleep(0.01)

        assert (await status("team-a"), await status("team-c")) == (200, 401)
        written(file, {"team-c": {}})
        await until("team-c", 200)
        assert await status("team-a") == 401
        file.write_text('{"keys": [{"name": "team-a", "sha256": "sk-not-a-hash-but-a-key"}]}')
        await until_async(lambda: "stay as they were" in caplog.text)
        assert "sk-not-a-hash-but-a-key" not in caplog.text
        assert await status("team-c") == 200
        file.unlink()
        await until_async(lambda: "No such file" in caplog.text)
        assert await status("team-c") == 200
        written(file)
        await until("team-a", 200)


def test_a_key_ends_when_it_says_and_a_clock_that_steps_back_brings_it_again(tmp_path):
    now = datetime(2026, 1, 1, tzinfo=UTC)
    file = written(tmp_path / "keys.json", {"team-a": {"expires": "2026-01-02"}})
    access = Access(Settings(api_keys_file=file), now=lambda: now)
    headers = [(b"authorization", b"Bearer team-a")]
    assert access.caller(headers).name == "team-a"
    now += timedelta(days=1)
    with pytest.raises(Unauthorized, match="has expired"):
        access.caller(headers)
    now -= timedelta(seconds=1)
    assert access.caller(headers).name == "team-a"


def test_what_stops_the_start(tmp_path):
    for content in (None, "keys: ["):
        file = tmp_path / "keys.yaml"
        if content:
            file.write_text(content)
        with pytest.raises(SettingsError, match=r"OPTION_API_KEYS_FILE='.*keys\.yaml'"):
            Access(Settings(api_keys_file=str(file)))
    with pytest.raises(SettingsError, match="needs OPTION_ROUTER_SECRET"):
        Access(Settings(api_keys_file=written(tmp_path / "keys.json")), routes=True)
