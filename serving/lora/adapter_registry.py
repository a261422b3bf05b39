# SPDX-License-Identifier: Apache-2.0
"""The adapter registry: the adapters by name. It has no HTTP.

At its registration an adapter's files are checked, and their digest is computed. It is loaded at
its first use. An unregistered adapter is removed when its last request has ended.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from typing import NamedTuple
from weakref import WeakValueDictionary

from prometheus_client import Counter, Gauge

from lmi_config.facts import adapter as facts
from lmi_config.facts.adapter import LITERAL, Names
from lmi_config.facts.model import ModelError, Tensor
from serving import user_code
from serving.aio import in_thread
from serving.engine.base import Engine
from serving.errors import (
    AdapterRefused,
    BadRequest,
    Conflict,
    NoSlot,
    NotFound,
    NotReady,
    ServingError,
)
from serving.follow import count, pauses
from serving.lora.adapter import Adapter, AdapterHost, CodeStarter
from serving.lora.adapter_files import AdapterFiles, Located
from serving.lora.shared_list import Entry, SharedList
from serving.lora.slots import BatchSlots, EngineSlots
from serving.sources.source import SourceError, Unusable

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
CHECKS = 8
"""Most adapters whose files are checked at the same time."""
LABELS = 100
"""Adapters with a separate series: the first ones in use. The others share one series."""

_LIST = "/"
"""The key of the whole list among logged faults; no adapter can have this name."""
REFUSED = 1_000
"""Most remembered versions of unusable adapter files. They are not fetched again."""

_REGISTERED = Gauge("slipway_adapters_registered", "Adapters that can be used.")
_REQUESTS = Counter("slipway_adapter_requests", "Requests by adapter.", ["adapter"])


class _Failed(NamedTuple):
    """A listed adapter that could not be applied. until: the next try, by time.monotonic()."""

    entry: Entry | None
    until: float
    pauses: Iterator[float]


class AdapterRegistry:
    """The adapters by name, each in its current version.

    base: the model's tensors. names: their names in vLLM. max_rank: the highest rank of an adapter.
    batch_slots: the adapters that fit into a batch of the engine. engine_slots: the adapters that
    fit into the engine. limit: the most registered adapters. start_code: starts the model.py of a
    folder; None if adapters may not have one. model_names: the model's names, which no adapter may
    have. shared: the list of adapters of all servers; None if each server has its own.
    """

    def __init__(
        self,
        engine: Engine,
        files: AdapterFiles,
        base: Mapping[str, Tensor],
        max_rank: int,
        batch_slots: int,
        engine_slots: int,
        limit: int,
        start_code: CodeStarter | None,
        model_names: Collection[str],
        shared: SharedList | None = None,
        names: Names = LITERAL,
    ) -> None:
        self._model_names = model_names
        self._shared = shared
        self._applied: dict[str, Entry] = {}  # entries of the shared list that are registered here
        self._changing: set[str] = set()  # adapters whose entry is being applied
        self._changed_here: set[str] = set()  # adapters changed since the last poll began
        self._gone: set[str] = set()  # adapters that were missing at the last poll
        self._told: dict[str, str] = {}  # name → its last logged fault
        self._failed: dict[str, _Failed] = {}  # listed adapters that could not be applied
        self._refused: dict[tuple[str, str], str] = {}  # src and digest → why
        self._files = files
        self._base = names.renamed(base)
        self._names = names
        self._max_rank = max_rank
        self._limit = limit
        self._may_run_code = start_code is not None
        slots = EngineSlots[Adapter](engine_slots)
        # A pinned adapter keeps its slot in the batch.
        self._batch = BatchSlots[Adapter](lambda: batch_slots - slots.pinned)
        self._host = AdapterHost(engine, self._batch, slots, files, start_code)
        self._registered: dict[str, Adapter] = {}
        self._checks = asyncio.Semaphore(CHECKS)
        self._locks = WeakValueDictionary[str, asyncio.Lock]()  # names come and go
        self._labels: set[str] = set()
        _REGISTERED.set_function(lambda: len(self._registered))

    @property
    def waiting(self) -> int:
        """Requests that wait for their adapter's slot in the batch."""
        return self._batch.waiting

    def __contains__(self, name: object) -> bool:
        return name in self._registered

    def listed(self) -> list[Adapter]:
        return [self._registered[name] for name in sorted(self._registered)]

    def get(self, name: str) -> Adapter:
        try:
            return self._registered[name]
        except KeyError:
            raise NotFound(f"adapter {name!r:.140} is not registered") from None

    async def register(
        self,
        name: str,
        src: str,
        preload: bool = False,
        pin: bool = False,
        *,
        share: bool = True,
    ) -> None:
        """Add an adapter. A repetition with the same content changes nothing. share: add it on all
        servers that share the list.

        Raises BadRequest for an invalid name or place, Conflict if the name has other content,
        AdapterRefused if the files cannot be used, AdapterFailed or NoSlot if a wanted load failed,
        and NotReady if the shared list cannot be written. After an exception it is not registered.
        """
        if not NAME.fullmatch(name):
            raise BadRequest(
                f"name={name!r:.140}: should be letters, digits, '-', '_' and '.', at most 128, "
                "with a letter or a digit at both ends"
            )
        if name in self._model_names:
            raise Conflict(f"{name} is a name of the model itself; choose another for the adapter")
        async with self._lock(name):
            located = await self._check(name, src)
            known = self._registered.get(name)
            if known and known.digest != located.digest:
                raise Conflict(
                    f"adapter {name} is registered with other content, from {known.src}; "
                    "update it, or delete it first"
                )
            if not known and len(self._registered) >= self._limit:
                raise NoSlot(
                    f"{self._limit} adapters are registered; OPTION_MAX_ADAPTERS sets the limit"
                )
            adapter = self._registered[name] = known or Adapter(name, located, self._host)
            try:
                await adapter.configure(located, preload or pin or adapter.preload, pin)
                if share:
                    await self._list(adapter)
            except Exception:  # not after a cancellation: then the server is stopping
                if not known:
                    del self._registered[name]
                    await adapter.retire()
                raise

    async def update(
        self,
        name: str,
        src: str | None,
        preload: bool | None,
        pin: bool | None,
        *,
        share: bool = True,
    ) -> None:
        """Change an adapter's content, preload or pin. None keeps a value. A failed change has no
        effect.

        Raises as register() does, and NotFound.
        """
        self.get(name)
        async with self._lock(name):
            known = self.get(name)
            if known.pin and False in (pin, preload):
                raise BadRequest("an adapter cannot be unpinned; delete it and register it again")
            located = await self._check(name, src) if src else known.located
            same = located.digest == known.digest
            adapter = known if same else Adapter(name, located, self._host)
            pin = known.pin or bool(pin)
            preload = known.preload if preload is None else preload
            try:
                await adapter.configure(located, preload or pin, pin)
                if share:
                    await self._list(adapter)
            except BaseException:
                if adapter is not known:
                    await adapter.retire()
                raise
            if adapter is not known:
                self._registered[name] = adapter
                await known.retire()

    async def unregister(self, name: str, *, share: bool = True) -> None:
        """Remove an adapter: at once for new requests, and from the engine when no request uses it.

        Raises NotFound, and NotReady if the shared list cannot be written.
        """
        self.get(name)
        async with self._lock(name):
            adapter = self.get(name)
            if share:
                await self._unlist(name)
            del self._registered[name]
            self._applied.pop(name, None)
            self._failed.clear()  # others may fit now
            await adapter.retire()

    # the shared list

    async def follow(self) -> None:
        """Apply the changes of the shared list, until cancelled."""
        if not self._shared:
            return
        count("adapters", 0)
        async with asyncio.TaskGroup() as changes:
            while True:
                await asyncio.sleep(self._shared.pause_s)
                try:
                    changed = await self._differences(self._shared)
                    self._told.pop(_LIST, None)
                except Exception as error:  # the list is polled again after any exception
                    unforeseen = None if isinstance(error, OSError) else error
                    reason = f"the shared list of adapters cannot be read: {error}"
                    self._tell(_LIST, reason, unforeseen)
                    continue
                for name, entry in changed.items():
                    changes.create_task(self._follow(name, entry))

    async def catch_up(self) -> None:
        """Apply the shared list once. Raises OSError if it cannot be read.

        Adapters that cannot be registered here are logged, and tried again at the next call.
        """
        changed = await self._differences(self._shared) if self._shared else {}
        async with asyncio.TaskGroup() as changes:
            for name, entry in changed.items():
                changes.create_task(self._follow(name, entry))

    async def _differences(self, shared: SharedList) -> dict[str, Entry | None]:
        """Compare the shared list with this server. Returns name → entry, None for a removal.
        Raises OSError if the list cannot be read.
        """
        self._changed_here.clear()
        listed, faults = await in_thread(shared.read)
        for name, fault in faults.items():
            self._tell(name, fault)
        gone = self._applied.keys() - listed.keys() - faults.keys()
        # Not at the first poll without it: a router sends a deletion to all servers, and ours may
        # be about to arrive.
        gone, self._gone = gone & self._gone, gone
        found: dict[str, Entry | None] = dict.fromkeys(gone)
        found |= {
            name: it
            for name, it in listed.items()
            if self._applied.get(name) != it and self._is_due(name, it)
        }
        self._failed = {name: it for name, it in self._failed.items() if name in listed}
        # The list may have been read before these adapters were changed here.
        for name in self._changing | self._changed_here:
            found.pop(name, None)
        return found

    async def _follow(self, name: str, entry: Entry | None) -> None:
        """Apply one entry of the shared list, None for a removal. A failure is logged. This can
        take as long as a request.
        """
        self._changing.add(name)
        try:
            if entry:
                await self._apply(name, entry)
                self._applied[name] = entry
            else:
                with contextlib.suppress(NotFound):  # a client has deleted it here as well
                    await self.unregister(name, share=False)
            self._told.pop(name, None)
            self._failed.pop(name, None)
        except Exception as error:
            unforeseen = None if isinstance(error, ServingError) else error
            self._tell(name, f"adapter {name} of the shared list: {error}", unforeseen)
            self._wait(name, entry)
        finally:
            self._changing.discard(name)

    def _is_due(self, name: str, entry: Entry) -> bool:
        """Whether to apply an entry now, and not after its next pause."""
        failed = self._failed.get(name)
        return not failed or failed.entry != entry or time.monotonic() >= failed.until

    def _wait(self, name: str, entry: Entry | None) -> None:
        """Set the next try of an entry that could not be applied. The pauses double."""
        failed = self._failed.get(name)
        if not failed or failed.entry != entry:
            assert self._shared
            failed = _Failed(entry, 0.0, pauses(self._shared.pause_s))
        until = time.monotonic() + next(failed.pauses)
        self._failed[name] = failed._replace(until=until)

    async def _apply(self, name: str, entry: Entry) -> None:
        """Register or update an adapter by its entry in the shared list."""
        known = self._registered.get(name)
        if known and known.pin and not entry.pin:  # it was deleted and registered again
            await self.unregister(name, share=False)
            known = None
        if not known:
            await self.register(name, entry.src, entry.preload, entry.pin, share=False)
        elif _entry(known) != entry:
            await self.update(name, entry.src, entry.preload, entry.pin, share=False)
        if self.get(name).digest != entry.digest:
            log.warning(
                "adapter %s: %s has other content than where it was registered", name, entry.src
            )

    def _tell(self, name: str, fault: str, unforeseen: Exception | None = None) -> None:
        count("adapters")
        if self._told.get(name) != fault:
            log.error("%s", fault, exc_info=unforeseen)
        self._told[name] = fault

    async def _list(self, adapter: Adapter) -> None:
        if self._shared:
            entry = _entry(adapter)
            with _writing():
                await in_thread(self._shared.put, adapter.name, entry)
            self._applied[adapter.name] = entry
            self._changed_here.add(adapter.name)

    async def _unlist(self, name: str) -> None:
        if self._shared:
            with _writing():
                await in_thread(self._shared.drop, name)
            self._changed_here.add(name)

    @contextlib.asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[Adapter]:
        """Yield an adapter that stays loaded until the block ends.

        Raises NotFound, AdapterFailed and NoSlot.
        """
        adapter = self.get(name)
        async with adapter.use():
            if len(self._labels) < LABELS:
                self._labels.add(name)
            _REQUESTS.labels(name if name in self._labels else "other").inc()
            yield adapter

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _check(self, name: str, src: str) -> Located:
        """Check an adapter's files. Raises as _look() does."""
        async with self._checks:
            return await in_thread(self._look, name, src)

    def _look(self, name: str, src: str) -> Located:
        """Check an adapter's files. Blocks; raises AdapterRefused, BadRequest and Conflict."""
        try:
            located = self._files.locate(src)
            version = located.src, located.digest
            if not (reason := self._refused.get(version)):
                reason = self._faults(located)
        except (ModelError, SourceError, OSError) as error:
            raise AdapterRefused(f"adapter {name} cannot be used: {error}") from None
        if reason:
            while len(self._refused) >= REFUSED:
                self._refused.pop(next(iter(self._refused)), None)
            self._refused[version] = reason
            raise AdapterRefused(f"adapter {name} cannot be used: {reason}")
        return located

    def _faults(self, located: Located) -> str:
        """Return why these files cannot be used, or "". Raises SourceError and OSError if they
        cannot be fetched; a retry may succeed.
        """
        try:
            with self._files.look(located) as checkpoint:
                adapter = facts.look(checkpoint, self._base)
                faults = facts.faults(adapter, self._base, self._max_rank, self._names)
                faults += user_code.faults_of_adapter(checkpoint, self._may_run_code)
        except (ModelError, Unusable) as error:
            return str(error)
        return "; ".join(faults)


def _entry(adapter: Adapter) -> Entry:
    return Entry(adapter.src, adapter.digest, adapter.preload, adapter.pin)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Raise NotReady if the shared list cannot be written."""
    try:
        yield
    except OSError as error:
        raise NotReady(f"the shared list of adapters cannot be written: {error}") from None
