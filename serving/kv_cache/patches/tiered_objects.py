# SPDX-License-Identifier: Apache-2.0
"""Objects of tiered storage have a digest (serving/kv_cache/lmcache/tiered_storage.py)."""

from serving.patching.patch import CACHE_SERVER, Name, Patch

_ADAPTERS = "lmcache.v1.distributed.l2_adapters"
_CLIENT = f"{_ADAPTERS}.sagemaker_hyperpod_client:SageMakerHyperPodClient"
PATCH = Patch(
    name="tiered_objects",
    process=CACHE_SERVER,
    names=(
        Name(
            _CLIENT,
            has=(
                *("_put_stream_chunk_bytes", "_shared_memory_name", "acquire_lease", "put"),
                *("copy_from_lease", "normalize_url"),
            ),
        ),
        Name(f"{_CLIENT}._request", "self, method, url, kwargs"),
        Name(f"{_CLIENT}._object_url", "self, key"),
        Name(
            f"{_ADAPTERS}.sagemaker_hyperpod_client:SageMakerHyperPodLease",
            has=("lease_id", "offsets", "expires_monotonic", "size", "is_expired"),
        ),
        Name(
            f"{_ADAPTERS}.sagemaker_hyperpod_l2_adapter:SageMakerHyperPodL2Adapter._create_client",
            "self, config",
        ),
    ),
    does="Adds a digest of key and content to each object, and compares it after each read.",
    why="LMCache's client trusts the daemon's address of an object, and the bytes that it reads "
    "there.",
    without="prompts could be answered from another object that is at that address by then",
    closed=True,
)
