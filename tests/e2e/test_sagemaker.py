# SPDX-License-Identifier: Apache-2.0
"""The life of a SageMaker endpoint on the real engine, and SageMaker's contract, rule by rule."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tarfile
from typing import Any

import boto3
import pytest

from examples.sagemaker import make_adapters
from tests import agents
from tests.e2e.conftest import ROOT, START_S, serving, warm_python
from tests.e2e.test_tools import TASK, TEMPLATE, strict
from tests.support.harness.process import AS_ENTRYPOINT_SH
from tests.support.harness.wait import until
from tests.support.models import formatter, tiny_lora
from tools.sagemaker_local.server import running
from tools.sagemaker_local.wire import Key


@pytest.fixture
def s3(tmp_path):
    """A folder that simulates S3, with three adapters."""
    make_adapters.make(tmp_path / "bucket")
    return tmp_path


def test_the_example_in_the_documentation(tiny_options, s3, monkeypatch):
    monkeypatch.setenv("SLIPWAY_PYTHON", warm_python().executable(["-P", "-m", "serving"]))
    limits = {"accept_s": 5, "ping_s": 10, "startup_s": START_S}  # the machine may be busy
    named = {"AWS_ACCESS_KEY_ID": KEY.id, "AWS_SECRET_ACCESS_KEY": KEY.secret}
    program = ROOT / "entrypoint.sh"
    with running(s3=s3, key=KEY, programs=[program], **limits) as url:
        ended = subprocess.run(
            [
                *(sys.executable, ROOT / "examples" / "sagemaker" / "endpoint.py"),
                *(url, f"process:{program}"),
                *(f"s3://bucket/{name}.tar.gz" for name in ("one", "two", "three")),
                *(f"{name}={value}" for name, value in tiny_options.items()),
            ],
            env={**os.environ, **named},
            capture_output=True,
            text=True,
            timeout=START_S + 120,
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    steps = [line.partition(":")[0] for line in ended.stdout.splitlines()]
    assert steps == ["created", "invoked", "streamed", "session", "updated", "deleted"]


def test_every_rule_of_the_contract_is_kept(tiny_options, tmp_path):
    environ = {
        **tiny_options,
        "OPTION_ENABLE_LORA": "true",
        "OPTION_ADAPTER_ROOTS": str(tmp_path / "adapters"),
    }
    adapter = tiny_lora.write(tmp_path / "adapters" / "one", 1)
    with serving(tmp_path / "log", **environ) as served:
        served.ready()
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "tools.sagemaker_local", "check", served.url),
                *(f"--adapter={adapter}", f"--pid={served.process.pid}", "--json"),
            ],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert served.process.wait(10) == 0
    sheet = json.loads(ended.stdout)
    assert [it for it in sheet if it["verdict"] != "pass"] == []
    assert len(sheet) == 34
    assert ended.returncode == 0


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """The executable that the stand-in runs as a container's image."""
    file = tmp_path_factory.mktemp("image") / "serving"
    python = warm_python().executable(["-m", "serving"])
    file.write_text(f'#!/bin/sh\nexec {python} -m serving "$@"\n')
    file.chmod(0o755)
    return f"process:{file}"


def test_an_adapter_component_brings_its_formatter(tiny_options, image, tmp_path):
    """A model.py in the component's archive formats the adapter's answers, and no other answers."""
    bucket = tmp_path / "s3" / "bucket"
    bucket.mkdir(parents=True)
    for seed, name in enumerate(("plain", "formatted"), 1):
        folder = tiny_lora.write(tmp_path / name, seed)
        if name == "formatted":
            formatter.write(folder)
        with tarfile.open(bucket / f"{name}.tar.gz", "w:gz") as archive:
            for file in folder.iterdir():
                archive.add(file, file.name)
    environ = {**AS_ENTRYPOINT_SH, **tiny_options, "OPTION_ENABLE_LORA": "true"}
    limits = {"accept_s": 5, "ping_s": 10, "startup_s": START_S}  # the machine may be busy
    named = {"key": KEY, "programs": [image.removeprefix("process:")]}
    at = running(s3=tmp_path / "s3", **named, **limits)
    with at as url, clients(url) as (control, runtime):
        control.create_model(
            ModelName="base",
            ExecutionRoleArn=ROLE,
            PrimaryContainer={"Image": image, "Environment": environ},
        )
        variant = {"VariantName": "all", "InstanceType": "ml.g5.xlarge", "InitialInstanceCount": 1}
        control.create_endpoint_config(
            EndpointConfigName="one", ExecutionRoleArn=ROLE, ProductionVariants=[variant]
        )
        control.create_endpoint(EndpointName="one", EndpointConfigName="one")
        control.get_waiter("endpoint_in_service").wait(
            EndpointName="one", WaiterConfig={"Delay": 1}
        )
        components: dict[str, Any] = {
            "base": {
                "VariantName": "all",
                "RuntimeConfig": {"CopyCount": 1},
                "Specification": {
                    "ModelName": "base",
                    "ComputeResourceRequirements": {"MinMemoryRequiredInMb": 1024},
                },
            },
            **{
                name: {
                    "Specification": {
                        "BaseInferenceComponentName": "base",
                        "Container": {"ArtifactUrl": f"s3://bucket/{name}.tar.gz"},
                    }
                }
                for name in ("plain", "formatted")
            },
        }
        for name, what in components.items():
            control.create_inference_component(
                InferenceComponentName=name, EndpointName="one", **what
            )
            until(lambda name=name: status(control, name) != "Creating", START_S)
            assert status(control, name) == "InService"
        answers = {}
        for name in components:
            answer = runtime.invoke_endpoint(
                EndpointName="one",
                InferenceComponentName=name,
                ContentType="application/json",
                Body=json.dumps({"prompt": "class", "max_tokens": 12, "temperature": 0}),
            )
            answers[name] = json.load(answer["Body"])
    stamps = {name: answer.get("processed_by") for name, answer in answers.items()}
    assert stamps == {"base": None, "plain": None, "formatted": formatter.NAME}
    assert len({answer["choices"][0]["text"] for answer in answers.values()}) == 3


