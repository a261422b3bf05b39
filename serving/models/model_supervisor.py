# SPDX-License-Identifier: Apache-2.0
"""Several models in one container: a router, and a server for each model that runs, all of them
children of this process.

The router tells this process which models have requests, and this process decides which models run
(`swaps.steps`). It starts and stops their servers, and tells the router their states.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import time
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
from prometheus_client import Counter, Gauge

from lmi_config.facts.machine import free_ports
from lmi_config.options.parsers import MOST_MODELS
from lmi_config.options.settings import SettingsError
from lmi_config.plan.memory import Footprint
from serving.aio import in_thread, set_within
from serving.copies import divided, life
from serving.copies.child import Child
from serving.copies.life import PROGRAM, QUICK_ENDS, STEADY_S, Container, Tasks, gone
from serving.copies.part import CopyPart, RouterPart
from serving.exit import START_FAILED, Exit
from serving.follow import kept
from serving.lifecycle import SHUTDOWN
from serving.models import offered, swaps
from serving.models.offered import PORTS, Offer, Offers
from serving.models.swaps import Act, State
from serving.observability import redaction
from serving.observability.redaction import redacted
from serving.protocol import PING
from serving.router.models.model_messages import (
    LONGEST,
    Answer,
    Call,
    Door,
    Report,
    Row,
    Told,
    Work,
    line,
    read_report,
)
from serving.server import orders

log = logging.getLogger(__name__)

HOLD_S = 600
"""Maximum seconds that a request waits for its model, if no option sets them."""
DRAIN_S = 300.0
"""Maximum seconds for the requests in flight of a model that makes room. After that its server gets
SIGTERM, and has SHUTDOWN.drain for the rest."""
STOP_S = SHUTDOWN.drain + SHUTDOWN.farewell + SHUTDOWN.engine + 2.0
"""Seconds after which a stopping server is killed."""
ORDER_S = 120.0
"""Maximum seconds until an engine sleeps, or is awake."""
TROUBLE_S = 30.0
"""Seconds between a failed start of a model and its next start."""
LOOK_S = 0.25
"""Seconds between two decisions if nothing happens."""
PING_S = 0.2

_IDLE = Work(0, 0, 0)

_STATE = Gauge("slipway_model_state", "1 for the state of each model.", ["model", "state"])
_STARTS = Counter("slipway_model_starts", "Starts of a model's server.", ["model"])
_START_S = Gauge("slipway_model_start_seconds", "Seconds of a model's last start.", ["model"])


def supervise(found: Offers, program: Sequence[str] = PROGRAM) -> Exit:
    """Serve until SIGTERM or SIGINT, or until a failure. program: the command line of a child."""
    own = {f"{it.name}: {key}": given for it in found.models for key, given in it.given.items()}
    redaction.hide(os.environ, {**found.argued, **own})
    for offer in found.models:
        for finding in offer.deployment.plan.findings:
            log.warning("model %s: %s", offer.name, finding)
    facts = {"plan": offered.as_json(found)}
    log.info("plan", extra={"facts": facts, "text": offered.as_text(found)})

    async def run(listener: socket.socket | None, folder: Path) -> Exit:
        return await Supervisor(found, listener, folder, program).run()

    return life.live(found.settings, run)


@dataclasses.dataclass(kw_only=True)
class Entry:
    """A model with its present state and requests.

    number: it is never used again. since: when it came to its state. quick: its ends in a row
    within STEADY_S. loading: the call that waits for its first start. orders: the socket for orders
    to its server. Other fields are as in swaps.Model and in Work.
    """

    offer: Offer
    number: int
    state: State = State.COLD
    since: float = dataclasses.field(default_factory=time.monotonic)
    start_s: float = 0.0
    wake_s: float = 0.0
    used: float = 0.0
    waiting_since: float | None = None
    work: Work = _IDLE
    quick: int = 0
    trouble: str = ""
    trouble_until: float = 0.0
    leaves: bool = False
    falls_asleep: bool = False
    orders: socket.socket | None = None
    loading: "asyncio.Future[Answer] | None" = None

    @property
    def endpoint(self) -> str:
        return f"{self.offer.deployment.plan.settings.host}:{self.offer.port}"

    def seen(self) -> swaps.Model:
        """The model for a decision."""
        waiting = self.waiting_since
        if waiting is None and self.offer.pinned:
            waiting = self.since
        if self.trouble or self.leaves or (self.state is not State.COLD and not self.work.waiting):
            waiting = None
        return swaps.Model(
            name=self.offer.name,
            state=self.state,
            awake=self.offer.awake,
            asleep=self.offer.asleep,
            pinned=self.offer.pinned,
            start_s=self.start_s,
            wake_s=self.wake_s,
            ready_since=self.since,
            used=self.used,
            in_flight=self.work.in_flight,
            waiting_since=waiting,
            falls_asleep=self.falls_asleep,
        )

    def row(self) -> Row:
        """The model for the router."""
        return Row(
            name=self.offer.name,
            url=self.offer.url,
            state=self.state,
            endpoint=self.endpoint,
            running=self.state in (State.READY, State.STOPPING),
            open=self.state is State.READY,
            trouble=self.trouble,
        )

    def take(self, work: Work, now: float) -> None:
        """Record the model's requests, as the router has reported them."""
        if work != self.work:
            self.used = now
        if not work.waiting:
            self.waiting_since = None
        elif self.waiting_since is None:
            self.waiting_since = now
        self.work = work


