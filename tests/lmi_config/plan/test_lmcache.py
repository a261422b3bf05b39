# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
import re
import subprocess
import sys
from urllib.parse import quote

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lmi_config.options.settings import SettingsError
from lmi_config.plan.lmcache import Disk, Translation, merged, translate
from lmi_config.plan.shared_store import L2Store
from lmi_config.plan.shared_store import read as store

COUNTED = (
    "capacity_gb limits the bytes that this server stores after its start; older data and data of "
    "other servers are neither counted nor removed"
)
KEPT = "old files are not removed: set capacity_gb, or clean the folder from outside"


def limited(gb: float) -> dict[str, object]:
    return {"max_capacity_gb": gb, "eviction": {"eviction_policy": "LRU"}}


STORES: list[tuple[str, str, dict[str, object], str]] = [
    ("redis://cache", "valkey", {"startup_nodes": "cache:6379"}, ""),
    (" valkey://cache:7000/0 ", "valkey", {"startup_nodes": "cache:7000"}, ""),
    (
        "redis://me:p%40ss:%2F@cache?capacity_gb=1.5",
        "valkey",
        {"startup_nodes": "cache:6379", "username": "me", "password": "p@ss:/"} | limited(1.5),
        COUNTED,
    ),
    ("redis://:hush@cache", "valkey", {"startup_nodes": "cache:6379", "password": "hush"}, ""),
    (
        "rediss://me:hush@cache/2",
        "valkey",
        {"startup_nodes": "cache:6379", "tls_enable": True, "database_id": 2}
        | {"username": "me", "password": "hush"},
        "",
    ),
    (
        "valkey://a,b:7000,c",
        "valkey",
        {"startup_nodes": "a:6379,b:7000,c:6379", "cluster_mode": True},
        "",
    ),
    (
        "valkeys://:hush@a?cluster=true&capacity_gb=2",
        "valkey",
        {"startup_nodes": "a:6379", "tls_enable": True, "cluster_mode": True, "password": "hush"}
        | limited(2.0),
        COUNTED,
    ),
    (
        "s3://kv1?region=eu-west-1&capacity_gb=100",
        "s3",
        {"s3_endpoint": "kv1.s3.eu-west-1.amazonaws.com", "s3_region": "eu-west-1"}
        | limited(100.0),
        COUNTED,
    ),
    ("file:///mnt/kv%20cache/", "fs_native", {"base_path": "/mnt/kv cache"}, KEPT),
    (
        "file:///mnt/kv?capacity_gb=50",
        "fs_native",
        {"base_path": "/mnt/kv"} | limited(50.0),
        COUNTED,
    ),
]
DAEMONS: list[tuple[str, dict[str, object]]] = [
    (
        "tieredstorage://10.0.0.1",
        {"url": "sagemaker-hyperpod://10.0.0.1:9200", "shared_memory_name": "ai_toolkit_cache"},
    ),
    (
        "sagemaker-hyperpod://node:9300/?bucket=kv&shared_memory_name=pool",
        {"url": "sagemaker-hyperpod://node:9300", "bucket": "kv", "shared_memory_name": "pool"},
    ),
]


@pytest.mark.parametrize(("url", "kind", "adapter", "note"), STORES)
def test_a_url_becomes_a_store(url, kind, adapter, note):
    shown = re.sub(":[^/]*@", ":***@", url.strip())
    adapter = {"type": kind, "shared": True} | adapter
    assert store(url, {}) == L2Store(kind=kind, adapter=adapter, shown=shown, note=note)


@pytest.mark.parametrize("hosts", ["cache.ns.svc:6380", "a:6379,b:6379"])
def test_hosts_with_ports_alone_are_redis(hosts):
    assert store(hosts, {}) == store(f"redis://{hosts}", {})


