# SPDX-License-Identifier: Apache-2.0
"""An endpoint with a base model and two LoRA adapters, from its creation to its deletion.

    python examples/sagemaker/endpoint.py URL IMAGE FIRST SECOND NEWER NAME=VALUE...

URL: the stand-in's (scripts/sagemaker local). IMAGE: the program that it runs, like
process:./entrypoint.sh if the stand-in was started with --program ./entrypoint.sh.
FIRST, SECOND: the adapters, like s3://bucket/french.tar.gz. NEWER: another version of the first.
NAME=VALUE: the container's environment, like HF_MODEL_ID=HuggingFaceTB/SmolLM2-135M-Instruct.
"""

import json
import sys
import time
from typing import Any

import boto3
from botocore.exceptions import ClientError

ROLE = "arn:aws:iam::123456789012:role/serving"
GREEDY = {"max_tokens": 16, "temperature": 0}

url, image, first, second, newer, *variables = sys.argv[1:]
environment = dict(it.split("=", 1) for it in variables) | {"OPTION_ENABLE_LORA": "true"}
# Their key is in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, which the stand-in prints. Without
# endpoint_url these are clients of AWS.
options: dict[str, Any] = {"endpoint_url": url, "region_name": "us-east-1"}
sagemaker: Any = boto3.client("sagemaker", **options)
runtime: Any = boto3.client("sagemaker-runtime", **options)


def component(name: str, **what: Any) -> None:
    """Create an inference component, and wait until it is in service: boto3 has no waiter."""
    sagemaker.create_inference_component(
        InferenceComponentName=name, EndpointName="example", **what
    )
    in_service(name)


def in_service(name: str) -> None:
    while True:
        found = sagemaker.describe_inference_component(InferenceComponentName=name)
        if found["InferenceComponentStatus"] == "InService":
            return
        if found["InferenceComponentStatus"] == "Failed":
            sys.exit(f"{name}: {found['FailureReason']}")
        time.sleep(0.2)


def adapter(base: str, artifact: str) -> dict[str, Any]:
    return {"BaseInferenceComponentName": base, "Container": {"ArtifactUrl": artifact}}


def invoke(name: str, body: Any, **more: Any) -> Any:
    return runtime.invoke_endpoint(
        EndpointName="example",
        InferenceComponentName=name,
        ContentType="application/json",
        Body=json.dumps(body),
        **more,
    )


def answer(name: str, prompt: str = "The import statement") -> str:
    found = json.load(invoke(name, {"prompt": prompt, **GREEDY})["Body"])
    return str(found["choices"][0]["text"])


# 1. A model, and an endpoint for components: the configuration names a role and no model.
sagemaker.create_model(
    ModelName="example",
    ExecutionRoleArn=ROLE,
    PrimaryContainer={"Image": image, "Environment": environment},
)
sagemaker.create_endpoint_config(
    EndpointConfigName="example",
    ExecutionRoleArn=ROLE,
    ProductionVariants=[
        {"VariantName": "all", "InstanceType": "ml.g5.xlarge", "InitialInstanceCount": 1}
    ],
)
sagemaker.create_endpoint(EndpointName="example", EndpointConfigName="example")
sagemaker.get_waiter("endpoint_in_service").wait(EndpointName="example", WaiterConfig={"Delay": 1})

# 2. The base component: its container starts now. Then two adapters in the same container.
component(
    "base",
    VariantName="all",
    Specification={
        "ModelName": "example",
        "ComputeResourceRequirements": {"MinMemoryRequiredInMb": 1024},
    },
    RuntimeConfig={"CopyCount": 1},
)
component("first", Specification=adapter("base", first))
component("second", Specification=adapter("base", second))
print("created")

# 3. Each answers by its component's name, in its own words.
answers = {name: answer(name) for name in ("base", "first", "second")}
assert len({*answers.values()}) == 3, answers
print("invoked:", answers)

# 4. A stream. Its parts begin and end anywhere, within events and within characters, so they are
# put together before they are taken apart.
streamed = runtime.invoke_endpoint_with_response_stream(
    EndpointName="example",
    InferenceComponentName="first",
    ContentType="application/json",
    Accept="text/event-stream",
    Body=json.dumps({"prompt": "The import statement", "stream": True, **GREEDY}),
)
text, pending = "", b""
for event in streamed["Body"]:
    *whole, pending = (pending + event["PayloadPart"]["Bytes"]).split(b"\n\n")
    for data in whole:
        if data != b"data: [DONE]":
            text += json.loads(data.removeprefix(b"data: "))["choices"][0]["text"]
assert (text, pending) == (answers["first"], b"")
print("streamed:", text)

# 5. A session: opened, used, closed, and then unknown.
opened = invoke("base", {"requestType": "NEW_SESSION"}, SessionId="NEW_SESSION")
session = opened["NewSessionId"].partition(";")[0]
invoke("base", {"prompt": "Hello", **GREEDY}, SessionId=session)
closed = invoke("base", {"requestType": "CLOSE"}, SessionId=session)
assert closed["ClosedSessionId"] == session
try:
    invoke("base", {"prompt": "Hello", **GREEDY}, SessionId=session)
except runtime.exceptions.ModelError as error:
    # The container's own status and message; to the client every error of it is 424.
    assert "session not found" in error.response["OriginalMessage"]
else:
    raise AssertionError("the session lives on")
print("session:", session)

# 6. Another version of the first adapter, under the same name.
sagemaker.update_inference_component(
    InferenceComponentName="first", Specification=adapter("base", newer)
)
in_service("first")
updated = answer("first")
assert updated not in answers.values(), updated
assert answer("second") == answers["second"]
print("updated:", updated)

# 7. Delete all: adapters, base, endpoint, configuration, model.
for name in ("first", "second", "base"):
    sagemaker.delete_inference_component(InferenceComponentName=name)
    while sagemaker.list_inference_components(NameContains=name)["InferenceComponents"]:
        time.sleep(0.2)
sagemaker.delete_endpoint(EndpointName="example")
sagemaker.get_waiter("endpoint_deleted").wait(EndpointName="example", WaiterConfig={"Delay": 1})
sagemaker.delete_endpoint_config(EndpointConfigName="example")
sagemaker.delete_model(ModelName="example")
try:
    answer("base")
except ClientError as error:
    assert "not found" in error.response["Error"]["Message"]
else:
    raise AssertionError("the endpoint lives on")
print("deleted")
