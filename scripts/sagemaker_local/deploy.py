"""A SageMaker endpoint, from an image to answers and back.

What `deploy NAME` makes bears that name: the model, the endpoint configuration, the endpoint and
its base inference component. Every command can be broken off and given again: it goes on with what
is there. Region, credentials and endpoints (AWS_ENDPOINT_URL) are those that boto3 finds.
"""

import argparse
import contextlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import botocore
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, EventStreamError

from lmi_config.options import settings
from lmi_config.options.declared import MODEL_STORE, Settings
from lmi_config.options.redaction import secret

VARIANT = "main"
AMI = "al2023-ami-sagemaker-inference-gpu-4-1"
"""Driver 580, for CUDA 13; on the platform's default the GPU image does not start."""

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
"""What CreateModel takes as environment: variables, bytes of a name or value, bytes in all."""

PENDING = ("Creating", "Updating", "SystemUpdating", "RollingBack")
ABSENT = ("ValidationException", "ResourceNotFound")  # as botocore's waiters read Describe's errors
PROVISION_S = 1800  # for instances, beside what the model and the container may take
LONGEST_S = PROVISION_S + 2 * 3600
TOLD_S = 60  # seconds between two lines of progress where nothing changes
LOG_LINES = 15
ANSWER_S = 490  # a little more than the 8 minutes that the platform gives a stream


class Failed(Exception):
    """What went wrong, and what to do."""


def say(text: str) -> None:
    """Tell the user; what a program may want to read is printed."""
    print(text, file=sys.stderr, flush=True)


class Request(NamedTuple):
    """One call of an AWS API, as boto3 names things."""

    operation: str
    parameters: dict[str, Any]
    service: str = "sagemaker"

    def shown(self) -> str:
        """As `--dry-run` prints it, without the values of secrets."""
        indent = 2 if self.operation.startswith(("Create", "Update", "Invoke")) else None
        told = json.dumps(_hidden(self.parameters), indent=indent, ensure_ascii=False)
        return f"{self.service} {self.operation} {told}"


