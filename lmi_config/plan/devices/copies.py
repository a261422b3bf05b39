# SPDX-License-Identifier: Apache-2.0
"""The number of the model's copies in this container, and the devices of each.

A copy is a whole server with its own engine. LMI starts as many copies as fit on the GPUs, and
Slipway does the same. A router in the same container chooses among them.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from lmi_config.facts.draft import Draft
from lmi_config.facts.gpus import VISIBLE, Gpu
from lmi_config.facts.handler import FILE, Service
from lmi_config.facts.machine import HELPERS, Machine, safe_ports
from lmi_config.facts.model import ModelFacts
from lmi_config.options.declared import Settings
from lmi_config.options.parsers import AtMost
from lmi_config.options.settings import SettingsError
from lmi_config.plan.devices import parallelism
from lmi_config.plan.devices.parallelism import Parallelism

OPTION = "OPTION_COPIES"
RANDOM_IDS = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
"""vLLM's variable. If it is set, two engines may give two requests the same id. The cache server
identifies requests only by their ids."""
_CPU_NODES = "CPU_VISIBLE_MEMORY_NODES"
"""vLLM's variable for the NUMA nodes that an engine without GPUs may use."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy:
    """A copy among several. machine: its share of this machine. port: its port on the loopback
    interface. node: the NUMA node of its devices; None if they are on several nodes, or if unknown.
    environment: variables that differ from the other copies'.
    """

    number: int
    machine: Machine
    port: int
    node: int | None
    environment: Mapping[str, str]

    @property
    def url(self) -> str:
        """The copy's address for the other processes of this container."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices' names in logs and plans."""
        if self.machine.gpus:
            return tuple(gpu.uuid for gpu in self.machine.gpus)
        return tuple(f"CPU {cpu}" for cpu in self.machine.cpus)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """The number of copies. spread: the parallelism of each copy. why: the reason, in a few words.
    notes: notes for the operator, a sentence each.
    """

    count: int
    spread: Parallelism
    why: str
    notes: tuple[str, ...] = ()


def decide(
    settings: Settings,
    machine: Machine,
    model: ModelFacts,
    draft: Draft | None,
    service: Service | None,
    environ: Mapping[str, str],
    *,
    tiers: bool = False,
    alone: str = "",
) -> Decision:
    """Decide the number of copies.

    service: the owner of the service if there is a model.py. tiers: whether a cache server is
    planned. alone: a reason for one server, found elsewhere. Raises SettingsError if the requested
    copies are not possible, and as parallelism.decide does.
    """
    asked, name = settings.copies, settings.named("copies")
    number = 1 if asked == "auto" or isinstance(asked, AtMost) else asked
    reason = next(_one_server(settings, service, environ, tiers), "") or alone
    if number > 1 and reason:
        raise SettingsError([f"{name}={number}: {reason}; leave {name} out, or set it to 1"])
    devices, kind = _devices(machine)
    if number > 1:
        degree = settings.tensor_parallel_degree
        size = (1 if degree == "max" else degree) * settings.pipeline_parallel_degree
        if number * size > len(devices):
            raise SettingsError([_too_many(settings, number, size, len(devices), kind)])
        # A process can only have one slice.
        most = 1 if machine.gpus and machine.gpus[0].slice else len(devices) // number
        share = _reduced(machine, devices[:most])
        spread = parallelism.decide(settings, share, model, draft)
        return Decision(count=number, spread=_with(spread, number), why=name)
    spread = parallelism.decide(settings, machine, model, draft)
    each = max(spread.workers, spread.local_workers)
    fits = len(devices) // each if machine.gpus else 1
    if asked == 1 and not isinstance(asked, AtMost):
        return Decision(count=1, spread=spread, why=name)
    if reason:
        notes = (f"one copy of the model, where {fits} would fit: {reason}",) if fits > 1 else ()
        return Decision(count=1, spread=spread, why=reason, notes=notes)
    count = max(min(fits, asked), 1) if isinstance(asked, AtMost) else max(fits, 1)
    if count == 1:
        return Decision(count=1, spread=spread, why="one fits" if machine.gpus else "no GPUs")
    why = f"{name}={asked}, at most" if isinstance(asked, AtMost) else "auto"
    on = f"{each} of {len(devices)} GPUs" if each > 1 else "one GPU"
    note = f"{count} copies of the model, each on {on}, as LMI starts them; {OPTION}=1 has one copy"
    return Decision(count=count, spread=_with(spread, count), why=why, notes=(note,))


