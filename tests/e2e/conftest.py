# SPDX-License-Identifier: Apache-2.0
"""Real servers: our program as a separate process, with the real engine and a real socket.

Most are forked from a process that has already imported the engine. Tests of the start itself start
the server as `entrypoint.sh` does.
"""

import contextlib
import functools
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.support.harness import metrics
from tests.support.harness.process import (
    AS_ENTRYPOINT_SH,
    PYTHON_SERVES,
    ROOT,
    START_S,
    Forkable,
)
from tests.support.harness.warm import WarmPython
from tests.support.models import tiny

PYTHON = PYTHON_SERVES[:-1]
__all__ = ["ROOT", "START_S", "Served", "serving"]


def _as_ctrl_c(*_: object) -> None:
    """A signal that ends the tests also ends their servers, including those of pytest-xdist's
    processes.
    """
    for child in psutil.Process().children():
        if "execnet" in " ".join(child.cmdline()):
            child.send_signal(signal.SIGINT)
    raise KeyboardInterrupt


signal.signal(signal.SIGTERM, _as_ctrl_c)
_session = contextlib.ExitStack()
_stopping: list[Future[None]] = []
_folder: list[str] = []
"""The folder of the warm Python that another process has started."""


def pytest_configure(config: pytest.Config) -> None:
    _folder.extend(getattr(config, "workerinput", {}).get("warm_python", ()))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist's processes share one warm Python. It has to outlive each of them."""
    node.workerinput["warm_python"] = [str(warm_python().folder)]


def pytest_unconfigure() -> None:
    _session.close()


@functools.cache
def warm_python() -> WarmPython:
    if _folder:
        return WarmPython(None, Path(_folder[0]))
    folder = _session.enter_context(tempfile.TemporaryDirectory(prefix="slipway-warm-"))
    return _session.enter_context(WarmPython("tests.support.harness.warm_engine", Path(folder)))


@functools.cache
def _stopper() -> ThreadPoolExecutor:
    return _session.enter_context(ThreadPoolExecutor())


@pytest.fixture(scope="session", autouse=True)
def _close_what_the_session_has() -> Iterator[None]:
    yield
    for it in _stopping:
        it.result()


class Warm(Forkable):
    def __init__(self, *command: str, **more: Any) -> None:
        super().__init__(*command, python=warm_python, **more)


class Served(Warm):
    """A server process and clients of it."""

    def __init__(self, log: Path, *command: str, **environ: str) -> None:
        super().__init__(*command, log=log, environ=environ)
        self.client = httpx.Client(base_url=self.url, timeout=120)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def invoke(self, body: object, **headers: str) -> httpx.Response:
        return self.client.post("/invocations", json=body, headers=headers)

    def lines(self, body: object) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.invoke(body).text.splitlines()]

    def metric(self, name: str) -> float:
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith((f"{name} ", f"{name}{{")):
                return float(line.rsplit(" ", 1)[1])
        raise LookupError(name)

    def total(self, *names: str) -> float:
        """The sum of these series, all read at once; 0 for those that are not there."""
        text = self.client.get("/metrics").text
        return sum(metrics.total(text, name) for name in names)

    def counted(self) -> None:
        """Wait until vLLM has counted every answer: it does so a moment after an answer, but before
        the next one.
        """
        self.invoke({"inputs": "a", "parameters": {"max_new_tokens": 1}}).raise_for_status()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Suspend the engine, so that its requests certainly stay in flight."""
        (engine,) = self.children("VLLM::EngineCore")
        engine.suspend()
        try:
            yield
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.resume()

    def __exit__(self, *error: object) -> None:
        """Another server may start while this one stops: stopping is mostly waiting."""
        self.client.close()
        self.openai.close()
        if self.process.poll() is None:
            self.children()
            self.process.terminate()
        _stopping.append(_stopper().submit(super().__exit__, *error))


def serving(log: Path, *command: str, **environ: str) -> Served:
    """A server to be entered. It is forked unless a command is given."""
    command = command or PYTHON_SERVES
    if command[0] == sys.executable:
        environ = {**AS_ENTRYPOINT_SH, **environ}
    return Served(log, *command, **environ)


@pytest.fixture(scope="session")
def tiny_options() -> dict[str, str]:
    """The tiny model with little memory, which is faster to reserve."""
    return {
        "OPTION_MODEL_ID": str(tiny.make()),
        "OPTION_MAX_MODEL_LEN": "4096",
        "OPTION_KV_CACHE_MEMORY_BYTES": "256M",
    }


_OF_DOCUMENTS = "{% for it in documents or () %}<|document|>{{ it['text'] }}</s>{% endfor %}"


@pytest.fixture(scope="session")
def server(tiny_options, tmp_path_factory):
    """A server of the tiny model, for tests that do not change it. Its chat template uses
    documents.
    """
    log = tmp_path_factory.mktemp("server") / "log"
    options = {
        **tiny_options,
        "OPTION_BATCH_FOLDER": str(log.with_name("batches")),
        "OPTION_CHAT_TEMPLATE": _OF_DOCUMENTS + tiny.CHAT_TEMPLATE,
    }
    # In 16 bits, the rest of the batch decides between near ties.
    with serving(log, **options, OPTION_DTYPE="float32") as served:
        served.ready()
        yield served
