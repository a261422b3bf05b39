"""What strategy kvaware lives on: the tokens of requests, and the KV events of replicas.

Where something is missing for that it says so, once for each reason, and the strategy knows as much
as prefixaware.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping

import aiohttp

from lmi_config.options import Settings
from serving.router import metrics
from serving.router.kv_events import Follower, sources
from serving.router.kv_index import KvIndex, chain, request_seed
from serving.router.policies import Asked
from serving.router.replicas import Replica
from serving.router.request import Request
from serving.router.tokens import Tokenizer, load
from serving.threads import in_thread

log = logging.getLogger(__name__)

AGAIN_S = 1.0  # before a replica is asked again where it publishes


class KvAwareness:
    """Fills requests' `blocks`, and keeps the index true."""

    def __init__(self, index: KvIndex, settings: Settings, environ: Mapping[str, str]) -> None:
        self._index = index
        self._settings = settings
        self._environ = environ
        self._tokenizer: Tokenizer | None = None
        self._looked = asyncio.Event()  # for a tokenizer
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._told: set[str] = set()
        self._tenant = (settings.cache_salt_header or "").lower().encode()

    async def run(self) -> None:
        """Load the tokenizer, and stay until cancelled."""
        try:
            self._tokenizer = await in_thread(self._load)
        except Exception as error:  # of transformers, or of code that came with the model
            self._missing("tokenizer", f"OPTION_MODEL_ID: the tokenizer cannot be had: {error}")
        self._looked.set()
        try:
            await asyncio.Event().wait()
        finally:
            for task in self._followers.values():
                task.cancel()
            await asyncio.gather(*self._followers.values(), return_exceptions=True)
            if self._tokenizer:
                self._tokenizer.close()

    def _load(self) -> Tokenizer:
        settings = self._settings
        return load(
            settings.model_id,
            self._environ,
            revision=settings.revision,
            downloads=settings.download_dir,
            trust_remote_code=settings.trust_remote_code,
        )

    async def tokenise(self, asked: Asked, request: Request, body: bytes) -> None:
        """Count the request's tokens and hash them, where that can be done."""
        if not self._tokenizer:
            metrics.FALLBACKS.labels("tokenizer").inc()
            return
        size = self._index.block_size
        if not self._index.followed or not size:
            metrics.FALLBACKS.labels("events").inc()
            return
        kind = request.named.get(b"content-type", b"").decode("latin-1")
        tokens = await self._tokenizer.tokens(request.path, body, kind)
        if tokens is None:
            metrics.FALLBACKS.labels("request").inc()
            return
        tenant = request.named.get(self._tenant, b"").decode("latin-1") if self._tenant else None
        inner = self._index.inner(asked.adapter) if asked.adapter else None
        asked.tokens = len(tokens)
        asked.block_size = size
        asked.blocks = chain(tokens, size, request_seed(inner, tenant, asked.salt))

    def came(self, replica: Replica) -> None:
        """The replica is ready."""
        self.went(replica)
        self._followers[replica.name] = asyncio.create_task(self._follow(replica))

    def went(self, replica: Replica) -> None:
        if task := self._followers.pop(replica.name, None):
            task.cancel()

    def follows(self, replica: Replica) -> bool:
        """Whether the replica's cache is known."""
        return self._index.follows(replica.name)

    async def _follow(self, replica: Replica) -> None:
        await self._looked.wait()
        if not self._tokenizer:
            return
        host = f"[{replica.host}]" if ":" in replica.host else replica.host
        try:
            if found := sources(await self._sources(replica), host):
                await Follower(self._index, replica.name, found).run()
        except Exception:
            log.exception("%s: its KV events cannot be followed", replica.name)
        self._missing("events", f"{replica.name} publishes no KV events; set OPTION_KV_EVENTS")

    async def _sources(self, replica: Replica) -> bytes:
        """Where the replica publishes, as it answers."""
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with (
                    aiohttp.ClientSession() as session,
                    session.get(replica.name + "/kv_event_sources") as answer,
                ):
                    return await answer.read()
            await asyncio.sleep(AGAIN_S)

    def _missing(self, reason: str, told: str) -> None:
        metrics.FALLBACKS.labels(reason)
        if reason not in self._told:
            log.warning("kvaware knows no more than prefixaware: %s", told)
        self._told.add(reason)
