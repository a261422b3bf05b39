# SPDX-License-Identifier: Apache-2.0
"""Users' model.py files, embeddings and batches on the real engine."""

import io
import json
import shutil

import openai
import PIL.Image
import psutil
import pytest

from tests.e2e.conftest import ROOT, serving
from tests.e2e.test_security import Pings
from tests.support.harness.wait import until
from tests.support.models import tiny, tiny_lora

HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
COMPAT = ROOT / "tests" / "compat"
PUBLIC = {"asked": "question_and_context", "seen": "picture_formatter"}
"""Adapters whose formatters are files as others write them."""
CHAT = {"messages": [{"role": "user", "content": "import"}], "max_tokens": 4, "temperature": 0}


def model_with(folder, name):
    """The tiny model with a model.py beside it."""
    shutil.copytree(tiny.make(), folder)
    for file in (COMPAT / name).glob("*.py"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def formatted(tiny_options, tmp_path_factory):
    """The base model and two of three adapters have formatters."""
    folder = model_with(tmp_path_factory.mktemp("model") / "base-model", "processed_by")
    for seed, name in enumerate(("one", "two", "three", *PUBLIC), 1):
        adapter = tiny_lora.write(folder / "adapters" / name, seed)
        if name in PUBLIC:
            shutil.copy(COMPAT / "public" / PUBLIC[name] / "model.py", adapter)
        elif name != "three":
            text = (COMPAT / "processed_by" / "model.py").read_text()
            (adapter / "model.py").write_text(text.replace('"base"', repr(name)))
    environ = {
        **tiny_options,
        "OPTION_MODEL_ID": str(folder),
        "OPTION_ENABLE_LORA": "true",
        "OPTION_MAX_LORAS": "2",
        "OPTION_SESSIONS_PATH": str(folder.parent / "sessions"),
    }
    with serving(folder.parent / "log", **environ) as it:
        it.ready()
        yield it


@pytest.mark.parametrize(
    ("adapter", "by"), [(None, "base"), ("one", "one"), ("two", "two"), ("three", "base")]
)
def test_the_formatter_that_processes_a_request(formatted, adapter, by):
    headers = {HEADER: adapter} if adapter else {}
    answer = formatted.invoke(CHAT, **headers).json()
    assert answer["processed_by"] == by
    assert answer["model"] == (adapter or "base-model")
    assert answer["prompt_tokens_by_formatter"] == 1  # its tokenizer is the model's
    lines = formatted.client.post(
        "/invocations", json=CHAT | {"stream": True}, headers=headers
    ).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert {event["processed_by"] for event in events} == {by}


def test_formatters_of_other_authors(formatted):
    """compat/public: a schema that is a chat and back, and a picture that becomes a prompt."""
    body = {"question": "import", "context": "import os", "length": 3, "temperature": 0}
    answer = formatted.invoke(body, **{HEADER: "asked"}).json()
    assert isinstance(answer["answer"], str)
    assert answer["usage"]["completion_tokens"] == 3
    with formatted.client.stream(
        "POST", "/invocations?adapter=asked", json=body | {"stream": True}
    ) as streamed:
        lines = [json.loads(line) for line in streamed.iter_lines() if line]
    assert "".join(line["delta"] for line in lines) == answer["answer"]
    picture = io.BytesIO()
    PIL.Image.new("RGB", (3, 2)).save(picture, "PNG")
    headers = {HEADER: "seen", "content-type": "image/png"}
    seen = formatted.client.post("/invocations", content=picture.getvalue(), headers=headers)
    assert seen.status_code == 200
    assert seen.json()["choices"] if "choices" in seen.json() else seen.json()["generated_text"]
    headers = {"content-type": "image/png"}
    unseen = formatted.client.post("/invocations", content=picture.getvalue(), headers=headers)
    assert unseen.status_code == 424


def test_lmis_management_api(formatted):
    """Counts workers as the client of LMI's own integration tests does."""
    (described,) = formatted.client.get("/models/lmi").json()
    (group,) = described["models"][0]["workerGroups"]
    assert len(group["workers"]) == 1
    assert described["models"][0]["status"] == "Healthy"
    assert formatted.client.get("/models").json()["models"][0]["status"] == "READY"
    assert "vllm:num_requests_running" in formatted.client.get("/server/metrics").text
    assert formatted.client.put("/models/lmi?min_worker=2").status_code == 409


def test_others_go_on_when_one_is_deleted(formatted):
    assert formatted.client.delete("/adapters/one").status_code == 200
    assert formatted.invoke(CHAT, **{HEADER: "two"}).json()["processed_by"] == "two"
    assert formatted.invoke(CHAT, **{HEADER: "one"}).status_code == 424


def test_a_formatter_that_raises_is_told(formatted):
    answer = formatted.invoke(CHAT | {"fail": True})
    assert answer.status_code == 424
    assert "Custom formatter failed: KeyError: 'asked to fail'" in answer.json()["error"]


def test_bearer_tokens_are_in_no_log(formatted):
    token = "sagemaker-api-key-c2VjcmV0"
    headers = {"authorization": f"Bearer {token}"}
    for body, status in ((CHAT | {"model": ""}, 200), (CHAT | {"temperature": -1}, 400)):
        answer = formatted.client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == status
    assert token not in formatted.log.read_text()


def test_json_lines_with_sessions(formatted):
    new = formatted.invoke({"requestType": "NEW_SESSION"})
    session = new.headers["X-Amzn-SageMaker-Session-Id"].partition(";")[0]
    headers = {
        "content-type": "application/jsonlines",
        "X-Amzn-SageMaker-Session-Id": session,
    }
    body = "\n".join(json.dumps(CHAT) for _ in range(3))
    answer = formatted.client.post("/invocations", content=body, headers=headers)
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert [it["processed_by"] for it in found] == ["base"] * 3
    parameters = formatted.client.get("/execution-parameters").json()
    assert parameters["MaxConcurrentTransforms"] > 1


def batch(it, url, body):
    """The answers to a batch of one line."""
    line = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "lmi", **body}}
    file = it.openai.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    made = it.openai.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    until(lambda: it.openai.batches.retrieve(made.id).status == "completed")
    output = it.openai.batches.retrieve(made.id).output_file_id
    return [json.loads(line) for line in it.openai.files.content(output).text.splitlines()]


