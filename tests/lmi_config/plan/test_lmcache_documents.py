# SPDX-License-Identifier: Apache-2.0
"""The configurations in LMCache's documentation: each is translated, or refused by name.

Their shapes come from docs/source/ of LMCache/LMCache (Apache-2.0), and from LMI's guide
(deepjavalibrary/djl-serving at d21927c4, serving/docs/lmi, Apache-2.0). LMI's files for its tests
are in test_lmcache.py. LMCache's pages are not those of one tag: each is the newest that was found
in 2026. LMCache 0.5.6 itself declares every option in them (lmcache/v1/config.py) except eic_*,
weka_path, cufile_buffer_size and pipelined_backend.
"""

import pytest
import yaml

from lmi_config.options.settings import SettingsError
from lmi_config.plan.lmcache import translate

RUNS = ""
STORES = "remote_url: redis://host"
NAIVE = "remote_serde: naive\nlocal_cpu: False\nsave_unfull_chunk: False\n"
CONTROLLER = (
    "enable_controller: True\nlmcache_instance_id: one\ncontroller_pull_url: localhost:8300\n"
    "controller_reply_url: localhost:8400\nlmcache_worker_ports: 8500\n"
)
VALKEY = "remote_serde: naive\nextra_config: {valkey_username: me, valkey_password: you"

DOCUMENTS = [
    ("cpu_ram", "chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 5.0", RUNS),
    ("cpu_ram, huge pages", "local_cpu_use_hugepages: true", RUNS),
    (
        "local_storage",
        "local_disk: file:///local/disk/\nmax_local_disk_size: 5.0\n"
        "extra_config: {'use_odirect': True}",
        RUNS,
    ),
    (
        "local_storage, disk only",
        "local_cpu: false\nmax_local_cpu_size: 5.0\nlocal_disk: file:///local/disk/\n"
        "max_local_disk_size: 5.0",
        RUNS,
    ),
    ("redis", "remote_url: redis://your-redis-host:6379\nremote_serde: naive", RUNS),
    ("redis, sentinels", "remote_url: redis-sentinel://a:26379,b:26380", STORES),
    ("redis, LMCache's server", "remote_url: lm://localhost:65432", STORES),
    ("resp", "chunk_size: 16\nremote_url: redis://localhost:6379\nremote_serde: naive", RUNS),
    ("valkey", f"remote_url: valkey://host:6379\n{VALKEY}}}", RUNS),
    ("valkey, database", f"remote_url: valkey://host:6379\n{VALKEY}, valkey_database: 0}}", RUNS),
    ("valkey, cluster", f"remote_url: valkey://host:6379\n{VALKEY}, valkey_mode: cluster}}", RUNS),
    ("valkey, nodes", f"remote_url: 'valkey://a:1, b:2'\n{VALKEY}, valkey_mode: cluster}}", RUNS),
    (
        "s3",
        f"{NAIVE}remote_url: s3://bucket\nblocking_timeout_secs: 100\nextra_config: "
        "{s3_region: us-east-1, s3_max_io_concurrency: 64, s3_max_inflight_reqs: 64}",
        RUNS,
    ),
    (
        "s3, express",
        f"{NAIVE}remote_url: s3://kvs.s3express-use1-az4.us-east-1.amazonaws.com\nextra_config: "
        "{s3_prefer_http2: True, s3_region: us-east-1, s3_enable_s3express: True, "
        "s3_file_prefix: p}",
        RUNS,
    ),
    (
        "s3, CoreWeave",
        f"{NAIVE}max_local_cpu_size: 50\nenable_async_loading: True\n"
        "remote_url: s3://kv-cache.cwlota.com\nextra_config: {s3_prefer_http2: False, "
        "s3_region: US-WEST-04A, s3_enable_s3express: False, save_chunk_meta: False}",
        RUNS,
    ),
    (
        "fs, plugin",
        "local_cpu: false\nmax_local_cpu_size: 1\nremote_storage_plugins: ['fs']\nextra_config: "
        "{remote_storage_plugin.fs.base_path: /tmp/kv, save_chunk_meta: false}",
        RUNS,
    ),
    (
        "fs, plugin with options",
        "remote_storage_plugins: ['fs']\nextra_config: {remote_storage_plugin.fs.base_path: /kv, "
        "fs_connector_relative_tmp_dir: .tmp, fs_connector_read_ahead_size: 1048576, "
        "fs_connector_use_odirect: true}",
        RUNS,
    ),
    (
        "fs, several",
        "remote_storage_plugins: ['fs.primary', 'fs.backup']\nextra_config: "
        "{remote_storage_plugin.fs.primary.base_path: /a}",
        "remote_storage_plugins: plugins are not loaded",
    ),
    ("fs, legacy", f"{NAIVE}remote_url: fs://localhost:0/tmp/kv", RUNS),
    (
        "sagemaker_hyperpod",
        "local_cpu: True\nmax_local_cpu_size: 5\nremote_url: sagemaker-hyperpod://$NODE_IP:9200",
        RUNS,
    ),
    (
        "mooncake",
        f"{NAIVE}remote_url: mooncakestore://127.0.0.1:50051/\nextra_config: {{protocol: tcp}}",
        STORES,
    ),
    ("infinistore", f"{NAIVE}remote_url: infinistore://127.0.0.1:12345/?device=mlx5_1", STORES),
    ("azure", f"{NAIVE}remote_url: azure://my-container", STORES),
    ("eic", "remote_url: eic://endpoint\neic_instance_id: a\neic_flag_file: b", STORES),
    ("gds", "local_cpu: false\ngds_path: /mnt/gds\ngds_buffer_size: 8192", "gds_path: GPUDirect"),
    (
        "nixl",
        "nixl_buffer_size: 1073741824\nnixl_buffer_device: cpu\nextra_config: "
        "{enable_nixl_storage: true, nixl_backend: POSIX, nixl_path: /mnt/nixl}",
        "extra_config.enable_nixl_storage: NIXL is not used; give a folder as local_disk",
    ),
    ("maru", "maru_path: maru://localhost:5555\nmaru_pool_size: 4", "maru_path: CXL memory"),
    (
        "weka",
        "local_cpu: false\nweka_path: /mnt/weka\ncufile_buffer_size: 8192\n"
        "extra_config: {gds_io_threads: 32}",
        "weka_path: LMCache does not know it, and its value names a place",
    ),
    (
        "external_backend",
        "chunk_size: 64\nlocal_cpu: False\nexternal_backends: mine\n"
        "extra_config: {external_backend.mine.module_path: a}",
        "external_backends: plugins are not loaded",
    ),
    *((f"caching_policies, {it}", f"cache_policy: {it}", RUNS) for it in ("LRU", "LFU", "FIFO")),
    ("caching_policies, MRU", "cache_policy: mru", RUNS),
    ("performance_tuning", "local_cpu: true\nmin_retrieve_tokens: 1024", RUNS),
    ("bounded_retrieval", "extra_config: {save_only_first_rank: true}", RUNS),
    (
        "kv_cache_events",
        "enable_kv_events: true\npre_caching_hash_algorithm: sha256_cbor_64bit",
        RUNS,
    ),
    (
        "chunk_statistics",
        "internal_api_server_enabled: True\ninternal_api_server_port_start: 6999\n"
        "enable_chunk_statistics: true\nchunk_statistics_strategy: memory_bloom_filter\n"
        "extra_config: {chunk_statistics_mem_bf_expected_chunks: 20000000}",
        RUNS,
    ),
    ("the controller of HyperPod's operator", CONTROLLER, RUNS),
    (
        "p2p_sharing",
        f"{CONTROLLER}enable_p2p: True\np2p_host: localhost\np2p_init_ports: 8200\n"
        "transfer_channel: nixl",
        "enable_p2p: engines share KV through OPTION_KV_L2_URL, not with one another",
    ),
    (
        "share_kv_cache",
        "remote_url: lm://localhost:65432\nremote_serde: cachegen\npipelined_backend: false",
        STORES,
    ),
    (
        "disaggregated_prefill",
        "local_cpu: False\nenable_pd: True\ntransfer_channel: nixl\npd_role: sender\n"
        "pd_proxy_host: localhost\npd_buffer_size: 1073741824\nnixl_buffer_device: cuda",
        "enable_pd: prefill and decoding are split by OPTION_SERVER_ROLE; switch it off",
    ),
    (
        "blending",
        "local_cpu: True\nenable_blending: True\nblend_recompute_ratios: 0.15\nuse_layerwise: True",
        "enable_blending: KV is reused for equal beginnings only; switch it off",
    ),
    ("cachegen", "remote_url: redis://host:6379\nremote_serde: cachegen", RUNS),
    ("configurations, NUMA", "numa_mode: auto", RUNS),
    (
        "configurations, lazy memory",
        "enable_lazy_memory_allocator: true\nlazy_memory_initial_ratio: 0.2\n"
        "reserve_local_cpu_size: 1.0",
        RUNS,
    ),
    (
        "configurations, histograms",
        "extra_config: {histogram_bucket_time_to_retrieve: [0.01, 0.05]}",
        RUNS,
    ),
    ("LMI's guide, CPU", "chunk_size: 256\nlocal_device: cpu\nremote_url: null", RUNS),
    (
        "LMI's guide, disk",
        "chunk_size: 256\nlocal_device: cpu\nremote_url: file:///tmp/lmcache",
        RUNS,
    ),
    (
        "LMI's performance page",
        "chunk_size: 256\nlocal_disk: file://tmp/lmcache/\nmax_local_disk_size: 5.0\n"
        "extra_config: {'use_odirect': True}\nmax_local_cpu_size: 5.0",
        RUNS,
    ),
]


