# SPDX-License-Identifier: Apache-2.0
"""The calls of adapters: two copies answer as one server does."""

import json
from contextlib import ExitStack

import httpx
import pytest

from serving.protocol import ADAPTERS
from tests.serving.copies.test_supervisor import ASK, Container
from tests.support.harness.process import Program
from tests.support.models import tiny_lora

REGISTER = {"name": "one", "src": "{one}", "preload": True}
CALLS = [
    # reads
    ("GET", "", None),
    ("GET", "?limit=0", None),
    ("GET", "?next_page_token=x", None),
    ("GET", "/missing", None),
    ("HEAD", "", None),
    # what is refused
    ("POST", "", b""),
    ("POST", "", b"{"),
    ("POST", "", b"[]"),
    ("POST", "", {"name": "one"}),
    ("POST", "", {"name": "one", "src": "/nowhere"}),
    ("POST", "", {"name": "../one", "src": "{one}"}),
    ("POST", "", {"name": "lmi", "src": "{one}"}),
    ("POST", "", {"name": "one", "src": "{one}", "pin": "perhaps"}),
    ("POST", "", {"name": "one", "src": "{one}", "pin": True, "preload": False}),
    ("PUT", "", REGISTER),
    ("DELETE", "", None),
    ("DELETE", "/missing", None),
    ("POST", "/missing/update", {"src": "{one}"}),
    ("GET", "/missing/update", None),
    ("POST", "/missing/other", None),
    # a life
    ("POST", "", REGISTER),
    ("POST", "", REGISTER),
    ("POST", "", {"name": "two", "src": "{two}"}),
    ("GET", "", None),
    ("GET", "?limit=1", None),
    ("GET", "?limit=1&next_page_token=1", None),
    ("GET", "/one", None),
    ("POST", "/one/update", {"src": "{two}", "preload": True}),
    ("GET", "/one", None),
    ("PATCH", "/one", None),
    ("DELETE", "/one", None),
    ("DELETE", "/one", None),
    ("DELETE", "/two", None),
    ("GET", "", None),
]
SHOWN = ("content-type", "allow", "retry-after")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """One server, a container with two copies, and the adapters' folders."""
    folder = tmp_path_factory.mktemp("adapters")
    folders = {name: tiny_lora.write(folder / name, 1) for name in ("one", "two")}
    environ = {"OPTION_ENABLE_LORA": "true", "OPTION_ADAPTER_ROOTS": str(folder)}
    with ExitStack() as stack:
        one, copies = (
            stack.enter_context(
                Container(tmp_path_factory.mktemp(count), OPTION_COPIES=count, **environ)
            )
            for count in ("1", "2")
        )
        Program.ready(one, 120)
        copies.ready(120)
        yield (one, copies), folders


def sent(body, folders):
    """The bytes of a body, with the adapters' folders."""
    if not isinstance(body, dict):
        return body
    text = json.dumps(body)
    for name, folder in folders.items():
        text = text.replace(f"{{{name}}}", str(folder))
    return text.encode()


def answered(server, method, path, content):
    it = httpx.request(method, server.url + path, content=content, timeout=20)
    kind = it.headers.get("content-type", "").startswith("application/json")
    said = it.json() if kind and it.content else it.text
    return it.status_code, {name: it.headers.get(name) for name in SHOWN}, said


@pytest.mark.parametrize("at", [it.replace("{model}", "lmi") for it in ADAPTERS])
def test_two_copies_answer_as_one_server(servers, at):
    found, folders = servers
    for method, path, body in CALLS:
        content = sent(body, folders)
        right, other = (answered(it, method, at + path, content) for it in found)
        assert other == right, (method, path, body)


def test_an_adapter_is_used_by_its_name_whichever_copy_answers(servers):
    found, folders = servers
    for server in found:
        query = f"name=named&src={folders['one']}"
        assert httpx.post(f"{server.url}/adapters?{query}", timeout=20).status_code == 200
        for _ in range(4):
            answer = httpx.post(
                f"{server.url}/v1/completions", json=ASK | {"model": "named"}, timeout=20
            )
            assert answer.status_code == 200
            assert answer.json()["model"] == "named"
        assert httpx.delete(f"{server.url}/adapters/named", timeout=20).status_code == 200
