# SPDX-License-Identifier: Apache-2.0
"""Several copies of the model in one container: a router, the cache server, and a server for each
copy, all of them children of this process.

This process handles no requests and has no engine. It plans once, starts its children, restarts
them when they end, and stops them in order.
"""

import asyncio
import dataclasses
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from prometheus_client import Counter, Gauge

from lmi_config.options.option_files import Given
from lmi_config.plan import explain
from lmi_config.plan.devices.copies import Copy
from serving.aio import in_thread
from serving.copies import divided, life
from serving.copies.child import Child
from serving.copies.life import PROGRAM, QUICK_ENDS, STEADY_S, Container, Tasks, exit_code
from serving.copies.looks import Looks
from serving.copies.part import CopyPart, RouterPart
from serving.exit import DIED, START_FAILED, Exit, of_its_device
from serving.follow import kept
from serving.http.sockets import local_url
from serving.kv_cache import fingerprints
from serving.kv_cache.cache_server import CacheServer
from serving.lifecycle import Step
from serving.observability.redaction import redacted
from serving.protocol import INVOCATIONS
from serving.router.fleet.own_copies import OwnCopies
from serving.server import cache
from serving.server.prepare import Deployment, Shared
from serving.sources.digests import State

log = logging.getLogger(__name__)

PATIENCE_S = 600.0
"""Maximum seconds with fewer than OPTION_COPIES_LEAST ready copies, if
OPTION_MODEL_LOADING_TIMEOUT is not set."""
WATCH_S, CALM_S = 0.5, 2.0
"""Seconds between two checks of the copies' readiness, and while all are ready."""
CHANGED = (
    "the model's files have changed since the container started. The other copies still have the "
    "files from before: restart the container to serve the new ones"
)
_COPIES = Gauge("slipway_copies", "Copies of the model in this container.")
_READY = Gauge("slipway_copies_ready", "Those of them that are ready.")
_LEFT_OUT = Gauge("slipway_copy_left_out", "1 for a copy that is not started any more.", ["copy"])
_RESTARTS = Counter("slipway_copy_restarts", "Starts of a copy after its first.", ["copy"])


def supervise(
    deployment: Deployment, argued: Mapping[str, Given], program: Sequence[str] = PROGRAM
) -> Exit:
    """Serve until SIGTERM or SIGINT, or until a failure. program: see PROGRAM."""
    for finding in deployment.plan.findings:
        log.warning("%s", finding)
    _, size, model = next(explain.rows(deployment.plan))
    count = len(deployment.plan.copies)
    facts = {"plan": explain.as_json(deployment.plan)}
    text = f"model: {model}, {size}, {count} copies"
    log.info("plan", extra={"facts": facts, "text": text})

    async def run(listener: socket.socket | None, folder: Path) -> Exit:
        return await Supervisor(deployment, argued, listener, folder, program).run()

    return life.live(deployment.plan.settings, run)


