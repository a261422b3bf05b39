# SPDX-License-Identifier: Apache-2.0
"""The router's index follows a real engine: the blocks that a request leaves in the engine's cache
are found for the next request.
"""

import asyncio
import json
import shutil
import time

import pytest
from tokenizers.processors import TemplateProcessing

from serving.router.kv import events
from serving.router.kv.events import Follower
from serving.router.kv.tokenizer import Tokenizer, fetch
from serving.router.policy.kv_index import KvIndex, chain, request_seed
from tests import agents
from tests.e2e.conftest import serving
from tests.e2e.test_tools import TEMPLATE
from tests.support.harness import ports
from tests.support.harness.wait import until_async
from tests.support.models import tiny, tiny_lora

TEXT = "".join(f"import statement {n}. " for n in range(120))  # several blocks
CALL = {"id": "1", "call_id": "1", "name": "look", "input": {"a": 7}, "arguments": '{"a": 7}'}
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The tiny model with two changes: its template shows every part of a chat, and its tokenizer
    begins other texts with a special token.
    """
    from transformers import AutoTokenizer

    folder = shutil.copytree(tiny.make(), tmp_path_factory.mktemp("model") / "calling")
    own = AutoTokenizer.from_pretrained(folder)
    begins = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", own.bos_token_id)])
    own.backend_tokenizer.post_processor = begins
    own.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(
        TEMPLATE.replace(
            "{{ message.content }}",
            "{{ message.content }}{{ message.reasoning }}"
            "{% for call in message.tool_calls or () %}{{ call | tojson }}{% endfor %}",
        )
        + "{{ reasoning_effort }}"
    )
    return folder


@pytest.fixture(scope="module")
def served(tiny_options, model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kv_events")
    tiny_lora.write(folder / "one", 1)
    environ = {
        **tiny_options,
        "OPTION_MODEL_ID": str(model),
        "OPTION_KV_CACHE_MEMORY_BYTES": "8M",  # some 30 blocks
        "OPTION_MAX_MODEL_LEN": "2048",
        "OPTION_KV_EVENTS": "true",
        "OPTION_KV_EVENTS_PORT": str(ports.free(2)),
        "OPTION_ENABLE_LORA": "true",
        "OPTION_ADAPTER_ROOTS": str(folder),
    }
    with serving(folder / "log", **environ) as it:
        it.ready()
        adapter = {"name": "one", "src": str(folder / "one")}
        assert it.client.post("/adapters", params=adapter).status_code == 200
        yield it


@pytest.fixture(scope="module")
def tokenizer(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    fetch(str(model), {}, folder)
    return Tokenizer.load(folder, trust_remote_code=False)


class Followed:
    def __init__(self, served, tokenizer):
        self.served = served
        self.tokenizer = tokenizer
        self.index = KvIndex()
        answer = served.client.get("/kv_event_sources").content
        sources = events.sources(answer, "127.0.0.1")
        assert sources.keys() == {0}
        self.task = asyncio.create_task(Follower(self.index, "a", sources).run())

    async def until(self, reached):
        await until_async(lambda: self.task.done() or reached())
        assert not self.task.done()

    async def ask(self, path, body, adapter=None):
        headers = {"X-Amzn-SageMaker-Adapter-Identifier": adapter} if adapter else {}
        answer = await asyncio.to_thread(self.served.client.post, path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text

    async def chain(self, path, body, adapter=None, salt=None):
        found = self.tokenizer.tokens(path.partition("?")[0], json.dumps(body).encode())
        inner = self.index.inner(adapter) if adapter else None
        return chain(found, self.size, request_seed(inner, None, salt))

    def matched(self, keys):
        return self.index.in_engine("a", {self.size: keys}, time.monotonic()) // self.size

    @property
    def size(self):
        return min(self.index.sizes)


@pytest.fixture
async def followed(served, tokenizer, anyio_backend):
    it = Followed(served, tokenizer)
    yield it
    it.task.cancel()
    await asyncio.gather(it.task, return_exceptions=True)


SHORT = {"max_tokens": 2, "temperature": 0}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body", "adapter"),
    [
        (COMPLETIONS, {"prompt": f"one {TEXT}", **SHORT}, None),
        (COMPLETIONS, {"prompt": f"salted {TEXT}", "cache_salt": "s", **SHORT}, None),
        (COMPLETIONS, {"prompt": f"adapter {TEXT}", **SHORT}, "one"),
        (COMPLETIONS, {"prompt": f"both {TEXT}", "cache_salt": "s", **SHORT}, "one"),
        (
            CHAT,
            {
                "messages": [
                    {"role": "system", "content": f"two {TEXT}"},
                    {"role": "user", "content": [{"type": "text", "text": "x"}]},
                ],
                **SHORT,
            },
            None,
        ),
        ("/invocations", {"inputs": f"three {TEXT}", "parameters": {"max_new_tokens": 2}}, None),
        (
            "/v1/responses",
            agents.codex(
                f"four {TEXT}",
                *agents.codex_goes_on(CALL, [{"type": "input_text", "text": TEXT}]),
                stream=False,
                max_output_tokens=2,
            ),
            None,
        ),
        (
            "/v1/messages?beta=true",
            agents.claude(
                f"five {TEXT}",
                *agents.claude_goes_on(CALL, [{"type": "text", "text": TEXT}]),
                stream=False,
                max_tokens=2,
            ),
            None,
        ),
    ],
)
async def test_what_a_request_leaves_is_found(followed, path, body, adapter):
    await followed.ask(path, body, adapter)
    await followed.until(lambda: followed.index.sizes)
    if adapter:
        await followed.until(lambda: followed.index.inner(adapter) != adapter)
    own = (adapter, body.get("cache_salt"))
    keys = await followed.chain(path, body, *own)
    assert len(keys) > 3
    await followed.until(lambda: followed.matched(keys) == len(keys))
    for other in {(None, None), (None, "s"), (None, "t"), ("one", None), ("one", "s")} - {own}:
        assert followed.matched(await followed.chain(path, body, *other)) == 0


@pytest.mark.anyio
async def test_what_the_engine_evicts_is_gone(followed):
    first = {"prompt": f"first {TEXT}", **SHORT}
    await followed.ask(COMPLETIONS, first)
    await followed.until(lambda: followed.index.sizes)
    keys = await followed.chain(COMPLETIONS, first)
    await followed.until(lambda: followed.matched(keys) == len(keys))
    for n in range(8):
        await followed.ask(COMPLETIONS, {"prompt": f"other {n} {TEXT}", **SHORT})
    await followed.until(lambda: followed.matched(keys) == 0)


@pytest.mark.anyio
async def test_a_late_follower_reads_the_log(followed, served, tokenizer):
    body = {"prompt": f"early {TEXT}", **SHORT}
    await followed.ask(COMPLETIONS, body)
    await followed.until(lambda: followed.index.sizes)
    keys = await followed.chain(COMPLETIONS, body)
    await followed.until(lambda: followed.matched(keys) == len(keys))
    late = Followed(served, tokenizer)
    await late.until(lambda: late.index.follows("a"))
    assert late.matched(keys) == len(keys)
    late.task.cancel()
    await asyncio.gather(late.task, return_exceptions=True)