class Supervisor(Container):
    """The life of a container with several models."""

    def __init__(
        self, found: Offers, listener: socket.socket | None, folder: Path, program: Sequence[str]
    ) -> None:
        """listener, folder, program: as for Container."""
        super().__init__(found.settings, found.argued, listener, folder, program)
        self._offers = found
        closed = bool(found.settings.router_secret)
        self._door = Door(folder=folder, dynamic=found.dynamic, closed=closed)
        self._entries: dict[str, Entry] = {}
        self._numbers = 0
        self._revision = 0
        self._written = -1
        self._seen = -1
        self._listening: asyncio.Server | None = None
        self._router_end: asyncio.StreamWriter | None = None
        self._met = False
        self._planned: set[str] = set()  # names of models that are being planned
        self._works: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._client = httpx.AsyncClient(trust_env=False, timeout=5.0)
        for offer in found.models:
            self._add(offer)

    @property
    def _was_ready(self) -> bool:
        return self._met

    def _router_part(self, report: int, listener: int | None) -> RouterPart:
        settings = divided.of_router(self._settings, (), self._secret)
        hold = settings.router_hold or settings.model_loading_timeout or HOLD_S
        return RouterPart(
            parent=os.getpid(),
            report=report,
            argued=self._argued,
            settings=dataclasses.replace(settings, router_hold=hold),
            listener=listener,
            models=self._door,
        )

    async def _start(self) -> Tasks:
        self._listening = await asyncio.start_unix_server(
            self._on_router, self._door.socket, limit=LONGEST
        )
        return self._keep_running([kept("models", self._decide)])

    async def _close(self) -> None:
        if self._listening:
            self._listening.close()
        for work in self._works:
            work.cancel()
        await asyncio.gather(*self._works, return_exceptions=True)
        await self._client.aclose()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._works.add(task)
        task.add_done_callback(self._works.discard)
        task.add_done_callback(self._on_done)

    # the router

    async def _on_router(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Follow a router until it ends. There is one at a time."""
        self._router_end, self._met = writer, True
        self._tell()
        try:
            while told := await reader.readline():
                self._take(read_report(told))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            log.error("the router's report cannot be read: %s", error)
        finally:
            writer.close()
            if self._router_end is writer:
                self._router_end = None
                for entry in self._entries.values():
                    entry.take(_IDLE, time.monotonic())
            self._changed.set()

    def _take(self, report: Report) -> None:
        now = time.monotonic()
        self._seen = report.seen
        for name, work in report.work.items():
            if entry := self._entries.get(name):
                entry.take(work, now)
        for call in report.calls:
            self._spawn(self._call(call))
        self._changed.set()

    def _tell(self, answers: Iterable[Answer] = ()) -> None:
        """Tell the router all states, and answers to its calls."""
        if self._router_end:
            rows = tuple(it.row() for it in self._entries.values())
            self._router_end.write(line(Told(self._revision, rows, tuple(answers))))

    def _enter(self, entry: Entry, state: State, trouble: str = "") -> None:
        """A model is in another state."""
        if entry.state is not state:
            log.info("model", extra={"facts": {"model": entry.offer.name, "state": state}})
        entry.state, entry.trouble, entry.since = state, trouble, time.monotonic()
        self._publish()

    def _publish(self) -> None:
        _STATE.clear()
        for it in self._entries.values():
            for state in State:
                _STATE.labels(it.offer.name, state).set(it.state is state)
        self._revision += 1
        self._tell()
        self._changed.set()

    # calls

    async def _call(self, call: Call) -> None:
        """Load or unload a model, and answer."""
        if call.url is None:
            answer = await self._unload(call.number, call.name)
        elif call.name in self._entries or call.name in self._planned:
            answer = Answer(call.number, 409, f"the model {call.name} is loaded already")
        else:
            self._planned.add(call.name)
            try:
                answer = await self._load(call.number, call.name, call.url, waits=call.waits)
            finally:
                self._planned.discard(call.name)
        self._tell([answer])

    async def _load(self, number: int, name: str, url: str, *, waits: bool) -> Answer:
        if len(self._entries) + len(self._planned) > MOST_MODELS:
            return Answer(number, 507, f"{MOST_MODELS} models are loaded, and there may be no more")
        try:
            offer = await in_thread(self._planned_offer, name, url)
        except SettingsError as error:
            return Answer(number, 400, redacted("; ".join(error.faults)))
        except Exception:  # of files with wrong contents
            log.exception("planning a model failed", extra={"facts": {"model": name}})
            return Answer(
                number, 400, f"the model {name} cannot be planned; the log has the reason"
            )
        pinned = sum((it.offer.awake for it in self._entries.values()), Footprint(0))
        if fault := offered.needs(offer, pinned, self._offers.room):
            return Answer(number, 507, fault)
        entry = self._add(offer)
        loading: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        entry.loading = loading
        self._publish()
        if not waits:
            return Answer(number, 202, "")
        done = await loading
        return Answer(number, done.status, done.text)

    def _planned_offer(self, name: str, url: str) -> Offer:
        taken = {port for it in self._entries.values() for port in it.offer.ports}
        ports = free_ports(self._offers.environ, PORTS + len(taken))
        free = tuple(port for port in ports if port not in taken)[:PORTS]
        if len(free) < PORTS:
            raise SettingsError(
                ["SAGEMAKER_SAFE_PORT_RANGE has too few free ports; set a wider one"]
            )
        return self._offers.loaded(name, url, free)

    async def _unload(self, number: int, name: str) -> Answer:
        """Unload a model. Its processes have ended when this returns."""
        entry = self._entries.get(name)
        if entry is None or entry.leaves:
            return Answer(number, 404, f"the model {name} is not loaded")
        entry.leaves = True
        self._loaded(entry, 409, f"the model {name} was unloaded")
        if entry.state in (State.STARTING, State.READY):
            self._make_room(entry)
        while entry.state is not State.COLD:
            self._changed.clear()
            await self._changed.wait()
        self._remove(entry)
        return Answer(number, 200, "")

    def _add(self, offer: Offer) -> Entry:
        entry = self._entries[offer.name] = Entry(offer=offer, number=self._numbers)
        self._numbers += 1
        return entry

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.offer.name]
        for series in (_STARTS, _START_S):
            with contextlib.suppress(KeyError):
                series.remove(entry.offer.name)
        self._publish()

    def _loaded(self, entry: Entry, status: int, text: str = "") -> None:
        """A call that waits for a model's start is answered."""
        if entry.loading and not entry.loading.done():
            entry.loading.set_result(Answer(0, status, text))
        entry.loading = None

    # models

    async def _decide(self) -> None:
        """Decide again and again which models run."""
        while True:
            now = time.monotonic()
            for entry in self._entries.values():
                if entry.trouble and now > entry.trouble_until:
                    self._enter(entry, entry.state)
            seen = [it.seen() for it in self._entries.values()]
            for name, act in swaps.steps(seen, self._offers.room, now):
                entry = self._entries[name]
                if act is Act.START:
                    asleep = entry.state is State.ASLEEP
                    self._enter(entry, State.STARTING)
                    self._spawn(self._wake(entry) if asleep else self._serve(entry))
                else:
                    self._make_room(entry, sleeps=act is Act.SLEEP)
            if self._written != self._revision:
                self._written = self._revision
                await in_thread(divided.write_series, self._door.series)
            await set_within(self._changed, LOOK_S)
            self._changed.clear()

    async def _serve(self, entry: Entry) -> None:
        """Run a model's server until it ends."""
        name, began = entry.offer.name, time.monotonic()
        _STARTS.labels(name).inc()
        try:
            child = self._servers[entry.number] = await self._start_server(entry)
        except OSError as error:  # no process, or no file descriptor is left
            self._on_death(entry, Exit(START_FAILED, "start", str(error)), was_ready=False)
            return
        ended = asyncio.ensure_future(child.ended())
        ready = asyncio.ensure_future(self._ready(entry))
        await asyncio.wait({ended, ready}, return_when=asyncio.FIRST_COMPLETED)
        was_ready = ready.done()
        if was_ready and entry.state is State.STARTING:
            entry.start_s = time.monotonic() - began
            _START_S.labels(name).set(entry.start_s)
            self._enter(entry, State.READY)
            self._loaded(entry, 200)
        end = await ended
        ready.cancel()
        del self._servers[entry.number]
        if entry.orders:
            entry.orders.close()
            entry.orders = None
        if self._stopping:
            return
        if entry.state is State.STOPPING:
            self._enter(entry, State.COLD)
            return
        self._on_death(entry, end, was_ready=was_ready)

    def _on_death(self, entry: Entry, end: Exit, *, was_ready: bool) -> None:
        """A model's server has ended by itself. It is started again for the next request, unless it
        keeps failing.
        """
        reason = redacted(end.reason or "its server ended")
        facts = {"model": entry.offer.name, "code": end.code}
        log.error("a model's server has ended: %s", reason, extra={"facts": facts})
        steady = time.monotonic() - entry.since >= STEADY_S
        entry.quick = 1 if steady else entry.quick + 1
        # The last report may be older than this end. The router reports again after each change.
        entry.take(_IDLE, time.monotonic())
        if was_ready and entry.quick < QUICK_ENDS:
            self._enter(entry, State.COLD)
            return
        if entry.loading:  # SageMaker takes it for one that is not loaded
            self._loaded(entry, 400, f"the model {entry.offer.name} does not start: {reason}")
            self._enter(entry, State.COLD, reason)  # for the requests that wait for it
            self._remove(entry)
            return
        entry.quick, entry.trouble_until = 0, time.monotonic() + TROUBLE_S
        self._enter(entry, State.COLD, reason)

    async def _ready(self, entry: Entry) -> None:
        """Wait until a model's server is ready."""
        url = f"http://{entry.endpoint}{PING}"
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await self._client.get(url)).status_code == 200:
                    return
            await asyncio.sleep(PING_S)

    async def _wake(self, entry: Entry) -> None:
        """Wake a model's engine up. If that fails, its server is killed, as if it had ended."""
        began = time.monotonic()
        if await self._order(entry, orders.WAKE):
            entry.wake_s = time.monotonic() - began
            if entry.state is State.STARTING:
                self._enter(entry, State.READY)
        elif child := self._servers.get(entry.number):
            child.kill()

    async def _order(self, entry: Entry, order: bytes) -> bool:
        """Give an order to a model's server. Returns whether it was carried out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ORDER_S):
                return entry.orders is not None and await orders.give(entry.orders, order)
        return False

    async def _start_server(self, entry: Entry) -> Child:
        report = os.pipe()
        plan = entry.offer.deployment.plan
        settings = plan.settings
        adapters = str(self._folder / f"adapters-{entry.number}")
        own = dataclasses.replace(
            settings,
            router_secret=self._secret,
            adapter_list=settings.adapter_list or (adapters if settings.enable_lora else None),
            **divided.ROUTERS_ALONE,
        )
        deployment = dataclasses.replace(
            entry.offer.deployment, plan=dataclasses.replace(plan, settings=own)
        )
        part = CopyPart(
            parent=os.getpid(),
            report=report[1],
            argued={**self._argued, **entry.offer.given},
            number=entry.number,
            model=entry.offer.name,
            deployment=deployment,
            cpus=plan.machine.cpus,
        )
        environ = {**plan.environment, **self._secrets}
        if not entry.offer.asleep:
            return await Child.start(self._program, part, report, environ)
        entry.orders, theirs = socket.socketpair()
        entry.orders.setblocking(False)
        with theirs:
            part = dataclasses.replace(part, orders=theirs.fileno())
            return await Child.start(self._program, part, report, environ, [theirs.fileno()])

    def _make_room(self, entry: Entry, *, sleeps: bool = False) -> None:
        """Let a model's requests end, and then stop its server, or let its engine sleep."""
        if entry.waiting_since is not None:
            entry.waiting_since = time.monotonic()  # its own swap is forced no earlier
        entry.falls_asleep = sleeps
        self._enter(entry, State.STOPPING)
        self._spawn(self._drain(entry, self._revision))

    async def _drain(self, entry: Entry, revision: int) -> None:
        """Wait until an entry's requests have ended. revision: the first revision that makes the
        router send it no requests.
        """

        def drained() -> bool:
            told = self._router_end is None or self._seen >= revision
            return entry.state is not State.STOPPING or (told and not entry.work.in_flight)

        await gone(drained, DRAIN_S)
        # It may have been told to stop before it had a process.
        await gone(lambda: entry.state is State.COLD or entry.number in self._servers, STOP_S)
        if entry.state is not State.STOPPING:  # its server has ended, and another may be starting
            return
        child = self._servers.get(entry.number)
        if entry.falls_asleep and not entry.work.in_flight:
            slept = await self._order(entry, orders.SLEEP)
            entry.falls_asleep = False
            if slept and entry.state is State.STOPPING:
                self._enter(entry, State.ASLEEP)
                return
        if child and entry.state is State.STOPPING:
            child.ask()
            if not await gone(lambda: entry.state is State.COLD, STOP_S):
                child.kill()
