"""SageMaker's control plane, as far as containers notice it: models, endpoints, components."""

import asyncio
import dataclasses
import logging
import random
import time
import uuid
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import botocore

from scripts.sagemaker_local.container import Artifact, Copy, Failed, Limits, Recipe, locate
from scripts.sagemaker_local.wire import Refused, check, check_environment, operation

log = logging.getLogger(__name__)

OPERATIONS = (
    *(
        f"{verb}{noun}"
        for noun in ("Model", "EndpointConfig", "Endpoint", "InferenceComponent")
        for verb in ("Create", "Describe", "Delete")
    ),
    *("ListModels", "ListEndpointConfigs", "ListEndpoints", "ListInferenceComponents"),
    *("UpdateEndpoint", "UpdateInferenceComponent", "UpdateInferenceComponentRuntimeConfig"),
)
PAGE = 10
"""Items of a list when nothing is said."""

Record = dict[str, Any]


@dataclasses.dataclass(kw_only=True)
class Thing:
    """A model, an endpoint configuration, an endpoint or a component. told: what Describe says."""

    kind: str
    name: str
    told: Record

    @property
    def status(self) -> str:
        return str(self.told[f"{self.kind}Status"])

    def enter(self, status: str, reason: str | None = None) -> None:
        self.told[f"{self.kind}Status"] = status
        self.told["LastModifiedTime"] = time.time()
        self.told.pop("FailureReason", None)
        if reason:
            self.told["FailureReason"] = reason
            log.warning("%s %s: %s: %s", self.kind, self.name, status, reason)
        else:
            log.info("%s %s: %s", self.kind, self.name, status)


@dataclasses.dataclass(kw_only=True)
class Endpoint(Thing):
    """copies: those of variants that have models, by the variants' names."""

    copies: dict[str, Copy] = dataclasses.field(default_factory=dict)
    config: Record = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class Component(Thing):
    """adapter: the id by which its base's container knows it; a base component has none.

    lock: held by a base component while its copy or its adapters change.
    """

    adapter: str | None = None
    copy: Copy | None = None
    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)

    @property
    def specification(self) -> Record:
        found: Record = self.told["Specification"]
        return found

    @property
    def base(self) -> str | None:
        return self.specification.get("BaseInferenceComponentName")


class Target(NamedTuple):
    """What answers an invocation. group: the log group of its container."""

    copy: Copy
    variant: str
    headers: dict[str, str]
    group: str


