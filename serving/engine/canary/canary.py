# SPDX-License-Identifier: Apache-2.0
"""One in N requests that were answered with KV from the tiers is verified (OPTION_KV_TIERS_VERIFY).

The engine computes the request's first token twice more. The first time it uses the KV that it
loaded. The second time it uses a separate salt, so that it computes all KV. If the log
probabilities differ too often, the tiers are turned off. Each later request then carries a mark,
and the connector in the engine's process neither loads nor stores its KV. The request also gets
another salt, so that the engine's own cache does not return the KV that was loaded before.
"""

import asyncio
import logging
import secrets
from typing import Any

from prometheus_client import Counter, Gauge

from serving.engine.canary.comparison import WITHOUT_TIERS, Tally, Verification, differs

log = logging.getLogger(__name__)

CANDIDATES = 20
LIMIT_S = 60.0
"""For one verification; a busy engine may take longer, and then it is given up."""
LAST = 2**30  # of priorities

_VERIFIED = Counter(
    "slipway_kv_tiers_verified",
    "Hits of the KV cache tiers whose first token was computed again, by what came of it.",
    ["model", "tiers", "result"],
)
_OFF = Gauge(
    "slipway_kv_tiers_off", "1 once the KV cache tiers are used no more: their KV was wrong."
)


class Canary:
    """Verifies hits of the tiers, one at a time, and says when they are not to be used."""

    def __init__(self, client: Any, verification: Verification) -> None:
        """client: vLLM's AsyncLLM."""
        self._client, self._how = client, verification
        self.tally = Tally()
        self._afresh = secrets.token_hex(16)
        """Prefix of the requests' salts after the tiers are off."""
        self._hits = 0
        self._task: asyncio.Task[None] | None = None
        config = client.vllm_config
        self._candidates = _candidates(config.model_config)
        self._most = (
            config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size
        )
        self._priorities = config.scheduler_config.policy == "priority"
        self._model = str(config.model_config.architecture)
        _OFF.set(0)
        if not self._candidates:
            log.warning(
                "OPTION_KV_TIERS_VERIFY does nothing: it needs log probabilities (max_logprobs, "
                "logprobs_mode)"
            )

    def begin(self, request: Any) -> None:
        """Mark a request that is about to go to the engine if the tiers are off."""
        if not self.tally.off:
            return
        if (parameters := request.sampling_params) is not None:
            parameters.extra_args = _marked(parameters.extra_args)
        salt = request.cache_salt or ""
        if not salt.startswith(self._afresh):
            request.cache_salt = self._afresh + salt

    def hit(self, request: Any, busy: int) -> None:
        """A request was answered with KV of the tiers. busy: requests that the engine has now."""
        if self.tally.off or not self._candidates or not _is_verifiable(request):
            return
        self._hits += 1
        if self._hits % self._how.every:
            return
        if (self._task and not self._task.done()) or busy > self._most:
            self._count("skipped")
            return
        self._task = asyncio.get_running_loop().create_task(self._verify(request))

    async def stop(self) -> None:
        """Cancel the current verification."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _verify(self, request: Any) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                loaded, cached = await self._first_token(request, request.cache_salt)
                if not cached:  # it has been evicted since
                    self._count("skipped")
                    return
                computed, _ = await self._first_token(request, secrets.token_hex(16))
        except Exception as error:  # of an engine that ends, or is too busy
            self._count("skipped")
            log.info("KV of the tiers was not verified: %s", type(error).__name__)
            return
        self._judge(loaded, computed)

    def _judge(self, loaded: dict[int, float], computed: dict[int, float]) -> None:
        different = differs(loaded, computed, self._how.top, self._how.any)
        self._count("different" if different else "same")
        self.tally.add(different)
        if different:
            log.error(
                "KV from the tiers (%s) gives another first token than computed KV, with %s",
                self._how.tiers,
                self._model,
            )
        if self.tally.off:
            _OFF.set(1)
            log.error(
                "the KV cache tiers (%s) are used no more: their KV was wrong too often with %s; "
                "start without them, and report it",
                self._how.tiers,
                self._model,
            )

    def _count(self, result: str) -> None:
        _VERIFIED.labels(self._model, self._how.tiers, result).inc()

    async def _first_token(self, request: Any, salt: str | None) -> tuple[dict[int, float], int]:
        """The first token's candidates, and how many tokens of the prompt were cached."""
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        prompt = TokensPrompt(prompt_token_ids=request.prompt_token_ids)
        if salt:
            prompt["cache_salt"] = salt
        sampling = SamplingParams(
            max_tokens=1,
            temperature=0,
            logprobs=self._candidates,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=_marked(None),
        )
        found: dict[int, float] = {}
        cached = 0
        async for answer in self._client.generate(
            prompt,
            sampling,
            f"verify-{secrets.token_hex(8)}",
            lora_request=request.lora_request,
            priority=LAST if self._priorities else 0,
        ):
            cached = answer.num_cached_tokens or 0
            for places in answer.outputs[0].logprobs or ():
                found = {token: it.logprob for token, it in places.items()}
        return found, cached


def _marked(extra: dict[str, Any] | None) -> dict[str, Any]:
    """A request's arguments for extensions, with the mark."""
    extra = extra or {}
    return {
        **extra,
        "kv_transfer_params": {**(extra.get("kv_transfer_params") or {}), WITHOUT_TIERS: True},
    }


def _candidates(model: Any) -> int:
    """The number of candidates that vLLM reports; 0 if it reports no log probabilities."""
    if not model.logprobs_mode.endswith("_logprobs"):
        return 0
    return CANDIDATES if model.max_logprobs < 0 else min(CANDIDATES, model.max_logprobs)


def _is_verifiable(request: Any | None) -> bool:
    """Whether a request generates from tokens, without media: media may have left vLLM's cache
    since.
    """
    return (
        request is not None
        and request.sampling_params is not None
        and bool(request.prompt_token_ids)
        and request.prompt_embeds is None
        and not request.mm_features
        and not request.resumable
    )
