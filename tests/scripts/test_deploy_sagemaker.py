"""`scripts/sagemaker deploy`: its requests, and its course against servers that boto3 talks to."""

import io
import json
import shlex
import subprocess
import sys
import tarfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3
import pytest
from botocore.validate import ParamValidator
from moto.server import ThreadedMotoServer

from scripts.sagemaker_local import deploy, server, wire
from scripts.sagemaker_local.deploy import (
    Failed,
    adapter,
    deployment,
    differences,
    invocation,
    notes,
    update,
)

ROOT = Path(__file__).parents[2]
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/slipway:gpu-sagemaker"
ROLE = "arn:aws:iam::123456789012:role/slipway"
DEMO = [
    *("deploy", "demo", "--image", IMAGE, "--role", ROLE, "--instance-type", "ml.g4dn.xlarge"),
    *("--model", "Qwen/Qwen3-0.6B", "--poll", "0.05"),
]


@pytest.fixture(autouse=True)
def account(monkeypatch, tmp_path):
    """Credentials that only servers of the tests take, and nothing of this machine's own."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # refuses
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")


@pytest.fixture(scope="module")
def moto():
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


def asked(*arguments):
    return deploy.parser().parse_args([*arguments])


def parameters(requests):
    return {request.operation: request.parameters for request in requests}


def fails(*arguments):
    """What a command says that ends with an error."""
    with pytest.raises(SystemExit) as ended:
        deploy.main([*arguments])
    assert isinstance(ended.value.code, str)
    return ended.value.code


# Requests


def test_components_have_a_config_without_a_model():
    made = parameters(deployment(asked(*DEMO, "--gpus", "2", "--copies", "3")))
    config = made["CreateEndpointConfig"]
    (variant,) = config["ProductionVariants"]
    assert "ModelName" not in variant
    assert config["ExecutionRoleArn"] == ROLE
    assert variant["RoutingConfig"] == {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"}
    assert variant["InferenceAmiVersion"] == "al2023-ami-sagemaker-inference-gpu-4-1"
    base = made["CreateInferenceComponent"]
    assert base["Specification"]["ComputeResourceRequirements"] == {
        "MinMemoryRequiredInMb": 4096,
        "NumberOfAcceleratorDevicesRequired": 2,
    }
    assert base["Specification"]["StartupParameters"] == {
        "ModelDataDownloadTimeoutInSeconds": 1800,
        "ContainerStartupHealthCheckTimeoutInSeconds": 1800,
    }
    assert base["RuntimeConfig"] == {"CopyCount": 3}


def test_without_components_the_config_names_the_model():
    made = parameters(deployment(asked(*DEMO, "--no-components", "--startup-timeout", "600")))
    config = made["CreateEndpointConfig"]
    (variant,) = config["ProductionVariants"]
    assert variant["ModelName"] == "demo"
    assert variant["ContainerStartupHealthCheckTimeoutInSeconds"] == 600
    assert "ExecutionRoleArn" not in config
    assert "CreateInferenceComponent" not in made


def test_machines_without_gpus_get_neither_gpus_nor_a_gpu_image():
    made = parameters(deployment(asked(*DEMO, "--instance-type", "ml.c7i.4xlarge")))
    assert "InferenceAmiVersion" not in made["CreateEndpointConfig"]["ProductionVariants"][0]
    compute = made["CreateInferenceComponent"]["Specification"]["ComputeResourceRequirements"]
    assert compute == {"MinMemoryRequiredInMb": 4096}


@pytest.mark.parametrize(
    ("instance", "more", "gpus"),
    [
        ("ml.g4dn.xlarge", (), 1),
        ("ml.g5.16xlarge", (), 1),
        ("ml.g5.12xlarge", (), 4),
        ("ml.p5.48xlarge", (), 8),
        ("ml.g5.12xlarge", ("--gpus", "2"), 2),
        ("ml.g5.12xlarge", ("--env", "OPTION_TENSOR_PARALLEL_DEGREE=2"), 2),
        ("ml.g5.12xlarge", ("--env", "TENSOR_PARALLEL_DEGREE=1"), 1),
        (
            "ml.g5.12xlarge",
            ("--env", "SM_NUM_GPUS=2", "--env", "OPTION_PIPELINE_PARALLEL_DEGREE=2"),
            4,
        ),
        ("ml.p4d.24xlarge", ("--copies", "2"), 4),
        ("ml.p4d.24xlarge", ("--copies", "2", "--instances", "2"), 8),
        ("ml.g5.xlarge", ("--copies", "3"), 1),
        ("ml.g99.xlarge", ("--gpus", "1"), 1),
    ],
)
def test_a_copy_gets_the_gpus_that_it_is_spread_over(instance, more, gpus):
    made = parameters(deployment(asked(*DEMO, "--instance-type", instance, *more)))
    compute = made["CreateInferenceComponent"]["Specification"]["ComputeResourceRequirements"]
    assert compute["NumberOfAcceleratorDevicesRequired"] == gpus


@pytest.mark.parametrize(
    ("instance", "more", "reason"),
    [
        ("ml.g99.xlarge", (), "how many GPUs ml.g99.xlarge has is not known; say with --gpus"),
        (
            "ml.g5.12xlarge",
            ("--env", "OPTION_TENSOR_PARALLEL_DEGREE=8"),
            "a copy is spread over 8 GPUs, and ml.g5.12xlarge has 4",
        ),
    ],
)
def test_gpus_that_are_not_there_are_told_before_money_is_spent(instance, more, reason):
    with pytest.raises(Failed, match=reason):
        deployment(asked(*DEMO, "--instance-type", instance, *more))
    deployment(asked(*DEMO, "--no-components", "--instance-type", instance, *more))


@pytest.mark.parametrize(
    ("model", "source"),
    [
        ("s3://bucket/model", ("s3://bucket/model/", "S3Prefix", "None")),
        ("s3://bucket/model/", ("s3://bucket/model/", "S3Prefix", "None")),
        ("s3://bucket/model.tar.gz", ("s3://bucket/model.tar.gz", "S3Object", "Gzip")),
    ],
)
def test_models_on_s3_are_put_in_place(model, source):
    container = deployment(asked(*DEMO, "--model", model))[0].parameters["PrimaryContainer"]
    given = container["ModelDataSource"]["S3DataSource"]
    assert (given["S3Uri"], given["S3DataType"], given["CompressionType"]) == source
    assert container["Environment"] == {}


def test_models_on_the_hub_are_named_in_the_environment(tmp_path):
    file = tmp_path / "env"
    file.write_text("# ours\nOPTION_MAX_MODEL_LEN=4k\n\nOPTION_DTYPE=auto\n")
    options = asked(*DEMO, "--env-file", str(file), "--env", "OPTION_MAX_MODEL_LEN=8k")
    assert deployment(options)[0].parameters["PrimaryContainer"] == {
        "Image": IMAGE,
        "Environment": {
            "OPTION_MAX_MODEL_LEN": "8k",
            "OPTION_DTYPE": "auto",
            "HF_MODEL_ID": "Qwen/Qwen3-0.6B",
        },
    }


def test_an_update_changes_only_the_specification():
    create = adapter("demo", "french", "s3://bucket/french.tar.gz")
    assert update(create).parameters == {
        "InferenceComponentName": "french",
        "Specification": {
            "BaseInferenceComponentName": "demo",
            "Container": {"ArtifactUrl": "s3://bucket/french.tar.gz"},
        },
    }


def test_invocations_name_a_component():
    assert invocation("demo", None, b"{}", stream=False).parameters == {
        "EndpointName": "demo",
        "ContentType": "application/json",
        "Body": b"{}",
    }
    streamed = invocation("demo", "french", b"{}", stream=True)
    assert streamed.operation == "InvokeEndpointWithResponseStream"
    assert streamed.parameters["InferenceComponentName"] == "french"


SHAPES = [
    *deployment(asked(*DEMO)),
    *deployment(asked(*DEMO, "--no-components", "--model", "s3://bucket/model.tar.gz")),
    *deployment(asked(*DEMO, "--gpus", "8", "--copies", "4", "--startup-timeout", "3600")),
    adapter("demo", "french", "s3://bucket/french.tar.gz"),
    update(adapter("demo", "french", "s3://bucket/french.tar.gz")),
    invocation("demo", "french", b"{}", stream=False),
    invocation("demo", None, b"{}", stream=True),
    deploy.components("demo"),
    deploy.quotas(),
    deploy.quotas("ListAWSDefaultServiceQuotas"),
    deploy.log_streams("/aws/sagemaker/Endpoints/demo"),
    deploy.log_events("/aws/sagemaker/Endpoints/demo", "main/i-1"),
    *(
        request(kind, "a" * 63)
        for kind in ("Model", "EndpointConfig", "Endpoint", "InferenceComponent")
        for request in (deploy.describe, deploy.delete)
    ),
]


@pytest.mark.parametrize("request_", SHAPES, ids=[it.operation for it in SHAPES])
def test_requests_are_as_the_service_models_have_them(request_):
    shape = wire.operation(request_.service, request_.operation).input_shape
    assert shape
    report = ParamValidator().validate(request_.parameters, shape)
    assert not report.has_errors(), report.generate_report()
    wire.check(shape, request_.parameters)  # patterns, maxima and enumerations


# What is checked before anything is sent


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"OPTION_MAX_MODLE_LEN": "5"}, "did you mean OPTION_MAX_MODEL_LEN"),
        ({"OPTION_MAX_MODEL_LEN": "abc"}, "OPTION_MAX_MODEL_LEN='abc': should be"),
        ({"LONG": "x" * 1025}, "LONG: longer than 1,024 bytes; serving.properties"),
        ({"É" * 600: "x"}, "longer than 1,024 bytes"),
        ({f"V{i}": "" for i in range(101)}, "101 variables, and SageMaker takes 100"),
        ({f"V{i}": "x" * 1000 for i in range(40)}, "bytes of variables"),
    ],
)
def test_environments_that_cannot_be_used(environment, told):
    with pytest.raises(Failed, match=told):
        notes(environment, "s3://bucket/model/")


def test_what_is_fit_is_silent():
    assert notes({"OPTION_MAX_MODEL_LEN": "8k", "OTHER": "x" * 1024}, "s3://bucket/model/") == []


def test_secrets_are_told_and_hidden(capsys):
    deploy.main([*DEMO, "--dry-run", "--env", "HF_TOKEN=hf_abcdef"])
    printed = capsys.readouterr()
    assert "HF_TOKEN: whoever may describe the model can read it" in printed.err
    assert '"HF_TOKEN": "(hidden)"' in printed.out
    assert "hf_abcdef" not in printed.out + printed.err


def test_a_deployment_without_a_model_is_told(capsys):
    options = [it for it in DEMO if it not in ("--model", "Qwen/Qwen3-0.6B")]
    deploy.main([*options, "--dry-run"])
    assert "no model is named" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["deploy", "under_score"], "letters, digits and inner hyphens"),
        (["deploy", "x" * 64], "at most 63"),
        ([*DEMO, "--model", "./folder"], "should be s3://bucket/prefix/"),
        ([*DEMO, "--env", "OPTION_X"], "should be NAME=value"),
        ([*DEMO, "--env-file", "/nowhere"], "/nowhere: No such file"),
        ([*DEMO, "--startup-timeout", "9999"], "at least 60, at most 3600"),
        ([*DEMO, "--poll", "-1"], "'-1': a number above 0"),
        (["add-adapter", "demo", "french", "s3://bucket/french"], "s3://bucket/adapter.tar.gz"),
    ],
)
def test_bad_arguments_are_named(arguments, told, capsys):
    with pytest.raises(SystemExit):
        deploy.main(arguments)
    assert told in capsys.readouterr().err


def test_copies_need_components():
    assert "--instances says how many" in fails(*DEMO, "--no-components", "--copies", "2")


# Dry runs


@pytest.mark.parametrize(
    ("arguments", "operations"),
    [
        (
            DEMO,
            [
                *("ListServiceQuotas", "ListAWSDefaultServiceQuotas"),
                *("DescribeModel", "CreateModel"),
                *("DescribeEndpointConfig", "CreateEndpointConfig"),
                *("DescribeEndpoint", "CreateEndpoint"),
                *("DescribeInferenceComponent", "CreateInferenceComponent"),
                *("DescribeLogStreams", "GetLogEvents"),
            ],
        ),
        (
            ["add-adapter", "demo", "french", "s3://bucket/french.tar.gz"],
            [
                *("DescribeInferenceComponent", "DescribeInferenceComponent"),
                *("CreateInferenceComponent", "UpdateInferenceComponent"),
            ],
        ),
        (["invoke", "demo", "Hello"], ["InvokeEndpoint"]),
        (["invoke", "demo", "Hello", "--stream"], ["InvokeEndpointWithResponseStream"]),
        (
            ["status", "demo"],
            [
                *("DescribeEndpoint", "DescribeEndpointConfig"),
                *("ListInferenceComponents", "DescribeInferenceComponent"),
            ],
        ),
        (
            ["delete", "demo"],
            [
                *("ListInferenceComponents", "DescribeInferenceComponent"),
                *("DeleteInferenceComponent", "DescribeEndpoint", "DeleteEndpoint"),
                *("DescribeEndpointConfig", "DeleteEndpointConfig"),
                *("DescribeModel", "DeleteModel"),
            ],
        ),
    ],
)
def test_dry_runs_print_all_and_send_nothing(arguments, operations, capsys, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    deploy.main([*arguments, "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    starts = ("sagemaker ", "sagemaker-runtime ", "service-quotas ", "logs ")
    assert [line.split()[1] for line in lines if line.startswith(starts)] == operations


def test_the_documentation_shows_what_is_printed(capsys):
    pages = sorted((ROOT / "docs").rglob("sagemaker*.md"))
    text = "".join(page.read_text() for page in pages)
    shown = text.partition("$ scripts/sagemaker deploy demo \\\n")[2]
    arguments, _, output = shown.partition(" --dry-run\n")
    given = shlex.split(arguments.replace("\\\n", ""))
    deploy.main(["deploy", "demo", *given, "--dry-run"])
    printed = capsys.readouterr()
    assert output.startswith(f"{printed.err}{printed.out}```")


# Differences


def test_what_is_as_asked_for_does_not_differ():
    model, config, endpoint, base = (it.parameters for it in deployment(asked(*DEMO)))
    assert not differences(model, model | {"ModelArn": "arn", "EnableNetworkIsolation": False})
    variant = config["ProductionVariants"][0] | {"InitialVariantWeight": 1.0}
    assert not differences(config, config | {"ProductionVariants": [variant]})
    assert not differences(endpoint, endpoint | {"EndpointStatus": "InService"})
    runtime = {"RuntimeConfig": {"DesiredCopyCount": 1, "CurrentCopyCount": 0}}
    assert not differences(base, base | runtime)
    model = deployment(asked(*DEMO, "--model", "s3://bucket/model/"))[0].parameters
    container = {**model["PrimaryContainer"], "Mode": "SingleModel"}
    assert container.pop("Environment") == {}
    assert not differences(model, model | {"PrimaryContainer": container})


def test_differences_are_told_each():
    wanted = deployment(asked(*DEMO, "--env", "OPTION_DTYPE=auto", "--env", "HF_TOKEN=a1"))
    there = deployment(
        asked(*DEMO, "--env", "OPTION_TASK=auto", "--env", "HF_TOKEN=b2", "--copies", "2")
    )
    there = parameters(there) | {"CreateModel": json.loads(json.dumps(there[0].parameters))}
    source = {"S3DataSource": {"S3Uri": "s3://bucket/model/"}}
    there["CreateModel"]["PrimaryContainer"]["ModelDataSource"] = source
    assert differences(wanted[0].parameters, there["CreateModel"]) == [
        "PrimaryContainer.Environment.HF_TOKEN (hidden)",
        "PrimaryContainer.Environment.OPTION_DTYPE: nothing, not auto",
        "PrimaryContainer.Environment.OPTION_TASK: auto, not nothing",
        f"PrimaryContainer.ModelDataSource: {source}, not nothing",
    ]
    found = there["CreateInferenceComponent"] | {"RuntimeConfig": {"DesiredCopyCount": 2}}
    assert differences(wanted[3].parameters, found) == ["RuntimeConfig.CopyCount: 2, not 1"]


# Against moto, which has all but components


def test_a_deployment_goes_on_with_what_is_there(moto, capsys):
    one = [*DEMO, "--no-components", "--endpoint-url", moto]
    deploy.main(one)
    said = capsys.readouterr().err
    assert "1 x ml.g4dn.xlarge: billed from the endpoint's creation" in said
    assert "note: the quota for ml.g4dn.xlarge for endpoint usage is not known" in said
    assert [line for line in said.splitlines() if "created" in line] == [
        "Model demo: created",
        "EndpointConfig demo: created",
        "Endpoint demo: created",
    ]
    assert "Endpoint demo: InService" in said

    boto3.client("sagemaker").delete_endpoint(EndpointName="demo")
    deploy.main(one)
    said = capsys.readouterr().err
    assert "EndpointConfig demo: there already\nEndpoint demo: created" in said

    told = fails(*one, "--env", "OPTION_MAX_MODEL_LEN=8k")
    assert "PrimaryContainer.Environment.OPTION_MAX_MODEL_LEN: nothing, not 8k" in told
    assert "Nothing was changed. Delete it first, or take another name." in told
    assert "there is a second fleet" in told
    assert "may be billed, until `delete demo`" in told
    told = fails(*one, "--instances", "2")
    assert "ProductionVariants[0].InitialInstanceCount: 1, not 2" in told


def log(moto, monkeypatch, group, *lines):
    monkeypatch.setenv("AWS_ENDPOINT_URL_CLOUDWATCH_LOGS", moto)
    client = boto3.client("logs")
    client.create_log_group(logGroupName=group)
    client.create_log_stream(logGroupName=group, logStreamName="main/i-1")
    events = [
        {"timestamp": 1000 * int(time.time()) + at, "message": it} for at, it in enumerate(lines)
    ]
    client.put_log_events(logGroupName=group, logStreamName="main/i-1", logEvents=events)
    monkeypatch.setattr("deploy_sagemaker.LOG_LINES", 4)


def test_the_end_of_a_log_tells_the_reason(moto, monkeypatch):
    failed = {"message": "failed", "stage": "start", "reason": "no such model", "fix": "name one"}
    lines = [*map(str, range(9)), json.dumps(failed), '"no object"', "bye"]
    log(moto, monkeypatch, "/aws/sagemaker/InferenceComponents/demo", *lines)
    aws = deploy.Aws(0)
    told = aws.log_end("/aws/sagemaker/InferenceComponents/demo").splitlines()
    assert told == [
        "the end of /aws/sagemaker/InferenceComponents/demo, main/i-1:",
        "  8",
        f"  {json.dumps(failed)}",
        '  "no object"',
        "  bye",
        "the container says (start): no such model; name one",
    ]
    assert "there is no log /other" in aws.log_end("/other")
    monkeypatch.setenv("AWS_ENDPOINT_URL_CLOUDWATCH_LOGS", "http://127.0.0.1:1")
    assert "cannot be read: Could not connect" in deploy.Aws(0).log_end("/other")


# Against a server that says what it is told to


class Scripted(ThreadingHTTPServer):
    """answers: operation → what is answered, in order, the last one ever after. asked: calls."""

    def __init__(self, **answers):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = {name: list(given) for name, given in answers.items()}
        self.asked = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        operation = self.headers["X-Amz-Target"].partition(".")[2]
        self.server.asked.append((operation, json.loads(body)))
        answers = self.server.answers.get(operation) or [(400, "AccessDeniedException")]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        status = 200
        if isinstance(answer, tuple):
            status, code = answer
            answer = {"__type": code, "message": "as the test says"}
        payload = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def scripted(monkeypatch):
    servers = []

    def start(**answers):
        servers.append(Scripted(**answers))
        url = f"http://127.0.0.1:{servers[-1].server_port}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        return servers[-1]

    yield start
    for it in servers:
        it.shutdown()
        it.server_close()


ABSENT = (400, "ValidationException")


def quota(value):
    return {"Quotas": [{"QuotaName": "ml.g4dn.xlarge for endpoint usage", "Value": value}]}


@pytest.mark.parametrize(
    ("applied", "default", "told"),
    [
        (
            quota(0.0),
            {"Quotas": []},
            "warning: the quota for ml.g4dn.xlarge for endpoint usage",
        ),
        ({"Quotas": []}, quota(1.0), "is 1, and 2 are asked for"),
        (quota(2.0), {"Quotas": []}, ""),
        ({"Quotas": []}, {"Quotas": []}, "note: no quota is listed"),
        ((400, "AccessDeniedException"), {"Quotas": []}, "note: the quota"),
    ],
)
def test_quotas(scripted, applied, default, told, capsys):
    scripted(ListServiceQuotas=[applied], ListAWSDefaultServiceQuotas=[default])
    deploy.check_quota(deploy.Aws(0), "ml.g4dn.xlarge", 2)
    said = capsys.readouterr().err
    assert told in said if told else not said


def described(kind, status, **more):
    return {f"{kind}Name": "demo", f"{kind}Status": status, **more}


def component(status, **more):
    made = deployment(asked(*DEMO))[-1].parameters
    runtime = {"DesiredCopyCount": 1, "CurrentCopyCount": int(status == "InService")}
    return {**made, "InferenceComponentStatus": status, "RuntimeConfig": runtime, **more}


def there(**kinds):
    """A deployment that is whole but for what is said."""
    made = parameters(deployment(asked(*DEMO)))
    endpoint = described("Endpoint", "InService", EndpointConfigName="demo")
    return {
        "DescribeModel": [made["CreateModel"]],
        "DescribeEndpointConfig": [made["CreateEndpointConfig"]],
        "DescribeEndpoint": [endpoint],
        "DescribeInferenceComponent": [component("InService")],
        **kinds,
    }


def test_progress_is_told_once_for_each_change(scripted, capsys):
    creating, ready = component("Creating"), component("InService")
    scripted(**there(DescribeInferenceComponent=[creating, creating, creating, creating, ready]))
    deploy.main(DEMO)
    told = [line.rpartition(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert [line for line in told if line.startswith("InferenceComponent")] == [
        "InferenceComponent demo: Creating, 0 of 1 copies",
        "InferenceComponent demo: InService, 1 of 1 copies",
    ]


def test_a_failed_component_says_why(scripted, moto, monkeypatch):
    scripted(**there(DescribeInferenceComponent=[component("Failed", FailureReason="no ping")]))
    told = fails(*DEMO)
    assert "InferenceComponent demo: Failed, 0 of 1 copies (no ping)" in told
    assert "cannot be read" in told
    assert "`delete demo --keep-endpoint` clears it" in told
    monkeypatch.setenv("AWS_ENDPOINT_URL_CLOUDWATCH_LOGS", moto)
    monkeypatch.setattr(deploy, "log_group", lambda kind, name: f"/none/{kind}s/{name}")
    told = fails(*DEMO)
    assert "there is no log /none/InferenceComponents/demo: the container has not begun" in told
    assert "CUDA 13 needs --ami al2023-ami-sagemaker-inference-gpu-4-1" in told


def test_what_never_gets_ready_is_given_up(scripted, monkeypatch):
    monkeypatch.setattr(deploy, "PROVISION_S", 0.2 - 2 * 1800)
    told = fails_with(scripted, **there(DescribeInferenceComponent=[component("Creating")]))
    assert "demo: not in service after 0 min" in told


def test_an_endpoint_without_capacity_has_no_log(scripted):
    failed = described("Endpoint", "Failed", EndpointConfigName="demo", FailureReason="capacity")
    told = fails_with(scripted, **there(DescribeEndpoint=[failed]))
    assert "Endpoint demo: Failed (capacity)" in told
    assert "log" not in told


def fails_with(scripted, **answers):
    scripted(**answers)
    return fails(*DEMO)


def test_what_may_not_be_asked_is_no_absence(scripted):
    server = scripted(**there(DescribeEndpoint=[(400, "AccessDeniedException")]))
    assert "AccessDeniedException" in fails(*DEMO)
    assert not [name for name, _ in server.asked if name.startswith("Create")]


def test_no_credentials_and_no_region_are_told(monkeypatch):
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    assert "region" in fails("status", "demo")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert "credentials" in fails("status", "demo")


def french(status, artifact="s3://bucket/french.tar.gz", **more):
    made = adapter("demo", "french", artifact).parameters
    return {**made, "InferenceComponentStatus": status, **more}


ADD = ["add-adapter", "demo", "french", "s3://bucket/french.tar.gz", "--poll", "0.05"]


def test_adapters_need_a_base(scripted):
    scripted(DescribeInferenceComponent=[ABSENT])
    assert "there is no base component demo; `deploy demo` makes one" in fails(*ADD)


def test_an_update_that_is_taken_back_is_a_failure(scripted):
    old = french("InService", "s3://bucket/old.tar.gz")
    answers = [component("InService"), old, french("Updating"), old | {"FailureReason": "no"}]
    server = scripted(DescribeInferenceComponent=answers, UpdateInferenceComponent=[{}])
    assert "the update failed, and was taken back" in fails(*ADD)
    sent = dict(server.asked)["UpdateInferenceComponent"]
    assert sent == update(adapter("demo", "french", ADD[3])).parameters


@pytest.mark.parametrize("artifact", ["s3://bucket/french.tar.gz", "s3://bucket/old.tar.gz"])
def test_an_adapter_of_another_endpoint_is_left_alone(artifact, scripted):
    answers = [component("InService"), french("InService", artifact, EndpointName="other")]
    server = scripted(DescribeInferenceComponent=answers)
    assert "EndpointName: other, not demo" in fails(*ADD)
    assert {name for name, _ in server.asked} == {"DescribeInferenceComponent"}


def test_deletion_waits_for_what_is_being_made(scripted, capsys):
    creating = described("Endpoint", "Creating")
    deleting = described("Endpoint", "Deleting")
    server = scripted(
        ListInferenceComponents=[{"InferenceComponents": []}],
        DescribeEndpoint=[creating, described("Endpoint", "InService"), deleting, ABSENT],
        DeleteEndpoint=[ABSENT, {}],
        DescribeEndpointConfig=[ABSENT],
        DescribeModel=[{"ModelName": "demo"}],
        DeleteModel=[{}],
    )
    deploy.main(["delete", "demo", "--poll", "0.05"])
    assert [name for name, _ in server.asked if name.startswith("Delete")] == [
        *("DeleteEndpoint", "DeleteEndpoint", "DeleteModel"),
    ]
    assert capsys.readouterr().err.splitlines() == [
        "Endpoint demo: Creating, cannot be deleted yet",
        "Endpoint demo: deleting",
        "Endpoint demo: gone",
        "EndpointConfig demo: gone",
        "Model demo: deleting",
    ]


# Against the stand-in


def pack(file, content):
    with tarfile.open(file, "w:gz") as archive:
        member = tarfile.TarInfo("adapter_config.json")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content.encode()))


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    store = tmp_path_factory.mktemp("s3")
    (store / "bucket").mkdir()
    for language in ("french", "german", "german2"):
        pack(store / "bucket" / f"{language}.tar.gz", language)
    (store / "bucket" / "none.tar.gz").write_text("no archive")
    with server.running(s3=store, ping_every_s=0.2) as url:
        yield url


@pytest.fixture
def image(stand_in, monkeypatch, tmp_path, capsys):
    """The container's image; when the test is over, nothing may be left of its endpoints."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", stand_in)
    program = tmp_path / "container"
    script = Path(__file__).with_name("sagemaker_container.py")
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    program.chmod(0o755)
    yield f"process:{program}"
    for name in ("demo", "plain"):
        deploy.main(["delete", name, "--poll", "0.05"])
    client = boto3.client("sagemaker")
    for kind in ("models", "endpoint_configs", "endpoints", "inference_components"):
        (listed,) = (it for it in getattr(client, f"list_{kind}")().values() if it == [])
        assert not listed


