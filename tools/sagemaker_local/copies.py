# SPDX-License-Identifier: Apache-2.0
"""The running copies of containers for endpoints and components, and their background work."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from tools.sagemaker_local.container import PROCESS, Copy, Limits, Recipe
from tools.sagemaker_local.records import Record
from tools.sagemaker_local.store import Artifact, Failed, Store
from tools.sagemaker_local.wire import Refused

log = logging.getLogger(__name__)

MULTI_MODEL = "MultiModel"
"""The mode of containers with several models."""


class Copies:
    """Starts copies, stops them, and runs what takes longer than a call in the background."""

    def __init__(self, limits: Limits, store: Store, work: Path, programs: Sequence[str]) -> None:
        """programs: that an Image may name."""
        self._programs = {Path(it).resolve() for it in programs}
        self._limits = limits
        self._store = store
        self._work = work
        self._running: list[Copy] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, recipe: Recipe, ended: Callable[[], Coroutine[Any, Any, None]]) -> Copy:
        """A copy that is healthy. ended: is run when it exits by itself. Raises Failed."""
        copy = Copy(recipe, self._limits, self._store, self._work, lambda: self.begin(ended()))
        self._running.append(copy)
        try:
            await copy.start()
        except BaseException:
            self._running.remove(copy)
            raise
        return copy

    async def stop(self, copy: Copy | None) -> None:
        if copy:
            await copy.stop()
            self._running.remove(copy)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("the stand-in failed", exc_info=error)

    async def close(self) -> None:
        """Stop everything that runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(copy.stop() for copy in self._running))

    def check_image(self, image: str) -> None:
        """Raise Refused for a program that the command line of the stand-in did not name."""
        program = image.removeprefix(PROCESS)
        if program != image and Path(program).resolve() not in self._programs:
            raise Refused(
                f"Image {image!r:.200}: the stand-in runs only programs that its command line "
                f"names; start it with --program {program:.200}"
            )

    def check_files(self, container: Record) -> None:
        """Raise Refused where the files of a model's container are not in the store."""
        model = _model_artifact(container)
        if container.get("Mode") == MULTI_MODEL:
            if not model or "ModelDataSource" in container or not model.url.endswith("/"):
                raise Refused(
                    "ModelDataUrl of a multi-model endpoint is the prefix of its models, with a "
                    "slash at the end"
                )
            model = model._replace(packed=False)
        for artifact in (model, *_channels(container).values()):
            if artifact:
                if not artifact.packed and not artifact.url.endswith("/"):
                    raise Refused(f"S3Uri {artifact.url} is a prefix and should end with a slash")
                try:
                    self._store.require(artifact)
                except Failed as fault:
                    raise Refused(str(fault)) from None

    def overview(self) -> Record:
        """The running copies, and the platform's own calls to each."""
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
                for it in self._running
            ]
        }


def recipe(name: str, container: Record, more: Record) -> Recipe:
    """The recipe of a copy. more: settings of a variant or a component for its containers."""
    metrics = container.get("ContainerMetricsConfig", {}).get("MetricsEndpoints") or [{}]
    several = container.get("Mode") == MULTI_MODEL
    own = {"SAGEMAKER_MULTI_MODEL": "true"} if several else {}
    return Recipe(
        name,
        container["Image"],
        container.get("Environment", {}) | own,
        None if several else _model_artifact(container),
        _channels(container),
        more.get("ContainerStartupHealthCheckTimeoutInSeconds", 8 * 60),
        metrics[0].get("MetricPublishFrequencyInSeconds", 60),
        metrics[0].get("MetricsEndpointPath", "/metrics"),
        more.get("MaxMemoryRequiredInMb"),
        int(more.get("NumberOfAcceleratorDevicesRequired", 0)),
        container["ModelDataUrl"] if several else None,
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
