# SPDX-License-Identifier: Apache-2.0
"""Calls of vLLM's serving objects: the same answers as through its HTTP app, event by event, and
the ends of a call. In front of an engine that computes nothing (tools/ceiling/engine.py).
"""

import asyncio
import contextlib
import itertools
import json
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import httpx
import msgspec
import pytest

from handlers import lmi
from handlers.records import Step
from lmi_config.plan import vllm as plan
from serving.cancellation import Cancellation, ClientLeft
from serving.engine import vllm
from serving.engine.base import Call, Usage
from serving.engine.patches.engine_core import plugin
from serving.engine.vllm_errors import from_engine
from serving.errors import NotReady, ServingError, TimedOut, shape
from tests.support.harness.wait import until_async
from tests.support.models import tiny

NO_MODEL = "tools.ceiling.engine.QuickNoModel"
"""The executor without a model. Its module imports vLLM."""
TRIES, LAST_TRIES = 2, 60
"""How often our answer is compared with that of vLLM's app: tokens that arrive close together may
share an event. In the last tries, the answers may differ in that.
"""
Run = Callable[[Callable[[Any], Any]], Any]
CHAT, TEXT, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
SPLIT = [173, 102, 228, 121, 301]
"""Tokens that are bytes of characters; most are parts of several characters."""

