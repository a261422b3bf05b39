# SPDX-License-Identifier: Apache-2.0
"""The stand-in for SageMaker, through boto3's own clients, with a container that has no model."""

import base64
import contextlib
import functools
import http.client
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
from botocore.auth import SigV4Auth, SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError, EventStreamError

from tests import documented
from tests.support.harness.wait import until
from tools.sagemaker_local import server
from tools.sagemaker_local.wire import Key

ROOT = Path(__file__).parent.parent.parent
ROLE = "arn:aws:iam::123456789012:role/serving"
SESSION = boto3.Session()  # one session, which reads the large service models once
COMPUTE = {"MinMemoryRequiredInMb": 128}
QUICK = {"ping_every_s": 0.1, "accept_s": 5, "ping_s": 5}
"""Limits that a busy machine keeps."""


KEY = Key("id", "secret")
running = functools.partial(server.running, key=KEY)


class Clients:
    """boto3's two clients, and the helpers that a user writes around them."""

    def __init__(self, url: str, image: str, key: Key = KEY) -> None:
        options: dict[str, Any] = {
            "endpoint_url": url,
            "region_name": "us-east-1",
            "aws_access_key_id": key.id,
            "aws_secret_access_key": key.secret,
            "config": Config(retries={"total_max_attempts": 1}, parameter_validation=False),
        }
        self.url = url
        self.image = image
        self.control: Any = SESSION.client("sagemaker", **options)
        self.runtime: Any = SESSION.client("sagemaker-runtime", **options)

    def endpoint(self, name, model=None, instances=1):
        """An endpoint for components, or one with a model."""
        config = {"ExecutionRoleArn": ROLE}
        variant = {"VariantName": "all", "InstanceType": "ml.g5.xlarge"}
        variant["InitialInstanceCount"] = instances
        if model:
            config, variant = {}, {**variant, "ModelName": model}
        self.control.create_endpoint_config(
            EndpointConfigName=name, ProductionVariants=[variant], **config
        )
        self.control.create_endpoint(EndpointName=name, EndpointConfigName=name)
        return self.settled_endpoint(name)

    def settled_endpoint(self, name):
        return self._settled("Endpoint", self.control.describe_endpoint, name)

    def model(self, name, data=None, **environ):
        container = {"Image": self.image, "Environment": environ}
        if data:
            container["ModelDataUrl"] = data
        self.control.create_model(ModelName=name, ExecutionRoleArn=ROLE, PrimaryContainer=container)

    def base(self, name, endpoint, model):
        self.control.create_inference_component(
            InferenceComponentName=name,
            EndpointName=endpoint,
            VariantName="all",
            Specification={"ModelName": model, "ComputeResourceRequirements": COMPUTE},
            RuntimeConfig={"CopyCount": 1},
        )
        return self.settled(name)

    def adapter(self, name, endpoint, base, url):
        self.control.create_inference_component(
            InferenceComponentName=name,
            EndpointName=endpoint,
            Specification={
                "BaseInferenceComponentName": base,
                "Container": {"ArtifactUrl": url},
            },
        )
        return self.settled(name)

    def settled(self, name):
        """A component, once no change of it is in progress."""
        return self._settled("InferenceComponent", self.control.describe_inference_component, name)

    def _settled(self, kind, describe, name):
        while True:
            found = describe(**{f"{kind}Name": name})
            if found[f"{kind}Status"] in ("InService", "Failed"):
                return found
            time.sleep(0.02)

    def gone(self, name):
        while name in self.components():
            time.sleep(0.02)

    def components(self):
        found = self.control.list_inference_components()["InferenceComponents"]
        return [it["InferenceComponentName"] for it in found]

    def invoke(self, endpoint, body=b"{}", **more):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        found = self.runtime.invoke_endpoint(EndpointName=endpoint, Body=body, **more)
        return json.loads(found["Body"].read())

    def text(self, endpoint, **more):
        return self.invoke(endpoint, **more)["choices"][0]["text"]

    def stream(self, endpoint, body, **more):
        """The parts of a streamed answer."""
        found = self.runtime.invoke_endpoint_with_response_stream(
            EndpointName=endpoint, Body=json.dumps(body).encode(), **more
        )
        with contextlib.closing(found["Body"]) as events:
            return [event["PayloadPart"]["Bytes"] for event in events]

    def overview(self):
        """The stand-in's report on each copy."""
        with urllib.request.urlopen(self.url) as answer:
            return {it["name"]: it for it in json.load(answer)["copies"]}


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """The program that runs instead of a container's image."""
    program = tmp_path_factory.mktemp("image") / "serve"
    container = ROOT / "tests" / "tools" / "sagemaker_container.py"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {container} "$@"\n')
    program.chmod(0o755)
    return f"process:{program}"


