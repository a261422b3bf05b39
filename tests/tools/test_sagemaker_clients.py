# SPDX-License-Identifier: Apache-2.0
"""The requests of SageMaker endpoints' clients, through the stand-in to our own server with the
fake engine. They repeat recorded requests. docs/reference/support_matrix.md lists the clients that
were tried themselves, and their versions.
"""

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.eventstream import EventStreamBuffer

from tests.tools.test_sagemaker_local import QUICK, Clients
from tools.sagemaker_local.server import running
from tools.sagemaker_local.wire import Key

KEY = Key("id", "secret")
JSON = {"Content-Type": "application/json"}
ACCEPTED = {**JSON, "Accept": "application/json"}
STREAMED = {**JSON, "X-Amzn-SageMaker-Accept": "application/json"}
EULA = {**JSON, "X-Amzn-SageMaker-Custom-Attributes": "accept_eula=true"}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The endpoint `chat`, whose name is also its model's."""
    program = tmp_path_factory.mktemp("image") / "serve"
    server = Path(__file__).with_name("fake_server.py")
    root = server.parent.parent.parent
    program.write_text(f"#!/bin/sh\ncd {root}\nPYTHONPATH={root} exec {sys.executable} {server}\n")
    program.chmod(0o755)
    with running(key=KEY, programs=[program], **{**QUICK, "startup_s": 120}) as url:
        clients = Clients(url, f"process:{program}", KEY)
        clients.model("chat", OPTION_ENDPOINT_NAME="chat")
        assert clients.endpoint("chat", "chat")["EndpointStatus"] == "InService"
        yield f"{url}/endpoints/chat/"


def post(url, headers, body):
    """The answer to a request, with the parts of a stream joined."""
    request = AWSRequest("POST", url, data=body, headers=headers)
    SigV4Auth(Credentials(*KEY), "sagemaker", "us-east-1").add_auth(request)
    sent = urllib.request.Request(url, body, dict(request.headers))
    with urllib.request.urlopen(sent) as answer:
        if not url.endswith("-stream"):
            return answer.read()
        assert answer.headers["Content-Type"] == "application/vnd.amazon.eventstream"
        events = EventStreamBuffer()
        events.add_data(answer.read())
        return b"".join(event.payload for event in events)


