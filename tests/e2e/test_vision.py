# SPDX-License-Identifier: Apache-2.0
"""A vision-language model on the real engine, with tiers: images in chats."""

import base64
import io
import json

import pytest
from PIL import Image

from serving.access import keys
from tests.e2e.conftest import serving
from tests.support.models import tiny_vision

KEY, ADMIN = "the-key-of-a-gateway", "the-key-of-the-operator"
"""The gateway's key names no tenant; a header does."""


def with_a_key(request):
    """A request without a key gets the gateway's key, or the operator's for /metrics."""
    key = ADMIN if request.url.path == "/metrics" else KEY
    request.headers.setdefault("authorization", f"Bearer {key}")
    return request


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    tenants = {"team-a": "team-a", "team-a-too": "team-a", "team-b": "team-b"}
    rows = [
        {"name": name, "sha256": keys.digest(name.encode()), "tenant": tenant}
        for name, tenant in tenants.items()
    ]
    (folder / "keys.json").write_text(json.dumps({"keys": rows}))
    return {
        "OPTION_API_KEYS_FILE": str(folder / "keys.json"),
        "OPTION_ADMIN_API_KEY": ADMIN,
        "OPTION_ROUTER_SECRET": "secret" * 8,
    }


@pytest.fixture(scope="module")
def seeing(tiny_options, keyed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    (folder / "lmcache.yaml").write_text("max_local_cpu_size: 0.5\n")
    environ = {
        **tiny_options,
        "OPTION_MODEL_ID": str(tiny_vision.make()),
        "OPTION_MAX_MODEL_LEN": "1024",
        "OPTION_KV_CACHE_MEMORY_BYTES": "8M",  # 4,000 tokens
        "OPTION_DTYPE": "float32",  # in 16 bits, the cached part decides between near ties
        "OPTION_LMCACHE_CONFIG_FILE": str(folder / "lmcache.yaml"),
        "OPTION_ALLOWED_MEDIA_DOMAINS": "localhost",
        "OPTION_CACHE_SALT_HEADER": "X-Tenant",
        "OPTION_API_KEY": KEY,
        **keyed,
    }
    with serving(folder / "log", **environ) as it:
        it.ready()
        it.client.auth = with_a_key
        it.openai = it.openai.with_options(api_key=KEY)
        yield it


@pytest.fixture(scope="module")
def routed(seeing, keyed, tmp_path_factory):
    more = {"OPTION_ROUTER_REPLICAS": seeing.url, **keyed}
    log = tmp_path_factory.mktemp("routed") / "log"
    with serving(log, "./entrypoint.sh", "route", **more) as it:
        it.ready()
        yield it


def png(colour):
    file = io.BytesIO()
    Image.new("RGB", (32, 32), colour).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def chat(url, **more):
    image = {"type": "image_url", "image_url": url and {"url": url}, **more}
    content = [image, {"type": "text", "text": "import"}]
    body = {"messages": [{"role": "user", "content": content}]}
    return body | {"max_tokens": 5, "temperature": 0}


def test_images_are_seen(seeing):
    answers = [seeing.invoke(chat(png(colour))).json() for colour in ("red", "blue", "red")]
    red, blue, again = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert red == again != blue
    found = seeing.openai.chat.completions.create(model="lmi", **chat(png("red")))
    assert found.choices[0].message.content == red


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("https://elsewhere.example/a.png", "OPTION_ALLOWED_MEDIA_DOMAINS"),
        ("http://localhost:{port}/ping", "localhost"),  # allowed by its name, but private
        ("file:///etc/passwd", "data:, https: and http: URLs only"),
        ("data:image/png;base64,AAAA", ""),
    ],
)
def test_images_that_cannot_be_had(seeing, url, told):
    answer = seeing.invoke(chat(url.format(port=seeing.port)))
    assert answer.status_code == 424
    assert told in answer.json()["error"]
    assert seeing.invoke(chat(png("red"))).status_code == 200


def answered(seeing, tenant, url, **more):
    """The status, and the text of an answer with status 200."""
    answer = seeing.invoke(chat(url, **more), **{"X-Tenant": tenant})
    if answer.status_code != 200:
        return answer.status_code, None
    return 200, answer.json()["choices"][0]["message"]["content"]


def test_a_uuid_names_only_the_tenants_own_image(seeing):
    """The engine takes an image that it has from its cache, by the uuid that a client gave it."""
    red, blue = png("red"), png("blue")
    _, of_red = answered(seeing, "a", red)
    _, of_blue = answered(seeing, "b", blue)
    assert of_red != of_blue
    assert answered(seeing, "a", red, uuid="invoice") == (200, of_red)
    assert answered(seeing, "a", None, uuid="invoice") == (200, of_red)
    assert answered(seeing, "b", None, uuid="invoice") == (424, None)  # it has sent none so named
    assert answered(seeing, "b", blue, uuid="invoice") == (200, of_blue)
    assert answered(seeing, "b", None, uuid="invoice") == (200, of_blue)
    assert answered(seeing, "a", None, uuid="invoice") == (200, of_red)


