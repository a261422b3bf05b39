# SPDX-License-Identifier: Apache-2.0
"""In LMCache's server: the disk tier's files. Each has a digest, so that a damaged file is a miss.

LMCache trusts the bytes that it reads. This class wraps LMCache's file client (`LMCacheFSClient`).
After a write it puts a digest of key and content into an extended attribute of the file, and after
a read it compares the digest. LMCache loads the class by its path, as a store of type
`native_plugin`.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3
from lmcache.lmcache_fs import LMCacheFSClient
from lmcache.logging import init_logger

from serving.kv_cache.patches import disk_files, registry

log = init_logger(__name__)

ATTRIBUTE = "user.slipway.blake3"
DIGEST = 16
"""Bytes."""
Batch = tuple[Sequence[str], Sequence[memoryview]]
"""Keys, and their contents."""
Completion = tuple[int, bool, str, list[bool] | None]
"""The outcome of a batch: its id, whether it succeeded, the error, and whether each key did."""


class ChecksummedFiles:
    """The files of the disk tier, one for each key; batches complete in the background.

    path: the folder, which exists. direct: whether to use O_DIRECT.
    """

    def __init__(self, path: str, direct: bool) -> None:
        registry.apply_disk(path)
        self._client = LMCacheFSClient(path, 4, "", direct, 0)
        self._path = path
        self._verifies = self._has_attributes()
        self._lock = threading.Lock()
        self._writes: dict[int, Batch] = {}
        self._reads: dict[int, Batch] = {}
        self.event_fd = self._client.event_fd
        self.submit_batch_exists = self._client.submit_batch_exists
        self.submit_batch_delete = self._client.submit_batch_delete
        self.close = self._client.close

    def submit_batch_set(self, keys: Sequence[str], contents: Sequence[memoryview]) -> int:
        with self._lock:
            batch: int = self._client.submit_batch_set(keys, contents)
            self._writes[batch] = keys, contents
        return batch

    def submit_batch_get(self, keys: Sequence[str], contents: Sequence[memoryview]) -> int:
        with self._lock:
            batch: int = self._client.submit_batch_get(keys, contents)
            self._reads[batch] = keys, contents
        return batch

    def drain_completions(self) -> list[Completion]:
        completions: list[Completion] = self._client.drain_completions()
        return [self._verified(completion) for completion in completions]

    def _verified(self, completion: Completion) -> Completion:
        batch, done, error, each = completion
        with self._lock:
            write, read = self._writes.pop(batch, None), self._reads.pop(batch, None)
        if not self._verifies:
            return completion
        if write and done:
            for key, content in zip(*write, strict=True):
                self._sign(key, content)
        if read and each:
            each = [
                was_read and self._is_whole(key, content)
                for was_read, key, content in zip(each, *read, strict=True)
            ]
        return batch, done, error, each

    def _has_attributes(self) -> bool:
        try:
            os.setxattr(self._path, ATTRIBUTE, b"")
        except OSError as reason:
            log.error("the disk tier's files are not checked for damage: %s", reason)
            return False
        return True

    def _sign(self, key: str, content: memoryview) -> None:
        try:
            os.setxattr(self._file(key), ATTRIBUTE, digest(key, content))
        except OSError as reason:  # a file without a digest is a miss
            log.warning("cannot sign a file of the disk tier: %s", reason)

    def _is_whole(self, key: str, content: memoryview) -> bool:
        file = self._file(key)
        try:
            if os.getxattr(file, ATTRIBUTE) == digest(key, content):
                return True
            Path(file).unlink()
        except OSError as reason:
            log.warning("cannot check a file of the disk tier: %s", reason)
        else:
            log.error("a file of the disk tier was damaged; it is removed: %s", file)
        return False

    def _file(self, key: str) -> str:
        """Return the path of a key's file, by LMCacheFSClient's names."""
        return f"{self._path}/{disk_files.name(key)}"


def digest(key: str, content: memoryview) -> bytes:
    hashed = blake3(content.cast("B"), max_threads=blake3.AUTO).update(key.encode())
    return hashed.digest(DIGEST)
