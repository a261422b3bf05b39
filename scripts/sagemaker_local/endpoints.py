# SPDX-License-Identifier: Apache-2.0
"""Endpoints: created, updated and deleted; the copy of an endpoint that serves a model itself."""

from scripts.sagemaker_local.container import Copy, Failed
from scripts.sagemaker_local.copies import Copies, recipe
from scripts.sagemaker_local.records import Endpoint, Record, Records
from scripts.sagemaker_local.wire import Refused


class Endpoints:
    """The operations on endpoints. What takes time goes on in the background."""

    def __init__(self, records: Records, copies: Copies) -> None:
        self._records = records
        self._copies = copies

    def create(self, request: Record) -> Record:
        config = self._records.find("EndpointConfig", request["EndpointConfigName"]).described
        described = self._records.new("Endpoint", request, "Creating")
        endpoint = Endpoint(kind="Endpoint", name=request["EndpointName"], described=described)
        _configure(endpoint, config)
        self._copies.begin(self._start(endpoint))
        return self._records.add(endpoint)

    async def _start(self, endpoint: Endpoint) -> None:
        try:
            endpoint.copy = await self._copy(endpoint, endpoint.variant)
        except Failed as fault:
            endpoint.enter("Failed", str(fault))
        else:
            endpoint.enter("InService")

    async def _copy(self, endpoint: Endpoint, variant: Record) -> Copy | None:
        """A copy of a variant's model, if it has one. Raises Failed where it does not start."""
        if "ModelName" not in variant:
            return None
        model = self._records.get("Model", variant["ModelName"])
        if not model:
            raise Failed(f"The model {variant['ModelName']} was deleted")
        name = f"{endpoint.name}-{variant['VariantName']}"
        made_of = recipe(name, model.described["PrimaryContainer"], variant)
        return await self._copies.start(made_of, lambda: self._restart(endpoint))

    async def _restart(self, endpoint: Endpoint) -> None:
        """SageMaker replaces a copy that exits."""
        before = endpoint.copy
        if not before or before.healthy or endpoint.status == "Deleting":
            return
        endpoint.copy = None
        await self._copies.stop(before)
        try:
            endpoint.copy = await self._copy(endpoint, endpoint.variant)
        except Failed as fault:
            endpoint.enter("Failed", str(fault))

    def update(self, request: Record) -> Record:
        endpoint: Endpoint = self._records.find("Endpoint", request["EndpointName"])
        config = self._records.find("EndpointConfig", request["EndpointConfigName"]).described
        endpoint.require("InService", "Failed")
        before = endpoint.status
        endpoint.enter("Updating")
        self._copies.begin(self._replace(endpoint, config, before))
        return endpoint.arn

    async def _replace(self, endpoint: Endpoint, config: Record, status: str) -> None:
        """Start a new copy beside the old one, which stays where that fails.

        status: the endpoint's before.
        """
        try:
            copy = await self._copy(endpoint, config["ProductionVariants"][0])
        except Failed as fault:
            endpoint.enter(status, str(fault))
            return
        before, endpoint.copy = endpoint.copy, copy
        _configure(endpoint, config)
        endpoint.enter("InService")
        await self._copies.stop(before)

    def delete(self, request: Record) -> Record:
        endpoint: Endpoint = self._records.find("Endpoint", request["EndpointName"])
        endpoint.require("InService", "Failed")
        if left := sorted(it.name for it in self._records.components(endpoint.name)):
            raise Refused(f"Endpoint {endpoint.name} has inference components: {', '.join(left)}")
        endpoint.enter("Deleting")
        self._copies.begin(self._end(endpoint))
        return {}

    async def _end(self, endpoint: Endpoint) -> None:
        await self._copies.stop(endpoint.copy)
        self._records.remove(endpoint)


def _configure(endpoint: Endpoint, config: Record) -> None:
    variant = endpoint.variant = config["ProductionVariants"][0]
    endpoint.described["EndpointConfigName"] = config["EndpointConfigName"]
    endpoint.described["ProductionVariants"] = [
        {
            "VariantName": variant["VariantName"],
            "CurrentWeight": 1.0,
            "DesiredWeight": 1.0,
            "CurrentInstanceCount": 1,
            "DesiredInstanceCount": variant.get("InitialInstanceCount", 1),
        }
    ]