@pytest.mark.parametrize(("url", "adapter"), DAEMONS)
def test_a_url_names_a_tiered_storage_daemon(url, adapter):
    adapter = {"type": "tieredstorage"} | adapter
    shown = re.sub("(?<=0.1)$", ":9200", url)
    assert store(url, {}) == L2Store(kind="tieredstorage", adapter=adapter, shown=shown)


@pytest.mark.parametrize(
    ("url", "endpoint", "tls"),
    [
        ("s3://kv1", "kv1.s3.us-east-1.amazonaws.com", True),
        ("s3://kv1?region=cn-north-1", "kv1.s3.cn-north-1.amazonaws.com.cn", True),
        ("s3://kv1?endpoint=minio.example:9000", "kv1.minio.example:9000", True),
        ("s3://kv1?endpoint=http://minio.example:9000/", "kv1.minio.example:9000", False),
        ("s3://kv1?endpoint=https://kv1.minio.example", "kv1.minio.example", True),
        ("s3://kv1.s3.us-east-1.amazonaws.com", "kv1.s3.us-east-1.amazonaws.com", True),
    ],
)
def test_a_bucket_is_reached_by_its_own_host(url, endpoint, tls):
    adapter = store(url, {"AWS_REGION": "us-east-1"}).adapter
    assert (adapter["s3_endpoint"], adapter.get("disable_tls", False)) == (endpoint, not tls)


def test_the_region_in_the_url_comes_before_the_environments():
    assert store("s3://kv1?region=eu-west-1", {"AWS_REGION": "us-east-1"}).adapter["s3_region"] == (
        "eu-west-1"
    )


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("tieredstorage://", "10.0.0.7:9200"),
        ("tieredstorage://:9300", "10.0.0.7:9300"),
        ("tieredstorage://?bucket=kv", "10.0.0.7:9200"),
        ("sagemaker-hyperpod://$NODE_IP:9200", "10.0.0.7:9200"),
        ("sagemaker-hyperpod://$(NODE_IP):9200", "10.0.0.7:9200"),
        ("sagemaker-hyperpod://${NODE_IP}", "10.0.0.7:9200"),
        ("tieredstorage://10.0.0.8", "10.0.0.8:9200"),
    ],
)
def test_the_daemon_is_the_nodes_own_where_no_other_is_named(url, host):
    whole = store(url, {"NODE_IP": "10.0.0.7"})
    assert whole.shown.partition("://")[2].partition("?")[0] == host
    found = whole.adapter
    assert found["url"] == f"sagemaker-hyperpod://{host}"
    assert found["shared_memory_name"] == "ai_toolkit_cache"


# The figures of awslabs/ai-on-sagemaker-hyperpod, "HyperPod Managed KV Cache with LMCache".
HYPERPOD = {
    "chunk_size": 256,
    "local_cpu": True,
    "max_local_cpu_size": 4,
    "save_unfull_chunk": True,
    "remote_url": "sagemaker-hyperpod://PLACEHOLDER_NODE_IP:9200",
    "remote_serde": "naive",
    "extra_config": {"sagemaker_hyperpod_shared_memory_name": "ai_toolkit_cache"},
}


def test_awss_file_for_hyperpod_loads_and_the_operators_variable_comes_first():
    environ = {"LMCACHE_REMOTE_URL": "sagemaker-hyperpod://10.0.0.7:9200"}
    found = translate(merged(HYPERPOD, environ), {})
    assert found.remote == store("sagemaker-hyperpod://10.0.0.7:9200", {})
    assert (found.chunk_size, found.l1_gib) == (256, 4)
    assert found.ignored == (
        "save_unfull_chunk: complete chunks are stored, and the rest is computed",
        "remote_serde: the server stores KV as it is",
    )


