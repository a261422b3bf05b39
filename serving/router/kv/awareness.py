# SPDX-License-Identifier: Apache-2.0
"""The inputs of kvaware: the tokens of requests, and the KV events of replicas.

If one of them is missing, the log has the reason once, and the strategy falls back to prefixaware.
"""

import asyncio
import functools
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

import aiohttp
from msgspec.structs import replace
from prometheus_client import Counter

from lmi_config.options.declared import Settings
from serving.aio import in_thread
from serving.follow import count, kept
from serving.protocol import AUDIO_PATHS, KV_EVENT_SOURCES, NOT_GENERATED
from serving.router.fleet.health import Asking, read
from serving.router.fleet.replicas import Replica
from serving.router.http.forwarded_request import Request
from serving.router.kv.events import Follower, SourcesRefused, sources
from serving.router.kv.tokenizer import fetch
from serving.router.kv.tokenizer_workers import TokenWorkers
from serving.router.policy.kv_index import PLAIN, KvIndex, chain, request_seed
from serving.router.policy.routing_request import RoutingRequest

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Seconds before a replica's events are followed again after a failure, at first and at most."""


class KvAwareness:
    """Keeps the index up to date with the replicas' events, and a tokenizer for lookups."""

    def __init__(
        self,
        index: KvIndex,
        settings: Settings,
        environ: Mapping[str, str],
        fallbacks: Counter,
        asking: Asking,
    ) -> None:
        """fallbacks: counts requests that fall back, by the reason. asking: how the router itself
        asks replicas.
        """
        self._asking = asking
        self._index = index
        self._fallbacks = fallbacks
        self._settings = settings
        self._environ = environ
        self._workers = TokenWorkers()
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._warned: set[str] = set()

    async def run(self) -> None:
        """Keep a tokenizer, and stay until cancelled."""
        try:
            await self._tokenizer()
        finally:
            for task in self._followers.values():
                task.cancel()
            await asyncio.gather(*self._followers.values(), return_exceptions=True)

    async def _tokenizer(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                await in_thread(self._fetch, Path(folder))
                trusted = self._settings.trust_remote_code
                await self._workers.run(Path(folder), trust_remote_code=trusted)
            except Exception as error:  # also of transformers, and of code that came with the model
                reason = f"OPTION_MODEL_ID: the tokenizer cannot be loaded: {error}"
                self._missing("tokenizer", reason)
        await asyncio.Event().wait()

    def _fetch(self, folder: Path) -> None:
        settings = self._settings
        fetch(
            settings.model_id,
            self._environ,
            folder,
            revision=settings.revision,
            downloads=settings.download_dir,
            trust_remote_code=settings.trust_remote_code,
        )

    async def tokenise(
        self, routing_request: RoutingRequest, request: Request, body: bytes
    ) -> RoutingRequest:
        """The same with the request's tokens counted and hashed, if possible.

        The body is decoded a second time in a separate process, where templates run.
        """
        if request.path in NOT_GENERATED or request.path in AUDIO_PATHS:
            return routing_request  # without cached tokens
        if not self._workers.ready.is_set():
            self._fallbacks.labels("tokenizer").inc()
            return routing_request
        sizes = self._index.sizes
        if not self._index.followed or not sizes:
            self._fallbacks.labels("events").inc()
            return routing_request
        content_type = request.named.get(b"content-type", b"").decode("latin-1")
        try:
            tokens = await self._workers.tokens(request.path, body, content_type)
        except TimeoutError:
            self._fallbacks.labels("time").inc()
            return routing_request
        if tokens is None:
            self._fallbacks.labels("request").inc()
            return routing_request
        adapter = routing_request.adapter
        inner = self._index.inner(adapter) if adapter else None
        start = request_seed(inner, request.tenant, routing_request.salt)
        blocks = {size: chain(tokens, size, start) for size in sizes}
        plain = start == PLAIN
        return replace(routing_request, tokens=len(tokens), blocks=blocks, plain=plain)

    def on_ready(self, replica: Replica) -> None:
        """Follow the replica's events."""
        self.on_gone(replica)
        work = functools.partial(self._follow, replica)
        self._followers[replica.name] = asyncio.create_task(kept("kv_events", work))

    def on_gone(self, replica: Replica) -> None:
        """Stop following them."""
        if task := self._followers.pop(replica.name, None):
            task.cancel()

    def follows(self, replica: Replica) -> bool:
        """Whether the replica's cache is known."""
        return self._index.follows(replica.name)

    def held(self, replica: Replica) -> dict[str, int]:
        """The tokens that it reports to have, by tier."""
        engine, memory = self._index.held(replica.name)
        return {"engine": engine, "memory": memory}

    async def _follow(self, replica: Replica) -> None:
        await self._workers.ready.wait()
        host = f"[{replica.host}]" if ":" in replica.host else replica.host
        pause = FIRST_PAUSE_S
        while True:
            try:
                endpoints = sources(await self._sources(replica), host)
                if not endpoints:
                    missing = f"{replica.name} publishes no KV events; set OPTION_KV_EVENTS"
                    self._missing("events", missing)
                    return
                await Follower(self._index, replica.name, endpoints).run()
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                log.info("%s: it does not say where its KV events are: %s", replica.name, error)
                count("kv_events")
            except SourcesRefused as error:
                log.error("%s: following its KV events failed: %s", replica.name, error)
                count("kv_events")
            except Exception:
                log.exception("%s: following its KV events failed", replica.name)
                count("kv_events")
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_S)

    async def _sources(self, replica: Replica) -> bytes:
        """The replica's addresses of events, from its answer."""
        async with (
            self._asking.session() as session,
            session.get(
                replica.name + KV_EVENT_SOURCES,
                headers=self._asking.headers(replica, KV_EVENT_SOURCES),
            ) as answer,
        ):
            return await read(answer)

    def _missing(self, reason: str, detail: str) -> None:
        """Warn once that something is missing. The series of the reason is there from then on."""
        self._fallbacks.labels(reason)
        if reason not in self._warned:
            log.warning("kvaware knows no more than prefixaware: %s", detail)
        self._warned.add(reason)
