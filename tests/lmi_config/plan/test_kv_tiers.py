# SPDX-License-Identifier: Apache-2.0
"""Sizes of the KV cache tiers: which fit, which are left out, and which contradict each other."""

import contextlib
import dataclasses
import json
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lmi_config.facts.kv import KvShape
from lmi_config.options.settings import SettingsError, read
from lmi_config.plan import explain, kv_tiers, lmcache, plan
from lmi_config.plan.kv_tiers import NoTiers, Tiers
from tests.lmi_config.examples import DISK, GIB, H100, PARTS, machine, model

AUTO = {"OPTION_LMCACHE_AUTO_CONFIG": "true"}
ROLE = {"OPTION_SERVER_ROLE": "prefill", "OPTION_ROUTER_SECRET": "secret" * 8}


def planned(environ=AUTO, here=None, facts=None, file=None, to_fetch=0):
    return plan.make(
        read(environ), here or machine(), facts or model(2), None, environ, PARTS, file, to_fetch
    )


def disk(free, total=None, **more):
    size = round(free * GIB)
    return dataclasses.replace(DISK, free=size, total=round((total or free) * GIB), **more)


# The reference's own examples, in GiB: memory or disk, model, tensor parallel degree. It keeps
# max(2 * model, 20 %) free, of all memory and all the disk, and divides the rest by the ranks: 2 x
# 40, 4 x 25, 2 x 200 and 4 x 175. We count the needed memory, in one pool for all ranks.
@pytest.mark.parametrize(
    ("memory", "weights", "ranks", "l1"), [(100, 10, 2, 76.25), (200, 50, 4, 114.75)]
)
def test_l1_where_the_reference_has_an_example(memory, weights, ranks, l1):
    here = machine(gpus=ranks, memory=memory * GIB)
    assert planned(here=here, facts=model(weights)).tiers.l1 / GIB == l1


@pytest.mark.parametrize(
    ("free", "weights", "ranks", "size"), [(500, 20, 2, 448), (1000, 150, 4, 898)]
)
def test_disk_where_the_reference_has_an_example(free, weights, ranks, size):
    here = machine(gpus=ranks, memory=1000 * GIB, disk=disk(free))
    assert planned(here=here, facts=model(weights)).tiers.disk.size / GIB == size


def test_free_disk_counts_and_not_all_of_it():
    assert planned(here=machine(disk=disk(300, 1000))).tiers.disk.size == 198 * GIB


def test_models_that_are_still_to_come_are_left_their_room():
    here = machine(disk=disk(300, 1000))
    assert planned(here=here, to_fetch=100 * GIB).tiers.disk.size == 98 * GIB


@pytest.mark.parametrize(
    ("here", "facts", "reason"),
    [
        (machine(memory=GIB // 2), None, "0 MiB are left of 0.5 GiB free memory"),
        (machine(memory=8 * GIB), None, "less than 1.2 GiB would not help"),
    ],
)
def test_l1_is_left_out_where_it_would_not_help(here, facts, reason):
    found = planned(here=here, facts=facts)
    assert isinstance(found.tiers, NoTiers)
    assert found.cache_server is None
    assert reason in found.tiers.reason
    assert f"no KV cache tiers: {found.tiers.reason}" in found.findings
    assert explain.as_json(found)["tiers"] is None
    assert reason in next(line for line in explain.as_text(found).splitlines() if "tiers" in line)
    assert "kv_transfer_config" not in found.engine("m", None)


def test_the_engines_own_cache_comes_before_the_tiers():
    found = planned(here=machine(memory=3 * GIB), facts=model(0.25))
    assert found.memory.kv == 3 * GIB // 16
    assert "cache server" not in [share.name for share in found.memory.shares]


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (disk(0, 100), "left out: 0 MiB are free on /tmp/lmcache, of which 12.0 GiB are kept"),
        (disk(12.5, 100), "left out: 12.5 GiB are free"),
        (disk(50, kind="tmpfs"), "left out: /tmp/lmcache is a tmpfs, which is memory"),
    ],
)
def test_the_disk_is_left_out_where_there_is_none(found, reason):
    tiers = planned(here=machine(disk=found)).tiers
    assert tiers.l1 > 0
    assert tiers.disk is None
    assert reason in tiers.reasons["disk"]


