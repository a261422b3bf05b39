# SPDX-License-Identifier: Apache-2.0
"""Translates LMCache's options of LMI's users for LMCache's server.

Slipway runs `lmcache server` (multiprocess mode), which is configured by command-line flags. LMI's
users configure LMCache inside the engine, by a YAML file and `LMCACHE_*` variables. These options
become flags of the server, or are refused by name. The facts are those of LMCache 0.5.6.
"""

import ast
import contextlib
import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from lmi_config.options import spelling
from lmi_config.options.parsers import (
    Reader,
    amount,
    boolean,
    integer,
    json_object,
    positive,
    text,
)
from lmi_config.options.redaction import masked, secret
from lmi_config.options.settings import SettingsError, nearly
from lmi_config.plan import shared_store
from lmi_config.plan.shared_store import L2Store

_POLICIES = ("LRU", "ARC")
"""The eviction policies of LMCache's server. In process it has LFU, FIFO and MRU instead of ARC."""


def _milliseconds(value: str) -> int:
    return round(positive(value) * 1000)


def _policy(value: str) -> str:
    policy = value.upper()
    if policy not in (*_POLICIES, "LFU", "FIFO", "MRU"):
        raise ValueError("LRU or ARC, the policies of LMCache's server")
    return policy


def _folder(value: str) -> str:
    """Read a folder. LMI's documents write file://tmp/lmcache for /tmp/lmcache."""
    if "," in value:
        raise ValueError("one folder; the server cannot spread a tier over several")
    if value.startswith("file:"):
        value = "/" + value.removeprefix("file:")
    folder = "/" + value.lstrip("/")
    if not value.startswith("/") or folder.startswith("/~"):
        raise ValueError("an absolute path, like /tmp/lmcache")
    return str(PurePosixPath(folder))


def _written(value: object) -> str:
    """Return a value of a YAML file in the form of a variable."""
    if isinstance(value, str):
        return value.strip()
    return "" if value is None else json.dumps(value, default=str)


