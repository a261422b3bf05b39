# SPDX-License-Identifier: Apache-2.0
"""The answers that clients see, through a real server and a real socket; only the engine is
a fake.
"""

import asyncio
import json
from operator import itemgetter

import pytest

from tests.serving.conftest import running
from tests.support.harness import metrics
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

SSE = {"accept": "text/event-stream"}
JSONL = "application/jsonlines"
LMI_REFUSAL = {"code": 424, "error": "not like this"}


def lines(answer):
    return [json.loads(line) for line in answer.text.splitlines()]


def events(answer):
    return [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]


async def test_ping(shared):
    for path in ("/ping", "/health"):
        answer = await shared.client.get(path)
        assert answer.status_code == 200
        assert answer.json()["status"] == "ready"


async def test_lmi_text(shared):
    answer = await shared.invoke({"inputs": "one two three"})
    assert answer.json() == {"generated_text": "three two one"}
    assert answer.headers["content-type"] == "application/json"


async def test_lmi_stream_is_json_lines(shared):
    answer = await shared.invoke({"inputs": "one two", "stream": True})
    assert answer.headers["content-type"] == "application/jsonlines"
    first, second = lines(answer)
    assert first["token"]["text"] + second["token"]["text"] == second["generated_text"] == "twoone"


async def test_lmi_stream_as_server_sent_events(shared):
    answer = await shared.invoke({"inputs": "one two", "stream": True}, headers=SSE)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert json.loads(events(answer)[-1])["generated_text"] == "twoone"


@pytest.mark.parametrize(
    ("body", "text", "piece"),
    [
        ({"prompt": "one two"}, itemgetter("text"), itemgetter("text")),
        (
            {"messages": [{"role": "user", "content": "one two"}]},
            lambda choice: choice["message"]["content"],
            lambda choice: choice["delta"]["content"],
        ),
    ],
)
async def test_openai_bodies_on_invocations(shared, body, text, piece):
    answer = await shared.invoke(body)
    assert text(answer.json()["choices"][0]) == "two one"
    streamed = await shared.invoke(body | {"stream": True})
    assert streamed.headers["content-type"] == "application/jsonlines"
    assert [piece(line["choices"][0]) for line in lines(streamed)] == ["two", "one"]
    streamed = await shared.invoke(body | {"stream": True}, headers=SSE)
    assert events(streamed)[-1] == "[DONE]"
    assert shared.engine.bodies[-1] == body | {"stream": True}


