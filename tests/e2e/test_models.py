# SPDX-License-Identifier: Apache-2.0
"""Two models in one container with room for one, each with the real engine; and boto3 with
TargetModel in front of such a container.
"""

import contextlib
import json
import shutil
import sys
import tarfile
import threading
import time
from typing import Any

import boto3
import httpx
import psutil
import pytest
from botocore.config import Config

from tests.e2e.conftest import START_S, serving
from tests.support.harness.process import ROOT
from tests.support.harness.wait import until
from tests.support.models import tiny
from tools.sagemaker_local import server
from tools.sagemaker_local.wire import Key

OPTIONS = {
    "OPTION_MAX_MODEL_LEN": "512",
    "OPTION_KV_CACHE_MEMORY_BYTES": "64M",
    "OPTION_MODELS_MEMORY": "3G",  # the plan takes 2.6 GiB for one
}


@pytest.fixture(scope="module")
def turns(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    config = folder / "config.yaml"
    names = {name: {"model_id": str(shutil.copytree(tiny.make(), folder / name))} for name in "ab"}
    config.write_text(json.dumps({"models": names}))
    environ = {**OPTIONS, "OPTION_CONFIG_FILE": str(config)}
    with serving(folder / "log", "./entrypoint.sh", "serve", **environ) as it:
        it.client.timeout = START_S
        it.ready()
        yield it


def asked(served, model):
    body = {"model": model, "prompt": "Hi", "max_tokens": 3, "temperature": 0}
    return served.client.post("/v1/completions", json=body)


def states(served):
    return {it["modelName"]: it["status"] for it in served.client.get("/models").json()["models"]}


def test_models_take_turns_and_a_killed_one_comes_back(turns):
    assert states(turns) == {"a": "COLD", "b": "COLD"}
    answers = []
    threads = [
        threading.Thread(target=lambda name=name: answers.append(asked(turns, name)))
        for name in "abab"
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    assert [it.status_code for it in answers] == [200] * 4
    lines = [json.loads(it) for it in turns.logged().splitlines() if it.startswith("{")]
    assert sum(it.get("state") == "starting" for it in lines) == 2
    assert sorted(states(turns).values()) == ["COLD", "READY"]
    engines = turns.children("VLLM::EngineCore")
    assert len(engines) == 1
    victim = engines[0]
    victim.kill()
    until(lambda: {*states(turns).values()} == {"COLD"}, START_S)
    up = asked(turns, "a")
    assert up.status_code == 200
    assert up.json()["model"] == "a"


KEY = Key("id", "secret")
LIMITS = {"accept_s": 5, "ping_s": 10, "startup_s": START_S, "answer_s": START_S}
"""The machine may be busy."""


def packed(store, name):
    file = store / "bucket" / "models" / f"{name}.tar.gz"
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:gz") as archive:
        for path in tiny.make().iterdir():
            archive.add(path.resolve(), path.name)


@pytest.mark.nightly
def test_boto3_names_target_models_and_sagemaker_unloads_one_for_another(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPWAY_PYTHON", sys.executable)  # as scripts/sagemaker sets it
    for name in ("x", "y"):
        packed(tmp_path, name)
    program = str(ROOT / "entrypoint.sh")
    with (
        server.running(s3=tmp_path, key=KEY, programs=[program], **LIMITS) as url,
        contextlib.ExitStack() as stack,
    ):
        about: dict[str, Any] = {
            "endpoint_url": url,
            "region_name": "us-east-1",
            "aws_access_key_id": KEY.id,
            "aws_secret_access_key": KEY.secret,
            "config": Config(retries={"total_max_attempts": 1}, read_timeout=START_S),
        }
        control, runtime = (
            stack.enter_context(contextlib.closing(boto3.client(it, **about)))
            for it in ("sagemaker", "sagemaker-runtime")
        )
        role = "arn:aws:iam::123456789012:role/serving"
        container = {
            "Image": f"process:{program}",
            "Mode": "MultiModel",
            "ModelDataUrl": "s3://bucket/models/",
            "Environment": OPTIONS,
        }
        control.create_model(ModelName="m", ExecutionRoleArn=role, PrimaryContainer=container)
        variant = {
            "VariantName": "all",
            "ModelName": "m",
            "InstanceType": "ml.g5.xlarge",
            "InitialInstanceCount": 1,
        }
        control.create_endpoint_config(EndpointConfigName="e", ProductionVariants=[variant])
        control.create_endpoint(EndpointName="e", EndpointConfigName="e")
        control.get_waiter("endpoint_in_service").wait(
            EndpointName="e", WaiterConfig={"Delay": 1, "MaxAttempts": int(START_S)}
        )

        def invoke(target):
            answer = runtime.invoke_endpoint(
                EndpointName="e",
                TargetModel=target,
                ContentType="application/json",
                Body=json.dumps({"inputs": "Hi", "parameters": {"max_new_tokens": 2}}),
            )
            return json.loads(answer["Body"].read())

        assert "generated_text" in invoke("x.tar.gz")
        (copy,) = json.loads(_overview(url))["copies"]
        whole = psutil.Process(copy["pid"])
        before = {it.pid for it in whole.children(recursive=True)}
        assert "generated_text" in invoke("y.tar.gz")
        after = {it.pid for it in whole.children(recursive=True)}
        assert len(after) <= len(before)  # the processes of the first one have ended
        calls = json.loads(_overview(url))["copies"][0]["calls"]
        kinds = [f"{it.split('/models')[0]}{it.rpartition(' ')[2]}" for it in calls]
        assert kinds == ["POST 200", "POST 507", "DELETE 200", "POST 200"]


def _overview(url):

    return httpx.get(url).text
