# SPDX-License-Identifier: Apache-2.0
"""In the server's process: the engine's outputs are delivered to the calls that they belong to.

What: vLLM's OutputProcessor and its objects for each request. Subclasses replace them at the start.
Why: no public interface reports the tokens of a request that is broken off, checks the salt of a
prompt for the engine, or delivers a token without an output object.
Upstream: vllm/v1/engine/output_processor.py, vllm/v1/engine/logprobs.py, vllm/v1/metrics/stats.py.
Without it: tokens would not be counted and salts would not be checked, so the engine is not started
(accounting.py). If only the names needed for speed are missing (is_quick()), vLLM makes an output
object for every token.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from vllm.v1.engine import output_processor
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.metrics.stats import LoRARequestStates

from serving.engine.patches.outputs import accounting


class InFlight(Protocol):
    """A call, as the processor knows it."""

    def check(self, request: Any) -> None:
        """Raise an exception for a request that may not go to the engine."""

    def begin(self, state: Any, request: Any) -> None:
        """Take vLLM's state of a request that goes to the engine for the call."""


class Canary(Protocol):
    """Verifies hits of the KV cache tiers."""

    def begin(self, request: Any) -> None: ...

    def hit(self, request: Any, unfinished: int) -> None: ...


@functools.cache
def is_quick() -> bool:
    """Whether a token can be handed out without an output object."""
    return accounting.QUICK.applies() is None


def install(client: Any, calls: Mapping[str, InFlight]) -> None:
    """Give a client of vLLM, which has not had a request yet, this processor.

    calls: the calls in flight, by the engine's names of their requests.
    """
    if is_quick():
        output_processor.RequestState = State
    theirs = client.output_processor
    client.output_processor = Processor(
        calls,
        client.renderer.tokenizer,
        log_stats=theirs.log_stats,
        stream_interval=theirs.stream_interval,
        tracing_enabled=theirs.tracing_enabled,
        admission_stats=theirs.admission_stats,
    )


class Processor(OutputProcessor):  # type: ignore[misc]  # vLLM is not type-checked
    """vLLM's processor, which reports each request's outputs to its call."""

    canary: Canary | None = None

    def __init__(self, calls: Mapping[str, InFlight], *rest: Any, **more: Any) -> None:
        super().__init__(*rest, **more)
        self._calls = calls
        self._texts = Texts(self.tokenizer) if self.tokenizer and is_quick() else None
        self.lora_states = PublicNames(self.log_stats)

    def add_request(self, request: Any, *rest: Any, **more: Any) -> None:
        call = self._calls.get(request.external_req_id)
        if call:
            call.check(request)
        super().add_request(request, *rest, **more)
        state = self.request_states[request.request_id]
        if self._texts and state.logprobs_processor and state.logprobs_processor.tokenizer:
            state.logprobs_processor.tokenizer = self._texts
        if self.canary:
            self.canary.begin(request)
            state.asked = request
        if call:
            call.begin(state, request)

    def process_outputs(self, engine_core_outputs: Any, *rest: Any, **more: Any) -> Any:
        if self.canary:
            for it in engine_core_outputs:
                if it.prefill_stats and it.prefill_stats.num_external_cached_tokens:
                    state = self.request_states.get(it.request_id)
                    self.canary.hit(getattr(state, "asked", None), len(self.request_states))
        return super().process_outputs(engine_core_outputs, *rest, **more)


class PublicNames(LoRARequestStates):  # type: ignore[misc]  # vLLM is not type-checked
    """Has vllm:lora_requests_info name adapters as requests do: gateways route by it (the model
    server protocol of Kubernetes' inference extension).
    """

    def update_scheduler_stats(self, stats: Any) -> None:
        super().update_scheduler_stats(stats)
        if stats is not None:
            stats.waiting_lora_adapters = _public(stats.waiting_lora_adapters)
            stats.running_lora_adapters = _public(stats.running_lora_adapters)


def _public(counts: Mapping[str, int]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for inner, count in counts.items():
        found[inner.rpartition("@")[0] or inner] += count
    return dict(found)


class State(RequestState):  # type: ignore[misc]  # vLLM is not type-checked
    """vLLM's state of a request. It makes no output object for a token that its stream writes at
    once: making one takes half of vLLM's time to read a token.

    stream: the request's stream that writes tokens at once (streams.Stream), or None. asked: the
    request, while hits are verified.
    """

    stream: Any = None
    asked: Any = None

    def make_request_output(
        self,
        new_token_ids: list[int],
        pooling_output: Any,
        finish_reason: Any,
        *rest: Any,
        **more: Any,
    ) -> Any:
        stream = self.stream
        if not (stream and stream.waits and finish_reason is None and stream.takes()):
            result = super().make_request_output(
                new_token_ids, pooling_output, finish_reason, *rest, **more
            )
            if stream and result:
                stream.waits = False
            return result
        try:
            text = self.detokenizer.get_next_output_text(False, True)
            logprobs = self.logprobs_processor.logprobs
            if logprobs:
                logprobs = logprobs[len(logprobs) - len(new_token_ids) :]
            stream.write(text, new_token_ids, logprobs)
        except Exception as error:  # it would end the reading of all outputs
            stream.waits = False
            self.queue.put(error)
        return None


REMEMBERED = 2**14
"""Tokens whose texts are remembered."""


class Texts:
    """A tokenizer that remembers the texts of single tokens. vLLM looks one up for each log
    probability.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._text: Callable[[int], str]
        self._text = functools.lru_cache(REMEMBERED)(lambda token: tokenizer.decode([token]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, token_ids: Any, *rest: Any, **more: Any) -> str:
        if len(token_ids) == 1 and not (rest or more):
            return self._text(token_ids[0])
        return self._tokenizer.decode(token_ids, *rest, **more)  # type: ignore[no-any-return]


class ChosenLogprobs(LogprobsProcessor):  # type: ignore[misc]  # vLLM is not type-checked
    """Keeps only each chosen token's log probability, as a number. vLLM makes objects of all values
    from the engine, and a text for each.
    """

    @classmethod
    def of(cls, request: Any) -> "ChosenLogprobs":
        found: ChosenLogprobs = cls.from_new_request(tokenizer=None, request=request)
        found.logprobs = []
        return found

    def _update_sample_logprobs(self, logprobs_lists: Any) -> None:
        self.logprobs += logprobs_lists.logprobs[:, 0].tolist()
