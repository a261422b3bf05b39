# SPDX-License-Identifier: Apache-2.0
"""examples/sagemaker/deploy.py against the stand-in."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import boto3
import pytest

from tools.sagemaker_local import server, wire

ROOT = Path(__file__).parents[2]
ROLE = "arn:aws:iam::123456789012:role/slipway"


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    store = tmp_path_factory.mktemp("s3")
    (store / "bucket").mkdir()
    with tarfile.open(store / "bucket" / "french.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("adapter_config.json")
        member.size = len(b"french")
        archive.addfile(member, io.BytesIO(b"french"))
    program = tmp_path_factory.mktemp("image") / "container"
    script = Path(__file__).with_name("sagemaker_container.py")
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    program.chmod(0o755)
    key = wire.Key("id", "secret")
    with server.running(s3=store, ping_every_s=0.2, key=key, programs=[program]) as url:
        yield url, f"process:{program}"


@pytest.fixture
def client(stand_in):
    def make(service):
        made = boto3.client(
            service,
            endpoint_url=stand_in[0],
            region_name="us-east-1",
            aws_access_key_id="id",
            aws_secret_access_key="secret",
        )
        return stack.enter_context(contextlib.closing(made))

    with contextlib.ExitStack() as stack:
        yield make


@pytest.fixture
def deploy(stand_in):
    def run(*words):
        environ = {
            **os.environ,
            "AWS_ENDPOINT_URL": stand_in[0],
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        return subprocess.run(
            [sys.executable, ROOT / "examples/sagemaker/deploy.py", *words],
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def create(deploy, image, *words, machine="ml.c7i.4xlarge"):
    return deploy("create", "demo", image, ROLE, machine, *words)


def test_from_nothing_to_answers_and_back(deploy, stand_in, client):
    done = create(deploy, stand_in[1], "TEST_WORD=wörd=1", machine="ml.g6.xlarge")
    assert (done.returncode, done.stderr) == (0, "")
    (variant,) = client("sagemaker").describe_endpoint_config(EndpointConfigName="demo")[
        "ProductionVariants"
    ]
    assert variant["InferenceAmiVersion"] == "al2023-ami-sagemaker-inference-gpu-4-1"

    def invoked(component):
        answer = client("sagemaker-runtime").invoke_endpoint(
            EndpointName="demo", InferenceComponentName=component, Body=b'{"inputs": "Hello"}'
        )
        return json.load(answer["Body"])

    assert invoked("demo")["environ"]["TEST_WORD"] == "wörd=1"
    client("sagemaker").create_inference_component(
        InferenceComponentName="a-french",  # before its base, by name
        EndpointName="demo",
        Specification={
            "BaseInferenceComponentName": "demo",
            "Container": {"ArtifactUrl": "s3://bucket/french.tar.gz"},
        },
    )
    done = deploy("delete", "demo")
    assert (done.returncode, done.stderr) == (0, "")
    for kind in ("models", "endpoint_configs", "endpoints", "inference_components"):
        listed = getattr(client("sagemaker"), f"list_{kind}")()
        assert [it for it in listed.values() if isinstance(it, list)] == [[]]


def test_a_container_that_fails_says_why(deploy, stand_in):
    done = create(deploy, stand_in[1], "FAULTS=dies")
    assert done.returncode == 1
    assert "no such model" in done.stderr
    assert "aws logs tail /aws/sagemaker/InferenceComponents/demo" in done.stderr
    assert deploy("delete", "demo").returncode == 0
