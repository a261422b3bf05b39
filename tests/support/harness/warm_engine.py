# SPDX-License-Identifier: Apache-2.0
"""The imports of a warm Python for `serve`, and the differences of a server that is forked from it:
its engine's processes are also forked where vLLM spawns them on CPUs.
"""

# ruff: noqa: E402  # the variables first: libraries read them when they are imported
import os

os.environ |= {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "NUMBA_NUM_THREADS": "1",  # threads do not come along
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CONFIGURE_LOGGING": "0",  # each server does it for itself
}

import contextlib
import importlib
import logging
import multiprocessing.resource_tracker
import multiprocessing.util
import signal
import socket
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

# LMCache's modules first: its server exports only their counters.
for _name in (
    "lmcache.cli.main",
    "lmcache.v1.multiprocess.http_server",
    "serving.kv_cache.lmcache.prefetch_policy",
    "serving.kv_cache.lmcache.shared_store",
):
    importlib.import_module(_name)
LMCACHES = {*REGISTRY._collector_to_names}

for _name in (
    "serving.server.prepare",
    "serving.server.server",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
):
    importlib.import_module(_name)

from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform

from serving.engine import vllm
from serving.observability import logs

vllm._import()
# Otherwise, a new process imports vLLM to inspect each class of models.
registry._run_in_subprocess = lambda inspect: inspect()

CACHE_SERVER = ["-m", "serving.kv_cache.lmcache"]
PROGRAMS = [
    CACHE_SERVER,
    # The programs that `tune` starts.
    ["-P", "-m", "serving", "serve"],
    ["-P", "-m", "vllm.entrypoints.cli.main"],
]

_configure = CpuPlatform.check_and_update_config.__func__
_servers_own: dict[int, os.stat_result] = {}
"""The server's open files, as they were before vLLM opened some for its processes."""


def forked(arguments: Sequence[str]) -> None:
    """Reset the process to the state of one that has imported only what these arguments need."""
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")  # as when it was imported
    if [*arguments[:2]] == CACHE_SERVER:
        for collector in {*REGISTRY._collector_to_names} - LMCACHES:
            REGISTRY.unregister(collector)
        return
    CpuPlatform.check_and_update_config = classmethod(_fork_instead)
    multiprocessing.util.register_after_fork(_as_if_spawned, lambda it: it())


def _fork_instead(platform: Any, vllm_config: Any) -> None:
    _configure(platform, vllm_config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    if not _servers_own:
        _servers_own.update(_open_files())


def _as_if_spawned() -> None:
    """Undo, in a process of the engine, the state that a fork keeps and a program's start
    does not.
    """
    # vLLM inspects all members of modules, and this one's library answers vars() with a function.
    sys.modules.pop("llvmlite.binding.ffi", None)
    signal.set_wakeup_fd(-1)  # otherwise the server's event loop would get our signals
    for handled in signal.valid_signals():
        if callable(signal.getsignal(handled)):
            signal.signal(handled, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The server's listening sockets, its clients and its pipes must end with the server.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number, status in _open_files().items():
        before = _servers_own.get(number)
        if (before and os.path.samestat(before, status)) or _is_of_the_network(number):
            os.dup2(nowhere, number)
    os.close(nowhere)
    logs._handler = None
    logging.getLogger().handlers = [logs.process_handler()]
    if "NixlConnector" in os.environ.get("OPTION_KV_TRANSFER_CONFIG", ""):
        _have_nixl_wait()


def _have_nixl_wait() -> None:
    """Make NIXL's thread sleep between its looks; by default it spins on one core."""
    bindings: Any = importlib.import_module("nixl_cu13._bindings")
    own = bindings.nixlAgentConfig
    delay = property(own.pthrDelay.fget, lambda it, _: own.pthrDelay.fset(it, 1000))  # μs
    bindings.nixlAgentConfig = type("nixlAgentConfig", (own,), {"pthrDelay": delay})


def _open_files() -> dict[int, os.stat_result]:
    """Open sockets and pipes, without the standard streams and the resource tracker's."""
    kept = {0, 1, 2, getattr(multiprocessing.resource_tracker._resource_tracker, "_fd", None)}
    found = {}
    for number in {int(it.name) for it in Path("/proc/self/fd").iterdir()} - kept:
        with contextlib.suppress(OSError):  # the folder's own
            status = os.fstat(number)
            if stat.S_ISSOCK(status.st_mode) or stat.S_ISFIFO(status.st_mode):
                found[number] = status
    return found


def _is_of_the_network(number: int) -> bool:
    try:
        it = socket.socket(fileno=number)
    except OSError:
        return False
    family = it.family
    it.detach()
    return family in (socket.AF_INET, socket.AF_INET6)
