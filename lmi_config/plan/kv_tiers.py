# SPDX-License-Identifier: Apache-2.0
"""KV cache tiers beside the engine's own memory: sizes, LMCache's arguments, the reasons.

Tiers: L1 is memory of LMCache's server; L2 is a folder on this machine's disk, or a store that
instances share. A tier that would be too small to help is left out, and the reason is reported.
"""

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lmi_config.facts.machine import Machine
from lmi_config.facts.model import ModelFacts
from lmi_config.options.declared import Settings
from lmi_config.options.settings import SettingsError
from lmi_config.plan import lmcache, shared_store
from lmi_config.plan.attention.verdict import WINDOWS_ONLY, Verdict
from lmi_config.plan.devices.parallelism import Parallelism
from lmi_config.plan.lmcache import Translation
from lmi_config.plan.memory import GIB, SHARED_MEMORY, Budget, kv_per_token
from lmi_config.plan.shared_store import L2Store

_REMOTE = ("LMCACHE_REMOTE_URL", "LMCACHE_REMOTE_SERDE", "LMCACHE_EXTRA_CONFIG")
"""Variables of HyperPod's operator that name the shared store. Its other settings, such as sizes,
are for LMCache inside vLLM. (LMCache's blog, "LMCache on Amazon SageMaker HyperPod", April 2026.)
"""
POLICY, POLICY_SKIPPING_L1 = "slipway", "slipway_skip_l1"
SHARED_STORE = "SLIPWAY_SHARED_STORE"
"""The registered names of Slipway's parts in LMCache's server."""
STORES = {"native_plugin": "disk", "fs_native": "folder"}
"""LMCache's names of stores that mean nothing to an operator → our names."""
IN_PROCESS = "LMCacheConnectorV1"
"""The connector that LMI's users name. It is deprecated, and does not run without a GPU."""
_IN_PROCESS = (IN_PROCESS, "LMCacheConnectorV1Dynamic", "LMCacheConnector")
"""The same connector, also by the names of LMCache's copy of it and of older versions of vLLM."""
TRANSFERRING = "NixlConnector"
"""vLLM's connector that fetches KV from the engine that computed it."""
SIDE_CHANNEL = "VLLM_NIXL_SIDE_CHANNEL_HOST"
"""vLLM's variable for the host of its handshake with other engines; localhost if it is not set."""

ENGINE_COPIES = {"lmcache.mp.mp_transfer_mode": "engine_driven"}
"""The engine copies KV, with any value of LMCACHE_MP_TRANSFER_MODE. A cache server copies later,
when vLLM may have reused blocks that left a window. On CPUs this gave wrong answers.
"""
GPU_CHUNK_SIZE = 256
"""Tokens of a chunk, the unit of storage and look-up; LMCache's default."""
CPU_CHUNK_SIZE = 128
"""Without a GPU chunks are smaller, because a partial chunk must be computed: up to 0.1 s for 128
tokens of a small model.
"""
CPU_BLOCK_SIZE = 128
GPU_BLOCK_SIZE = 16
"""vLLM's default of block_size, in tokens."""
LATENT_BLOCK_SIZE = 128
"""vLLM's largest block for latent attention on GPUs. Kinds of GPUs have different sizes, which all
divide this one (get_supported_kernel_block_sizes in vllm/v1/attention/backends/mla).
"""

SMALLEST_L1 = GIB // 4
SMALLEST_DISK = GIB
DOCUMENT = 10_000
"""Tokens of a long document, as a unit of a cache's capacity."""
DISK_MARGIN = 0.1
"""The share of the disk that stays free."""
COMPILED = 2 * GIB
"""Reserved space on the same disk for vLLM's compiled code and for logs."""
_STEP = GIB // 8
_POOL = "lmcache_l1_pool_"  # the prefix of LMCache's files in /dev/shm
LAZY = 20
"""GiB of the pool that LMCache allocates at its start; LMCache's default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskTier:
    """A folder on this machine's own disk. size: bytes. direct: whether it uses O_DIRECT."""

    path: str
    size: int
    direct: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiers:
    """The tiers beside the engine's memory.

    l1: bytes. reasons: the reason for each size or absence, by "l1", "disk", "chunk_size".
    """

    l1: int
    disk: DiskTier | None = None
    shared: L2Store | None = None
    chunk_size: int
    skip_l1: bool = False
    eviction: str = "LRU"
    connector: Mapping[str, object] = dataclasses.field(default_factory=dict)
    reasons: Mapping[str, str]
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class NoTiers:
    """Only the engine's own memory keeps KV caches. reason: why. word: the same for a metric:
    "not_asked", "attention" (tiers are not correct for it), "no_room", or "failed".
    """

    reason: str
    word: str = "no_room"


