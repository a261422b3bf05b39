# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own output processor tells of tokens and of adapters, without an engine behind it."""

import time

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats, PrefillStats, SchedulerStats

from serving.engine import vllm
from serving.engine.base import USAGE, Prefilled, Tokens, Usage


def processor():
    found = OutputProcessor(None, log_stats=True)
    vllm._tell_of_requests(found)
    vllm._name_adapters_publicly(found.lora_states)
    return found


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
    usage, it = Usage(), processor()
    before = USAGE.set(usage)
    it.add_request(request("one"), None)
    USAGE.reset(before)
    it.add_request(request("others"), None)
    assert usage.tokens == Tokens()  # its prompt is not computed
    generated(it, "one", 5, cached=3)
    generated(it, "others", 5, cached=0)
    assert usage.tokens == Tokens(4, 3, 1)
    generated(it, "one", 6, 7)
    it.abort_requests(["one"], internal=True)
    assert usage.tokens == Tokens(4, 3, 3)


def test_how_quickly_tokens_came_is_told():
    usage, it = Usage(), processor()
    before = USAGE.set(usage)
    for name in ("one", "single", "none"):
        it.add_request(request(name), None)
    USAGE.reset(before)
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
    usage, it = Usage(), processor()
    before = USAGE.set(usage)
    whole = request("many")
    parent = ParentRequest(whole)
    for number in range(2):
        it.add_request(request(f"{number}_many"), None, parent, number)
    USAGE.reset(before)
    for number in range(2):
        generated(it, f"{number}_many", 5, 6, cached=2, end=FinishReason.LENGTH)
    assert usage.tokens == Tokens(4, 2, 4)


def test_adapters_have_their_public_names_in_vllms_series():
    it, stats = processor(), SchedulerStats()
    for number, name in enumerate(("poet@1234", "poet@5678", "a@b@1234")):
        it.add_request(request(f"{number}", adapter=name), None)
        it.lora_states.request_running(f"{number}", name)
    it.lora_states.request_waiting("3", "poet@5678")
    it.update_scheduler_stats(stats)
    assert stats.running_lora_adapters == {"poet": 2, "a@b": 1}
    assert stats.waiting_lora_adapters == {"poet": 1, "a@b": 0}


def test_what_is_computed_of_a_prompt_whose_client_leaves_is_about_known(monkeypatch):
    """vLLM computes long prompts in chunks, and tells of none before the first token."""
    clock = 100.0
    monkeypatch.setattr("serving.engine.vllm.time.monotonic", lambda: clock)
    usage, it = Usage(), processor()
    before = USAGE.set(usage)
    it.add_request(request("long", tokens=1000), None)
    USAGE.reset(before)
    monkeypatch.setattr(vllm, "prefilled", lambda: Prefilled(0, 0, 0))
    clock += 1
    assert usage.tokens == Tokens()  # none has been computed yet
    monkeypatch.setattr(vllm, "prefilled", lambda: Prefilled(10, 4000, 20))
    assert usage.tokens == Tokens(200)
    clock += 100
    assert usage.tokens == Tokens(1000)
    monkeypatch.undo()
    generated(it, "long", 5, cached=900)
    assert usage.tokens == Tokens(1000, 900, 1)
