# SPDX-License-Identifier: Apache-2.0
"""Two models in one container with room for one: swaps, waits, calls and faults.

Half of the time all users ask for both models in turn. In the other half all but one ask for one
model without a pause, and the last asks for the other one. Then a model's server is killed, and
the container is asked to stop while requests wait. A second container loads and unloads models by
SageMaker's calls: a second model gets 507, and memory is back when DELETE answers.

The exit code is 1 if a request is not answered by its model, if a model makes room earlier than it
may, or if a request waits for longer than the rules of swaps allow.
"""

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil

from tests.support.harness.process import SERVE, START_S, Program
from tests.support.harness.wait import until
from tests.support.models import tiny
from tools.bench.models.verdict import HEAD, Asked, row, unanswered, unfair, ups

ROOM = {
    "OPTION_MAX_MODEL_LEN": "512",
    "OPTION_KV_CACHE_MEMORY_BYTES": "64M",
    "OPTION_MODELS_MEMORY": "3G",  # the plan takes 2.6 GiB for one
    "OPTION_LOG_FORMAT": "json",
}
NAMES = ("a", "b")
ANSWER_S = 600.0
PAUSE_S = 5.0
"""Between two requests of the user who asks for the rare model."""
LOADS = 3
"""How often SageMaker's calls load each model."""
GROWS = 32 * 1024**2
"""Bytes that the container may have more after a DELETE than before the first load."""


def ask(client: httpx.Client, model: str) -> Asked:
    began = time.monotonic()
    body = {"model": model, "prompt": "Hi", "max_tokens": 8, "temperature": 0}
    try:
        answer = client.post("/v1/completions", json=body)
    except httpx.HTTPError:
        return Asked(model, 0, "", time.monotonic() - began)
    if answer.status_code != 200:
        return Asked(model, answer.status_code, "", time.monotonic() - began)
    held_ms = float(answer.headers.get("x-slipway-held-ms", 0))
    return Asked(model, 200, answer.json()["model"], held_ms / 1000)


def load(client: httpx.Client, users: int, seconds: float, *, skewed: bool) -> list[Asked]:
    """The requests of users who ask one after the other for this long."""
    ends = time.monotonic() + seconds

    def user(number: int) -> list[Asked]:
        found: list[Asked] = []
        rare = skewed and number == 0
        while time.monotonic() < ends:
            model = NAMES[rare] if skewed else NAMES[(number + len(found)) % 2]
            found.append(ask(client, model))
            if rare:
                time.sleep(PAUSE_S)
        return found

    with ThreadPoolExecutor(users) as pool:
        return [it for found in pool.map(user, range(users)) for it in found]


def taking_turns(folder: Path, users: int, seconds: float) -> list[str]:
    """Run models that take turns. Returns the faults that it found."""
    models = {name: {"model_id": str(folder / name)} for name in NAMES}
    config = folder / "config.yaml"
    config.write_text(json.dumps({"models": models}))
    environ = {**ROOM, "OPTION_CONFIG_FILE": str(config)}
    wrong: list[str] = []
    with (
        Program(*SERVE, environ=environ, log=folder / "turns.log") as server,
        httpx.Client(base_url=server.url, timeout=ANSWER_S) as client,
    ):
        server.ready()
        print(HEAD, flush=True)
        for name, skewed in (("in turn", False), ("skewed", True)):
            before = len(ups(server.logged()))
            asked = load(client, users, seconds / 2, skewed=skewed)
            found = ups(server.logged())[max(before - 1, 0) :]
            print(row(name, asked, found), flush=True)
            wrong += [*unanswered(asked), *unfair(asked, found)]
        told = ask(client, "a")
        wrong += unanswered([told])
        for it in models_servers(server):
            it.kill()
        began = time.monotonic()
        until(lambda: {it["state"] for it in _listed(client)} == {"cold"}, START_S)
        told = ask(client, "a")
        print(f"a model's server killed: the next answer after {time.monotonic() - began:.1f} s")
        wrong += unanswered([told])
        wrong += drained(server, client, users)
    return wrong


