# SPDX-License-Identifier: Apache-2.0
"""The APIs on the real engine with a tiny model."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from tests.support.harness.wait import until, until_async

SECRET = "xyzzy plugh"
GREEDY = {"max_new_tokens": 8, "do_sample": False}
SSE = "text/event-stream"


def test_lmi_text_and_stream_agree(server):
    whole = server.invoke({"inputs": "An import statement", "parameters": GREEDY}).json()
    lines = server.lines({"inputs": "An import statement", "parameters": GREEDY, "stream": True})
    assert len(lines) == 8
    assert "".join(line["token"]["text"] for line in lines) == lines[-1]["generated_text"]
    assert lines[-1]["generated_text"] == whole["generated_text"] != ""


def test_lmi_stream_as_server_sent_events(server):
    body = {"inputs": "An import statement", "parameters": GREEDY, "stream": True}
    answer = server.invoke(body, accept=SSE)
    assert answer.headers["content-type"].startswith(SSE)
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    assert [json.loads(event) for event in events] == server.lines(body)


def test_lmi_details(server):
    parameters = GREEDY | {"details": True, "decoder_input_details": True, "seed": 4}
    answer = server.invoke({"inputs": "An import statement", "parameters": parameters}).json()
    details = answer["details"]
    assert details["finish_reason"] == "length"
    assert details["generated_tokens"] == len(details["tokens"]) == 8
    assert details["seed"] == 4
    assert "".join(token["text"] for token in details["tokens"]) == answer["generated_text"]
    assert all(token["logprob"] <= 0 for token in details["tokens"])
    assert len(details["prefill"]) == details["input_length"] > 1
    assert all(token["logprob"] <= 0 for token in details["prefill"][1:])


def test_lmi_stop_sequences(server):
    whole = server.invoke({"inputs": "An import", "parameters": GREEDY}).json()["generated_text"]
    stop = whole[len(whole) // 2 :][:3]
    parameters = GREEDY | {"stop_sequences": [stop], "details": True}
    answer = server.invoke({"inputs": "An import", "parameters": parameters}).json()
    assert answer["generated_text"] == whole[: whole.index(stop)]
    assert answer["details"]["finish_reason"] == "stop_sequence"
    lines = server.lines({"inputs": "An import", "parameters": parameters, "stream": True})
    assert "".join(line["token"]["text"] for line in lines) == answer["generated_text"]


def test_lmi_list_of_inputs(server):
    prompts = ["An import", "A class", "The yield"]
    together = server.invoke({"inputs": prompts, "parameters": GREEDY}).json()
    assert together == [
        server.invoke({"inputs": prompt, "parameters": GREEDY}).json() for prompt in prompts
    ]


def test_lmi_full_text(server):
    parameters = GREEDY | {"return_full_text": True}
    answer = server.invoke({"inputs": "An import", "parameters": parameters}).json()
    assert answer["generated_text"].startswith("An import")


def test_characters_of_several_tokens_survive_a_stream(server):
    parameters = {"max_new_tokens": 200, "temperature": 2.0, "seed": 1, "ignore_eos_token": True}
    whole = server.invoke({"inputs": "é", "parameters": parameters}).json()["generated_text"]
    lines = server.lines({"inputs": "é", "parameters": parameters, "stream": True})
    assert "".join(line["token"]["text"] for line in lines) == lines[-1]["generated_text"] == whole
    assert any(ord(character) > 127 for character in whole)


@pytest.mark.parametrize("key", ["chat", "completion"])
@pytest.mark.parametrize("model", ["tiny-llama-1", "lmi", "", "its folder"])
def test_openais_own_client(server, tiny_options, key, model):
    if model == "its folder":
        model = tiny_options["OPTION_MODEL_ID"]
    create: Any
    if key == "chat":
        create = server.openai.chat.completions.create
        prompt: Any = {"messages": [{"role": "user", "content": "Hello"}]}
    else:
        create, prompt = server.openai.completions.create, {"prompt": "Hello"}
    whole = create(model=model, **prompt, max_tokens=8, temperature=0)
    assert whole.usage.completion_tokens == 8
    pieces = create(model=model, **prompt, max_tokens=8, temperature=0, stream=True)
    if key == "chat":
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        assert text == whole.choices[0].message.content
    else:
        assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text


def test_openai_bodies_on_invocations_answer_as_on_their_own_paths(server):
    body = {"prompt": "An import", "max_tokens": 8, "temperature": 0}
    here = server.invoke(body).json()["choices"]
    assert here == server.client.post("/v1/completions", json=body).json()["choices"]
    lines = server.lines(body | {"stream": True})
    assert "".join(line["choices"][0]["text"] for line in lines) == here[0]["text"]


def test_models_and_metrics(server, tiny_options):
    names = [model.id for model in server.openai.models.list()]
    assert names == ["tiny-llama-1", "lmi", tiny_options["OPTION_MODEL_ID"]]
    assert server.metric("vllm:request_success_total") >= 0
    assert server.metric("vllm:kv_cache_usage_perc") < 1


@pytest.mark.parametrize(
    "path", ["/v1/load_lora_adapter", "/tokenizer_info", "/v2/embed", "/version", "/sleep"]
)
def test_the_engines_other_routes_are_not_there(server, path):
    assert server.client.post(path, json={}).status_code == 404
    assert server.client.get(path).status_code == 404


LONG = f"{SECRET} " * 20_000
BAD = [
    ("/invocations", {"inputs": SECRET, "parameters": {"temperature": -1}}, 424, "temperature"),
    ("/invocations", {"inputs": SECRET, "parameters": {"top_p": "x"}}, 424, "top_p"),
    ("/invocations", {"inputs": SECRET, "parameters": {"max_new_tokens": SECRET}}, 424, "max_new"),
    ("/invocations", {"inputs": SECRET, "parameters": {"n": 10**6, "details": True}}, 424, "n "),
    ("/invocations", {"inputs": SECRET, "parameters": {"stop": [SECRET, 5]}}, 424, "stop"),
    ("/invocations", {"inputs": LONG}, 424, "4096"),
    ("/invocations", {"inputs": SECRET, "model": "other"}, 404, "other"),
    ("/invocations", {"inputs": "", "parameters": {"stop": SECRET}}, 424, "prompt"),
    ("/invocations", {"messages": SECRET}, 424, "messages"),
    (
        "/invocations",
        {"messages": [{"role": "user", "content": [{"type": "smell", "text": SECRET}]}]},
        424,
        "type",
    ),
    ("/v1/completions", {"prompt": LONG}, 400, "4096"),
    ("/v1/completions", {"prompt": SECRET, "max_tokens": SECRET}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": {"text": SECRET}}, 400, "prompt"),
    ("/v1/completions", {"prompt": SECRET, "logit_bias": {"x": 1}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": SECRET, "logprobs": 10**6}, 400, "logprobs"),
    ("/v1/completions", {"prompt": SECRET, "stream": True, "n": -1}, 400, "n"),
    ("/v1/completions", {"prompt": SECRET, "model": "other"}, 404, "other"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}, SECRET]}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": 5, "content": SECRET}]}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, 400, "4096"),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": SECRET}],
            "response_format": {"type": "json_schema", "json_schema": SECRET},
        },
        400,
        "",
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "names"), BAD)
def test_bad_requests_are_told_fast_and_never_repeat_the_prompt(server, path, body, status, names):
    answer = server.client.post(path, json=body, timeout=60)
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert names in (told["error"] if path == "/invocations" else told["error"]["message"])
    assert SECRET not in answer.text
    assert SECRET not in server.log.read_text()
    assert server.invoke({"inputs": "next", "parameters": GREEDY}).status_code == 200


def test_openais_client_understands_our_errors(server):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        server.openai.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        server.openai.completions.create(model="", prompt="x", max_tokens=-1)


def test_malformed_bodies(server):
    for body in (b"", b"{", b'{"prompt": "x"', b"\xff\xfe", b"[" * 100_000, b"nothing"):
        answer = server.client.post("/invocations", content=body)
        assert answer.status_code == 424, body
        headers = {"content-type": "application/json"}
        answer = server.client.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == 400, body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/invocations", "/v1/completions"])
def test_a_client_that_leaves_frees_the_engine(server, path, stream):
    """It is ended, not finished: fewer tokens are generated than were asked for."""
    body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    running, generated = "vllm:num_requests_running", "vllm:generation_tokens_total"
    server.counted()
    before = server.metric(generated)

    async def leave():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            asked = asyncio.create_task(client.post(path, json=body))
            await until_async(lambda: server.metric(running) == 1, every=0.05)
            asked.cancel()

    asyncio.run(leave())
    until(lambda: server.metric(running) == 0)
    assert server.metric(generated) < before + 4000


@pytest.mark.parametrize(
    ("url", "body", "text"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
            lambda answer: answer["choices"][0]["message"]["content"],
        ),
        (
            "/v1/completions",
            {"prompt": "Hi", "max_tokens": 4},
            lambda answer: answer["choices"][0]["text"],
        ),
        (
            "/v1/responses",
            {"input": "Hi", "max_output_tokens": 4},
            lambda answer: answer["output"][0]["content"][0]["text"],
        ),
    ],
)
def test_a_batch_by_openais_client(server, tmp_path, url, body, text):
    body = {"model": "lmi", "temperature": 0, **body}
    wrong = {**body, "model": "other"}
    path = tmp_path / "in.jsonl"
    path.write_text(
        "".join(
            json.dumps({"custom_id": name, "method": "POST", "url": url, "body": it}) + "\n"
            for name, it in (("right", body), ("wrong", wrong))
        )
    )
    client = server.openai
    file = client.files.create(file=path, purpose="batch")
    assert client.files.retrieve(file.id) == file
    batch = client.batches.create(
        input_file_id=file.id, endpoint=url, completion_window="24h", metadata={"a": "b"}
    )
    assert batch.id in [it.id for it in client.batches.list()]
    until(lambda: client.batches.retrieve(batch.id).status == "completed")
    batch = client.batches.retrieve(batch.id)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    assert batch.output_file_id
    assert batch.error_file_id
    (right,) = client.files.content(batch.output_file_id).text.splitlines()
    (error,) = client.files.content(batch.error_file_id).text.splitlines()
    found = json.loads(right)
    assert found["custom_id"] == "right"
    whole = server.client.post(url, json=body).json()
    assert text(found["response"]["body"]) == text(whole) != ""
    assert json.loads(error)["response"]["status_code"] == 404
    for name in (file.id, batch.output_file_id, batch.error_file_id):
        client.files.delete(name)
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)