def test_tenants_share_no_images_in_the_engines_caches(seeing):
    """Otherwise the time to an answer would tell whether somebody has sent the same image."""

    def hits(tenant):
        seeing.counted()
        before = seeing.metric("vllm:mm_cache_hits_total")
        assert answered(seeing, tenant, png("green"))[0] == 200
        seeing.counted()
        return seeing.metric("vllm:mm_cache_hits_total") - before

    assert [hits(tenant) for tenant in ("a", "a", "b", "b")] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("where", "cache", "colour", "another"),
    [
        ("seeing", "engine", "yellow", "gold"),
        ("routed", "engine", "purple", "indigo"),
        ("seeing", "tiers", "orange", "coral"),
        ("routed", "tiers", "teal", "cyan"),
    ],
)
def test_two_keys_and_one_picture(where, cache, colour, another, seeing, request):
    it = request.getfixturevalue(where)

    def ask(key, colour=colour):
        """The answer, whether any of the prompt was cached, and how many pictures were."""
        seeing.counted()
        before = seeing.metric("vllm:mm_cache_hits_total")
        headers = {"authorization": f"Bearer {key}"}
        body = chat(png(colour)) | {"model": "lmi"}
        body["messages"][0]["content"][1]["text"] = "import " * 600  # two of the tiers' chunks
        answer = it.client.post("/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        cached = (found["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        seeing.counted()
        hits = seeing.metric("vllm:mm_cache_hits_total") - before
        return found["choices"][0]["message"]["content"], cached > 0, hits

    text, *anew = ask("team-a")
    assert anew == [False, 0]
    if cache == "tiers":  # the engine's own cache has nothing left of it
        for n in range(8):
            seeing.invoke({"inputs": f"{n} " + "class " * 900}).raise_for_status()
    loaded = seeing.metric("vllm:external_prefix_cache_hits_total")
    assert ask("team-a-too") == (text, True, 1)
    loaded = seeing.metric("vllm:external_prefix_cache_hits_total") - loaded
    assert (loaded > 256) == (cache == "tiers")
    assert ask("team-b") == (text, False, 0)
    assert not ask("team-a", another)[1]  # its text is the same


def of_responses(url, text):
    picture = {"type": "input_image", "image_url": url}
    content = [picture, {"type": "input_text", "text": text}]
    return {"input": [{"role": "user", "content": content}]}


def of_a_function(url, text):
    output = [{"type": "input_image", "image_url": url}]
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    asked = {"role": "user", "content": text}
    return {
        "input": [asked, call, {"type": "function_call_output", "call_id": "1", "output": output}]
    }


def of_messages(url, text):
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    picture = {"type": "image", "source": source}
    return {"messages": [{"role": "user", "content": [picture, {"type": "text", "text": text}]}]}


def of_a_tool(url, text):
    (asked,) = of_messages(url, text)["messages"]
    picture, words = asked["content"]
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [picture]}
    turns = (("user", [words]), ("assistant", [call]), ("user", [result]))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize("shape", [of_responses, of_a_function, of_messages, of_a_tool])
def test_two_tenants_of_agents_and_one_picture(seeing, shape):
    """Their APIs have no names for pictures."""
    body = shape(png((7, 9, len(shape.__name__))), f"{shape.__name__} " + "import " * 200)
    path = "/v1/responses" if "input" in body else "/v1/messages"
    length = "max_output_tokens" if "input" in body else "max_tokens"
    body |= {"model": "lmi", length: 5, "stream": False}

    def ask(tenant):
        """The answer, whether any of the prompt was cached, and how many pictures were."""
        seeing.counted()
        before = seeing.metric("vllm:mm_cache_hits_total")
        answer = seeing.client.post(path, json=body, headers={"X-Tenant": tenant})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        usage = found["usage"]
        details = usage.get("input_tokens_details") or {}
        cached = details.get("cached_tokens", usage.get("cache_read_input_tokens"))
        seeing.counted()
        return cached > 0, seeing.metric("vllm:mm_cache_hits_total") - before

    assert [ask(tenant) for tenant in ("a", "a", "b")] == [(False, 0), (True, 1), (False, 0)]
    if path == "/v1/messages":
        del body["max_tokens"], body["stream"]
        path += "/count_tokens"
        for tenant, hits in (("a", 1), ("c", 0), ("c", 1)):
            before = seeing.metric("vllm:mm_cache_hits_total")
            counted = seeing.client.post(path, json=body, headers={"X-Tenant": tenant})
            assert counted.json()["input_tokens"] > 200
            seeing.counted()
            assert seeing.metric("vllm:mm_cache_hits_total") - before == hits
