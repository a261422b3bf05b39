# SPDX-License-Identifier: Apache-2.0
"""Containers of public documentation, run by our server: their arguments as they pass
entrypoint.sh, their variables, the probe on its path, and a request on its endpoint.

The manifest of HyperPod's documentation is applied as a whole in test_hyperpod.py.
"""

import os
import shutil
import subprocess
from typing import Any, NamedTuple

import pytest

from lmi_config.options import arguments, settings
from tests.e2e.conftest import PYTHON, ROOT, serving
from tests.support.models import tiny

MOUNT = "/opt/ml/model"
"""The path of the model in a container. Here, paths that begin with it lead into the tiny model's
folder.
"""
KEPT = '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'
TOOLKITS = {
    "MODEL_CACHE_ROOT": MOUNT,
    "SAGEMAKER_CONTAINER_LOG_LEVEL": "20",
    "SAGEMAKER_ENV": "1",
    "SAGEMAKER_MODEL_SERVER_TIMEOUT": "3600",
    "SAGEMAKER_MODEL_SERVER_WORKERS": "1",
    "SAGEMAKER_PROGRAM": "inference.py",
    "SAGEMAKER_SUBMIT_DIRECTORY": f"{MOUNT}/code",
}
CHAT = {"messages": [{"role": "user", "content": "import"}], "max_tokens": 4}
INPUTS = {"inputs": "import", "parameters": {"max_new_tokens": 4}}


class Row(NamedTuple):
    """args, environ, port: the container's. probe: the path of its health check. path, body: those
    of the request.
    """

    args: tuple[str, ...]
    environ: dict[str, str]
    port: int
    probe: str
    path: str
    body: dict[str, Any]


ROWS = {
    "HyperPod's KV cache notebook, with what the operator adds": Row(
        (MOUNT, "--max-model-len", "4096", "--kv-transfer-config", KEPT),
        {
            **TOOLKITS,
            "OPTION_ROLLING_BATCH": "vllm",
            "NODE_IP": "127.0.0.1",
            "LMCACHE_LOCAL_CPU": "true",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.25",
        },
        8000,
        "/health",
        "/v1/chat/completions",
        {"model": MOUNT, **CHAT},
    ),
    "vLLM on Kubernetes": Row(
        ("vllm", "serve", MOUNT, "--host", "127.0.0.1", "--max-model-len", "4096", "-tp", "1"),
        {},
        8000,
        "/health",
        "/v1/completions",
        {"model": MOUNT, "prompt": "import", "max_tokens": 4},
    ),
    "vLLM's server as a module": Row(
        (
            *("python3", "-m", "vllm.entrypoints.openai.api_server", "--model", MOUNT),
            *("--served-model-name", "mine", "--max-model-len=4096"),
        ),
        {},
        8000,
        "/health",
        "/v1/chat/completions",
        {"model": "mine", **CHAT},
    ),
    "LMI's integration tests": Row(
        ("serve", "-m", f"test=file:{MOUNT}/"),
        {},
        8080,
        "/ping",
        "/predictions/test",
        INPUTS,
    ),
    "LMI's guide to endpoints": Row(
        ("serve",),
        {
            "HF_MODEL_ID": MOUNT,
            "OPTION_ROLLING_BATCH": "vllm",
            "OPTION_MAX_ROLLING_BATCH_SIZE": "32",
            "OPTION_MAX_MODEL_LEN": "4096",
            "TENSOR_PARALLEL_DEGREE": "max",
            "SERVING_MIN_WORKERS": "1",
        },
        8080,
        "/ping",
        "/invocations",
        INPUTS,
    ),
    "AWS's container of vLLM": Row(
        (),
        {"SM_VLLM_MODEL": MOUNT, "SM_VLLM_MAX_MODEL_LEN": "4096", "SM_VLLM_DTYPE": "auto"},
        8080,
        "/ping",
        "/invocations",
        CHAT,
    ),
}


@pytest.fixture(scope="module")
def mounted(tmp_path_factory):
    """The model as it is mounted, with LMI's file beside it."""
    folder = tmp_path_factory.mktemp("mounted") / "model"
    shutil.copytree(tiny.make(), folder)
    (folder / "serving.properties").write_text(
        "engine=Python\noption.rolling_batch=vllm\noption.max_model_len=4096\n"
    )
    return str(folder)


NIGHTLY = ("vLLM's server as a module", "LMI's guide to endpoints")
"""Every check reads these rows. Their servers, with the row before's options, start nightly."""


def here(it: Any, mounted: str) -> Any:
    return it.replace(MOUNT, mounted) if isinstance(it, str) else it


def started_with(row, mounted, folder):
    """The words that Python gets, and the variables. The port is the container's."""
    environ = {name: here(it, mounted) for name, it in row.environ.items()}
    environ["SERVING_MODEL_STORE"] = mounted
    words = passed_on([here(it, mounted) for it in row.args], folder)
    assert listens(words, environ) == row.port
    return words, environ


@pytest.mark.parametrize("name", NIGHTLY)
def test_it_is_read(name, mounted, tmp_path):
    started_with(ROWS[name], mounted, tmp_path)


def in_turn(name: str) -> Any:
    marks = [pytest.mark.nightly] if name in NIGHTLY else []
    return pytest.param(ROWS[name], marks=marks, id=name)


@pytest.mark.parametrize("row", [in_turn(it) for it in ROWS])
def test_it_starts_as_it_is_and_answers(row, mounted, tmp_path):
    words, environ = started_with(row, mounted, tmp_path)
    environ["OPTION_KV_CACHE_MEMORY_BYTES"] = "64M"
    with serving(tmp_path / "log", *PYTHON, *words, **environ) as it:
        it.ready()
        assert it.client.get(row.probe).status_code == 200
        body = {key: here(value, mounted) for key, value in row.body.items()}
        answer = it.client.post(row.path, json=body)
        assert answer.status_code == 200, answer.text
        if row.path == "/predictions/test":
            assert it.client.get("/models/test").json()[0]["models"][0]["status"] == "Healthy"


def passed_on(words, folder):
    """The arguments that the real entrypoint.sh passes to Python."""
    shown = folder / "python"
    shown.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    shown.chmod(0o755)
    ended = subprocess.run(
        [str(ROOT / "entrypoint.sh"), *words],
        env={"PATH": os.environ["PATH"], "SLIPWAY_PYTHON": str(shown)},
        capture_output=True,
        text=True,
        check=True,
    )
    program, words = ended.stdout.splitlines()[:3], ended.stdout.splitlines()[3:]
    assert program == ["-P", "-m", "serving"]
    return words


def listens(words, environ):
    """The container's port; the tests' own port comes from OPTION_PORT."""
    called = arguments.called(words, environ)
    assert called is not None
    verb, words, environ = called
    return settings.read(environ, arguments.read(verb, words)).port
