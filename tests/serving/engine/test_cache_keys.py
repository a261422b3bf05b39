# SPDX-License-Identifier: Apache-2.0
"""LMCache's keys beside vLLM's block hashes: requests that the engine tells apart have different
keys in the tiers, or do not use them. docs/explanation/kv_cache_keys.md is this file in words.
"""

import dataclasses
import inspect
import itertools
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestTracker
from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPSchedulerAdapter
from PIL import Image
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request, StreamingUpdate

from serving.engine.patches.engine_core import cache_keys
from serving.patching.patch import Unfit
from tests.serving.engine.test_kv_connector import PROMPT, Engine

BLOCK = 16
TOKENS = [*range(100, 100 + 4 * BLOCK)]
DIGEST = "0123456789abcdef"


def request(tokens: list[int] | None = TOKENS, **more: Any) -> Request:
    hasher = get_request_block_hasher(BLOCK, sha256)
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    return Request(uuid.uuid4().hex, tokens, sampling, None, block_hasher=hasher, **more)


def picture(identifier: str, offset: int = 10, length: int = 8) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length))


def adapter(name: str, path: str, number: int = 1) -> LoRARequest:
    return LoRARequest(name, number, path)


def embeddings(seed: int) -> torch.Tensor:
    return torch.randn(len(TOKENS), 8, generator=torch.Generator().manual_seed(seed))


def identified(**more: Any) -> MultiModalFeatureSpec:
    """A picture as vLLM identifies it."""
    items = MultiModalDataItems({"image": ImageProcessorItems([Image.new("RGB", (8, 8))])})
    inputs = ProcessorInputs(prompt="", mm_data_items=items, **more)
    (found,) = inputs.get_mm_hashes("model", "sha256")["image"]
    return picture(found)


IS_TOKEN = [n % 2 == 0 for n in range(len(TOKENS))]
APART: dict[str, tuple[dict[str, Any], ...]] = {
    "tokens": ({}, {"tokens": [7, *TOKENS[1:]]}),
    "the salt": ({}, {"cache_salt": "one"}, {"cache_salt": "other"}),
    "media": ({"mm_features": [picture("one")]}, {"mm_features": [picture("other")]}),
    "media's places": (
        {"mm_features": [picture("one", 10)]},
        {"mm_features": [picture("one", 11)]},
        {"mm_features": [picture("one", 10, 4), picture("one", 14, 4)]},
    ),
    "media's order": (
        {"mm_features": [picture("one", 2, 4), picture("other", 6, 4)]},
        {"mm_features": [picture("other", 2, 4), picture("one", 6, 4)]},
    ),
    "arguments for the processor": (
        {"mm_features": [identified()]},
        {"mm_features": [identified(hf_processor_mm_kwargs={"size": 1})]},
        {"mm_features": [identified(media_io_kwargs={"image": {"mode": "L"}})]},
    ),
    "adapters": (
        {},
        {"lora_request": adapter("one", "/one")},
        {"lora_request": adapter("other", "/one")},
        {"lora_request": adapter("one", "/one"), "cache_salt": "one"},
    ),
    "adapters of a name": (
        {"lora_request": adapter("one", "/one")},
        {"lora_request": adapter("one", "/other")},
    ),
    "adapters' versions": (
        {"lora_request": adapter(f"one@{DIGEST}", "/one")},
        {"lora_request": adapter(f"one@{DIGEST[::-1]}", "/one")},
    ),
    "embeddings": (
        {"tokens": None, "prompt_embeds": embeddings(1)},
        {"tokens": None, "prompt_embeds": embeddings(2)},
        {"tokens": [0] * len(TOKENS)},
    ),
    "embeddings among tokens": (
        {"prompt_embeds": embeddings(1), "prompt_is_token_ids": IS_TOKEN},
        {"prompt_embeds": embeddings(2), "prompt_is_token_ids": IS_TOKEN},
    ),
}


def key(it: Request) -> object:
    """The parts of a request in LMCache's keys, as the connector makes them; None for a request
    without keys.
    """
    if not cache_keys.has_key(it):
        return None
    return LMCacheMPRequestTracker(it).get_token_ids(), cache_keys.salt(it)


@pytest.mark.parametrize("difference", APART)
def test_what_vllms_hashes_tell_apart_the_tiers_keys_do(difference):
    init_none_hash(sha256)
    made = [request(**it) for it in APART[difference]]
    for one, other in itertools.combinations(made, 2):
        assert one.block_hashes[0] != other.block_hashes[0]
        assert key(one) is None or key(one) != key(other)


def test_an_adapters_version_has_the_same_key_on_every_server():
    """The paths of its files differ between servers."""
    ours = [request(lora_request=adapter(f"one@{DIGEST}", it, 1 + len(it))) for it in ("/a", "/bb")]
    assert key(ours[0]) == key(ours[1])


@pytest.mark.parametrize("more", [{"resumable": True}, {"mm_features": [picture("")]}])
def test_what_cannot_be_told_apart_has_no_key(more):
    assert key(request(**more)) is None


