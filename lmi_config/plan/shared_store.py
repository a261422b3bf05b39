# SPDX-License-Identifier: Apache-2.0
"""A store of KV caches that instances share: its URL → LMCache's configuration.

The facts are those of LMCache 0.5.6.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from lmi_config.options.parsers import Reader, boolean, positive, text


@dataclasses.dataclass(frozen=True, kw_only=True)
class L2Store:
    """A store behind the cache server's memory, in the server's configuration.

    kind: the adapter's name, LMCache's or ours.
    adapter: LMCache's JSON object for it, which may have a password in it.
    env: variables for the server's process, including secrets.
    shown: the URL, with its password masked.
    note: a note for the operator, or "".
    """

    kind: str
    adapter: Mapping[str, object] = dataclasses.field(repr=False)
    env: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    shown: str
    note: str = ""

    @property
    def masked(self) -> dict[str, object]:
        """Return `adapter` with secrets masked."""
        return {key: "***" if key == "password" else self.adapter[key] for key in self.adapter}

    @property
    def place(self) -> dict[str, object]:
        """Return the parts of `adapter` that locate the store, without secrets and without values
        that differ between servers.
        """
        own = {"username", "password", "max_capacity_gb", "eviction"}
        return {key: value for key, value in self.adapter.items() if key not in own}

    @property
    def capacity(self) -> int | None:
        """The store's bytes, or None if unknown."""
        gib = self.adapter.get("max_capacity_gb")
        return round(gib * (1 << 30)) if isinstance(gib, int | float) else None


_HOSTS = re.compile(r"[\w.-]+:\d{1,5}(,[\w.-]+:\d{1,5})*", re.ASCII)


def read(url: str, environ: Mapping[str, str]) -> L2Store:
    """Read the URL of an L2 store. Missing parts come from the environment: an S3 URL's region from
    AWS_REGION or AWS_DEFAULT_REGION, the node's address from NODE_IP.

    `redis://[user:password@]host[:6379][/database]`, `valkey://…`: Redis or Valkey, through
        Valkey's client, because LMCache's own for `resp` hangs on an evicted key and does not
        reconnect. A password's special characters are percent-encoded. `host:6379` alone means
        `redis://host:6379`, as in AWS's HyperPod notebooks.
    `rediss://…`, `valkeys://…`: the same with TLS.
    `redis://host,host`, or one host and `?cluster=true`, in each of the four: a cluster.
    `s3://bucket?region=…`: S3, with boto3's credentials. `endpoint` is the host of a compatible
        service, with `http://` before it if it has no TLS; it must answer to `bucket.endpoint`.
    `file:///folder`: a folder that several servers may share.
    `tieredstorage://[host[:9200]]`, `sagemaker-hyperpod://…`: HyperPod's daemon on this node. A
        missing host, or `$NODE_IP`, means the value of NODE_IP. `bucket` is the daemon's name of a
        set of keys, and `shared_memory_name` that of its memory segment.

    `capacity_gb`, in GiB, makes the server evict KV, in all stores except HyperPod's.

    Raises ValueError with one sentence. It never repeats a possible part of a password.
    """
    url = url.strip()
    if _HOSTS.fullmatch(url):
        url = f"redis://{url}"
    scheme, found, _ = url.partition("://")
    reader = _STORES.get(scheme.lower())
    if not found or reader is None:
        known = ", ".join(f"{name}://" for name in _STORES)
        raise ValueError(f"should be a URL that begins with one of {known}")
    try:
        parts = urlsplit(url)
        if parts.fragment or (parts.scheme != "file" and "@" in parts.path + parts.query):
            raise ValueError
    except ValueError:  # urlsplit's own message may repeat the password
        raise ValueError(
            "characters that mean something in a URL, like / ? # [, must be percent-encoded in "
            "a password or a path: %2F for /"
        ) from None
    return reader(parts, environ)


