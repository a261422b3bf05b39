# SPDX-License-Identifier: Apache-2.0
"""Requests become the tokens that the engine would get; tests/e2e/test_kv_events.py
compares both.
"""

import asyncio
import copy
import json
import os
import re
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from serving.router.kv import tokenizer as module
from serving.router.kv import tokenizer_workers
from serving.router.kv.tokenizer_workers import CannotLoad, TokenWorkers
from tests import agents
from tests.support.harness.wait import until_async
from tests.support.models import tiny

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ASKED = [{"role": "user", "content": "import this"}]
RENDERED = "<|user|>import this</s><|assistant|>"
LATE_S = 180  # for the start of the processes on busy machines


class Tokenizer:
    """Workers, called as the router calls them."""

    def __init__(self, workers: TokenWorkers) -> None:
        self.workers = workers

    async def tokens(self, path, body, content_type="application/json"):
        found = await self.workers.tokens(path, body, content_type)
        return None if found is None else list(found)

    def processes(self) -> list[int]:
        """The parent, then the workers."""
        assert self.workers.process
        parent = self.workers.process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        return [parent, *map(int, children.split())]


@asynccontextmanager
async def working(folder):
    workers = TokenWorkers()
    task = asyncio.create_task(workers.run(folder))
    try:
        await until_async(lambda: workers.ready.is_set() or task.done(), LATE_S)
        yield Tokenizer(workers)
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Only one test is about a request's waiting time; the others have patience with busy
    machines.
    """
    monkeypatch.setattr(tokenizer_workers, "WAIT_S", LATE_S)


@pytest.fixture(scope="module")
def own():
    return AutoTokenizer.from_pretrained(tiny.make())


@pytest.fixture(scope="module")
async def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    module.fetch(str(tiny.make()), {}, folder)
    async with working(folder) as it:
        yield it


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
        (RESPONSES, {"input": "import this"}, RENDERED),
        (RESPONSES, {"input": ASKED, "instructions": "a"}, f"<|system|>a</s>{RENDERED}"),
        ("/invocations", {"input": "import this"}, RENDERED),
        (MESSAGES, {"messages": ASKED}, RENDERED),
        (
            "/invocations",
            {"messages": ASKED, "system": "a", "anthropic_version": "bedrock-2023-05-31"},
            f"<|system|>a</s>{RENDERED}",
        ),
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
        ("/v1/messages/count_tokens", {"messages": ASKED}),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "a"}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [{**IMAGE, "type": "input_image"}]}]}),
        (RESPONSES, {"input": [{"role": "assistant", "content": "a", "status": "incomplete"}]}),
        (RESPONSES, {"input": "a", "tools": [{"type": "custom", "name": "patch"}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        (MESSAGES, {"messages": [{"role": "system", "content": [{"type": "tool_removal"}]}]}),
        (COMPLETIONS, {"prompt": "a" * tokenizer_workers.LARGEST}),
    ],
)
async def test_requests_that_cannot_be_tokenised_have_no_tokens(tokenizer, path, body):
    assert await tokenizer.tokens(path, encoded(body)) is None


def test_without_a_template_chats_have_none(own):
    bare = copy.deepcopy(own)
    bare.chat_template = None
    it = module.Tokenizer(bare)
    with pytest.raises(ValueError, match="chat template"):
        it.tokens(CHAT, encoded({"messages": ASKED}))
    assert it.tokens(COMPLETIONS, b'{"prompt": "a"}') == own.encode("a")


PARTS = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "[{{ part['text'] }}]{% endfor %}{% if message.tool_calls %}"
    "{{ message.tool_calls[0].function.arguments.a }}{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ flavour }}"
)


def test_a_template_of_parts_with_tools_and_options(own):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 7}'}}
    body = {
        "messages": [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}],
        "tools": [{"function": {"parameters": {}, "name": "f"}, "type": "function"}],
        "chat_template_kwargs": {"flavour": "sweet", "unknown": 1, "add_generation_prompt": True},
    }
    tool = {
        "type": "function",
        "function": {"name": "f", "description": None, "parameters": {}},
    }
    text = f"[import this]7{json.dumps([tool])}sweet"
    parted = copy.deepcopy(own)
    parted.chat_template = PARTS
    assert module.Tokenizer(parted).tokens(CHAT, encoded(body)) == own.encode(text)


@pytest.mark.parametrize(("path", "more"), [(CHAT, {}), (MESSAGES, {"max_tokens": 1})])
def test_documents_have_the_tokens_of_the_order_that_is_served(own, path, more):
    ordering = copy.deepcopy(own)
    ordering.chat_template = "{% for it in documents or () %}{{ it.text }}{% endfor %}" + PARTS
    it = module.Tokenizer(ordering)

    def tokens(texts, consent):
        parts = [{"type": "text", "text": text, "orderable": True} for text in texts]
        body = {"messages": [{"role": "user", "content": parts}], **more, **consent}
        return it.tokens(path, encoded(body | {"documents": [{"text": text} for text in texts]}))

    consent = {"document_order": "canonical"}
    assert tokens("abc", consent) == tokens("cab", consent)
    assert tokens("abc", {}) != tokens("cab", {})


AGENTS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{{ message.reasoning }}{% for call in message.tool_calls or () %}"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{{ reasoning_effort }}"
)
CALL = {"id": "1", "call_id": "1", "name": "look", "input": {"a": 7}, "arguments": '{"a": 7}'}
CALLED = '<|assistant|>Let me look.{}look{{"a": 7}}<|tool|>sunny\nwarm'


@pytest.mark.parametrize(
    ("path", "body", "names", "text"),
    [
        (
            RESPONSES,
            agents.codex(
                "Go",
                *agents.codex_goes_on(
                    CALL,
                    [{"type": "input_text", "text": text} for text in ("sunny", "warm")],
                ),
            ),
            ["get_weather", "mcp__docs__look_up"],
            f"<|system|>You are a coding agent. Be brief.\n\n{agents.PERMISSIONS}"
            f"<|user|>{agents.SURROUNDINGS}<|user|>Go{CALLED.format('')}medium",
        ),
        (
            MESSAGES,
            agents.claude(
                "Go",
                *agents.claude_goes_on(
                    CALL, [{"type": "text", "text": text} for text in ("sunny", "warm")]
                ),
                {"role": "system", "content": "Late."},
                thinking={"type": "disabled"},
            ),
            ["get_weather"],
            "<|system|>You are an agent.Be brief.<|user|>"
            "<system-reminder>The date is today's.</system-reminder>\nGo"
            f"{CALLED.format('I should look.')}"
            "<|user|><system-reminder>Go on.</system-reminder><|system|>Late.none",
        ),
    ],
)
def test_conversations_of_agents(own, path, body, names, text):
    rendering = copy.deepcopy(own)
    rendering.chat_template = AGENTS
    it = module.Tokenizer(rendering)
    rendered = own.decode(it.tokens(path, encoded(body)))
    tools, end = json.JSONDecoder().raw_decode(rendered)
    assert [tool["function"]["name"] for tool in tools] == names
    assert rendered[end:] == text


def test_a_template_that_takes_system_prompts_first(own):
    """A template that knows the role developer gets such messages unchanged."""
    turns = [{"role": role, "content": role} for role in ("system", "user", "system")]
    first = copy.deepcopy(own)
    first.chat_template = (
        "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
        "{{ raise_exception('late') }}{% endif %}[{{ message.content }}]{% endfor %}"
    )
    it = module.Tokenizer(first)
    assert own.decode(it.tokens(MESSAGES, encoded({"messages": turns}))) == "[systemsystem][user]"
    with pytest.raises(Exception, match="late"):
        it.tokens(CHAT, encoded({"messages": turns}))
    turns[2] = {"role": "developer", "content": "developer"}
    found = it.tokens(CHAT, encoded({"messages": turns}))
    assert own.decode(found) == "[system\n\ndeveloper][user]"
    first.chat_template += "{# 'developer' #}"
    found = it.tokens(CHAT, encoded({"messages": turns}))
    assert own.decode(found) == "[system][user][developer]"


@pytest.mark.parametrize(
    "given",
    [
        {"chat_template": "a template of the client's"},
        {"tokenize": False},
        {"tools": []},
        {"conversation": ASKED},
        {"messages": ASKED},
        {"tokenizer_kwargs": {}},
        {"self": 1},
        ["chat_template"],
    ],
)
async def test_clients_bring_no_template_and_no_arguments_of_its_renderers(tokenizer, given):
    body = {"messages": ASKED, "chat_template_kwargs": given}
    assert await tokenizer.tokens(CHAT, encoded(body)) is None


# Templates that hang, grow and crash. Here it is the model's own template, which others might be by
# mistake.
HOSTILE = (
    "{% set said = messages[0].content %}"
    "{% if said == 'hang' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}"
    "{% if said.isdigit() %}{{ 'a' * (said | int) }}{% endif %}{{ said }}"
)


def saying(text):
    return encoded({"messages": [{"role": "user", "content": text}]})


@pytest.fixture(scope="module")
async def hostile(own, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    other = copy.deepcopy(own)
    other.chat_template = HOSTILE
    other.save_pretrained(folder)
    async with working(folder) as it:
        yield it


async def test_a_worker_that_hangs_holds_nobody_up_and_is_replaced(monkeypatch, own, hostile):
    before = hostile.processes()
    monkeypatch.setattr(tokenizer_workers, "WAIT_S", 0.1)
    for _ in range(tokenizer_workers.WORKERS + 1):  # no worker is free for the last one
        with pytest.raises(TimeoutError):
            await hostile.tokens(CHAT, saying("hang"))
    starter, *hung = before

    def all_replaced():
        now = hostile.processes()
        return len(now) == len(before) and not set(hung) & set(now)

    await until_async(all_replaced, LATE_S)
    assert hostile.processes()[0] == starter
    monkeypatch.setattr(tokenizer_workers, "WAIT_S", LATE_S)
    assert await hostile.tokens(CHAT, saying("a b")) == own.encode("a b")


async def test_a_workers_memory_has_a_limit(own, hostile):
    before = hostile.processes()
    assert await hostile.tokens(CHAT, saying("4000000000")) is None
    assert hostile.processes() == before
    for process in before[1:]:
        status = Path(f"/proc/{process}/status").read_text()
        (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
        assert int(peak) * 1024 < 3 * tokenizer_workers.MEMORY
    assert await hostile.tokens(CHAT, saying("a b")) == own.encode("a b")


async def test_a_text_of_the_largest_size_fits_into_the_memory(tokenizer):
    text = "".join(chr(0x4E00 + n % 20_000) for n in range(tokenizer_workers.LARGEST // 3 - 20))
    body = encoded({"prompt": text}).decode("unicode_escape").encode()
    assert tokenizer_workers.LARGEST - 100 < len(body) <= tokenizer_workers.LARGEST
    found = await tokenizer.tokens(COMPLETIONS, body)
    assert found
    assert len(found) > len(text)


async def test_processes_that_end_are_started_again(monkeypatch, own, hostile):
    monkeypatch.setattr(tokenizer_workers, "FIRST_S", 0.1)
    before = hostile.processes()
    os.kill(before[1], signal.SIGKILL)  # as the kernel does if memory runs out
    await until_async(lambda: not hostile.workers.ready.is_set(), LATE_S)
    await until_async(hostile.workers.ready.is_set, LATE_S)
    assert not set(before) & set(hostile.processes())
    assert await hostile.tokens(CHAT, saying("a b")) == own.encode("a b")


async def test_the_processes_get_no_secrets(tokenizer):
    for process in tokenizer.processes():
        names = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        assert {it.partition(b"=")[0].decode() for it in names if it} <= {
            *tokenizer_workers._ENVIRON,
            *tokenizer_workers._OFFLINE,
        }


async def test_the_processes_do_without_torch(tokenizer):
    """Its import would take seconds, and hundreds of megabytes."""
    for it in tokenizer.processes():
        assert "libtorch" not in Path(f"/proc/{it}/maps").read_text()


async def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(CannotLoad):
        await TokenWorkers().run(tmp_path)


async def test_only_what_belongs_to_the_tokenizer_is_read(monkeypatch, tmp_path):
    from lmi_config.facts.model import Folder

    read: list[str] = []
    whole = Folder.head

    def head(self, name, length):
        read.append(name)
        return whole(self, name, length)

    monkeypatch.setattr(Folder, "head", head)
    module.fetch(str(tiny.make()), {}, tmp_path)
    assert "tokenizer.json" in read
    assert not [name for name in read if name.endswith(".safetensors")]
