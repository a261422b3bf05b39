# SPDX-License-Identifier: Apache-2.0
"""The priority of requests that name an InferenceObjective (Gateway API's inference extension). A
file has the objectives as Kubernetes manifests.
"""

import functools
import logging
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from lmi_config.facts import strict_yaml
from lmi_config.options.declared import Settings
from lmi_config.options.settings import SettingsError
from serving.access.caller import Caller
from serving.follow import FaultLog, changes, content
from serving.protocol import OBJECTIVE

log = logging.getLogger(__name__)

KIND = "InferenceObjective"


class _Metadata(msgspec.Struct):
    name: str


class _Spec(msgspec.Struct, frozen=True):
    priority: int = 0


class _Objective(msgspec.Struct):
    """inference.networking.x-k8s.io/v1alpha2; its other fields only concern Kubernetes."""

    kind: str
    metadata: _Metadata
    spec: _Spec = _Spec()


class Objectives:
    """Gives a request's sender the priority of the objective that the request names.

    Raises SettingsError if the file cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._file = Path(settings.router_objectives) if settings.router_objectives else None
        self._option = settings.named("router_objectives")
        self._content = b""
        self._priorities: Mapping[str, int] = {}
        if not self._file:
            return
        if not settings.router_secret:
            raise SettingsError(
                [
                    f"{self._option} needs OPTION_ROUTER_SECRET, here and on the servers: the "
                    "router signs the priority of each request with it"
                ]
            )
        try:
            self._content = content(self._file)
            self._priorities = parsed(self._content)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise SettingsError([f"{self._option}={str(self._file)!r}: {reason}"]) from None

    def applied(self, caller: Caller, headers: Mapping[bytes, bytes]) -> Caller:
        """Return the caller of a request with these headers. A key's priority takes precedence over
        that of an objective, which any client can name. Unknown names may be those of other pools.
        """
        if not self._priorities or (named := headers.get(OBJECTIVE)) is None:
            return caller
        name = named.decode("latin-1")
        if not (priority := self._priorities.get(name, 0)):
            return caller
        # The engine runs the lowest priority first, and Kubernetes the highest.
        return msgspec.structs.replace(
            caller, priority=caller.priority or -priority, sheddable=priority < 0
        )

    async def follow(self) -> None:
        """Reload the file until cancelled; does nothing without a file."""
        if not self._file:
            return
        faults = FaultLog("the objectives", self._file, "objectives")
        read = functools.partial(content, self._file)
        found = changes(read, parsed, faults, self._content)
        async with aclosing(found):
            async for self._priorities in found:
                log.info("the objectives in %s were reloaded", self._file)


def parsed(text: bytes) -> Mapping[str, int]:
    """Return the priorities of a manifest's objectives, by their names. Raises ValueError."""
    try:
        documents = strict_yaml.read_all(text)
    except strict_yaml.NotYAML as error:
        raise ValueError(f"it is {error}") from None
    found: dict[str, int] = {}
    for document in documents:
        for one in _items(document):
            try:
                objective = msgspec.convert(one, _Objective)
            except msgspec.ValidationError as error:
                raise ValueError(f"it should have objects of the kind {KIND}: {error}") from None
            name = objective.metadata.name
            if objective.kind != KIND:
                raise ValueError(f"{name} is of the kind {objective.kind}; it should be {KIND}")
            if name in found:
                raise ValueError(f"two objectives are called {name}; rename one")
            found[name] = objective.spec.priority
    return found


def _items(document: Any) -> list[Any]:
    """Return the objects of a document: kubectl's list of objects, one object, or none."""
    if document is None:
        return []
    items = document.get("items") if isinstance(document, dict) else None
    return items if isinstance(items, list) else [document]