KNOWN = (
    "should be a URL that begins with one of redis://, rediss://, valkey://, valkeys://, s3://, "
    "file://, tieredstorage://, sagemaker-hyperpod://"
)
ENCODE = (
    "characters that mean something in a URL, like / ? # [, must be percent-encoded in a "
    "password or a path: %2F for /"
)
BUCKET = (
    "s3:// takes a bucket named with 3 to 63 lower-case letters, digits and dashes; a dot does not "
    "work, because the bucket becomes a part of the host's name"
)
ENDPOINT = (
    "the S3 endpoint should be the name of a host, not an address or a path, like "
    "s3.us-east-1.amazonaws.com or http://minio.example:9000"
)


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("", KNOWN),
        ("cache", KNOWN),
        ("me:hush@cache:6379", KNOWN),
        ("cache:63790000", KNOWN),
        ("cache:65536", "the port after cache should be a number from 1 to 65535"),
        ("memcached://cache", KNOWN),
        ("redis:cache", KNOWN),
        ("redis://", "redis:// needs a host, like redis://cache.example:6379"),
        ("redis://:hush@", "redis:// needs a host, like redis://cache.example:6379"),
        ("redis://a,", "redis:// needs a host, like redis://cache.example:6379"),
        ("redis://[::1]:6379", "redis:// needs a host, like redis://cache.example:6379"),
        ("redis://a:0", "the port after a should be a number from 1 to 65535"),
        ("redis://a:65536", "the port after a should be a number from 1 to 65535"),
        ("redis://a:hush", "the port after a should be a number from 1 to 65535"),
        ("redis://a:", "the port after a should be a number from 1 to 65535"),
        ("redis://hush@a", "redis:// has a user without a password: write user:password@host"),
        ("redis://u:hu/sh@a", ENCODE),
        ("redis://u:hu?sh@a", ENCODE),
        ("redis://u:hu#sh@a", ENCODE),
        ("redis://u:hu[sh@a", ENCODE),
        ("redis://u:hush℀@a", ENCODE),
        ("redis://a,b/1", "redis:// only supports database 0 of a cluster, not 1"),
        ("rediss://a/1?cluster=true", "rediss:// only supports database 0 of a cluster, not 1"),
        ("redis://a/kv", "the path after redis://a should be a database number, like /0"),
        ("redis://a,b?cluster=no", "cluster='no' should be true or false"),
        ("redis://a,b?cluster=0", "redis:// with several hosts is a cluster: drop cluster=false"),
        ("redis://a?ttl=5", "redis:// has no query key 'ttl', only cluster, capacity_gb"),
        ("redis://a?capacity_gb=0", "capacity_gb='0' should be a number above 0"),
        ("redis://a?capacity_gb=inf", "capacity_gb='inf' should be a number above 0"),
        ("s3://?region=a", "s3:// needs a bucket, like s3://my-bucket?region=us-east-1"),
        ("s3://kv1", "s3:// needs a region: add ?region=us-east-1, or set AWS_REGION"),
        (
            "s3://kv1/a?region=a",
            "s3://kv1 takes no prefix: LMCache writes to the bucket's top level",
        ),
        ("s3://my.bucket?region=a", BUCKET),
        ("s3://AKIA:hush", BUCKET),
        ("s3://AKIA:hush@kv1", "s3:// takes no user or password; leave them out"),
        ("s3://kv1?region=a&endpoint=10.0.0.1:9000", ENDPOINT),
        ("s3://kv1?region=a&endpoint=http://minio/kv1", ENDPOINT),
        ("s3://kv1?region=", "region='' should be text, not nothing"),
        (
            "s3://kv1?prefix=a",
            "s3:// has no query key 'prefix', only region, endpoint, capacity_gb",
        ),
        ("file://mnt/kv", "file:// takes no host: write three slashes, like file:///mnt/kv"),
        ("file:///", "file:// needs a folder, like file:///mnt/kv"),
        ("file:///kv?region=a", "file:// has no query key 'region', only capacity_gb"),
        (
            "tieredstorage://",
            "tieredstorage:// without a host means this node's daemon: set NODE_IP, in Kubernetes "
            "from the field status.hostIP, or name the host",
        ),
        (
            "tieredstorage://a,b",
            "tieredstorage:// takes one host and port, without a path",
        ),
        ("tieredstorage://u:hush@a", "tieredstorage:// takes no user or password; leave them out"),
        (
            "tieredstorage://a?capacity_gb=1",
            "tieredstorage:// has no query key 'capacity_gb', only bucket, shared_memory_name",
        ),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_in_one_sentence(url, fault):
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (the whole message is compared)
        store(url, {})
    assert str(refused.value) == fault