def program(image):
    return image.removeprefix("process:")


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """A folder that simulates S3, with a model and two adapters."""
    folder = tmp_path_factory.mktemp("s3")
    (folder / "bucket" / "prefix").mkdir(parents=True)
    (folder / "bucket" / "prefix" / "config.json").write_text("{}")
    for name in ("one", "two"):
        with tarfile.open(folder / "bucket" / f"{name}.tar.gz", "w:gz") as archive:
            member = tarfile.TarInfo("adapter_config.json")
            member.size = len(name)
            archive.addfile(member, io.BytesIO(name.encode()))
    (folder / "bucket" / "broken.tar.gz").write_bytes(b"no archive")
    (folder / "outside.tar.gz").write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def clients(image, s3):
    """A stand-in with an endpoint `one`, which has a base component `base`."""
    limits = {**QUICK, "answer_s": 2, "stream_s": 2, "stop_s": 5, "payload_bytes": 100_000}
    with running(s3=s3, programs=[program(image)], **limits) as url:
        clients = Clients(url, image)
        clients.model("model", "s3://bucket/one.tar.gz", TEST_WORD="a b", TEST_DIR="/opt/ml/model")
        clients.endpoint("one")
        assert clients.base("base", "one", "model")["InferenceComponentStatus"] == "InService"
        yield clients


@pytest.fixture
def another(image, s3):
    """Another stand-in for tests that change what runs."""
    limits = {**QUICK, "startup_s": 20, "stop_s": 0.5}
    with running(s3=s3, programs=[program(image)], **limits) as url:
        yield Clients(url, image)


def multi_model(clients, data):
    container = {"Image": clients.image, "Mode": "MultiModel", "ModelDataUrl": data}
    clients.control.create_model(
        ModelName="several", ExecutionRoleArn=ROLE, PrimaryContainer=container
    )


def test_a_target_model_is_loaded_and_another_makes_room_for_it(another):
    with pytest.raises(ClientError, match="with a slash at the end"):
        multi_model(another, "s3://bucket/one.tar.gz")
    multi_model(another, "s3://bucket/")
    assert another.endpoint("several", "several")["EndpointStatus"] == "InService"

    def invoke(target):
        more = {"TargetModel": target} if target else {}
        answer = another.runtime.invoke_endpoint(EndpointName="several", Body=b"{}", **more)
        return json.loads(answer["Body"].read())

    first = invoke("one.tar.gz")
    assert first["files"] == ["adapter_config.json"]
    assert first["multi"] == "true"
    assert first["headers"]["x-amzn-sagemaker-target-model"] == "one.tar.gz"
    invoke("one.tar.gz")
    invoke("two.tar.gz")
    with urllib.request.urlopen(another.url) as overview:
        (copy,) = json.loads(overview.read())["copies"]
    assert [it.split()[0] + it.split()[-1] for it in copy["calls"]] == [
        *("POST200", "POST507", "DELETE200", "POST200"),
    ]
    with pytest.raises(ClientError, match="Could not find model data"):
        invoke("three.tar.gz")
    with pytest.raises(ClientError, match="Failed to extract"):
        invoke("broken.tar.gz")
    with pytest.raises(ClientError, match="Target model header is required"):
        invoke("")


def refusal(call, *arguments, **more):
    with pytest.raises(ClientError) as caught:
        call(*arguments, **more)
    return caught.value.response


def test_a_container_gets_its_files_and_its_environment(clients):
    found = clients.invoke("one", InferenceComponentName="base")["environ"]
    assert found["TEST_WORD"] == "a b"
    folder = Path(found["TEST_DIR"])
    assert (folder / "adapter_config.json").read_text() == "one"
    assert folder.stat().st_mode & 0o777 == 0o555
    assert "files: ['adapter_config.json']" in Path(clients.overview()["base"]["log"]).read_text()


def test_only_modelled_headers_pass_and_attributes_are_not_echoed(clients):
    def strange(request, **more):
        request.headers["X-Own"] = "1"

    clients.runtime.meta.events.register("before-send", strange)
    found = clients.runtime.invoke_endpoint(
        EndpointName="one",
        InferenceComponentName="base",
        Body=b"{}",
        ContentType="application/json",
        Accept="text/plain",
        CustomAttributes="c=1",
        InferenceId="id 1",
        PrefixAwareId="p",
    )
    clients.runtime.meta.events.unregister("before-send", strange)
    assert "CustomAttributes" not in found
    assert found["InvokedProductionVariant"] == "all"
    assert found["ContentType"] == "application/json; charset=utf-8"
    seen = json.loads(found["Body"].read())["headers"]
    del seen["host"], seen["content-length"]
    assert seen == {
        "content-type": "application/json",
        "accept": "text/plain",
        "x-amzn-sagemaker-custom-attributes": "c=1",
        "x-amzn-sagemaker-inference-component": "base",
        "x-amzn-sagemaker-inference-id": "id 1",
        "x-amzn-sagemaker-prefix-aware-id": "p",
    }
    own = clients.runtime.invoke_endpoint(
        EndpointName="one", InferenceComponentName="base", Body=b'{"attributes": "mine"}'
    )
    assert own["CustomAttributes"] == "mine"