@pytest.mark.parametrize("size", [0, 30 * GIB])
def test_the_disk_tier_can_be_told_its_size(size):
    found = planned({**AUTO, "OPTION_KV_DISK_SIZE": f"{size}"})
    assert (found.tiers.disk.size if found.tiers.disk else 0) == size


@pytest.mark.parametrize("direct", [True, False])
def test_o_direct_is_used_where_it_works(direct):
    found = planned(here=machine(disk=disk(100, direct=direct)))
    assert found.tiers.disk.direct is direct
    assert f'"direct":{str(direct).lower()}' in found.cache_server[-1]


@pytest.mark.parametrize(
    ("environ", "gpus", "chunk"),
    [
        ({}, 0, 128),
        ({}, 1, 256),
        ({"OPTION_BLOCK_SIZE": "96"}, 0, 192),
        ({"OPTION_BLOCK_SIZE": "32"}, 0, 128),
        ({"OPTION_BLOCK_SIZE": "512"}, 1, 512),
    ],
)
def test_a_chunk_is_a_multiple_of_the_engines_block(environ, gpus, chunk):
    assert planned({**AUTO, **environ}, machine(gpus=gpus)).tiers.chunk_size == chunk


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({}, 0),
        ({"OPTION_KV_EVENTS": "true"}, kv_tiers.EVENTS),
        ({"OPTION_KV_EVENTS_CONFIG": '{"enable_kv_cache_events":true}'}, kv_tiers.EVENTS),
    ],
)
def test_the_cache_server_keeps_events_if_somebody_follows_them(environ, size):
    """An event has the tokens of a chunk: LMCache's 32,768 take 300 MiB that no plan counts."""
    found = planned({**AUTO, **environ}, machine(gpus=1)).cache_server
    assert f"--kv-event-log-size={size}" in found


def test_the_cache_servers_command_line():
    found = planned({**AUTO, "OPTION_KV_L2_URL": "redis://:hush@cache"}, machine(gpus=1))
    assert list(found.cache_server) == [
        "server",
        "--host=127.0.0.1",
        "--port=5001",
        "--http-host=127.0.0.1",
        "--http-port=5002",
        "--prometheus-port=5003",
        "--chunk-size=256",
        "--l1-size-gb=224.625",
        "--eviction-policy=LRU",
        "--l2-prefetch-policy=slipway",
        "--kv-event-log-size=0",
        "--l1-init-size-gb=20",
        "--l2-store-policy=slipway",
        '--l2-adapter={"type":"native_plugin","module_path":"our",'
        '"class_name":"Files","adapter_params":{"path":"/tmp/lmcache","direct":true},'
        '"max_capacity_gb":398.0,"eviction":{"eviction_policy":"LRU"}}',
    ]
    assert found.cache_environment == {
        "SLIPWAY_SHARED_STORE": '{"type": "valkey", "startup_nodes": "cache:6379", '
        '"password": "hush", "shared": true}'
    }
    assert "hush" not in explain.as_text(found) + str(explain.as_json(found))
    assert found.engine("m", None)["kv_transfer_config"] == {
        "kv_connector": "Connector",
        "kv_connector_module_path": "our.parts",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": 5001,
            "lmcache.mp.mq_timeout": 10.0,
            "lmcache.mp.heartbeat_interval": 2.0,
        },
    }


MANUAL = {"OPTION_LMCACHE_CONFIG_FILE": "lmcache.yaml"}


def test_lmcaches_own_file_is_honoured():
    file = {
        "chunk_size": 128,
        "local_cpu": False,
        "max_local_cpu_size": 5.0,
        "local_disk": "file:///data",
        "max_local_disk_size": 66.0,
        "extra_config": {"use_odirect": True},
    }
    here = machine(gpus=2, disk=disk(200))
    found = planned({**MANUAL, "LMCACHE_CHUNK_SIZE": "64"}, here, file=file)
    assert (found.tiers.chunk_size, found.tiers.l1) == (64, 10 * GIB)
    assert (found.tiers.disk.size, found.tiers.disk.path) == (132 * GIB, "/data")
    assert "--l2-store-policy=slipway_skip_l1" in found.cache_server


