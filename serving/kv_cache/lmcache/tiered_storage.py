# SPDX-License-Identifier: Apache-2.0
"""In LMCache's server: HyperPod's tiered storage. Each object has a digest, so that a wrong object
is a miss.

The daemon of a HyperPod node accepts objects over HTTP. It answers a lease with the places of an
object's pieces in its shared memory. LMCache's client trusts this answer and the bytes that it
reads, with two risks. A restarted daemon has a new segment, but a container that mounted the old
file never sees it. And a segment that is truncated kills a process that reads it through a mapping.
So every object ends with a digest of key and content, and pieces are read by a system call that
fails if they are missing.

LMCache makes the store by its type `tieredstorage`, after this module has been imported.
"""

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

from lmcache.v1.distributed.l2_adapters.config import register_l2_adapter_type
from lmcache.v1.distributed.l2_adapters.factory import register_l2_adapter_factory
from lmcache.v1.distributed.l2_adapters.sagemaker_hyperpod_client import (
    SageMakerHyperPodClient,
    SageMakerHyperPodLease,
)
from lmcache.v1.distributed.l2_adapters.sagemaker_hyperpod_l2_adapter import (
    SageMakerHyperPodL2Adapter,
    SageMakerHyperPodL2AdapterConfig,
)

from serving.kv_cache.lmcache.disk_store import DIGEST, digest
from serving.kv_cache.patches import registry

SHARED_MEMORY = Path("/dev/shm")


class TieredStorageConfig(SageMakerHyperPodL2AdapterConfig):  # type: ignore[misc]  # not type-checked
    """LMCache's configuration of the store. LMCache needs a separate class for each type."""

    @property
    def segment(self) -> Path:
        return _segment(self.shared_memory_name)


@dataclass(frozen=True)
class _Lease(SageMakerHyperPodLease):  # type: ignore[misc]  # not type-checked
    """A lease of one key's object."""

    key: str = ""


class CheckedClient(SageMakerHyperPodClient):  # type: ignore[misc]  # not type-checked
    """LMCache's client of the daemon, but it only accepts objects with the right digest."""

    async def put(self, key: str, data: memoryview) -> bool:
        content = data.cast("B")
        pieces = self._put_stream_chunk_bytes

        async def stream() -> AsyncIterator[memoryview | bytes]:
            for start in range(0, len(content), pieces):
                yield content[start : start + pieces]
            yield digest(key, content)

        headers = {"Content-Length": str(len(content) + DIGEST)}
        answer = await self._request("PUT", self._object_url(key), data=stream(), headers=headers)
        return answer is not None and answer[0] in (200, 409)  # 409: it exists already

    async def acquire_lease(self, key: str) -> SageMakerHyperPodLease | None:
        lease = await super().acquire_lease(key)
        return lease and _Lease(lease.lease_id, lease.offsets, lease.expires_monotonic, key)

    def copy_from_lease(self, lease: _Lease, destination: memoryview) -> bool:
        """Copy an object. Returns False if it is not whole; the copied bytes are then invalid.

        The file is opened for each copy, because it may have been replaced.
        """
        content = destination.cast("B")
        signature = bytearray(DIGEST)
        if lease.size != len(content) + DIGEST or lease.is_expired():
            return False
        buffers, copied = (content, memoryview(signature)), 0
        with _segment(self._shared_memory_name).open("rb", buffering=0) as file:
            for offset, length in lease.offsets:
                if os.preadv(file.fileno(), _parts(buffers, copied, length), offset) != length:
                    return False
                copied += length
        # After the lease's end the daemon may have put another object there.
        return bytes(signature) == digest(lease.key, content) and not lease.is_expired()


class TieredStorage(SageMakerHyperPodL2Adapter):  # type: ignore[misc]  # not type-checked
    """LMCache's store of this type, with our client."""

    async def _create_client(self, config: TieredStorageConfig) -> CheckedClient:
        return CheckedClient(
            url=config.url,
            bucket=config.bucket,
            shared_memory_name=config.shared_memory_name,
            max_concurrent_requests=config.max_concurrent_requests,
            max_connections=config.max_connections,
            max_connections_per_host=config.max_connections_per_host,
            timeout_ms=config.timeout_ms,
            lease_wait_timeout_ms=config.lease_wait_timeout_ms,
            lease_ttl_ms=config.lease_ttl_ms,
            put_stream_chunk_bytes=config.put_stream_chunk_bytes,
            max_lease_size_mb=config.max_lease_size_mb,
            use_https=config.use_https,
        )


def look(config: TieredStorageConfig, seconds: float) -> None:
    """Check the store's memory and its daemon. Raises OSError or HTTPException if either fails."""
    segment = config.segment
    with segment.open("rb") as file:  # raises for a folder, which a mount makes of a missing file
        found = os.fstat(file.fileno())
    if not found.st_size:
        raise OSError(f"{segment} is empty")
    if not found.st_nlink:
        raise OSError(
            f"{segment} belongs to a daemon that has ended; restart the container, so that it sees "
            "the new daemon's file"
        )
    url = urlsplit(CheckedClient.normalize_url(config.url, use_https=config.use_https))
    connect = HTTPSConnection if url.scheme == "https" else HTTPConnection
    daemon = connect(url.netloc, timeout=seconds)
    try:
        daemon.request("GET", "/")
        daemon.getresponse()  # any status will do, also 404
    finally:
        daemon.close()


def _store(config: TieredStorageConfig) -> TieredStorage:
    """Return the store. Raises Unfit if the installed LMCache has another client."""
    registry.apply_tiered_storage()
    return TieredStorage(config)


def _segment(name: str) -> Path:
    return SHARED_MEMORY / name.lstrip("/")


def _parts(buffers: tuple[memoryview, ...], start: int, length: int) -> list[memoryview]:
    """Return `length` bytes from `start` on, in consecutive buffers."""
    found = []
    for buffer in buffers:
        part = buffer[max(start, 0) : max(start + length, 0)]
        if part:
            found.append(part)
        start -= len(buffer)
    return found


register_l2_adapter_type("tieredstorage", TieredStorageConfig)
register_l2_adapter_factory("tieredstorage", lambda config, _: _store(config))
