# SPDX-License-Identifier: Apache-2.0
"""The image's health check: the address that it asks, and its verdict on the answers."""

import asyncio
from typing import Any

import pytest

from serving.server import healthcheck
from tests.certificates import certify
from tests.serving.conftest import running
from tests.support.harness import ports

PYTHON = ("python3", "-P", "-m", "serving")
ENTRYPOINT = "/opt/slipway/entrypoint.sh"
INIT = ("/sbin/docker-init", "--", ENTRYPOINT)


@pytest.mark.parametrize(
    ("command", "environ", "port"),
    [
        (PYTHON, {}, 8080),
        ((*PYTHON, "serve", "--port", "9001"), {"OPTION_PORT": "9002"}, 9001),
        ((*PYTHON, "route", "http://a:1", "--port=9001"), {}, 9001),
        ((*PYTHON, "serve"), {"SAGEMAKER_BIND_TO_PORT": "9002"}, 9002),
        ((*PYTHON, "--model", "org/serving"), {}, 8000),
        ((*INIT, "serve", "--port", "9001"), {}, 9001),
        ((*INIT, "vllm", "serve", "org/model"), {}, 8000),
        (("bash",), {"OPTION_PORT": "9002"}, 9002),
    ],
)
def test_the_health_check_asks_the_containers_port(command, environ, port):
    environ = {"OPTION_MODEL_ID": "org/model", "OPTION_HOST": "0.0.0.0", **environ}
    assert healthcheck.url(command, environ) == f"http://127.0.0.1:{port}/ping"


def test_the_health_check_asks_the_containers_address():
    assert healthcheck.url((*PYTHON, "serve", "--host", "::1"), {}) == "http://[::1]:8080/ping"


@pytest.mark.anyio
@pytest.mark.parametrize("tls", [False, True])
async def test_a_server_is_healthy_when_it_is_ready(tmp_path, tls):
    files: dict[str, Any] = {}
    if tls:
        certify(tmp_path)
        files = {"tls_cert_file": f"{tmp_path}/own.pem", "tls_key_file": f"{tmp_path}/own.key"}
    async with running(wait=False, **files) as it:
        command = [*PYTHON, "serve", "--port", it.url.rpartition(":")[2], "--host=127.0.0.1"]
        environ = {f"OPTION_{name.upper()}": value for name, value in files.items()}
        it.may_start.clear()
        found = await asyncio.to_thread(healthcheck.fault, command, environ)
        assert found is not None
        assert '"status":"starting"' in found
        it.may_start.set()
        async with asyncio.timeout(20):
            while await asyncio.to_thread(healthcheck.fault, command, environ):
                await asyncio.sleep(0.05)


def test_nothing_answers():
    found = healthcheck.fault([*PYTHON, "serve", "--port", str(ports.free())], {})
    assert found is not None
    assert "refused" in found


def test_secrets_of_the_command_line_are_not_told():
    command = [*PYTHON, "serve", "--api-key", "a-very-long-key", "--port", "a-very-long-key"]
    found = healthcheck.fault(command, {})
    assert found is not None
    assert "--port" in found
    assert "a-very-long-key" not in found
