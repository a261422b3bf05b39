# SPDX-License-Identifier: Apache-2.0
"""Records of the control plane: what there is of each kind, as Describe and List show it."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Iterator
from typing import Any

from tools.sagemaker_local.container import Copy
from tools.sagemaker_local.wire import Refused, operation

log = logging.getLogger(__name__)

KINDS = {
    "Model": "model",
    "EndpointConfig": "endpoint configuration",
    "Endpoint": "endpoint",
    "InferenceComponent": "inference component",
}
"""Kinds → their names in messages."""
FILTERS = {"NameContains", "StatusEquals", "EndpointNameEquals"}

Record = dict[str, Any]


@dataclasses.dataclass(kw_only=True)
class Thing:
    """A model, an endpoint configuration, an endpoint or a component. described: by Describe."""

    kind: str
    name: str
    described: Record

    @property
    def arn(self) -> Record:
        """The answer of an operation that creates or updates it."""
        return {f"{self.kind}Arn": self.described[f"{self.kind}Arn"]}

    @property
    def status(self) -> str:
        return str(self.described[f"{self.kind}Status"])

    def enter(self, status: str, reason: str | None = None) -> None:
        self.described[f"{self.kind}Status"] = status
        self.described["LastModifiedTime"] = time.time()
        self.described.pop("FailureReason", None)
        if reason:
            self.described["FailureReason"] = reason
            log.warning("%s %s: %s: %s", self.kind, self.name, status, reason)
        else:
            log.info("%s %s: %s", self.kind, self.name, status)

    def require(self, *statuses: str) -> None:
        """Raise Refused unless it has one of these statuses."""
        if self.status not in statuses:
            arn = self.described[f"{self.kind}Arn"]
            raise Refused(
                f'Cannot update in-progress {KINDS[self.kind]} "{arn}", which is {self.status}.'
            )


@dataclasses.dataclass(kw_only=True)
class Endpoint(Thing):
    """copies: of its variant's model, one on each instance; an endpoint for components has none.

    sessions: the copies that began those that are open.
    """

    copies: list[Copy] = dataclasses.field(default_factory=list)
    sessions: dict[str, Copy] = dataclasses.field(default_factory=dict)
    variant: Record = dataclasses.field(default_factory=dict)

    def route(self, session: str | None) -> Copy | None:
        """The copy that answers: the one that began the session, or else the one with the fewest
        requests under way.
        """
        if (home := self.sessions.get(session or "")) and home.healthy:
            return home
        copy = min(self.copies, key=lambda it: (not it.healthy, it.under_way), default=None)
        if copy:  # those with as few take turns
            self.copies.remove(copy)
            self.copies.append(copy)
        return copy


@dataclasses.dataclass(kw_only=True)
class Component(Thing):
    """adapter: its id in the base's container; a base component has none.

    lock: held by a base component while its copy or its adapters change.
    """

    adapter: str | None = None
    copy: Copy | None = None
    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)

    @property
    def specification(self) -> Record:
        specification: Record = self.described["Specification"]
        return specification

    @property
    def base(self) -> str | None:
        return self.specification.get("BaseInferenceComponentName")


class Records:
    """Everything that exists, by kind and name."""

    def __init__(self, region: str, account: str) -> None:
        self.region = region
        self.account = account
        self._things: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}

    def get(self, kind: str, name: str | None) -> Any:
        """The thing of this name, or None."""
        return self._things[kind].get(name or "")

    def find(self, kind: str, name: str) -> Any:
        """The thing of this name. Raises Refused if there is none."""
        found = self.get(kind, name)
        if not found:
            raise Refused(f'Could not find {KINDS[kind]} "{self._arn(kind, name)}".')
        return found

    def components(self, endpoint: str, base: str | None = None) -> Iterator[Component]:
        """The components of an endpoint, or the adapters of a base component."""
        for it in self._things["InferenceComponent"].values():
            if it.described["EndpointName"] == endpoint and base in (None, it.base):
                yield it

    def new(self, kind: str, request: Record, status: str | None = None) -> Record:
        """Describe's answer for a new resource. Raises Refused where its name is taken."""
        name = request[f"{kind}Name"]
        arn = self._arn(kind, name)
        if name in self._things[kind]:
            raise Refused(f'Cannot create already existing {KINDS[kind]} "{arn}".')
        now = time.time()
        described = {key: value for key, value in request.items() if key != "Tags"}
        described |= {f"{kind}Arn": arn, "CreationTime": now}
        return described | ({"LastModifiedTime": now, f"{kind}Status": status} if status else {})

    def _arn(self, kind: str, name: str) -> str:
        word = KINDS[kind].replace(" ", "-").replace("configuration", "config")
        return f"arn:aws:sagemaker:{self.region}:{self.account}:{word}/{name}"

    def add(self, thing: Thing) -> Record:
        self._things[thing.kind][thing.name] = thing
        return thing.arn

    def remove(self, thing: Thing) -> None:
        self._things[thing.kind].pop(thing.name, None)

    def describe(self, kind: str, request: Record) -> Record:
        described: Record = self.find(kind, request[f"{kind}Name"]).described
        container = described.get("Specification", {}).get("Container", {})
        if "Image" not in container:
            return described
        # Describe has the image of a component's own container in another shape.
        summary = {key: value for key, value in container.items() if key != "Image"}
        summary["DeployedImage"] = {"SpecifiedImage": container["Image"]}
        return described | {"Specification": {**described["Specification"], "Container": summary}}

    def listed(self, kind: str, request: Record) -> Record:
        """All that the filters let through, the newest first, on one page."""
        if more := sorted(request.keys() - FILTERS):
            raise Refused(f"The stand-in lists by {', '.join(sorted(FILTERS))}, not by {more[0]}")
        shape: Any = operation("sagemaker", f"List{kind}s").output_shape
        summary = shape.members[f"{kind}s"].member.members
        found = [
            {member: it.described[member] for member in summary if member in it.described}
            for it in reversed(self._things[kind].values())
            if request.get("NameContains", "").lower() in it.name.lower()
            and request.get("StatusEquals") in (None, it.described.get(f"{kind}Status"))
            and request.get("EndpointNameEquals") in (None, it.described.get("EndpointName"))
        ]
        return {f"{kind}s": found}