async def test_openai_paths_pass_through(shared):
    models = (await shared.client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == [*shared.engine.names]
    assert {model["root"] for model in models} == {shared.settings.model_id}
    for model in models:
        assert (await shared.client.get(f"/v1/models/{model['id']}")).json() == model
    answer = await shared.client.get("/v1/models/another/one")
    assert answer.status_code == 404
    assert "'another/one' does not exist" in answer.json()["error"]["message"]
    answer = await shared.post("/v1/completions", {"prompt": "one two"})
    assert answer.json()["choices"][0]["text"] == "two one"
    streamed = await shared.post("/v1/completions", {"prompt": "one two", "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert len(events(streamed)) == 3


async def test_kv_event_sources_are_the_engines(shared):
    answer = await shared.client.get("/kv_event_sources")
    assert answer.json() == {"0": {"endpoint": "tcp://*:5557"}}
    async with running(wait=False) as starting:
        starting.may_start.clear()
        assert (await starting.client.get("/kv_event_sources")).status_code == 503
        starting.may_start.set()


async def test_the_keys_decide_in_lmis_order(shared):
    await shared.invoke({"messages": [], "inputs": "lmi", "prompt": "openai"})
    assert shared.engine.bodies[-1]["prompt"] == "openai"
    await shared.invoke({"messages": [], "inputs": "lmi", "prompt": None})
    assert shared.engine.bodies[-1]["prompt"] == "lmi"


async def test_any_content_type_does_on_invocations(shared):
    for kind in ("text/plain", "application/json; charset=utf-8", ""):
        answer = await shared.invoke({"inputs": "x"}, headers={"content-type": kind})
        assert answer.json() == {"generated_text": "x"}


async def test_lmis_other_paths_are_the_same(shared):
    name = shared.engine.names[1]
    for path in (f"/predictions/{name}", f"/models/{name}/invoke"):
        answer = await shared.post(path, {"inputs": "one two"})
        assert answer.json() == {"generated_text": "two one"}
        answer = await shared.post(path, {"inputs": "refuse"})
        assert (answer.status_code, answer.json()) == (424, LMI_REFUSAL)
        answer = await shared.post(path.replace(name, "other"), {"inputs": "a"})
        assert answer.status_code == 404


async def test_text_and_csv(shared):
    answer = await shared.invoke(b"one two", headers={"content-type": "text/plain"})
    assert answer.json() == {"generated_text": "two one"}
    answer = await shared.invoke(b"inputs\na b\nc d\n", headers={"content-type": "text/csv"})
    assert answer.json() == [{"generated_text": "b a"}, {"generated_text": "d c"}]


async def test_json_lines_are_answered_a_line_each(shared):
    records = [
        {"inputs": "a b"},
        {"prompt": "c d"},
        {"inputs": "refuse"},
        {"inputs": "a", "stream": True},
        {"inputs": "a", "adapters": "nobody"},
        {"inputs": 5},
        {"inputs": "e f"},
    ]
    body = "\n".join(map(json.dumps, records)).encode()
    headers = {"content-type": "application/jsonlines"}
    answer = await shared.invoke(body, headers=headers)
    assert answer.headers["content-type"] == "application/jsonlines"
    first, second, refused, stream, adapter, wrong, last = lines(answer)
    assert (first, last) == ({"generated_text": "b a"}, {"generated_text": "f e"})
    assert second["choices"][0]["text"] == "d c"
    assert refused == LMI_REFUSAL
    for error, told in ((stream, "streamed"), (adapter, "LoRA"), (wrong, "$.inputs")):
        assert error["code"] == 424
        assert told in error["error"]
    answer = await shared.invoke(json.dumps(records[2]).encode(), headers=headers)
    assert (answer.status_code, answer.json()) == (424, LMI_REFUSAL)


async def test_no_more_lines_at_a_time_than_the_engine_works_on(shared):
    body = b"\n".join([b'{"inputs": "wait"}'] * 9)
    headers = {"content-type": "application/jsonlines"}
    asked = asyncio.create_task(shared.invoke(body, headers=headers))
    await until_async(lambda: shared.engine.running == shared.engine.concurrency)
    await asyncio.sleep(0.1)
    assert shared.engine.running == shared.engine.concurrency
    shared.engine.gate.set()
    assert len(lines(await asked)) == 9
    shared.engine.gate.clear()


async def test_execution_parameters(shared):
    answer = await shared.client.get("/execution-parameters")
    assert answer.json() == {
        "MaxConcurrentTransforms": 4,
        "BatchStrategy": "MULTI_RECORD",
        "MaxPayloadInMB": 1,
    }
    async with running(max_request_size=64_000_000) as served:
        served.engine.concurrency = 32
        found = (await served.client.get("/execution-parameters")).json()
        assert (found["MaxConcurrentTransforms"], found["MaxPayloadInMB"]) == (32, 3)


async def test_the_default_accept():
    async with running(default_accept="text/event-stream") as served:
        for headers, kind in (({}, SSE["accept"]), ({"accept": "application/json"}, JSONL)):
            answer = await served.invoke({"inputs": "a", "stream": True}, headers=headers)
            assert answer.headers["content-type"].startswith(kind)


async def test_embeddings_of_inputs(shared):
    shared.engine.embeds = True
    try:
        for inputs, vectors in (("ab", [[2.0]]), (["ab", "c"], [[2.0], [1.0]])):
            assert (await shared.invoke({"inputs": inputs})).json() == vectors
        assert shared.engine.bodies[-1] == {"input": ["ab", "c"], "use_activation": True}
        answer = await shared.invoke({"inputs": {"a": 1}})
        assert answer.status_code == 424
        answer = await shared.invoke({"text": "a"})
        assert "keys prompt, inputs, messages, query, text_1 or input" in answer.json()["error"]
    finally:
        shared.engine.embeds = False


async def test_embeddings_as_openais_on_invocations(shared):
    body = {"input": ["ab", "c"]}
    shared.engine.embeds = True
    try:
        answer = await shared.invoke(body)
        assert answer.json() == (await shared.post("/v1/embeddings", body)).json()
        assert (await shared.invoke({"input": ["a"] * 2049})).status_code == 424
    finally:
        shared.engine.embeds = False


async def test_a_chats_images_come_from_allowed_hosts_only(shared):
    def chat(url):
        part = {"type": "image_url", "image_url": {"url": url}}
        return {"messages": [{"role": "user", "content": [part]}]}

    for path in ("/invocations", "/v1/chat/completions"):
        answer = await shared.post(path, chat("https://elsewhere.example/a.png?key=secret"))
        assert answer.status_code == (424 if path == "/invocations" else 400)
        assert "elsewhere.example" in answer.text
        assert "OPTION_ALLOWED_MEDIA_DOMAINS" in answer.text
        assert "secret" not in answer.text


async def test_no_media_are_looked_for_where_the_engine_looks_for_none(shared):
    """A flood of them held up everybody. Texts to compare have a limit on their own paths only."""
    part = {"type": "image_url", "image_url": {"url": "https://elsewhere.example/a.png"}}
    body = {"messages": [{"role": "user", "content": "a"}], "query": [{"content": [part]}]}
    assert (await shared.post("/v1/chat/completions", body)).status_code == 200


HALF = (
    "the body has half of a surrogate pair, which is no character: leave out the text that was cut "
    "within one, or send both halves"
)
HALVES = (rb"\ud83d", rb"\ude00", rb"\uD83D\u0041", rb"\\\ud83d", b"\xed\xa0\xbd", rb"\ud83d\ud83d")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"inputs', "the body is not JSON: Input data was truncated"),
        (b"", "the body is not JSON: Input data was truncated"),
        (b"[1]", "Expected `object`, got `array`"),
        (b"{}", "the body should have one of the keys prompt, inputs, messages or input"),
        (
            b'{"a":' * 4000 + b"1" + b"}" * 4000,
            "the body is nested too deeply; send fewer lists and objects within others",
        ),
        (
            b'{"inputs": "\xff"}',
            "the body is not JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid "
            "start byte",
        ),
        *((b'{"inputs": "a %b b"}' % half, HALF) for half in HALVES),
        (b'{"inputs": "a", "unread": "\\ud83d"}', HALF),
        (rb'{"inputs": "a \\ud83d', "the body is not JSON: Input data was truncated"),
        (rb'{"inputs": "a \ud83d\ude00', "the body is not JSON: Input data was truncated"),
        (b'{"inputs": 5}', "Expected `str | array`, got `int` - at `$.inputs`"),
        (b'{"inputs": "refuse"}', "not like this"),
    ],
)
async def test_bad_bodies_are_told_in_lmis_words(shared, body, error):
    answer = await shared.invoke(body)
    told = (
        answer.json()["error"].partition(" (byte ")[0] if error == HALF else answer.json()["error"]
    )
    assert (answer.status_code, answer.json()["code"], told) == (424, 424, error)


async def test_errors_on_openai_paths_are_openais(shared):
    answer = await shared.post("/v1/completions", {"prompt": "refuse"})
    told = {"message": "not like this", "type": "BadRequestError", "param": "prompt", "code": 400}
    assert (answer.status_code, answer.json()) == (400, {"error": told})


@pytest.mark.parametrize(
    ("prompt", "message", "told"),
    [
        ("refuse my secret", "bad value 'refuse my secret'", "prompt is not valid"),
        ("refuse " + "my secret " * 50, "bad 'refuse my secret my secret ...", "prompt is not"),
        (["a", "refuse"], "not 'refuse'", "prompt is not valid"),
        (
            "refuse this. " + "My name is Anna, and my number is 0123 456 789. " * 3,
            "cannot read 'name is Anna, and my number is 0123 456 789'",
            "prompt is not valid",
        ),
        ("refuse my secret", "word " * 4000, "prompt is not valid"),
        ("refuse my secret", "temperature must be above 0", "temperature must be above 0"),
    ],
)
async def test_a_message_that_repeats_the_prompt_is_not_passed_on(shared, prompt, message, told):
    answer = await shared.post("/v1/completions", {"prompt": prompt, "message": message})
    assert told in answer.json()["error"]["message"]
    assert "refuse" not in answer.text
    answer = await shared.invoke({"inputs": prompt, "parameters": {"message": message}})
    assert told in answer.json()["error"]


OWN = (
    "This model's maximum context length is 2048 tokens. However, your prompt contains at least "
    "2049 input tokens.",
    "min_tokens must be less than or equal to max_tokens=30, got 50.",
)
SAYS = {"role": "user", "content": "refuse"}
SCHEMA = {"type": "object", "properties": {"unit": {"type": "string", "enum": ["c", "maximum"]}}}


ORDINARY = ("m", "30", "input", "maximum context length", OWN[0])


@pytest.mark.parametrize(
    "more",
    [
        {
            "messages": [
                {"role": "assistant", "content": ""},
                {"role": "user", "content": "a"},
                SAYS,
            ]
        },
        {"messages": [{"role": "system", "content": " "}, SAYS]},
        *({"messages": [{"role": "user", "content": it}, SAYS]} for it in ORDINARY),
        {
            "messages": [SAYS],
            "tools": [{"function": {"name": "at least", "description": "", "parameters": SCHEMA}}],
        },
    ],
    ids=lambda it: f"{it}"[:60],
)
@pytest.mark.parametrize("message", OWN)
async def test_an_error_keeps_its_reason_whatever_words_a_request_has(shared, more, message):
    answer = await shared.post("/v1/chat/completions", {**more, "message": message})
    assert answer.json()["error"]["message"] == message


@pytest.mark.parametrize(
    ("flag", "option"),
    [
        (
            '"auto" requires --enable-auto-tool-choice and --tool-call-parser to be set',
            '"auto" requires OPTION_ENABLE_AUTO_TOOL_CHOICE and OPTION_TOOL_CALL_PARSER to be set',
        ),
        ("set --max-model-len", "set OPTION_MAX_MODEL_LEN"),
        ("use `--tensor-parallel-size`.", "use `OPTION_TENSOR_PARALLEL_SIZE`."),
        ("with --no-enable-prefix-caching", "with OPTION_ENABLE_PREFIX_CACHING=false"),
        ("--no-such-flag, a--b", "--no-such-flag, a--b"),
    ],
)
async def test_errors_name_options_and_not_vllms_flags(shared, flag, option):
    body = {"messages": [SAYS], "message": flag, "tools": [{"function": {"name": "auto"}}]}
    answer = await shared.post("/v1/chat/completions", body)
    assert answer.json()["error"]["message"] == option


async def test_not_each_of_a_flood_of_texts_is_compared_with_a_message():
    """That would hold up everybody: 8 MB of short texts take about ten seconds."""
    body = {
        "prompt": "refuse this",
        "message": "temperature must be above 0",
        "query": ["w"] * 70_000,
    }
    async with running(max_request_size=2**20) as served:
        answer = await served.post("/v1/completions", body)
    assert answer.json()["error"]["message"] == "prompt is not valid"


@pytest.mark.parametrize("order", ["break", "raise"])
async def test_a_failure_of_the_engines_is_500(shared, order):
    for path, body in (("/invocations", {"inputs": order}), ("/v1/completions", {"prompt": order})):
        answer = await shared.post(path, body)
        assert answer.status_code == 500
        assert "error" in answer.json()
        assert "boom" not in answer.text


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        (
            "GET",
            "/invocations",
            405,
            {"code": 405, "error": "/invocations does not answer GET; it answers POST"},
        ),
        ("POST", "/v1/load_lora_adapter", 404, None),
        ("POST", "/reset_prefix_cache", 404, None),
        ("GET", "/docs", 404, None),
        ("GET", "/healthz", 404, None),
        (
            "POST",
            "/sleep",
            404,
            {
                "code": 404,
                "type": "ResourceNotFoundException",
                "message": "there is nothing at /sleep",
            },
        ),
    ],
)
async def test_nothing_else_is_there(shared, method, path, status, body):
    answer = await shared.client.request(method, path)
    assert answer.status_code == status
    assert answer.headers.get("allow") == ("POST" if status == 405 else None)
    if body:
        assert answer.json() == body


