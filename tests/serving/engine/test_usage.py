# SPDX-License-Identifier: Apache-2.0
"""Counts of tokens and of adapters by vLLM's own output processor, without an engine behind it."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats, PrefillStats, SchedulerStats

from serving.engine.base import Call, Prefilled, Tokens, Usage
from serving.engine.calls import CallClient
from serving.engine.patches.outputs.processor import Processor
from serving.errors import EngineFailed

NOTHING = Prefilled(0, 0, 0)
NOBODY: Any = None


class Counted:
    """An output processor, and a call whose requests it counts."""

    def __init__(self, salt=None):
        self.calls = {}
        self.processor = Processor(self.calls, None, log_stats=True)
        self.usage, self.prefilled = Usage(), NOTHING
        call = Call("/v1/completions", {}, 0, NOBODY, "a", salt=salt)
        client = SimpleNamespace(generate=lambda prompt, params, name: name)
        self.client = CallClient(client, call, self.usage, self.calls, lambda: self.prefilled)

    def add(self, made, *rest):
        """Add one of the call's requests to the engine."""
        made.external_req_id = self.client.generate(None, None, made.external_req_id)
        self.processor.add_request(made, *rest)


def request(name, tokens=4, adapter=None):
    lora = LoRARequest(adapter, 1, "/nowhere") if adapter else None
    params = SamplingParams(detokenize=False)
    return EngineCoreRequest(
        *(name, [*range(tokens)], None, params, None, time.time(), lora, None, None),
        external_req_id=name,
    )


def generated(it, name, *tokens, cached=None, end=None):
    stats = None
    if cached is not None:
        stats = PrefillStats()
        stats.num_cached_tokens = cached
    output = EngineCoreOutput(name, [*tokens], prefill_stats=stats, finish_reason=end)
    it.process_outputs([output], time.monotonic(), IterationStats())


def test_tokens_count_also_of_what_is_broken_off():
    counted = Counted()
    usage, it = counted.usage, counted.processor
    counted.add(request("one"), None)
    it.add_request(request("others"), None)
    assert usage.tokens == Tokens()  # its prompt is not computed
    generated(it, "one", 5, cached=3)
    generated(it, "others", 5, cached=0)
    assert usage.tokens == Tokens(4, 3, 1)
    generated(it, "one", 6, 7)
    it.abort_requests(["one"], internal=True)
    assert usage.tokens == Tokens(4, 3, 3)


def test_calls_of_one_name_are_counted_apart():
    one = Counted()
    it, other = one.processor, Usage()
    theirs = CallClient(one.client._client, one.client._call, other, one.calls, lambda: NOTHING)
    for number, (client, tokens) in enumerate(((one.client, [5]), (theirs, [6, 7, 8]))):
        made = request("same")
        made.external_req_id = client.generate(None, None, "same")
        made.request_id = f"{number}"
        it.add_request(made, None)
        generated(it, f"{number}", *tokens, cached=0)
    assert (one.usage.tokens.generated, other.tokens.generated) == (1, 3)


@pytest.mark.anyio
async def test_a_call_that_is_over_leaves_nothing():
    counted = Counted()
    counted.add(request("one"), None)
    assert counted.calls
    await counted.client.close()
    assert not counted.calls


@pytest.mark.parametrize("theirs", [None, "", "another"])
def test_a_request_without_its_salt_does_not_reach_the_engine(theirs):
    counted, made = Counted(salt="ours"), request("one")
    made.cache_salt = theirs
    with pytest.raises(EngineFailed, match="lost the salt"):
        counted.add(made, None)
    assert not counted.processor.request_states
    made.cache_salt = "ours"
    counted.add(made, None)
    assert counted.processor.request_states


def test_how_quickly_tokens_came_is_told():
    counted = Counted()
    usage, it = counted.usage, counted.processor
    for name in ("one", "single", "none"):
        counted.add(request(name), None)
    began = time.time()
    for at, *tokens in ((10.0, 5), (10.5, 6, 7), (11.5, 8)):
        prefill = PrefillStats() if at == 10.0 else None
        output = EngineCoreOutput("one", tokens, prefill_stats=prefill)
        it.process_outputs([output], at, IterationStats())
    generated(it, "single", 5, cached=0)
    one, single, none = [pace() for pace in usage.paces]
    assert one
    assert single
    assert one.between == pytest.approx(1.5 / 3)
    assert began - 1 < one.first_at <= time.time()
    assert single.between is None
    assert none is None


def test_a_prompt_counts_once_for_all_of_its_answers():
    counted = Counted()
    usage, it = counted.usage, counted.processor
    parent = ParentRequest(request("many"))
    for number in range(2):
        counted.add(request(f"{number}_many"), None, parent, number)
    for number in range(2):
        generated(it, f"{number}_many", 5, 6, cached=2, end=FinishReason.LENGTH)
    assert usage.tokens == Tokens(4, 2, 4)


def test_adapters_have_their_public_names_in_vllms_series():
    it, stats = Counted().processor, SchedulerStats()
    for number, name in enumerate(("poet@1234", "poet@5678", "a@b@1234")):
        it.add_request(request(f"{number}", adapter=name), None)
        it.lora_states.request_running(f"{number}", name)
    it.lora_states.request_waiting("3", "poet@5678")
    it.update_scheduler_stats(stats)
    assert stats.running_lora_adapters == {"poet": 2, "a@b": 1}
    assert stats.waiting_lora_adapters == {"poet": 1, "a@b": 0}


def test_what_is_computed_of_a_prompt_whose_client_leaves_is_about_known(monkeypatch):
    """vLLM computes long prompts in chunks, and reports none before the first token."""
    clock = 100.0
    monkeypatch.setattr("serving.engine.calls.time.monotonic", lambda: clock)
    counted = Counted()
    usage, it = counted.usage, counted.processor
    counted.add(request("long", tokens=1000), None)
    clock += 1
    assert usage.tokens == Tokens()  # no chunk is computed yet
    counted.prefilled = Prefilled(10, 4000, 20)
    assert usage.tokens == Tokens(200)
    clock += 100
    assert usage.tokens == Tokens(1000)
    monkeypatch.undo()
    generated(it, "long", 5, cached=900)
    assert usage.tokens == Tokens(1000, 900, 1)
