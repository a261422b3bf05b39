# SPDX-License-Identifier: Apache-2.0
"""Endpoints: created, updated and deleted; the copies of those that serve a model themselves."""

import asyncio

from tools.sagemaker_local.container import Copy
from tools.sagemaker_local.copies import Copies, recipe
from tools.sagemaker_local.records import Endpoint, Record, Records
from tools.sagemaker_local.store import Failed
from tools.sagemaker_local.wire import Refused


class Endpoints:
    """The operations on endpoints. Slow steps run in the background."""

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
            endpoint.copies = await self._started(endpoint, endpoint.variant)
        except Failed as fault:
            endpoint.enter("Failed", str(fault))
        else:
            _count(endpoint)
            endpoint.enter("InService")

    async def _started(self, endpoint: Endpoint, variant: Record) -> list[Copy]:
        """A copy of a variant's model for each instance, if it has one. Raises Failed."""
        if "ModelName" not in variant:
            return []
        starting = [self._copy(endpoint, variant) for _ in range(_instances(variant))]
        found = await asyncio.gather(*starting, return_exceptions=True)
        copies = [it for it in found if isinstance(it, Copy)]
        for fault in found:
            if isinstance(fault, BaseException):
                await self._stop(copies)
                raise fault
        return copies

    async def _copy(self, endpoint: Endpoint, variant: Record) -> Copy:
        """A copy of a variant's model. Raises Failed if it does not start."""
        model = self._records.get("Model", variant["ModelName"])
        if not model:
            raise Failed(f"The model {variant['ModelName']} was deleted")
        name = f"{endpoint.name}-{variant['VariantName']}"
        made_of = recipe(name, model.described["PrimaryContainer"], variant)
        return await self._copies.start(made_of, lambda: self._restart(endpoint))

    async def _restart(self, endpoint: Endpoint) -> None:
        """SageMaker replaces a copy that exits. Its sessions are gone."""
        ended = [copy for copy in endpoint.copies if not copy.healthy]
        if not ended or endpoint.status == "Deleting":
            return
        endpoint.copies = [copy for copy in endpoint.copies if copy.healthy]
        await self._stop(ended)
        try:
            for _ in ended:
                endpoint.copies.append(await self._copy(endpoint, endpoint.variant))
        except Failed as fault:
            endpoint.enter("Failed", str(fault))
        _count(endpoint)

    async def _stop(self, copies: list[Copy]) -> None:
        await asyncio.gather(*(self._copies.stop(copy) for copy in copies))

    def update(self, request: Record) -> Record:
        endpoint: Endpoint = self._records.find("Endpoint", request["EndpointName"])
        config = self._records.find("EndpointConfig", request["EndpointConfigName"]).described
        endpoint.require("InService", "Failed")
        before = endpoint.status
        endpoint.enter("Updating")
        self._copies.begin(self._replace(endpoint, config, before))
        return endpoint.arn

    async def _replace(self, endpoint: Endpoint, config: Record, status: str) -> None:
        """Start new copies beside the old ones, which stay where that fails.

        status: the endpoint's before.
        """
        try:
            copies = await self._started(endpoint, config["ProductionVariants"][0])
        except Failed as fault:
            endpoint.enter(status, str(fault))
            return
        before, endpoint.copies = endpoint.copies, copies
        endpoint.sessions.clear()
        _configure(endpoint, config)
        _count(endpoint)
        endpoint.enter("InService")
        await self._stop(before)

    def delete(self, request: Record) -> Record:
        endpoint: Endpoint = self._records.find("Endpoint", request["EndpointName"])
        endpoint.require("InService", "Failed")
        if left := sorted(it.name for it in self._records.components(endpoint.name)):
            raise Refused(f"Endpoint {endpoint.name} has inference components: {', '.join(left)}")
        endpoint.enter("Deleting")
        self._copies.begin(self._end(endpoint))
        return {}

    async def _end(self, endpoint: Endpoint) -> None:
        await self._stop(endpoint.copies)
        self._records.remove(endpoint)


def _configure(endpoint: Endpoint, config: Record) -> None:
    variant = endpoint.variant = config["ProductionVariants"][0]
    endpoint.described["EndpointConfigName"] = config["EndpointConfigName"]
    endpoint.described["ProductionVariants"] = [
        {
            "VariantName": variant["VariantName"],
            "CurrentWeight": 1.0,
            "DesiredWeight": 1.0,
            "CurrentInstanceCount": 0,
            "DesiredInstanceCount": _instances(variant),
        }
    ]


def _instances(variant: Record) -> int:
    return int(variant.get("InitialInstanceCount", 1))


def _count(endpoint: Endpoint) -> None:
    """Describe how many instances there are. One without a model has all that were asked for."""
    (variant,) = endpoint.described["ProductionVariants"]
    all_of_them = variant["DesiredInstanceCount"]
    variant["CurrentInstanceCount"] = (
        len(endpoint.copies) if "ModelName" in endpoint.variant else all_of_them
    )
