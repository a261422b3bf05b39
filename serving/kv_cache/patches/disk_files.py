# SPDX-License-Identifier: Apache-2.0
"""Files of the disk tier have a digest (serving/kv_cache/lmcache/disk_store.py)."""

import select
import tempfile
from pathlib import Path

from serving.patching.patch import CACHE_SERVER, Name, Patch

_WAIT_S = 10.0
_KEY = "a/b@1@0@c"


def name(key: str) -> str:
    """Return LMCache's name of a key's file."""
    model, rank = key.replace("/", "-SEP-").split("@", 1)
    return f"{model}@0x{rank}.data"


def _put(folder: str) -> None:
    """Let LMCache write a file into a folder. Raises ValueError if it has an unexpected name."""
    from lmcache.lmcache_fs import LMCacheFSClient

    with tempfile.TemporaryDirectory(dir=folder, prefix=".slipway-") as probed:
        client = LMCacheFSClient(probed, 1, "", False, 0)
        try:
            client.submit_batch_set([_KEY], [memoryview(bytearray(512))])
            select.select([client.event_fd()], [], [], _WAIT_S)
            client.drain_completions()
        finally:
            client.close()
        found = [it.name for it in Path(probed).iterdir()]
    if found and found != [name(_KEY)]:  # on a full disk there is none
        raise ValueError(f"LMCache names a file {found} and not {name(_KEY)!r}")


PATCH = Patch(
    name="disk_files",
    process=CACHE_SERVER,
    names=(Name("lmcache.lmcache_fs:LMCacheFSClient"),),
    does="Keeps a digest of key and content in an attribute of each file, and compares it after "
    "each read. It relies on LMCache's file names, which the start checks.",
    why="LMCache does not verify data from a disk.",
    without="each read of the disk tier is a miss",
    closed=False,
    put=_put,
)