_count = integer(low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Vocabulary:
    """Names of options, by their treatment.

    readers: translated options → their readers.
    refused: options that must be off: name → the reason and the alternative.
    needless: patterns of options without effect → the reason.
    """

    readers: Mapping[str, Reader]
    refused: Mapping[str, str]
    needless: Mapping[str, str]

    def __contains__(self, name: str) -> bool:
        return name in self.readers or name in self.refused or self.reason(name) is not None

    def reason(self, name: str) -> str | None:
        """Return why a needless option has no effect, or None."""
        reasons = (why for it, why in self.needless.items() if fnmatchcase(name, it))
        return next(reasons, None)

    @property
    def names(self) -> list[str]:
        """The options known by their full name, in order."""
        needless = (it for it in self.needless if "*" not in it)
        return sorted((*self.readers, *self.refused, *needless))


_CONTROLLER = "there is no controller: engines share KV through OPTION_KV_L2_URL"
_STATISTICS = "chunks are not counted; /metrics has the hits of each tier"
_LAZY = "the server allocates its memory in steps if it can"
_LIMITS = "the server has its own time limits"
_PLUGINS = "plugins are not loaded; use local_disk or remote_url"
_SHARING = "engines share KV through OPTION_KV_L2_URL, not with one another"

_TOP = _Vocabulary(
    readers={
        "chunk_size": _count,
        "local_cpu": boolean,
        "max_local_cpu_size": amount,
        "local_disk": _folder,
        "max_local_disk_size": amount,
        "remote_url": text,
        "save_decode_cache": boolean,
        "cache_policy": _policy,
        "extra_config": json_object,
    },
    needless={
        "blocking_timeout_secs": _LIMITS,
        "enable_chunk_statistics": _STATISTICS,
        "enable_controller": _CONTROLLER,
        "local_cpu_use_hugepages": "the server's memory is in pages of the usual size",
        "min_retrieve_tokens": "loading is decided by its measured time",
        "numa_mode": "the server does not place its memory by NUMA node",
        "remote_serde": "the server stores KV as it is",
        "use_layerwise": "the server loads all layers at once, beside the engine's work",
        "enable_async_loading": "the server always loads without holding up the engine",
        "enable_kv_events": "OPTION_KV_EVENTS_CONFIG decides on events",
        "enable_lazy_memory_allocator": _LAZY,
        "enable_scheduler_bypass_lookup": "the scheduler asks the server itself",
        "lazy_memory_*": _LAZY,
        "lookup_server_worker_ids": "the server answers for all ranks",
        "lookup_timeout_ms": _LIMITS,
        "mp_host": "only SGLang reads it",
        "mp_port": "only SGLang reads it",
        "pin_*": _LIMITS,
        "pre_caching_hash_algorithm": "the server's hash is the same in every process",
        "py_enable_gc": "the cache is not in the engine's process",
        "reserve_local_cpu_size": "the container's memory limit is looked at instead",
        "save_unfull_chunk": "complete chunks are stored, and the rest is computed",
        "use_gpu_connector_v3": "it chooses among connectors that are not used here",
        "app_id": "it has no effect without remote_config_url",
        "blend_*": "it has no effect without enable_blending",
        "chunk_statistics_*": _STATISTICS,
        "controller_*": _CONTROLLER,
        "gds_*": "it has no effect without gds_path",
        "hidden_state*": "it has no effect without enable_hidden_state_cache",
        "internal_api_server_*": "LMCache's HTTP interface is not offered; see /metrics",
        "lmcache_*": _CONTROLLER,
        "maru_*": "it has no effect without maru_path",
        "max_hidden_state_cpu_size": "it has no effect without enable_hidden_state_cache",
        "nixl_*": "it has no effect without extra_config.enable_nixl_storage",
        "p2p_*": "it has no effect without enable_p2p",
        "pd_*": "it has no effect without enable_pd",
        "script_allowed_imports": "it has no effect without run_script_api_enabled",
        "transfer_channel": "it has no effect without enable_p2p",
        "use_gds": "it has no effect without gds_path",
    },
    refused={
        "audit_actual_remote_url": "remote stores are not audited; name the store as remote_url",
        "enable_blending": "KV is reused for equal beginnings only; switch it off",
        "enable_hidden_state_cache": "hidden states are not cached; switch it off",
        **dict.fromkeys(
            ("enable_nixl", "enable_pd", "nixl_role"),
            "prefill and decoding are split by OPTION_SERVER_ROLE; switch it off",
        ),
        "enable_p2p": _SHARING,
        "external_backends": _PLUGINS,
        "external_lookup_client": "only the server is asked about cached KV; remove it",
        "gds_path": "GPUDirect Storage is not used; give the folder as local_disk",
        "hit_miss_ratio": "hits are never turned into misses; remove it",
        "local_device": "it is local_disk by now, with max_local_disk_size",
        "local_disk_path_sharding": "there is one folder for all GPUs; remove it",
        "max_local_cache_size": "it is max_local_cpu_size or max_local_disk_size by now",
        "maru_path": "CXL memory is not used; give a folder as local_disk",
        "plugin_locations": _PLUGINS,
        "priority_limit": "requests of every priority are cached; remove it",
        "remote_config_url": "options are not fetched from elsewhere; write them here",
        "remote_storage_plugins": _PLUGINS,
        "retrieve_locations": "every tier is read; remove it",
        "run_script_api_enabled": "the cache runs no scripts; switch it off",
        "runtime_plugin_locations": _PLUGINS,
        "storage_plugins": _PLUGINS,
        "store_location": "every tier is written; remove it",
    },
)
# Values other than false and zero that leave a refused option off.
_HARMLESS = {"local_disk_path_sharding": ("by_gpu",), "local_device": ("cpu", "cuda")}


@dataclasses.dataclass(frozen=True)
class _Extra:
    """A key of extra_config: the option that uses it, and its name in an L2 adapter."""

    user: str
    read: Reader
    adapter: str | None = None


_EXTRA: Mapping[str, _Extra] = {
    "use_odirect": _Extra("local_disk", boolean),
    "fs_connector_read_ahead_size": _Extra("remote_url fs://", _count, "read_ahead_size"),
    "fs_connector_relative_tmp_dir": _Extra("remote_url fs://", text, "relative_tmp_dir"),
    "fs_connector_use_odirect": _Extra("remote_url fs://", boolean, "use_odirect"),
    "aws_access_key_id": _Extra("remote_url s3://", text),
    "aws_secret_access_key": _Extra("remote_url s3://", text),
    "disable_tls": _Extra("remote_url s3://", boolean, "disable_tls"),
    "s3_enable_s3express": _Extra("remote_url s3://", boolean, "s3_enable_s3express"),
    "s3_endpoint": _Extra("remote_url s3://", text),
    "s3_num_io_threads": _Extra("remote_url s3://", _count, "s3_num_io_threads"),
    "s3_prefer_http2": _Extra("remote_url s3://", boolean, "s3_prefer_http2"),
    "s3_region": _Extra("remote_url s3://", text),
    "password": _Extra("remote_url resp://", text),
    "resp_num_threads": _Extra("remote_url resp://", _count, "num_workers"),
    "username": _Extra("remote_url resp://", text),
    "tls_enable": _Extra("remote_url valkey://", boolean),
    "valkey_database": _Extra("remote_url valkey://", text),
    "valkey_mode": _Extra("remote_url valkey://", text),
    "valkey_num_workers": _Extra("remote_url valkey://", _count, "num_workers"),
    "valkey_sync_num_workers": _Extra("remote_url valkey://", _count, "num_workers"),
    "valkey_password": _Extra("remote_url valkey://", text),
    "valkey_username": _Extra("remote_url valkey://", text),
    **{
        f"sagemaker_hyperpod_{key}": _Extra("remote_url sagemaker-hyperpod://", read, adapter)
        for key, read, adapter in (
            ("bucket", text, "bucket"),
            ("lease_ttl_s", _milliseconds, "lease_ttl_ms"),
            ("max_concurrent_requests", _count, "max_concurrent_requests"),
            ("max_connections", _count, "max_connections"),
            ("max_connections_per_host", _count, "max_connections_per_host"),
            ("max_lease_size_mb", positive, "max_lease_size_mb"),
            ("put_stream_chunk_bytes", _count, "put_stream_chunk_bytes"),
            ("shared_memory_name", text, "shared_memory_name"),
            ("timeout_ms", _count, "timeout_ms"),
            ("use_https", boolean, "use_https"),
        )
    },
}
_EXTRA_NEEDLESS = {
    "connection_timeout": _LIMITS,
    "disk_io_threads": "the server's disk tier has its own threads",
    "request_timeout": _LIMITS,
    "save_chunk_meta": "the server's chunks need no separate description",
    "save_only_first_rank": "the server knows what the ranks have in common",
    "valkey_ttl_sec": "it has no effect without extra_config.valkey_enable_ttl",
}
_EXTRA_REFUSED = {
    "enable_nixl_storage": "NIXL is not used; give a folder as local_disk",
    "valkey_enable_ttl": "keys do not expire; let the store evict, by maxmemory-policy allkeys-lru",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disk:
    """A folder for KV on disk: its absolute path, its size in GiB, and whether to use O_DIRECT."""

    path: str
    gib: float
    odirect: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Translation:
    """Translates LMCache's in-process options for its server and for vLLM's connector.

    Sizes are for each rank of the engine, as in LMCache inside the engine: one server for N ranks
    needs N times as much.

    chunk_size: tokens (--chunk-size), or None.
    l1_gib: GiB of memory (--l1-size-gb); 0: only the memory for staging.
    disk: a tier on disk, or None.
    remote: a store that other servers may share, or None.
    skip_l1: memory is only a buffer for the tiers below (--l2-store-policy skip_l1).
    eviction: --eviction-policy.
    connector: keys for kv_connector_extra_config.
    ignored: "option: reason" for each option without effect here.
    """

    chunk_size: int | None
    l1_gib: float
    disk: Disk | None
    remote: L2Store | None
    skip_l1: bool
    eviction: str
    connector: Mapping[str, object]
    ignored: tuple[str, ...]


def merged(file: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, object]:
    """Return LMCache's options from its YAML file and its `LMCACHE_<OPTION>` variables.

    A variable replaces the file's value, extra_config as a whole. An empty variable counts as not
    set. LMCACHE_* names that are not options of LMCache's are ignored.

    Raises SettingsError for variables that cannot be read.
    """
    options = dict(file)
    faults: list[str] = []
    for name in sorted(environ):
        key = name.removeprefix("LMCACHE_").lower()
        value = _unquoted(environ[name].strip())
        if name.startswith("LMCACHE_") and key in _TOP and value:
            with _faults(faults, name, value):
                options[key] = _TOP.readers.get(key, text)(value)
    if faults:
        raise SettingsError(faults)
    return options


def misspelt(names: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each `LMCACHE_*` variable that nearly matches an option of LMCache's."""
    known = [f"LMCACHE_{it.upper()}" for it in _TOP.names]
    for name in names:
        if name.removeprefix("LMCACHE_").lower() not in _TOP:
            yield from nearly(name, name, {it: it for it in known})


_SPLIT = {"prefill": "kv_producer", "decode": "kv_consumer"}
_UNUSED_HERE = "it has no effect: LMCache is a separate server"
_OF_CONNECTOR = {
    **dict.fromkeys(
        ("engine_id", "kv_buffer_device", "kv_buffer_size", "kv_connector_module_path", "kv_ip"),
        _UNUSED_HERE,
    ),
    **dict.fromkeys(("enable_permute_local_kv", "kv_parallel_size", "kv_port"), _UNUSED_HERE),
    **dict.fromkeys(("kv_rank", "kv_parallel_rank"), _UNUSED_HERE),
    "kv_load_failure_policy": "KV that cannot be loaded is computed",
}
_EXTRA_OF_CONNECTOR = {
    "discard_partial_chunks": "complete chunks are stored, and the rest is computed",
    "lmcache_rpc_port": _UNUSED_HERE,
    "lmcache.max_tokens_per_load": "the server loads without holding up the engine",
    "skip_last_n_tokens": "complete chunks are stored, and the rest is computed",
}


class Connector(NamedTuple):
    """The result of LMCacheConnectorV1's configuration: options of LMCache, notes, and faults."""

    options: Mapping[str, object]
    notes: tuple[str, ...]
    faults: tuple[str, ...]


def of_connector(config: Mapping[str, Any], role: str) -> Connector:
    """Read vLLM's kv_transfer_config for LMCache within vLLM, as LMCache 0.5.6 does: keys of
    kv_connector_extra_config that begin with "lmcache." are LMCache options. role: the server's
    role (OPTION_SERVER_ROLE).
    """
    notes, faults = [], []
    options: dict[str, object] = {}
    for key, value in config.items():
        if key in ("kv_connector", "kv_connector_extra_config"):
            continue
        if key in _OF_CONNECTOR:
            notes.append(f"{key} in kv_transfer_config: {_OF_CONNECTOR[key]}")
        elif key != "kv_role":
            faults.append(f"vLLM has no key {key!r:.80} there; remove it")
        elif value not in ("kv_both", _SPLIT.get(role)):
            faults.append(
                f'kv_role is {value!r:.80}; make it "kv_both": prefill and decoding are split by '
                "OPTION_SERVER_ROLE"
            )
    extra = config.get("kv_connector_extra_config") or {}
    if not isinstance(extra, Mapping):
        return Connector({}, (), (*faults, "kv_connector_extra_config should be a JSON object"))
    for key, value in extra.items():
        option = key.removeprefix("lmcache.")
        if key in _EXTRA_OF_CONNECTOR:
            notes.append(f"{key} in kv_transfer_config: {_EXTRA_OF_CONNECTOR[key]}")
        elif key != option and option in _TOP:
            options[option] = value
        else:
            near = spelling.nearest(
                key, (*_EXTRA_OF_CONNECTOR, *(f"lmcache.{it}" for it in _TOP.names))
            )
            hint = f"; did you mean {near}?" if near else "; remove it"
            faults.append(f"{key!r:.80} in kv_connector_extra_config cannot be honoured{hint}")
    return Connector(options, tuple(notes), tuple(faults))


def mistyped(names: Iterable[str], strict: object) -> tuple[list[str], list[str]]:
    """Return faults and notes about variables whose prefix is nearly LMCACHE_, a sentence each.
    strict: the value of OPTION_STRICT.
    """
    known = {f"LMCACHE_{it.upper()}" for it in _TOP.names}
    told = [
        f"{name} is unknown and has no effect; did you mean {meant}?"
        for name in sorted(names)
        if (meant := spelling.other_prefix(name, ("LMCACHE_",), known))
    ]
    if strict is False:
        return [], told
    return [f"{it} (OPTION_STRICT=false ignores unknown options)" for it in told], []


def translate(config: Mapping[str, object], environ: Mapping[str, str]) -> Translation:
    """Translate LMCache's in-process options. Null counts as not set; defaults are LMCache's.

    environ: for missing parts of a store's URL.

    Raises SettingsError with every option that the server cannot honour or that does not exist.
    """
    ignored: list[str] = []
    faults: list[str] = []
    config = {str(key): value for key, value in config.items()}  # YAML's keys may be numbers
    config = _without_plugin(config)
    if _written(config.get("enable_nixl")).lower() == "false":
        config.pop("nixl_role", None)  # not used
    given = _sift(config, _TOP, "", ignored, faults)
    if given.get("max_local_cpu_size") == 0 and given.get("local_cpu", True):
        faults.append(
            "max_local_cpu_size=0: should be a number above 0, or say local_cpu: false as well"
        )
    policy = given.get("cache_policy", "LRU")
    if policy not in _POLICIES:
        ignored.append(f"cache_policy={policy}: the server has LRU and ARC, and LRU is used")
        policy = "LRU"
    folder = given.get("local_disk")
    gib = given.get("max_local_disk_size", 0.0)
    url = given.get("remote_url")
    if folder and not gib:
        ignored.append("local_disk: there is no disk tier without max_local_disk_size")
    if gib and not folder:
        ignored.append("max_local_disk_size: there is no disk tier without local_disk")
    users = {"local_disk"} if folder and gib else set()
    users |= {f"remote_url {url.partition('://')[0]}://"} if url else set()
    extra = _sift(
        given.get("extra_config", {}), _extra_vocabulary(users), "extra_config.", ignored, faults
    )
    remote = None
    if url:
        try:
            remote = _remote(url, extra, environ)
        except ValueError as error:
            faults.append(f"remote_url: {error}")
    if faults:
        raise SettingsError(faults)
    disk = None
    if folder and gib:
        disk = Disk(path=folder, gib=gib, odirect=extra.get("use_odirect", False))
    return Translation(
        chunk_size=given.get("chunk_size"),
        l1_gib=given.get("max_local_cpu_size", 5.0),
        disk=disk,
        remote=remote,
        skip_l1=not given.get("local_cpu", True),
        eviction=policy,
        connector={"lmcache.mp.save_decode_cache": True} if given.get("save_decode_cache") else {},
        ignored=tuple(ignored),
    )


def _without_plugin(config: Mapping[str, object]) -> dict[str, object]:
    """Return the options with LMCache's storage plugin "fs" for a single folder as a remote_url."""
    found = dict(config)
    extra = found.get("extra_config")
    key = "remote_storage_plugin.fs.base_path"
    if found.get("remote_storage_plugins") in ("fs", ["fs"]) and isinstance(extra, Mapping):
        folder = extra.get(key)
        if isinstance(folder, str) and "," not in folder and not found.get("remote_url"):
            del found["remote_storage_plugins"]
            found["remote_url"] = f"fs://localhost/{folder.lstrip('/')}"
            found["extra_config"] = {name: extra[name] for name in extra if name != key}
    return found


def _extra_vocabulary(users: set[str]) -> _Vocabulary:
    """Return the vocabulary of extra_config if these options are used."""
    unused = {
        key: f"it has no effect without {extra.user}"
        for key, extra in _EXTRA.items()
        if extra.user not in users
    }
    return _Vocabulary(
        readers={key: extra.read for key, extra in _EXTRA.items() if key not in unused},
        needless=_EXTRA_NEEDLESS | unused,
        refused=_EXTRA_REFUSED,
    )


def _sift(
    given: Mapping[str, object],
    known: _Vocabulary,
    prefix: str,
    ignored: list[str],
    faults: list[str],
) -> dict[str, Any]:
    """Return the values of the translated options. The others get a note."""
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = f"{prefix}{key}"
        written = _written(value)
        if not written:
            continue
        if read := known.readers.get(key):
            with _faults(faults, name, value):
                if read is text and isinstance(value, bool | list | dict):
                    raise ValueError("text")
                values[key] = read(written)
        elif key in known.refused:
            if written.lower() in ("false", "0", "0.0", "[]", *_HARMLESS.get(key, ())):
                ignored.append(f"{name}: so it is here in any case")
            else:
                faults.append(f"{name}: {known.refused[key]}")
        elif reason := known.reason(key):
            ignored.append(f"{name}: {reason}")
        elif meant := spelling.mistyped(str(key), {it: it for it in known.names}):
            faults.append(f"{name}: no such option; did you mean {meant}?")
        elif not faults and re.match(r"/|\w+://|file:", written):
            faults.append(
                f"{name}: LMCache does not know it, and its value names a place; use local_disk or "
                "remote_url, or remove it"
            )
        else:
            near = spelling.nearest(str(key), known.names)
            hint = f"; did you mean {near}?" if near else ""
            ignored.append(f"{name}: LMCache does not know it{hint}")
    return values


@contextlib.contextmanager
def _faults(faults: list[str], name: str, value: object) -> Iterator[None]:
    """Note a value that cannot be read. Values that may hold a secret are not shown."""
    try:
        yield
    except ValueError as error:
        hidden = secret(name) or name.lower().endswith(("extra_config", "remote_url"))
        shown = "(hidden)" if hidden else masked(repr(value))
        faults.append(f"{name}={shown}: should be {error}")


def _unquoted(text: str) -> str:
    """Return a value without the quotes of an env file."""
    if len(text) < 2 or text[0] != text[-1] or text[0] not in "'\"":
        return text
    try:
        return str(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        return text[1:-1]


def _remote(url: str, extra: Mapping[str, Any], environ: Mapping[str, str]) -> L2Store:
    """Return the store of a remote_url, which LMCache completes from extra_config."""
    scheme, _, rest = url.partition("://")
    env: dict[str, str] = {}
    match scheme:
        case "redis-cluster":
            url = f"redis://{rest}?cluster=true"
        case "resp":
            url = f"redis://{_with_login(rest, extra, 'username', 'password')}"
        case "valkey":
            tls = "valkeys" if extra.get("tls_enable") else "valkey"
            rest = rest.replace(" ", "").rstrip("/")  # LMCache's documents write "a:1, b:2"
            hosts = _with_login(rest, extra, "valkey_username", "valkey_password")
            database = f"/{extra['valkey_database']}" if "valkey_database" in extra else ""
            cluster = "?cluster=true" if extra.get("valkey_mode") == "cluster" else ""
            url = f"{tls}://{hosts}{database}{cluster}"
        case "fs":
            _, _, folder = rest.partition("/")
            url = f"file:///{folder}"
        case "s3":
            if "s3_region" not in extra:
                raise ValueError("s3:// needs extra_config.s3_region")
            bucket, endpoint = rest.strip("/"), extra.get("s3_endpoint")
            if endpoint is None and "." in bucket:  # LMCache's own form: the host, bucket and all
                bucket, _, endpoint = bucket.partition(".")
            query = {"region": extra["s3_region"]} | ({"endpoint": endpoint} if endpoint else {})
            url = f"s3://{bucket}?{urlencode(query)}"
            if {"aws_access_key_id", "aws_secret_access_key"} <= extra.keys():
                env["AWS_ACCESS_KEY_ID"] = extra["aws_access_key_id"]
                env["AWS_SECRET_ACCESS_KEY"] = extra["aws_secret_access_key"]
    found = shared_store.read(url, environ)
    options = {
        key.adapter: extra[name] for name, key in _EXTRA.items() if key.adapter and name in extra
    }
    return dataclasses.replace(
        found, adapter={**found.adapter, **options}, env={**found.env, **env}
    )


def _with_login(hosts: str, extra: Mapping[str, Any], user: str, password: str) -> str:
    """The part of a URL after its scheme, with extra_config's login if it has one."""
    if user not in extra and password not in extra:
        return hosts
    login = ":".join(quote(extra.get(key, ""), safe="") for key in (user, password))
    return f"{login}@{hosts.rpartition('@')[2]}"
