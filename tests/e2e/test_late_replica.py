# SPDX-License-Identifier: Apache-2.0
"""Two real engines that share a list of adapters, of which one starts late."""

from scripts.harness.wait import until
from scripts.models import tiny_lora
from tests.e2e.conftest import serving


def test_a_server_that_starts_late_has_the_adapters(tiny_options, tmp_path):
    tiny_lora.write(tmp_path / "one", 1)
    tiny_lora.write(tmp_path / "two", 2)
    options = {
        **tiny_options,
        "OPTION_ENABLE_LORA": "true",
        "OPTION_ADAPTER_ROOTS": str(tmp_path),
        "OPTION_ADAPTER_LIST": str(tmp_path / "list"),
    }
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 2}}
    with serving(tmp_path / "log-first", **options) as first:
        first.ready()
        source = {"name": "one", "src": str(tmp_path / "one")}
        assert first.client.post("/adapters", params=source).status_code == 200
        with serving(tmp_path / "log-late", **options) as late:
            late.ready()
            assert late.invoke({**body, "adapters": "one"}).status_code == 200
            source = {"name": "two", "src": str(tmp_path / "two")}
            assert late.client.post("/adapters", params=source).status_code == 200
            until(lambda: first.client.get("/adapters/two").status_code == 200)
            assert first.invoke({**body, "adapters": "two"}).status_code == 200
            assert first.client.delete("/adapters/one").status_code == 200
            until(lambda: late.client.get("/adapters/one").status_code == 404)