def _query(parts: SplitResult, **readers: Reader) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in parse_qsl(parts.query, keep_blank_values=True):
        if key not in readers:
            raise ValueError(
                f"{parts.scheme}:// has no query key {key!r}, only {', '.join(readers)}"
            )
        try:
            if not value.strip():
                raise ValueError("text, not nothing")
            found[key] = readers[key](value)
        except ValueError as error:
            raise ValueError(f"{key}={value!r} should be {error}") from None
    return found


def _addresses(parts: SplitResult, hosts: str, port: int) -> list[tuple[str, int]]:
    """Return the host and port of each host. port: the default."""
    found: list[tuple[str, int]] = []
    for address in hosts.split(","):
        host, colon, number = address.partition(":")
        if not re.fullmatch(r"[A-Za-z0-9._-]+", host):
            raise ValueError(
                f"{parts.scheme}:// needs a host, like {parts.scheme}://cache.example:{port}"
            )
        # The text here may be a password without a host after it, so it is not repeated.
        if colon and not (re.fullmatch(r"\d{1,5}", number) and 1 <= int(number) <= 65535):
            raise ValueError(f"the port after {host} should be a number from 1 to 65535")
        found.append((host, int(number or port)))
    return found


def _without_login(parts: SplitResult) -> None:
    if "@" in parts.netloc:
        raise ValueError(f"{parts.scheme}:// takes no user or password; leave them out")


_COUNTED = (
    "capacity_gb limits the bytes that this server stores after its start; older data and data of "
    "other servers are neither counted nor removed"
)


def _bounded(adapter: dict[str, object], capacity: float | None) -> dict[str, object]:
    # Without an eviction block, LMCache only counts bytes.
    limit = {"max_capacity_gb": capacity, "eviction": {"eviction_policy": "LRU"}}
    return adapter | limit if capacity else adapter


def _redis(parts: SplitResult, environ: Mapping[str, str]) -> L2Store:
    del environ  # the URL has everything
    scheme = parts.scheme
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, password = (unquote(part) for part in login.partition(":"))
    if login and not password:
        raise ValueError(f"{scheme}:// has a user without a password: write user:password@host")
    addresses = _addresses(parts, hosts, 6379)
    query = _query(parts, cluster=boolean, capacity_gb=positive)
    cluster = query.get("cluster", len(addresses) > 1)
    if len(addresses) > 1 and not cluster:
        raise ValueError(f"{scheme}:// with several hosts is a cluster: drop cluster=false")
    path = parts.path.strip("/")
    if path and not re.fullmatch(r"\d{1,9}", path):
        raise ValueError(f"the path after {scheme}://{hosts} should be a database number, like /0")
    database = int(path or 0)
    if database and cluster:
        raise ValueError(f"{scheme}:// only supports database 0 of a cluster, not {database}")
    capacity = query.get("capacity_gb")
    nodes = ",".join(f"{host}:{port}" for host, port in addresses)
    adapter: dict[str, object] = {"type": "valkey", "startup_nodes": nodes}
    adapter |= {"tls_enable": True} if scheme in ("rediss", "valkeys") else {}
    adapter |= {"cluster_mode": True} if cluster else {}
    adapter |= {"database_id": database} if database else {}
    adapter |= {"username": user} if user else {}
    adapter |= {"password": password} if password else {}
    masked = f"{login.partition(':')[0]}:***@{hosts}" if login else hosts
    return L2Store(
        kind=str(adapter["type"]),
        adapter=_bounded(adapter | {"shared": True}, capacity),
        shown=parts._replace(netloc=masked).geturl(),
        note=_COUNTED if capacity else "",
    )


