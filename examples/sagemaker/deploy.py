# SPDX-License-Identifier: Apache-2.0
"""Make an endpoint with a base inference component, or delete an endpoint and all of its parts.

    python deploy.py create NAME IMAGE ROLE INSTANCE_TYPE [--model s3://…] [OPTION_X=value ...]
    python deploy.py delete NAME

All parts are called NAME. boto3 finds the region, the credentials and AWS_ENDPOINT_URL. An endpoint
is billed from its creation until its deletion.
"""

import argparse
import sys
import time
from typing import Any

import boto3

AMI = "al2023-ami-sagemaker-inference-gpu-4-1"  # CUDA 13, which the default has not
START_S, POLL_S = 1800, 1.0  # for the model's files, and again for the container's start


def create(sagemaker: Any, asked: argparse.Namespace) -> None:
    name, gpus = asked.name, asked.instance_type.startswith(("ml.g", "ml.p"))
    environ = dict(it.split("=", 1) for it in asked.environ)
    container: dict[str, Any] = {"Image": asked.image, "Environment": environ}
    if asked.model:  # SageMaker puts it into /opt/ml/model
        kind = ("S3Object", "Gzip") if asked.model.endswith(".gz") else ("S3Prefix", "None")
        source = {"S3Uri": asked.model, "S3DataType": kind[0], "CompressionType": kind[1]}
        container["ModelDataSource"] = {"S3DataSource": source}
    sagemaker.create_model(ModelName=name, ExecutionRoleArn=asked.role, PrimaryContainer=container)
    limits = {
        "ModelDataDownloadTimeoutInSeconds": START_S,
        "ContainerStartupHealthCheckTimeoutInSeconds": START_S,
    }
    variant = {
        "VariantName": "main",
        "InstanceType": asked.instance_type,
        "InitialInstanceCount": 1,
        **({"InferenceAmiVersion": AMI} if gpus else {}),
        **limits,
    }
    sagemaker.create_endpoint_config(
        EndpointConfigName=name, ExecutionRoleArn=asked.role, ProductionVariants=[variant]
    )
    sagemaker.create_endpoint(EndpointName=name, EndpointConfigName=name)
    sagemaker.get_waiter("endpoint_in_service").wait(EndpointName=name)
    devices = {"NumberOfAcceleratorDevicesRequired": asked.gpus} if gpus else {}
    sagemaker.create_inference_component(
        InferenceComponentName=name,
        EndpointName=name,
        VariantName="main",
        Specification={
            "ModelName": name,
            "StartupParameters": limits,
            "ComputeResourceRequirements": {"MinMemoryRequiredInMb": 4096, **devices},
        },
        RuntimeConfig={"CopyCount": 1},
    )
    while True:  # boto3 has no waiter for components
        found = sagemaker.describe_inference_component(InferenceComponentName=name)
        if found["InferenceComponentStatus"] == "InService":
            return
        if found["InferenceComponentStatus"] == "Failed":
            log = f"/aws/sagemaker/InferenceComponents/{name}"
            sys.exit(f"{name}: {found['FailureReason']} (`aws logs tail {log}`)")
        time.sleep(POLL_S)


def delete(sagemaker: Any, asked: argparse.Namespace) -> None:
    def components() -> list[str]:
        listed = sagemaker.list_inference_components(EndpointNameEquals=asked.name)
        return [it["InferenceComponentName"] for it in listed["InferenceComponents"]]

    for adapters in (True, False):  # a base cannot be deleted before its adapters
        for each in components():
            found = sagemaker.describe_inference_component(InferenceComponentName=each)
            if adapters == ("BaseInferenceComponentName" in found["Specification"]):
                sagemaker.delete_inference_component(InferenceComponentName=each)
                while each in components():
                    time.sleep(POLL_S)
    sagemaker.delete_endpoint(EndpointName=asked.name)
    sagemaker.get_waiter("endpoint_deleted").wait(EndpointName=asked.name)
    sagemaker.delete_endpoint_config(EndpointConfigName=asked.name)
    sagemaker.delete_model(ModelName=asked.name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    verbs = parser.add_subparsers(required=True)
    making, ending = verbs.add_parser("create"), verbs.add_parser("delete")
    for each in ("name", "image", "role", "instance_type"):
        making.add_argument(each)
    making.add_argument("environ", nargs="*", metavar="NAME=VALUE")
    making.add_argument("--model", help="s3://bucket/prefix/ or s3://bucket/model.tar.gz")
    making.add_argument("--gpus", type=int, default=1, help="of the container")
    ending.add_argument("name")
    making.set_defaults(run=create)
    ending.set_defaults(run=delete)
    asked = parser.parse_args()
    asked.run(boto3.client("sagemaker"), asked)