def told(url: str) -> str:
    try:
        found = store(url, {})
    except ValueError as refused:
        return str(refused)
    return f"{found!r} {found.shown} {found.note} {found.masked}"


@given(
    scheme=st.sampled_from(["redis", "rediss", "valkey", "valkeys", "s3", "file", "tieredstorage"]),
    user=st.sampled_from(["", "me"]),
    rest=st.text(),
)
def test_a_password_is_never_told_however_it_is_written(scheme, user, rest):
    assert "hush" not in told(f"{scheme}://{user}:hush{rest}@cache")


@given(
    scheme=st.sampled_from(["redis", "rediss", "valkey", "valkeys"]),
    password=st.text().map(lambda rest: f"hush{rest}"),
)
def test_a_percent_encoded_password_reaches_the_server_and_nobody_else(scheme, password):
    url = f"{scheme}://me:{quote(password, safe='')}@cache"
    found = store(url, {})
    assert password in {**found.adapter, **found.env}.values()
    assert "hush" not in told(url)


# The files of the reference's tests: name, text, translation without the ignored options.
DISK = Disk(path="/tmp/lmcache", gib=5.0, odirect=True)
PLAIN = Translation(
    chunk_size=256,
    l1_gib=5.0,
    disk=None,
    remote=None,
    skip_l1=False,
    eviction="LRU",
    connector={},
    ignored=(),
)
REFERENCE = [
    (
        "cpu",
        "chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 5.0",
        PLAIN,
    ),
    (
        "local_storage",
        'chunk_size: 256\nlocal_disk: "file:///tmp/lmcache/"\nmax_local_disk_size: 5.0\n'
        "extra_config: {use_odirect: true}",
        dataclasses.replace(PLAIN, disk=DISK),
    ),
    (
        "qwen3_benchmark",
        "chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 66.0",
        dataclasses.replace(PLAIN, l1_gib=66.0),
    ),
    (
        "qwen3_nvme",
        "chunk_size: 256\nlocal_cpu: false\nmax_local_cpu_size: 5.0\n"
        'local_disk: "/tmp/lmcache/"\nmax_local_disk_size: 66.0',
        dataclasses.replace(
            PLAIN, skip_l1=True, disk=dataclasses.replace(DISK, gib=66.0, odirect=False)
        ),
    ),
    (
        "qwen3_ebs",
        "chunk_size: 256\nlocal_cpu: false\nmax_local_cpu_size: 5.0\n"
        'local_disk: "/tmp/lmcache/"\nmax_local_disk_size: 66.0\nextra_config: {use_odirect: true}',
        dataclasses.replace(PLAIN, skip_l1=True, disk=dataclasses.replace(DISK, gib=66.0)),
    ),
    (
        "s3",
        "chunk_size: 256\nlocal_cpu: False\nsave_unfull_chunk: False\n"
        'remote_url: "s3://djl-llm-cache"\nremote_serde: naive\nblocking_timeout_secs: 10\n'
        "extra_config:\n  s3_region: us-east-1\n  s3_endpoint: s3.us-east-1.amazonaws.com\n"
        "  s3_num_io_threads: 4\n  save_chunk_meta: False",
        dataclasses.replace(
            PLAIN,
            skip_l1=True,
            remote=L2Store(
                kind="s3",
                adapter={
                    "type": "s3",
                    "shared": True,
                    "s3_endpoint": "djl-llm-cache.s3.us-east-1.amazonaws.com",
                    "s3_region": "us-east-1",
                    "s3_num_io_threads": 4,
                },
                shown="s3://djl-llm-cache?region=us-east-1&endpoint=s3.us-east-1.amazonaws.com",
            ),
        ),
    ),
    (
        "redis",
        "chunk_size: 256\nlocal_cpu: False\nsave_unfull_chunk: False\n"
        'remote_url: "redis://localhost:6379"\nremote_serde: naive',
        dataclasses.replace(
            PLAIN,
            skip_l1=True,
            remote=store("redis://localhost:6379", {}),
        ),
    ),
    *(
        (
            f"qwen25_{size}",
            f'max_local_cpu_size: {memory}\nlocal_disk: "file:///tmp/lmcache/"\n'
            "max_local_disk_size: 500\nextra_config: {use_odirect: true}",
            dataclasses.replace(
                PLAIN,
                chunk_size=None,
                l1_gib=float(memory),
                disk=dataclasses.replace(DISK, gib=500.0),
            ),
        )
        for size, memory in (("1_5b", 900), ("7b", 550))
    ),
    (
        "qwen25_72b",
        "max_local_cpu_size: 210",
        dataclasses.replace(PLAIN, chunk_size=None, l1_gib=210.0),
    ),
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [(text, expected) for _, text, expected in REFERENCE],
    ids=[name for name, _, _ in REFERENCE],
)
def test_the_references_files_translate(text, expected):
    found = translate(yaml.safe_load(text), {})
    assert dataclasses.replace(found, ignored=()) == expected