# Every field of a request in vLLM: whether KV depends on it, and how keys know it.
KNOWN = {
    Request.__init__: """
        self request_id client_index arrival_time priority trace_headers block_hasher session_id
        sampling_params pooling_params reasoning_ended reasoning_parser_kwargs abort_immediately
        kv_hints
        prompt_token_ids prompt_embeds prompt_is_token_ids mm_features lora_request cache_salt
        resumable
    """,
    EngineCoreRequest: """
        request_id client_index arrival_time priority trace_headers session_id external_req_id
        sampling_params pooling_params reasoning_ended reasoning_parser_kwargs abort_immediately
        kv_hints data_parallel_rank current_wave
        prompt_token_ids prompt_embeds prompt_is_token_ids mm_features lora_request cache_salt
        resumable
    """,
    StreamingUpdate: "mm_features prompt_token_ids max_tokens arrival_time sampling_params",
    MultiModalFeatureSpec: "data modality identifier mm_position mm_hash",
    PlaceholderRange: "offset length is_embed",
    LoRARequest: """
        lora_name lora_int_id lora_path base_model_name load_inplace is_3d_lora_weight
    """,
}


@pytest.mark.parametrize("kind", KNOWN, ids=lambda it: it.__qualname__)
def test_every_field_of_vllms_requests_is_known(kind):
    """For a new field: does KV depend on it? Then LMCache's key must know it, or `has_key` must be
    false.
    """
    if dataclasses.is_dataclass(kind):
        found = {it.name for it in dataclasses.fields(kind)}
    else:
        found = {*getattr(kind, "__struct_fields__", ())} or {*inspect.signature(kind).parameters}
    assert found == {*KNOWN[kind].split()}


def test_every_part_of_vllms_block_hash_is_known():
    made = {it for it in dir(kv_cache_utils) if it.startswith("_gen_")}
    assert made == {
        "_gen_mm_extra_hash_keys",
        "_gen_lora_extra_hash_keys",
        "_gen_prompt_embeds_extra_hash_keys",
    }
    source = inspect.getsource(kv_cache_utils.generate_block_hash_extra_keys)
    assert "lora_extra_keys + mm_extra_keys + cache_salt_keys + prompt_embeds_keys" in source


@pytest.fixture
def engine(server) -> Iterator[Engine]:
    found = Engine(server.port)
    yield found
    found.idle()
    assert not found.scheduler.connector._kept_out
    found.worker.shutdown()
    found.scheduler.shutdown()


def added(engine: Engine, **more: Any) -> str:
    name = uuid.uuid4().hex
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    tokens = more.pop("tokens", None)
    made = Request(name, tokens, sampling, None, block_hasher=engine._hasher, **more)
    engine.scheduler.add_request(made)
    return name


@pytest.mark.parametrize("mixed", [False, True])
def test_prompts_of_embeddings_are_neither_looked_up_nor_stored(engine, monkeypatch, mixed):
    asked: list[str] = []
    stored: list[str] = []
    adapter, compute = engine.scheduler.connector.scheduler_adapter, engine.compute
    look_up = adapter.maybe_submit_lookup_request

    def noting(name, *given, **named):
        asked.append(name)
        return look_up(name, *given, **named)

    def computing(scheduled):
        it = scheduled.kv_connector_metadata.requests
        stored.extend(transfer.request_id for transfer in it)
        compute(scheduled)

    monkeypatch.setattr(adapter, "maybe_submit_lookup_request", noting)
    monkeypatch.setattr(engine, "compute", computing)
    made = {"prompt_embeds": torch.zeros(PROMPT, 8)}
    if mixed:
        made |= {"tokens": [0] * PROMPT, "prompt_is_token_ids": [True] + [False] * (PROMPT - 1)}
    engine.answer(added(engine, **made), added(engine, **made))
    assert not asked
    assert not stored
    zeros = added(engine, tokens=[0] * PROMPT)  # the ids that vLLM has for embeddings
    engine.answer(zeros)
    assert {*asked} == {*stored} == {zeros}


@pytest.mark.parametrize(
    ("owner", "name", "patch"),
    [
        (KVConnectorBlockState, "get_block_ids", "real_blocks"),
        (LMCacheMPConnector, "_get_or_create_request_tracker", "cache_keys"),
        (LMCacheMPSchedulerAdapter, "cleanup_lookup_result", "tier_waits"),
    ],
)
def test_an_engine_whose_tiers_could_mix_up_prompts_does_not_start(
    server, monkeypatch, owner, name, patch
):
    monkeypatch.delattr(owner, name)
    with pytest.raises(Unfit, match=f"{patch} does not fit .*{owner.__name__}.{name}"):
        Engine(server.port)


def test_stores_that_are_made_later_are_refused(server):
    with pytest.raises(RuntimeError, match="lazy_offload"):
        Engine(server.port, connector={"lmcache.mp.lazy_offload": True})
