"""Requests become the tokens that the engine would get; tests/e2e/test_kv_events.py asks it."""

import asyncio
import json
import threading

import pytest
import tiny_model
from transformers import AutoTokenizer

from serving.router import tokens
from serving.router.tokens import Tokenizer

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ASKED = [{"role": "user", "content": "import this"}]
RENDERED = "<|user|>import this</s><|assistant|>"


@pytest.fixture(scope="module")
def own():
    return AutoTokenizer.from_pretrained(tiny_model.make())


@pytest.fixture(scope="module")
def tokenizer():
    found = tokens.load(str(tiny_model.make()), {})
    yield found
    found.close()


def encoded(body):
    return body if isinstance(body, bytes) else json.dumps(body).encode()


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (COMPLETIONS, {"prompt": "import this"}, "import this"),
        (COMPLETIONS, {"prompt": ["import this"]}, "import this"),
        (CHAT, {"messages": ASKED}, RENDERED),
        (CHAT, {"messages": ASKED, "prompt": "x"}, RENDERED),
        (
            CHAT,
            {"messages": ASKED, "add_generation_prompt": False},
            RENDERED.removesuffix("<|assistant|>"),
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]},
            "<|user|>a\nb</s><|assistant|>",
        ),
        ("/invocations", {"prompt": "import this", "inputs": "x"}, "import this"),
        ("/invocations", {"inputs": "import this", "parameters": {"n": 1}}, "import this"),
        ("/predictions/lmi", {"inputs": ["import this", "x"]}, "import this"),
        ("/models/lmi/invoke", {"messages": ASKED}, RENDERED),
    ],
)
async def test_every_format_has_tokens(tokenizer, own, path, body, text):
    assert await tokenizer.tokens(path, encoded(body)) == own.encode(text)


async def test_text_and_csv(tokenizer, own):
    found = await tokenizer.tokens("/invocations", b"import this", "text/plain")
    assert found == own.encode("import this")
    found = await tokenizer.tokens("/invocations", b"inputs\na b\nc", "text/csv")
    assert found == own.encode("a b")


async def test_tokens_stay_as_they_are(tokenizer):
    assert await tokenizer.tokens(COMPLETIONS, b'{"prompt": [1, 2, 3]}') == [1, 2, 3]
    assert await tokenizer.tokens(COMPLETIONS, b'{"prompt": [[1, 2, 3]]}') == [1, 2, 3]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, b""),
        (COMPLETIONS, b"[]"),
        (COMPLETIONS, b"\xff"),
        (COMPLETIONS, b"[" * 100_000),
        (COMPLETIONS, {}),
        (COMPLETIONS, {"prompt": None}),
        (COMPLETIONS, {"prompt": 5}),
        (COMPLETIONS, {"prompt": ["a", "b"]}),
        (COMPLETIONS, {"prompt": [[1], [2]]}),
        (COMPLETIONS, {"prompt": [1, "a"]}),
        (COMPLETIONS, {"prompt": [2**31]}),
        (COMPLETIONS, {"prompt": [-1]}),
        (COMPLETIONS, {"prompt": "a", "prompt_embeds": "AAAA"}),
        (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 3}),
        (CHAT, {}),
        (CHAT, {"messages": "a"}),
        (CHAT, {"messages": [5]}),
        (CHAT, {"messages": [{"content": "a"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}),
        (CHAT, {"messages": ASKED, "chat_template": "{{ 1 }}"}),
        (CHAT, {"messages": ASKED, "chat_template_kwargs": {"tokenize": True}}),
        ("/invocations", {}),
        ("/invocations", {"inputs": {"a": 1}}),
        ("/invocations", {"inputs": []}),
        ("/invocations", {"inputs": "a", "parameters": {"truncate": 3}}),
        ("/invocations", {"requestType": "NEW_SESSION"}),
        ("/v1/embeddings", {"input": "a"}),
        (COMPLETIONS, {"prompt": "a" * tokens.LARGEST}),
    ],
)
async def test_what_cannot_be_told_has_none(tokenizer, path, body):
    assert await tokenizer.tokens(path, encoded(body)) is None


async def test_without_a_template_chats_have_none():
    own = AutoTokenizer.from_pretrained(tiny_model.make())
    own.chat_template = None
    tokenizer = Tokenizer(own)
    assert await tokenizer.tokens(CHAT, encoded({"messages": ASKED})) is None
    assert await tokenizer.tokens(COMPLETIONS, b'{"prompt": "a"}') == own.encode("a")
    tokenizer.close()


PARTS = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "[{{ part['text'] }}]{% endfor %}{% if message.tool_calls %}"
    "{{ message.tool_calls[0].function.arguments.a }}{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ flavour }}"
)


async def test_a_template_of_parts_with_tools_and_options():
    own = AutoTokenizer.from_pretrained(tiny_model.make())
    own.chat_template = PARTS
    tokenizer = Tokenizer(own)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 7}'}}
    body = {
        "messages": [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}],
        "tools": [{"function": {"parameters": {}, "name": "f"}, "type": "function"}],
        "chat_template_kwargs": {"flavour": "sweet"},
    }
    tool = {
        "type": "function",
        "function": {"name": "f", "description": None, "parameters": {}},
    }
    text = f"[import this]7{json.dumps([tool])}sweet"
    assert await tokenizer.tokens(CHAT, encoded(body)) == own.encode(text)
    tokenizer.close()


async def test_a_queue_that_is_too_long_is_not_joined():
    may_go = threading.Event()

    class Slow:
        chat_template = None

        def encode(self, text, add_special_tokens):
            may_go.wait()
            return [1]

    tokenizer = Tokenizer(Slow())
    body = b'{"prompt": "a"}'
    waiting = [
        asyncio.create_task(tokenizer.tokens(COMPLETIONS, body)) for _ in range(tokens.LONGEST)
    ]
    await asyncio.sleep(0)
    assert await tokenizer.tokens(COMPLETIONS, body) is None
    may_go.set()
    assert await asyncio.gather(*waiting) == [[1]] * tokens.LONGEST
    assert await tokenizer.tokens(COMPLETIONS, body) == [1]
    tokenizer.close()


async def test_only_what_belongs_to_the_tokenizer_is_read(monkeypatch):
    from lmi_config.model import Folder

    read: list[str] = []
    whole = Folder.head

    def head(self, name, length):
        read.append(name)
        return whole(self, name, length)

    monkeypatch.setattr(Folder, "head", head)
    tokens.load(str(tiny_model.make()), {}).close()
    assert "tokenizer.json" in read
    assert not [name for name in read if name.endswith(".safetensors")]
