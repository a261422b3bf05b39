# SPDX-License-Identifier: Apache-2.0
"""Random requests. For every request of a client, docs/reference/openapi.yaml describes the answer.

In ordinary runs the examples are the same; SLIPWAY_FUZZ=50 tries fifty times as many.
"""

import asyncio
import itertools
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from serving.protocol import ENGINE_PATHS, PAIRS_PATHS, RESPONSES, UNFORMATTED_PATHS
from tests.fake_engine import refused, streaming
from tests.fuzzing import TIMES, examples
from tests.serving.conftest import running
from tests.serving.lora.test_registry import registry, write

pytestmark = pytest.mark.anyio

DESCRIPTION = Path(__file__).parents[3] / "docs" / "reference" / "openapi.yaml"
SECRET = "Rumpelstilzchen"  # every prompt has this word, and no error has it
LIMIT = 40_000_000
OPENAI = ("/v1/completions", "/v1/chat/completions")
ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
SESSION = "X-Amzn-SageMaker-Session-Id"


# Limits that vLLM sets on a parameter's value: (types, smallest, largest).
RANGES: dict[str, tuple[Any, float, float]] = {
    "max_tokens": (int, 1, 2**31),
    "temperature": (int | float, 0, 1e9),
    "top_p": (int | float, 0, 1),
    "top_k": (int, -1, 2**31),
    "n": (int, 1, 16384),
    "seed": (int, -(2**63), 2**63 - 1),
    "logprobs": (int, 0, 20),
    "prompt_logprobs": (int, -1, 20),
    "truncate_prompt_tokens": (int, -1, 2**31),
}

PROMPTS = {
    **{"/v1/completions": "prompt", RESPONSES: "input", "/classify": "input", "/pooling": "input"},
    **{"/tokenize": "prompt", "/detokenize": "tokens", **dict.fromkeys(PAIRS_PATHS, "documents")},
}


class Engine:
    """Repeats the prompt when it refuses a body.

    choices: the choices of its answers, in turn. events: those of its streams. failure: the status
    and the message at the end of its streams.
    """

    def __init__(self):
        self.bodies = []
        self.plain()

    def plain(self):
        self.choices = [{"text": " word", "finish_reason": "length", "token_ids": [7]}]
        self.events = [{"choices": [{"index": 0, **self.choices[0]}]}, {"choices": []}]
        self.failure: tuple[int, str] | None = None

    async def post(self, call, sink, usage):
        body = call.request
        prompt = body.get(PROMPTS.get(call.path, "messages"))
        if fault := self.fault(body, prompt):
            raise refused(400, f"{fault} is not valid: {prompt!r:.500}", call)
        self.bodies.append(body)
        if body.get("stream"):
            events = [b"data: %b\n\n" % json.dumps(it).encode() for it in self.events]
            failure = self.failure and refused(*self.failure, call)
            await streaming(*events, failure or b"data: [DONE]\n\n")(call, sink, usage)
            return
        prompts = len(prompt) if isinstance(prompt, list) else 1
        count = min(prompts * (body.get("n") or 1), 50_000)
        found = zip(range(count), itertools.cycle(self.choices), strict=False)
        choices = [{"index": n, **choice} for n, choice in found]
        answer = {"choices": choices, "model": body.get("model")}
        await sink.answer(json.dumps(answer).encode())

    def fault(self, body, prompt):
        if not isinstance(prompt, str | list):
            return "prompt"
        for name, (kinds, low, high) in RANGES.items():
            value = body.get(name)
            if value is None:
                continue
            if not isinstance(value, kinds) or not low <= value <= high:
                return name
        return None


class Fuzzed:
    """A server, called from another thread: Hypothesis cannot run event loops."""

    def __init__(self, url, engine, root):
        self.engine = engine
        self.root = root
        self.client = httpx.Client(base_url=url, timeout=60)

    def ask(self, method, path, content=b"", headers=()):
        """Send a request, and check the rules that hold for every answer."""
        self.engine.bodies.clear()
        answer = self.client.request(method, path, content=content, headers=list(headers))
        sound(answer, path.partition("?")[0])
        return answer

    def invoke(self, content, headers=()):
        return self.ask("POST", "/invocations", content, headers)

    def alive(self):
        assert self.invoke(b'{"inputs": "x"}').json() == {"generated_text": " word"}