def test_memory_for_kv_caches_of_a_size_that_is_asked_for():
    found = planned({**AUTO, "OPTION_KV_L1_SIZE": "5G"}).tiers
    assert (found.l1, found.skip_l1) == (5 * GIB, False)
    assert found.reasons["l1"] == "OPTION_KV_L1_SIZE, all allocated at the start"
    with pytest.raises(SettingsError, match=r"OPTION_KV_L1_SIZE: is 99\.0 GiB; the engine leaves"):
        planned({**AUTO, "OPTION_KV_L1_SIZE": "99G"})
    with pytest.raises(SettingsError, match=r"less than 1\.2 GiB would not help"):
        planned({**AUTO, "OPTION_KV_L1_SIZE": "1M"})


def test_without_memory_for_kv_caches_the_disk_alone_keeps_them():
    found = planned({**AUTO, "OPTION_KV_L1_SIZE": "0"})
    assert found.tiers.disk
    assert found.tiers.skip_l1
    assert found.tiers.l1 < 2 * GIB  # memory in transit
    assert "--l2-store-policy=slipway_skip_l1" in found.cache_server
    found = planned({**AUTO, "OPTION_KV_L1_SIZE": "0", "OPTION_KV_DISK_SIZE": "0"})
    assert found.tiers.reason == (
        "OPTION_KV_L1_SIZE=0, and there is no shared store; the disk: left out: "
        "OPTION_KV_DISK_SIZE=0"
    )


@pytest.mark.parametrize(("gpus", "chunk"), [(0, 128), (1, 256)])
def test_where_lmcaches_own_file_names_no_chunk_size_it_is_ours(gpus, chunk):
    found = planned(MANUAL, machine(gpus=gpus), file={"max_local_cpu_size": 1.0})
    assert f"--chunk-size={chunk}" in found.cache_server


def test_lmis_manual_connector_means_lmcaches_configuration():
    connector = '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'
    environ = {"OPTION_KV_TRANSFER_CONFIG": connector, "LMCACHE_MAX_LOCAL_CPU_SIZE": "3"}
    found = planned(environ)
    assert found.tiers.l1 == 3 * GIB
    config = found.engine("m", None)["kv_transfer_config"]
    assert config["kv_connector"] == "Connector"


PLAIN = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
RPC = {"lmcache_rpc_port": "p1"}
BESIDE = {
    "kv_connector": "LMCacheConnectorV1Dynamic",
    "kv_connector_module_path": "lmcache.integration.vllm.lmcache_connector_v1",
    "engine_id": "a",
    "kv_buffer_device": "cuda",
    "kv_ip": "127.0.0.1",
    "kv_load_failure_policy": "fail",
    "kv_parallel_size": 1,
    "kv_port": 14579,
    "kv_rank": 0,
}
WAYS = (
    ({}, None, 5),
    ({"LMCACHE_MAX_LOCAL_CPU_SIZE": "1"}, None, 1),
    ({"OPTION_LMCACHE_CONFIG_FILE": "lmcache.yaml"}, {"max_local_cpu_size": 2}, 2),
    ({"OPTION_KV_L2_URL": "redis://cache"}, None, 5),
    ({"OPTION_LMCACHE_AUTO_CONFIG": "true", "OPTION_KV_L1_SIZE": "3GiB"}, None, 3),
)


@pytest.mark.parametrize(("environ", "file", "gib"), WAYS)
@pytest.mark.parametrize(
    "more",
    [
        *({key: value} for key, value in BESIDE.items()),
        *({"kv_connector_extra_config": {key: value}} for key, value in [
            *RPC.items(), ("discard_partial_chunks", False), ("skip_last_n_tokens", 1),
            ("lmcache.max_tokens_per_load", 5)]),
        {**BESIDE, "kv_connector_extra_config": {**RPC, "discard_partial_chunks": False}},
    ],
)  # fmt: skip
def test_lmcaches_connector_with_other_keys_is_translated(more, environ, file, gib):
    environ = {**environ, "OPTION_KV_TRANSFER_CONFIG": json.dumps({**PLAIN, **more})}
    found = planned(environ, file=file)
    assert found.tiers.l1 == gib * GIB
    assert found.engine("m", None)["kv_transfer_config"]["kv_connector"] == "Connector"
    for key in {**more, **more.get("kv_connector_extra_config", {})}.keys() - {
        *("kv_connector", "kv_connector_extra_config"),
    }:
        assert any(it.startswith(f"{key} in kv_transfer_config: ") for it in found.findings), key


