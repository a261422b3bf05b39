# SPDX-License-Identifier: Apache-2.0
"""Make a SageMaker endpoint from an image, and delete it again.

All that `deploy NAME` makes is called NAME: the model, the endpoint configuration, the endpoint and
its base inference component. Options that would stop the container are refused before anything is
sent. Region, credentials and endpoints (AWS_ENDPOINT_URL) are those that boto3 finds.
"""

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import botocore
from botocore.exceptions import BotoCoreError, ClientError

from lmi_config.options import settings
from lmi_config.options.declared import MODEL_STORE, Settings
from lmi_config.options.redaction import secret

VARIANT = "main"
AMI = "al2023-ami-sagemaker-inference-gpu-4-1"
"""Driver 580, for CUDA 13; the GPU image does not start with the platform's default."""

GPU_INSTANCE = re.compile(r"ml\.[gp]\d")
_USUAL = {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8}
SINGLE = ("g4dn", "g5", "g6", "g6e")
"""Families whose other sizes have one GPU."""
GPUS: Mapping[str, Mapping[str, int]] = {
    **dict.fromkeys(SINGLE, _USUAL),
    "p3": {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8},
    "p3dn": {"24xlarge": 8},
    "p4d": {"24xlarge": 8},
    "p4de": {"24xlarge": 8},
    "p5": {"4xlarge": 1, "48xlarge": 8},
    "p5e": {"48xlarge": 8},
    "p5en": {"48xlarge": 8},
    "p6-b200": {"48xlarge": 8},
}
"""GPUs of an instance, by family and size (aws.amazon.com/ec2/instance-types)."""

MAX_ENTRIES, MAX_BYTES, MAX_ALL = 100, 1024, 32 * 1024
"""CreateModel's limits on the environment: variables, bytes of a name or value, bytes in total."""

PENDING = ("Creating", "Updating", "SystemUpdating", "RollingBack")
ABSENT = ("ValidationException", "ResourceNotFound")  # Describe's errors for what is not there
POLL_S = 10.0
PROVISION_S = 1800  # for instances, beside what the model and the container may take
DELETE_S = PROVISION_S + 2 * 3600


class Failed(Exception):
    """A failure and its fix."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Request(NamedTuple):
    """One call of SageMaker's API, as boto3 names things."""

    operation: str
    parameters: dict[str, Any]

    @property
    def kind(self) -> str:
        return self.operation.removeprefix("Create")

    def shown(self) -> str:
        """As `--dry-run` prints it, without the values of secrets."""
        shown = json.dumps(_hidden(self.parameters), indent=2, ensure_ascii=False)
        return f"{self.operation} {shown}"