def test_adapters_are_components_from_creation_to_deletion(clients):
    for name in ("one", "two"):
        found = clients.adapter(f"lora-{name}", "one", "base", f"s3://bucket/{name}.tar.gz")
        assert found["InferenceComponentStatus"] == "InService"
        assert found["VariantName"] == "all"
    for name in ("one", "two"):
        assert clients.text("one", InferenceComponentName=f"lora-{name}") == f"by {name}"
    assert clients.text("one", InferenceComponentName="base") == "by None"

    clients.control.update_inference_component(
        InferenceComponentName="lora-one",
        Specification={"Container": {"ArtifactUrl": "s3://bucket/two.tar.gz"}},
    )
    found = clients.settled("lora-one")
    assert found["Specification"]["Container"]["ArtifactUrl"] == "s3://bucket/two.tar.gz"
    assert clients.text("one", InferenceComponentName="lora-one") == "by two"

    for name in ("lora-one", "lora-two"):
        clients.control.delete_inference_component(InferenceComponentName=name)
        clients.gone(name)
    told = refusal(clients.invoke, "one", InferenceComponentName="lora-one")["Error"]
    assert told["Message"] == "Inference Component lora-one of endpoint one not found."
    calls = clients.overview()["base"]["calls"]
    assert [call.split("?")[0].split()[0] + call[-4:] for call in calls] == [
        *("POST 200", "POST 200", "DELETE 200", "POST 200", "DELETE 200", "DELETE 200"),
    ]
    first, _, third, fourth = (call.split()[1] for call in calls[:4])
    assert first == fourth  # the same name, another folder
    assert third.removeprefix("/adapters/") == first.removeprefix("/adapters?name=")


def test_sessions(clients):
    def send(body, session):
        return clients.runtime.invoke_endpoint(
            EndpointName="one",
            InferenceComponentName="base",
            Body=json.dumps(body).encode(),
            SessionId=session,
        )

    told = send({"requestType": "NEW_SESSION"}, "NEW_SESSION")["NewSessionId"]
    session, _, expires = told.partition("; Expires=")
    assert expires.endswith("Z")
    assert clients.stream("one", {"stream": 1}, InferenceComponentName="base", SessionId=session)
    assert send({}, session)["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert send({"requestType": "CLOSE"}, session)["ClosedSessionId"] == session
    found = refusal(send, {}, session)
    assert (found["OriginalStatusCode"], found["Error"]["Code"]) == (424, "ModelError")


def test_parts_of_a_stream_begin_and_end_anywhere(clients):
    parts = clients.stream("one", {"stream": 1}, InferenceComponentName="base")
    events = b"".join(parts).decode().split("\n\n")
    assert events[0] == 'data: {"text": "wörd 0"}'
    assert events[-2:] == ["data: [DONE]", ""]
    assert any(not part.endswith(b"\n\n") for part in parts)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"stream": 1, "break": 1}, "The container broke the stream off"),
        ({"stream": 1, "pause": 1}, "The stream took longer than 2 s"),
    ],
)
def test_a_stream_that_is_broken_off_ends_with_an_exception(clients, body, words):
    with pytest.raises(EventStreamError, match=words) as caught:
        clients.stream("one", body, InferenceComponentName="base")
    assert caught.value.response["Error"]["Code"] == "ModelStreamError"


def test_a_client_that_leaves_ends_its_request(another):
    def running():
        with urllib.request.urlopen(another.overview()["one-all"]["url"] + "/metrics") as answer:
            return "vllm:num_requests_running 1" in answer.read().decode()

    another.model("model")
    another.endpoint("one", "model")
    found = another.runtime.invoke_endpoint_with_response_stream(
        EndpointName="one", Body=b'{"stream": 1, "pause": 600}'
    )
    with contextlib.closing(found["Body"]) as events:
        assert next(iter(events))
        assert running()
    while running():
        time.sleep(0.02)


def test_streams_fail_on_demand(clients, image, s3):
    with running(s3=s3, **QUICK, broken_streams=1, programs=[program(image)]) as url:
        other = Clients(url, image)
        other.model("model")
        other.endpoint("one", "model")
        with pytest.raises(EventStreamError) as caught:
            other.stream("one", {"stream": 1})
    assert caught.value.response["Error"]["Code"] == "InternalStreamFailure"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"fail": 1}, 424, '{"code": 424, "error": "as you like it"}'),
        ({"prompt": 5}, 424, "prompt should be a string"),
        ({"wait": 3}, 0, "no answer in time"),
        ({"padding": 4096}, 0, "bytes, above 4096"),
    ],
)
def test_what_a_container_gets_wrong_is_a_model_error(clients, streamed, body, status, words):
    ask = clients.stream if streamed else clients.invoke
    found = refusal(ask, "one", body, InferenceComponentName="base")
    assert found["ResponseMetadata"]["HTTPStatusCode"] == 424
    assert found["Error"]["Code"] == "ModelError"
    assert found["OriginalStatusCode"] == status
    assert words in found["OriginalMessage"]
    assert found["LogStreamArn"].endswith(":log-group:/aws/sagemaker/InferenceComponents/base")


def model(name="m", **container):
    return {"ModelName": name, "PrimaryContainer": {"Image": "i", **container}}


def environment(count, size):
    return model(Environment={f"A{number}": "x" * size for number in range(count)})


def prefix(url):
    source = {"S3Uri": url, "S3DataType": "S3Prefix", "CompressionType": "None"}
    return model(ModelDataSource={"S3DataSource": source})


def config(role=ROLE, **variant):
    variant = {"VariantName": "v", "InstanceType": "ml.g5.xlarge", **variant}
    given = {"EndpointConfigName": "c", "ProductionVariants": [variant]}
    return given | ({"ExecutionRoleArn": role} if role else {})


