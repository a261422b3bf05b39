# SPDX-License-Identifier: Apache-2.0
"""The image as a container engine runs it: `scripts/test image`.

No container here has a network, so a download at the start would fail. A server's clients run
inside its container.
"""

import contextlib
import functools
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import tiny

ROOT = Path(__file__).parents[2]
DOCKER = os.environ.get("DOCKER") or "docker"
IMAGE = os.environ.get("IMAGE") or "slipway:cpu"
START_S = 500  # far above the usual time of a start, for busy machines
ASK = """
import json, sys, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor

port, path, bodies = json.load(sys.stdin)

def ask(body):
    data = None if body is None else json.dumps(body).encode()
    wanted = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data)
    wanted.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(wanted, timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)

with ThreadPoolExecutor(len(bodies)) as pool:
    print(json.dumps(list(pool.map(ask, bodies))))
"""


def docker(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    more = {"timeout": 300, **more}
    return subprocess.run([DOCKER, *arguments], capture_output=True, text=True, **more)


def done(*arguments: str, **more: Any) -> str:
    """The output of a docker command, which must succeed."""
    ended = docker(*arguments, **more)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def once(
    *command: str, flags: tuple[str, ...] = (), **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command in a container that is removed afterwards."""
    return docker("run", "--rm", "--network=none", *flags, IMAGE, *command, **more)


class Container:
    """A running container."""

    def __init__(self, number: str, port: int) -> None:
        self.id = number
        self.port = port

    def state(self) -> Any:
        return json.loads(done("inspect", "--format={{json .State}}", self.id))

    def logs(self) -> str:
        ended = docker("logs", "--tail=80", self.id)
        return ended.stdout + ended.stderr

    def ready(self) -> None:
        """Wait until the image's own health check reports that it is healthy."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and (state := self.state())["Running"]:
            if state["Health"]["Status"] == "healthy":
                return
            time.sleep(1)
        pytest.fail(f"the container did not become healthy: {self.state()}\n{self.logs()}")

    def run(self, *command: str) -> str:
        return done("exec", self.id, *command)

    def asking(self, path: str, *bodies: Any) -> "subprocess.Popen[str]":
        """Requests, all at once; told() has the answers."""
        client = subprocess.Popen(
            [DOCKER, "exec", "-i", self.id, "python3", "-c", ASK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert client.stdin
        client.stdin.write(json.dumps([self.port, path, bodies]))
        client.stdin.close()
        client.stdin = None
        return client

    def ask(self, path: str, *bodies: Any) -> list[str]:
        """The bodies of answers, all of them 200."""
        return told(self.asking(path, *bodies))

    def metric(self, name: str) -> float:
        """The sum of a metric's series."""
        lines = self.ask("/metrics", None)[0].splitlines()
        series = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in series)

    def stop(self) -> int:
        """Stop it as SageMaker and Kubernetes do, 30 s before SIGKILL. Returns the exit code."""
        done("stop", "--time=30", self.id)
        return int(self.state()["ExitCode"])


def told(client: "subprocess.Popen[str]") -> list[str]:
    answers = json.loads(client.communicate(timeout=300)[0])
    assert {status for status, _ in answers} == {200}, answers
    return [body for _, body in answers]


@contextlib.contextmanager
def running(
    *flags: str, environ: dict[str, str], image: str = IMAGE, verb: str = "serve", port: int = 8080
) -> Iterator[Container]:
    variables = (f"--env={name}={value}" for name, value in environ.items())
    often = "--health-interval=2s"
    number = done("run", "--detach", often, *flags, *variables, image, verb).strip()
    try:
        yield Container(number, port)
    finally:
        docker("rm", "--force", "--volumes", number)


@functools.cache
def config(image: str = IMAGE) -> Any:
    return json.loads(done("image", "inspect", "--format={{json .Config}}", image))


def engine() -> str:
    """cpu or gpu: the device that the image was built for."""
    return "gpu" if any(it.startswith("NVIDIA_") for it in config()["Env"]) else "cpu"


@pytest.fixture(scope="session")
def serves() -> None:
    if engine() == "gpu":
        pytest.skip("the GPU engine starts only on machines with GPUs")


@pytest.fixture(scope="session", autouse=True)
def image() -> None:
    try:
        missing = docker("image", "inspect", IMAGE).stderr
    except OSError as error:
        missing = str(error)
    if missing:
        pytest.fail(f"there is no image {IMAGE}; scripts/build makes it: {missing}")


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """The flag that puts the tiny model where SageMaker puts models, for everyone to read."""
    folder = tmp_path_factory.mktemp("model")
    for file in tiny.make().iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    folder.chmod(0o755)
    return f"--volume={folder}:/opt/ml/model:ro"
