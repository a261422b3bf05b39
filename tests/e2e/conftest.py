# SPDX-License-Identifier: Apache-2.0
"""Real servers: our program in a process of its own, the real engine in it, a real socket."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from scripts.models import tiny

ROOT = Path(__file__).parent.parent.parent
START_S = 300  # far above what a start takes, for machines that do much else


class Served:
    """A server process and a client of it."""

    def __init__(self, command: list[str], environ: dict[str, str], log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "OPTION_PORT": str(self.port), **environ},
                cwd=ROOT,
                stdout=output,
                stderr=output,
                process_group=0,  # as a shell does it: Ctrl-C goes to the group
            )
        self.client = httpx.Client(base_url=self.url, timeout=120)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        self._seen: set[psutil.Process] = set()

    def ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/ping").status_code == 200:
                    self.engine_processes("")
                    return
            time.sleep(0.2)
        pytest.fail(f"the server did not get ready:\n{self.log.read_text()[-5000:]}")

    def invoke(self, body: object, **headers: str) -> httpx.Response:
        return self.client.post("/invocations", json=body, headers=headers)

    def lines(self, body: object) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.invoke(body).text.splitlines()]

    def metric(self, name: str) -> float:
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith((f"{name} ", f"{name}{{")):
                return float(line.rsplit(" ", 1)[1])
        raise LookupError(name)

    def engine_processes(self, name: str) -> list[psutil.Process]:
        """The engine's processes of this name, like VLLM::Worker."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self._seen.update(children)
        living = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
        return [child for child in living if name in " ".join(child.cmdline())]

    def left_behind(self) -> list[psutil.Process]:
        """Processes of the server that live on after it, once they have had a moment to go."""
        _, alive = psutil.wait_procs(self._seen, timeout=5)
        return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.client.close()
        self.openai.close()
        try:
            return self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@contextlib.contextmanager
def serving(log: Path, *command: str, **environ: str) -> Iterator[Served]:
    command = command or ("./entrypoint.sh", "serve")
    served = Served([*command], {"SLIPWAY_PYTHON": sys.executable, **environ}, log)
    try:
        yield served
    finally:
        served.stop()


@pytest.fixture(scope="session")
def tiny_options() -> dict[str, str]:
    """The tiny model in little memory, which is quicker to reserve."""
    return {
        "OPTION_MODEL_ID": str(tiny.make()),
        "OPTION_MAX_MODEL_LEN": "4096",
        "OPTION_KV_CACHE_MEMORY_BYTES": "256M",
    }


@pytest.fixture(scope="session")
def server(tiny_options, tmp_path_factory):
    """The tiny model, for every test that leaves the server as it was."""
    log = tmp_path_factory.mktemp("server") / "log"
    # In 16 bits, what else is in the batch decides between near ties.
    with serving(log, **tiny_options, OPTION_DTYPE="float32") as served:
        served.ready()
        yield served
