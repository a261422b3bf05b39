# SPDX-License-Identifier: Apache-2.0
"""The supervision of LMCache's server: the faults that end it, those that do not, and its series.

A small program replaces the server, and obeys a file; the real server is in
tests/e2e/test_kv_tiers.py.
"""

import contextlib
import logging
import sys
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, generate_latest

from serving.engine.base import Hits, Prefilled
from serving.kv_cache import cache_server
from serving.kv_cache.cache_server import CacheServer, Capacity
from serving.router.fleet import facts
from tests.support.harness import ports
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

STUB = """#!{python} -S
import http.server, pathlib, sys, threading, time
metrics = pathlib.Path(__file__).with_name("metrics")
speed = pathlib.Path(__file__).with_name("speed")
def listen():
    for line in sys.stdin:
        speed.write_text(line)
threading.Thread(target=listen, daemon=True).start()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = metrics.read_bytes() if self.path == "/metrics" else b"healthy"
        if text == b"hang":
            time.sleep(600)
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""
CAPACITY = Capacity(
    sizes={"l1": 3_000, "disk": 8_000},
    kept={"l1": 0, "disk": 8_000, "shared": 90_000},
    token=100,
    store="abc",
)
LOADS = (
    "# TYPE slipway_kv_load_seconds_per_byte gauge\n"
    'slipway_kv_load_seconds_per_byte{l2_name="native_plugin"} 1e-05\n'
    'slipway_kv_load_seconds_per_byte{l2_name="valkey"} 5e-05\n'
)
SERIES = '# TYPE lmcache_mp_lookups counter\nlmcache_mp_lookups_total{l2_name="fs_native"} 3.0\n'


class Watched:
    """A cache server, and the files that it exchanges with its stub.

    prefilled: the engine's figures so far; the last one counts.
    """

    def __init__(self, folder: Path, server: CacheServer, prefilled: list[Prefilled]) -> None:
        self.metrics = folder / "metrics"
        self.speed = folder / "speed"
        self.server = server
        self.prefilled = prefilled

    def value(self) -> float | None:
        return REGISTRY.get_sample_value("lmcache_mp_lookups_total", {"l2_name": "folder"})

    def kill(self) -> None:
        assert self.server._process
        self.server._process.kill()


@pytest.fixture
async def watched(tmp_path, monkeypatch):
    stub = tmp_path / "stub"
    stub.write_text(STUB.format(python=sys.executable))
    stub.chmod(0o755)
    (tmp_path / "metrics").write_text(SERIES)
    (tmp_path / "speed").write_text("")
    prefilled = [Prefilled(0, 0, 0)]
    for name in ("WATCH_S", "FIRST_PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(cache_server, name, 0.05)
    monkeypatch.setattr(sys, "executable", str(stub))
    port = ports.free()
    server = CacheServer(
        arguments=[str(port)],
        environ={},
        http_port=port,
        capacity=CAPACITY,
        prefilled=lambda: prefilled[-1],
        hits=lambda: Hits(engine=7, tiers=9),
        chunk_size=256,
    )
    server._client.timeout = 2.0
    await server.start()
    yield Watched(tmp_path, server, prefilled)
    await server.stop()


async def test_its_series_are_ours(watched):
    await until_async(lambda: watched.value() == 3)


async def test_routers_read_what_its_tiers_hold_and_what_loading_costs(watched):
    watched.metrics.write_text(LOADS)
    watched.prefilled.append(Prefilled(requests=1, tokens=1000, seconds=2.0))
    name, load = "slipway_prefill_seconds_per_token", "slipway_kv_load_seconds_per_byte"
    await until_async(lambda: REGISTRY.get_sample_value(load, {"l2_name": "valkey"}))
    await until_async(lambda: REGISTRY.get_sample_value(name))
    found = facts.read(generate_latest(REGISTRY))
    assert (found.capacity.memory, found.capacity.disk, found.capacity.shared) == (0, 80, 900)
    assert (found.capacity.store, found.chunk) == ("abc", 256)
    assert found.prices._replace(memory=0) == pytest.approx((0, 0.5, 2.5))


async def test_hits_have_the_names_that_lmcache_has_for_them(watched):
    await until_async(lambda: REGISTRY.get_sample_value("lmcache:num_hit_tokens_total") == 9)
    assert REGISTRY.get_sample_value("lmcache:num_vllm_hit_tokens_total") == 7


async def test_it_is_passed_the_seconds_that_a_chunk_takes_the_engine(watched):
    watched.prefilled.append(Prefilled(requests=1, tokens=1000, seconds=2.0))
    await until_async(lambda: watched.speed.read_text() == "0.512000\n")
    # Short prompts spend their time elsewhere; then long ones are computed twice as fast.
    watched.prefilled.append(Prefilled(requests=11, tokens=2000, seconds=102.0))
    watched.speed.write_text("")
    await until_async(lambda: watched.speed.read_text() == "0.512000\n")
    watched.prefilled.append(Prefilled(requests=21, tokens=102_000, seconds=202.0))
    await until_async(lambda: watched.speed.read_text() == "0.435200\n")


async def test_a_fork_that_fails_is_tried_again(watched, monkeypatch, caplog):
    with monkeypatch.context() as gone:
        gone.setattr(sys, "executable", "/nowhere")
        watched.kill()
        await until_async(lambda: "the cache server did not start" in caplog.text)
        assert "kind" in caplog.records[-1].facts
    await until_async(lambda: watched.server.up)
    await until_async(lambda: watched.value() == 3)


@pytest.mark.parametrize("text", [b"lmcache{ 1", b"\xff", b"lmcache_a 1\n" * 400_000])
async def test_metrics_that_cannot_be_read_end_nothing(watched, caplog, text):
    process = watched.server._process
    watched.metrics.write_bytes(text)
    await until_async(lambda: "metrics cannot be read" in caplog.text)
    await until_async(lambda: watched.value() is None)
    watched.metrics.write_text(SERIES)
    await until_async(lambda: watched.value() == 3)
    assert watched.server._process is process
    assert caplog.text.count("metrics cannot be read") == 1
    watched.kill()
    await until_async(lambda: watched.server._restarts == 1)
    await until_async(lambda: watched.server.up)


async def test_metrics_that_hang_do_not_count_as_a_hang(watched, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(cache_server, "HUNG_S", 1.0)
    watched.server._client.timeout = 0.5
    watched.metrics.write_bytes(b"hang")
    await until_async(lambda: "metrics cannot be read" in caplog.text)
    with contextlib.suppress(TimeoutError):
        await until_async(lambda: watched.server._restarts, seconds=3)
    assert watched.server.up
    assert watched.server._restarts == 0
