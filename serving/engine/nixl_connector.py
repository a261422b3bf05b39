# SPDX-License-Identifier: Apache-2.0
"""In the engine core's process and in its workers': vLLM's NixlConnector, restricted to KV of the
request's own prompt.

vLLM (0.32) fetches the blocks of a prompt that another engine has computed by their numbers. It
does not check that the other engine has made the same tokens of the request, with the same adapter.
At the first fetch, it does not check either that the blocks still belong to the prompt. An engine
keeps them for `kv_lease_duration` after its answer, and for as long as the fetching engine reports
that it waits.
"""

import hashlib
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.logger import init_logger

from serving.engine.base import COMPUTED_FOR, RECEIVED
from serving.engine.patches.engine_core import registry

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = init_logger(__name__)


class NixlConnector(NixlPullConnector):  # type: ignore[misc]  # its modules are not type-checked
    """vLLM's connector, under the name that vLLM checks for. Raises Unfit if KV could be another
    prompt's.
    """

    def __init__(self, *rest: Any, **more: Any) -> None:
        registry.apply_transfer()
        super().__init__(*rest, **more)

    def on_new_request(self, request: "Request") -> None:
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill") and not self._may_fetch(request, params):
            params["do_remote_prefill"] = False  # the other one's lease ends by itself
        super().on_new_request(request)

    def _may_fetch(self, request: "Request", params: dict[str, Any]) -> bool:
        assert self.connector_scheduler
        lease: int = self.connector_scheduler._kv_lease_duration
        waited = monotonic() - params.get(RECEIVED, 0.0)
        if waited > lease / 2:
            log.info("a prompt is computed here: its KV waited for %.0f s to be fetched", waited)
            return False
        tokens = request.num_prompt_tokens
        computed = self.connector_scheduler._get_remote_prefill_token_count(tokens)
        digest = prompt_digest(request, computed)
        if not digest or params.get(COMPUTED_FOR) != digest:
            log.warning("a prompt is computed here: the other server has computed another one")
            return False
        return True

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return _marked(request, super().request_finished(request, block_ids))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return _marked(request, super().request_finished_all_groups(request, block_ids))


def _marked(
    request: "Request", finished: tuple[bool, dict[str, Any] | None]
) -> tuple[bool, dict[str, Any] | None]:
    """Add the prompt's digest to the parameters that lead to the request's KV."""
    kept, params = finished
    if params:
        params[COMPUTED_FOR] = prompt_digest(request, request.num_prompt_tokens)
    return kept, params


def prompt_digest(request: "Request", count: int) -> str | None:
    """A digest of all that the KV of the prompt's first tokens depends on. None if the tokens are
    not known.
    """
    if request.prompt_token_ids is None:
        return None
    adapter = request.lora_request.lora_name if request.lora_request else None
    media = [it.identifier for it in request.mm_features or ()]
    parts = msgspec.json.encode((adapter, request.cache_salt, media))
    tokens = ",".join(map(str, request.prompt_token_ids[:count])).encode()
    return hashlib.sha256(parts + b"\n" + tokens).hexdigest()