def test_lmcaches_options_in_the_connector_come_first():
    extra = {"lmcache.max_local_cpu_size": 3, "lmcache.chunk_size": 128}
    config = {**PLAIN, "kv_connector_extra_config": extra}
    environ = {"OPTION_KV_TRANSFER_CONFIG": json.dumps(config), "LMCACHE_MAX_LOCAL_CPU_SIZE": "1"}
    assert planned(environ).tiers.l1 == 3 * GIB
    assert "--chunk-size=128" in planned(environ).cache_server
    automatic = planned({**environ, **AUTO}).findings
    assert [
        it for it in automatic if it.startswith("lmcache.chunk_size in kv_transfer_config: over")
    ]
    wrong = json.dumps({**config, "kv_connector_extra_config": {"lmcache.chunk_size": "x"}})
    with pytest.raises(SettingsError, match="OPTION_KV_TRANSFER_CONFIG: chunk_size='x': should be"):
        planned({"OPTION_KV_TRANSFER_CONFIG": wrong})


@pytest.mark.parametrize(("environ", "file", "gib"), WAYS)
@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"kv_role": "kv_producer"}, "kv_role is 'kv_producer'; make it \"kv_both\""),
        ({"kv_role": "kv_consumer", "kv_connector_extra_config": RPC}, "kv_role is 'kv_consumer'"),
        ({"kv_rol": 1}, "vLLM has no key 'kv_rol' there"),
        ({"kv_connector_extra_config": {"lmcache_rpc_prot": 1}}, "did you mean lmcache_rpc_port?"),
        ({"kv_connector_extra_config": {"lmcache.chunk_sise": 1}}, "mean lmcache.chunk_size?"),
        ({"kv_connector_extra_config": {"shared_storage_path": "/x"}}, "'shared_storage_path' in"),
        ({"kv_connector_extra_config": [1]}, "should be a JSON object"),
    ],
)
def test_what_the_connector_cannot_be_told_is_refused_by_name(more, fault, environ, file, gib):
    config = json.dumps({**PLAIN, **more})
    with pytest.raises(SettingsError) as refused:
        planned({**environ, "OPTION_KV_TRANSFER_CONFIG": config}, file=file)
    (told,) = refused.value.faults
    assert told.startswith("OPTION_KV_TRANSFER_CONFIG: ")
    assert fault in told


def test_a_servers_role_may_be_the_connectors():
    config = json.dumps({**PLAIN, "kv_role": "kv_producer"})
    environ = {**ROLE, "OPTION_KV_L2_URL": "redis://a", "OPTION_KV_TRANSFER_CONFIG": config}
    assert planned(environ).tiers.shared


def test_a_module_of_ones_own_is_no_connector_of_lmcaches():
    config = {**PLAIN, "kv_connector_module_path": "my.connector"}
    found = planned({"OPTION_KV_TRANSFER_CONFIG": json.dumps(config)}, machine(gpus=1))
    assert found.engine("m", None)["kv_transfer_config"] == config


@pytest.mark.parametrize(
    ("file", "l1"),
    [
        ({"local_disk": "/tmp/kv", "max_local_disk_size": 5}, 1.25),
        ({"remote_url": "redis://h:6379"}, 1.25),
        ({}, None),
    ],
)
def test_no_memory_for_the_cache_is_what_staging_takes(file, l1):
    file = {"local_cpu": False, "max_local_cpu_size": 0, **file}
    if not l1:
        with pytest.raises(SettingsError, match=r"OPTION_LMCACHE_CONFIG_FILE=.*kept nowhere"):
            planned(MANUAL, file=file)
        return
    tiers = planned(MANUAL, file=file).tiers
    assert tiers.skip_l1
    assert tiers.l1 / GIB == pytest.approx(l1, abs=0.1)


