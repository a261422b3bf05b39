# SPDX-License-Identifier: Apache-2.0
"""TLS between a real Envoy, the endpoint picker and servers."""

import asyncio
import logging
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway import gateway
from tests.serving.conftest import running
from tests.serving.http.test_tls import files, folders, shown
from tests.serving.router.conftest import routing
from tests.support.harness import ports
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

__all__ = ["files", "folders"]


@pytest.mark.parametrize("own", [True, False])
async def test_all_ways_are_encrypted(files, tmp_path, own):
    """Between gateway and picker, the picker either makes its own certificate, which gateways do
    not verify by default, or has one that they verify.
    """
    ca, port = tmp_path / "ca.pem", ports.free()
    options: dict[str, Any] = {"epp_certificate": "self-signed"}
    if not own:
        options = {
            "epp_certificate": files["tls_cert_file"],
            "epp_private_key": files["tls_key_file"],
        }
    async with running(wait=False, **files) as server:
        number = int(server.url.rpartition(":")[2])
        replica = f"https://127.0.0.1:{number}"
        options |= {"router_replicas": replica, "router_ca_file": str(ca)}
        async with routing(0, wait=False, epp=True, epp_port=port, **options) as it:
            await until_async(lambda: it.router.pool.ready)
            trusted = Path() if own else ca
            envoy = gateway(tmp_path, port, [number], picker_tls=trusted, replicas_ca=ca)
            with envoy as program:
                async with httpx.AsyncClient(base_url=program.url, timeout=20) as client:
                    headers = {"x-slipway-route": "1"}
                    body = {"prompt": "a b"}
                    answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            assert replica in answer.headers["x-slipway-route"]


async def test_a_new_certificate_is_shown_once_it_is_whole(files, folders, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    port = ports.free()
    options = {"epp_certificate": files["tls_cert_file"], "epp_private_key": files["tls_key_file"]}
    async with routing(1, epp=True, epp_port=port, **options):
        assert await asyncio.to_thread(shown, port) == "first"
        shutil.copy(folders[1] / "own.key", tmp_path)  # without its certificate
        assert await asyncio.to_thread(shown, port) == "first"
        assert "do not match" in caplog.text
        shutil.copy(folders[1] / "own.pem", tmp_path)
        assert await asyncio.to_thread(shown, port) == "second"