def test_options_without_effect_are_noted_with_the_reason():
    config = yaml.safe_load(REFERENCE[5][1]) | {
        "enable_lazy_memory_allocator": True,
        "pre_caching_hash_algorithm": "builtin",
        "pd_role": "sender",
        "p2p_host": None,
        "max_local_disk_size": 5,
    }
    assert translate(config, {}).ignored == (
        "save_unfull_chunk: complete chunks are stored, and the rest is computed",
        "remote_serde: the server stores KV as it is",
        "blocking_timeout_secs: the server has its own time limits",
        "enable_lazy_memory_allocator: the server allocates its memory in steps if it can",
        "pre_caching_hash_algorithm: the server's hash is the same in every process",
        "pd_role: it has no effect without enable_pd",
        "max_local_disk_size: there is no disk tier without local_disk",
        "extra_config.save_chunk_meta: the server's chunks need no separate description",
    )


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        ({}, "chunk_size", None),
        ({"chunk_size": "128"}, "chunk_size", 128),
        ({"local_cpu": "False"}, "skip_l1", True),
        ({"max_local_cpu_size": "0.5"}, "l1_gib", 0.5),
        ({"cache_policy": "lru"}, "eviction", "LRU"),
        ({"cache_policy": "ARC"}, "eviction", "ARC"),
        ({"save_decode_cache": True}, "connector", {"lmcache.mp.save_decode_cache": True}),
        ({"save_decode_cache": False}, "connector", {}),
        (
            {"local_disk": "file://tmp/lmcache", "max_local_disk_size": 5},
            "disk",
            dataclasses.replace(DISK, odirect=False),
        ),
        (
            {
                "local_disk": "/tmp/lmcache",
                "max_local_disk_size": "5",
                "extra_config": '{"use_odirect": "true"}',
            },
            "disk",
            DISK,
        ),
        ({"local_disk": "/tmp/lmcache"}, "disk", None),
        ({"enable_p2p": "false", "min_retrieve_tokens": 0, "use_layerwise": None}, "disk", None),
    ],
)
def test_an_option_is_translated(config, field, value):
    assert getattr(translate(config, {}), field) == value