def base(**changed):
    specification = {"ModelName": "model", "ComputeResourceRequirements": COMPUTE}
    names = {"InferenceComponentName": "c", "EndpointName": "one", "VariantName": "all"}
    return {**names, "Specification": specification, "RuntimeConfig": {"CopyCount": 1}, **changed}


def adapter(url="s3://bucket/one.tar.gz", **more):
    container = {"Container": {"ArtifactUrl": url}} if url else {}
    specification = {"BaseInferenceComponentName": "base", **container}
    names = {"InferenceComponentName": "c", "EndpointName": "one"}
    return {**names, "Specification": specification, **more}


SCALING = {"ModelName": "model", "ManagedInstanceScaling": {"Status": "ENABLED"}}
CONTROL = [
    ("create_model", model("a_b"), "regular expression pattern"),
    ("create_model", model("a" * 64), "less than or equal to 63"),
    ("create_model", {}, "Value null at 'modelName'"),
    ("create_model", {"ModelName": "m"}, "PrimaryContainer.Image"),
    ("create_model", model(5), "at 'modelName' failed to satisfy constraint: Member must be a str"),
    ("create_model", model(Image="a b"), "at 'primaryContainer.image' failed to satisfy"),
    ("create_model", environment(1, 1025), "at 'primaryContainer.environment.A0'"),
    ("create_model", environment(101, 1), "less than or equal to 100"),
    ("create_model", environment(40, 1000), "it may have 32768"),
    ("create_model", model(ModelDataUrl="s3://bucket/no"), "Could not find model data at s3://buc"),
    ("create_model", model(ModelDataUrl="s3://b/../outside.tar.gz"), "Could not find model data"),
    ("create_model", model(ModelDataUrl="s3://bucket//etc/passwd"), "Could not find model data"),
    ("create_model", prefix("s3://bucket/prefix"), "should end with a slash"),
    ("create_model", model("model"), "Cannot create already existing model"),
    ("create_endpoint_config", config(role=None), "ExecutionRoleArn is required"),
    (
        "create_endpoint_config",
        config() | {"ProductionVariants": 2 * config()["ProductionVariants"]},
        "one of ProductionVariants",
    ),
    ("create_endpoint_config", config(InstanceType="ml.huge"), "enum value set"),
    ("create_endpoint_config", config(**SCALING), "leave ModelName out"),
    (
        "create_endpoint_config",
        config(ContainerStartupHealthCheckTimeoutInSeconds=10),
        "greater than or equal to 60",
    ),
    (
        "create_endpoint",
        {"EndpointName": "x", "EndpointConfigName": "x"},
        "Could not find endpoint",
    ),
    ("describe_endpoint", {"EndpointName": "nobody"}, "Could not find endpoint"),
    ("delete_endpoint", {"EndpointName": "one"}, "has inference components: base"),
    ("describe_inference_component", {"InferenceComponentName": "x"}, "Could not find inference"),
    ("create_inference_component", base(VariantName="no"), "VariantName should be one of all"),
    (
        "create_inference_component",
        base(RuntimeConfig={"CopyCount": 2}),
        "CopyCount=2: the stand-in runs one copy",
    ),
    ("create_inference_component", base(RuntimeConfig={"CopyCount": 0}), "at least 1"),
    (
        "create_inference_component",
        {"InferenceComponentName": "c", "EndpointName": "one", "Specifications": [{}]},
        "does not read Specifications",
    ),
    ("create_inference_component", adapter(VariantName="all"), "no VariantName and no Runtime"),
    ("create_inference_component", adapter(None), "ArtifactUrl is required"),
    ("list_tags", {"ResourceArn": "x"}, "the stand-in does not know ListTags"),
]


@pytest.mark.parametrize(("call", "request_", "words"), CONTROL)
def test_the_control_plane_refuses(clients, call, request_, words):
    told = refusal(getattr(clients.control, call), **request_)["Error"]
    assert words in told["Message"]
    unknown = call == "list_tags"
    assert told["Code"] == ("UnknownOperationException" if unknown else "ValidationException")


RUNTIME = [
    ({"EndpointName": "nobody"}, "Endpoint nobody of account 123456789012 not found"),
    ({"InferenceComponentName": None}, "Inference Component Name header is required"),
    ({"InferenceComponentName": "a_b"}, "regular expression pattern"),
    ({"SessionId": "with_underscore"}, "regular expression pattern"),
    ({"SessionId": "a" * 257}, "less than or equal to 256"),
    ({"InferenceId": "a" * 65}, "less than or equal to 64"),
    ({"CustomAttributes": "a" * 1025}, "less than or equal to 1024"),
    ({"Body": b"x" * 100_001}, "less than or equal to 100000"),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("changed", "words"), RUNTIME)
def test_the_runtime_refuses(clients, streamed, changed, words):
    asked = {"EndpointName": "one", "InferenceComponentName": "base", "Body": b"{}", **changed}
    asked = {name: value for name, value in asked.items() if value is not None}
    runtime = clients.runtime
    call = runtime.invoke_endpoint_with_response_stream if streamed else runtime.invoke_endpoint
    told = refusal(call, **asked)
    assert told["ResponseMetadata"]["HTTPStatusCode"] == 400
    assert told["Error"]["Code"] == "ValidationError"
    assert words in told["Error"]["Message"]