def _with(spread: Parallelism, servers: int) -> Parallelism:
    return dataclasses.replace(spread, servers=servers)


def _devices(machine: Machine) -> tuple[tuple[Gpu, ...] | tuple[int, ...], str]:
    """The devices for copies, and the word for such a device."""
    if machine.gpus:
        return (*machine.gpus, *machine.slices), "GPU"
    return machine.cpus, "CPU"


def _reduced(machine: Machine, devices: Sequence[Gpu | int]) -> Machine:
    if machine.gpus:
        gpus = tuple(it for it in devices if isinstance(it, Gpu))
        return dataclasses.replace(machine, gpus=gpus, slices=())
    cpus = tuple(it for it in devices if isinstance(it, int))
    return dataclasses.replace(machine, cpus=cpus)


def _too_many(settings: Settings, number: int, size: int, devices: int, kind: str) -> str:
    fits = devices // size
    fix = f"{fits} fit; use at most {fits}" if fits else "none fits"
    name = settings.named("copies")
    return (
        f"{name}={number}: needs {number * size} {kind}s, {size} for each copy, but this machine "
        f"shows {devices}: {fix}, or {OPTION}=auto"
    )


def _one_server(
    settings: Settings, service: Service | None, environ: Mapping[str, str], tiers: bool
) -> Iterator[str]:
    """Yield the options that only allow one server here, a reason each."""
    engine = settings.engine
    if service is Service.ITS_OWN:
        yield f"the handle of {FILE} is the whole service, and chooses its devices itself"
    if settings.server_role != "both":
        role = f"{settings.named('server_role')}={settings.server_role}"
        yield f"{role}: routers know a server with a role by its own address"
    if engine.get("nnodes", 1) > 1 or engine.get("distributed_executor_backend") == "ray":
        field = "nnodes" if "nnodes" in engine else "distributed_executor_backend"
        yield f"{settings.named(field)}: other machines take part in the one server"
    for field, value in engine.items():
        if field.startswith("data_parallel_") and value not in (1, False):
            yield f"{settings.named(field)}: vLLM runs several copies in one server"
    if engine.get("enable_expert_parallel"):
        name = settings.named("enable_expert_parallel")
        yield f"{name}: all GPUs share the experts of one server"
    for field in ("device_ids", "kv_events_config"):
        if field in engine:
            yield f"{settings.named(field)}: it is about one server's devices or ports"
    if settings.kv_events:
        name = settings.named("kv_events")
        yield f"{name}: routers read the events of one engine at its port"
    if settings.cors_allowed_origin:
        name = settings.named("cors_allowed_origin")
        yield f"{name}: web pages of other origins need headers that a router does not send"
    if tiers and environ.get(RANDOM_IDS, "0") not in ("", "0"):
        yield f"{RANDOM_IDS}: engines with one cache server need random ids of requests"