@pytest.mark.parametrize(
    ("url", "extra", "same"),
    [
        ("rediss://me:hush@cache/1", {}, "rediss://me:hush@cache/1"),
        ("redis-cluster://me:hush@a:1,b:2", {}, "redis://me:hush@a:1,b:2?cluster=true"),
        ("resp://cache:1", {"username": "me", "password": "a/b"}, "redis://me:a%2Fb@cache:1"),
        (
            "valkey://cache:1",
            {"valkey_password": 12, "tls_enable": "true", "valkey_database": 3},
            "valkeys://:12@cache:1/3",
        ),
        ("valkey://cache:1", {"valkey_mode": "cluster"}, "valkey://cache:1?cluster=true"),
        ("fs://localhost:0/mnt/kv", {}, "file:///mnt/kv"),
        (
            "s3://kv1.minio.example:9000",
            {"s3_region": "a"},
            "s3://kv1?region=a&endpoint=minio.example%3A9000",
        ),
        ("sagemaker-hyperpod://127.0.0.1:9200", {}, "sagemaker-hyperpod://127.0.0.1:9200"),
    ],
)
def test_a_remote_url_is_the_store_that_another_url_would_name(url, extra, same):
    assert translate({"remote_url": url, "extra_config": extra}, {}).remote == store(same, {})


@pytest.mark.parametrize(
    ("url", "extra", "added"),
    [
        ("resp://cache:1", {"resp_num_threads": "4"}, {"num_workers": 4}),
        ("valkey://cache:1", {"valkey_num_workers": 4}, {"num_workers": 4}),
        (
            "s3://kv1",
            {"s3_region": "a", "s3_prefer_http2": False, "disable_tls": True},
            {"s3_prefer_http2": False, "disable_tls": True},
        ),
        ("fs://h:0/kv", {"fs_connector_use_odirect": True}, {"use_odirect": True}),
        (
            "sagemaker-hyperpod://node:9200",
            {"sagemaker_hyperpod_bucket": "kv", "sagemaker_hyperpod_lease_ttl_s": 2.5},
            {"bucket": "kv", "lease_ttl_ms": 2500},
        ),
    ],
)
def test_extra_config_goes_into_the_adapter(url, extra, added):
    remote = translate({"remote_url": url, "extra_config": extra}, {}).remote
    assert remote
    assert remote.adapter.items() >= added.items()