def wanted(settings: Settings) -> bool:
    """Whether LMCache's server must run."""
    return bool(
        settings.lmcache_auto_config
        or settings.lmcache_config_file
        or settings.kv_l2_url
        or settings.lmcache.keys() & {_REMOTE[0]}
        or _manual(settings)
    )


def asked_by(settings: Settings) -> str:
    """Return the options that name explicit tiers, which may be none."""
    if settings.lmcache_config_file:
        return settings.named("lmcache_config_file")
    if settings.kv_l2_url:
        return settings.named("kv_l2_url")
    if settings.lmcache.keys() & {_REMOTE[0]}:
        return _REMOTE[0]
    return settings.named("kv_transfer_config") if _manual(settings) else ""


def lmcaches_own(settings: Settings) -> bool:
    """Whether kv_transfer_config names a connector of LMCache's that runs unchanged."""
    told = json.dumps(settings.kv_transfer_config or {})
    return '"LMCache' in told and not _manual(settings)


def _manual(settings: Settings) -> bool:
    """Whether kv_transfer_config is LMI's manual mode: LMCache within vLLM, which Slipway runs as a
    server. Its other keys are translated, noted or refused by name (lmcache.of_connector).
    """
    config = settings.kv_transfer_config or {}
    module = config.get("kv_connector_module_path") or "lmcache."
    ours = isinstance(module, str) and module.startswith("lmcache.")
    return ours and config.get("kv_connector") in _IN_PROCESS and bool(config.get("kv_role"))


def _connector(settings: Settings) -> lmcache.Connector:
    """The other settings of LMI's connector."""
    if not _manual(settings):
        return lmcache.Connector({}, (), ())
    return lmcache.of_connector(settings.kv_transfer_config or {}, settings.server_role)


def faults(settings: Settings) -> list[str]:
    """Contradictions among the options for KV caches."""
    found = []
    if wanted(settings) and settings.engine.get("nnodes", 1) > 1:
        found.append(
            f"OPTION_NNODES={settings.engine['nnodes']}: KV cache tiers serve the ranks of one "
            "machine; leave OPTION_NNODES out, or the options for tiers"
        )
    if settings.lmcache_auto_config and settings.lmcache_config_file:
        found.append(
            "OPTION_LMCACHE_AUTO_CONFIG and OPTION_LMCACHE_CONFIG_FILE exclude each other; leave "
            "the file out, or set OPTION_LMCACHE_AUTO_CONFIG=false"
        )
    if settings.server_role != "both" and not settings.router_secret:
        found.append(
            f"{_role(settings)} needs OPTION_ROUTER_SECRET, here and at the router: by it the "
            "server knows which prompts the router has it compute for others"
        )
    config = settings.kv_transfer_config
    if config is not None and "kv_connector" in config and "kv_role" not in config:
        found.append(
            'OPTION_KV_TRANSFER_CONFIG: has a kv_connector but no kv_role; add "kv_role":"kv_both"'
        )
    elif config is not None and _manual(settings):
        name = settings.named("kv_transfer_config")
        found += [f"{name}: {fault}" for fault in _connector(settings).faults]
    elif config is not None and wanted(settings):
        found.append(
            "OPTION_KV_TRANSFER_CONFIG names a connector of its own, and Slipway's KV cache tiers "
            "would need another; leave it out, or the options for tiers"
        )
    return found