def models_servers(server: Program) -> list[psutil.Process]:
    """The servers of models that run: children that listen, apart from the router."""
    found = []
    for child in server.own.children():
        ports = {it.laddr.port for it in child.net_connections() if it.status == psutil.CONN_LISTEN}
        if ports and server.port not in ports:
            found.append(child)
    return found


def _listed(client: httpx.Client) -> list[dict[str, str]]:
    found: list[dict[str, str]] = client.get("/v1/models").json()["data"]
    return found


def drained(server: Program, client: httpx.Client, users: int) -> list[str]:
    """Ask the container to stop while requests wait for a model. Returns the faults."""
    ready = next(it["id"] for it in _listed(client) if it["state"] == "ready")
    other = next(name for name in NAMES if name != ready)
    found: list[Asked] = []
    waiting = [
        threading.Thread(target=lambda: found.append(ask(client, other))) for _ in range(users)
    ]
    for thread in waiting:
        thread.start()
    until(lambda: f"slipway_router_held {users}.0" in client.get("/metrics").text, START_S)
    began = time.monotonic()
    code = server.stop()
    for thread in waiting:
        thread.join()
    got = sorted(it.status for it in found)
    print(f"SIGTERM with waiters: {got}, exit code {code}, {time.monotonic() - began:.1f} s")
    left = [it.pid for it in server.left_behind()]
    wrong = [f"with SIGTERM a waiting request got {it}" for it in got if it not in (200, 503)]
    wrong += [f"the exit code is {code}"] if code else []
    return wrong + ([f"processes are left: {left}"] if left else [])


def by_calls(folder: Path) -> list[str]:
    """Load and unload models by SageMaker's calls. Returns the faults that it found."""
    environ = {
        **ROOM,
        "SAGEMAKER_MULTI_MODEL": "true",
        "OPTION_MODEL_ROOTS": str(folder),
    }
    wrong: list[str] = []

    def expect(status: int, told: httpx.Response) -> None:
        if told.status_code != status:
            wrong.append(f"{told.request.method} {told.request.url.path}: {told.status_code}")

    with (
        Program(*SERVE, environ=environ, log=folder / "calls.log") as server,
        httpx.Client(base_url=server.url, timeout=ANSWER_S) as client,
    ):
        server.ready()
        empty = resident(server)
        print(f"no model: {_mib(empty)}", flush=True)
        for number in range(LOADS * len(NAMES)):
            one, other = NAMES[number % 2], NAMES[1 - number % 2]
            calls = [{"model_name": name, "url": str(folder / name)} for name in (one, other)]
            expect(200, client.post("/models", json=calls[0]))
            loaded = resident(server)
            expect(409, client.post("/models", json=calls[0]))
            expect(507, client.post("/models", json=calls[1]))
            wrong += unanswered([ask(client, one)])
            expect(200, client.delete(f"/models/{one}"))
            after = resident(server)
            print(f"{one}: {_mib(loaded)}; after DELETE {_mib(after)}", flush=True)
            if after > empty + GROWS:
                wrong.append(f"after DELETE the container has {_mib(after - empty)} more")
    return wrong


def resident(server: Program) -> int:
    """Resident bytes of all processes of a container."""
    found = 0
    for it in (server.own, *server.children()):
        try:
            found += it.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return found


def _mib(size: float) -> str:
    return f"{size / 1024**2:.0f} MiB"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/dev bench models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10, help="of load on models in turn")
    parser.add_argument("--users", type=int, default=4, help="who ask at the same time; 2 or more")
    parser.add_argument("--logs", type=Path, help="a folder for the logs, which are else removed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="models-") as name:
        folder = Path(name)
        for model in NAMES:
            shutil.copytree(tiny.make(), folder / model)
        try:
            wrong = taking_turns(folder, options.users, 60 * options.minutes)
            wrong += by_calls(folder)
        finally:
            if options.logs:
                options.logs.mkdir(parents=True, exist_ok=True)
                for log in folder.glob("*.log"):
                    shutil.copy(log, options.logs)
    for it in wrong:
        print(it)
    print("not all was as it should be" if wrong else "all was as it should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