def test_a_stream_opens_no_session(clients):
    ask = clients.stream
    told = refusal(ask, "one", {}, InferenceComponentName="base", SessionId="NEW_SESSION")["Error"]
    assert (told["Code"], "regular expression" in told["Message"]) == ("ValidationError", True)


def test_what_no_aws_client_sends_is_refused(clients):
    for path in ("/", "/endpoints/one/invocations"):
        request = urllib.request.Request(clients.url + path, b"{}")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request)
        assert caught.value.code == 403
        caught.value.close()


def token(seconds=3600, began=None, prefix="sagemaker-api-key-", secret="secret"):
    """A bearer token as sagemaker.core.token_generator makes it."""
    params = {"Action": "CallWithBearerToken"}
    request = AWSRequest("POST", "https://sagemaker.amazonaws.com/", params=params)
    signer = SigV4QueryAuth(Credentials("id", secret), "sagemaker", "us-east-1", expires=seconds)
    signer.add_auth(request)
    url = str(request.url).removeprefix("https://") + "&Version=1"
    if began:
        url = url.replace(request.context["timestamp"], began)
    return prefix + base64.b64encode(url.encode()).decode()


def openai(clients, path, authorization, body):
    headers = {"Authorization": authorization, "Content-Type": "application/json"}
    url = f"{clients.url}/endpoints/{path}/openai/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_openais_path_takes_bearer_tokens(clients):
    path = "one/inference-components/base"
    status, body = openai(clients, path, f"Bearer {token()}", {"model": ""})
    assert status == 200
    found = json.loads(body)
    assert found["body"] == {"model": ""}
    assert "authorization" not in found["headers"]
    status, body = openai(clients, path, f"Bearer {token()}", {"stream": True})
    assert (status, body.endswith(b"data: [DONE]\n\n")) == (200, True)
    assert openai(clients, path, f"Bearer {token()}", {"fail": 1})[0] == 424
    status, body = openai(clients, "one", f"Bearer {token()}", {})
    assert (status, b"Inference Component Name header" in body) == (400, True)
    with pytest.raises(http.client.IncompleteRead):
        openai(clients, path, f"Bearer {token()}", {"stream": True, "break": 1})


@pytest.mark.parametrize(
    ("authorization", "words"),
    [
        ("", b"not one of SageMaker's"),
        ("Bearer sk-123", b"not one of SageMaker's"),
        (f"Bearer {token(prefix='bedrock-api-key-')}", b"not one of SageMaker's"),
        (token(), b"not one of SageMaker's"),
        (f"Bearer {token(secret='another')}", b"not signed with the key"),
        ("Bearer sagemaker-api-key-%%", b"not one of SageMaker's"),
        (f"Bearer {token(began='20260101T000000Z')}", b"expired"),
        (f"Bearer {token(seconds=13 * 3600)}", b"expired"),
    ],
)
def test_other_tokens_are_refused(clients, authorization, words):
    status, body = openai(clients, "one/inference-components/base", authorization, {})
    assert (status, words in body) == (403, True)


def test_metrics_are_scraped(clients):
    until(lambda: clients.overview()["base"]["metrics"])
    found = clients.overview()["base"]["metrics"]
    assert found == {"status": 200, "series": 2}


def test_lists(clients):
    for name in ("list-a", "list-b", "list-c"):
        clients.model(name)
    pages = clients.control.get_paginator("list_models").paginate(NameContains="LIST-")
    found = [[it["ModelName"] for it in page["Models"]] for page in pages]
    assert found == [["list-c", "list-b", "list-a"]]
    message = refusal(clients.control.list_models, SortBy="Name")["Error"]["Message"]
    assert message.endswith("not by SortBy")
    clients.control.delete_model(ModelName="list-a")
    names = clients.control.list_models(NameContains="list-")["Models"]
    assert {it["ModelName"] for it in names} == {"list-b", "list-c"}
    assert clients.control.list_endpoints(StatusEquals="Failed")["Endpoints"] == []
    assert clients.control.list_endpoints()["Endpoints"][0]["EndpointName"] == "one"
    found = clients.control.list_endpoint_configs()["EndpointConfigs"]
    assert [it["EndpointConfigName"] for it in found] == ["one"]


def test_an_endpoint_with_a_model_is_updated_and_deleted(another):
    another.model("first", TEST_WORD="1")
    another.model("second", TEST_WORD="2")
    another.model("third", FAULTS="dies")
    assert another.endpoint("one", "first")["EndpointStatus"] == "InService"
    assert another.invoke("one")["environ"] == {"TEST_WORD": "1"}
    found = refusal(another.invoke, "one", InferenceComponentName="base")["Error"]
    assert found["Message"] == "Endpoint one has no inference components."
    for model, answer in (("second", "2"), ("third", "2")):
        variant = {"VariantName": "all", "InstanceType": "ml.g5.xlarge", "ModelName": model}
        another.control.create_endpoint_config(
            EndpointConfigName=model, ProductionVariants=[{**variant, "InitialInstanceCount": 1}]
        )
        another.control.update_endpoint(EndpointName="one", EndpointConfigName=model)
        found = another.settled_endpoint("one")
        assert found["EndpointStatus"] == "InService"
        assert found["EndpointConfigName"] == "second"
        assert another.invoke("one")["environ"] == {"TEST_WORD": answer}
    assert "no such model" in found["FailureReason"]
    another.control.delete_endpoint(EndpointName="one")
    another.control.get_waiter("endpoint_deleted").wait(
        EndpointName="one", WaiterConfig={"Delay": 0.1}
    )
    assert another.overview() == {}