def transfers(settings: Settings) -> bool:
    """Whether a server with a role hands KV over with vLLM's connector, without a store."""
    config = settings.kv_transfer_config or {}
    return settings.server_role != "both" and config.get("kv_connector") == TRANSFERRING


def transfer_findings(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """Notes for the operator about servers that fetch KV from each other."""
    if not transfers(settings) or settings.server_role != "prefill" or SIDE_CHANNEL in environ:
        return []
    return [
        f"{SIDE_CHANNEL} is not set, so only servers on this machine can fetch KV from this one; "
        "set it to the name or address at which the others reach it"
    ]


def _role(settings: Settings) -> str:
    return f"{settings.named('server_role')}={settings.server_role}"


def handover_faults(settings: Settings, tiers: "Tiers | NoTiers") -> list[str]:
    """Return why a server with a role can never hand KV over. Without room for tiers it still
    serves, and the router reports that it shares nothing.
    """
    if transfers(settings):
        if (settings.kv_transfer_config or {}).get("kv_load_failure_policy") == "recompute":
            return []
        return [
            f"OPTION_KV_TRANSFER_CONFIG: with {_role(settings)} it needs "
            '"kv_load_failure_policy":"recompute"; without it vLLM fails requests whose KV cannot '
            "be fetched"
        ]
    shares = tiers.shared is not None if isinstance(tiers, Tiers) else wanted(settings)
    if settings.server_role == "both" or shares:
        return []
    return [
        f"{_role(settings)}: KV is handed over through a shared store, and there is none; name the "
        f"same OPTION_KV_L2_URL on all servers, or {TRANSFERRING} in OPTION_KV_TRANSFER_CONFIG"
    ]


def plan(
    settings: Settings,
    machine: Machine,
    parallelism: Parallelism,
    model: ModelFacts,
    budget: Budget,
    environ: Mapping[str, str],
    file: Mapping[str, object] | None,
    to_fetch: int,
    verdict: Verdict,
) -> Tiers | NoTiers:
    """Size the tiers.

    verdict: whether they are correct for the model; if not, automatic tiers are left out. budget:
    includes the cache server. file: the content of LMCache's configuration file, or None. to_fetch:
    bytes of models that must still be downloaded to the disk of the disk tier.

    Raises SettingsError for a configuration that is not possible, or does not fit.
    """
    if not wanted(settings):
        return NoTiers("off; OPTION_LMCACHE_AUTO_CONFIG=true turns them on", "not_asked")
    if verdict.against:
        if name := asked_by(settings):
            raise SettingsError(
                [f"{name}: no KV cache tiers: {verdict.against}; {verdict.instead}"]
            )
        return NoTiers(f"left out: {verdict.against}", "attention")
    if len(machine.ports) < len(Ports._fields):
        raise SettingsError(
            [
                f"SAGEMAKER_SAFE_PORT_RANGE={environ.get('SAGEMAKER_SAFE_PORT_RANGE')!r}: KV cache "
                f"tiers need three free ports, and there are {len(machine.ports)}"
            ]
        )
    shared = None
    if settings.kv_l2_url:
        try:
            shared = shared_store.read(settings.kv_l2_url, environ)
        except ValueError as error:
            raise SettingsError([f"OPTION_KV_L2_URL: {error}"]) from None
    translation = _translated(settings, file, environ)
    if translation is None and not shared:
        named = {name: settings.lmcache[name] for name in _REMOTE if name in settings.lmcache}
        shared = lmcache.translate(lmcache.merged({}, named), environ).remote
    if translation is None:
        found = _automatic(settings, machine, model, budget, shared, to_fetch)
    else:
        with _located(settings):
            found = _manually(translation, settings, machine, model, budget, parallelism, shared)
    if isinstance(found, NoTiers):
        return found
    connector = dict(found.connector)
    if verdict.kind == WINDOWS_ONLY and not machine.gpus:
        connector |= ENGINE_COPIES
    said = _connector(settings)
    notes = [*found.notes, *said.notes, *verdict.tell]
    if translation is None:
        by = "OPTION_LMCACHE_AUTO_CONFIG" if settings.lmcache_auto_config else "automatic sizes"
        notes += [f"lmcache.{it} in kv_transfer_config: overridden by {by}" for it in said.options]
    return dataclasses.replace(found, connector=connector, notes=tuple(notes))


def disk_path(
    settings: Settings, environ: Mapping[str, str], file: Mapping[str, object] | None
) -> str:
    """Return the folder of the disk tier, whose disk machine.look() then measures.

    environ, file: as for plan(). Raises SettingsError as plan() does.
    """
    translation = None if faults(settings) else _translated(settings, file, environ)
    if translation and translation.disk:
        return translation.disk.path
    return settings.kv_disk_path


def _translated(
    settings: Settings, file: Mapping[str, object] | None, environ: Mapping[str, str]
) -> Translation | None:
    """LMCache's own configuration, or None. The connector's settings take precedence, then
    variables, then the file, as in LMCache.
    """
    if file is None and not (_manual(settings) and not settings.lmcache_auto_config):
        return None
    options = lmcache.merged(file or {}, settings.lmcache)
    with _located(settings):
        return lmcache.translate({**options, **_connector(settings).options}, environ)


@contextlib.contextmanager
def _located(settings: Settings) -> Iterator[None]:
    """Add to faults of LMCache's options where the option was set."""
    try:
        yield
    except SettingsError as error:
        raise SettingsError([_where(settings, it) + it for it in error.faults]) from None


def _where(settings: Settings, fault: str) -> str:
    key = re.split(r"[^\w]", fault, maxsplit=1)[0]
    variable = f"LMCACHE_{key.upper()}"
    if key in _connector(settings).options:
        return f"{settings.named('kv_transfer_config')}: "
    if variable in settings.lmcache:
        return f"{variable}: "
    file = settings.lmcache_config_file
    of_file = file and not key.startswith("OPTION_")
    return f"{settings.named('lmcache_config_file')}={file}: " if of_file else ""


def _automatic(
    settings: Settings,
    machine: Machine,
    model: ModelFacts,
    budget: Budget,
    shared: L2Store | None,
    to_fetch: int,
) -> Tiers | NoTiers:
    chunk, of_chunk = _chunk_size(machine, span(settings, machine, model))
    least = max(SMALLEST_L1, _document(settings, model))
    if budget.free // _STEP * _STEP < least:
        return NoTiers(
            f"left out: {format_size(budget.free)} are left of "
            f"{format_size(machine.memory_free)} free memory, and less than {format_size(least)} "
            "would not help"
        )
    disk, reason = _disk(machine, to_fetch, settings.kv_disk_size)
    if settings.kv_l1_size == 0 and not (disk or shared):
        return NoTiers(f"OPTION_KV_L1_SIZE=0, and there is no shared store; the disk: {reason}")
    l1, of_l1 = _l1(budget.free, least, settings.kv_l1_size)
    notes = [shared.note] if shared and shared.note else []
    if disk and machine.disk.kind == "overlay":
        notes.append(
            f"{machine.disk.path} is on the container's own layer, which is slow; mount a disk "
            "there, or set OPTION_KV_DISK_PATH"
        )
    taken = set() if settings.kv_l2_url else {*_REMOTE}
    if names := sorted(settings.lmcache.keys() - taken)[:3]:
        by = "OPTION_LMCACHE_AUTO_CONFIG" if settings.lmcache_auto_config else "automatic sizes"
        notes.append(f"{', '.join(names)}: overridden by {by}")
    return Tiers(
        l1=l1,
        disk=disk,
        shared=shared,
        chunk_size=chunk,
        reasons={
            "chunk_size": of_chunk,
            "l1": of_l1,
            "disk": reason,
        },
        skip_l1=settings.kv_l1_size == 0,
        notes=tuple(notes),
    )


def block_size(settings: Settings, machine: Machine) -> int:
    """Return the tokens of a block of the engine's KV cache."""
    asked: int | None = settings.engine.get("block_size")
    return asked or (GPU_BLOCK_SIZE if machine.gpus else CPU_BLOCK_SIZE)


def span(settings: Settings, machine: Machine, model: ModelFacts) -> int:
    """Return the tokens of an engine's block over all ranks that share a sequence. A chunk must be
    a multiple of them (LMCacheMPConnector).
    """
    block = block_size(settings, machine)
    if machine.gpus and model.latent and "block_size" not in settings.engine:
        block = LATENT_BLOCK_SIZE
    ranks: int = settings.engine.get("decode_context_parallel_size") or 1
    return block * ranks


def _chunk_size(machine: Machine, block: int) -> tuple[int, str]:
    """Return the default tokens of a chunk, and the reason."""
    usual = GPU_CHUNK_SIZE if machine.gpus else CPU_CHUNK_SIZE
    multiple = f"a multiple of the engine's block of {block} tokens"
    return math.ceil(usual / block) * block, multiple


def _l1(free: int, least: int, asked: int | None) -> tuple[int, str]:
    """Return the cache server's share of the free bytes of memory, and the reason."""
    if asked is None:
        return (
            free // _STEP * _STEP,
            "the rest, all allocated at the start",
        )
    if asked == 0:
        return least, "OPTION_KV_L1_SIZE=0: data in flight to the disk or the shared store"
    if not least <= asked <= free:
        raise SettingsError(
            [
                f"OPTION_KV_L1_SIZE: is {format_size(asked)}; the engine leaves "
                f"{format_size(free)}, and less than {format_size(least)} would not help"
            ]
        )
    return asked, "OPTION_KV_L1_SIZE, all allocated at the start"


def _document(settings: Settings, model: ModelFacts) -> int:
    """Return the bytes of KV of a long document, or of the longest prompt if that is shorter."""
    tokens = min(DOCUMENT, model.max_length or DOCUMENT)
    return tokens * (kv_per_token(settings, model) or 0)


def _disk(machine: Machine, to_fetch: int, asked: int | None) -> tuple[DiskTier | None, str]:
    """Return the disk tier with the requested size, or as large as possible, and the reason."""
    disk = machine.disk
    if asked == 0:
        return None, "left out: OPTION_KV_DISK_SIZE=0"
    if disk.in_memory:
        return None, f"left out: {disk.path} is a {disk.kind}, which is memory; mount a disk there"
    kept = round(DISK_MARGIN * disk.total) + COMPILED + to_fetch
    size = max(disk.free - kept, 0) // GIB * GIB
    if size < SMALLEST_DISK:
        return None, (
            f"left out: {format_size(disk.free)} are free on {disk.path}, of which "
            f"{format_size(kept)} are kept for other files"
        )
    direct = "O_DIRECT" if disk.direct else "no O_DIRECT"
    room = f"{format_size(disk.free)} free ({disk.kind}, {direct})"
    reason = f"{room}, {format_size(kept)} kept for other files"
    if asked is not None:
        if asked > disk.free:
            raise SettingsError(
                [f"OPTION_KV_DISK_SIZE: is {format_size(asked)}, and {disk.path} has {room}"]
            )
        size, reason = asked, f"OPTION_KV_DISK_SIZE; {room}"
    return DiskTier(path=disk.path, size=size, direct=disk.direct), reason


def _manually(
    translation: Translation,
    settings: Settings,
    machine: Machine,
    model: ModelFacts,
    budget: Budget,
    parallelism: Parallelism,
    shared: L2Store | None,
) -> Tiers:
    """Return the tiers of LMCache's own configuration, after a check that they fit the machine."""
    ranks = parallelism.all_workers
    each = f" for each of {ranks} ranks" if ranks > 1 else ""
    found = []
    l1, of_l1 = round(translation.l1_gib * GIB) * ranks, f"max_local_cpu_size{each}"
    if not l1:
        l1 = max(SMALLEST_L1, _document(settings, model))
        of_l1 = "max_local_cpu_size=0: data in flight to the disk or the shared store"
        if not (translation.disk or translation.remote or shared):
            found.append(
                "max_local_cpu_size=0: KV would be kept nowhere; give it a size, or name a "
                "local_disk or remote_url"
            )
    if l1 > budget.free:
        found.append(
            f"max_local_cpu_size: {translation.l1_gib:g} GiB for each of {ranks} ranks need "
            f"{format_size(l1)} of memory, and the engine leaves {format_size(budget.free)}"
        )
    notes = list(translation.ignored)
    wanted, disk, reason = translation.disk, None, "left out: not asked for"
    if wanted and machine.disk.in_memory:
        reason = (
            f"left out: {wanted.path} is a {machine.disk.kind}, which is memory; name a "
            "folder on a disk as local_disk"
        )
        notes.append(f"no disk tier: {reason}")
    elif wanted:
        size = round(wanted.gib * GIB) * ranks
        disk = DiskTier(path=wanted.path, size=size, direct=wanted.odirect and machine.disk.direct)
        reason = f"max_local_disk_size{each}"
        if size > machine.disk.free:
            found.append(
                f"max_local_disk_size: {wanted.gib:g} GiB for each of {ranks} ranks need "
                f"{format_size(size)} on {wanted.path}, and {format_size(machine.disk.free)} are "
                "free"
            )
        if wanted.odirect and not disk.direct:
            notes.append(f"use_odirect: {wanted.path} refuses it; written through the page cache")
    if shared and translation.remote:
        found.append("OPTION_KV_L2_URL and remote_url both name a shared store; keep one")
    chunk, of_chunk = translation.chunk_size, "chunk_size"
    block = span(settings, machine, model)
    if not chunk:
        chunk, of_chunk = _chunk_size(machine, block)
    elif chunk % block:
        found.append(
            f"chunk_size: {chunk} tokens are no multiple of the engine's block of {block}, which "
            f"LMCache refuses; set it to {math.ceil(chunk / block) * block}"
        )
    if found:
        raise SettingsError(found)
    return Tiers(
        l1=l1,
        disk=disk,
        shared=shared or translation.remote,
        chunk_size=chunk,
        skip_l1=translation.skip_l1,
        eviction=translation.eviction,
        connector=translation.connector,
        reasons={
            "l1": of_l1,
            "disk": reason,
            "chunk_size": of_chunk,
        },
        notes=tuple(notes),
    )


class Ports(NamedTuple):
    """The cache server's ports: for the engine, for its API, and for its metrics."""

    engine: int
    http: int
    prometheus: int


def ports(machine: Machine) -> Ports:
    """The cache server's ports, from the machine's free ones."""
    return Ports(*machine.ports[: len(Ports._fields)])


EVENTS = 4096
"""Events of a cache server that a router can read again after a lost connection. An event has the
tokens of a chunk, so these take about 5 MiB with chunks of 256 tokens. LMCache keeps 32,768.
"""


def server_arguments(
    tiers: Tiers, machine: Machine, disk_store: str, *, servers: int = 1, events: bool = False
) -> list[str]:
    """Return the command line of `lmcache`. Its ports are only open to this machine.

    disk_store: the path of the class for the disk tier's files, as `module.Class`. servers: the
    number of servers that it serves. events: whether a router follows them. Sizes are in GiB, which
    LMCache calls GB (`size_gb * (1 << 30)` in its configuration).
    """
    engine, http, prometheus = ports(machine)
    arguments = [
        "server",
        "--host=127.0.0.1",
        f"--port={engine}",
        "--http-host=127.0.0.1",
        f"--http-port={http}",
        f"--prometheus-port={prometheus}",
        f"--chunk-size={tiers.chunk_size}",
        f"--l1-size-gb={tiers.l1 / GIB:.10g}",
        f"--eviction-policy={tiers.eviction}",
        f"--l2-prefetch-policy={POLICY}",
        f"--kv-event-log-size={EVENTS if events else 0}",
    ]
    if machine.gpus and tiers.l1 >= GIB:
        # LMCache allocates this much of the pool at its start, and the rest when needed; only
        # whole GiB.
        arguments.append(f"--l1-init-size-gb={min(tiers.l1 // GIB, LAZY)}")
    else:
        arguments.append("--no-l1-use-lazy")
    if not machine.gpus:
        arguments.append("--supported-transfer-mode=auto")
    if servers > 1:
        # With one thread, a long store of one server would delay the loads of the others.
        arguments += [f"--max-gpu-workers={servers}", f"--max-cpu-workers={servers}"]
    if pool := shared_pool(tiers, machine):
        arguments.append(f"--shm-name={pool.name.removeprefix(_POOL)}")
    skip = tiers.skip_l1 and (tiers.disk or tiers.shared)
    arguments.append(f"--l2-store-policy={POLICY_SKIPPING_L1 if skip else POLICY}")
    if tiers.disk:
        module, _, name = disk_store.rpartition(".")
        disk = {
            "type": "native_plugin",
            "module_path": module,
            "class_name": name,
            "adapter_params": {"path": tiers.disk.path, "direct": tiers.disk.direct},
            "max_capacity_gb": tiers.disk.size / GIB,
            "eviction": {"eviction_policy": "LRU"},  # without it the capacity is no limit
        }
        arguments.append(f"--l2-adapter={json.dumps(disk, separators=(',', ':'))}")
    return arguments


def shared_pool(tiers: Tiers, machine: Machine) -> Path | None:
    """Return the file of L1 if it is in shared memory, which is twice as fast as sending, or None.

    With GPUs, LMCache copies between them and its own memory instead.
    """
    if machine.gpus or machine.shm < tiers.l1 + SHARED_MEMORY:
        return None
    return Path("/dev/shm") / f"{_POOL}slipway-{ports(machine).engine}"


def server_environment(tiers: Tiers) -> dict[str, str]:
    """Return variables for the cache server, including secrets. The shared store is among them,
    because a command line would show its password.
    """
    if not tiers.shared:
        return {}
    return {**tiers.shared.env, SHARED_STORE: json.dumps(dict(tiers.shared.adapter))}


def connector(tiers: Tiers, machine: Machine, path: str) -> dict[str, Any]:
    """Return vLLM's kv_transfer_config for these tiers. path: of the connector's class."""
    module, _, name = path.rpartition(".")
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",  # vLLM would fail the request
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": ports(machine).engine,
            # Limits of the engine's wait for a server that does not answer; with LMCache's defaults
            # of 300 s and 10 s, waits of 21 s were measured. Without a GPU the engine copies KV
            # itself, and waits for that.
            "lmcache.mp.mq_timeout": 10.0 if machine.gpus else 5.0,
            "lmcache.mp.heartbeat_interval": 2.0,
            **tiers.connector,
        },
    }


