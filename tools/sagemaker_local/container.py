# SPDX-License-Identifier: Apache-2.0
"""One copy of a model's container as SageMaker runs it: files, start, calls, end."""

import asyncio
import contextlib
import hashlib
import io
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import aiohttp

from tools.sagemaker_local.store import Artifact, Failed, Store

log = logging.getLogger(__name__)

PROCESS = "process:"
"""An Image that begins with this is a program of this machine, not a container image."""
CONTAINER_PORT = 8080
DOCKER = shlex.split(os.environ.get("DOCKER", "docker"))
STARTING_PING_S = 0.2  # between attempts; SageMaker asks every 5 s, for which nobody wants to wait
REASON = 1024  # characters of a FailureReason
_CONFIGURING = ("AWS_", "OPTION_", "SERVING_", "SAGEMAKER_", "SM_", "HF_MODEL_ID", "LMCACHE_")
"""Variables of ours that a process does not get."""


class Limits(NamedTuple):
    """SageMaker's limits for a container, in seconds and bytes."""

    answer_s: float = 60
    stream_s: float = 8 * 60
    ping_s: float = 2
    accept_s: float = 0.25
    ping_every_s: float = 5
    stop_s: float = 30
    startup_s: float | None = None  # instead of the endpoint's configuration
    scrape_s: float | None = None  # likewise
    header_bytes: int = 4096
    payload_bytes: int = 25 * 1024 * 1024
    load_s: float = 10 * 60  # for a model of a multi-model endpoint


class Recipe(NamedTuple):
    """The definition of a copy.

    channels: further artifacts by their channels' names. startup_s, scrape_s: as the endpoint's
    configuration has them. memory: MiB of the container, at most. gpus: how many it gets.
    """

    name: str
    image: str
    environment: Mapping[str, str]
    model: Artifact | None = None
    channels: Mapping[str, Artifact] = {}
    startup_s: float = 8 * 60
    scrape_s: float = 60
    metrics_path: str = "/metrics"
    memory: int | None = None
    gpus: int = 0
    targets: str | None = None
    """The prefix of the artifacts of a multi-model endpoint."""