def _s3(parts: SplitResult, environ: Mapping[str, str]) -> L2Store:
    """Return an S3 store. LMCache accesses a bucket by the bucket's host name, and puts its keys at
    the top level.
    """
    _without_login(parts)
    query = _query(parts, region=text, endpoint=text, capacity_gb=positive)
    bucket, endpoint = parts.netloc, query.get("endpoint")
    if endpoint is None and re.search(r"\.amazonaws\.com(\.cn)?$", bucket):
        bucket, _, endpoint = bucket.partition(".")
    if not bucket:
        raise ValueError("s3:// needs a bucket, like s3://my-bucket?region=us-east-1")
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]", bucket):
        raise ValueError(
            "s3:// takes a bucket named with 3 to 63 lower-case letters, digits and dashes; a dot "
            "does not work, because the bucket becomes a part of the host's name"
        )
    if parts.path.strip("/"):
        raise ValueError(f"s3://{bucket} takes no prefix: LMCache writes to the bucket's top level")
    region = query.get("region") or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    if not region:
        raise ValueError("s3:// needs a region: add ?region=us-east-1, or set AWS_REGION")
    domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    match = re.fullmatch(
        r"(?:(https?)://)?([A-Za-z0-9.-]+(?::\d+)?)/?", endpoint or f"s3.{region}.{domain}"
    )
    if not match or re.fullmatch(r"[\d.]+(:\d+)?", match[2]):
        raise ValueError(
            "the S3 endpoint should be the name of a host, not an address or a path, like "
            "s3.us-east-1.amazonaws.com or http://minio.example:9000"
        )
    host = match[2].removeprefix(f"{bucket}.")
    adapter: dict[str, object] = {
        "type": "s3",
        "s3_endpoint": f"{bucket}.{host}",
        "s3_region": region,
        "shared": True,
    }
    adapter |= {"disable_tls": True} if match[1] == "http" else {}
    capacity = query.get("capacity_gb")
    return L2Store(
        kind="s3",
        adapter=_bounded(adapter, capacity),
        shown=parts.geturl(),
        note=_COUNTED if capacity else "",
    )


def _file(parts: SplitResult, _: Mapping[str, str]) -> L2Store:
    if parts.netloc:
        raise ValueError("file:// takes no host: write three slashes, like file:///mnt/kv")
    path = PurePosixPath("/" + unquote(parts.path).lstrip("/"))
    if path == PurePosixPath("/"):
        raise ValueError("file:// needs a folder, like file:///mnt/kv")
    capacity = _query(parts, capacity_gb=positive).get("capacity_gb")
    adapter: dict[str, object] = {"type": "fs_native", "base_path": str(path), "shared": True}
    kept = "old files are not removed: set capacity_gb, or clean the folder from outside"
    return L2Store(
        kind="fs_native",
        adapter=_bounded(adapter, capacity),
        shown=parts.geturl(),
        note=_COUNTED if capacity else kept,
    )


SEGMENT = "ai_toolkit_cache"
"""The shared memory of HyperPod's daemon. (awslabs/ai-on-sagemaker-hyperpod, "HyperPod Managed KV
Cache with LMCache"; LMCache's own default is another name, which no node has.)"""
_NODE_IP = ("", "$NODE_IP", "${NODE_IP}", "$(NODE_IP)")
"""Hosts that mean this node, as in LMCache's and AWS's documentation."""


def _hyperpod(parts: SplitResult, environ: Mapping[str, str]) -> L2Store:
    _without_login(parts)
    scheme = parts.scheme
    host, colon, rest = parts.netloc.partition(":")
    if host in _NODE_IP:
        host = environ.get("NODE_IP", "").strip()
        if not host:
            raise ValueError(
                f"{scheme}:// without a host means this node's daemon: set NODE_IP, in Kubernetes "
                "from the field status.hostIP, or name the host"
            )
    ((host, port), *others) = _addresses(parts, host + colon + rest, 9200)
    if others or parts.path.strip("/"):
        raise ValueError(f"{scheme}:// takes one host and port, without a path")
    address = f"{host}:{port}"
    return L2Store(
        kind="tieredstorage",
        adapter={
            "type": "tieredstorage",
            "url": f"sagemaker-hyperpod://{address}",
            "shared_memory_name": SEGMENT,
            **_query(parts, bucket=text, shared_memory_name=text),
        },
        shown=parts._replace(netloc=address).geturl(),
    )


_STORES: Mapping[str, Callable[[SplitResult, Mapping[str, str]], L2Store]] = {
    "redis": _redis,
    "rediss": _redis,
    "valkey": _redis,
    "valkeys": _redis,
    "s3": _s3,
    "file": _file,
    "tieredstorage": _hyperpod,
    "sagemaker-hyperpod": _hyperpod,
}