def _hidden(value: Any) -> Any:
    if isinstance(value, list):
        return [_hidden(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {name: "(hidden)" if secret(name) else _hidden(each) for name, each in value.items()}


# Decisions: what is sent, and what is refused before anything is.


def deployment(options: argparse.Namespace) -> list[Request]:
    """The requests that make the endpoint, in order. Raises Failed for GPUs that are not there."""
    name = options.name
    gpu = bool(GPU_INSTANCE.match(options.instance_type))
    timeouts = {
        "ModelDataDownloadTimeoutInSeconds": options.startup_timeout,
        "ContainerStartupHealthCheckTimeoutInSeconds": options.startup_timeout,
    }
    container = {"Image": options.image, "Environment": environment(options)}
    if artifact := _artifact(options):
        archive = artifact.endswith(".tar.gz")
        container["ModelDataSource"] = {
            "S3DataSource": {
                "S3Uri": artifact if archive or artifact.endswith("/") else f"{artifact}/",
                "S3DataType": "S3Object" if archive else "S3Prefix",
                "CompressionType": "Gzip" if archive else "None",
            }
        }
    model = {"ModelName": name, "ExecutionRoleArn": options.role, "PrimaryContainer": container}
    variant = {
        "VariantName": VARIANT,
        "InstanceType": options.instance_type,
        "InitialInstanceCount": options.instances,
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
        **timeouts,
    }
    if ami := options.ami or (AMI if gpu else None):
        variant["InferenceAmiVersion"] = ami
    config: dict[str, Any] = {"EndpointConfigName": name, "ProductionVariants": [variant]}
    requests = [
        Request("CreateModel", model),
        Request("CreateEndpointConfig", config),
        Request("CreateEndpoint", {"EndpointName": name, "EndpointConfigName": name}),
    ]
    if not options.components:
        variant["ModelName"] = name
        return requests
    config["ExecutionRoleArn"] = options.role
    compute = {"MinMemoryRequiredInMb": options.memory_mb}
    if gpus := _gpus(options) if options.gpus is None else options.gpus:
        compute["NumberOfAcceleratorDevicesRequired"] = gpus
    base = {
        "InferenceComponentName": name,
        "EndpointName": name,
        "VariantName": VARIANT,
        "Specification": {
            "ModelName": name,
            "StartupParameters": timeouts,
            "ComputeResourceRequirements": compute,
        },
        "RuntimeConfig": {"CopyCount": options.copies},
    }
    return [*requests, Request("CreateInferenceComponent", base)]


def _gpus(options: argparse.Namespace) -> int:
    """GPUs that one copy needs: as many as it is spread over, which are by default its share of the
    instance's. Raises Failed if the number is unknown, or the instance has fewer.
    """
    instance = options.instance_type
    if not GPU_INSTANCE.match(instance):
        return 0
    _, family, size = (*instance.split("."), "")[:3]
    here = GPUS.get(family, {}).get(size, 1 if family in SINGLE else 0)
    if not here:
        raise Failed(f"how many GPUs {instance} has is not known; say with --gpus how many to use")
    wanted = _settings(environment(options))
    degree = wanted.tensor_parallel_degree
    each: int = wanted.pipeline_parallel_degree * wanted.engine.get("data_parallel_size", 1)
    if degree == "max":
        neighbours: int = math.ceil(options.copies / options.instances)
        return max(here // neighbours, 1)
    if degree * each > here:
        raise Failed(
            f"a copy is spread over {degree * each} GPUs, and {instance} has {here}; choose a "
            "larger instance, or a lower OPTION_TENSOR_PARALLEL_DEGREE"
        )
    return degree * each


def _settings(environment: Mapping[str, str]) -> Settings:
    try:
        return settings.merged(settings.from_environ(environment), {})
    except settings.SettingsError as error:
        raise Failed(str(error)) from None


def environment(options: argparse.Namespace) -> dict[str, str]:
    """The container's environment variables."""
    hub = {"HF_MODEL_ID": options.model} if options.model and not _artifact(options) else {}
    return {**options.env_file, **dict(options.env), **hub}


def _artifact(options: argparse.Namespace) -> str | None:
    """The model's files on S3: a prefix or an archive."""
    model: str = options.model or ""
    return model if model.startswith("s3://") else None


def notes(environment: Mapping[str, str], artifact: str | None) -> list[str]:
    """Notes about a container's environment. Raises Failed if it cannot be used.

    artifact: where the model's files come from when they are not named in the environment.
    """
    sizes = {name: (len(name.encode()), len(value.encode())) for name, value in environment.items()}
    faults = [
        f"{name}: longer than {MAX_BYTES:,} bytes"
        for name, size in sizes.items()
        if max(size) > MAX_BYTES
    ]
    if len(sizes) > MAX_ENTRIES:
        faults.append(f"{len(sizes)} variables, and SageMaker takes {MAX_ENTRIES}")
    if (total := sum(map(sum, sizes.values()))) > MAX_ALL:
        faults.append(f"{total:,} bytes of variables, and SageMaker takes {MAX_ALL:,}")
    if faults:
        fix = "serving.properties or slipway.yaml beside the model can hold it"
        raise Failed("\n".join(f"{fault}; {fix}" for fault in faults))
    read = _settings(environment)
    found = [*read.notes]
    if read.model_id == MODEL_STORE and not artifact:
        found.append("no model is named, so the image has to bring one")
    if secrets := [name for name in environment if secret(name)]:
        found.append(
            f"{', '.join(secrets)}: whoever may describe the model can read it; if it is a secret, "
            "let the role give the container what it needs, or put the model on S3"
        )
    return found


# The rim: what is sent to SageMaker, and waited for.


def describe(client: Any, kind: str, name: str) -> dict[str, Any] | None:
    """Describe's answer, or None."""
    call = getattr(client, botocore.xform_name(f"Describe{kind}"))
    try:
        found: dict[str, Any] = call(**{f"{kind}Name": name})
    except ClientError as error:
        if error.response["Error"]["Code"] in ABSENT:
            return None
        raise
    return found


def looks(limit_s: float) -> Iterator[float]:
    """Seconds since the first look, until there are limit_s of them."""
    began = time.monotonic()
    while (elapsed := time.monotonic() - began) < limit_s:
        yield elapsed
        time.sleep(POLL_S)


def in_service(client: Any, kind: str, name: str, limit_s: float) -> None:
    """Wait until an endpoint or a component is in service. boto3 has no waiter for components."""
    shown = None
    for elapsed in looks(limit_s):
        found = describe(client, kind, name)
        status = found[f"{kind}Status"] if found else "deleted meanwhile"
        if status != shown:
            say(f"{kind} {name}: {status}, {elapsed:.0f} s")
            shown = status
        if status == "InService":
            return
        if status not in PENDING:
            reason = found.get("FailureReason", "without a reason") if found else "not by us"
            raise Failed(f"{kind} {name}: {status} ({reason})")
    raise Failed(f"{kind} {name}: not in service after {limit_s / 60:.0f} min")


def remove(client: Any, kind: str, names: Iterable[str]) -> None:
    """Delete them all, and wait until they have gone. A missing resource is not an error."""
    left, requested = list(names), set[str]()
    for _ in looks(DELETE_S):
        for name in left[:]:
            found = describe(client, kind, name)
            status = (found or {}).get(f"{kind}Status")
            if found and name not in requested and status not in (*PENDING, "Deleting"):
                say(f"{kind} {name}: deleting")
                getattr(client, botocore.xform_name(f"Delete{kind}"))(**{f"{kind}Name": name})
                requested.add(name)
            if not found or not status:  # what has no status is deleted at once
                left.remove(name)
        if not left:
            return
    raise Failed(f"{kind} {', '.join(left)}: still there after {DELETE_S / 60:.0f} min")


def deploy(options: argparse.Namespace) -> None:
    name = options.name
    if options.copies > 1 and not options.components:
        raise Failed("without components each instance has one copy: --instances says how many")
    for note in notes(environment(options), _artifact(options)):
        say(f"note: {note}")
    requests = deployment(options)
    say(
        f"{options.instances} x {options.instance_type}: billed from the endpoint's creation until "
        f"`delete {name}`, used or not"
    )
    if options.dry_run:
        for request in requests:
            print(request.shown())
        return
    client: Any = boto3.client("sagemaker")
    for request in requests:
        if describe(client, request.kind, name):
            raise Failed(f"{request.kind} {name} is there already; delete it, or take another name")
    try:
        for request in requests:
            getattr(client, botocore.xform_name(request.operation))(**request.parameters)
            say(f"{request.kind} {name}: created")
            if request.kind in ("Endpoint", "InferenceComponent"):
                in_service(client, request.kind, name, PROVISION_S + 2 * options.startup_timeout)
    except (Failed, ClientError, BotoCoreError) as error:
        # The last one has the container; an endpoint for components has none, and no log.
        log = log_hint(request.kind, name) if request is requests[-1] else ""
        left = f"`delete {name}` removes what was made; an endpoint is billed until then."
        raise Failed(f"{error}\n{log}{left}") from None


def log_hint(kind: str, name: str) -> str:
    return (
        f"`aws logs tail /aws/sagemaker/{kind}s/{name}` shows its log. Without one the container "
        f"has not started: the driver is too old for the image (CUDA 13 needs --ami {AMI}), "
        "or the role may not pull the image.\n"
    )


def delete(options: argparse.Namespace) -> None:
    name = options.name
    client: Any = boto3.client("sagemaker")
    pages = client.get_paginator("list_inference_components").paginate(EndpointNameEquals=name)
    names = [it["InferenceComponentName"] for page in pages for it in page["InferenceComponents"]]
    found = {each: describe(client, "InferenceComponent", each) for each in names}
    adapters = [
        each
        for each, described in found.items()
        if described and described["Specification"].get("BaseInferenceComponentName")
    ]
    remove(client, "InferenceComponent", adapters)  # which their bases may not go before
    remove(client, "InferenceComponent", [each for each in names if each not in adapters])
    for kind in ("Endpoint", "EndpointConfig", "Model"):
        remove(client, kind, [name])


# The command line.


def _model(text: str) -> str:
    if not re.fullmatch(r"s3://[^/]+/.*|\w[\w.-]*(/\w[\w.-]*)?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r}: should be s3://bucket/prefix/, s3://bucket/model.tar.gz or a hub id"
        )
    return text


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[a-zA-Z_]\w*", name, re.ASCII):
        raise argparse.ArgumentTypeError(f"{name!r}: should be NAME=value")
    return name, value


def _env_file(text: str) -> dict[str, str]:
    try:
        lines = [line.strip() for line in Path(text).read_text().splitlines()]
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    return dict(_assignment(line) for line in lines if line and not line.startswith("#"))


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog="scripts/sagemaker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    making = commands.add_parser("deploy", help="make an endpoint, and wait until it is in service")
    making.set_defaults(run=deploy)
    add = making.add_argument
    add("name", help="of the endpoint and all that belongs to it")
    add("--image", required=True, help="the container image, in ECR")
    add("--role", required=True, help="ARN of the role that the endpoint runs under")
    add("--instance-type", required=True, help="like ml.g6.xlarge")
    add("--instances", type=int, default=1, help="(default: 1)")
    add("--model", type=_model, help="s3:// prefix or .tar.gz, or a hub id")
    add("--env", type=_assignment, action="append", default=[], help="OPTION_X=value, repeatable")
    add("--env-file", type=_env_file, default={}, help="a file with NAME=value lines")
    add(
        "--gpus",
        type=int,
        help="of a copy (default: as many as OPTION_TENSOR_PARALLEL_DEGREE says, or its share of "
        "all that the instance has)",
    )
    add("--memory-mb", type=int, default=4096, help="MiB that a copy is sure of (default: 4096)")
    add("--copies", type=int, default=1, help="of the container (default: 1)")
    add("--ami", help=f"inference AMI version (default: {AMI} on GPU instances)")
    add(
        "--startup-timeout",
        type=int,
        default=1800,
        help="seconds for the model's files, and as many for the container (default: 1800)",
    )
    add(
        "--components",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="serve the model as an inference component, which adapters need (default: yes)",
    )
    add("--dry-run", action="store_true", help="check, print all requests, send nothing")

    ending = commands.add_parser("delete", help="delete an endpoint and all that belongs to it")
    ending.set_defaults(run=delete)
    ending.add_argument("name")
    return whole


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except (Failed, ClientError, BotoCoreError) as error:
        sys.exit(f"{error}")
    except KeyboardInterrupt:
        say(f"interrupted: what was begun goes on, and is billed until `delete {options.name}`")
        sys.exit(130)


if __name__ == "__main__":
    main()
