# SPDX-License-Identifier: Apache-2.0
"""vLLM's NixlConnector fetches no other prompt's KV (serving/engine/nixl_connector.py)."""

from serving.patching.patch import ENGINE, Name, Patch

_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
PATCH = Patch(
    name="kv_fetches",
    process=ENGINE,
    names=(
        Name(f"{_NIXL}.connector:NixlPullConnector"),
        Name(f"{_NIXL}.connector:NixlBaseConnector", has=("connector_scheduler",)),
        Name(f"{_NIXL}.base_scheduler:NixlBaseConnectorScheduler", has=("_kv_lease_duration",)),
        Name(
            f"{_NIXL}.base_scheduler:NixlBaseConnectorScheduler._get_remote_prefill_token_count",
            "self, num_prompt_tokens",
        ),
        Name(
            "vllm.v1.request:Request",
            has=(
                *("kv_transfer_params", "prompt_token_ids", "num_prompt_tokens", "lora_request"),
                *("cache_salt", "mm_features"),
            ),
        ),
    ),
    does="Before a request's KV is fetched from another engine, compares that engine's prompt, "
    "adapter and salt with the request's, and checks how long the engine still keeps the KV.",
    why="vLLM fetches blocks by their numbers, and checks neither.",
    without="a prompt could be answered from another tenant's KV",
    closed=True,
)
