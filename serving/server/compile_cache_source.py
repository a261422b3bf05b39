# SPDX-License-Identifier: Apache-2.0
"""An archive of the compile cache on S3, for machines without a volume (OPTION_CACHE_SOURCE).

The archive is a folder of OPTION_CACHE_FOLDER, packed by `tar`. The option has its SHA-256: the
archive contains code, and whoever can write to the bucket could otherwise run it here.
"""

import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from lmi_config.options.parsers import CACHE_SOURCE
from lmi_config.plan.compile_cache import MANIFEST, CompileCache
from serving.sources.digests import Digests
from serving.sources.s3 import S3
from serving.sources.source import SourceError


def fill(source: str, cache: CompileCache, limit: int, note: Callable[[str], None]) -> None:
    """Unpack the archive's part for this server's key.

    limit: bytes of the archive, and of its files. note: takes the progress of the download. Raises
    OSError if the archive does not come, has another digest, or has nothing for the key.
    """
    found = CACHE_SOURCE.fullmatch(source)
    if found is None:
        return
    with tempfile.TemporaryDirectory(prefix=".source-", dir=cache.part) as folder:
        s3 = S3(found["uri"], found["bucket"], found["prefix"], Path(folder), found["name"])
        try:
            listing = s3.list()
            if listing.size > limit:
                raise OSError(f"{found['uri']} has {listing.size} bytes; the limit is {limit}")
            archive = listing.fetch(note) / found["name"]
        except SourceError as error:
            raise OSError(str(error)) from error
        digest = Digests().of(archive)
        if digest != found["digest"]:
            raise OSError(f"{found['uri']} has the SHA-256 {digest}, and not the option's")
        unpacked = Path(folder) / "unpacked"
        try:
            _unpack(archive, unpacked, cache.key, limit)
        except (tarfile.TarError, EOFError) as error:
            raise OSError(f"{found['uri']} cannot be unpacked: {error}") from error
        if not (unpacked / cache.key / MANIFEST).exists():
            raise OSError(f"{found['uri']} has no files for the key {cache.key}")
        for path in (unpacked / cache.key).iterdir():
            path.rename(cache.part / path.name)


def _unpack(archive: Path, folder: Path, key: str, limit: int) -> None:
    """Write the archive's files below the key; nothing outside the folder, and no file that others
    can write to. Raises TarError, or OSError if they have more than `limit` bytes.
    """
    folder.mkdir()
    left = limit
    with tarfile.open(archive) as members:
        for member in members:
            name = member.name.removeprefix("./")
            if name.startswith(f"{key}/") and not name.endswith("/.lock"):
                left -= member.size
                if left < 0:
                    raise OSError(f"the files of the archive have more than {limit} bytes")
                _extract(members, member, folder / name)


def _extract(members: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    """Write a file or folder of an archive. Raises TarError for any other member, and for a name
    that leads out. tarfile's own filters need Python 3.11.4; Debian 12 has 3.11.2.
    """
    if ".." in path.parts:
        raise tarfile.TarError(f"{member.name!r:.200} leads out of the archive's folder")
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    content = members.extractfile(member) if member.isreg() else None
    if not content:
        raise tarfile.TarError(f"{member.name!r:.200} is neither a file nor a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    with content, path.open("wb") as file:
        shutil.copyfileobj(content, file)
    path.chmod(member.mode & 0o755 | 0o600)