def chat(stream: bool = False, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Brief."}, {"role": "user", "content": "Say hi"}]
    return {"messages": messages, "max_tokens": 8, **({"stream": True} if stream else {}), **more}


def lmi(*, stream: bool = False, **more: Any) -> dict[str, Any]:
    body = {"inputs": "Say hi", "parameters": {"max_new_tokens": 8, "temperature": 0.01, **more}}
    return {**body, **({"stream": True} if stream else {})}


# How the clients read answers.


def message(answer):
    return json.loads(answer)["choices"][0]["message"]["content"]


def deltas(answer):
    """The JSON objects of an answer one after the other, in lines or in events, with any
    framing.
    """
    lines = [line.removeprefix(b"data:").strip() for line in answer.splitlines()]
    found = [json.loads(line) for line in lines if line and line != b"[DONE]"]
    return " ".join(it["choices"][0]["delta"]["content"] for it in found if it["choices"])


def generated(answer):
    return json.loads(answer)["generated_text"]


def tokens(answer):
    found = [json.loads(line) for line in answer.splitlines()]
    assert found[-1]["generated_text"]
    return " ".join(it["token"]["text"] for it in found)


def texts(answer):
    return " ".join(json.loads(line)["generated_text"] for line in answer.splitlines())


class Form(NamedTuple):
    """client: its name. headers, body: its request. read: how it reads the answer."""

    client: str
    headers: dict[str, str]
    body: Any
    read: Any


def litellm(where: str, **body: Any) -> dict[str, Any]:
    """litellm sends its own options as well: with the parameters, or in a chat's body."""
    own = {"sagemaker_base_url": f"http://127.0.0.1/endpoints/chat/{where}"}
    if "parameters" in body:
        return {**body, "parameters": body["parameters"] | own}
    return {**body, **own}


FORMS = [
    # litellm names the endpoint as the model.
    Form(
        "litellm sagemaker_chat",
        {**JSON, "Accept": "*/*"},
        litellm("invocations", **chat(model="chat")),
        message,
    ),
    Form(
        "litellm sagemaker_chat with a name",
        {**JSON, "Accept": "*/*"},
        litellm("invocations", **chat(model="lmi", n=1, user="me", seed=1)),
        message,
    ),
    Form("litellm sagemaker", JSON, litellm("invocations", **lmi()), generated),
    Form("litellm embedding's headers", EULA, {"inputs": "Say hi"}, generated),
    Form("LangChain SagemakerEndpoint", ACCEPTED, lmi(), generated),
    Form("LangChain ChatSagemakerEndpoint", ACCEPTED, chat(), message),
    Form("SDK v2 Predictor", ACCEPTED, lmi(), generated),
    Form("SDK v2 Predictor for chats", ACCEPTED, chat(), message),
    Form(
        "SDK v2 Predictor without serializers",
        {"Content-Type": "application/octet-stream", "Accept": "*/*"},
        lmi(),
        generated,
    ),
    Form(
        "SDK v2 JSONLinesSerializer",
        {"Content-Type": "application/jsonlines", "Accept": "application/jsonlines"},
        b'{"inputs": "Say"}\n{"inputs": "hi"}\n',
        texts,
    ),
    Form(
        "SDK v2 IdentitySerializer",
        {"Content-Type": "text/plain", "Accept": "application/json"},
        b"Say hi",
        generated,
    ),
    Form(
        "SDK v3 Endpoint.invoke",
        EULA | {"X-Amzn-SageMaker-Inference-Id": "a-1", "X-Amzn-SageMaker-Target-Variant": "all"},
        lmi(),
        generated,
    ),
    # AIPerf always names the model of a multi-model endpoint, and the model in the body.
    Form(
        "AIPerf's transport",
        ACCEPTED
        | {
            "X-Amzn-SageMaker-Target-Model": "lmi",
            "X-Amzn-SageMaker-Inference-Id": "0b0c9d3e-3c4b-4a3e-9d3e-0b0c9d3e3c4b",
        },
        chat(model="lmi"),
        message,
    ),
]
STREAMS = [
    Form(
        "litellm sagemaker_chat",
        {**JSON, "Accept": "*/*"},
        litellm("invocations-response-stream", **chat(True, model="chat")),
        deltas,
    ),
    Form(
        "litellm sagemaker",
        JSON,
        litellm("invocations-response-stream", **lmi(stream=True)),
        tokens,
    ),
    Form("LangChain SagemakerEndpoint", JSON, lmi(stream=True), tokens),
    Form("LangChain ChatSagemakerEndpoint", STREAMED, chat(True), deltas),
    Form("SDK v2 Predictor.predict_stream", STREAMED, lmi(stream=True), tokens),
    Form("SDK v2 Predictor.predict_stream for chats", STREAMED, chat(True), deltas),
    Form("SDK v2 predict_stream of a whole answer", STREAMED, lmi(), generated),
    Form(
        "AIPerf's transport",
        STREAMED | {"X-Amzn-SageMaker-Inference-Id": "0b0c9d3e-3c4b-4a3e-9d3e-0b0c9d3e3c4b"},
        chat(True, model="lmi", stream_options={"include_usage": True}),
        deltas,
    ),
]


def answered(url, form):
    body = form.body if isinstance(form.body, bytes) else json.dumps(form.body).encode()
    said = form.read(post(url, form.headers, body))
    assert sorted(said.split()) == ["Say", "hi"], said


@pytest.mark.parametrize("form", FORMS, ids=lambda it: it.client)
def test_what_a_client_sends_is_answered(url, form):
    answered(f"{url}invocations", form)


@pytest.mark.parametrize("form", STREAMS, ids=lambda it: it.client)
def test_what_a_client_streams_is_answered(url, form):
    answered(f"{url}invocations-response-stream", form)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        # litellm sends this if the operator has not named the endpoint.
        (
            chat(model="other"),
            "The model `other` does not exist. The model here is called model, lmi, /opt/ml/model, "
            "chat: send one of these or none. OPTION_ENDPOINT_NAME adds the name of an endpoint",
        ),
        # Handlers of LangChain's first examples for chats send this.
        ({"inputs": chat()["messages"]}, "a conversation goes under messages"),
    ],
)
def test_a_client_learns_what_to_change(url, body, words):
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(f"{url}invocations", ACCEPTED, json.dumps(body).encode())
    with caught.value as error:
        assert (error.code, error.headers["x-amzn-ErrorType"]) == (424, "ModelError")
        assert words in json.loads(json.load(error)["OriginalMessage"])["error"]
