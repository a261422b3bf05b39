# SPDX-License-Identifier: Apache-2.0
"""Inference components: base components, which have a copy of a container, and adapters on them."""

import logging
import uuid

from tools.sagemaker_local.container import Copy, Recipe
from tools.sagemaker_local.copies import Copies, recipe
from tools.sagemaker_local.records import Component, Endpoint, Record, Records
from tools.sagemaker_local.store import Artifact, Failed
from tools.sagemaker_local.wire import Refused, check_environment

log = logging.getLogger(__name__)

KIND = "InferenceComponent"


class Components:
    """The operations on inference components. Slow work runs in the background.

    posts: how often an adapter is registered.
    """

    def __init__(self, records: Records, copies: Copies, posts: int) -> None:
        self._records = records
        self._copies = copies
        self._posts = posts

    def _find(self, request: Record) -> Component:
        """The component that an operation changes. Raises Refused while it is changing."""
        component: Component = self._records.find(KIND, request["InferenceComponentName"])
        component.require("InService", "Failed")
        return component

    # Creation.

    def create(self, request: Record) -> Record:
        endpoint: Endpoint = self._records.find("Endpoint", request["EndpointName"])
        described = self._records.new(KIND, request, "Creating")
        described["EndpointArn"] = endpoint.described["EndpointArn"]
        endpoint.require("InService")
        if "ModelName" in endpoint.variant:
            raise Refused(
                f"Endpoint {endpoint.name} serves models; inference components need an endpoint "
                "configuration without ModelName"
            )
        if "Specification" not in request:
            raise Refused("Specification is required; the stand-in does not read Specifications")
        name = request["InferenceComponentName"]
        component = Component(kind=KIND, name=name, described=described)
        check_environment(component.specification.get("Container", {}).get("Environment", {}))
        if component.base:
            self._create_adapter(component, request, self._records.find(KIND, component.base))
        else:
            self._create_base(component, request, endpoint.variant["VariantName"])
        return self._records.add(component)

    def _create_base(self, component: Component, request: Record, variant: str) -> None:
        if request.get("VariantName") != variant:
            raise Refused(f"VariantName should be one of {variant}")
        copies = request.get("RuntimeConfig", {}).get("CopyCount", 0)
        if copies < 1:
            raise Refused("RuntimeConfig.CopyCount should be at least 1 for a new component")
        if "ComputeResourceRequirements" not in component.specification:
            raise Refused("Specification.ComputeResourceRequirements is required")
        component.described["RuntimeConfig"] = _copy_counts(copies)
        self._recipe(component, component.specification)  # refuses containers that cannot run
        self._copies.begin(self._start_base(component))

    def _create_adapter(self, component: Component, request: Record, base: Component) -> None:
        specification = component.specification
        if "VariantName" in request or "RuntimeConfig" in request:
            raise Refused("An adapter's component has no VariantName and no RuntimeConfig")
        if not specification.keys() <= {"BaseInferenceComponentName", "Container"}:
            raise Refused("An adapter's Specification has its base and Container.ArtifactUrl only")
        if "ArtifactUrl" not in specification.get("Container", {}):
            raise Refused("Specification.Container.ArtifactUrl is required for an adapter")
        if base.base or base.described["EndpointName"] != component.described["EndpointName"]:
            raise Refused(f"{base.name} is no base component of this endpoint")
        base.require("InService")
        component.described["VariantName"] = base.described["VariantName"]
        # An id of the platform's own, as its containers see it.
        component.adapter = f"{self._records.account}-{component.name}-{uuid.uuid4().hex[:12]}"
        self._copies.begin(self._start_adapter(component, base))

    def _recipe(self, component: Component, specification: Record) -> Recipe:
        """Raises Refused if there is nothing to run."""
        container = specification.get("Container", {})
        if name := specification.get("ModelName"):
            model = self._records.find("Model", name).described["PrimaryContainer"]
            container = {**model, **container}
        if "Image" not in container:
            raise Refused("Specification should have a ModelName or a Container.Image")
        self._copies.check_image(container["Image"])
        if url := container.get("ArtifactUrl"):
            container = {**container, "ModelDataUrl": url}
        startup = specification.get("StartupParameters", {})
        compute = specification.get("ComputeResourceRequirements", {})
        return recipe(component.name, container, {**startup, **compute})

    async def _start_base(self, component: Component) -> None:
        async with component.lock:
            try:
                component.copy = await self._copy(component)
            except (Failed, Refused) as fault:
                component.enter("Failed", str(fault))
            else:
                component.described["RuntimeConfig"] = _copy_counts(1, 1)
                component.enter("InService")

    async def _copy(self, component: Component) -> Copy:
        """A new copy of a base component, with all its adapters. Raises Failed."""
        made_of = self._recipe(component, component.specification)
        copy = await self._copies.start(made_of, lambda: self._restart(component))
        for adapter in self._records.components(
            component.described["EndpointName"], component.name
        ):
            if adapter.status in ("InService", "Failed"):
                try:
                    await self._register(copy, adapter)
                except Failed as fault:
                    adapter.enter("Failed", str(fault))
        return copy

    async def _restart(self, component: Component) -> None:
        """SageMaker replaces a copy that exits, and registers its adapters again."""
        async with component.lock:
            if component.copy and not component.copy.healthy:
                await self._copies.stop(component.copy)
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
        account = self._records.account
        await copy.add_adapter(adapter.name, adapter.adapter, artifact, account, self._posts)

    # Changes.

    def update(self, request: Record) -> Record:
        component = self._find(request)
        changed = request.get("Specification", {})
        if not changed and "RuntimeConfig" not in request:
            raise Refused("Specification is required")
        specification = {**component.specification, **changed}
        if component.adapter:
            if not changed.keys() <= {"BaseInferenceComponentName", "Container"}:
                raise Refused("Of an adapter's component only Container.ArtifactUrl can be updated")
            base: Component = self._records.find(KIND, component.base or "")
            component.described["Specification"] = specification
            component.enter("Updating")
            self._copies.begin(self._update_adapter(component, base))
        else:
            copies = request.get("RuntimeConfig", {}).get("CopyCount")
            self._recipe(component, specification)
            self._change(component, specification if changed else None, copies)
        return component.arn

    def update_runtime_config(self, request: Record) -> Record:
        component = self._find(request)
        if component.adapter:
            raise Refused("An adapter's component has no RuntimeConfig")
        self._change(component, None, request["DesiredRuntimeConfig"]["CopyCount"])
        return component.arn

    def _change(
        self, component: Component, specification: Record | None, copies: int | None
    ) -> None:
        if copies is not None:
            current = int(component.copy is not None)
            component.described["RuntimeConfig"] = _copy_counts(copies, current)
        component.enter("Updating")
        self._copies.begin(self._update_base(component, specification))

    async def _update_base(self, component: Component, specification: Record | None) -> None:
        """Scale to zero or one copy, or replace the old copy by a new one."""
        async with component.lock:
            wanted = component.described["RuntimeConfig"]["DesiredCopyCount"]
            before, old = component.copy, component.specification
            if specification:
                component.described["Specification"] = specification
            try:
                if not wanted:
                    component.copy = None
                elif specification or not before:
                    component.copy = await self._copy(component)
            except (Failed, Refused) as fault:
                component.described["Specification"] = old
                component.enter("InService" if before else "Failed", str(fault))
                return
            if before is not component.copy:
                await self._copies.stop(before)
            component.described["RuntimeConfig"] = _copy_counts(wanted, wanted)
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

    # Deletion.

    def delete(self, request: Record) -> Record:
        component = self._find(request)
        component.enter("Deleting")
        self._copies.begin(self._end(component))
        return {}

    async def _end(self, component: Component) -> None:
        """A base's adapters go first, and with it."""
        base = self.base(component)
        if not base:
            self._records.remove(component)
            return
        async with base.lock:
            endpoint = component.described["EndpointName"]
            adapters = [component]
            if not component.adapter:
                adapters = [*self._records.components(endpoint, base.name)]
            for adapter in adapters:
                adapter.described["InferenceComponentStatus"] = "Deleting"
                if base.copy and base.copy.healthy and adapter.adapter:
                    try:
                        await base.copy.remove_adapter(adapter.adapter)
                    except Failed as fault:
                        log.warning("%s: %s", adapter.name, fault)
                self._records.remove(adapter)
            if base is component:
                await self._copies.stop(base.copy)
                self._records.remove(base)

    def base(self, component: Component) -> Component | None:
        """An adapter's base component, if it is there; a base component itself."""
        if not component.adapter:
            return component
        base: Component | None = self._records.get(KIND, component.base)
        return base


def _copy_counts(desired: int, current: int = 0) -> Record:
    """RuntimeConfig as Describe has it. Raises Refused for more than one copy."""
    if desired > 1:
        raise Refused(f"CopyCount={desired}: the stand-in runs one copy of a component, or none")
    return {"DesiredCopyCount": desired, "CurrentCopyCount": current}