def test_a_session_stays_with_the_copy_that_began_it(another):
    (recipe,) = [it for it in documented.blocks() if it.text.startswith("opened = runtime")]
    another.model("model")
    found = another.endpoint("one", "model", instances=2)
    assert found["ProductionVariants"][0]["CurrentInstanceCount"] == 2
    with urllib.request.urlopen(another.url) as answer:
        copies = json.load(answer)["copies"]
    assert len({it["url"] for it in copies}) == 2
    # Without a session the copies take turns; with one, only its copy knows it.
    ports = [another.invoke("one")["headers"]["host"] for _ in range(6)]
    assert len({*ports}) == 2
    for _ in range(3):
        names = {"runtime": another.runtime, "name": "one", "turn": b"{}"}
        exec(recipe.text, names)
        session = names["session"]
        for opened in ("opened", "answer"):
            names[opened]["Body"].read()
        turns = {another.invoke("one", SessionId=session)["headers"]["host"] for _ in range(5)}
        assert len(turns) == 1
        assert another.stream("one", {"stream": True}, SessionId=session)
        closed = another.runtime.invoke_endpoint(
            EndpointName="one", Body=b'{"requestType": "CLOSE"}', SessionId=session
        )
        assert closed["ClosedSessionId"] == session
        closed["Body"].read()
        found = refusal(another.invoke, "one", SessionId=session)["Error"]
        assert "session not found" in found["Message"]


SICK = """#!{python} -S
import os, socket
server = socket.create_server(("127.0.0.1", int(os.environ["SAGEMAKER_BIND_TO_PORT"])))
clients = []
while True:
    clients.append(server.accept()[0])
    clients[-1].sendall(os.environ.get("TEST_ANSWER", "").encode())
"""


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {"TEST_ANSWER": "HTTP/1.1 503 -\r\nContent-Length: 0\r\n\r\n"},
            "within 3 s: GET /ping answered 503",
        ),
        ({}, "within 3 s: GET /ping: no answer in time"),
    ],
)
def test_a_container_that_does_not_get_healthy_is_told(tmp_path, environ, words):
    program = tmp_path / "sick"
    program.write_text(SICK.format(python=sys.executable))
    program.chmod(0o755)
    with running(accept_s=5, ping_s=0.3, startup_s=3, programs=[program]) as url:
        clients = Clients(url, f"process:{program}")
        clients.model("model", **environ)
        found = clients.endpoint("one", "model")
        assert found["EndpointStatus"] == "Failed"
        assert f"did not pass the ping health check {words}" in found["FailureReason"]
        clients.control.delete_endpoint(EndpointName="one")


def test_a_container_that_exits_is_told_with_its_last_words(another):
    another.model("model", FAULTS="dies")
    another.endpoint("one")
    found = another.base("base", "one", "model")
    assert found["InferenceComponentStatus"] == "Failed"
    assert found["FailureReason"] == (
        "The container exited with code 1. Its last log line: "
        '{"message": "failed", "reason": "no such model"}'
    )
    told = refusal(another.invoke, "one", InferenceComponentName="base")["Error"]
    assert "has no capacity" in told["Message"]
    another.control.delete_inference_component(InferenceComponentName="base")
    another.gone("base")
    assert another.overview() == {}


def test_our_own_server_tells_why_it_does_not_start(monkeypatch):
    monkeypatch.setenv("SLIPWAY_PYTHON", sys.executable)
    with running(programs=[ROOT / "entrypoint.sh"]) as url:
        clients = Clients(url, f"process:{ROOT / 'entrypoint.sh'}")
        clients.model("model", OPTION_MAX_MODLE_LEN="5")
        reason = clients.endpoint("one", "model")["FailureReason"]
    assert reason.startswith('The container exited with code 2. Its last log line: {"time": ')
    assert "OPTION_MAX_MODLE_LEN: no such option" in reason
    assert "did you mean OPTION_MAX_MODEL_LEN?" in reason


def test_a_new_copy_gets_its_adapters_anew(another):
    another.model("model")
    another.endpoint("one")
    another.base("base", "one", "model")
    another.adapter("lora", "one", "base", "s3://bucket/one.tar.gz")
    first = another.overview()["base"]
    found = refusal(another.invoke, "one", {"exit": 1}, InferenceComponentName="base")
    assert found["OriginalStatusCode"] == 0
    while (second := another.overview().get("base", first))["pid"] == first["pid"]:
        time.sleep(0.05)
    while not another.overview()["base"]["calls"]:
        time.sleep(0.05)
    assert second["url"] != first["url"] or second["log"] != first["log"]
    assert another.settled("lora")["InferenceComponentStatus"] == "InService"
    assert another.overview()["base"]["calls"] == first["calls"]

    for copies in (0, 1):
        another.control.update_inference_component_runtime_config(
            InferenceComponentName="base", DesiredRuntimeConfig={"CopyCount": copies}
        )
        assert another.settled("base")["RuntimeConfig"]["CurrentCopyCount"] == copies
        if not copies:
            assert another.overview() == {}
            told = refusal(another.invoke, "one", InferenceComponentName="lora")["Error"]
            assert "has no capacity" in told["Message"]
    assert another.text("one", InferenceComponentName="lora") == "by one"

    another.control.delete_inference_component(InferenceComponentName="base")
    another.gone("base")
    assert another.components() == []