@pytest.mark.parametrize(
    "file",
    [
        {"chunk_size": 0},
        {"chunk_sise": 1},
        {"enable_nixl": True},
        {"max_local_cpu_size": 900},
        {"chunk_size": 100},
        {"remote_url": "gopher://x"},
        {"extra_config": [1]},
        {"local_cpu": False, "max_local_cpu_size": 0},
    ],
)
def test_every_fault_of_lmcaches_file_names_it(file):
    with pytest.raises(SettingsError) as refused:
        planned(MANUAL, file=file)
    name = f"OPTION_LMCACHE_CONFIG_FILE={MANUAL['OPTION_LMCACHE_CONFIG_FILE']}: "
    assert [it for it in refused.value.faults if not it.startswith(name)] == []


def test_a_variables_fault_names_the_variable():
    with pytest.raises(SettingsError, match="LMCACHE_ENABLE_NIXL: enable_nixl: prefill"):
        planned({**MANUAL, "LMCACHE_ENABLE_NIXL": "true"}, file={})


@pytest.mark.parametrize("prefix", ["LMCAHCE", "LM_CACHE", "LMCACH", "LMCACHES", "lmcache"])
def test_a_mistyped_prefix_of_lmcaches_variables_stops_the_start(prefix):
    name = f"{prefix}_MAX_LOCAL_CPU_SIZE"
    told = f"{name} is unknown and has no effect; did you mean LMCACHE_MAX_LOCAL_CPU_SIZE?"
    with pytest.raises(SettingsError, match=re.escape(told)):
        planned({**AUTO, name: "100"})
    assert told in planned({**AUTO, name: "100", "OPTION_STRICT": "false"}).findings


def test_another_connector_is_passed_on():
    environ = {"OPTION_KV_TRANSFER_CONFIG": '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'}
    found = planned(environ)
    assert isinstance(found.tiers, NoTiers)
    assert found.engine("m", None)["kv_transfer_config"] == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
    }


NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def test_servers_with_a_role_get_our_kind_of_vllms_connector():
    config = {**NIXL, "kv_load_failure_policy": "recompute"}
    environ = {
        "OPTION_KV_TRANSFER_CONFIG": json.dumps(config),
        "OPTION_ROUTER_SECRET": "s" * 32,
    }
    for role, ours in (
        ("both", {}),
        ("prefill", {"kv_connector_module_path": "our.nixl"}),
        ("decode", {"kv_connector_module_path": "our.nixl"}),
    ):
        found = planned({**environ, "OPTION_SERVER_ROLE": role})
        assert found.engine("m", None)["kv_transfer_config"] == {**config, **ours}


