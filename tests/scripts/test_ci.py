# SPDX-License-Identifier: Apache-2.0
"""`.ci/run`: what it calls, and which engine for containers it finds."""

import os
import shutil
import subprocess

import pytest

from scripts.harness.process import ROOT

STEP = '#!/bin/sh\necho "${0##*/} $* CI=$CI DOCKER=$DOCKER"\n'
RUNS = "#!/bin/sh\nexit 0\n"
DOES_NOT_RUN = "#!/bin/sh\nexit 1\n"
CHECKED = ["setup dev", *(f"{it} CI=true DOCKER=" for it in ("check ", "dev docs build", "test "))]
NOT_TESTED = "THE IMAGE HAS NOT BEEN TESTED: there is no docker or podman here that runs"


def program(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


@pytest.fixture
def ci(tmp_path):
    """Runs a copy of it, in which the steps only say what they are called with."""
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

    def run(**environ):
        own = {"PATH": str(path), "HOME": str(tmp_path)}
        ended = subprocess.run(
            [checkout / ".ci" / "run"], env=own | environ, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.splitlines()

    return run


def image(docker):
    return [f"build cpu CI=true DOCKER={docker}", f"test image CI=true DOCKER={docker}"]


def test_without_an_engine_the_last_line_says_what_was_not_tested(ci):
    assert ci() == [*CHECKED, NOT_TESTED]


@pytest.mark.parametrize("name", ["docker", "podman"])
def test_an_installed_engine_tests_the_image(ci, tmp_path, name):
    program(tmp_path / "bin" / "docker", DOES_NOT_RUN)
    program(tmp_path / "bin" / name, RUNS)
    assert ci() == CHECKED + image(name)


def test_an_engine_that_docker_names_is_the_only_one(ci, tmp_path):
    program(tmp_path / "bin" / "docker", RUNS)
    named = program(tmp_path / "own", RUNS)
    found = [line.replace(f"DOCKER={named}", "DOCKER=") for line in ci(DOCKER=str(named))]
    assert found == [line.replace(str(named), "") for line in CHECKED + image(named)]
    program(named, DOES_NOT_RUN)
    assert ci(DOCKER=str(named))[-1] == NOT_TESTED


@pytest.mark.parametrize("where", ["../shared/tools/docker-here", "/elsewhere"])
def test_a_program_beside_the_checkout_brings_one_up_and_takes_it_down(ci, tmp_path, where):
    brought, calls = tmp_path / "brought", tmp_path / "calls"
    tool = tmp_path / where.removeprefix("../").removeprefix("/")
    program(tool, f'#!/bin/sh\necho "$1" >>{calls}\necho "export DOCKER={brought}"\n')
    environ = {"SLIPWAY_CONTAINER_TOOLS": str(tool)} if where.startswith("/") else {}
    assert ci(**environ)[-1] == NOT_TESTED  # what it names does not run
    program(brought, RUNS)
    assert ci(**environ)[: len(CHECKED) + 2] == CHECKED + image(brought)
    assert calls.read_text().split() == ["up", "down"] * 2
    program(tool, DOES_NOT_RUN)
    assert NOT_TESTED in ci(**environ)


def test_what_it_calls_is_what_the_readme_says():
    assert "\n$ scripts/test\n" in (ROOT / "README.md").read_text()
    assert "\nscripts/test\n" in (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
