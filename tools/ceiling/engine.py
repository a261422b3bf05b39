# SPDX-License-Identifier: Apache-2.0
"""In the engine core's process: an executor for vLLM that runs no model.

vLLM's engine core, its scheduler and its sockets stay unchanged. Instead of running the model, the
executor returns the token after the last one, or the next one that the request allows. It returns
an answer's first token at once, and one further token after each step, to all sequences together.
Embeddings come at once. vLLM takes the class by its path, as `distributed_executor_backend`.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

FIRST, LAST = 300, 3300
"""Tokens of the tiny model that are texts, without the special ones and single bytes."""
ANY = range(FIRST, LAST)
LOGPROB = -1.25
VECTOR = torch.linspace(-1, 1, 64)
"""Each text's embedding."""
ROOM = 4 * 2**30
"""Bytes of KV cache that the scheduler believes in. Nothing is allocated."""


class NoModel(Executor):  # type: ignore[misc]  # vLLM is not type-checked
    """Answers each request with tokens that need no computing."""

    step_ms = 20.0

    def _init_executor(self) -> None:
        self._due = 0.0
        self._pools = self.model_config.runner_type == "pooling"
        self._asked: dict[str, tuple[int, int | None, Sequence[int]]] = {}
        """Request → tokens of its prompt, the log probabilities that it wants for each, and the
        tokens that it gets in turn.
        """
        block = self.cache_config.block_size or 16
        spec = FullAttentionSpec(
            block_size=block, num_kv_heads=1, head_size=16, dtype=torch.float32
        )
        self._answers: dict[str, Any] = {
            "get_kv_cache_spec": {"layer": spec},
            "get_supported_kv_cache_layouts": ["LBNHC"],
            "determine_available_memory": ROOM,
            "compile_or_warm_up_model": CompilationTimes(0.0, 0.0),
            "get_supported_tasks": ("embed",) if self._pools else ("generate",),
        }

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> list[Any]:
        return [self._answers.get(method)]

    def check_health(self) -> None:
        """It cannot fail."""

    def execute_model(self, scheduled: SchedulerOutput, non_block: bool = False) -> Any:
        if not (scheduled.scheduled_new_reqs or self._pools):
            time.sleep(max(self._due - time.monotonic(), 0))
            step = self.step_ms / 1000
            self._due = max(self._due, time.monotonic() - step) + step
        output = self._next_tokens(scheduled)
        if not non_block:
            return output
        done: Future[ModelRunnerOutput] = Future()
        done.set_result(output)
        return done

    def _next_tokens(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        for name in scheduled.finished_req_ids:
            self._asked.pop(name, None)
        computed = {}
        for new in scheduled.scheduled_new_reqs:
            params = new.sampling_params
            turn = (params and params.allowed_token_ids) or ANY
            self._asked[new.req_id] = new.prompt_len, params and params.num_logprobs, turn
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        names = list(scheduled.num_scheduled_tokens)
        tokens = []
        for name in names:
            # of its text, after this step
            reached = computed[name] + scheduled.num_scheduled_tokens[name]
            prompt, _, turn = self._asked[name]
            begun = reached - prompt
            tokens.append([turn[begun % len(turn)]] if begun >= 0 else [])
        places = {name: index for index, name in enumerate(names)}
        if self._pools:
            vectors = [VECTOR if token else None for token in tokens]
            return ModelRunnerOutput(names, places, pooler_output=vectors)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index=places,
            sampled_token_ids=tokens,
            logprobs=self._logprobs(names, tokens),
        )

    def _logprobs(self, names: list[str], tokens: list[list[int]]) -> LogprobsLists | None:
        """The chosen token's, and as many others' as the request that wants most of them."""
        wanted = [self._asked[name][1] for name in names]
        most = max((count for count in wanted if count is not None), default=None)
        if most is None:
            return None
        first = np.array([(token or [FIRST])[0] for token in tokens])
        others = np.arange(most + 1)
        return LogprobsLists(
            (first[:, None] + others) % LAST,
            LOGPROB - np.broadcast_to(others, (len(names), most + 1)).astype(np.float32),
            np.ones(len(names), np.int64),
        )


class QuickNoModel(NoModel):
    """The same for those who want its answers, and not its pace."""

    step_ms = 3.0