def sound(answer, path):
    """Check that the answer is JSON in one of its framings, and that an error has the
    path's shape.
    """
    kind = answer.headers["content-type"].partition(";")[0]
    text = answer.text
    if kind == "application/jsonlines":
        told = [json.loads(line) for line in text.removesuffix("\n").split("\n") if text]
    elif kind == "text/event-stream":
        events = [it.removeprefix("data: ") for it in text.split("\n\n") if it]
        told = [json.loads(it) for it in events if it != "[DONE]"]
    else:
        assert kind == "application/json"
        told = [json.loads(text)]
    failed = answer.status_code >= 400
    for it in told:
        if failed or (isinstance(it, dict) and it.keys() & {"code", "error"}):
            assert SECRET not in json.dumps(it)
            if path.startswith("/v1/messages"):
                assert it["error"]["type"] != "api_error"
                continue
            openais = path.startswith("/v1/") or path in ENGINE_PATHS
            code = it["error"]["code"] if openais else it["code"]
            assert isinstance(code, int)
            assert code not in (500, 502)
    assert answer.status_code not in (500, 502)


@pytest.fixture(scope="module")
async def fuzzed(anyio_backend, tmp_path_factory):
    root = tmp_path_factory.mktemp("fuzz") / "adapters"
    more: dict[str, Any] = {
        "sessions_path": str(root.parent / "sessions"),
        "cache_salt_header": "x-tenant",
    }
    async with running(max_request_size=LIMIT, **more) as it:
        write(root / "one")
        engine = Engine()
        it.engine.answers = dict.fromkeys((*OPENAI, *UNFORMATTED_PATHS), engine.post)
        it.pipeline.adapters = registry(it.engine, root)
        found = Fuzzed(it.url, engine, root)
        await it.client.post("/adapters", params={"name": "one", "src": str(root / "one")})
        yield found
        found.client.close()


async def run(check, fuzzed):
    await asyncio.to_thread(check)
    await asyncio.to_thread(fuzzed.alive)


with DESCRIPTION.open() as file:
    PATHS = yaml.safe_load(file)["paths"]
OPERATIONS = [
    (path, method, as_described)
    for path, operations in PATHS.items()
    for method in sorted(operations.keys() - {"parameters"})
    for as_described in (True, False)
    # A call without parameters cannot be wrong.
    if as_described or "{name}" in path or operations[method].keys() & {"parameters", "requestBody"}
]


@pytest.fixture(scope="module")
def description():
    import schemathesis  # it takes a second to import

    for kind in ("text/csv", "application/jsonlines"):
        schemathesis.serializer(kind)(lambda context, value: str(value).encode(errors="replace"))
    return schemathesis.openapi.from_path(DESCRIPTION)


@pytest.mark.parametrize(("path", "method", "as_described"), OPERATIONS)
async def test_answers_are_as_described(fuzzed, description, path, method, as_described):
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi import checks

    wanted = [
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
    ]
    mode = GenerationMode.POSITIVE if as_described else GenerationMode.NEGATIVE
    operation = description[path][method.upper()]

    @examples(8)
    @given(operation.as_strategy(generation_mode=mode))
    def check(case):
        try:
            answer = case.call_and_validate(base_url=str(fuzzed.client.base_url), checks=wanted)
        except BaseExceptionGroup as group:  # a BaseException would end the fixtures' event loop
            raise AssertionError(str(group)) from None
        assert answer.status_code < 500 or answer.status_code in (503, 507)

    await run(check, fuzzed)


text = st.text(max_size=20) | st.sampled_from(["", "\ud800", "\0", "é\n", "a" * 5000])
numbers = st.integers() | st.floats() | st.sampled_from([10**6, 2**63, 10**30, -1, 1e308])
wild = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
prompts = text.map(lambda it: f"{it}{SECRET}")
flags = st.booleans()
PARAMETERS = {
    "max_new_tokens": st.integers(1, 100),
    "do_sample": flags,
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 100),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.1, 2),
    "seed": st.integers(0, 2**32),
    "stop": text | st.lists(text, max_size=3),
    "stop_sequences": text | st.lists(text, max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 1000), max_size=3),
    "ignore_eos_token": flags,
    "truncate": st.integers(1, 100),
    "return_full_text": flags,
    "details": flags,
    "decoder_input_details": flags,
    "n": st.integers(1, 4),
    "best_of": st.integers(1, 4),
    "stream": flags,
    "logprobs": st.integers(0, 5),
}