def test_adapters_that_cannot_be_registered_are_told(image, s3):
    with running(s3=s3, **QUICK, duplicate_posts=True, programs=[program(image)]) as at:
        clients = Clients(at, image)
        clients.model("model", FAULTS="adapter-again")
        clients.endpoint("one")
        clients.base("base", "one", "model")
        for name, words in (
            ("no", "Could not find model data at s3://bucket/no.tar.gz"),
            ("broken", "Failed to extract model data"),
            ("one", "answered 400: it is registered already"),
        ):
            found = clients.adapter(name, "one", "base", f"s3://bucket/{name}.tar.gz")
            assert found["InferenceComponentStatus"] == "Failed"
            assert words in found["FailureReason"]


def test_a_container_that_does_not_heed_sigterm_is_killed(another, caplog):
    another.model("model", "s3://bucket/one.tar.gz", FAULTS="deaf,writes")
    another.endpoint("one")
    another.base("base", "one", "model")
    process = psutil.Process(another.overview()["base"]["pid"])
    another.control.delete_inference_component(InferenceComponentName="base")
    another.gone("base")
    assert not process.is_running()
    told = " ".join(caplog.messages)
    assert "killed, still there 0.5 s after SIGTERM" in told
    assert "wrote below /opt/ml, which is read-only on SageMaker" in told
    assert "/opt/ml/model/cache" in told


DOCKER = """#!{python}
import json, os, pathlib, sys
pathlib.Path({log!r}).open("a").write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "run":
    port = next(it for it in sys.argv if it.startswith("--publish=")).split(":")[1]
    os.environ["SAGEMAKER_BIND_TO_PORT"] = port
    os.execv({program!r}, [{program!r}, "serve"])
"""


def test_an_image_is_run_with_docker(another, image, tmp_path, monkeypatch):
    docker = tmp_path / "docker"
    log = tmp_path / "log"
    docker.write_text(DOCKER.format(python=sys.executable, log=str(log), program=program(image)))
    docker.chmod(0o755)
    monkeypatch.setattr("tools.sagemaker_local.container.DOCKER", [str(docker)])
    source = {"S3Uri": "s3://bucket/prefix/", "S3DataType": "S3Prefix", "CompressionType": "None"}
    another.endpoint("one")
    container = {
        "Image": "registry/slipway:1",
        "Environment": {"A": "x y"},
        "ModelDataSource": {"S3DataSource": source},
        "AdditionalModelDataSources": [{"ChannelName": "draft", "S3DataSource": source}],
    }
    another.control.create_model(ModelName="m", PrimaryContainer=container, ExecutionRoleArn=ROLE)
    compute = {**COMPUTE, "MaxMemoryRequiredInMb": 512, "NumberOfAcceleratorDevicesRequired": 1}
    another.control.create_inference_component(
        InferenceComponentName="base",
        EndpointName="one",
        VariantName="all",
        Specification={"ModelName": "m", "ComputeResourceRequirements": compute},
        RuntimeConfig={"CopyCount": 1},
    )
    assert another.settled("base")["InferenceComponentStatus"] == "InService"
    run = json.loads(log.read_text())
    assert run[0] == "run"
    assert run[-2:] == ["registry/slipway:1", "serve"]
    assert {"--env=A=x y", "--memory=512m", "--gpus=1", "--shm-size=64m"} <= {*run}
    volumes = [it.removeprefix("--volume=") for it in run if it.startswith("--volume=")]
    assert [it.split(":", 1)[1] for it in volumes] == [
        f"/opt/ml/{name}:ro" for name in ("additional-model-data-sources", "model", "models")
    ]
    folders = [Path(it.split(":")[0]) for it in volumes]
    assert (folders[0] / "draft" / "config.json").is_file()
    assert (folders[1] / "config.json").is_file()
    found = another.adapter("lora", "one", "base", "s3://bucket/one.tar.gz")
    # The container has a different path, and this one does not exist there.
    assert "answered 500" in found["FailureReason"]