def _hidden(value: Any) -> Any:
    if isinstance(value, list):
        return [_hidden(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {name: "(hidden)" if secret(name) else _hidden(each) for name, each in value.items()}


def _made(create: Request) -> tuple[str, str]:
    """What a Create request makes: kind and name."""
    kind = create.operation.removeprefix("Create")
    return kind, create.parameters[f"{kind}Name"]


def describe(kind: str, name: str) -> Request:
    return Request(f"Describe{kind}", {f"{kind}Name": name})


def delete(kind: str, name: str) -> Request:
    return Request(f"Delete{kind}", {f"{kind}Name": name})


def components(endpoint: str) -> Request:
    return Request("ListInferenceComponents", {"EndpointNameEquals": endpoint})


def quotas(operation: str = "ListServiceQuotas") -> Request:
    return Request(operation, {"ServiceCode": "sagemaker"}, "service-quotas")


def log_streams(group: str) -> Request:
    newest = {"orderBy": "LastEventTime", "descending": True, "limit": 1}
    return Request("DescribeLogStreams", {"logGroupName": group, **newest}, "logs")


def log_events(group: str, stream: str) -> Request:
    named = {"logGroupName": group, "logStreamName": stream}
    return Request("GetLogEvents", {**named, "limit": LOG_LINES}, "logs")


def deployment(options: argparse.Namespace) -> list[Request]:
    """What makes the endpoint that `deploy` was asked for, in order."""
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
    model = {
        "ModelName": name,
        "ExecutionRoleArn": options.role,
        "PrimaryContainer": container,
    }
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
    if options.components:
        config["ExecutionRoleArn"] = options.role
    else:
        variant["ModelName"] = name
    compute = {"MinMemoryRequiredInMb": options.memory_mb}
    if options.components and (gpus := _gpus(options) if options.gpus is None else options.gpus):
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
    return [
        Request("CreateModel", model),
        Request("CreateEndpointConfig", config),
        Request("CreateEndpoint", {"EndpointName": name, "EndpointConfigName": name}),
        *([Request("CreateInferenceComponent", base)] if options.components else []),
    ]


def _gpus(options: argparse.Namespace) -> int:
    """GPUs that one copy needs: as many as it is spread over, which are by default its share of
    the instance's. Raises Failed where that is not known, or the instance has fewer.
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


def adapter(endpoint: str, name: str, artifact: str) -> Request:
    """What makes an adapter component on the endpoint's base component."""
    specification = {
        "BaseInferenceComponentName": endpoint,
        "Container": {"ArtifactUrl": artifact},
    }
    parameters = {
        "InferenceComponentName": name,
        "EndpointName": endpoint,
        "Specification": specification,
    }
    return Request("CreateInferenceComponent", parameters)


def update(made: Request) -> Request:
    """What turns the component that is there into the one that `made` asks for."""
    kept = {name: made.parameters[name] for name in ("InferenceComponentName", "Specification")}
    return Request("UpdateInferenceComponent", kept)


def invocation(endpoint: str, component: str | None, body: bytes, stream: bool) -> Request:
    operation = "InvokeEndpointWithResponseStream" if stream else "InvokeEndpoint"
    parameters: dict[str, Any] = {"EndpointName": endpoint, "ContentType": "application/json"}
    if component:
        parameters["InferenceComponentName"] = component
    return Request(operation, {**parameters, "Body": body}, "sagemaker-runtime")


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """What a Create request asks for and Describe's answer has otherwise, a line for each."""
    runtime = found.get("RuntimeConfig", {})
    if "DesiredCopyCount" in runtime:  # what is created as CopyCount
        found = {**found, "RuntimeConfig": {"CopyCount": runtime["DesiredCopyCount"]}}
    return [*_differing(wanted, found, "")]


# The platform's answers have defaults of its own. Of what is not asked for, only these count.
_OPTIONAL = frozenset({"ModelDataSource", "ModelName", "NumberOfAcceleratorDevicesRequired"})


def _differing(wanted: Any, found: Any, path: str) -> Iterator[str]:
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        whole = path.endswith(".Environment")
        names = wanted.keys() | (found.keys() if whole else found.keys() & _OPTIONAL)
        for name in sorted(names):
            yield from _differing(wanted.get(name), found.get(name), f"{path}.{name}")
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for number, (want, there) in enumerate(zip(wanted, found, strict=True)):
            yield from _differing(want, there, f"{path}[{number}]")
    elif (wanted or None) != (found or None):  # nothing may be told as empty or not at all
        if secret(path.rpartition(".")[2]):
            yield f"{path[1:]} (hidden)"
        else:
            told = ["nothing" if each is None else each for each in (found, wanted)]
            yield f"{path[1:]}: {told[0]}, not {told[1]}"


def notes(environment: Mapping[str, str], artifact: str | None) -> list[str]:
    """What to know of a container's environment. Raises Failed where it cannot be used.

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
    told = [*read.notes]
    if read.model_id == MODEL_STORE and not artifact:
        told.append("no model is named, so the image has to bring one")
    if secrets := [name for name in environment if secret(name)]:
        told.append(
            f"{', '.join(secrets)}: whoever may describe the model can read it; if it is a secret, "
            "let the role give the container what it needs, or put the model on S3"
        )
    return told


def last_words(lines: Sequence[str]) -> list[str]:
    """Why the container failed, from its last log line that is JSON and has a reason."""
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            if isinstance(said, dict) and said.get("reason"):
                stage = f" ({said['stage']})" if said.get("stage") else ""
                fix = f"; {said['fix']}" if said.get("fix") else ""
                return [f"the container says{stage}: {said['reason']}{fix}"]
    return []


class Aws:
    """The rim: sends requests, and waits. poll_s: seconds between two looks."""

    def __init__(self, poll_s: float) -> None:
        self._clients: dict[str, Any] = {}
        self._poll_s = poll_s

    def _client(self, service: str) -> Any:
        if service not in self._clients:
            config = None
            if service == "sagemaker-runtime":
                # A slow request is still computed when its client gives up: no second one.
                config = Config(read_timeout=ANSWER_S, retries={"total_max_attempts": 1})
            client: Any = boto3.client
            self._clients[service] = client(service, config=config)
        return self._clients[service]

    def send(self, request: Request) -> dict[str, Any]:
        call = getattr(self._client(request.service), botocore.xform_name(request.operation))
        answer: dict[str, Any] = call(**request.parameters)
        return answer

    def pages(self, request: Request, key: str) -> Iterator[dict[str, Any]]:
        """The entries of a list."""
        client = self._client(request.service)
        paginator = client.get_paginator(botocore.xform_name(request.operation))
        for page in paginator.paginate(**request.parameters):
            yield from page[key]

    def found(self, kind: str, name: str) -> dict[str, Any] | None:
        """What Describe says, or None where there is no such thing."""
        try:
            return self.send(describe(kind, name))
        except ClientError as error:
            if _code(error) in ABSENT:
                return None
            raise

    def looks(self, limit_s: float) -> Iterator[float]:
        """Seconds since the first look, until there are limit_s of them."""
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < limit_s:
            yield elapsed
            time.sleep(self._poll_s)

    def ensure(self, create: Request, limit_s: float, log_group: str | None = None) -> None:
        """Create what is not there yet, and wait until it is in service.

        Raises Failed where it is there with another definition, or as `settle` does.
        """
        kind, name = _made(create)
        there = self.found(kind, name)
        if there is None:
            self.send(create)
            say(f"{kind} {name}: created")
        elif differing := differences(create.parameters, there):
            in_place = ""
            if kind != "InferenceComponent":
                in_place = (
                    " (UpdateEndpoint changes an endpoint in place, but until it has, there is a "
                    "second fleet, with its costs and its quota.)"
                )
            raise Failed(
                f"{kind} {name} is there, but is not what is asked for:\n"
                + "".join(f"  {line}\n" for line in differing)
                + f"Nothing was changed. Delete it first, or take another name.{in_place}"
            )
        else:
            say(f"{kind} {name}: there already")
        if kind in ("Endpoint", "InferenceComponent"):
            self.settle(kind, name, limit_s, log_group)

    def settle(self, kind: str, name: str, limit_s: float, log_group: str | None) -> dict[str, Any]:
        """Wait until it is in service. Returns what Describe then says.

        Raises Failed where it takes longer than limit_s, or fails: with the end of the log in
        log_group, where a container is part of it.
        """
        told, told_at = "", 0.0
        for elapsed in self.looks(limit_s):
            found = self.found(kind, name)
            if found is None:
                raise Failed(f"{kind} {name}: someone has deleted it")
            problem, status = progress(kind, found), found[f"{kind}Status"]
            if status not in (*PENDING, "InService"):
                break
            if problem != told or elapsed - told_at >= TOLD_S:
                say(f"{kind} {name}: {problem}, {elapsed:.0f} s")
                told, told_at = problem, elapsed
            if status == "InService":
                return found
        else:
            problem = f"not in service after {limit_s / 60:.0f} min"
        log = f"\n{self.log_end(log_group)}" if log_group else ""
        raise Failed(f"{kind} {name}: {problem}{log}")

    def log_end(self, group: str) -> str:
        """The end of the newest stream of a log group, or why there is nothing to show."""
        try:
            streams = self.send(log_streams(group))["logStreams"]
            if streams:
                stream = streams[0]["logStreamName"]
                events = self.send(log_events(group, stream))["events"]
                lines = [event["message"].rstrip() for event in events]
                told = [f"the end of {group}, {stream}:", *(f"  {line}" for line in lines)]
                return "\n".join([*told, *last_words(lines)])
        except (ClientError, BotoCoreError) as error:
            if not isinstance(error, ClientError) or _code(error) != "ResourceNotFoundException":
                return f"its log {group} cannot be read: {error}"
        return (
            f"there is no log {group}: the container has not begun. Usually the driver of the "
            f"instance does not suit the image (CUDA 13 needs --ami {AMI}), or the role may not "
            "pull the image"
        )

    def remove(self, kind: str, names: Iterable[str]) -> None:
        """Delete them all, and wait until they have gone. What has gone already is no fault."""
        left, asked, refused = list(names), set[str](), set[str]()
        for _ in self.looks(LONGEST_S):
            for name in left[:]:
                found = self.found(kind, name)
                status = (found or {}).get(f"{kind}Status")
                if found is None:
                    say(f"{kind} {name}: gone")
                    left.remove(name)
                elif name in asked:
                    continue
                elif not self._deleted(kind, name, status):
                    if name not in refused:
                        say(f"{kind} {name}: {status}, cannot be deleted yet")
                    refused.add(name)
                else:
                    say(f"{kind} {name}: deleting")
                    asked.add(name)
                    if status is None:  # it is gone at once
                        left.remove(name)
            if not left:
                return
        raise Failed(f"{kind} {', '.join(left)}: still there after {LONGEST_S / 60:.0f} min")

    def _deleted(self, kind: str, name: str, status: str | None) -> bool:
        """Have it deleted. Returns False where that cannot be yet, as while an endpoint is made."""
        try:
            if status != "Deleting":
                self.send(delete(kind, name))
        except ClientError as error:
            if status not in PENDING or _code(error) != "ValidationException":
                raise
            return False
        return True


def progress(kind: str, found: Mapping[str, Any]) -> str:
    """Its status, copies and reason."""
    runtime = found.get("RuntimeConfig", {})
    copies = ""
    if "DesiredCopyCount" in runtime:
        copies = f", {runtime.get('CurrentCopyCount', 0)} of {runtime['DesiredCopyCount']} copies"
    reason = f" ({found['FailureReason']})" if found.get("FailureReason") else ""
    return f"{found[f'{kind}Status']}{copies}{reason}"


def _code(error: ClientError) -> str:
    code: str = error.response["Error"]["Code"]
    return code


def log_group(kind: str, name: str) -> str:
    return f"/aws/sagemaker/{kind}s/{name}"


def check_quota(aws: Aws, instance_type: str, instances: int) -> None:
    """Say where the account may have too few instances of the type. Not to be told is no fault."""
    wanted = f"{instance_type} for endpoint usage"
    try:
        # The first lists only what was applied for, the second what holds otherwise.
        for operation in ("ListServiceQuotas", "ListAWSDefaultServiceQuotas"):
            for quota in aws.pages(quotas(operation), "Quotas"):
                if quota["QuotaName"] == wanted:
                    if quota["Value"] < instances:
                        say(
                            f"warning: the quota for {wanted} is {quota['Value']:.0f}, and "
                            f"{instances} are asked for; apply for more at Service Quotas"
                        )
                    return
        say(f"note: no quota is listed for {wanted}")
    except (ClientError, BotoCoreError) as error:
        say(f"note: the quota for {wanted} is not known: {error}")


def print_requests(requests: Iterable[Request]) -> None:
    for request in requests:
        print(request.shown())


def deploy(options: argparse.Namespace) -> None:
    name = options.name
    if options.copies > 1 and not options.components:
        raise Failed("without components each instance has one copy: --instances says how many")
    requests = deployment(options)
    # With components, the endpoint alone has no container, and no log.
    group = log_group("InferenceComponent" if options.components else "Endpoint", name)
    for note in notes(environment(options), _artifact(options)):
        say(f"note: {note}")
    say(
        f"{options.instances} x {options.instance_type}: billed from the endpoint's creation until "
        f"`delete {name}`, used or not"
    )
    if options.dry_run:
        print_requests([quotas(), quotas("ListAWSDefaultServiceQuotas")])
        for create in requests:
            print_requests([describe(*_made(create)), create])
        print("and where it fails:")
        print_requests([log_streams(group), log_events(group, "…")])
        return
    aws = Aws(options.poll)
    if aws.found("Endpoint", name) is None:
        check_quota(aws, options.instance_type, options.instances)
    for create in requests:
        limit_s = PROVISION_S + 2 * options.startup_timeout
        try:
            aws.ensure(create, limit_s, group if create is requests[-1] else None)
        except (Failed, ClientError) as failed:
            if aws.found("Endpoint", name) is None:
                raise
            again = f" `delete {name} --keep-endpoint` clears it for another try on its instances."
            raise Failed(
                f"{failed}\nThe endpoint is there, and may be billed, until `delete {name}`."
                f"{again if options.components else ''}"
            ) from None
    flag = "" if options.components else " --no-components"
    say(f"ready: scripts/sagemaker invoke {name}{flag} 'The capital of France is'")


def add_adapter(options: argparse.Namespace) -> None:
    kind, endpoint, name = "InferenceComponent", options.endpoint, options.name
    create = adapter(endpoint, name, options.artifact)
    if options.dry_run:
        print_requests([describe(kind, endpoint), describe(kind, name), create])
        print("or, where it is there with another artifact:")
        print_requests([update(create)])
        return
    aws = Aws(options.poll)
    base = aws.found(kind, endpoint)
    if base is None or base["EndpointName"] != endpoint:
        raise Failed(f"there is no base component {endpoint}; `deploy {endpoint}` makes one")
    group = log_group(kind, endpoint)
    there = aws.found(kind, name)
    if there and there[f"{kind}Status"] in PENDING:
        there = aws.settle(kind, name, PROVISION_S, group)
    differing = differences(create.parameters, there) if there else []
    if [line.partition(":")[0] for line in differing] != ["Specification.Container.ArtifactUrl"]:
        aws.ensure(create, PROVISION_S, group)
        return
    aws.send(update(create))
    say(f"{kind} {name}: updating to {options.artifact}")
    there = aws.settle(kind, name, PROVISION_S, group)
    if differences(create.parameters, there):
        raise Failed(f"{kind} {name}: the update failed, and was taken back\n{aws.log_end(group)}")


def invoke(options: argparse.Namespace) -> None:
    if options.prompt is None:
        body = sys.stdin.buffer.read()
    else:
        body = json.dumps({"inputs": options.prompt, "stream": options.stream}).encode()
    component = (options.component or options.endpoint) if options.components else None
    request = invocation(options.endpoint, component, body, options.stream)
    if options.dry_run:
        shown = {**request.parameters, "Body": body.decode(errors="replace")}
        print_requests([request._replace(parameters=shown)])
        return
    try:
        answer = Aws(options.poll).send(request)
        with contextlib.closing(answer["Body"]) as body:
            # Parts end anywhere, also within a character: they are put together as bytes.
            parts = (part["PayloadPart"]["Bytes"] for part in body)
            chunk = b""
            for chunk in parts if options.stream else [body.read()]:
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
        if not chunk.endswith(b"\n"):
            print()
    except EventStreamError as error:
        raise Failed(f"\nthe stream was cut: {error.response['Error']['Message']}") from None
    except ClientError as error:
        raise Failed(_refusal(error)) from None


def _refusal(error: ClientError) -> str:
    response: Any = error.response
    if _code(error) == "ModelError":
        status = response.get("OriginalStatusCode") or "nothing: it took too long, or died"
        log = f"\nits log: {response['LogStreamArn']}" if response.get("LogStreamArn") else ""
        return f"the container answered {status}\n{response.get('OriginalMessage', '')}{log}"
    if _code(error) == "ValidationError":
        hint = "an endpoint without components wants --no-components, any other a component's name"
        return f"{error}\n({hint})"
    return str(error)


def status(options: argparse.Namespace) -> None:
    name = options.name
    if options.dry_run:
        print_requests([describe("Endpoint", name), describe("EndpointConfig", name)])
        print_requests([components(name)])
        print("and for each component that is listed:")
        print_requests([describe("InferenceComponent", "…")])
        return
    aws = Aws(options.poll)
    found = aws.found("Endpoint", name)
    if found is None:
        raise Failed(f"there is no endpoint {name}")
    print(f"endpoint {name}: {progress('Endpoint', found)}")
    config = aws.found("EndpointConfig", found["EndpointConfigName"]) or {}
    types = {
        it["VariantName"]: it.get("InstanceType") for it in config.get("ProductionVariants", ())
    }
    for variant in found.get("ProductionVariants", ()):
        count = variant.get("CurrentInstanceCount", 0)
        desired = variant.get("DesiredInstanceCount", count)
        kind = types.get(variant["VariantName"]) or "instances"
        print(f"  {variant['VariantName']}: {count} of {desired} x {kind}, billed until deleted")
    for component, described in _components(aws, name).items():
        base = _base(described)
        role = f"adapter of {base}" if base else "base"
        print(f"  {component} ({role}): {progress('InferenceComponent', described)}")


def _components(aws: Aws, endpoint: str) -> dict[str, dict[str, Any]]:
    """The endpoint's components, those with adapters first: name → what Describe says."""
    listed = aws.pages(components(endpoint), "InferenceComponents")
    names = sorted(it["InferenceComponentName"] for it in listed)
    found = [(name, aws.found("InferenceComponent", name)) for name in names]
    there = [(name, described) for name, described in found if described]
    return dict(sorted(there, key=lambda it: _base(it[1]) or ""))


def _base(described: Mapping[str, Any]) -> str | None:
    """The base component of an adapter's component."""
    base: str | None = described["Specification"].get("BaseInferenceComponentName")
    return base


def delete_all(options: argparse.Namespace) -> None:
    name = options.name
    rest = [("Endpoint", name), ("EndpointConfig", name), ("Model", name)]
    if options.component:
        rest = []
    elif options.keep_endpoint:
        rest = [("Model", name)]
    if options.dry_run:
        print_requests([components(name)])
        print("and for each component that is listed, adapters first:")
        listed = ("InferenceComponent", options.component or "…")
        for each in [listed, *rest]:
            print_requests([describe(*each), delete(*each)])
        return
    aws = Aws(options.poll)
    found = _components(aws, name)
    if options.keep_endpoint and not found and _without_components(aws, name):
        raise Failed(f"endpoint {name} has no components; it needs its model")
    chosen = [it for it in found if options.component in (None, it)]
    aws.remove("InferenceComponent", [it for it in chosen if _base(found[it])])
    aws.remove("InferenceComponent", [it for it in chosen if not _base(found[it])])
    for kind, each in rest:
        aws.remove(kind, [each])


def _without_components(aws: Aws, endpoint: str) -> bool:
    config = aws.found("EndpointConfig", endpoint) or {}
    return any("ModelName" in variant for variant in config.get("ProductionVariants", ()))


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", text) or len(text) > 63:
        raise argparse.ArgumentTypeError(f"{text!r}: letters, digits and inner hyphens, at most 63")
    return text


def _archive(text: str) -> str:
    if not re.fullmatch(r"s3://[^/]+/.+\.tar\.gz", text):
        raise argparse.ArgumentTypeError(f"{text!r}: should be like s3://bucket/adapter.tar.gz")
    return text


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


def _between(low: int, high: int = sys.maxsize) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            most = f", at most {high}" if high < sys.maxsize else ""
            raise argparse.ArgumentTypeError(f"{text!r}: a whole number, at least {low}{most}")
        return int(text)

    return number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: a number above 0")
    return seconds


def parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--dry-run", action="store_true", help="print all requests, send nothing")
    shared.add_argument("--endpoint-url", help="instead of AWS, like AWS_ENDPOINT_URL")
    shared.add_argument(
        "--poll", type=_seconds, default=10, help="seconds between looks (default: 10)"
    )
    whole = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = whole.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=help, parents=[shared])
        made.set_defaults(run=run)
        return made

    it = command("deploy", deploy, "make an endpoint, and wait until it answers")
    it.add_argument("name", type=_name, help="of the endpoint and all that belongs to it")
    it.add_argument("--image", required=True, help="the container image, in ECR")
    it.add_argument("--role", required=True, help="ARN of the role that the endpoint runs under")
    it.add_argument("--instance-type", required=True, help="like ml.g6.xlarge")
    it.add_argument("--instances", type=_between(1), default=1, help="(default: 1)")
    it.add_argument("--model", type=_model, help="s3:// prefix or .tar.gz, or a hub id")
    it.add_argument(
        "--env", type=_assignment, action="append", default=[], help="OPTION_X=value, repeatable"
    )
    it.add_argument("--env-file", type=_env_file, default={}, help="a file with NAME=value lines")
    it.add_argument(
        "--gpus",
        type=_between(0),
        help="of a copy (default: as many as OPTION_TENSOR_PARALLEL_DEGREE says, or its share of "
        "all that the instance has)",
    )
    it.add_argument(
        "--memory-mb",
        type=_between(128),
        default=4096,
        help="memory that a copy is sure of, in MiB (default: 4096)",
    )
    it.add_argument("--copies", type=_between(1), default=1, help="of the container (default: 1)")
    it.add_argument("--ami", help=f"inference AMI version (default: {AMI} on GPU instances)")
    it.add_argument(
        "--startup-timeout",
        type=_between(60, 3600),
        default=1800,
        help="seconds for the model's files, and as many for the container (default: 1800)",
    )
    it.add_argument(
        "--components",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="serve the model as an inference component, which adapters need (default: yes)",
    )

    it = command("add-adapter", add_adapter, "make an adapter component, or give it other files")
    it.add_argument("endpoint", type=_name)
    it.add_argument("name", type=_name, help="of the adapter; unique in account and region")
    it.add_argument("artifact", type=_archive, help="s3://….tar.gz with the files at its root")

    it = command("invoke", invoke, "ask the endpoint, and print its answer")
    it.add_argument("endpoint", type=_name)
    it.add_argument("prompt", nargs="?", help="(default: a whole body is read from stdin)")
    it.add_argument("--component", type=_name, help="an adapter (default: the base component)")
    it.add_argument(
        "--components",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="as it was deployed (default: yes)",
    )
    it.add_argument("--stream", action="store_true")

    it = command("status", status, "print the endpoint, its components and their copies")
    it.add_argument("name", type=_name)

    it = command("delete", delete_all, "delete all that belongs to the endpoint, in order")
    it.add_argument("name", type=_name)
    only = it.add_mutually_exclusive_group()
    only.add_argument("--component", type=_name, help="delete only this component")
    only.add_argument(
        "--keep-endpoint", action="store_true", help="delete components and model only"
    )
    return whole


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.endpoint_url:
        # A service's own variable, like AWS_ENDPOINT_URL_CLOUDWATCH_LOGS, still comes before it.
        os.environ["AWS_ENDPOINT_URL"] = options.endpoint_url
    try:
        options.run(options)
    except (Failed, ClientError, BotoCoreError) as error:
        sys.exit(f"{error}")
    except KeyboardInterrupt:
        say("broken off: what was begun goes on, and is billed; give the same command again")
        sys.exit(130)


if __name__ == "__main__":
    main()