def parameters(values):
    """An object's pairs; two of them may have the same key."""
    one = st.sampled_from(sorted(PARAMETERS)).flatmap(lambda it: st.tuples(st.just(it), values(it)))
    return st.lists(one | st.tuples(text, wild), max_size=6).map(written)


def written(pairs):
    """A JSON object with these pairs, as text. Values of type Raw are not encoded again."""
    return Raw("{" + ",".join(f"{json.dumps(key)}:{dumped(it)}" for key, it in pairs) + "}")


class Raw(str):
    pass


def dumped(value):
    return str(value) if isinstance(value, Raw) else json.dumps(value)


def requests(inputs, values, stream):
    pairs = {
        "inputs": inputs,
        "parameters": parameters(values),
        "stream": stream,
        "model": st.sampled_from([None, "", "model", "one"]),
        "adapters": st.sampled_from([None, "", "one"]) | st.lists(st.just("one"), max_size=2),
        "requestType": wild,
    }
    optional = [st.tuples(st.just(key), it) for key, it in list(pairs.items())[1:]]
    return st.tuples(
        st.tuples(st.just("inputs"), inputs), st.lists(st.one_of(optional), max_size=5)
    ).map(lambda it: written([it[0], *it[1]]).encode())


good = requests(
    prompts | st.lists(prompts, max_size=3),
    lambda name: PARAMETERS[name] | st.none(),
    st.booleans() | st.none(),
)
bad = requests(prompts | st.lists(prompts | wild, max_size=3) | wild, lambda name: wild, wild)


def nested(depth, key="inputs"):
    return b'{"temperature":-1,"%s":%b%b}' % (key.encode(), b"[" * depth, b"]" * depth)


async def test_lmi_requests(fuzzed):
    @examples(300)
    @given(good | bad)
    @example(b'{"inputs":"x","parameters":{"n":1000000,"details":true}}')
    @example(b'{"inputs":"x","parameters":{"n":1000000}}')
    @example(b'{"inputs":["x"],"parameters":{"n":-1}}')
    @example(b'{"inputs":"x","parameters":{"temperature":NaN,"top_p":Infinity}}')
    @example(b'{"inputs":"x","parameters":{"seed":%b}}' % (b"9" * 10_000))
    @example(b'{"inputs":"\\ud800"}')
    @example(b'{"inputs":"\xed\xa0\x80"}')
    @example(b'{"inputs":"x","inputs":5,"stream":true,"stream":"no"}')
    @example(nested(10_000))
    @example(b'{"inputs":"x","parameters":%b}' % nested(10_000))
    def check(body):
        fuzzed.invoke(body)

    await run(check, fuzzed)


async def test_a_stream_is_what_stream_asks_for(fuzzed):
    """`parameters` are for sampling: none of them changes the kind of answer."""

    @examples(50)
    @given(prompts, st.booleans(), st.dictionaries(st.just("stream"), flags))
    def check(prompt, stream, parameters):
        asked = {"inputs": prompt.replace("\ud800", ""), "stream": stream, "parameters": parameters}
        answer = fuzzed.invoke(json.dumps(asked).encode())
        streamed = answer.headers["content-type"] == "application/jsonlines"
        assert streamed == stream

    await run(check, fuzzed)


def mangled(body):
    """Texts that are almost JSON, or that some readers take for JSON and others do not."""
    encoded = body.decode(errors="replace")
    return st.one_of(
        st.just(body),
        st.just(b"\xef\xbb\xbf" + body),
        st.sampled_from(["utf-16", "utf-16-le", "utf-16-be", "utf-32"]).map(encoded.encode),
        st.integers(0, len(body)).map(lambda at: body[:at]),
        st.tuples(st.integers(0, len(body)), st.binary(max_size=3)).map(
            lambda it: body[: it[0]] + it[1] + body[it[0] :]
        ),
        st.binary(max_size=10).map(lambda it: body + it),
        st.just(body[:-1] + b',"x":NaN}'),
        st.just(body[:-1] + b',"\\ud800":1}'),
        st.just(body[:-1] + b',"x":"\xff"}'),
        st.integers(900, 1000).map(lambda it: body[:-1] + b',"x":' + b"[" * it + b"]" * it + b"}"),
    )