class ControlPlane:
    """What boto3's `sagemaker` clients see. All of it runs in one event loop."""

    def __init__(
        self,
        limits: Limits,
        store: Path | None,
        work: Path,
        *,
        region: str,
        account: str,
        seed: int,
        duplicate_posts: bool,
    ) -> None:
        self._limits = limits
        self._store = store
        self._work = work
        self.region = region
        self.account = account
        self._random = random.Random(seed)
        self._posts = 2 if duplicate_posts else 1
        self._things: dict[str, dict[str, Thing]] = {
            kind: {} for kind in ("Model", "EndpointConfig", "Endpoint", "InferenceComponent")
        }
        self._tasks: set[asyncio.Task[None]] = set()
        self._copies: list[Copy] = []

    # What any operation goes through.

    def answer(self, name: str, request: Any) -> Record:
        """Answer an operation. Raises Refused."""
        if name not in OPERATIONS:
            raise Refused(f"the stand-in does not know {name}", "UnknownOperationException")
        shape = operation("sagemaker", name).input_shape
        assert shape
        check(shape, request)
        method = getattr(self, f"_{botocore.xform_name(name)}", None)
        if method:
            found: Record = method(request)
            return found
        if name.startswith("List"):
            return self._listed(name.removeprefix("List").removesuffix("s"), request)
        return self._described(name.removeprefix("Describe"), request)

    def _described(self, kind: str, request: Record) -> Record:
        thing: Thing = self._thing(kind, request[f"{kind}Name"])
        container = thing.told.get("Specification", {}).get("Container", {})
        if "Image" not in container:
            return thing.told
        # Of a component's own container Describe tells the image in another shape.
        summary = {key: value for key, value in container.items() if key != "Image"}
        summary["DeployedImage"] = {"SpecifiedImage": container["Image"]}
        return {
            **thing.told,
            "Specification": {**thing.told["Specification"], "Container": summary},
        }

    def _listed(self, kind: str, request: Record) -> Record:
        shape: Any = operation("sagemaker", f"List{kind}s").output_shape
        summary = shape.members[f"{kind}s"].member.members
        found = [
            {member: it.told[member] for member in summary if member in it.told}
            for it in self._things[kind].values()
            if _listed(it, request)
        ]
        by = {"Name": f"{kind}Name", "Status": f"{kind}Status"}.get(
            request.get("SortBy", ""), "CreationTime"
        )
        found.sort(key=lambda it: it[by], reverse=request.get("SortOrder") != "Ascending")
        token = request.get("NextToken") or "0"
        if not token.isdecimal():
            raise Refused(f"NextToken {token!r:.100} is none of ours")
        start = int(token)
        end = start + request.get("MaxResults", PAGE)
        more = {"NextToken": str(end)} if end < len(found) else {}
        return {f"{kind}s": found[start:end], **more}

    def _thing(self, kind: str, name: str) -> Any:
        found = self._things[kind].get(name)
        if not found:
            raise Refused(f'Could not find {_spoken(kind)} "{self._arn(kind, name)}".')
        return found

    def _new(self, kind: str, request: Record, status: str | None = None) -> Record:
        """What Describe says of something new. Raises Refused where its name is taken."""
        name = request[f"{kind}Name"]
        arn = self._arn(kind, name)
        if name in self._things[kind]:
            raise Refused(f'Cannot create already existing {_spoken(kind)} "{arn}".')
        now = time.time()
        told = {key: value for key, value in request.items() if key != "Tags"}
        told |= {f"{kind}Arn": arn, "CreationTime": now}
        return told | ({"LastModifiedTime": now, f"{kind}Status": status} if status else {})

    def _arn(self, kind: str, name: str) -> str:
        word = _spoken(kind).replace(" ", "-").replace("configuration", "config")
        return f"arn:aws:sagemaker:{self.region}:{self.account}:{word}/{name}"

    def _keep(self, thing: Thing) -> Record:
        self._things[thing.kind][thing.name] = thing
        return {f"{thing.kind}Arn": thing.told[f"{thing.kind}Arn"]}

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("the stand-in failed", exc_info=error)

    # Models and endpoint configurations.

    def _create_model(self, request: Record) -> Record:
        told = self._new("Model", request)
        container = request.get("PrimaryContainer") or {}
        if not container.get("Image"):
            raise Refused(
                "PrimaryContainer.Image should name what to run; the stand-in runs no other"
            )
        if container.get("Mode") == "MultiModel":
            raise Refused("The stand-in has no multi-model endpoints")
        check_environment(container.get("Environment", {}))
        self._check_there(_model_artifact(container), *_channels(container).values())
        return self._keep(Thing(kind="Model", name=request["ModelName"], told=told))

    def _check_there(self, *artifacts: Artifact | None) -> None:
        for artifact in artifacts:
            if artifact:
                if not artifact.packed and not artifact.url.endswith("/"):
                    raise Refused(f"S3Uri {artifact.url} is a prefix and should end with a slash")
                try:
                    locate(self._store, artifact)
                except Failed as fault:
                    raise Refused(str(fault)) from None

    def _delete_model(self, request: Record) -> Record:
        del self._things["Model"][self._thing("Model", request["ModelName"]).name]
        return {}

    def _create_endpoint_config(self, request: Record) -> Record:
        told = self._new("EndpointConfig", request)
        variants = request["ProductionVariants"]
        names = [it["VariantName"] for it in variants]
        if len({*names}) < len(names):
            raise Refused("ProductionVariants should have different names")
        for variant in variants:
            if "ModelName" in variant:
                self._thing("Model", variant["ModelName"])
                if "ManagedInstanceScaling" in variant:
                    raise Refused(
                        "ManagedInstanceScaling is for endpoints with inference components: "
                        "leave ModelName out"
                    )
            elif "ExecutionRoleArn" not in request:
                raise Refused(
                    "ExecutionRoleArn is required where a ProductionVariant has no ModelName"
                )
            if "ServerlessConfig" in variant:
                raise Refused("The stand-in has no serverless endpoints")
            if "InstanceType" not in variant and "InstancePools" not in variant:
                raise Refused(f"InstanceType is missing in variant {variant['VariantName']}")
        name = request["EndpointConfigName"]
        return self._keep(Thing(kind="EndpointConfig", name=name, told=told))

    def _delete_endpoint_config(self, request: Record) -> Record:
        name = request["EndpointConfigName"]
        del self._things["EndpointConfig"][self._thing("EndpointConfig", name).name]
        return {}

    # Endpoints.

    def _create_endpoint(self, request: Record) -> Record:
        config = self._thing("EndpointConfig", request["EndpointConfigName"]).told
        told = self._new("Endpoint", request, "Creating")
        endpoint = Endpoint(kind="Endpoint", name=request["EndpointName"], told=told)
        self._configure(endpoint, config)
        self._begin(self._start_endpoint(endpoint))
        return self._keep(endpoint)

    def _configure(self, endpoint: Endpoint, config: Record) -> None:
        endpoint.config = config
        endpoint.told["EndpointConfigName"] = config["EndpointConfigName"]
        endpoint.told["ProductionVariants"] = [
            {
                "VariantName": it["VariantName"],
                "CurrentWeight": it.get("InitialVariantWeight", 1.0),
                "DesiredWeight": it.get("InitialVariantWeight", 1.0),
                "CurrentInstanceCount": 1,
                "DesiredInstanceCount": it.get("InitialInstanceCount", 1),
            }
            for it in config["ProductionVariants"]
        ]

    async def _start_endpoint(self, endpoint: Endpoint) -> None:
        try:
            endpoint.copies = await self._variants(endpoint, endpoint.config)
        except Failed as fault:
            endpoint.enter("Failed", str(fault))
        else:
            endpoint.enter("InService")

    async def _variants(self, endpoint: Endpoint, config: Record) -> dict[str, Copy]:
        """A copy for each variant with a model. Raises Failed where one does not start."""
        copies: dict[str, Copy] = {}
        try:
            for variant in config["ProductionVariants"]:
                if "ModelName" in variant:
                    name = variant["VariantName"]
                    copies[name] = await self._variant(endpoint, variant)
        except Failed:
            for copy in copies.values():
                await self._stop(copy)
            raise
        return copies

    async def _variant(self, endpoint: Endpoint, variant: Record) -> Copy:
        model = self._model(variant["ModelName"])
        recipe = _recipe(f"{endpoint.name}-{variant['VariantName']}", model, variant)

        def ended() -> None:
            self._begin(self._restart_variant(endpoint, variant))

        return await self._start(recipe, ended)

    async def _restart_variant(self, endpoint: Endpoint, variant: Record) -> None:
        name = variant["VariantName"]
        before = endpoint.copies.get(name)
        if not before or before.healthy or endpoint.status == "Deleting":
            return
        del endpoint.copies[name]
        await self._stop(before)
        try:
            endpoint.copies[name] = await self._variant(endpoint, variant)
        except Failed as fault:
            endpoint.enter("Failed", str(fault))

    def _model(self, name: str) -> Record:
        """A model's container. Raises Failed where the model was deleted."""
        found = self._things["Model"].get(name)
        if not found:
            raise Failed(f"The model {name} was deleted")
        container: Record = found.told["PrimaryContainer"]
        return container

    def _update_endpoint(self, request: Record) -> Record:
        endpoint: Endpoint = self._thing("Endpoint", request["EndpointName"])
        config = self._thing("EndpointConfig", request["EndpointConfigName"]).told
        self._require(endpoint, "InService", "Failed")
        before = endpoint.status
        endpoint.enter("Updating")
        self._begin(self._replace_endpoint(endpoint, config, before))
        return {"EndpointArn": endpoint.told["EndpointArn"]}

    async def _replace_endpoint(self, endpoint: Endpoint, config: Record, status: str) -> None:
        """Start the new variants beside the old ones, which stay where that fails.

        status: the endpoint's before.
        """
        try:
            copies = await self._variants(endpoint, config)
        except Failed as fault:
            endpoint.enter(status, str(fault))
            return
        before, endpoint.copies = endpoint.copies, copies
        self._configure(endpoint, config)
        endpoint.enter("InService")
        for copy in before.values():
            await self._stop(copy)

    def _delete_endpoint(self, request: Record) -> Record:
        endpoint: Endpoint = self._thing("Endpoint", request["EndpointName"])
        self._require(endpoint, "InService", "Failed")
        if left := sorted(it.name for it in self._components(endpoint.name)):
            raise Refused(f"Endpoint {endpoint.name} has inference components: {', '.join(left)}")
        endpoint.enter("Deleting")
        self._begin(self._end_endpoint(endpoint))
        return {}

    async def _end_endpoint(self, endpoint: Endpoint) -> None:
        for copy in [*endpoint.copies.values()]:
            await self._stop(copy)
        del self._things["Endpoint"][endpoint.name]

    def _require(self, thing: Thing, *statuses: str) -> None:
        if thing.status not in statuses:
            arn = thing.told[f"{thing.kind}Arn"]
            raise Refused(
                f'Cannot update in-progress {_spoken(thing.kind)} "{arn}", which is {thing.status}.'
            )

    # Inference components.

    def _components(self, endpoint: str, base: str | None = None) -> Iterator[Component]:
        """Those of an endpoint, or the adapters of a base component."""
        for it in self._things["InferenceComponent"].values():
            assert isinstance(it, Component)
            if it.told["EndpointName"] == endpoint and base in (None, it.base):
                yield it

    def _create_inference_component(self, request: Record) -> Record:
        endpoint: Endpoint = self._thing("Endpoint", request["EndpointName"])
        told = self._new("InferenceComponent", request, "Creating")
        told["EndpointArn"] = endpoint.told["EndpointArn"]
        self._require(endpoint, "InService")
        variants = {it["VariantName"]: it for it in endpoint.config["ProductionVariants"]}
        if any("ModelName" in it for it in variants.values()):
            raise Refused(
                f"Endpoint {endpoint.name} serves models; inference components need an endpoint "
                "configuration without ModelName"
            )
        specification = _specification(request, variants.get(request.get("VariantName", "")))
        told |= {"Specification": specification}
        told.pop("Specifications", None)
        name = request["InferenceComponentName"]
        component = Component(kind="InferenceComponent", name=name, told=told)
        check_environment(specification.get("Container", {}).get("Environment", {}))
        if base := component.base:
            self._create_adapter(component, request, self._thing("InferenceComponent", base))
            return self._keep(component)
        if request.get("VariantName") not in variants:
            raise Refused(f"VariantName should be one of {', '.join(variants)}")
        copies = request.get("RuntimeConfig", {}).get("CopyCount", 0)
        if copies < 1:
            raise Refused("RuntimeConfig.CopyCount should be at least 1 for a new component")
        if "ComputeResourceRequirements" not in specification:
            raise Refused("Specification.ComputeResourceRequirements is required")
        told["RuntimeConfig"] = _copies(copies)
        self._recipe(component, specification)  # refuses what cannot be run
        self._begin(self._start_component(component))
        return self._keep(component)

    def _create_adapter(self, component: Component, request: Record, base: Component) -> None:
        specification = component.specification
        if "VariantName" in request or "RuntimeConfig" in request:
            raise Refused("An adapter's component has no VariantName and no RuntimeConfig")
        if not specification.keys() <= {"BaseInferenceComponentName", "Container"}:
            raise Refused("An adapter's Specification has its base and Container.ArtifactUrl only")
        if "ArtifactUrl" not in specification.get("Container", {}):
            raise Refused("Specification.Container.ArtifactUrl is required for an adapter")
        if base.base or base.told["EndpointName"] != component.told["EndpointName"]:
            raise Refused(f"{base.name} is no base component of this endpoint")
        self._require(base, "InService")
        component.told["VariantName"] = base.told["VariantName"]
        # An id of the platform's own, as its containers see it.
        component.adapter = f"{self.account}-{component.name}-{uuid.uuid4().hex[:12]}"
        self._begin(self._start_adapter(component, base))

    def _recipe(self, component: Component, specification: Record) -> Recipe:
        """Raises Refused where there is nothing to run."""
        container = specification.get("Container", {})
        if name := specification.get("ModelName"):
            model = self._thing("Model", name).told["PrimaryContainer"]
            container = {**model, **container}
        if "Image" not in container:
            raise Refused("Specification should have a ModelName or a Container.Image")
        if url := container.get("ArtifactUrl"):
            container = {**container, "ModelDataUrl": url}
        startup = specification.get("StartupParameters", {})
        compute = specification.get("ComputeResourceRequirements", {})
        return _recipe(component.name, container, {**startup, **compute})

    async def _start_component(self, component: Component) -> None:
        async with component.lock:
            try:
                component.copy = await self._copy(component)
            except (Failed, Refused) as fault:
                component.enter("Failed", str(fault))
            else:
                component.told["RuntimeConfig"] = _copies(1, 1)
                component.enter("InService")

    async def _copy(self, component: Component) -> Copy:
        """A new copy of a base component, with all its adapters. Raises Failed."""

        def ended() -> None:
            self._begin(self._restart_component(component))

        copy = await self._start(self._recipe(component, component.specification), ended)
        for adapter in self._components(component.told["EndpointName"], component.name):
            if adapter.status in ("InService", "Failed"):
                try:
                    await self._register(copy, adapter)
                except Failed as fault:
                    adapter.enter("Failed", str(fault))
        return copy

    async def _restart_component(self, component: Component) -> None:
        """SageMaker replaces a copy that exits, and registers its adapters anew."""
        async with component.lock:
            if component.copy and not component.copy.healthy:
                await self._stop(component.copy)
                component.copy = None
                try:
                    component.copy = await self._copy(component)
                except (Failed, Refused) as fault:
                    component.enter("Failed", str(fault))

    async def _start_adapter(self, adapter: Component, base: Component) -> None:
        async with base.lock:
            try:
                if base.copy:  # a base without copies registers it when it has one again
                    await self._register(base.copy, adapter)
            except Failed as fault:
                adapter.enter("Failed", str(fault))
            else:
                adapter.enter("InService")

    async def _register(self, copy: Copy, adapter: Component) -> None:
        assert adapter.adapter
        artifact = Artifact(adapter.specification["Container"]["ArtifactUrl"], packed=True)
        await copy.add_adapter(adapter.name, adapter.adapter, artifact, self.account, self._posts)

    def _update_inference_component(self, request: Record) -> Record:
        component: Component = self._thing("InferenceComponent", request["InferenceComponentName"])
        self._require(component, "InService", "Failed")
        changed = _specification(request, None)
        specification = {**component.specification, **changed}
        if component.adapter:
            if not changed.keys() <= {"BaseInferenceComponentName", "Container"}:
                raise Refused("Of an adapter's component only Container.ArtifactUrl can be updated")
            base: Component = self._thing("InferenceComponent", component.base or "")
            component.told["Specification"] = specification
            component.enter("Updating")
            self._begin(self._update_adapter(component, base))
        else:
            copies = request.get("RuntimeConfig", {}).get("CopyCount")
            self._recipe(component, specification)
            self._change(component, specification if changed else None, copies)
        return {"InferenceComponentArn": component.told["InferenceComponentArn"]}

    def _update_inference_component_runtime_config(self, request: Record) -> Record:
        component: Component = self._thing("InferenceComponent", request["InferenceComponentName"])
        self._require(component, "InService", "Failed")
        if component.adapter:
            raise Refused("An adapter's component has no RuntimeConfig")
        self._change(component, None, request["DesiredRuntimeConfig"]["CopyCount"])
        return {"InferenceComponentArn": component.told["InferenceComponentArn"]}

    def _change(
        self, component: Component, specification: Record | None, copies: int | None
    ) -> None:
        if copies is not None:
            component.told["RuntimeConfig"] = _copies(copies, int(component.copy is not None))
        component.enter("Updating")
        self._begin(self._update_component(component, specification))

    async def _update_component(self, component: Component, specification: Record | None) -> None:
        """Scale to none or to one copy, or put a new copy in the place of the old one."""
        async with component.lock:
            wanted = component.told["RuntimeConfig"]["DesiredCopyCount"]
            before, old = component.copy, component.specification
            if specification:
                component.told["Specification"] = specification
            try:
                if not wanted:
                    component.copy = None
                elif specification or not before:
                    component.copy = await self._copy(component)
            except (Failed, Refused) as fault:
                component.told["Specification"] = old
                component.enter("InService" if before else "Failed", str(fault))
                return
            if before and before is not component.copy:
                await self._stop(before)
            component.told["RuntimeConfig"] = _copies(wanted, wanted)
            component.enter("InService")

    async def _update_adapter(self, adapter: Component, base: Component) -> None:
        assert adapter.adapter
        async with base.lock:
            try:
                if base.copy:
                    await base.copy.remove_adapter(adapter.adapter)
                    await self._register(base.copy, adapter)
            except Failed as fault:
                adapter.enter("Failed", str(fault))
            else:
                adapter.enter("InService")

    def _delete_inference_component(self, request: Record) -> Record:
        component: Component = self._thing("InferenceComponent", request["InferenceComponentName"])
        self._require(component, "InService", "Failed")
        component.enter("Deleting")
        self._begin(self._end_component(component))
        return {}

    def _base(self, adapter: Component) -> Component | None:
        found = self._things["InferenceComponent"].get(adapter.base or "")
        return found if isinstance(found, Component) else None

    async def _end_component(self, component: Component) -> None:
        """A base's adapters go first, and with it."""
        base = self._base(component) if component.adapter else component
        if not base:
            self._things["InferenceComponent"].pop(component.name, None)
            return
        async with base.lock:
            endpoint = component.told["EndpointName"]
            gone = [component] if component.adapter else [*self._components(endpoint, base.name)]
            for adapter in gone:
                adapter.told["InferenceComponentStatus"] = "Deleting"
                if base.copy and base.copy.healthy and adapter.adapter:
                    try:
                        await base.copy.remove_adapter(adapter.adapter)
                    except Failed as fault:
                        log.warning("%s: %s", adapter.name, fault)
                del self._things["InferenceComponent"][adapter.name]
            if base is component:
                if base.copy:
                    await self._stop(base.copy)
                del self._things["InferenceComponent"][base.name]

    # Copies.

    async def _start(self, recipe: Recipe, ended: Any) -> Copy:
        copy = Copy(recipe, self._limits, self._store, self._work, ended)
        self._copies.append(copy)
        try:
            await copy.start()
        except BaseException:
            self._copies.remove(copy)
            raise
        return copy

    async def _stop(self, copy: Copy) -> None:
        await copy.stop()
        self._copies.remove(copy)

    async def close(self) -> None:
        """Stop everything that runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(copy.stop() for copy in self._copies))

    def overview(self) -> Record:
        """What runs, and which calls of the platform's own each copy has seen."""
        return {
            "copies": [
                {
                    "name": it.recipe.name,
                    "url": f"http://127.0.0.1:{it.port}",
                    "pid": it.pid,
                    "healthy": it.healthy,
                    "log": str(it.log),
                    "calls": it.calls,
                    "metrics": it.scrape,
                }
                for it in self._copies
            ]
        }

    def target(self, endpoint: str, component: str | None, variant: str | None) -> Target:
        """What answers an invocation. Raises Refused as the runtime does."""
        found = self._things["Endpoint"].get(endpoint)
        if not isinstance(found, Endpoint) or found.status not in ("InService", "Updating"):
            raise Refused(f"Endpoint {endpoint} of account {self.account} not found.")
        if not any("ModelName" in it for it in found.config["ProductionVariants"]):
            if not component:
                raise Refused(
                    "Inference Component Name header is required for endpoints to which you plan "
                    "to deploy inference components. Please include Inference Component Name "
                    "header or consider using SageMaker models."
                )
            return self._component_target(endpoint, component)
        if component:
            raise Refused(f"Endpoint {endpoint} has no inference components.")
        weights = {
            it["VariantName"]: it["CurrentWeight"] for it in found.told["ProductionVariants"]
        }
        if variant and variant not in weights:
            raise Refused(f"Variant {variant} not found in endpoint {endpoint}.")
        name = variant or self._random.choices([*weights], [*weights.values()])[0]
        copy = found.copies.get(name)
        if not copy:
            raise Refused("The variant has no healthy instance.", "ServiceUnavailable", 503)
        return Target(copy, name, {}, f"/aws/sagemaker/Endpoints/{endpoint}")

    def _component_target(self, endpoint: str, name: str) -> Target:
        found = self._things["InferenceComponent"].get(name)
        if not isinstance(found, Component) or found.told["EndpointName"] != endpoint:
            raise Refused(f"Inference Component {name} of endpoint {endpoint} not found.")
        base = self._base(found) if found.adapter else found
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
        return Target(base.copy, found.told["VariantName"], headers, group)