@pytest.mark.parametrize(
    ("text", "fault"), [row[1:] for row in DOCUMENTS], ids=[row[0] for row in DOCUMENTS]
)
def test_a_documents_configuration_is_translated_or_refused_by_name(text, fault):
    config = yaml.safe_load(text)
    if fault == RUNS:
        found = translate(config, {"NODE_IP": "10.0.0.7"})
        _nothing_is_lost(config, found)
        return
    with pytest.raises(SettingsError) as refused:
        translate(config, {})
    (told,) = refused.value.faults
    assert told.startswith("remote_url: should be" if fault == STORES else fault)


TRANSLATED = {
    *("chunk_size", "local_cpu", "max_local_cpu_size", "local_disk", "max_local_disk_size"),
    *("remote_url", "cache_policy", "remote_storage_plugins"),
}


def _nothing_is_lost(config, found):
    """Each option is translated, or there is a note on it."""
    noted = {note.split(":")[0].split("=")[0] for note in found.ignored}
    extra = config.pop("extra_config", {})
    assert config.keys() - TRANSLATED - {k for k, v in config.items() if v is None} <= noted
    for key, value in extra.items():
        used = found.remote and (
            key.startswith(("valkey_", "s3_", "fs_connector_", "remote_storage_plugin."))
        )
        assert used or f"extra_config.{key}" in noted or (found.disk and key == "use_odirect"), (
            key,
            value,
        )
