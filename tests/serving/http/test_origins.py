# SPDX-License-Identifier: Apache-2.0
"""Requests of web pages: browsers send them to any server, wherever a page is from. Only the engine
is a fake.
"""

import socket

import pytest

from serving.http.sockets import bound
from tests.serving.conftest import running
from tests.serving.router.conftest import routing

pytestmark = pytest.mark.anyio

APP = "https://app.example"
CHANGES = [
    ("POST", "/invocations"),
    ("POST", "/models/lmi/invoke"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/adapters?name=a&src=/b"),
    ("POST", "/adapters/a/update"),
    ("DELETE", "/adapters/a"),
    ("DELETE", "/models/lmi/adapters/a"),
    ("POST", "/nothing/here"),
]
FOREIGN = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:1234"},
    {"origin": "http://127.0.0.1.evil.example"},
    {"sec-fetch-site": "cross-site"},
]


@pytest.fixture(scope="module")
async def routed(anyio_backend):
    async with routing(1) as it:
        yield it


@pytest.mark.parametrize(("method", "path"), CHANGES)
async def test_a_foreign_page_changes_nothing(shared, routed, method, path):
    for headers in FOREIGN:
        before = len(shared.engine.bodies), len(routed.fleet[0].asked)
        for it in (shared, routed):
            content = b'{"prompt": "a", "requestType": "NEW_SESSION"}'
            answer = await it.client.request(method, path, content=content, headers=headers)
            assert (answer.status_code, answer.headers["content-type"]) == (403, "application/json")
            assert "SERVING_CORS_ALLOWED_ORIGIN" in answer.text
        assert before == (len(shared.engine.bodies), len(routed.fleet[0].asked))


async def test_it_may_look(shared, routed):
    for it in (shared, routed):
        for path in ("/ping", "/metrics"):
            assert (await it.client.get(path, headers=FOREIGN[0])).status_code == 200


async def test_pages_of_our_own_and_what_is_no_browser_may_call(shared, routed):
    for it in (shared, routed):
        url = str(it.client.base_url).rstrip("/")
        for headers in (
            {},
            {"origin": url, "sec-fetch-site": "same-origin"},
            {"origin": url.upper()},
            {"origin": "https://model", "host": "model"},  # a proxy ends TLS
            {"sec-fetch-site": "none"},
        ):
            answer = await it.client.post(
                "/invocations", content=b'{"inputs":"a"}', headers=headers
            )
            assert answer.status_code == 200
    assert "origin" not in routed.fleet[0].asked[-3].headers  # it has another host


async def test_origins_that_are_allowed_may_call():
    async with running(cors_allowed_origin=(APP,)) as it:
        answer = await it.invoke({"inputs": "a"}, headers={"origin": APP})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, APP)
        asking = {
            "origin": APP,
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type",
        }
        answer = await it.client.options("/invocations", headers=asking)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, APP)
        assert "content-type" in answer.headers["access-control-allow-headers"]
        answer = await it.invoke({"inputs": "a"}, headers=FOREIGN[0])
        assert answer.status_code == 403
    async with running(cors_allowed_origin=("*",)) as it:
        assert (await it.invoke({"inputs": "a"}, headers=FOREIGN[0])).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example"])
async def test_no_page_reaches_the_loopback_address_by_a_name_of_its_own(shared, routed, host):
    """DNS rebinding makes the page's origin equal to ours."""
    for it in (shared, routed):
        headers = {"host": host, "origin": f"http://{host}"}
        for method, path in (("POST", "/invocations"), ("GET", "/metrics")):
            answer = await it.client.request(method, path, headers=headers)
            assert answer.status_code == 403
            assert "OPTION_HOST" in answer.text


@pytest.mark.parametrize("host", ["localhost", "x:8080", "a.localhost:1", "10.0.0.1", "[::1]:8080"])
async def test_this_machines_own_names_reach_it(shared, host):
    assert (await shared.client.get("/ping", headers={"host": host})).status_code == 200


async def test_any_name_reaches_a_server_that_listens_on_all_addresses():
    async with running(host="0.0.0.0") as it:
        answer = await it.invoke({"inputs": "a"}, headers={"host": "model.example"})
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("host", "reached"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1 127.0.0.2"), ("::", "127.0.0.2 ::1")],
)
def test_it_listens_where_it_is_to(host, reached):
    with bound(host, 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        for address in ("127.0.0.1", "127.0.0.2", "::1"):
            if address in reached:
                socket.create_connection((address, port), timeout=5).close()
        if host == "127.0.0.1":
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", port), timeout=5)
