# SPDX-License-Identifier: Apache-2.0
"""`scripts/sagemaker deploy`: its requests, and its course against servers that boto3 talks to."""

import io
import json
import shlex
import subprocess
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3
import pytest
from botocore.validate import ParamValidator
from moto.server import ThreadedMotoServer

from scripts.sagemaker_local import deploy, server, wire
from scripts.sagemaker_local.deploy import Failed, deployment, notes

ROOT = Path(__file__).parents[2]
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/slipway:gpu-sagemaker"
ROLE = "arn:aws:iam::123456789012:role/slipway"
DEMO = [
    *("deploy", "demo", "--image", IMAGE, "--role", ROLE, "--instance-type", "ml.g4dn.xlarge"),
    *("--model", "Qwen/Qwen3-0.6B"),
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
    monkeypatch.setattr(deploy, "POLL_S", 0.05)


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


SHAPES = [
    *deployment(asked(*DEMO)),
    *deployment(asked(*DEMO, "--no-components", "--model", "s3://bucket/model.tar.gz")),
    *deployment(asked(*DEMO, "--gpus", "8", "--copies", "4", "--startup-timeout", "3600")),
]


@pytest.mark.parametrize("request_", SHAPES, ids=[it.operation for it in SHAPES])
def test_requests_are_as_the_service_models_have_them(request_):
    shape = wire.operation("sagemaker", request_.operation).input_shape
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
        ([*DEMO, "--model", "./folder"], "should be s3://bucket/prefix/"),
        ([*DEMO, "--env", "OPTION_X"], "should be NAME=value"),
        ([*DEMO, "--env-file", "/nowhere"], "/nowhere: No such file"),
        ([*DEMO, "--copies", "two"], "'two'"),
    ],
)
def test_bad_arguments_are_named(arguments, told, capsys):
    with pytest.raises(SystemExit):
        deploy.main(arguments)
    assert told in capsys.readouterr().err


def test_copies_need_components():
    assert "--instances says how many" in fails(*DEMO, "--no-components", "--copies", "2")


# Dry runs


