# SPDX-License-Identifier: Apache-2.0
"""Keys on the real engine with tiers, directly and through the router."""

import json
from typing import Any

import anthropic
import openai
import pytest

from serving.access import keys
from tests.e2e.conftest import serving

NAMES = ("team-a", "team-a-too", "team-b")
LMCACHE = "max_local_cpu_size: 0.5\n"
SECRET = "secret" * 8
ADMIN = "the-key-of-the-operator"


def bearer(key):
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    (folder / "lmcache.yaml").write_text(LMCACHE)
    rows = [{"name": it, "sha256": keys.digest(it.encode())} for it in NAMES]
    rows[1]["tenant"] = NAMES[0]
    (folder / "keys.json").write_text(json.dumps({"keys": rows}))
    return {
        "OPTION_API_KEYS_FILE": str(folder / "keys.json"),
        "OPTION_ADMIN_API_KEY": ADMIN,
        "OPTION_ROUTER_SECRET": SECRET,
        "OPTION_LMCACHE_CONFIG_FILE": str(folder / "lmcache.yaml"),
    }


@pytest.fixture(scope="module")
def served(options, tiny_options, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("served") / "log", **tiny_options, **options) as it:
        it.ready()
        yield it


@pytest.fixture(scope="module")
def routed(options, served, tmp_path_factory):
    more = {"OPTION_ROUTER_REPLICAS": served.url, **options}
    log = tmp_path_factory.mktemp("routed") / "log"
    with serving(log, "./entrypoint.sh", "route", **more) as it:
        it.ready()
        yield it


def ask(it, key, text):
    """The text of an answer, and how many of the prompt's tokens were cached."""
    body = {"prompt": text, "max_tokens": 8, "temperature": 0, "model": "lmi"}
    answer = it.client.post("/v1/completions", json=body, headers=bearer(key), timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    details = found["usage"]["prompt_tokens_details"]
    return found["choices"][0]["text"], (details or {}).get("cached_tokens") or 0


@pytest.mark.parametrize("where", ["served", "routed"])
@pytest.mark.parametrize("cache", ["engine", "tiers"])
def test_two_keys_and_one_document(where, cache, served, request):
    it = request.getfixturevalue(where)
    document = f"{where} {cache}: " + "The import statement is one of many that bind names. " * 120
    text, cached = ask(it, "team-a", document)
    assert cached == 0
    if cache == "tiers":  # the engine's own caches have nothing left of it
        for n in range(12):
            ask(it, "team-b", f"{n} " + "Others fill what the engine has of memory. " * 300)
    again, cached = ask(it, "team-a-too", document)
    assert (again, cached > 1000) == (text, True)
    again, cached = ask(it, "team-b", document)
    assert (again, cached) == (text, 0)


def test_real_clients_and_a_wrong_key(served, routed):
    for it in (served, routed):
        client = openai.OpenAI(base_url=f"{it.url}/v1", api_key="team-a", max_retries=0)
        assert client.completions.create(model="lmi", prompt="a", max_tokens=1).choices
        with pytest.raises(openai.AuthenticationError) as refused:
            client.with_options(api_key="wrong").models.list()
        assert refused.value.code == "invalid_api_key"
        messages = anthropic.Anthropic(base_url=it.url, api_key="team-a", max_retries=0)
        message = {"role": "user", "content": "a"}
        asked: Any = {"model": "lmi", "max_tokens": 1, "messages": [message]}
        assert messages.messages.create(**asked).content is not None
        with pytest.raises(anthropic.AuthenticationError):
            messages.with_options(api_key="wrong").messages.create(**asked)
        assert it.client.get("/metrics", headers=bearer("team-a")).status_code == 403
        assert it.client.get("/metrics", headers=bearer(ADMIN)).status_code == 200


def test_no_key_is_in_what_is_logged(served, routed):
    for it in (served, routed):
        log = it.log.read_text()
        assert ADMIN not in log
        assert SECRET not in log
        assert "Bearer" not in log
