# SPDX-License-Identifier: Apache-2.0
"""The connector between vLLM's real scheduler and LMCache's real server, in every order of events.

A step here is one of the engine's: the scheduler, the worker's side of the connector with its KV in
ordinary tensors, and the scheduler's update with the step's output. Only the model is missing. Any
exception in a step would end the engine.
"""

import contextlib
import dataclasses
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
import torch
from lmcache.v1.multiprocess.futures import MessagingFuture
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lmi_config.plan import kv_tiers
from lmi_config.plan.kv_tiers import Tiers
from serving.engine import kv_connector
from serving.engine.base import HANDED_OVER
from serving.engine.kv_connector import FaultTolerantConnector
from serving.server.prepare import PARTS
from tests.lmi_config.examples import machine
from tests.support.harness import ports
from tests.support.models import tiny

BLOCK, BLOCKS, CHUNK = 128, 32, 256
PROMPT = 3 * CHUNK + 10
TIERS = Tiers(l1=1, chunk_size=CHUNK, reasons={})
QUICK = {"lmcache.mp.mq_timeout": 3.0, "lmcache.mp.heartbeat_interval": 2.0}
FULL = {
    "layer": FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32)
}
ABORTED = RequestStatus.FINISHED_ABORTED


class Server:
    """LMCache's server with our modules."""

    def __init__(self, chunk: int = CHUNK) -> None:
        self.chunk = chunk
        self.port, self._http, self._prometheus = (ports.free() for _ in range(3))
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [sys.executable, "-m", "serving.kv_cache.lmcache", "server", "--l1-size-gb=0.1"]
        command += [
            f"--port={self.port}",
            f"--http-port={self._http}",
            f"--chunk-size={self.chunk}",
        ]
        command += [f"--prometheus-port={self._prometheus}", "--eviction-policy=LRU"]
        command += ["--no-l1-use-lazy", "--supported-transfer-mode=auto"]
        command += [f"--shm-name=slipway-test-{self.port}"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE)
        deadline = time.monotonic() + 300  # for busy machines
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{self._http}/metrics").status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError("LMCache's server did not start")

    def forget(self) -> None:
        """Forget all KV. Eviction does the same to a part of it."""
        httpx.post(f"http://127.0.0.1:{self._http}/cache/clear", json={}).raise_for_status()

    def metrics(self) -> str:
        return httpx.get(f"http://127.0.0.1:{self._http}/metrics", timeout=60).text

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Engine:
    """vLLM's scheduler and a worker's connector, run step by step.

    layers: name → the spec of its KV; each layer is a separate group. budget: tokens of a step.
    """

    def __init__(
        self,
        port: int,
        layers: Mapping[str, KVCacheSpec] = FULL,
        connector: Mapping[str, Any] = QUICK,
        blocks: int = BLOCKS,
        budget: int = 4096,
    ) -> None:
        self._blocks = blocks
        block = min(it.block_size for it in layers.values())
        config = EngineArgs(
            model=str(tiny.make()),
            block_size=block,
            max_model_len=4096,
            max_num_batched_tokens=budget,
            enable_prefix_caching=True,
            kv_transfer_config=kv_tiers.connector(
                dataclasses.replace(TIERS, connector=connector),
                machine(ports=(port, 0, 0)),
                PARTS.connector,
            ),
        ).create_engine_config()
        kv_config = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([name], spec) for name, spec in layers.items()],
        )
        config.cache_config.num_gpu_blocks = blocks
        config.cache_config.kv_cache_layout = "LBHNC"
        self.scheduler = Scheduler(
            config, kv_config, StructuredOutputManager(config), block_size=block, log_stats=True
        )
        self.worker = FaultTolerantConnector(config, KVConnectorRole.WORKER, kv_config)
        self.layers = {
            name: torch.zeros(blocks, 2, spec.block_size, 128) for name, spec in layers.items()
        }
        self.kv = next(iter(self.layers.values()))
        self.worker.register_kv_caches(self.layers)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block, sha256)
        self.ended: dict[str, str] = {}
        self.loaded: set[str] = set()

    def ask(
        self,
        first: int,
        length: int = PROMPT,
        tokens: int = 1,
        salt: str | None = None,
        handed_over: bool = False,
    ) -> str:
        name = uuid.uuid4().hex
        extra = {"kv_transfer_params": {HANDED_OVER: True}} if handed_over else None
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args=extra)
        prompt = [first, *range(length - 1)]
        self.scheduler.add_request(
            Request(name, prompt, sampling, None, cache_salt=salt, block_hasher=self._hasher)
        )
        return name

    def leave(self, *names: str) -> None:
        self.scheduler.finish_requests(names, ABORTED)

    def step(self, during: Callable[[], None] = lambda: None) -> KVConnectorOutput:
        """during: called while the workers are busy, as an abort may happen then."""
        scheduled = self.scheduler.schedule()
        worker, output = self.worker, KVConnectorOutput()
        worker.handle_preemptions(scheduled.kv_connector_metadata)
        worker.bind_connector_metadata(scheduled.kv_connector_metadata)
        worker.start_load_kv(None)
        self.compute(scheduled)
        worker.wait_for_save()
        results = worker.get_transfer_results(scheduled.finished_req_ids)
        output.finished_sending = results.finished_sending
        output.finished_recving = results.finished_recving
        output.failed_recving = results.failed_recving
        self.loaded |= (results.finished_recving or set()) - (results.failed_recving or set())
        output.invalid_block_ids = worker.get_block_ids_with_load_errors()
        worker.clear_connector_metadata()
        during()
        names = [*scheduled.num_scheduled_tokens]
        tokens = []
        for name in names:
            request = self.scheduler.requests[name]
            whole = request.num_computed_tokens >= request.num_prompt_tokens
            tokens.append([7] if whole else [])
        done = self.scheduler.update_from_output(
            scheduled,
            ModelRunnerOutput(
                names, {name: n for n, name in enumerate(names)}, tokens,
                kv_connector_output=output,
            ),
        )  # fmt: skip
        for outputs in done.values():
            for it in outputs.outputs:
                if it.finish_reason is not None:
                    self.ended[it.request_id] = str(it.finish_reason)
        return output

    def compute(self, scheduled: SchedulerOutput) -> None:
        """Fill each computed block with its tokens, so that tests can recognise it."""
        for it in scheduled.kv_connector_metadata.requests:
            if it.direction == "STORE":
                for block in it.op.block_ids[0]:
                    self.kv[block] = it.op.token_ids[0]

    def until(self, condition: Callable[[], object], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline
            self.step()
            time.sleep(0.01)

    def answer(self, *names: str) -> None:
        self.until(lambda: {*names} <= self.ended.keys())
        assert {self.ended[name] for name in names} == {"length"}

    def known(self, first: int) -> None:
        """Store a prompt in LMCache's server, and nowhere else."""
        self.answer(self.ask(first))
        self.idle()
        assert self.scheduler.reset_prefix_cache()

    def loading(self, first: int, tokens: int = 1) -> str:
        """A request whose load the next step's schedule hands to the worker."""
        connector, deadline = self.scheduler.connector, time.monotonic() + 60
        while time.monotonic() < deadline:
            name = self.ask(first, tokens=tokens)
            request, found = self.scheduler.requests[name], None
            while found is None:
                found, _ = connector.get_num_new_matched_tokens(request, 0)
            if found:
                return name
            self.leave(name)  # on a busy machine the server may have counted as away
            self.known(first)
        raise AssertionError("no hits")

    def idle(self) -> None:
        """Step until no request and no block is in use."""
        self.until(lambda: not self.scheduler.requests)
        self.step()  # this step tells the workers which requests have ended
        self.step()
        assert self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == self._blocks - 1


@pytest.fixture
def engine(server):
    """An engine with a server that answers. At the end, no block may be in use."""
    found = Engine(server.port)
    yield found
    server.resume()
    found.idle()
    assert not any(vars(found.scheduler.connector._transfers).values())
    assert not found.scheduler.connector._handovers.requests
    found.worker.shutdown()
    found.scheduler.shutdown()


@pytest.fixture
def in_flight(engine, monkeypatch):
    """Loads that stay in flight until the test ends them, as with a GPU."""
    found: dict[str, MessagingFuture[bool]] = {}

    def submit(request_id, *_, **__):
        return found.setdefault(request_id, MessagingFuture())

    monkeypatch.setattr(engine.worker.worker_adapter.transfer_ctx, "submit_retrieve", submit)
    return found


def test_a_prompt_is_loaded(engine):
    engine.known(1)
    engine.kv.zero_()
    name = engine.loading(1)
    assert engine.step().finished_recving == {name}
    assert engine.kv.unique().tolist() == [0, 1]
    engine.answer(name)


@pytest.fixture
def other(server):
    """Another engine with the same server."""
    found = Engine(server.port)
    yield found
    found.idle()
    found.worker.shutdown()
    found.scheduler.shutdown()


@pytest.mark.parametrize("before", [0, CHUNK + 1])
def test_a_prompt_that_another_engine_is_about_to_store_is_loaded(
    engine, other, before, monkeypatch
):
    """before: tokens of the prompt that are there at its first lookup."""
    monkeypatch.setattr(kv_connector, "HANDOVER_LIMIT_S", 60.0)
    first = 40 + before
    if before:
        other.answer(other.ask(first, length=before))
        other.idle()
    name = engine.ask(first, handed_over=True)
    request = engine.scheduler.requests[name]
    for _ in range(20):
        engine.step()
        time.sleep(0.01)
    assert not request.num_computed_tokens
    other.known(first)
    engine.kv.zero_()
    engine.answer(name)
    assert name in engine.loaded
    # The lookups before it keep nothing in the server's memory.
    assert engine.kv.unique().tolist() == [0, first]


def test_a_prompt_that_was_handed_over_and_never_comes_is_computed(engine, monkeypatch):
    monkeypatch.setattr(kv_connector, "HANDOVER_LIMIT_S", 0.2)
    waited = []
    for first in (50, 51):
        began = time.monotonic()
        engine.answer(name := engine.ask(first, handed_over=True))
        waited.append(time.monotonic() - began)
        assert name not in engine.loaded
    assert waited[0] >= 0.2
    assert engine.scheduler.connector._handovers.in_vain


def test_an_engine_with_nothing_to_compute_waits_for_the_answer(engine, monkeypatch):
    """It asks, gets the answer and loads in one step: each further step is a round trip to the
    workers.
    """
    monkeypatch.setattr(kv_connector, "ANSWER_S", 30.0, raising=False)
    engine.known(23)
    name = engine.ask(23)
    assert engine.step().finished_recving == {name}
    engine.answer(name)


def test_an_engine_that_computes_does_not_wait_for_the_answer(engine, server, monkeypatch):
    monkeypatch.setattr(kv_connector, "ANSWER_S", 30.0, raising=False)
    running = engine.ask(24, tokens=1000)
    engine.until(lambda: engine.scheduler.requests[running].num_output_tokens)
    server.pause()
    monkeypatch.setattr(MessagingFuture, "wait", lambda *_: pytest.fail("it waits"))
    engine.ask(25)
    before = engine.scheduler.requests[running].num_output_tokens
    engine.step()
    assert engine.scheduler.requests[running].num_output_tokens == before + 1
    monkeypatch.undo()
    server.resume()
    engine.leave(*engine.scheduler.requests)


def test_a_client_leaves_while_its_load_ends(engine):
    engine.known(2)
    name = engine.loading(2)
    engine.step(during=lambda: engine.leave(name))
    engine.idle()


def test_a_client_leaves_while_its_load_goes_on(engine, in_flight):
    engine.known(3)
    name = engine.loading(3)
    engine.step()
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    engine.leave(name)
    for _ in range(3):
        engine.step()
    # Blocks that are still written to are not given to another request.
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    in_flight[name].set_result(True)
    engine.idle()


def test_a_client_leaves_while_its_load_fails(engine, in_flight):
    engine.known(4)
    name = engine.loading(4)
    engine.step()
    in_flight[name].set_result(False)
    engine.step(during=lambda: engine.leave(name))
    engine.idle()


def test_a_client_leaves_after_its_load_failed(engine, in_flight):
    engine.known(5)
    name = engine.loading(5)
    engine.step()
    in_flight[name].set_result(False)
    engine.step()
    engine.leave(name)
    engine.idle()


@pytest.mark.parametrize(("when", "first"), [("before", 6), ("while", 19)])
def test_a_load_that_fails_is_computed(engine, in_flight, server, when, first):
    engine.known(first)
    names = [engine.loading(first), engine.loading(first)]
    if when == "before":
        server.pause()
        engine.until(lambda: not engine.worker.worker_adapter.is_healthy)
    engine.step()
    server.pause()
    engine.answer(*names)


def test_a_load_that_raises_is_computed(engine, monkeypatch):
    engine.known(7)

    def fails(*_, **__):
        raise RuntimeError("no such slot")

    monkeypatch.setattr(engine.worker.worker_adapter.transfer_ctx, "submit_retrieve", fails)
    engine.answer(engine.loading(7))


def test_a_load_whose_answer_is_an_error_is_computed(engine, in_flight):
    engine.known(8)
    name = engine.loading(8)
    engine.step()
    in_flight[name].set_exception(ValueError("cannot decode"))
    engine.answer(name)


def test_a_server_that_hangs_during_transfers_ends_nothing(engine, server):
    engine.known(9)
    loaded, stored = engine.loading(9), engine.ask(10)
    server.pause()
    engine.answer(loaded, stored)


def test_a_server_that_answers_late_after_it_hung_is_used_again(engine, server, monkeypatch):
    """A busy machine behaves in this way: after a vain wait, no answer comes in time."""
    monkeypatch.setattr(kv_connector, "PROBE_INTERVAL_S", 0.5, raising=False)
    engine.known(22)
    server.pause()
    engine.answer(engine.ask(22))
    server.resume()

    def hit() -> bool:
        engine.idle()
        assert engine.scheduler.reset_prefix_cache()
        name = engine.ask(22)
        server.pause()
        later = threading.Timer(4 * kv_connector.UNRESPONSIVE_LIMIT_S, server.resume)
        later.start()
        engine.answer(name)
        later.join()
        return name in engine.loaded

    engine.until(hit, 30)


def test_a_lookup_that_raises_is_a_miss(engine, monkeypatch):
    engine.known(11)

    def fails(*_):
        raise ValueError("cannot decode")

    monkeypatch.setattr(engine.scheduler.connector.scheduler_adapter, "check_lookup_result", fails)
    engine.answer(engine.ask(11))


def test_a_load_that_fails_disturbs_nobody_who_shares_its_prefix(engine, in_flight):
    engine.known(12)
    sharing = engine.ask(12, length=CHUNK - 1, tokens=300)
    engine.until(lambda: engine.scheduler.requests[sharing].num_output_tokens > 3)
    name = engine.loading(12)
    engine.step()
    computed = engine.scheduler.requests[sharing].num_computed_tokens
    assert computed > BLOCK
    in_flight[name].set_result(False)
    engine.step()
    assert engine.scheduler.requests[sharing].num_computed_tokens == computed + 1
    engine.answer(name)
    engine.leave(sharing)


def test_a_preempted_request_is_computed_when_its_load_fails(engine, in_flight):
    engine.known(13)
    name = engine.ask(13, tokens=5)
    engine.until(lambda: name in in_flight)
    in_flight.pop(name).set_result(True)
    engine.until(lambda: engine.scheduler.requests[name].num_output_tokens > 1)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.until(lambda: name in in_flight)
    in_flight[name].set_result(False)
    engine.answer(name)


def forget_worker(engine: Engine) -> None:
    """Make the server forget the worker: a server that is restarted between two pings has this
    state.
    """
    adapter = engine.worker.worker_adapter
    client, instance = adapter.req_client, adapter.instance_id
    client.unregister_kv_cache_engine_driven_context(instance).result(timeout=5)
    client.unregister_kv_cache(instance).result(timeout=5)


def is_used(engine: Engine, first: int) -> None:
    """Check that prompts are soon stored and loaded again."""

    def loads() -> bool:
        engine.answer(engine.ask(first))
        engine.idle()
        assert engine.scheduler.reset_prefix_cache()
        name = engine.ask(first)
        engine.answer(name)
        engine.idle()
        assert engine.scheduler.reset_prefix_cache()
        return name in engine.loaded

    engine.until(loads, 30)


@pytest.fixture(params=["engine_driven", "lmcache_driven"])
def copying(request, server):
    """Engines with each way of copying: the one without GPUs, and the one with GPUs."""
    found = Engine(server.port, connector=QUICK | {"lmcache.mp.mp_transfer_mode": request.param})
    yield found
    found.idle()
    found.worker.shutdown()
    found.scheduler.shutdown()


def test_a_server_that_was_restarted_unnoticed_is_used_again(copying):
    copying.known(14)
    forget_worker(copying)
    is_used(copying, 15)


def test_a_load_that_a_restarted_server_knows_nothing_of_ends(copying, monkeypatch):
    """The answer to the load never comes, because the server that got the request has ended."""
    copying.known(24)
    lost = MessagingFuture()
    monkeypatch.setattr(
        copying.worker.worker_adapter.transfer_ctx, "submit_retrieve", lambda *_, **__: lost
    )
    name = copying.loading(24)
    copying.step()
    forget_worker(copying)
    copying.answer(name)
    assert name not in copying.loaded
    monkeypatch.undo()
    is_used(copying, 25)


def test_an_engine_ends_though_the_server_hangs(server):
    engine = Engine(server.port)
    engine.answer(engine.ask(21))
    engine.idle()
    server.pause()
    engine.worker.worker_adapter._mq_timeout = 300.0
    began = time.monotonic()
    engine.worker.shutdown()
    assert time.monotonic() - began < 100
    server.resume()
    engine.scheduler.shutdown()


def test_what_was_reported_is_not_kept_for_ever(engine, monkeypatch):
    monkeypatch.setattr(kv_connector, "MOST_REPORTS", 2)
    for _ in range(5):
        engine.answer(engine.ask(1, length=10))
    engine.idle()
    assert len(engine.worker.worker_adapter._returned_finished) == 2


def test_tenants_make_no_series(engine, server):
    before = server.metrics()
    for n in range(20):
        engine.answer(engine.ask(20, salt=f"tenant {n}"))
    name = "lmcache_mp_lookups_requests_total "
    engine.until(lambda: name in server.metrics())

    def lookups(text: str) -> float:
        (value,) = [it.split()[-1] for it in text.splitlines() if it.startswith(name)]
        return float(value)

    engine.until(lambda: lookups(server.metrics()) >= 20)
    series = _series(server.metrics())
    assert not re.search("tenant|cache_salt|model_name", "\n".join(series))
    assert len(series) < 2 * len(_series(before))


def _series(text: str) -> list[str]:
    """The lines without the help: LMCache's help also names its labels."""
    return [it for it in text.splitlines() if not it.startswith("#")]


def test_a_server_that_is_killed_is_used_again(engine, server):
    engine.known(16)
    name = engine.loading(16)
    server.kill()
    engine.answer(name, engine.ask(17))
    server.start()
    engine.until(lambda: engine.worker.worker_adapter.is_healthy)
    engine.known(18)
    name = engine.loading(18)
    assert name in engine.step().finished_recving
    engine.answer(name)