def divide(
    machine: Machine,
    decision: Decision,
    environ: Mapping[str, str],
    variables: Callable[[Machine], Mapping[str, str]],
) -> tuple[Copy, ...]:
    """The copies with their devices; empty for a single copy. variables: the variables that vLLM
    needs on a machine.

    GPUs are grouped in NVML's order, within a NUMA node if possible. Raises SettingsError if
    SAGEMAKER_SAFE_PORT_RANGE has too few ports.
    """
    if decision.count == 1:
        return ()
    ports = machine.ports[HELPERS : HELPERS + decision.count]
    if len(ports) < decision.count:
        given = environ.get("SAGEMAKER_SAFE_PORT_RANGE")
        raise SettingsError(
            [
                f"SAGEMAKER_SAFE_PORT_RANGE={given!r}: {decision.count} copies of the model need "
                f"{HELPERS + decision.count} free ports, and there are {len(machine.ports)}; "
                f"widen it, or set {OPTION}=1"
            ]
        )
    shares = _of_gpus(machine, decision) if machine.gpus else _of_cpus(machine, decision.count)
    blocks = _port_blocks(machine, decision.count, environ)
    copies = []
    for number, (share, node) in enumerate(shares):
        own = {**variables(share), **blocks[number]}
        if machine.gpus and all(gpu.uuid for gpu in share.gpus):
            own[VISIBLE] = ",".join(gpu.uuid for gpu in share.gpus)
        elif node is not None and _CPU_NODES not in environ:
            own[_CPU_NODES] = str(node)
        copies.append(
            Copy(number=number, machine=share, port=ports[number], node=node, environment=own)
        )
    return tuple(copies)


def _of_gpus(machine: Machine, decision: Decision) -> list[tuple[Machine, int | None]]:
    devices, size = (*machine.gpus, *machine.slices), decision.spread.workers
    by_node: dict[int | None, list[Gpu]] = {}
    for gpu in devices:
        by_node.setdefault(gpu.node, []).append(gpu)
    groups, left = [], []
    for own in by_node.values():
        whole = len(own) // size * size
        groups += [own[start : start + size] for start in range(0, whole, size)]
        left += own[whole:]
    left.sort(key=_order(devices))
    groups += [left[start : start + size] for start in range(0, len(left) // size * size, size)]
    groups = groups[: decision.count]
    groups.sort(key=lambda group: _order(devices)(group[0]))
    cpus = dict(machine.nodes)
    shares = []
    for group in groups:
        nodes = {gpu.node for gpu in group}
        node = nodes.pop() if len(nodes) == 1 else None
        # The node's own CPUs are the nearest; its copies share them.
        near = cpus.get(node, ()) if node is not None else ()
        share = dataclasses.replace(
            _reduced(machine, group), cpus=near if near else machine.cpus, nodes=()
        )
        shares.append((share, node))
    return shares


def _order(devices: Sequence[Gpu]) -> Callable[[Gpu], int]:
    """A GPU's index among all. GPUs may be equal except for their identifiers."""
    places = {id(gpu): place for place, gpu in reversed([*enumerate(devices)])}
    return lambda gpu: places[id(gpu)]


def _of_cpus(machine: Machine, count: int) -> list[tuple[Machine, int | None]]:
    """Equal shares of the CPUs. vLLM uses all CPUs that its process may run on, regardless of other
    servers. If all NUMA nodes can have the same number of copies, no copy spans two nodes.
    """
    nodes = machine.nodes
    if nodes and count % len(nodes) == 0:
        each = count // len(nodes)
        if all(len(cpus) >= each for _, cpus in nodes):
            return [
                (dataclasses.replace(_reduced(machine, share), nodes=()), node)
                for node, cpus in nodes
                for share in _parts(cpus, each)
            ]
    return [
        (dataclasses.replace(_reduced(machine, share), nodes=()), None)
        for share in _parts(machine.cpus, count)
    ]


def _parts(cpus: Sequence[int], count: int) -> list[Sequence[int]]:
    size = len(cpus) // count
    return [cpus[place * size : (place + 1) * size] for place in range(count)]


def _port_blocks(machine: Machine, count: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Return for each copy where vLLM begins its search for free ports, in SageMaker's range."""
    safe = safe_ports(environ)
    if safe is None or "VLLM_PORT" in environ:
        return [{} for _ in range(count)]
    first = machine.ports[-1] + 1
    width = max((safe.stop - first) // count, 0)
    if not width:
        return [{} for _ in range(count)]
    return [{"VLLM_PORT": str(first + number * width)} for number in range(count)]