def test_a_dry_run_prints_all_and_sends_nothing(capsys, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    deploy.main([*DEMO, "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("Create")] == [
        *("CreateModel", "CreateEndpointConfig", "CreateEndpoint", "CreateInferenceComponent"),
    ]


def test_the_documentation_shows_what_is_printed(capsys):
    pages = sorted((ROOT / "docs").rglob("sagemaker*.md"))
    text = "".join(page.read_text() for page in pages)
    shown = text.partition("$ scripts/sagemaker deploy demo \\\n")[2]
    arguments, _, output = shown.partition(" --dry-run\n")
    given = shlex.split(arguments.replace("\\\n", ""))
    deploy.main(["deploy", "demo", *given, "--dry-run"])
    printed = capsys.readouterr()
    assert output.startswith(f"{printed.err}{printed.out}```")


# Against moto, which has all but components


def test_an_endpoint_without_components_comes_and_goes(moto, monkeypatch, capsys):
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto)
    one = [*DEMO, "--no-components"]
    deploy.main(one)
    said = capsys.readouterr().err
    assert "1 x ml.g4dn.xlarge: billed from the endpoint's creation" in said
    assert [line for line in said.splitlines() if "created" in line] == [
        "Model demo: created",
        "EndpointConfig demo: created",
        "Endpoint demo: created",
    ]
    assert "Endpoint demo: InService" in said
    assert fails(*one) == "Model demo is there already; delete it, or take another name"
    client = boto3.client("sagemaker")
    deploy.remove(client, "Endpoint", ["demo"])
    deploy.remove(client, "EndpointConfig", ["demo"])
    deploy.remove(client, "Model", ["demo", "demo"])
    assert client.list_models()["Models"] == client.list_endpoints()["Endpoints"] == []


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


def described(kind, status, **more):
    return {f"{kind}Name": "demo", f"{kind}Status": status, **more}


def component(status, **more):
    made = deployment(asked(*DEMO))[-1].parameters
    runtime = {"DesiredCopyCount": 1, "CurrentCopyCount": int(status == "InService")}
    return {**made, "InferenceComponentStatus": status, "RuntimeConfig": runtime, **more}


def making(**answers):
    """What a deployment is answered that goes well but for what is said."""
    endpoint = described("Endpoint", "InService", EndpointConfigName="demo")
    return {
        "DescribeModel": [ABSENT],
        "DescribeEndpointConfig": [ABSENT],
        "DescribeEndpoint": [ABSENT, endpoint],
        "DescribeInferenceComponent": [ABSENT, component("InService")],
        **{
            f"Create{kind}": [{f"{kind}Arn": f"arn:{kind}"}]
            for kind in ("Model", "EndpointConfig", "Endpoint", "InferenceComponent")
        },
        **answers,
    }


def test_progress_is_reported_once_for_each_change(scripted, capsys):
    creating, ready = component("Creating"), component("InService")
    looks = [ABSENT, creating, creating, creating, creating, ready]
    scripted(**making(DescribeInferenceComponent=looks))
    deploy.main(DEMO)
    lines = [line.rpartition(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert [line for line in lines if line.startswith("InferenceComponent")] == [
        "InferenceComponent demo: Creating",
        "InferenceComponent demo: InService",
    ]


def test_a_failed_component_says_why(scripted):
    failed = component("Failed", FailureReason="no ping")
    scripted(**making(DescribeInferenceComponent=[ABSENT, failed]))
    told = fails(*DEMO)
    assert told.startswith("InferenceComponent demo: Failed (no ping)\n")
    assert "`aws logs tail /aws/sagemaker/InferenceComponents/demo` shows its log" in told
    assert "CUDA 13 needs --ami al2023-ami-sagemaker-inference-gpu-4-1" in told
    assert told.endswith("`delete demo` removes what was made; an endpoint is billed until then.")


def test_what_never_gets_ready_is_given_up(scripted, monkeypatch):
    monkeypatch.setattr(deploy, "PROVISION_S", 0.2 - 2 * 1800)
    scripted(**making(DescribeInferenceComponent=[ABSENT, component("Creating")]))
    assert "demo: not in service after 0 min" in fails(*DEMO)


def test_an_endpoint_without_capacity_has_no_log(scripted):
    failed = described("Endpoint", "Failed", EndpointConfigName="demo", FailureReason="capacity")
    scripted(**making(DescribeEndpoint=[ABSENT, failed]))
    told = fails(*DEMO)
    assert "Endpoint demo: Failed (capacity)" in told
    assert "log" not in told


def test_what_may_not_be_asked_is_no_absence(scripted):
    server = scripted(**making(DescribeEndpoint=[(400, "AccessDeniedException")]))
    assert "AccessDeniedException" in fails(*DEMO)
    assert not [name for name, _ in server.asked if name.startswith("Create")]


def test_what_is_there_is_left_alone(scripted):
    server = scripted(**making(DescribeEndpoint=[described("Endpoint", "InService")]))
    told = fails(*DEMO)
    assert told == "Endpoint demo is there already; delete it, or take another name"
    assert not [name for name, _ in server.asked if name.startswith("Create")]


def test_no_credentials_and_no_region_are_told(monkeypatch):
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    assert "region" in fails("delete", "demo")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert "credentials" in fails("delete", "demo")


def test_deletion_waits_for_what_is_being_made(scripted, capsys):
    creating = described("Endpoint", "Creating")
    deleting = described("Endpoint", "Deleting")
    server = scripted(
        ListInferenceComponents=[{"InferenceComponents": []}],
        DescribeEndpoint=[creating, described("Endpoint", "InService"), deleting, ABSENT],
        DeleteEndpoint=[{}],
        DescribeEndpointConfig=[ABSENT],
        DescribeModel=[{"ModelName": "demo"}],
        DeleteModel=[{}],
    )
    deploy.main(["delete", "demo"])
    deleted = [name for name, _ in server.asked if name.startswith("Delete")]
    assert deleted == ["DeleteEndpoint", "DeleteModel"]
    assert capsys.readouterr().err.splitlines() == [
        "Endpoint demo: deleting",
        "Model demo: deleting",
    ]


# Against the stand-in


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
        yield url, program


@pytest.fixture
def image(stand_in, monkeypatch):
    """The container's image; when the test is over, nothing may be left of its endpoint."""
    url, program = stand_in
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    yield f"process:{program}"
    deploy.main(["delete", "demo"])
    client = boto3.client("sagemaker")
    for kind in ("models", "endpoint_configs", "endpoints", "inference_components"):
        (listed,) = (it for it in getattr(client, f"list_{kind}")().values() if it == [])
        assert not listed


def invoked(component):
    answer = boto3.client("sagemaker-runtime").invoke_endpoint(
        EndpointName="demo", InferenceComponentName=component, Body=b'{"inputs": "Hello"}'
    )
    return json.load(answer["Body"])


def test_from_nothing_to_answers_and_back(image, capsys):
    deploy.main([*DEMO, "--image", image, "--env", "TEST_WORD=wörd"])
    said = capsys.readouterr().err
    assert "InferenceComponent demo: InService" in said
    answer = invoked("demo")
    assert answer["body"] == {"inputs": "Hello"}
    assert answer["environ"]["TEST_WORD"] == "wörd"

    client = boto3.client("sagemaker")
    client.create_inference_component(
        InferenceComponentName="a-french",  # before its base, by name
        EndpointName="demo",
        Specification={
            "BaseInferenceComponentName": "demo",
            "Container": {"ArtifactUrl": "s3://bucket/french.tar.gz"},
        },
    )
    deploy.in_service(client, "InferenceComponent", "a-french", 30)
    assert invoked("a-french")["choices"] == [{"text": "by french"}]

    capsys.readouterr()
    deploy.main(["delete", "demo"])
    assert capsys.readouterr().err.splitlines() == [
        "InferenceComponent a-french: deleting",
        "InferenceComponent demo: deleting",
        "Endpoint demo: deleting",
        "EndpointConfig demo: deleting",
        "Model demo: deleting",
    ]
    deploy.main(["delete", "demo"])  # again, with nothing there
    assert capsys.readouterr().err == ""


def test_a_container_that_fails_says_why(image):
    told = fails(*DEMO, "--image", image, "--env", "FAULTS=dies")
    assert "InferenceComponent demo: Failed" in told
    assert "no such model" in told


def test_an_interrupted_deployment_says_what_is_billed(image, monkeypatch, capsys):
    def interrupt(seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("time.sleep", interrupt)
        with pytest.raises(SystemExit) as ended:
            deploy.main([*DEMO, "--image", image])
    assert ended.value.code == 130
    assert "is billed until `delete demo`" in capsys.readouterr().err


def test_deploying_needs_no_engine():
    code = (
        "import sys, scripts.sagemaker_local.deploy; "
        "print({'vllm', 'torch', 'starlette', 'serving'} & sys.modules.keys())"
    )
    environ = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
