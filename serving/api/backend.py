# SPDX-License-Identifier: Apache-2.0
"""The API's state, from the server's start to its end."""

import datetime
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lmi_config.options.declared import Settings
from lmi_config.options.settings import SettingsError
from serving import VERSION
from serving.access.limits import Limiter
from serving.batch.answers import FilesAndBatches
from serving.batch.objects import OtherCopies
from serving.batch.runner import Runner
from serving.batch.store import Store
from serving.engine.base import Engine
from serving.inference.pipeline import Pipeline
from serving.kv_cache.session_client import SessionClient
from serving.lifecycle import Lifecycle, Stage, Step
from serving.lora.adapter import State
from serving.lora.adapter_registry import AdapterRegistry
from serving.observability.error_rate import ErrorRates
from serving.observability.latency_targets import Objectives
from serving.observability.tracing import tracer
from serving.user_code import UserCode

NO_PLAN: Mapping[str, Any] = MappingProxyType({"rows": (), "options": (), "findings": ()})


class Backend:
    """The API's state: without a pipeline while the server starts, and with one afterwards."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        settings: Settings,
        plan: Mapping[str, Any] = NO_PLAN,
        others: OtherCopies | None = None,
    ) -> None:
        """plan: as explain.summary() has it. others: the other copies of this container."""
        self._others = others
        self._lifecycle = lifecycle
        self._settings = settings
        self._plan = plan
        self._pipeline: Pipeline | None = None
        self.error_rates = ErrorRates(settings)
        self.objectives = Objectives(settings)
        self.tracer = tracer(settings, "slipway")
        """Sends spans; None without an endpoint."""
        self.limiter = Limiter(settings.limits_url)
        """Enforces the keys' limits."""
        self._store = _store(settings)
        self.files = FilesAndBatches(settings, self._store)
        self.gpus = 0
        """The number of GPUs that the engine may use."""
        self.opened = datetime.datetime.now(datetime.UTC)
        """When the server became ready."""

    def open(
        self,
        engine: Engine,
        adapters: AdapterRegistry | None,
        code: UserCode | None,
        gpus: int = 0,
        tiers: SessionClient | None = None,
    ) -> Pipeline:
        """Begin to answer requests: the server is ready. code: the model's model.py. tiers: as
        Pipeline has it.
        """
        self._pipeline = Pipeline(engine, adapters, code, self._settings, self.limiter, tiers)
        if self._store:
            self.files.runner = Runner(*(self._store, self._settings, self._pipeline, self._others))
        self.gpus = gpus
        self.opened = datetime.datetime.now(datetime.UTC)
        self._lifecycle.enter(Stage.READY)
        self.error_rates.clear()  # errors of requests that came too early
        return self._pipeline

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline. Raises NotReady before the server is ready, and once it stops."""
        self._lifecycle.require_ready()
        assert self._pipeline
        return self._pipeline

    def status(self) -> dict[str, object]:
        """Return the data of the page that no other path has: the plan, the steps of the start, the
        requests by tenant, and the adapters that are not merely registered, or could not be loaded.
        """
        progress, pipeline = self._lifecycle.progress, self._pipeline
        adapters = pipeline.adapters if pipeline else None
        return {
            "version": VERSION,
            "models": self._settings.model_names,
            "plan": dict(self._plan),
            "steps": [
                {"step": step, "text": step.sentence or step, "seconds": progress.get(step)}
                for step in Step
                if step is not Step.PLANNING
            ],
            "requests": pipeline.requests if pipeline else [],
            "adapters": adapters
            and [
                {"name": it.name, "state": it.state, "fault": it.fault}
                for it in adapters.listed()
                if it.fault or it.state is not State.REGISTERED
            ],
        }

    def health(self) -> tuple[int, dict[str, object]]:
        """Return the status and JSON body of /ping's answer."""
        status, answer = self._lifecycle.ping()
        if status == 200:
            trouble = self.trouble
            if trouble:
                return 503, {**answer, "status": "failing", "detail": trouble}
        return status, answer

    @property
    def trouble(self) -> str | None:
        """The reason why requests fail although the server is ready, or None."""
        return self.error_rates.exceeded() or self.pipeline.code_failing


def _store(settings: Settings) -> Store | None:
    """Return the store of files and batches, or None without a folder. Raises SettingsError if the
    folder cannot be used.
    """
    folder = settings.batch_folder
    if not folder:
        return None
    store = Store(Path(folder), settings)
    try:
        store.open()
    except OSError as error:
        option = settings.named("batch_folder")
        raise SettingsError([f"{option}={folder!r}: {error.strerror}"]) from None
    return store