openai = st.fixed_dictionaries(
    {},
    optional={
        "prompt": prompts | st.lists(prompts, max_size=3) | wild,
        "messages": st.lists(st.fixed_dictionaries({"content": prompts}), max_size=2) | wild,
        "temperature": numbers,
        "stream": st.booleans() | wild,
        "adapters": st.sampled_from(["one", "", None]) | wild,
        "model": st.sampled_from(["one", "model", None]) | wild,
        "cache_salt": text | wild,
    },
).map(lambda it: json.dumps(it).encode())


async def test_openai_requests(fuzzed):
    @examples(300)
    @given(st.sampled_from([*OPENAI, "/v1/embeddings"]), openai.flatmap(mangled))
    @example("/v1/completions", b"[1]")
    @example("/v1/completions", b"1")
    @example("/v1/completions", b"")
    @example("/v1/completions", b'{"prompt":"\xff"}')
    @example("/v1/completions", b'{"cache_salt":"\xff"}')
    @example("/v1/completions", b'{"cache_salt":%b}' % nested(10_000))
    def check(path, body):
        fuzzed.ask("POST", path, body, [("content-type", "application/json")])

    await run(check, fuzzed)


async def test_nesting_of_every_depth(fuzzed):
    """Readers give up at different depths. Errors occur between these depths."""

    def check():
        for depth in range(940, 1000, 1 if TIMES > 1 else 2):
            for key, path in (("prompt", OPENAI[0]), ("messages", OPENAI[1])):
                fuzzed.ask("POST", path, nested(depth, key))
                fuzzed.ask("POST", path, nested(depth, "cache_salt"))
                fuzzed.invoke(nested(depth, key))
            fuzzed.ask("POST", "/rerank", nested(depth, "documents"))

    await run(check, fuzzed)


async def test_the_engine_reads_what_was_checked(fuzzed):
    """Tenants stay apart and the requested adapter answers, however a body is written."""
    kept = {"prompt": "x", "adapters": "one", "cache_salt": "mine"}
    salts = set()

    @examples(150)
    @given(mangled(json.dumps(kept).encode()))
    def check(body):
        headers = [("content-type", "application/json"), ("x-tenant", "alice")]
        fuzzed.ask("POST", "/v1/completions", body, headers)
        for read in fuzzed.engine.bodies:
            if read.get("adapters") == "one":
                assert str(read.get("model")).startswith("one@")
            if read.get("cache_salt") is not None:
                salts.add(read["cache_salt"])
                assert read["cache_salt"] != "mine"
            assert "cache_salt" in read

    await run(check, fuzzed)
    assert salts


@pytest.mark.parametrize("before", ["", "Hello ", "two\nlines ", 'a "quoted" ', "\t", "é "])
async def test_a_refusal_does_not_repeat_the_prompt(fuzzed, before):
    body = {"inputs": before + SECRET, "parameters": {"temperature": -1}}
    await asyncio.to_thread(fuzzed.invoke, json.dumps(body).encode())


async def test_large_requests(fuzzed):
    def check():
        long = b'{"inputs":"%b%b"' % (SECRET.encode(), b" word" * 6_000_000)
        assert fuzzed.invoke(long + b"}").status_code == 200
        assert fuzzed.invoke(long + b',"parameters":{"top_p":2}}').status_code == 424
        assert fuzzed.invoke(b"x" * (LIMIT + 1)).status_code == 413

    await run(check, fuzzed)


async def test_many_small_prompts_hold_nothing_up(fuzzed):
    """Other requests, /ping among them, wait while the server checks this one."""
    texts = [f"a{n}" for n in range(200_000)]  # none of them is in the engine's answers
    many = json.dumps({"prompt": "", "messages": texts, "temperature": -1}).encode()

    def check():
        began = time.process_time()  # the server is in this process
        fuzzed.ask("POST", "/v1/completions", many)
        assert time.process_time() - began < 2

    await run(check, fuzzed)