@pytest.mark.parametrize(
    ("role", "more", "told"),
    [
        ("prefill", {}, True),
        ("prefill", {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.5"}, False),
        ("decode", {}, False),
        ("both", {}, False),
    ],
)
def test_kv_that_no_other_machine_can_fetch(role, more, told):
    config = {**NIXL, "kv_load_failure_policy": "recompute"}
    environ = {
        "OPTION_KV_TRANSFER_CONFIG": json.dumps(config),
        "OPTION_ROUTER_SECRET": "s" * 32,
        "OPTION_SERVER_ROLE": role,
    }
    found = " ".join(planned({**environ, **more}).findings)
    assert ("VLLM_NIXL_SIDE_CHANNEL_HOST is not set" in found) == told


def test_a_shared_store_alone_switches_tiers_on():
    found = planned({"OPTION_KV_L2_URL": "file:///shared"})
    assert found.tiers.shared.shown == "file:///shared"


OPERATOR = {
    "LMCACHE_REMOTE_URL": "sagemaker-hyperpod://$(NODE_IP):9200",
    "LMCACHE_EXTRA_CONFIG": '{"sagemaker_hyperpod_shared_memory_name": "segment"}',
    "LMCACHE_REMOTE_SERDE": "naive",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "1",
    "NODE_IP": "10.0.0.7",
}


@pytest.mark.parametrize("switch", [AUTO, {}])
def test_the_store_that_hyperpods_operator_names_is_the_shared_one(switch):
    found = planned({**switch, **OPERATOR}).tiers
    assert found.shared.adapter["url"] == "sagemaker-hyperpod://10.0.0.7:9200"
    assert found.shared.adapter["shared_memory_name"] == "segment"
    assert found.l1 > 1 << 30
    assert (
        "LMCACHE_MAX_LOCAL_CPU_SIZE: overridden by OPTION_LMCACHE_AUTO_CONFIG" in found.notes
    ) == bool(switch)


@pytest.mark.parametrize(
    ("url", "kind", "shown"),
    [
        ("cache.kv.svc.cluster.local:6379", "valkey", "redis://cache.kv.svc.cluster.local:6379"),
        ("redis://cache:6379", "valkey", "redis://cache:6379"),
        ("rediss://:hush@cache:6379", "valkey", "rediss://:***@cache:6379"),
        ("valkey://a:6379,b:6379", "valkey", "valkey://a:6379,b:6379"),
        ("tieredstorage://10.0.0.8", "tieredstorage", "tieredstorage://10.0.0.8:9200"),
        (
            "sagemaker-hyperpod://10.0.0.8:9200",
            "tieredstorage",
            "sagemaker-hyperpod://10.0.0.8:9200",
        ),
    ],
)
@pytest.mark.parametrize("name", ["LMCACHE_REMOTE_URL", "OPTION_KV_L2_URL"])
def test_a_shared_store_is_named_in_every_form(name, url, kind, shown):
    found = planned({**AUTO, name: url, "NODE_IP": "10.0.0.7"}).tiers
    assert (found.shared.kind, found.shared.shown) == (kind, shown)
    assert found.notes == ()


def test_our_own_option_comes_before_the_operators_variable():
    named = {"LMCACHE_REMOTE_URL": "redis://cache", "OPTION_KV_L2_URL": "file:///shared"}
    found = planned({**AUTO, **named}).tiers
    assert found.shared.shown == "file:///shared"
    assert any("LMCACHE_REMOTE_URL" in note for note in found.notes)


def test_expert_parallelism_is_no_hindrance():
    """The reference refuses it, because it would change the number of pools; here there is one
    pool.
    """
    assert planned({**AUTO, "OPTION_ENABLE_EXPERT_PARALLEL": "true"}).tiers.l1 > 0


@pytest.mark.parametrize(
    ("environ", "file", "fault"),
    [
        ({**AUTO, **MANUAL}, {}, "exclude each other; leave the file out"),
        (
            {"OPTION_KV_TRANSFER_CONFIG": '{"kv_connector":"LMCacheConnectorV1"}'},
            None,
            'has a kv_connector but no kv_role; add "kv_role":"kv_both"',
        ),
        (
            {**AUTO, "OPTION_KV_TRANSFER_CONFIG": '{"kv_connector":"X","kv_role":"kv_both"}'},
            None,
            "names a connector of its own",
        ),
        (MANUAL, {"max_local_cpu_size": 900}, "need 900.0 GiB of memory, and the engine leaves"),
        (
            MANUAL,
            {"max_local_disk_size": 900, "local_disk": "/tmp/x"},
            "need 900.0 GiB on /tmp/x, and 500.0 GiB are free",
        ),
        (MANUAL, {"enable_p2p": True}, "enable_p2p"),
        (MANUAL, {"chunk_sise": 1}, "chunk_size"),
        (
            {**MANUAL, "OPTION_KV_L2_URL": "redis://a"},
            {"remote_url": "redis://b"},
            "both name a shared store; keep one",
        ),
        ({"OPTION_KV_L2_URL": "gopher://a"}, None, "OPTION_KV_L2_URL: "),
        ({**AUTO, "OPTION_KV_DISK_SIZE": "1T"}, None, "is 1024.0 GiB, and /tmp/lmcache has 500.0"),
        ({**AUTO, "OPTION_NNODES": "2"}, None, "OPTION_NNODES=2: KV cache tiers serve the ranks"),
        ({**AUTO, **ROLE}, None, "OPTION_SERVER_ROLE=prefill: KV is handed over through a shared"),
        (ROLE, None, "OPTION_SERVER_ROLE=prefill: KV is handed over through a shared store"),
        (
            {**ROLE, "OPTION_KV_TRANSFER_CONFIG": json.dumps(NIXL)},
            None,
            'it needs "kv_load_failure_policy":"recompute"',
        ),
        (
            {"OPTION_SERVER_ROLE": "decode", "OPTION_KV_L2_URL": "redis://a"},
            None,
            "OPTION_SERVER_ROLE=decode needs OPTION_ROUTER_SECRET, here and at the router",
        ),
    ],
)
def test_what_cannot_be_is_refused(environ, file, fault):
    with pytest.raises(SettingsError) as refused:
        planned(environ, file=file)
    assert len(refused.value.faults) == 1
    assert fault in refused.value.faults[0]


def test_lmcaches_variables_alone_do_nothing_and_that_is_told():
    found = planned({"LMCACHE_CHUNK_SIZE": "8"})
    assert isinstance(found.tiers, NoTiers)
    assert found.findings[-1] == (
        "LMCACHE_CHUNK_SIZE: KV cache tiers are off; set OPTION_LMCACHE_AUTO_CONFIG=true"
    )


def test_the_decision_can_be_given_back_as_lmcaches_own_file():
    tiers = planned().tiers
    text = kv_tiers.yaml(tiers)
    translation = lmcache.translate(yaml.safe_load(text), {})
    assert translation.chunk_size == tiers.chunk_size
    assert translation.l1_gib * GIB == tiers.l1
    assert translation.disk
    assert translation.disk.gib * GIB == tiers.disk.size
    assert all("#" in line for line in text.splitlines() if "size" in line)


SIZES = st.integers(min_value=0, max_value=1 << 42)


@given(
    memory=st.integers(min_value=1 << 28, max_value=1 << 42),
    used=st.floats(0, 1),
    total=SIZES,
    free=st.floats(0, 1),
    shm=SIZES,
    gpus=st.integers(0, 8),
    weights=SIZES,
    heads=st.integers(1, 64),
    numbers=st.integers(0, 1 << 24),
    kind=st.sampled_from(["ext4", "overlay", "tmpfs"]),
    environ=st.sampled_from(
        [
            {},
            AUTO,
            {"OPTION_KV_L2_URL": "redis://h"},
            {**AUTO, "OPTION_TENSOR_PARALLEL_DEGREE": "2"},
            {**AUTO, "OPTION_KV_CACHE_MEMORY_BYTES": "4G"},
            {**AUTO, "OPTION_CPU_OFFLOAD_GB_PER_GPU": "4"},
            {**AUTO, "OPTION_DTYPE": "fp32", "OPTION_MAX_MODEL_LEN": "auto"},
            {**MANUAL, "LMCACHE_MAX_LOCAL_DISK_SIZE": "8", "LMCACHE_LOCAL_DISK": "/d"},
        ]
    ),
)
def test_no_plan_exceeds_the_machine(
    memory, used, total, free, shm, gpus, weights, heads, numbers, kind, environ
):
    here = machine(
        gpus=0,
        memory=memory,
        memory_free=round(memory * used),
        shm=shm,
        disk=dataclasses.replace(DISK, total=total, free=round(total * free), kind=kind),
    )
    here = dataclasses.replace(here, gpus=(H100,) * gpus)
    facts = model(kv=KvShape(heads=heads, full=numbers))
    facts = dataclasses.replace(facts, weight_bytes=weights, largest_file=weights)
    file: dict[str, object] | None = {} if "OPTION_LMCACHE_CONFIG_FILE" in environ else None
    with contextlib.suppress(SettingsError):
        found = planned(environ, here, facts, file)
        explain.as_text(found)
        explain.as_json(found)
        tiers = found.tiers
        if isinstance(tiers, Tiers):
            assert found.memory.needed + tiers.l1 <= here.memory_free
            assert not tiers.disk or tiers.disk.size <= here.disk.free
            assert kind != "tmpfs" or not tiers.disk or file is not None