def test_aws_keys_go_into_the_environment():
    extra = {"s3_region": "a", "aws_access_key_id": "AKIA", "aws_secret_access_key": "hush"}
    translation = translate({"remote_url": "s3://kv1", "extra_config": extra}, {})
    assert translation.remote
    assert translation.remote.env == {
        "AWS_ACCESS_KEY_ID": "AKIA",
        "AWS_SECRET_ACCESS_KEY": "hush",
    }
    assert "hush" not in f"{translation!r} {translation.remote.adapter}"


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"chunk_size": 0}, "chunk_size=0: should be a whole number, at least 1"),
        ({"chunk_size": True}, "chunk_size=True: should be a whole number, at least 1"),
        ({"local_cpu": "maybe"}, "local_cpu='maybe': should be true or false"),
        (
            {"max_local_cpu_size": 0},
            "max_local_cpu_size=0: should be a number above 0, or say local_cpu: false as well",
        ),
        ({"max_local_disk_size": -1}, "max_local_disk_size=-1: should be a number, at least 0"),
        (
            {"local_disk": "cache"},
            "local_disk='cache': should be an absolute path, like /tmp/lmcache",
        ),
        (
            {"local_disk": "/a,/b"},
            "local_disk='/a,/b': should be one folder; the server cannot spread a tier over "
            "several",
        ),
        (
            {"cache_policy": "RANDOM"},
            "cache_policy='RANDOM': should be LRU or ARC, the policies of LMCache's server",
        ),
        (
            {"local_disk": "file://~/kv"},
            "local_disk='file://~/kv': should be an absolute path, like /tmp/lmcache",
        ),
        (
            {"enable_p2p": True},
            "enable_p2p: engines share KV through OPTION_KV_L2_URL, not with one another",
        ),
        (
            {"enable_pd": "true"},
            "enable_pd: prefill and decoding are split by OPTION_SERVER_ROLE; switch it off",
        ),
        (
            {"enable_nixl": True},
            "enable_nixl: prefill and decoding are split by OPTION_SERVER_ROLE; switch it off",
        ),
        (
            {"nixl_role": "sender"},
            "nixl_role: prefill and decoding are split by OPTION_SERVER_ROLE; switch it off",
        ),
        (
            {"local_device": "file:///tmp/kv"},
            "local_device: it is local_disk by now, with max_local_disk_size",
        ),
        (
            {"max_local_cache_size": 100},
            "max_local_cache_size: it is max_local_cpu_size or max_local_disk_size by now",
        ),
        (
            {"cache_folder": "/mnt/kv"},
            "cache_folder: LMCache does not know it, and its value names a place; use local_disk "
            "or remote_url, or remove it",
        ),
        (
            {"extra_config": {"spill_to": "file:///mnt/kv"}},
            "extra_config.spill_to: LMCache does not know it, and its value names a place; use "
            "local_disk or remote_url, or remove it",
        ),
        ({"chunk_sise": 1}, "chunk_sise: no such option; did you mean chunk_size?"),
        ({"extra_config": "{hush"}, None),
        (
            {"extra_config": ["hush"]},
            'extra_config=(hidden): should be a JSON object, like {"a": 1}',
        ),
        ({"remote_url": ["hush"]}, "remote_url=(hidden): should be text"),
        ({"remote_url": "lm://cache:1"}, f"remote_url: {KNOWN}"),
        ({"remote_url": "redis://:hush"}, None),
        ({"remote_url": "s3://kv1"}, "remote_url: s3:// needs extra_config.s3_region"),
        (
            {"extra_config": {"use_odirct": True}},
            "extra_config.use_odirct: no such option; did you mean use_odirect?",
        ),
        (
            {"extra_config": {"enable_nixl_storage": True}},
            "extra_config.enable_nixl_storage: NIXL is not used; give a folder as local_disk",
        ),
        (
            {"remote_url": "resp://a:1", "extra_config": {"password": ["hush"]}},
            "extra_config.password=(hidden): should be text",
        ),
    ],
)
def test_an_option_that_cannot_be_translated_is_refused_by_name(config, fault):
    with pytest.raises(SettingsError) as refused:
        translate(config, {})
    assert "hush" not in str(refused.value)
    if fault:
        assert refused.value.faults == (fault,)


def test_what_lmcache_would_ignore_is_noted():
    config = {"some": 1, "s3_endpoint_name": "s3", "extra_config": {"a": 1}}
    found = " ".join(translate(config, {}).ignored)
    for name in ("some", "s3_endpoint_name", "extra_config.a"):
        assert f"{name}: LMCache does not know it" in found


def test_all_faults_are_told_at_once():
    config = {"enable_pd": True, "chunk_sise": 1, "remote_url": "x://"}
    with pytest.raises(SettingsError) as refused:
        translate(config, {})
    assert [fault.partition(":")[0] for fault in refused.value.faults] == [
        "enable_pd",
        "chunk_sise",
        "remote_url",
    ]


def test_variables_go_over_the_file():
    file = {"chunk_size": 256, "local_cpu": True, "extra_config": {"a": 1}, "unknown": 1}
    environ = {
        "LMCACHE_CHUNK_SIZE": " 128 ",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "'20'",
        "LMCACHE_LOCAL_DISK": "file:///tmp/lmcache/",
        "LMCACHE_EXTRA_CONFIG": r'"{\"use_odirect\": true}"',
        "LMCACHE_ENABLE_P2P": "False",
        "LMCACHE_PD_ROLE": "sender",
        "LMCACHE_REMOTE_URL": "",
        "LMCACHE_CONFIG_FILE": "/lmcache.yaml",
        "LMCACHE_RESP_PASSWORD": "hush",
        "LMCACHE_COORDINATOR_URL": "http://coordinator",
        "LMCACHE_LOG_LEVEL": "DEBUG",
        "LMCACHE_MP_TRANSFER_MODE": "auto",
        "LMCACHE_USE_EXPERIMENTAL": "True",
        "CHUNK_SIZE": "64",
    }
    assert merged(file, environ) == {
        "chunk_size": 128,
        "local_cpu": True,
        "max_local_cpu_size": 20.0,
        "local_disk": "/tmp/lmcache",
        "extra_config": {"use_odirect": True},
        "enable_p2p": "False",
        "pd_role": "sender",
        "unknown": 1,
    }