def run(*arguments):
    deploy.main([*arguments, "--poll", "0.05"])


def answer(capsys, monkeypatch, *arguments, **body):
    capsys.readouterr()
    stdin = io.TextIOWrapper(io.BytesIO(json.dumps(body).encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    run("invoke", *arguments)
    return capsys.readouterr().out


def test_from_nothing_to_answers_and_back(image, monkeypatch, capsys):
    deploy = [*DEMO, "--image", image, "--env", "TEST_WORD=wörd"]
    run(*deploy)
    said = capsys.readouterr().err
    assert "InferenceComponent demo: InService, 1 of 1 copies" in said
    assert said.endswith("invoke demo 'The capital of France is'\n")
    run(*deploy)
    assert "created" not in capsys.readouterr().err

    for name in ("french", "german"):
        run("add-adapter", "demo", name, f"s3://bucket/{name}.tar.gz")
    told = json.loads(answer(capsys, monkeypatch, "demo", inputs="Hello"))
    assert told["body"] == {"inputs": "Hello"}
    assert told["choices"] == [{"text": "by None"}]
    assert told["environ"]["TEST_WORD"] == "wörd"
    told = json.loads(answer(capsys, monkeypatch, "demo", "--component", "german"))
    assert told["choices"] == [{"text": "by german"}]
    run("invoke", "demo", "Hello")
    assert json.loads(capsys.readouterr().out)["body"] == {"inputs": "Hello", "stream": False}

    lines = answer(capsys, monkeypatch, "demo", "--stream", stream=True).split("\n\n")
    assert lines == [*(f'data: {{"text": "wörd {i}"}}' for i in range(8)), "data: [DONE]", ""]

    run("add-adapter", "demo", "german", "s3://bucket/german2.tar.gz")
    assert "updating to s3://bucket/german2.tar.gz" in capsys.readouterr().err
    told = json.loads(answer(capsys, monkeypatch, "demo", "--component", "german"))
    assert told["choices"] == [{"text": "by german2"}]
    run("add-adapter", "demo", "german", "s3://bucket/german2.tar.gz")
    assert "InferenceComponent german: there already" in capsys.readouterr().err

    run("status", "demo")
    assert capsys.readouterr().out.splitlines() == [
        "endpoint demo: InService",
        "  main: 1 of 1 x ml.g4dn.xlarge, billed until deleted",
        "  demo (base): InService, 1 of 1 copies",
        "  french (adapter of demo): InService",
        "  german (adapter of demo): InService",
    ]

    run("delete", "demo", "--component", "french")
    run("status", "demo")
    assert "french" not in capsys.readouterr().out
    run("delete", "demo")
    said = capsys.readouterr().err.splitlines()
    gone = [line for line in said if line.endswith(("gone", "Config demo: deleting"))]
    assert gone == [
        "InferenceComponent german: gone",
        "InferenceComponent demo: gone",
        "Endpoint demo: gone",
        "EndpointConfig demo: deleting",
    ]
    assert fails("status", "demo") == "there is no endpoint demo"
    run("delete", "demo")
    assert "Endpoint demo: gone" in capsys.readouterr().err


def test_a_container_that_fails_gets_another_try(image, capsys):
    deploy = [*DEMO, "--image", image]
    told = fails(*deploy, "--env", "FAULTS=dies")
    assert "InferenceComponent demo: Failed" in told
    assert "no such model" in told
    assert "PrimaryContainer.Environment.FAULTS: dies, not nothing" in fails(*deploy)
    assert "there is no base component" not in fails(
        *("add-adapter", "demo", "french", "s3://bucket/french.tar.gz")
    )
    run("delete", "demo", "--keep-endpoint")
    capsys.readouterr()
    run(*deploy)
    assert "Endpoint demo: there already" in capsys.readouterr().err


def test_a_deployment_that_was_broken_off_goes_on(image, monkeypatch, capsys):
    deploy = [*DEMO, "--image", image]

    def broken_off(seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("time.sleep", broken_off)
        with pytest.raises(SystemExit) as ended:
            run(*deploy)
    assert ended.value.code == 130
    assert "is billed; give the same command again" in capsys.readouterr().err
    run(*deploy)
    said = capsys.readouterr().err
    assert "Model demo: there already" in said
    assert "InferenceComponent demo: InService" in said


def test_adapters_that_fail_say_why(image, capsys):
    run(*DEMO, "--image", image)
    told = fails("add-adapter", "demo", "none", "s3://bucket/none.tar.gz")
    assert "InferenceComponent none: Failed" in told
    assert "Failed to extract" in told
    run("delete", "demo", "--component", "none")
    capsys.readouterr()
    run("add-adapter", "demo", "none", "s3://bucket/french.tar.gz")
    assert "InferenceComponent none: InService" in capsys.readouterr().err


def test_an_endpoint_without_components(image, monkeypatch, capsys):
    run("deploy", "plain", *DEMO[2:], "--image", image, "--no-components")
    told = json.loads(answer(capsys, monkeypatch, "plain", "--no-components", inputs="Hello"))
    assert told["body"] == {"inputs": "Hello"}
    assert "endpoint plain has no components" in fails("delete", "plain", "--keep-endpoint")

    told = fails("invoke", "plain", "Hello")
    assert "wants --no-components" in told
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"fail": true}')))
    told = fails("invoke", "plain", "--no-components")
    assert told.startswith('the container answered 424\n{"code": 424, "error": "as you like it"}')
    assert "/aws/sagemaker/Endpoints/plain" in told
    stdin = io.TextIOWrapper(io.BytesIO(b'{"stream": true, "break": true}'))
    monkeypatch.setattr("sys.stdin", stdin)
    assert "the stream was cut" in fails("invoke", "plain", "--no-components", "--stream")


def test_deploying_needs_no_engine():
    code = (
        "import deploy, sys; print({'vllm', 'torch', 'starlette', 'serving'} & sys.modules.keys())"
    )
    environ = {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