async def test_a_path_the_model_does_not_answer_is_404(shared):
    answer = await shared.post("/v1/embeddings", {"input": "x"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "the model does not answer /v1/embeddings"


@pytest.mark.parametrize("size", [30_001, 119_999, 150_000])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_413(shared, size, chunked):
    async def pieces():
        for start in range(0, size, 1000):
            yield b"x" * min(1000, size - start)

    content = pieces() if chunked else b"x" * size
    answer = await shared.client.post("/invocations", content=content)
    assert answer.status_code == 413
    assert answer.json()["error"].startswith("the body is larger than 30000 bytes")
    assert (await shared.invoke({"inputs": "x"})).status_code == 200


@pytest.mark.parametrize("order", ["fault", "cut"])
@pytest.mark.parametrize("headers", [{}, SSE])
@pytest.mark.parametrize("key", ["inputs", "prompt"])
async def test_an_error_within_a_stream_is_told_in_it(shared, order, headers, key):
    answer = await shared.invoke({key: f"{order} two three", "stream": True}, headers=headers)
    assert answer.status_code == 200
    told = events(answer) if headers else answer.text.splitlines()
    told = [line for line in told if line != "[DONE]"]
    assert len(told) == 2
    assert json.loads(told[-1])["code"] == 500
    assert "deep inside" not in answer.text


async def test_an_error_within_a_stream_on_an_openai_path(shared):
    answer = await shared.post("/v1/completions", {"prompt": "fault two three", "stream": True})
    _, error, done = events(answer)
    assert json.loads(error)["error"]["type"] == "InternalServerError"
    assert done == "[DONE]"


@pytest.mark.parametrize("path", ["/invocations", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_engines_work(shared, path, stream):
    request = asyncio.create_task(shared.post(path, {"prompt": "wait here", "stream": stream}))
    await until_async(lambda: shared.engine.running == 1)
    request.cancel()
    await until_async(lambda: shared.engine.running == 0)
    assert await shared.pipeline.admission.drained(60)


async def test_metrics_are_there_before_the_engine_is():
    async with running(wait=False) as served:
        served.may_start.clear()
        answer = await served.client.get("/metrics")
        assert answer.status_code == 200
        assert "python_info" in answer.text
        # Exemplars, which OpenMetrics adds, exist only with traces.
        openmetrics = {"accept": "application/openmetrics-text; version=1.0.0"}
        answer = await served.client.get("/metrics", headers=openmetrics)
        assert answer.headers["content-type"].startswith("text/plain")
        served.may_start.set()


async def test_metrics_can_be_asked_for_by_their_names(shared):
    """As Prometheus' clients have it: the supervisor of several copies wants a few of them."""
    text = (await shared.client.get("/metrics?name[]=python_info&name[]=nothing")).text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert {line.partition("{")[0] for line in lines} == {"python_info"}


async def test_a_request_that_takes_too_long_is_ended():
    told = {
        "code": 504,
        "error": "the request took longer than 1 s; OPTION_PREDICT_TIMEOUT sets the limit",
    }
    async with running(predict_timeout=1) as served:
        whole, stream = await asyncio.gather(
            served.invoke({"inputs": "wait a"}),
            served.invoke({"inputs": "wait b", "stream": True}),
        )
        assert (whole.status_code, whole.json()) == (504, told)
        assert lines(stream)[-1] == told
        await until_async(lambda: served.engine.running == 0)


async def test_keys_without_effect_are_named_and_counted(shared):
    async def counted():
        text = (await shared.client.get("/metrics")).text
        found = {"watermark": 0.0, "other": 0.0}
        for sample in metrics.samples(text, "slipway_ignored_fields_total"):
            found[sample.labels["field"]] = sample.value
        return {name: found[name] for name in ("watermark", "other")}

    before = await counted()
    body = {"inputs": "one two", "temperature": 0, "a b\r\nc: d": 1, "made-up": 2}
    answer = await shared.invoke({**body, "parameters": {"watermark": True}})
    assert answer.status_code == 200
    assert answer.headers["x-slipway-ignored"] == "made-up, watermark"
    assert shared.engine.bodies[-1]["temperature"] == 0
    assert await counted() == {"watermark": before["watermark"] + 1, "other": before["other"] + 2}
    plain = await shared.invoke({"inputs": "one two"})
    assert "x-slipway-ignored" not in plain.headers


@pytest.mark.parametrize(
    ("body", "fix"),
    [
        ({"prompt": [{"role": "user", "content": "Test"}]}, "a conversation goes under messages"),
        ({"inputs": [{"role": "user", "content": "Test"}]}, "a conversation goes under messages"),
        ({"inputs": {"image": "…", "prompt": "what?"}}, "as image_url"),
    ],
)
async def test_what_is_no_text_is_told_where_to_go(shared, body, fix):
    answer = await shared.invoke(body)
    assert answer.status_code == 424
    assert fix in answer.text


async def test_lines_of_json_are_told_their_type(shared):
    answer = await shared.client.post(
        "/invocations",
        content=b'{"inputs": "a"}\n{"inputs": "b"}\n',
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 424
    assert "send it as application/jsonlines" in answer.text