def test_variables_that_cannot_be_read_are_named():
    with pytest.raises(SettingsError) as refused:
        merged({}, {"LMCACHE_CHUNK_SIZE": "x", "LMCACHE_EXTRA_CONFIG": '{"password": hush}'})
    assert refused.value.faults == (
        "LMCACHE_CHUNK_SIZE='x': should be a whole number, at least 1",
        "LMCACHE_EXTRA_CONFIG=(hidden): should be JSON (Expecting value: line 1 column 14 "
        "(char 13))",
    )


LMCACHE = """
import json, sys, warnings
warnings.simplefilter("ignore")
given = json.load(sys.stdin)
from lmcache.v1.config import _CONFIG_DEFINITIONS, LMCacheEngineConfig
from lmcache.v1.distributed.config import get_arg_parser, parse_args_to_config
import serving.kv_cache.lmcache.tiered_storage  # makes LMCache know its type

config = parse_args_to_config(get_arg_parser().parse_args(given["arguments"]))
read = LMCacheEngineConfig.from_file(given["file"])
read.update_config_from_env()
answer = {
    "defaults": {name: row["default"] for name, row in _CONFIG_DEFINITIONS.items()},
    "adapters": [
        vars(adapter) | {"bounded": adapter.eviction_config is not None, "shared": adapter.shared}
        for adapter in config.l2_adapter_config.adapters
    ],
    "policies": [config.store_policy, config.eviction_config.eviction_policy],
    "options": {name: getattr(read, name) for name in given["names"]},
}
print("answer", json.dumps(answer, default=str))
"""


def test_lmcache_accepts_it(tmp_path):
    """In a separate process, because the import of LMCache warns and imports torch."""
    translation = translate(yaml.safe_load(REFERENCE[5][1]), {})
    assert translation.remote
    urls = [row[0] for row in STORES] + [row[0] for row in DAEMONS]
    adapters = [store(url, {}).adapter for url in urls] + [translation.remote.adapter]
    file = {"chunk_size": 64, "local_cpu": False, "extra_config": {"a": 1}}
    (tmp_path / "lmcache.yaml").write_text(yaml.safe_dump(file))
    environ = {
        "LMCACHE_CHUNK_SIZE": "128",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "'20'",
        "LMCACHE_EXTRA_CONFIG": r'"{\"use_odirect\": true}"',
    }
    options = merged(file, environ)
    arguments = ["--l1-size-gb", str(translation.l1_gib), "--l2-store-policy", "skip_l1"]
    arguments += ["--eviction-policy", translation.eviction]
    for adapter in adapters:
        arguments += ["--l2-adapter", json.dumps(adapter)]
    given = {
        "arguments": arguments,
        "file": str(tmp_path / "lmcache.yaml"),
        "names": sorted(options),
    }
    done = subprocess.run(
        [sys.executable, "-c", LMCACHE],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.rpartition("answer ")[2])
    assert answer["policies"] == ["skip_l1", "LRU"]
    assert answer["options"] == options
    for ours, theirs in zip(adapters, answer["adapters"], strict=True):
        nodes = [f"{host}:{port}" for host, port in theirs.pop("startup_nodes", [])]
        theirs |= {"type": ours["type"], "startup_nodes": ",".join(nodes)}
        expected = {key: value for key, value in ours.items() if key != "eviction"}
        assert theirs | expected == theirs
        assert theirs["bounded"] == ("eviction" in ours)
    defaults = translate(answer["defaults"], {})
    assert dataclasses.replace(defaults, ignored=()) == PLAIN
