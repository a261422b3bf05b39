"""The files of the disk tier, each with a digest: a damaged one is a miss, never a wrong answer.

LMCache trusts what it reads. Between it and its own file client (`LMCacheFSClient`) this puts a
digest of key and content into an extended attribute when a file was written, and compares it when
one was read. LMCache loads the class by its path, as a store of type `native_plugin`.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3
from lmcache.lmcache_fs import LMCacheFSClient
from lmcache.logging import init_logger

log = init_logger(__name__)

ATTRIBUTE = "user.slipway.blake3"
Completion = tuple[int, bool, str, list[bool] | None]
"""What came of a submitted batch: its id, whether it succeeded, the error, and of each key."""


class CheckedFiles:
    """Files of keys in a folder. Batches are submitted, and completed in the background.

    path: the folder; it exists. direct: whether to use O_DIRECT.
    """

    def __init__(self, path: str, direct: bool) -> None:
        self._client = LMCacheFSClient(path, 4, "", direct, 0)
        self._path = path
        self._checks = self._has_attributes()
        self._lock = threading.Lock()
        self._written: dict[int, tuple[Sequence[str], Sequence[memoryview]]] = {}
        self._read: dict[int, tuple[Sequence[str], Sequence[memoryview]]] = {}
        self.event_fd = self._client.event_fd
        self.submit_batch_exists = self._client.submit_batch_exists
        self.submit_batch_delete = self._client.submit_batch_delete
        self.close = self._client.close

    def submit_batch_set(self, keys: Sequence[str], contents: Sequence[memoryview]) -> int:
        with self._lock:
            batch: int = self._client.submit_batch_set(keys, contents)
            self._written[batch] = keys, contents
        return batch

    def submit_batch_get(self, keys: Sequence[str], contents: Sequence[memoryview]) -> int:
        with self._lock:
            batch: int = self._client.submit_batch_get(keys, contents)
            self._read[batch] = keys, contents
        return batch

    def drain_completions(self) -> list[Completion]:
        completions: list[Completion] = self._client.drain_completions()
        return [self._checked(completion) for completion in completions]

    def _checked(self, completion: Completion) -> Completion:
        batch, done, error, each = completion
        with self._lock:
            written, read = self._written.pop(batch, None), self._read.pop(batch, None)
        if not self._checks:
            return completion
        if written and done:
            for key, content in zip(*written, strict=True):
                self._sign(key, content)
        if read and each:
            each = [
                found and self._is_whole(key, content)
                for found, key, content in zip(each, *read, strict=True)
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
            os.setxattr(self._file(key), ATTRIBUTE, _digest(key, content))
        except OSError as reason:  # without its digest it will be a miss
            log.warning("cannot sign a file of the disk tier: %s", reason)

    def _is_whole(self, key: str, content: memoryview) -> bool:
        file = self._file(key)
        try:
            if os.getxattr(file, ATTRIBUTE) == _digest(key, content):
                return True
            Path(file).unlink()
        except OSError as reason:
            log.warning("cannot check a file of the disk tier: %s", reason)
        else:
            log.error("a file of the disk tier was damaged; it is removed: %s", file)
        return False

    def _file(self, key: str) -> str:
        """The file of a key, as LMCacheFSClient names it."""
        model, rank = key.replace("/", "-SEP-").split("@", 1)
        return f"{self._path}/{model}@0x{rank}.data"


def _digest(key: str, content: memoryview) -> bytes:
    return blake3(content.cast("B"), max_threads=blake3.AUTO).update(key.encode()).digest(16)