def test_a_model_that_embeds_and_does_nothing_else(tiny_options, tmp_path):
    folder = str(tmp_path / "batches")
    tiny_lora.write(tmp_path / "other", 1)
    environ = {
        **tiny_options,
        "OPTION_TASK": "text-embedding",
        "OPTION_BATCH_FOLDER": folder,
        "OPTION_ENABLE_LORA": "true",
        "OPTION_ADAPTER_ROOTS": str(tmp_path),
    }
    with serving(tmp_path / "log", **environ) as it:
        it.ready()
        (one,) = it.invoke({"inputs": "import"}).json()
        assert sum(value**2 for value in one) == pytest.approx(1, abs=0.01)
        many = it.invoke({"inputs": ["import"] * 8}).json()
        assert len(many) == 8
        theirs = it.openai.embeddings.create(model="lmi", input="import", encoding_format="float")
        assert theirs.data[0].embedding == pytest.approx(one, abs=0.01)
        source = {"name": "other", "src": str(tmp_path / "other")}
        assert it.client.post("/adapters", params=source).status_code == 200
        other = it.openai.embeddings.create(model="other", input="import")
        assert other.data[0].embedding != pytest.approx(one, abs=0.01)
        both = it.invoke({"inputs": ["import"] * 2, "adapters": ["other", ""]}).json()
        assert both[1][0] == pytest.approx(one, abs=0.01)
        assert both[0][0] == pytest.approx(other.data[0].embedding, abs=0.01)
        tokens = it.client.post("/v1/embeddings", json={"input": [[5, 6], [7]]})
        assert len(tokens.json()["data"]) == 2
        assert it.invoke({"prompt": "a"}).status_code == 404
        (line,) = batch(it, "/v1/embeddings", {"input": ["import", "a"]})
        found = [each["embedding"] for each in line["response"]["body"]["data"]]
        assert len(found) == 2
        assert found[0] == pytest.approx(one, abs=0.01)
        with pytest.raises(openai.BadRequestError, match="does not answer /v1/completions"):
            batch(it, "/v1/completions", {"prompt": "a"})
        with Pings(it.url) as pings:
            # Read as each of vLLM's five kinds of request, these took minutes of the event loop.
            answer = it.client.post("/v1/embeddings", json={"input": [1] * 500_000})
            assert answer.status_code == 400
        assert pings.slowest < 2  # what SageMaker allows it


def test_a_handler_with_an_engine_of_its_own_gets_the_machine(tiny_options, tmp_path):
    """A plain `def handle` is the whole service, as in LMI: vLLM is not started beside it."""
    environ = {**tiny_options, "OPTION_MODEL_ID": str(model_with(tmp_path / "own", "handler_sync"))}
    with serving(tmp_path / "log", **environ) as it:
        it.ready()
        assert it.invoke({"inputs": "a"}).json() == {"custom_handler_used": True}
        missing = it.client.post("/v1/completions", json={"prompt": "a"})
        assert missing.status_code == 404
        assert "answered by the handle of its model.py alone" in missing.json()["error"]["message"]
        children = psutil.Process(it.process.pid).children(recursive=True)
        assert not [child for child in children if "EngineCore" in child.name()]
    assert "vLLM is not started: the handle of model.py is the whole service" in it.log.read_text()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("syntax_error", "model.py, line 1: expected ':': 'def helper()'"),
        ("import_error", "No module named 'no_such_module' (model.py, line 1)"),
        ("handler_not_initialised", "no_such_weights' (model.py, line 9) in the initialising call"),
        ("handler_missing", "model.py has no function that is called: `handle(inputs)`"),
    ],
)
def test_a_file_that_cannot_be_used_stops_the_start(tiny_options, tmp_path, name, told):
    environ = {
        **tiny_options,
        "OPTION_MODEL_ID": str(model_with(tmp_path / "model", name)),
        "OPTION_ENTRYPOINT": "model.py",
    }
    with serving(tmp_path / "log", **environ) as it:
        assert it.process.wait(60) == 3
    last = json.loads(it.log.read_text().splitlines()[-1])
    assert told in last["reason"]