OF_BOTH: list[dict[str, Any]] = [
    *({}, {"max_tokens": 1}, {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": None}),
    *({"max_tokens": "3"}, {"max_tokens": "many"}, {"max_tokens": 3.0}, {"max_tokens": 3.5}),
    *({"max_tokens": 10**30}, {"max_tokens": True}, {"max_tokens": [3]}, {"max_tokens": 10_000}),
    *({"temperature": 0}, {"temperature": "hot"}, {"temperature": 1e400}, {"temperature": -1}),
    *({"top_p": 0.5}, {"top_p": 2}, {"top_k": 3}, {"min_p": 0.1}, {"seed": 7}, {"seed": "x"}),
    *({"n": 2}, {"n": 0}, {"n": None}, {"n": 3, "logprobs": None}, {"n": "2"}),
    *({"stop": "an"}, {"stop": ["**", "n"]}, {"stop": 5}, {"stop": []}, {"stop": ["ss"] * 3}),
    *({"stop": "an", "include_stop_str_in_output": True}, {"stop_token_ids": [303]}),
    *({"min_tokens": 3, "stop": "er"}, {"ignore_eos": True}, {"bad_words": ["x"]}),
    *({"stream_options": {"include_usage": True}}, {"stream_options": {"include_usage": False}}),
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream_options": {"continuous_usage_stats": True}},
    *({"stream_options": {}}, {"stream_options": 5}, {"stream_options": None}),
    *({"return_token_ids": True}, {"return_tokens_as_token_ids": True}, {"echo": True}),
    *({"echo": True, "max_tokens": 1}, {"echo": "yes"}, {"user": "a"}, {"user": 5}),
    *({"model": "tiny"}, {"model": "other"}, {"model": 5}, {"model": None}),
    *({"no_such_key": 1}, {"guided_json": {}}, {"priority": 1}, {"request_id": "mine"}),
    *({"logit_bias": {"5": 1}}, {"logit_bias": {"x": 1}}, {"logit_bias": {"999999": 1}}),
    *({"presence_penalty": 1}, {"frequency_penalty": 3}, {"repetition_penalty": 1.1}),
    *(
        {"truncate_prompt_tokens": 2},
        {"truncate_prompt_tokens": -5},
        {"skip_special_tokens": False},
    ),
    *({"use_beam_search": True, "n": 2}, {"use_beam_search": True}, {"stream_interval": 2}),
    *({"stream_interval": 0}, {"response_format": {"type": "no such"}}, {"response_format": 5}),
    *({"structured_outputs": {}}, {"structured_outputs": {"regex": "("}}, {"cache_salt": ""}),
    *({"allowed_token_ids": SPLIT}, {"allowed_token_ids": [300, 1]}, {"allowed_token_ids": []}),
    *({"allowed_token_ids": SPLIT, "stop": "zz"}, {"allowed_token_ids": [10**7]}),
    *({"add_special_tokens": True}, {"spaces_between_special_tokens": False}),
    *({"length_penalty": 2}, {"vllm_xargs": {"a": 1}}, {"kv_transfer_params": {}}),
    *({"session_id": "s"}, {"detokenize": False}, {"logprobs": "x"}, {"prompt_logprobs": 0}),
    *({"prompt_logprobs": 2}, {"prompt_logprobs": -2}, {"n": 2, "return_token_ids": True}),
    *({"truncate_prompt_tokens": 1, "truncation_side": "left"}, {"include_reasoning": False}),
    {"n": 2, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"kv_transfer_params": {"a": 1}, "vllm_xargs": {"session_id": "s"}},
]
OF_TEXT: list[dict[str, Any]] = [
    *({"logprobs": 0}, {"logprobs": 2}, {"logprobs": -1}, {"logprobs": 10_000}),
    *({"logprobs": 1, "return_tokens_as_token_ids": True}, {"logprobs": True}, {"suffix": "b"}),
    *({"logprobs": 1, "allowed_token_ids": SPLIT}, {"logprobs": 0, "return_token_ids": True}),
    *({"prompt": ["a b", "c"]}, {"prompt": ["a"]}, {"prompt": [5, 6]}, {"prompt": [[5], [6, 7]]}),
    *({"prompt": []}, {"prompt": ""}, {"prompt": None}, {"prompt": 5}, {"prompt": {"a": 1}}),
    *({"prompt": [5, "a"]}, {"prompt": [-1]}, {"prompt": [10**7]}, {"prompt": "é ☃ 𝄞 \u0000"}),
    *({"prompt": "word " * 3000}, {"prompt": [[]]}, {"prompt": ["a", "b"], "n": 2}),
    {"prompt": ["a", "b"], "stream_options": {"include_usage": True}},
    *({"prompt": "\ud800"}, {"best_of": 2}, {"prompt_embeds": "x"}, {"n": 2, "logprobs": 2}),
    *({"echo": True, "logprobs": it, "max_tokens": 2} for it in (0, 1)),
    *({"echo": True, "logprobs": 1, "max_tokens": 0}, {"echo": True, "prompt": [5, 6]}),
    *({"echo": True, "return_token_ids": True}, {"echo": True, "prompt": ["a b", "c"], "n": 2}),
    *({"echo": True, "logprobs": 1, "return_token_ids": True}, {"prompt": ["a", "b"], "echo": 1}),
    *({"prompt": ["a", "b c"], "logprobs": 1}, {"logprobs": 1, "logprob_token_ids": [5, 6]}),
    {"logprobs": 2, "logprob_token_ids": [5, 6]},
    *({"use_beam_search": True, "n": 2, "logprobs": 1}, {"logprobs": 1, "stop": "an"}),
    *({"use_beam_search": True, "n": 2, "prompt": ["a", "b"]}, {"logprobs": 0, "n": 2, "echo": 1}),
]
A = [{"role": "user", "content": "a"}]
OF_CHAT: list[dict[str, Any]] = [
    *({"logprobs": True}, {"logprobs": True, "top_logprobs": 2}, {"top_logprobs": 2}),
    *({"logprobs": True, "allowed_token_ids": SPLIT}, {"logprobs": False}, {"logprobs": 0}),
    *({"max_completion_tokens": 2}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}),
    *({"tools": TOOLS, "tool_choice": "auto"}, {"tools": []}, {"tools": 5}, {"tool_choice": "x"}),
    *({"parallel_tool_calls": False}, {"chat_template": "x"}, {"chat_template_kwargs": {"a": 1}}),
    *({"messages": []}, {"messages": None}, {"messages": "a"}, {"messages": [5]}, {"messages": {}}),
    *({"messages": [{"role": "user"}]}, {"messages": [{"content": "a"}]}),
    *({"messages": [{"role": "no such", "content": "a"}]}, {"messages": [{"role": 5}]}),
    {"messages": [{"role": "system", "content": "s"}, *A]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "no such", "text": "a"}]}]},
    {"messages": [{"role": "user", "content": [5]}]},
    {"messages": [*A, {"role": "assistant", "content": None}, *A]},
    {"messages": [*A, {"role": "assistant", "content": "b"}], "add_generation_prompt": False},
    {"messages": [*A, {"role": "assistant", "content": "b"}], "continue_final_message": True},
    {
        "messages": [*A, {"role": "assistant", "content": "b"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "echo": True,
    },
    {"messages": [*A, {"role": "tool", "content": "r", "tool_call_id": "1"}]},
    {"messages": [{"role": "user", "content": "a", "name": "n", "more": {"b": [1]}}]},
    {"messages": [{"role": "user", "content": 'é ☃ 𝄞 \\ " \u0001'}]},
    {"messages": [{"role": "user", "content": "word " * 3000}]},
    {"messages": [{"role": "user", "content": "\ud800"}]},
    *({"return_prompt_text": True}, {"include_reasoning": False}, {"reasoning_effort": "low"}),
    *({"return_token_ids": True, "n": 2}, {"documents": []}, {"mm_processor_kwargs": {"a": 1}}),
    *({"n": 2, "logprobs": True, "top_logprobs": 1}, {"logprobs": True, "top_logprobs": -1}),
    *({"logprobs": True, "return_tokens_as_token_ids": True}, {"logprobs": True, "echo": True}),
    {"logprobs": True, "stop": "an"},
    {"return_prompt_text": True, "return_token_ids": True},
    {"logprobs": True, "logprob_token_ids": [5, 6]},
]
RAW = [
    *(
        b"{}",
        b'{"prompt":"a","messages":[{"role":"user","content":"a"}],"max_tokens":1,"top_p":NaN}',
    ),
    *(b'{"prompt":"a","messages":[],"messages":[{"role":"user","content":"b"}],"max_tokens":2}',),
]
BODIES: list[tuple[str, bytes, str]] = [
    (path, json.dumps({**base, "max_tokens": 4, **more, **stream}).encode(), "application/json")
    for path, base, table in (
        (TEXT, {"prompt": "The import"}, OF_BOTH + OF_TEXT),
        (CHAT, {"messages": A}, OF_BOTH + OF_CHAT),
    )
    for more, stream in itertools.product(table, ({}, {"stream": True}))
] + [
    (path, body, kind)
    for path in (TEXT, CHAT)
    for body, kind in (
        *((raw, "application/json") for raw in RAW),
        (b'{"prompt":"a","messages":[{"role":"user","content":"a"}]}', "text/plain"),
        (b'{"prompt":"a","messages":[{"role":"user","content":"a"}]}', ""),
        (b'{"prompt":"a","messages":[{"role":"user","content":"a"}]}', "application/json; a=b"),
    )
]
OF_EMBEDDINGS: list[dict[str, Any]] = [
    *({}, {"input": "é ☃ 𝄞 \u0000"}, {"input": ""}, {"input": []}, {"input": None}, {"input": 5}),
    *({"input": ["a", "b c"]}, {"input": [5, 6]}, {"input": [[5], [6, 7]]}, {"input": [[]]}),
    *({"input": [5, "a"]}, {"input": [-1]}, {"input": [10**7]}, {"input": "word " * 3000}),
    *({"input": ["a"] * 300}, {"input": "\ud800"}, {"input": {"a": 1}}, {"input": [True]}),
    *({"messages": A, "input": None}, {"messages": []}, {"messages": [A, A]}, {"input": A}),
    *({"encoding_format": it} for it in ("float", "base64", "bytes", "bytes_only", "no such", 5)),
    *({"encoding_format": "base64", "embed_dtype": it} for it in ("float16", "int8", "no such")),
    *({"encoding_format": "base64", "endianness": it} for it in ("big", "middle")),
    *({"dimensions": 3}, {"dimensions": 0}, {"dimensions": "x"}, {"use_activation": False}),
    *({"use_activation": "x"}, {"normalize": True}, {"model": "tiny"}, {"model": "other"}),
    *({"model": 5}, {"user": "a"}, {"user": 5}, {"no_such_key": 1}, {"request_id": "mine"}),
    *({"truncate_prompt_tokens": 2}, {"truncate_prompt_tokens": -1}, {"cache_salt": ""}),
    *({"truncate_prompt_tokens": 10**6}, {"add_special_tokens": False}, {"priority": 1}),
    *({"cache_salt": "s"}, {"mm_processor_kwargs": {"a": 1}}, {"chat_template": "x"}),
]
EMBEDDED: list[tuple[str, bytes, str]] = [
    (EMBEDDINGS, json.dumps({"input": "The import", **more}).encode(), "application/json")
    for more in OF_EMBEDDINGS
] + [
    *((EMBEDDINGS, raw, "application/json") for raw in RAW),
    *((EMBEDDINGS, b'{"input":"a"}', kind) for kind in ("text/plain", "", "application/json; a=b")),
]
CREATED, CHANCE = re.compile(rb'"created":\d+'), re.compile(rb"chatcmpl-tool-\w+|[0-9a-f]{32}")


OURS = re.compile(rb',"cache_write_tokens":(\d+|null)')
"""OpenAI's name of vLLM's `created_cache_tokens`."""


def without_chance(answer: bytes) -> bytes:
    """An answer without ids, times and the fields that vLLM does not have."""
    return OURS.sub(b"", CHANCE.sub(b"0", CREATED.sub(b'"created":0', answer)))


TOKEN = re.compile(rb'"(?:text|content|reasoning|arguments)":("(?:[^"\\]|\\.)*")')
USAGE = re.compile(rb',"usage":{[^{}]*({[^{}]*})?[^{}]*}')
CHOICE = re.compile(rb'"choices":\[{"index":(\d+)')


Joined = dict[bytes, tuple[list[bytes], list[str], dict[str, list[Any]]]]


def joined(events: list[bytes]) -> Joined:
    """For each choice its events without their tokens, equal ones in a row as one; its text; and
    the log probabilities of its tokens.

    vLLM joins tokens where a machine is slow, and several prompts come in random order.
    """
    found: Joined = {}
    for event in events:
        if isinstance(event, tuple):  # an error
            found[b"error"] = ([event], [""], {})
            continue
        choice, token = CHOICE.search(event), TOKEN.search(event)
        frames, text, logprobs = found.setdefault(choice[1] if choice else b"", ([], [""], {}))
        frame = TOKEN.sub(b"", event)
        if b'"logprobs":{' in event:
            data = json.loads(event.removeprefix(b"data: "))
            for name, values in data["choices"][0].pop("logprobs").items():
                logprobs.setdefault(name, []).extend(values or [])
            data["choices"][0] |= {"text": "", "delta": {}}
            frame = json.dumps(data).encode()
        if b'"finish_reason":null' in frame:  # tokens so far
            frame = USAGE.sub(b"", frame)
        if frames[-1:] != [frame]:
            frames.append(frame)
        text[0] += json.loads(token[1]) if token else ""
    return found


def alike(one: Any, other: Any) -> bool:
    """Whether two streams differ only in how tokens share events."""
    streams = one[1] == b"text/event-stream; charset=utf-8"
    return streams and one[:2] == other[:2] and joined(one[2]) == joined(other[2])


class Asked:
    """A request to the engine or to vLLM's app, and its answer: the sink of its call. Two of three
    events can be written at once.
    """

    turn = itertools.cycle((True, True, False))

    def __init__(self, path: str, body: bytes, kind: str = "application/json") -> None:
        self.path, self.body, self.kind = path, body, kind
        self.cancellation = Cancellation()
        self.call = Call(
            *(path, json.loads(body), len(body), self.cancellation, "1" * 32),
            is_json=kind.partition(";")[0] == "application/json",
        )
        self.usage: Usage | None = None
        self.status, self.content_type = 0, b""
        self.events: list[bytes] = []
        self.error: ServingError | None = None
        self.ends = 0
        self.written = 0
        """How many events were written at once."""

    @property
    def heard(self) -> tuple[int, bytes, list[Any]]:
        """The status, the content type, and the parts of the body without random values."""
        if self.error:
            told = (type(self.error), str(self.error), getattr(self.error, "parameter", None))
            status = self.status or shape(self.path).status(self.error)
            return status, self.content_type, [without_chance(b"".join(self.events)), told]
        whole = b"".join(self.events)
        if self.content_type == b"application/json":
            return self.status, self.content_type, [json.loads(without_chance(whole))]
        events = [without_chance(event) for event in whole.split(b"\n\n")]
        return self.status, self.content_type, events

    async def of(self, engine: Any, steps: bool = False) -> tuple[int, bytes, list[Any]]:
        call = msgspec.structs.replace(self.call, steps=steps)
        with contextlib.suppress(Exception):  # already answered
            await engine.generate(call, self)
        if not self.cancellation.cause:
            assert self.ends == 1
        return self.heard

    async def of_app(self, app: Any) -> tuple[int, bytes, list[Any]]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        headers = {"x-request-id": self.call.request_id, "content-type": self.kind}
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            answer = await client.post(
                self.path,
                content=self.body,
                headers={name: it for name, it in headers.items() if it},
            )
        self.status = answer.status_code
        if answer.status_code >= 400:
            self.status, self.error = 0, self._told(answer.status_code, answer.json()["error"])
            return self.heard
        self.content_type = answer.headers["content-type"].encode()
        before, mark, error = answer.content.partition(b'data: {"error"')
        self.events = [before]
        if mark:
            told = json.loads(b'{"error"' + error.partition(b"\n\n")[0])["error"]
            self.error = self._told(told["code"], told)
        return self.heard

    def _told(self, status: int, error: Any) -> ServingError:
        return from_engine(status, error["message"], error.get("param"), self.call)

    def begin(self, usage: Usage) -> None:
        self.usage = usage

    async def answer(
        self, body: bytes, content_type: bytes = b"application/json", headers: Any = ()
    ) -> None:
        self.status, self.content_type = 200, content_type
        self.add(body)
        self.ends += 1

    def stream(self) -> None:
        self.status, self.content_type = 200, b"text/event-stream; charset=utf-8"

    async def event(self, event: bytes) -> None:
        self.add(event)

    async def step(self, step: Any) -> None:
        raise NotImplementedError

    def takes(self) -> bool:
        return bool(self.events) and not self.cancellation.cause and next(self.turn)

    def write(self, event: bytes) -> None:
        self.written += 1
        self.add(event)

    async def fail(self, error: ServingError) -> None:
        self.error = error
        self.ends += 1

    async def end(self) -> None:
        self.ends += 1

    def add(self, event: bytes) -> None:
        self.events.append(event)


@contextlib.contextmanager
def running(without: Collection[str] = (), **more: Any) -> Iterator[Run]:
    """Runs a coroutine function with an engine, on the engine's event loop. without: options that
    the engine does not get.
    """
    options = {
        "model": str(tiny.make()),
        "served_model_name": ("tiny",),
        "max_model_len": 128,
        "kv_cache_memory_bytes": "64M",
        "distributed_executor_backend": NO_MODEL,
        "enforce_eager": True,
        "disable_log_stats": True,
        "enable_prompt_tokens_details": True,
        **more,
    }
    for name in without:
        del options[name]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DO_NOT_TRACK", "HF_HUB_OFFLINE", "TORCHDYNAMO_DISABLE"):
            patch.setenv(name, os.environ.get(name, "1"))
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        if more.get("enable_lora"):
            # vLLM loads plugins once per process, and an earlier engine may have had no adapters.
            plugin.want(os.environ, adapters=True)
            plugin.load()
        with asyncio.Runner() as runner:
            engine = runner.run(vllm.start(plan.arguments(options), lambda *_: None))
            yield lambda function: runner.run(function(engine))
            runner.run(engine.stop())


@pytest.fixture(scope="module")
def run():
    with running() as run:
        yield run


def app_of(engine: Any) -> Any:
    """vLLM's own routes over the same serving objects."""
    if not hasattr(engine, "vllms_app"):
        from tests.serving.engine import vllms_app

        make = vllms_app.embedding if engine.embeds else vllms_app.generating
        engine.vllms_app = make(engine._state)
    return engine.vllms_app


async def from_both(engine: Any, *request: Any) -> tuple[Any, Any, Asked]:
    """The answers of vLLM's app and of ours, and our request."""
    for tries in range(TRIES + LAST_TRIES):
        with warnings.catch_warnings():  # fields that vLLM deprecates, and tools' strictness
            warnings.simplefilter("ignore", DeprecationWarning)
            vllms = await Asked(*request).of_app(app_of(engine))
            ours = await (one := Asked(*request)).of(engine)
        if vllms == ours or (tries >= TRIES and alike(vllms, ours)):
            break
    return vllms, ours, one


def answered_twice(run: Run, bodies: list[tuple[str, bytes, str]]) -> list[Any]:
    async def ask_all(engine: Any) -> list[Any]:
        found = []
        for it in bodies:
            for _ in range(2):  # what is made of known parameters is compared
                await Asked(*it).of(engine)
            found.append((await from_both(engine, *it))[:2])
        return found

    found: list[Any] = run(ask_all)
    return found


@pytest.fixture(scope="module")
def answers(run):
    return answered_twice(run, BODIES)


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_the_same_answer_as_through_vllms_app(answers, number):
    vllms, ours = answers[number]
    assert ours[:2] == vllms[:2], BODIES[number]
    if ours[2] != vllms[2]:
        assert ours[1].startswith(b"text/event-stream"), BODIES[number]
        assert joined(ours[2]) == joined(vllms[2]), BODIES[number]


def test_the_same_answers_with_options_of_the_operator():
    options: dict[str, Any] = {
        "enable_force_include_usage": True,
        "return_tokens_as_token_ids": True,
        "sse_keep_alive_interval": 60,
    }
    bodies = BODIES[::5]
    with running(**options) as run:
        answers = answered_twice(run, bodies)
    for body, (vllms, ours) in zip(bodies, answers, strict=True):
        assert ours == vllms or alike(ours, vllms), body


def test_the_same_embeddings_as_through_vllms_app():
    async def end(engine: Any) -> None:
        """A request that ends early is not answered."""
        one = Asked(EMBEDDINGS, EMBEDDED[0][1])
        one.cancellation.cancel(TimedOut(3))
        await one.of(engine)
        assert not one.events
        assert engine._client.get_num_unfinished_requests() == 0

    with running(runner="pooling", convert="embed") as run:
        answers = answered_twice(run, EMBEDDED)
        run(end)
    for body, (vllms, ours) in zip(EMBEDDED, answers, strict=True):
        assert ours == vllms, body
    statuses = [vllms[0] for vllms, _ in answers]
    assert {200, 400, 404} <= {*statuses}
    assert statuses.count(200) > 20


def test_the_bodies_are_of_many_kinds(answers):
    statuses = [vllms[0] for vllms, _ in answers]
    assert len(BODIES) > 300
    assert {200, 400, 404} <= {*statuses}
    assert statuses.count(200) > 150
    streams = [it for it in answers if it[0][1] == b"text/event-stream; charset=utf-8"]
    assert len(streams) > 80


def step(choice: dict[str, Any]) -> Step:
    """Return a choice of an event as a step."""
    logprobs, prompt = choice["logprobs"], choice["prompt_token_ids"]
    return Step(
        *(choice["text"], choice["token_ids"], logprobs["tokens"], logprobs["token_logprobs"]),
        *(choice["finish_reason"], choice["stop_reason"], prompt and len(prompt)),
    )


@pytest.mark.parametrize("more", [{}, {"allowed_token_ids": SPLIT}, {"stop": "an"}, {"n": 1}])
def test_a_stream_of_steps_has_the_tokens_of_vllms(run, more):
    body = {"inputs": "a", "parameters": {"max_new_tokens": 20, **more}, "stream": True}

    class OfSteps(Asked):
        async def step(self, step: Any) -> None:
            self.events.append(rendered(step))

        def write_step(self, step: Any) -> None:
            self.written += 1
            self.events.append(rendered(step))

    call = lmi.parse(json.dumps(body).encode())
    steps: Any = None

    def rendered(step: Step) -> bytes:
        lines: list[bytes] = []
        steps.step(step, before=b"", after=b"\n", write=lines.append)
        return b"".join(lines)

    def read(lines: Iterable[bytes]) -> list[Any]:
        return [json.loads(line) for line in b"".join(lines).splitlines()]

    async def lines(engine: Any, direct: bool) -> list[Any]:
        nonlocal steps
        for _ in range(LAST_TRIES):  # on a slow machine all steps may come at once
            steps = lmi.parse(json.dumps(body).encode()).steps
            one = OfSteps(call.path, json.dumps(call.body).encode())
            if not direct:
                break
            await one.of(engine, steps=True)
            if one.written or "stop" in more:  # texts with a stop are held back
                return read(one.events)
        assert not direct, "no step was written at once"
        _, _, events = await one.of_app(app_of(engine))
        chunks = [json.loads(it.removeprefix(b"data: ")) for it in events if b"{" in it]
        return read(rendered(step(it)) for chunk in chunks for it in chunk["choices"])

    async def both(engine: Any) -> None:
        ours, vllms = [await lines(engine, direct) for direct in (True, False)]
        for key in ("id", "logprob"):
            assert [it["token"][key] for it in ours] == [it["token"][key] for it in vllms]
        assert "".join(it["token"]["text"] for it in ours) == ours[-1]["generated_text"]
        assert ours[-1]["generated_text"] == vllms[-1]["generated_text"]

    run(both)


SAID = (
    "I <think so.</think>It is é.\n"
    '<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>'
)


@pytest.mark.parametrize(
    "more",
    [
        *({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}),
        *({"include_reasoning": False}, {"tools": TOOLS, "stream": False}),
        {"tools": TOOLS, "n": 2, "parallel_tool_calls": False},
        {"logprobs": True, "return_token_ids": True, "stream": False},
        {"include_reasoning": False, "logprobs": True, "stream": False},
    ],
    ids=[
        *("alone", "tools", "no tool", "no reasoning", "whole", "two"),
        *("log probabilities", "whole without reasoning"),
    ],
)
@pytest.mark.parametrize("said", [SAID, None], ids=["said", "parts of characters"])
@pytest.mark.parametrize(
    "names",
    [
        {"tool_parser_name": "hermes"},
        {"tool_parser_name": "deepseek_v32"},
        {"tool_parser_name": "kimi_k3", "reasoning_parser_name": "kimi_k3"},
        {"reasoning_parser_name": "qwen3"},
        {"reasoning_parser_name": "qwen3", "tool_parser_name": "qwen3_coder"},
        {"reasoning_parser_name": "glm45", "tool_parser_name": "hermes"},
        {"reasoning_parser_name": "granite"},
    ],
    ids=lambda names: " ".join(names.values()),
)
def test_the_same_answers_under_a_parser(run, monkeypatch, names, said, more):
    from vllm.parser import ParserManager

    parser = ParserManager.get_parser(**names, enable_auto_tools=True)

    async def both(engine: Any) -> None:
        chat, ours = engine._state.openai_serving_chat, engine._calls.routes[CHAT]
        monkeypatch.setattr(chat, "parser_cls", parser)
        monkeypatch.setattr(ours, "parser", lambda _: parser)
        for it, name in ((chat, "_include_reasoning_tokens_details"), (ours, "reasons")):
            monkeypatch.setattr(it, name, "reasoning_parser_name" in names)
        for it in (chat, chat.online_renderer, ours._prompts._short, ours._prompts._long):
            monkeypatch.setattr(it, "enable_auto_tools", True)
        tokens = spelled(chat.renderer.tokenizer, said) if said else SPLIT
        body = {"messages": A, "max_tokens": len(tokens), "stream": True, **more}
        asked = (CHAT, json.dumps(body | {"allowed_token_ids": tokens}).encode())
        vllms, ours, one = await from_both(engine, *asked)
        assert ours[0] == vllms[0] == 200, (ours, vllms)
        if not body["stream"]:
            assert ours[2] == vllms[2]
            return
        assert joined(ours[2]) == joined(vllms[2])
        assert one.written or not said or body.get("n") or "include_reasoning" in body

    run(both)


def spelled(tokenizer: Any, text: str) -> list[int]:
    """The tokens that are the bytes of a text, as GPT-2 has them."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    found: list[int] = tokenizer.convert_tokens_to_ids(
        [bytes_to_unicode()[byte] for byte in text.encode()]
    )
    return found


@pytest.mark.parametrize("cause", [ClientLeft(), TimedOut(3), NotReady("stopping")], ids=type)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("more", [{}, {"n": 2}], ids=["past vLLM", "rendered by vLLM"])
def test_a_request_that_ends_early_is_freed(run, cause, stream, more):
    async def end(engine: Any) -> None:
        body = {"prompt": "a", "max_tokens": 120, "stream": stream, **more}
        one = Asked(TEXT, json.dumps(body).encode())
        answered = asyncio.ensure_future(one.of(engine))
        unfinished = engine._client.get_num_unfinished_requests
        await until_async(lambda: len(one.events) > 2 if stream else unfinished() > 0)
        one.cancellation.cancel(cause)
        await answered
        await until_async(lambda: unfinished() == 0)
        assert b"length" not in b"".join(one.events)

    run(end)


@pytest.mark.parametrize("more", [{}, {"n": 2}], ids=["past vLLM", "rendered by vLLM"])
def test_a_request_that_is_ended_while_it_is_written_is_freed(run, more):
    class Ends(Asked):
        def add(self, event: bytes) -> None:
            super().add(event)
            if len(self.events) == 3:
                self.cancellation.cancel(NotReady("a formatter failed"))

    async def end(engine: Any) -> None:
        body = {"prompt": "a", "max_tokens": 120, "stream": True, **more}
        one = Ends(TEXT, json.dumps(body).encode())
        await one.of(engine)
        await until_async(lambda: engine._client.get_num_unfinished_requests() == 0)
        assert len(one.events) < 10  # Relay drops the events that were still in flight
        await asyncio.sleep(0)  # no interruption is left over

    run(end)
