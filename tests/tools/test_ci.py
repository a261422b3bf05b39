# SPDX-License-Identifier: Apache-2.0
"""`.ci/run`: the steps that it calls, and the container engine that it finds or starts."""

import os
import shutil
import subprocess

import pytest

from tests.support.harness.process import ROOT

STEP = '#!/bin/sh\necho "${0##*/} $* CI=$CI DOCKER=$DOCKER"\n'
RUNS = "#!/bin/sh\nexit 0\n"
DOES_NOT_RUN = "#!/bin/sh\nexit 1\n"


def checked(docker=""):
    steps = ("check ", "dev docs build", "test ")
    return ["setup dev", *(f"{it} CI=true DOCKER={docker}" for it in steps)]


def program(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


@pytest.fixture
def ci(tmp_path):
    """Runs a copy of `.ci/run`. The steps only print their arguments."""
    checkout = tmp_path / "checkout"
    for name in ("check", "dev", "test", "build"):
        program(checkout / "scripts" / name, STEP)
    env = (ROOT / "scripts" / "env.sh").read_text()
    (checkout / "scripts" / "env.sh").write_text(env + 'setup() { echo "setup $*"; }\n')
    program(checkout / ".ci" / "run", (ROOT / ".ci" / "run").read_text())
    path = tmp_path / "bin"
    path.mkdir()
    for name in ("bash", "dirname", "mktemp", "rm", "sh", "true"):
        (path / name).symlink_to(shutil.which(name))

    def run(code=0, **environ):
        own = {"PATH": str(path), "HOME": str(tmp_path)}
        ended = subprocess.run(
            [checkout / ".ci" / "run"], env=own | environ, capture_output=True, text=True
        )
        assert ended.returncode == code, ended.stderr
        return ended

    return run


def image(docker):
    return [f"build cpu CI=true DOCKER={docker}", f"test image CI=true DOCKER={docker}"]


@pytest.fixture
def support(tmp_path):
    """A file that records the calls of the program that starts a container engine."""
    calls, engine = tmp_path / "calls", program(tmp_path / "started", RUNS)
    text = f'#!/bin/sh\necho "$1" >>{calls}\n[ "$1" != up ] || echo "export DOCKER={engine}"\n'
    program(tmp_path / "checkout" / "tests" / "support" / "containers", text)
    return calls


@pytest.mark.parametrize("name", ["docker", "podman"])
def test_an_installed_engine_tests_the_image(ci, support, tmp_path, name):
    program(tmp_path / "bin" / "docker", DOES_NOT_RUN)
    program(tmp_path / "bin" / name, RUNS)
    assert ci().stdout.splitlines() == checked() + image(name)
    assert not support.exists()


def test_an_engine_that_docker_names_is_the_only_one(ci, support, tmp_path):
    program(tmp_path / "bin" / "docker", RUNS)
    named = program(tmp_path / "own", RUNS)
    assert ci(DOCKER=str(named)).stdout.splitlines() == checked(named) + image(named)
    program(named, DOES_NOT_RUN)
    ended = ci(1, DOCKER=str(named))
    assert ended.stdout == "setup dev\n"
    assert "run: needs docker or podman, or DOCKER to name what is like them" in ended.stderr


def test_without_a_running_container_engine_one_is_started_and_ended(ci, support, tmp_path):
    assert ci().stdout.splitlines() == checked() + image(tmp_path / "started")
    assert support.read_text().split() == ["up", "down"]


def test_a_run_without_an_engine_fails(ci, support, tmp_path):
    program(tmp_path / "checkout" / "tests" / "support" / "containers", DOES_NOT_RUN)
    ended = ci(1)
    assert ended.stdout.splitlines() == checked()
    assert "no container engine runs here, and none could be started" in ended.stderr


def test_the_image_is_left_out_on_request(ci, support, tmp_path):
    program(tmp_path / "bin" / "docker", RUNS)
    ended = ci(CI_NO_IMAGE="1")
    assert ended.stdout.splitlines() == checked()
    assert "CI_NO_IMAGE is set: THE IMAGE IS NOT TESTED" in ended.stderr
    assert not support.exists()


@pytest.mark.parametrize(("words", "code", "told"), [(["-h"], 0, " up "), (["x"], 1, "up or down")])
def test_the_starter_of_container_engines_shows_its_usage(words, code, told):
    command = [ROOT / "tests" / "support" / "containers", *words]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == code
    assert told in ended.stdout + ended.stderr


def test_what_it_calls_is_what_the_readme_says():
    assert "\n$ scripts/test\n" in (ROOT / "README.md").read_text()
    assert "\nscripts/test\n" in (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