class Supervisor(Container):
    """The life of a container with several copies."""

    def __init__(
        self,
        deployment: Deployment,
        argued: Mapping[str, Given],
        listener: socket.socket | None,
        folder: Path,
        program: Sequence[str],
    ) -> None:
        """listener, folder, program: as for Container."""
        super().__init__(deployment.plan.settings, argued, listener, folder, program)
        self._deployment = deployment
        self._plan = deployment.plan
        self._own = OwnCopies(
            urls=divided.urls(self._plan),
            folder=folder,
            least=self._settings.copies_least,
            closed=bool(self._settings.router_secret),
        )
        self._left_out: dict[int, str] = {}
        self._files: dict[str, State] = {}
        self._cache: CacheServer | None = None
        self._looks = Looks(
            {copy.number: copy.url for copy in self._plan.copies},
            divided.of_router(self._settings, self._own.urls, self._secret),
        )
        _COPIES.set(self._own.count)

    @property
    def _was_ready(self) -> bool:
        return self._own.met

    async def _start(self) -> Tasks:
        """Fetch the model, start the cache server, and start the tasks that keep the copies."""
        model, draft = self._deployment.model, self._deployment.draft
        folder = await cache.fetch(model, _note)
        self._files = await in_thread(fingerprints.states, folder)
        of_draft = await cache.fetch(draft, _note) if draft else None
        self._cache, name = await cache.start(
            self._plan, folder, self._looks.prefilled, self._looks.hits
        )
        without = cache.without(self._cache)
        shared = Shared(folder=folder, draft=of_draft, name=name, without_tiers=without)
        watching = kept("copies", self._watch)
        works = [watching, *(self._keep(copy, shared) for copy in self._plan.copies)]
        return self._keep_running(works)

    def _router_part(self, report: int, listener: int | None) -> RouterPart:
        return RouterPart(
            parent=os.getpid(),
            report=report,
            argued=self._argued,
            settings=divided.of_router(self._settings, self._own.urls, self._secret),
            listener=listener,
            copies=self._own,
        )

    async def _close(self) -> None:
        if self._cache:
            await self._cache.stop()
        self._looks.close()

    # copies

    async def _keep(self, copy: Copy, shared: Shared) -> None:
        """Keep a copy running until it fails for good."""
        quick = 0
        while not self._stopping:
            child = self._servers[copy.number] = await self._start_copy(copy, shared)
            end = await child.ended()
            del self._servers[copy.number]
            ready_for = self._looks.gone(copy.number)
            if self._stopping:
                return
            facts = {"facts": {"copy": copy.number, "code": end.code}}
            what = f"copy {copy.number}: {end.reason or 'it ended'}"
            if not self._own.met and self._may_go_on(end):
                self._leave_out(copy, "a copy cannot start because of its device", end)
                return
            if not self._own.met:
                self._fail(Exit(exit_code(end, START_FAILED), end.stage, what))
                return
            if self._settings.fail_fast:
                self._fail(Exit(DIED, "serving", f"{what}, and SERVING_FAIL_FAST is set"))
                return
            quick = quick + 1 if ready_for < STEADY_S else 1
            if quick == QUICK_ENDS:
                self._leave_out(copy, f"a copy ended {QUICK_ENDS} times in a row", end)
                if len(self._left_out) == self._own.count:
                    self._fail(Exit(DIED, "serving", f"no copy can serve: {what}"))
                return
            log.error("a copy has ended, and is started again: %s", end.reason, extra=facts)
            _RESTARTS.labels(str(copy.number)).inc()
            await asyncio.sleep(life.RESTART_S)
            changed = await in_thread(self._files_changed, shared.folder)
            if changed and shared.without_tiers != CHANGED:
                log.error("copy %d starts without KV cache tiers: %s", copy.number, CHANGED)
                shared = dataclasses.replace(shared, without_tiers=CHANGED)

    def _files_changed(self, folder: Path) -> bool:
        """Whether the tiers may have KV of other weights than a copy would load now."""
        try:
            return fingerprints.states(folder) != self._files
        except OSError:
            return True

    def _may_go_on(self, end: Exit) -> bool:
        """Whether the others may serve without a copy that has ended at its start. Only its device
        differs from theirs.
        """
        left = self._own.count - len(self._left_out) - 1
        enough = left >= max(self._settings.copies_least, 1)
        return enough and not self._settings.fail_fast and of_its_device(end.reason)

    def _leave_out(self, copy: Copy, what: str, end: Exit) -> None:
        """Leave a copy out from now on, and tell everybody. what: the event, for the log."""
        reason = redacted(end.reason)
        log.error(
            "%s, and is left out: %s",
            *(what, reason),
            extra={"facts": {"copy": copy.number, "code": end.code}},
        )
        self._left_out[copy.number] = reason
        _LEFT_OUT.labels(str(copy.number)).set(1)
        self._own.leave_out(self._left_out)

    async def _start_copy(self, copy: Copy, shared: Shared) -> Child:
        report = os.pipe()
        deployment = divided.of_copy(*(self._deployment, copy, self._secret, shared), self._folder)
        part = CopyPart(
            parent=os.getpid(),
            report=report[1],
            argued=self._argued,
            number=copy.number,
            deployment=deployment,
            cpus=copy.machine.cpus,
        )
        environ = {**deployment.plan.environment, **self._secrets}
        return await Child.start(self._program, part, report, environ)

    async def _watch(self) -> None:
        """Watch the copies' readiness, and the time with too few ready copies."""
        patience = self._settings.model_loading_timeout or PATIENCE_S
        enough = time.monotonic()
        while True:
            await self._looks.look(counts=self._cache is not None)
            ready = len(self._looks.ready)
            _READY.set(ready)
            await in_thread(divided.write_series, self._own.series)
            was_met = self._own.met
            if self._own.enough(ready):
                enough = time.monotonic()
            if self._own.met and not was_met:
                self._say_ready()
            if self._own.met and time.monotonic() - enough > patience:
                some = "has" if ready == 1 else "have"
                reason = (
                    f"{ready} of {self._own.count} copies {some} been ready for {patience:.0f} s"
                )
                self._fail(Exit(DIED, "serving", reason))
                return
            calm = ready + len(self._left_out) == self._own.count
            await asyncio.sleep(CALM_S if calm else WATCH_S)

    def _say_ready(self) -> None:
        seconds = round(time.monotonic() - self._began, 1)
        ready = self._own.count - len(self._left_out)
        url = local_url(self._settings.host, self._settings.port)
        body = '{"inputs": "The capital of France is"}'
        text = (
            f"{ready} of {self._own.count} copies are ready after {seconds} s. Try:\n\n"
            f"curl -s {url}{INVOCATIONS[0]} -d '{body}'\n"
        )
        facts = {"elapsed_s": seconds, "copies": ready}
        log.info("ready", extra={"facts": facts, "text": text, "busy": False})


def _note(step: Step, text: str = "") -> None:
    said = text or step.sentence
    log.info(said, extra={"text": said, "busy": True})