async def test_many_small_lines_hold_nothing_up(fuzzed):
    longest = 0.0

    async def pings():
        nonlocal longest
        while True:
            began = time.thread_time()  # which other processes of the machine do not delay
            await asyncio.sleep(0.01)
            longest = max(longest, time.thread_time() - began)

    pinging = asyncio.create_task(pings())
    kind = [("content-type", "application/jsonlines")]
    answer = await asyncio.to_thread(fuzzed.invoke, b"0\n" * 50_000, kind)
    pinging.cancel()
    assert answer.text.count("\n") == 50_000
    assert longest < 2  # SageMaker's limit for pings


KINDS = ("text/plain", "text/csv", "application/jsonlines", "application/json", "")


async def test_content_types(fuzzed):
    """Text, CSV and lines, under their own content types and under those of other formats."""
    cells = st.lists(st.lists(st.sampled_from(["inputs", '"', '"a""b"', "x", ""]), max_size=3))
    csv = cells.map(lambda rows: "\r\n".join(",".join(row) for row in rows).encode())
    lines = st.lists(good | bad | openai | st.binary(max_size=5), max_size=4).map(b"\n".join)
    kinds = st.sampled_from(KINDS) | st.binary(max_size=20).filter(sendable)

    @examples(200)
    @given(csv | lines | good | st.binary(max_size=30), kinds, st.sampled_from(["", "; q=1", ";"]))
    @example(b"", "text/csv", "")
    @example(b"inputs\n" + b"x" * 200_000, "text/csv", "")
    @example(b"inputs\n\0", "text/csv", "")
    @example(b'{"inputs":"x","stream":true}\n' * 2, "application/jsonlines", "")
    def check(body, kind, more):
        kind = kind if isinstance(kind, bytes) else (kind + more).encode()
        fuzzed.invoke(body, [(b"content-type", kind)])

    await run(check, fuzzed)


async def test_each_line_has_a_line(fuzzed):
    """The place of an answer identifies its request."""
    asked = st.lists(good | openai, min_size=2, max_size=4)

    @examples(100)
    @given(asked)
    @example([b'{"inputs":"x","parameters":{"stream":true}}'] * 2)
    @example([b'{"prompt":"x","stream":1}'] * 2)
    def check(requests):
        kind = [("content-type", "application/jsonlines")]
        answer = fuzzed.invoke(b"\n".join(requests), kind)
        assert answer.content.count(b"\n") == len(requests)

    await run(check, fuzzed)


def sendable(value: bytes) -> bool:
    return not any(byte < 32 or byte == 127 for byte in value) and value == value.strip()


async def test_headers(fuzzed):
    any_bytes = st.binary(max_size=40).filter(sendable)
    names = (ADAPTER, SESSION, "Accept", "X-Tenant", "X-Amzn-SageMaker-Adapter-Alias")
    told = any_bytes | st.sampled_from([b"one", b"NEW_SESSION", b"text/event-stream", b"*/*"])
    headers = st.lists(st.tuples(st.sampled_from(names), told), max_size=4)
    bodies = st.sampled_from(
        [
            b'{"inputs":"x"}',
            b'{"inputs":"x","stream":true}',
            b'{"prompt":"x"}',
            b'{"requestType":"NEW_SESSION"}',
            b'{"requestType":"CLOSE"}',
            b'{"requestType":"\\u0000"}',
        ]
    )

    @examples(200)
    @given(bodies, headers)
    def check(body, headers):
        fuzzed.invoke(body, headers)
        fuzzed.ask("POST", "/v1/completions", body, headers)
        fuzzed.ask("POST", "/adapters/one/update", b"", headers)

    await run(check, fuzzed)


async def test_metrics_whatever_is_asked(fuzzed):
    """Prometheus's own app answers these requests, and reads headers and the query."""

    @examples(50)
    @given(st.binary(max_size=20).filter(sendable), st.binary(max_size=5).map(quote))
    def check(accept, name):
        asked = {"accept": accept, "accept-encoding": accept}
        answer = fuzzed.client.get(f"/metrics?name[]={name}", headers=asked)
        assert answer.status_code == 200

    await run(check, fuzzed)