def _spoken(kind: str) -> str:
    return {
        "Model": "model",
        "EndpointConfig": "endpoint configuration",
        "Endpoint": "endpoint",
        "InferenceComponent": "inference component",
    }[kind]


def _listed(thing: Thing, request: Mapping[str, Any]) -> bool:
    """Whether a List call's filters let something through."""
    told = thing.told
    return (
        request.get("NameContains", "").lower() in thing.name.lower()
        and request.get("StatusEquals") in (None, told.get(f"{thing.kind}Status"))
        and request.get("EndpointNameEquals") in (None, told.get("EndpointName"))
        and request.get("VariantNameEquals") in (None, told.get("VariantName"))
        and request.get("CreationTimeAfter", 0) <= told["CreationTime"]
        and told["CreationTime"] <= request.get("CreationTimeBefore", float("inf"))
    )


def _specification(request: Record, variant: Record | None) -> Record:
    """The Specification of a request, or the one of its Specifications for the instance's type.

    Raises Refused where there is none.
    """
    if several := request.get("Specifications"):
        kind = (variant or {}).get("InstanceType")
        found = [it for it in several if it.get("InstanceType") in (None, kind)]
        if not found:
            raise Refused(f"Specifications has none for {kind}")
        chosen: Record = found[0]
        return chosen
    specification: Record = request.get("Specification", {})
    if not specification and "RuntimeConfig" not in request:
        raise Refused("Specification is required")
    return specification