def test_the_command_line(image, s3, tmp_path):
    command = [sys.executable, "-m", "tools.sagemaker_local", "local", "--port=0", f"--s3={s3}"]
    command.append(f"--program={program(image)}")
    process = subprocess.Popen(
        [*command, f"--work={tmp_path}", "--ping-s=5", "--accept-s=5"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPTION_PORT": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout
    with process.stdout as output:
        url = output.readline().split()[3].rstrip(";")
        exported = [output.readline().split("=", 1) for _ in range(2)]
        assert [name for name, _ in exported] == [
            "export AWS_ACCESS_KEY_ID",
            "export AWS_SECRET_ACCESS_KEY",
        ]
        assert refusal(Clients(url, image).model, "model")["Error"]["Code"] == BAD_SIGNATURE
        clients = Clients(url, image, Key(*(value.strip() for _, value in exported)))
        clients.model("model")
        clients.endpoint("one", "model")
        assert clients.invoke("one")["environ"] == {}
        container = psutil.Process(clients.overview()["one-all"]["pid"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert not container.is_running()
    assert [it.name.startswith("one-all-") for it in (tmp_path / "logs").iterdir()] == [True]
    assert [*(tmp_path / "copies").iterdir()] == []


BAD_SIGNATURE = "InvalidSignatureException"


def signed(clients, body=b'{"NameContains": "a"}', **context):
    """The headers of a signed request of the control plane's."""
    headers = {
        "Host": clients.url.removeprefix("http://"),
        "Content-Type": "application/x-amz-json-1.1",
        "X-Amz-Target": "SageMaker.ListModels",
    }
    request = AWSRequest("POST", f"{clients.url}/", data=body, headers=headers)
    SigV4Auth(Credentials(*context.get("key", KEY)), "sagemaker", "us-east-1").add_auth(request)
    return dict(request.headers.items())


def post(clients, headers, body=b'{"NameContains": "a"}', target="/"):
    """An answer's status and content."""
    connection = http.client.HTTPConnection(clients.url.removeprefix("http://"), timeout=10)
    with contextlib.closing(connection):
        connection.request("POST", target, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_what_is_signed_with_the_key_is_answered(clients):
    assert post(clients, signed(clients))[0] == 200
    body = {"prompt": "ü"}
    assert clients.invoke("one", body, InferenceComponentName="base", CustomAttributes="a  b=c d")


OLD = "20260101T000000Z"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda it: it.pop("Authorization"), b"Missing Authentication Token"),
        (lambda it: it.update(Authorization="AWS4-HMAC-SHA256 anything"), b"does not match"),
        (lambda it: it.update(Authorization="Bearer id"), b"Missing Authentication Token"),
        (lambda it: it.update({"X-Amz-Target": "SageMaker.ListEndpoints"}), b"does not match"),
        (lambda it: it.update({"X-Amz-Date": OLD}), b"does not match"),
        (lambda it: it.pop("X-Amz-Date"), b"does not match"),
        (lambda it: it.update({"X-Amz-Content-SHA256": "UNSIGNED-PAYLOAD"}), b"does not match"),
        (
            lambda it: it.update(Authorization=it["Authorization"].replace("host;", "")),
            b"does not match",
        ),
        (
            lambda it: it.update(Authorization=it["Authorization"].replace("=id/", "=root/")),
            b"does not match",
        ),
        (
            lambda it: it.update(Authorization=it["Authorization"].replace("sagemaker/", "s3/")),
            b"does not match",
        ),
        (lambda it: it.update(Authorization=it["Authorization"][:-64]), b"does not match"),
        (lambda it: it.update(Authorization=it["Authorization"] + "ü"), b"does not match"),
    ],
)
def test_what_is_not_signed_with_the_key_is_refused(clients, change, words):
    headers = signed(clients)
    change(headers)
    status, answer = post(clients, {k: v.encode() for k, v in headers.items()})
    assert (status, words in answer) == (403, True), answer
    assert post(clients, headers, target="/endpoints/one/invocations")[0] == 403


def test_another_body_or_key_or_time_is_refused(clients, monkeypatch):
    assert post(clients, signed(clients), b'{"NameContains": "b"}')[0] == 403
    assert post(clients, signed(clients, key=Key("id", "guessed")))[0] == 403
    assert post(clients, signed(clients), target="/?a=b")[0] == 403
    headers = signed(clients)
    later = time.time() + 16 * 60
    monkeypatch.setattr("tools.sagemaker_local.server.time.time", lambda: later)
    status, answer = post(clients, headers)
    assert (status, b"Signature expired" in answer) == (403, True)


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example:9000"},
        {"Host": "evil.example", "Origin": "http://evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_web_pages_reach_nothing(clients, headers):
    for target in ("/", "/endpoints/one/invocations", "/endpoints/one/openai/v1/chat/completions"):
        status, answer = post(clients, signed(clients) | headers, target=target)
        assert status == 403
        assert b"only programs of this machine may call" in answer
    if "Host" in headers:
        request = urllib.request.Request(clients.url, headers=headers)
        with pytest.raises(urllib.error.HTTPError, match="403") as caught:
            urllib.request.urlopen(request)
        caught.value.close()


def test_only_programs_that_were_named_are_run(clients, image):
    for name in ("/bin/bash", "bash", "./serve", f"{program(image)}/../../bash", "", "/"):
        container = {"Image": f"process:{name}", "Environment": {"BASH_ENV": "$(id)"}}
        found = refusal(
            clients.control.create_model,
            ModelName="never",
            PrimaryContainer=container,
            ExecutionRoleArn=ROLE,
        )
        assert "--program" in found["Error"]["Message"]
        found = refusal(
            clients.control.create_inference_component,
            InferenceComponentName="never",
            EndpointName="one",
            VariantName="all",
            Specification={"Container": container, "ComputeResourceRequirements": COMPUTE},
            RuntimeConfig={"CopyCount": 1},
        )
        assert "--program" in found["Error"]["Message"]
