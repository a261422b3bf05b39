# SPDX-License-Identifier: Apache-2.0
"""SageMaker's control plane, as far as containers notice it: its operations, and who answers."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tools.sagemaker_local.components import Components
from tools.sagemaker_local.container import Copy, Limits
from tools.sagemaker_local.copies import Copies
from tools.sagemaker_local.endpoints import Endpoints
from tools.sagemaker_local.records import KINDS, Component, Endpoint, Record, Records, Thing
from tools.sagemaker_local.store import Store
from tools.sagemaker_local.wire import Refused, check, check_environment, operation


class Target(NamedTuple):
    """The target of an invocation.

    group: the log group of its container. sessions: open sessions, and the copies that began them;
    a component has one copy.
    """

    copy: Copy
    variant: str
    headers: dict[str, str]
    group: str
    sessions: dict[str, Copy]


class ControlPlane:
    """The API for boto3's `sagemaker` clients. All of it runs in one event loop."""

    def __init__(
        self,
        limits: Limits,
        store: Store,
        work: Path,
        *,
        region: str,
        account: str,
        duplicate_posts: bool,
        programs: Sequence[str],
    ) -> None:
        self.region = region
        self.account = account
        self._records = Records(region, account)
        self._copies = Copies(limits, store, work, programs)
        endpoints = Endpoints(self._records, self._copies)
        components = Components(self._records, self._copies, 2 if duplicate_posts else 1)
        self._base = components.base
        self._operations: dict[str, Callable[[Record], Record]] = {
            **{f"Describe{kind}": partial(self._records.describe, kind) for kind in KINDS},
            **{f"List{kind}s": partial(self._records.listed, kind) for kind in KINDS},
            "CreateModel": self._create_model,
            "DeleteModel": partial(self._delete, "Model"),
            "CreateEndpointConfig": self._create_endpoint_config,
            "DeleteEndpointConfig": partial(self._delete, "EndpointConfig"),
            "CreateEndpoint": endpoints.create,
            "UpdateEndpoint": endpoints.update,
            "DeleteEndpoint": endpoints.delete,
            "CreateInferenceComponent": components.create,
            "UpdateInferenceComponent": components.update,
            "UpdateInferenceComponentRuntimeConfig": components.update_runtime_config,
            "DeleteInferenceComponent": components.delete,
        }
        self.overview = self._copies.overview
        self.close = self._copies.close

    def answer(self, name: str, request: Any) -> Record:
        """Answer an operation. Raises Refused."""
        if name not in self._operations:
            raise Refused(f"the stand-in does not know {name}", "UnknownOperationException")
        shape = operation("sagemaker", name).input_shape
        assert shape
        check(shape, request)
        return self._operations[name](request)

    def _create_model(self, request: Record) -> Record:
        described = self._records.new("Model", request)
        container = request.get("PrimaryContainer") or {}
        if not container.get("Image"):
            raise Refused(
                "PrimaryContainer.Image should name what to run; the stand-in runs no other"
            )
        self._copies.check_image(container["Image"])
        check_environment(container.get("Environment", {}))
        self._copies.check_files(container)
        return self._records.add(
            Thing(kind="Model", name=request["ModelName"], described=described)
        )

    def _create_endpoint_config(self, request: Record) -> Record:
        described = self._records.new("EndpointConfig", request)
        if len(request["ProductionVariants"]) > 1:
            raise Refused("The stand-in has one of ProductionVariants for each endpoint")
        (variant,) = request["ProductionVariants"]
        if "ModelName" in variant:
            self._records.find("Model", variant["ModelName"])
            if "ManagedInstanceScaling" in variant:
                raise Refused(
                    "ManagedInstanceScaling is for endpoints with inference components: "
                    "leave ModelName out"
                )
        elif "ExecutionRoleArn" not in request:
            raise Refused("ExecutionRoleArn is required where a ProductionVariant has no ModelName")
        if "ServerlessConfig" in variant:
            raise Refused("The stand-in has no serverless endpoints")
        if "InstanceType" not in variant and "InstancePools" not in variant:
            raise Refused(f"InstanceType is missing in variant {variant['VariantName']}")
        name = request["EndpointConfigName"]
        return self._records.add(Thing(kind="EndpointConfig", name=name, described=described))

    def _delete(self, kind: str, request: Record) -> Record:
        self._records.remove(self._records.find(kind, request[f"{kind}Name"]))
        return {}

    def target(
        self, endpoint: str, component: str | None, variant: str | None, session: str | None
    ) -> Target:
        """The target of an invocation. Raises Refused as the runtime does."""
        found: Endpoint | None = self._records.get("Endpoint", endpoint)
        if not found or found.status not in ("InService", "Updating"):
            raise Refused(f"Endpoint {endpoint} of account {self.account} not found.")
        if "ModelName" not in found.variant:
            if not component:
                raise Refused(
                    "Inference Component Name header is required for endpoints to which you plan "
                    "to deploy inference components. Please include Inference Component Name "
                    "header or consider using SageMaker models."
                )
            return self._component_target(endpoint, component)
        if component:
            raise Refused(f"Endpoint {endpoint} has no inference components.")
        name = found.variant["VariantName"]
        if variant and variant != name:
            raise Refused(f"Variant {variant} not found in endpoint {endpoint}.")
        if not (copy := found.route(session)):
            raise Refused("The variant has no healthy instance.", "ServiceUnavailable", 503)
        return Target(copy, name, {}, f"/aws/sagemaker/Endpoints/{endpoint}", found.sessions)

    def _component_target(self, endpoint: str, name: str) -> Target:
        found: Component | None = self._records.get("InferenceComponent", name)
        if not found or found.described["EndpointName"] != endpoint:
            raise Refused(f"Inference Component {name} of endpoint {endpoint} not found.")
        base = self._base(found)
        usable = found.status in ("InService", "Updating")
        if not usable or not base or not base.copy:
            raise Refused(
                "Inference Component has no capacity to process this request. "
                f"It is {found.status}, and its copies are 0 or not healthy."
            )
        headers = {}
        if found.adapter:
            headers["X-Amzn-SageMaker-Adapter-Identifier"] = found.adapter
        group = f"/aws/sagemaker/InferenceComponents/{base.name}"
        return Target(base.copy, found.described["VariantName"], headers, group, {})
