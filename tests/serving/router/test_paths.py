# SPDX-License-Identifier: Apache-2.0
"""Paths of foreign servers."""

import json

import pytest

from lmi_config.options import settings
from lmi_config.options.settings import SettingsError
from serving.protocol import OTHERS_PATHS
from serving.router.routes import INFERENCE, Routes
from tests.serving.access.test_access import SECRET, bearer, written
from tests.serving.router.conftest import routing, sends, whole

pytestmark = pytest.mark.anyio

SOUND = bytes(range(256)) * 5000
OPTION = "OPTION_ROUTER_PATHS"


@pytest.mark.parametrize("path", OTHERS_PATHS)
async def test_paths_of_public_servers_are_passed_on(path):
    async with routing(1) as it:
        assert (await it.post({"input": "hello"}, path)).json()["replica"] == it.fleet[0].url
        refused = await it.client.get(path)
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        assert it.fleet[0].asked[-1].target == path


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/audio/speech", "application/json"),
        ("/v1/images/edits", "image/png"),
        ("/v1/images/edits", "application/octet-stream"),
        ("/mine/segment", "audio/wav"),
    ],
)
async def test_bytes_pass_as_they_are_both_ways(path, kind):
    async with routing(1, router_paths=("/mine/*",)) as it:
        it.fleet[0].answer = sends(whole(200, SOUND, "content-type: audio/mpeg"))
        body = json.dumps({"input": "a"}).encode() if "json" in kind else SOUND
        answer = await it.post(body, path, headers={"content-type": kind})
        assert answer.content == SOUND
        assert answer.headers["content-type"] == "audio/mpeg"
        assert it.fleet[0].asked[-1].body == body
        assert it.fleet[0].asked[-1].headers["content-type"] == kind


@pytest.mark.parametrize(
    "kind", ["image/png", "audio/wav", "video/mp4", "application/octet-stream"]
)
async def test_bytes_are_no_prompt(kind):
    """They have no prefix that a cache could hold, and their length does not count as tokens."""
    async with routing(1) as it:
        headers = {b"content-type": kind.encode()}
        found = it.router.routing.read(headers, SOUND, b"/v1/images/edits", None)
        assert found.tokens < 2_000
        assert not found.chain


async def test_paths_that_the_operator_names_are_passed_on():
    paths = ("/mine", "/custom/*")
    async with routing(1, router_paths=paths) as it:
        for path in ("/mine", "/mine?a=b", "/custom/a", "/custom/a/b.c:run"):
            assert (await it.post({}, path)).status_code == 200, path
            assert it.fleet[0].asked[-1].target == path
        assert (await it.client.get("/mine")).status_code == 405
        before = len(it.fleet[0].asked)
        for path in (
            *("/mine/a", "/custom", "/custom/", "/customs/a", "/custom//a", "/custom/../sleep"),
            *("/custom/%2e%2e/sleep", "/custom/./a", "/custom/a%2fb", "/custom/..;/sleep"),
            *("/custom/sleep", "/custom/a/load_lora_adapter", "/custom/a\\..\\sleep"),
        ):
            found = await it.answer(
                b"POST %b HTTP/1.1\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"
                % path.encode()
            )
            assert found.split()[1] in (b"404", b"400"), path
        assert len(it.fleet[0].asked) == before


async def test_all_else_is_404_and_names_the_option():
    async with routing(1) as it:
        answer = await it.post({}, "/mine")
        assert answer.status_code == 404
        assert (
            "there is nothing at /mine; where the servers have it, OPTION_ROUTER_PATHS=/mine has "
            "the router pass it on"
        ) in answer.text
        for path in ("/sleep", "/v1/load_lora_adapter", "/update_weights", "/api/pull"):
            answer = await it.post({}, path)
            assert (answer.status_code, OPTION in answer.text) == (404, False)
        assert OPTION not in (await it.client.get("/mine")).text
        assert not it.fleet[0].asked


async def test_they_are_inference_to_keys(tmp_path):
    options = {"api_keys_file": written(tmp_path / "keys.json"), "router_secret": SECRET}
    async with routing(1, router_paths=("/mine",), **options) as it:
        for path in ("/mine", "/generate", "/v1/audio/speech"):
            assert (await it.post({}, path)).status_code == 401
            assert (await it.post({}, path, headers=bearer("team-a"))).status_code == 200
        assert (await it.client.get("/mine", headers=bearer("team-a"))).status_code == 403
        assert (await it.post({}, "/other", headers=bearer("team-a"))).status_code == 403


def test_servers_of_many_models_are_asked_below_a_prefix_and_not_administered():
    """KServe's and Triton's."""
    routes = Routes(("/v2/models/*",))
    assert routes.of(b"POST", "/v2/models/m/versions/1/infer") is INFERENCE
    assert routes.of(b"POST", "/v2/models/m/trace/setting") is None
    assert routes.of(b"POST", "/v2/models/m/load") is None


def test_a_prefix_is_one_template():
    routes = Routes(("/mine", "/custom/*"))
    assert routes.of(b"POST", "/custom/a/b") is INFERENCE
    assert routes.of(b"DELETE", "/custom/a/b") is None
    assert [routes.template(it) for it in ("/mine", "/custom/a", "/generate", "/no")] == [
        *("/mine", "/custom/*", "/generate", "other"),
    ]


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("/generate", ("/generate",)),
        ("/a, /b/* /c:run", ("/a", "/b/*", "/c:run")),
        ("/v2/models/* /v1/models/m:predict", ("/v2/models/*", "/v1/models/m:predict")),
        (",".join(f"/p{n}" for n in range(64)), tuple(f"/p{n}" for n in range(64))),
    ],
)
def test_the_option_is_read(value, read):
    assert settings.read({OPTION: value}).router_paths == read


@pytest.mark.parametrize(
    "value",
    [
        *("generate", "/", "/*", "/a/", "/a//b", "/a/../b", "/a/./b", "/a?b=c", "/a%2fb", "/a*"),
        *("/a/*/b", "http://a/b", "/é", "/" + "a" * 200, ",".join(f"/p{n}" for n in range(65))),
        *("/sleep", "/wake_up", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/metrics"),
        *("/reset_prefix_cache", "/collective_rpc", "/start_profile", "/update_weights_from_disk"),
        *("/flush_cache", "/release_memory_occupation", "/set_internal_state", "/abort_request"),
        *("/api/pull", "/api/delete", "/slots", "/props", "/lora-adapters", "/v2/repository/index"),
        *("/adapters", "/models", "/models/a", "/server/logging", "/replicas", "/ui/status"),
        *("/v1/files", "/v1/batches", "/ping", "/health", "/livez", "/admin/x", "/Sleep"),
        *("/pause_generation", "/init_weights_update_group", "/shutdown", "/is_sleeping"),
        *("/v1/*", "/v2/*", "/api/*", "/server/*", "/models/*", "/ui/*"),
    ],
)
def test_what_the_option_cannot_have(value):
    with pytest.raises(SettingsError, match=OPTION):
        settings.read({OPTION: value})


def test_no_path_that_is_passed_on_administers_a_server():
    for path in OTHERS_PATHS:
        assert settings.read({OPTION: path}).router_paths == (path,)