async def test_adapter_calls(fuzzed):
    """Any query and any body, on every call of adapters."""
    src = st.sampled_from(
        [str(fuzzed.root / "one"), str(fuzzed.root), "s3://mine", "s3://a/b", "x:"]
    )
    given_one = {
        "name": st.sampled_from(["one", "two", "."]) | wild,
        "src": src | wild,
        "preload": st.sampled_from(["true", "false"]) | wild,
        "pin": st.just("false") | wild,
        "limit": st.sampled_from(["1", "9" * 5000, "²"]) | wild,
        "next_page_token": st.sampled_from(["1", "9" * 5000, "-1"]) | wild,
    }
    some = st.fixed_dictionaries({}, optional=given_one)
    paths = st.sampled_from(["/adapters", "/adapters/one", "/adapters/one/update"])
    models = st.sampled_from(["", "/models/model", "/models/%00", "/models/lmi"])
    methods = st.sampled_from(["GET", "POST", "DELETE", "PUT"])

    @examples(400)
    @given(methods, models, paths, some, some | wild)
    @example("POST", "", "/adapters", {"name": "two", "src": "\0"}, {})
    @example("POST", "", "/adapters/one/update", {}, {"src": 5})
    @example("GET", "", "/adapters", {"limit": "9" * 5000}, {})
    @example("GET", "", "/adapters", {"next_page_token": "9" * 5000}, {})
    def check(method, model, path, query, body):
        if method == "DELETE":
            path = path.replace("one", "two")
        written = "&".join(f"{key}={quoted(value)}" for key, value in query.items())
        fuzzed.ask(method, f"{model}{path}?{written}", json.dumps(body).encode())

    await run(check, fuzzed)


def quoted(value):
    return quote(str(value).encode(errors="surrogatepass"))[:20_000]


generated = st.text(max_size=5)
logprobs = st.lists(st.tuples(generated, st.none() | st.floats(-9999, 0)), max_size=4).map(
    lambda it: {"tokens": [a for a, _ in it], "token_logprobs": [b for _, b in it]}
)
ids = st.lists(st.integers(0, 2**31), max_size=4)
known = {"logprob": st.floats(-9999, 0), "rank": st.integers(1, 9), "decoded_token": generated}
of_token = st.dictionaries(st.integers(0, 9).map(str), st.fixed_dictionaries(known), max_size=2)
choices = st.fixed_dictionaries(
    {"text": generated},
    optional={
        "finish_reason": st.sampled_from([None, "stop", "length", "abort"]),
        "stop_reason": st.none() | generated | st.integers(0, 9),
        "logprobs": st.none() | logprobs,
        "token_ids": st.none() | ids,
        "prompt_token_ids": st.none() | ids,
        "prompt_logprobs": st.none() | st.lists(st.none() | of_token, max_size=4),
    },
)
chunks = st.lists(choices.map(lambda it: {"index": 0, **it}), max_size=2).map(
    lambda it: {"choices": it, "usage": {"prompt_tokens": 1}}
)


@pytest.fixture
def odd(fuzzed):
    """The server with an engine whose answers the test sets."""
    yield fuzzed
    fuzzed.engine.plain()


async def test_whatever_the_engine_answers_is_rendered(odd):
    """Fields missing or null, several tokens a chunk, text without tokens, chunks with nothing."""

    @examples(150)
    @given(good, st.lists(choices, min_size=1, max_size=4), st.lists(chunks, max_size=4))
    def check(body, choices, events):
        odd.engine.choices, odd.engine.events = choices, events
        odd.invoke(body)

    await asyncio.to_thread(check)


async def test_an_error_among_events_is_the_last_line(odd):
    @examples(20)
    @given(st.lists(chunks, max_size=3), st.sampled_from([400, 404, 503]), flags)
    def check(events, status, sse):
        odd.engine.events, odd.engine.failure = events, (status, f"not so: {SECRET}")
        body = json.dumps({"inputs": SECRET, "stream": True}).encode()
        answer = odd.invoke(body, [("accept", "text/event-stream" if sse else "*/*")])
        told = [it for it in answer.text.split("\n") if it]
        assert "code" in json.loads(told[-1].removeprefix("data: "))

    await asyncio.to_thread(check)