def _copies(desired: int, current: int = 0) -> Record:
    """RuntimeConfig as Describe has it. Raises Refused for more than one copy."""
    if desired > 1:
        raise Refused(f"CopyCount={desired}: the stand-in runs one copy of a component, or none")
    return {"DesiredCopyCount": desired, "CurrentCopyCount": current}


def _recipe(name: str, container: Record, more: Record) -> Recipe:
    """more: what a variant or a component has to say of its containers."""
    metrics = container.get("ContainerMetricsConfig", {}).get("MetricsEndpoints") or [{}]
    return Recipe(
        name,
        container["Image"],
        container.get("Environment", {}),
        _model_artifact(container),
        _channels(container),
        more.get("ContainerStartupHealthCheckTimeoutInSeconds", 8 * 60),
        metrics[0].get("MetricPublishFrequencyInSeconds", 60),
        metrics[0].get("MetricsEndpointPath", "/metrics"),
        more.get("MaxMemoryRequiredInMb"),
        int(more.get("NumberOfAcceleratorDevicesRequired", 0)),
    )


def _model_artifact(container: Record) -> Artifact | None:
    if source := container.get("ModelDataSource"):
        return _artifact(source["S3DataSource"])
    url = container.get("ModelDataUrl")
    return Artifact(url, packed=True) if url else None


def _channels(container: Record) -> dict[str, Artifact]:
    return {
        it["ChannelName"]: _artifact(it["S3DataSource"])
        for it in container.get("AdditionalModelDataSources", [])
    }


def _artifact(source: Record) -> Artifact:
    return Artifact(source["S3Uri"], packed=source["CompressionType"] == "Gzip")