def transferring(settings: Settings, path: str) -> dict[str, Any]:
    """Return the operator's kv_transfer_config for servers that fetch KV from each other. path: the
    connector's, as `module.Class`. vLLM detects the connector's needs by its class name.
    """
    module, _, name = path.rpartition(".")
    own = settings.kv_transfer_config or {}
    return {**own, "kv_connector": name, "kv_connector_module_path": module}


def yaml(tiers: Tiers) -> str:
    """Return the tiers as a configuration file of LMCache's, with the reason for each figure.

    With one rank, it can be used as OPTION_LMCACHE_CONFIG_FILE.
    """
    lines = [
        f"chunk_size: {tiers.chunk_size}  # tokens: {tiers.reasons['chunk_size']}",
        f"local_cpu: {str(not tiers.skip_l1).lower()}",
        f"max_local_cpu_size: {tiers.l1 / GIB:.10g}  # GiB: {tiers.reasons['l1']}",
    ]
    if tiers.disk:
        lines += [
            f"local_disk: {json.dumps('file://' + tiers.disk.path)}",
            f"max_local_disk_size: {tiers.disk.size / GIB:.10g}  # GiB: {tiers.reasons['disk']}",
            f"extra_config: {{use_odirect: {str(tiers.disk.direct).lower()}}}",
        ]
    else:
        lines.append(f"# no disk tier: {tiers.reasons['disk'].removeprefix('left out: ')}")
    if tiers.shared:
        lines.append(f"# shared: {tiers.shared.shown}")
    return "".join(f"{line}\n" for line in lines)


def format_size(size: int) -> str:
    """Return bytes for people, in GiB or MiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB // 10 else f"{size / 1024**2:.0f} MiB"
