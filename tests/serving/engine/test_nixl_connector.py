# SPDX-License-Identifier: Apache-2.0
"""Our NixlConnector in vLLM's own scheduler: the blocks that one engine keeps, and another fetches.
No byte moves here; tests/e2e/test_nixl.py has real engines.
"""

import time
import uuid

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from lmi_config.options.declared import Settings
from lmi_config.plan import kv_tiers
from serving.engine.base import RECEIVED
from serving.engine.nixl_connector import NixlConnector
from serving.server.prepare import PARTS
from tests.support.models import tiny

BLOCK, BLOCKS = 128, 64
PROMPT = range(1000)
CONFIG = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


class Engine:
    """vLLM's scheduler, run step by step."""

    def __init__(self) -> None:
        ours = Settings(kv_transfer_config=CONFIG)
        config = EngineArgs(
            model=str(tiny.make()),
            block_size=BLOCK,
            max_model_len=4096,
            max_num_batched_tokens=4096,
            enable_prefix_caching=True,
            kv_transfer_config=kv_tiers.transferring(ours, PARTS.transferring),
        ).create_engine_config()
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32
        )
        kv_config = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        config.cache_config.num_gpu_blocks = BLOCKS
        self.scheduler = Scheduler(
            config, kv_config, StructuredOutputManager(config), block_size=BLOCK, log_stats=True
        )
        assert isinstance(self.scheduler.connector, NixlConnector)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    def ask(self, params, prompt=PROMPT, salt=None, adapter=None):
        """A step with a new request. Returns its name, and the blocks that it loads from another
        engine.
        """
        name = uuid.uuid4().hex
        extra = {"kv_transfer_params": params}
        sampling = SamplingParams(max_tokens=1, ignore_eos=True, extra_args=extra)
        lora = LoRARequest(adapter, 1, "/there") if adapter else None
        self.scheduler.add_request(
            Request(
                *(name, [*prompt], sampling, None),
                cache_salt=salt,
                lora_request=lora,
                block_hasher=self._hasher,
            )
        )
        return name, self.scheduler.schedule()

    def computed(self, **prompt):
        """The transfer parameters of a prompt that it has computed."""
        name, scheduled = self.ask({"do_remote_decode": True}, **prompt)
        output = ModelRunnerOutput([name], {name: 0}, [[7]])
        (of_clients,) = self.scheduler.update_from_output(scheduled, output).values()
        (answer,) = of_clients.outputs
        return {**answer.kv_transfer_params, RECEIVED: time.monotonic()}

    def fetches(self, params, **prompt) -> bool:
        """Whether it fetches a prompt instead of computing it."""
        name, scheduled = self.ask(params, **prompt)
        fetched = name in scheduled.kv_connector_metadata.reqs_to_recv
        assert fetched != (name in scheduled.num_scheduled_tokens)
        return fetched


@pytest.fixture
def prefills():
    return Engine()


@pytest.fixture
def decodes():
    return Engine()


SAME = {"salt": "tenant", "adapter": "one@ab12"}


def test_a_prompt_that_another_engine_has_computed_is_fetched(prefills, decodes):
    assert decodes.fetches(prefills.computed())
    assert decodes.fetches(prefills.computed(**SAME), **SAME)


@pytest.mark.parametrize(
    "other",
    [
        {**SAME, "prompt": [1, *range(1, 1000)]},
        {**SAME, "salt": "another"},
        {**SAME, "salt": None},
        {**SAME, "adapter": "one@cd34"},
        {**SAME, "adapter": None},
    ],
)
def test_another_prompt_is_not(prefills, decodes, other):
    assert not decodes.fetches(prefills.computed(**SAME), **other)


def test_kv_that_may_be_gone_is_not_fetched(prefills, decodes):
    params = prefills.computed()
    lease = decodes.scheduler.connector.connector_scheduler._kv_lease_duration
    assert not decodes.fetches({**params, RECEIVED: time.monotonic() - lease / 2 - 1})
    params.pop(RECEIVED)
    assert not decodes.fetches(params)


def test_one_that_is_computed_here_leads_nowhere(decodes):
    name, scheduled = decodes.ask(None)
    output = ModelRunnerOutput([name], {name: 0}, [[7]])
    (of_clients,) = decodes.scheduler.update_from_output(scheduled, output).values()
    assert of_clients.outputs[0].kv_transfer_params is None