class Answer(NamedTuple):
    """A container's non-streamed answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Copy:
    """A container, or a process in its place.

    work: where its files and its log may be. ended: called when it exits by itself.
    """

    def __init__(
        self,
        recipe: Recipe,
        limits: Limits,
        store: Store,
        work: Path,
        ended: Callable[[], None],
    ) -> None:
        self.recipe = recipe
        self._limits = limits
        self._store = store
        self._ended = ended
        self._root = work / "copies" / f"{recipe.name}-{time.time_ns()}"
        self._ml = self._root / "opt" / "ml"
        self.log = work / "logs" / f"{self._root.name}.log"
        self.port = 0
        self.healthy = False
        self.under_way = 0  # calls
        self.calls: list[str] = []  # the platform's own, with the status that came back
        self.scrape: dict[str, Any] | None = None
        self._brought: dict[str, tuple[int, int]] = {}
        self._loaded: dict[str, None] = {}  # models of targets, the least recently used first
        self._loading = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def _is_process(self) -> bool:
        return self.recipe.image.startswith(PROCESS)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def seen(self, path: Path) -> str:
        """A path below /opt/ml as the container sees it."""
        return str(path) if self._is_process else f"/{path.relative_to(self._root)}"

    async def start(self) -> None:
        """Bring its files, start it, wait until it is healthy. Raises Failed with the reason."""
        try:
            await asyncio.to_thread(self._fill)
            await self._launch()
            await self._become_healthy()
        except BaseException:
            await self.stop()
            raise
        self.healthy = True
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._scrapes())]

    async def _launch(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command, environ = self._process_command() if self._is_process else self._docker_command()
        log.info("%s: starting %s, log in %s", self.recipe.name, self.recipe.image, self.log)
        try:
            with self.log.open("wb") as output:
                self._process = await asyncio.create_subprocess_exec(
                    *command, env=environ, stdout=output, stderr=output, process_group=0
                )
        except OSError as error:
            raise Failed(f"The container cannot be started: {error}") from None

    def _fill(self) -> None:
        for name in ("model", "models"):
            (self._ml / name).mkdir(parents=True)
        if self.recipe.model:
            (self._ml / "model").rmdir()
            self._store.bring(self.recipe.model, self._ml / "model")
        for channel, artifact in self.recipe.channels.items():
            self._store.bring(artifact, self._ml / "additional-model-data-sources" / channel)
        self._brought = _listed(self._ml)

    def _process_command(self) -> tuple[list[str], dict[str, str]]:
        """A program, run with `serve` like an image. /opt/ml in its variables is its own folder."""
        program = self.recipe.image.removeprefix(PROCESS)
        own = {k: v for k, v in os.environ.items() if not k.startswith(_CONFIGURING)}
        environ = {
            key: value.replace("/opt/ml/", f"{self._ml}/")
            for key, value in self.recipe.environment.items()
        }
        environ["SAGEMAKER_BIND_TO_PORT"] = str(self.port)
        # The folders that Slipway would find at their usual places in a container.
        environ.setdefault("OPTION_ADAPTER_ROOTS", f"{self._ml}/models,{self._ml}/model")
        environ.setdefault("OPTION_MODEL_ROOTS", f"{self._ml}/models")
        if self.recipe.model:
            environ.setdefault("SERVING_MODEL_STORE", f"{self._ml}/model")
        return [program, "serve"], own | environ

    def _docker_command(self) -> tuple[list[str], None]:
        options = [f"--name={self._root.name}", "--rm", "--shm-size=64m"]
        options.append(f"--publish=127.0.0.1:{self.port}:{CONTAINER_PORT}")
        options += [f"--volume={it}:/opt/ml/{it.name}:ro" for it in sorted(self._ml.iterdir())]
        options += [f"--env={name}={value}" for name, value in self.recipe.environment.items()]
        if self.recipe.memory:
            options.append(f"--memory={self.recipe.memory}m")
        if self.recipe.gpus:
            options.append(f"--gpus={self.recipe.gpus}")
        return [*DOCKER, "run", *options, self.recipe.image, "serve"], None

    async def _become_healthy(self) -> None:
        assert self._process
        seconds = self._limits.startup_s or self.recipe.startup_s
        deadline = time.monotonic() + seconds
        fault: str | None = "no ping was sent"
        while time.monotonic() < deadline:
            if self._process.returncode is not None:
                code = self._process.returncode
                raise Failed(self._reason(f"The container exited with code {code}."))
            if (fault := await self.ping()) is None:
                return
            await asyncio.sleep(STARTING_PING_S)
        raise Failed(
            self._reason(
                f"The container did not pass the ping health check within {seconds:g} s: {fault}."
            )
        )

    def _reason(self, what: str) -> str:
        """A FailureReason: what SageMaker sees, and the container's last words."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        last = f" Its last log line: {lines[-1].strip()}" if lines else " It logged nothing."
        return (what + last)[:REASON]

    async def ping(self) -> str | None:
        """Ask once whether it is healthy. Returns the fault."""
        try:
            answer = await self.call("GET", "/ping", seconds=self._limits.ping_s)
        except Failed as fault:
            return f"GET /ping: {fault}"
        return None if answer.status == 200 else f"GET /ping answered {answer.status}"

    async def _watch(self) -> None:
        """Look after a healthy copy until it ends."""
        assert self._process
        exited = asyncio.ensure_future(self._process.wait())
        while True:
            await asyncio.wait({exited}, timeout=self._limits.ping_every_s)
            if exited.done():
                log.warning("%s: the container exited with %s", self.recipe.name, exited.result())
                self.healthy = False
                self._ended()
                return
            if fault := await self.ping():
                log.warning("%s: unhealthy: %s", self.recipe.name, fault)

    async def _scrapes(self) -> None:
        """Scrape its metrics as SageMaker's observability does, and keep how that went."""
        while True:
            try:
                answer = await self.call("GET", self.recipe.metrics_path)
                lines = answer.body.decode(errors="replace").splitlines()
                series = sum(bool(line) and not line.startswith("#") for line in lines)
                self.scrape = {"status": answer.status, "series": series}
            except Failed as fault:
                self.scrape = {"status": 0, "fault": str(fault)}
            await asyncio.sleep(self._limits.scrape_s or self.recipe.scrape_s)

    async def add_adapter(
        self, name: str, adapter: str, artifact: Artifact, account: str, times: int
    ) -> None:
        """Unpack an adapter and register it, as often as `times` says. Raises Failed.

        name: the component's. adapter: its id in the container.
        """
        now = time.time_ns()
        folder = self._ml / "models" / f"container_{account}-{name}-{now // 10**6}-{now % 10**6:06}"
        await asyncio.to_thread(self._store.bring, artifact, folder)
        self._brought |= _listed(folder)
        query = urlencode({"name": adapter, "src": self.seen(folder)})
        headers = {"X-Amzn-SageMaker-Adapter-Alias": name}
        for _ in range(times):
            await self._platform_call("POST", f"/adapters?{query}", headers)

    async def remove_adapter(self, adapter: str) -> None:
        """Have the container forget an adapter. Raises Failed."""
        await self._platform_call("DELETE", f"/adapters/{quote(adapter, safe='')}")

    async def load(self, target: str) -> str:
        """Have a target's model loaded. Returns its name in the container. If the container has no
        memory for it, the least recently used models are unloaded. Raises Failed.
        """
        assert self.recipe.targets is not None
        artifact = Artifact(self.recipe.targets + target, packed=True)
        name = hashlib.sha256(artifact.url.encode()).hexdigest()[:32]
        folder = self._ml / "models" / name
        async with self._loading:
            if name in self._loaded:
                self._loaded[name] = self._loaded.pop(name)
                return name
            await asyncio.to_thread(self._store.bring, artifact, folder / "model")
            self._brought |= _listed(folder)
            body = json.dumps({"model_name": name, "url": self.seen(folder / "model")}).encode()
            headers = {"Content-Type": "application/json"}
            while True:
                answer = await self._told("POST", "/models", headers, body)
                if answer.status != 507 or not self._loaded:
                    break
                oldest = next(iter(self._loaded))
                del self._loaded[oldest]
                await self._platform_call("DELETE", f"/models/{oldest}")
                await asyncio.to_thread(_remove, self._ml / "models" / oldest)
            if answer.status not in (200, 409):
                await asyncio.to_thread(_remove, folder)
                raise Failed(_shown("POST /models", answer))
            self._loaded[name] = None
        return name

    async def _platform_call(
        self, method: str, path: str, headers: Mapping[str, str] | None = None
    ) -> None:
        answer = await self._told(method, path, headers)
        if answer.status != 200:
            raise Failed(_shown(f"{method} {path.partition('&')[0]}", answer))

    async def _told(
        self, method: str, path: str, headers: Mapping[str, str] | None, body: bytes = b""
    ) -> Answer:
        """The answer to a call of the platform's own, which is recorded. Raises Failed."""
        shown = f"{method} {path.partition('&')[0]}"
        seconds = self._limits.load_s if body else None
        try:
            answer = await self.call(method, path, headers, body, seconds)
        except Failed as fault:
            self.calls.append(f"{shown} -")
            raise Failed(f"{shown}: {fault}") from None
        self.calls.append(f"{shown} {answer.status}")
        return answer

    async def call(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        seconds: float | None = None,
    ) -> Answer:
        """One call. Raises Failed where no whole answer comes in time, or its head is too large."""
        async with self.calling(method, path, headers, body, seconds) as response:
            try:
                return Answer(response.status, response.headers, await response.read())
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise Failed(_described(error)) from None

    @contextlib.asynccontextmanager
    async def calling(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        seconds: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One call's answer, from its head on. Raises Failed as call() does."""
        self.under_way += 1
        try:
            async with self._calling(method, path, headers, body, seconds) as response:
                yield response
        finally:
            self.under_way -= 1

    @contextlib.asynccontextmanager
    async def _calling(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None,
        body: bytes,
        seconds: float | None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        limits = self._limits
        data = io.BytesIO(body) if body else None
        async with aiohttp.ClientSession(
            f"http://127.0.0.1:{self.port}",
            auto_decompress=False,
            max_line_size=2**20,
            max_field_size=2**20,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            timeout=aiohttp.ClientTimeout(
                total=limits.answer_s if seconds is None else seconds, sock_connect=limits.accept_s
            ),
        ) as session:
            try:
                response = await session.request(
                    method, path, headers=headers, data=data, allow_redirects=False
                )
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise Failed(_described(error)) from None
            async with response:
                size = sum(len(name) + len(value) + 4 for name, value in response.raw_headers)
                size += len(response.reason or "")
                if size > limits.header_bytes:
                    raise Failed(f"its headers have {size} bytes, above {limits.header_bytes}")
                yield response

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL for the rest after the limit."""
        self.healthy = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        process = self._process
        if process:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(self._limits.stop_s):
                    await process.wait()
            except TimeoutError:
                log.warning(
                    "%s: killed, still there %g s after SIGTERM",
                    self.recipe.name,
                    self._limits.stop_s,
                )
                if not self._is_process:
                    await self._docker_kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a container leaves no process behind
            await process.wait()
        if not self._root.exists():
            return  # another call has been here
        if process and (written := _written(self._brought, _listed(self._ml))):
            log.warning(
                "%s: wrote below /opt/ml, which is read-only on SageMaker: %s",
                self.recipe.name,
                ", ".join(written[:10]),
            )
        await asyncio.to_thread(_remove, self._root)

    async def _docker_kill(self) -> None:
        killing = await asyncio.create_subprocess_exec(
            *DOCKER,
            "kill",
            self._root.name,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        await killing.wait()


def _shown(call: str, answer: Answer) -> str:
    body = answer.body[:500].decode(errors="replace")
    return f"{call} answered {answer.status}: {body}"[:REASON]


def _described(error: BaseException) -> str:
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "the connection was not accepted in time"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__


def _listed(folder: Path) -> dict[str, tuple[int, int]]:
    """The content of a folder, with sizes and modification times."""
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def _written(
    before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]
) -> list[str]:
    return sorted(
        path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
    )


def _remove(folder: Path) -> None:
    for path in (folder, *(it for it in folder.rglob("*") if it.is_dir())):
        path.chmod(0o755)
    shutil.rmtree(folder)