def status(control, name):
    found = control.describe_inference_component(InferenceComponentName=name)
    return found["InferenceComponentStatus"]


KEY = Key("id", "secret")
ROLE = "arn:aws:iam::123456789012:role/serving"


@contextlib.contextmanager
def clients(url):
    """The clients of the stand-in's control plane, and of its runtime."""
    options: dict[str, Any] = {"endpoint_url": url, "region_name": "us-east-1"}
    options |= {"aws_access_key_id": KEY.id, "aws_secret_access_key": KEY.secret}
    with (
        contextlib.closing(boto3.client("sagemaker", **options)) as control,
        contextlib.closing(boto3.client("sagemaker-runtime", **options)) as runtime,
    ):
        yield control, runtime


BLOCK = 128
"""Tokens, without a GPU."""
TURNS = 5
SAID = "The import statement is one of many that bind names. " * 20
"""A user's message in a turn: more than a block of the engine's cache."""


@pytest.fixture(scope="module")
def runtime(tiny_options, image):
    """A client of an endpoint `chat` with two copies of the tiny model."""
    environ = {**AS_ENTRYPOINT_SH, **tiny_options, "OPTION_CHAT_TEMPLATE": TEMPLATE}
    limits = {"accept_s": 5, "ping_s": 10, "startup_s": START_S}  # the machine may be busy
    at = running(key=KEY, programs=[image.removeprefix("process:")], **limits)
    with at as url, clients(url) as (control, runtime):
        control.create_model(
            ModelName="chat",
            ExecutionRoleArn=ROLE,
            PrimaryContainer={"Image": image, "Environment": environ},
        )
        variant = {"VariantName": "all", "ModelName": "chat", "InstanceType": "ml.g5.xlarge"}
        control.create_endpoint_config(
            EndpointConfigName="chat", ProductionVariants=[{**variant, "InitialInstanceCount": 2}]
        )
        control.create_endpoint(EndpointName="chat", EndpointConfigName="chat")
        control.get_waiter("endpoint_in_service").wait(
            EndpointName="chat", WaiterConfig={"Delay": 1}
        )
        yield runtime


def conversation(runtime, name, **session):
    """The tokens of each turn's prompt, and how many of them were cached."""
    messages, tokens = [], []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{name}, turn {turn}: {SAID}"})
        body = {"messages": messages, "max_tokens": 8}
        answer = runtime.invoke_endpoint(
            EndpointName="chat",
            ContentType="application/json",
            Body=json.dumps(body),
            **session,
        )
        found = json.load(answer["Body"])
        messages.append(found["choices"][0]["message"])
        details = found["usage"]["prompt_tokens_details"] or {}
        tokens.append((found["usage"]["prompt_tokens"], details.get("cached_tokens") or 0))
    return tokens


def test_a_conversation_finds_its_cache_where_its_session_began(runtime):
    for name in ("one", "two"):
        opened = runtime.invoke_endpoint(
            EndpointName="chat", Body=b'{"requestType": "NEW_SESSION"}', SessionId="NEW_SESSION"
        )
        session = opened["NewSessionId"].partition(";")[0]
        tokens = conversation(runtime, name, SessionId=session)
        assert tokens[0][1] == 0
        for (before, _), (_, cached) in itertools.pairwise(tokens):
            assert cached >= before - before % BLOCK
    # Otherwise a turn may go to the copy that has not seen the conversation.
    assert 0 in [cached for _, cached in conversation(runtime, "none")[1:]]


def test_agents_at_work(runtime):
    """By the route that clients of AWS's vLLM image use, streamed, with calls."""

    def ask(path, body):
        answer = runtime.invoke_endpoint_with_response_stream(
            EndpointName="chat",
            ContentType="application/json",
            CustomAttributes=f"route={path}",
            Body=json.dumps(strict(body)),
        )
        return b"".join(it["PayloadPart"]["Bytes"] for it in answer["Body"]).decode()

    named: dict[str, Any] = {"temperature": 1}
    named["tool_choice"] = {"type": "function", "name": "get_weather"}
    *_, call = agents.codex_reads(ask("/v1/responses", agents.codex(TASK, **named)))
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Paris"})
    further = agents.codex_goes_on(call, "Sunny.")
    assert agents.codex_reads(
        ask("/v1/responses", agents.codex(TASK, *further, max_output_tokens=8))
    )
    named["tool_choice"] = {"type": "tool", "name": "get_weather"}
    message = agents.claude_reads(ask("/v1/messages", agents.claude(TASK, **named)))
    call = message["content"][-1]
    assert (call["name"], call["input"]) == ("get_weather", {"city": "Paris"})
    further = agents.claude_goes_on(call, "Sunny.")
    said = agents.claude_reads(ask("/v1/messages", agents.claude(TASK, *further, max_tokens=8)))
    assert said["stop_reason"] == "max_tokens"
