# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' endpoints as replicas, or the pods of an InferencePool.

For endpoints the router needs the verbs `list` and `watch` on `endpointslices` in the API group
`discovery.k8s.io`; for a pool `get` on `inferencepools` in `inference.networking.k8s.io`, and
`list` and `watch` on `pods`.
"""

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, NamedTuple

from lmi_config.options.parsers import Endpoints, Pool
from serving.follow import FaultLog

ANSWER_S = 5.0
"""For the API server to connect, and for the next bytes of a list to come."""
WATCH_S = 60
"""After this the API server ends a watch; a connection that died shows by then."""
PAUSE_S = 1.0
"""From one list to the next, at least. It doubles while Kubernetes cannot be asked."""
LONGEST_PAUSE_S = 30.0
POOL_GROUP, POOL_VERSION, POOLS = "inference.networking.k8s.io", "v1", "inferencepools"


class _Objects(NamedTuple):
    """The resources to list and watch. lists: the client's call. where: the namespace and the
    labels. urls: those of the objects.
    """

    lists: Any
    where: dict[str, str]
    urls: Callable[[Collection[Any]], frozenset[str]]


async def endpoints(source: Endpoints | Pool) -> AsyncGenerator[frozenset[str]]:
    """The URLs of the endpoints, whenever Kubernetes reports a change, and once a minute.

    The client's own informer does the same, but retries at once and without end when it is refused.
    """
    if isinstance(source, Pool):
        what = f"the InferencePool {source.name}"
    else:
        what = f"EndpointSlices with {source.selector}"
    faults = FaultLog("the replicas", what, "replicas")
    pause = PAUSE_S
    while True:
        began = time.monotonic()
        try:
            async with aclosing(_watched(source)) as sets:
                async for current in sets:
                    yield current
        except Exception as error:  # of the client's, of urllib3's and of credential plugins
            if getattr(error, "status", None) != 410:  # our last state is too old to continue from
                faults.failed(_reason(error))
                pause = min(pause * 2, LONGEST_PAUSE_S)
        else:
            # Not as soon as there is a list: a role may allow lists and no watches.
            faults.recovered()
            pause = PAUSE_S
        await asyncio.sleep(began + pause - time.monotonic())


async def _watched(source: Endpoints | Pool) -> AsyncGenerator[frozenset[str]]:
    """The endpoints as a list and then a watch show them, until the watch ends.

    The client is synchronous, so it works in a thread. When nobody reads on, that
    ends with its watch, or with the process.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[frozenset[str] | Exception | None] = asyncio.Queue()

    def put(item: frozenset[str] | Exception | None) -> None:
        with suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(queue.put_nowait, item)

    def run() -> None:
        try:
            for current in _list_and_watch(source):
                put(current)
            put(None)
        except BaseException as error:  # also of a plugin for credentials that calls sys.exit()
            put(error if isinstance(error, Exception) else OSError(f"{type(error).__name__}"))

    threading.Thread(target=run, name="endpoints", daemon=True).start()
    while (item := await queue.get()) is not None:
        if isinstance(item, Exception):
            raise item
        yield item


def _client() -> tuple[Any, str]:
    """A client of the API server, and our own namespace.

    The configuration is KUBECONFIG, or else a pod's own, or else ~/.kube/config. Its credentials
    may have been renewed, so it is read each time.
    """
    from kubernetes import client, config  # half a second and 50 MB

    configuration = client.Configuration()
    kubeconfig = os.environ.get("KUBECONFIG")
    if "KUBERNETES_SERVICE_HOST" in os.environ and not kubeconfig:
        config.load_incluster_config(configuration)
        token = Path(config.incluster_config.SERVICE_TOKEN_FILENAME)
        namespace = token.with_name("namespace").read_text().strip()
    else:
        config.load_kube_config(kubeconfig, client_configuration=configuration)
        context = config.list_kube_config_contexts(kubeconfig)[1]["context"]
        namespace = context.get("namespace") or "default"
    configuration.retries = False  # we do that, and urllib3 would log each
    return client.ApiClient(configuration), namespace


def _objects(source: Endpoints | Pool) -> _Objects:
    """The resource that lists the replicas."""
    connection, own = _client()
    from kubernetes import client

    where = {"namespace": source.namespace or own}
    if isinstance(source, Endpoints):
        lists = client.DiscoveryV1Api(connection).list_namespaced_endpoint_slice
        where["label_selector"] = source.selector
        return _Objects(lists, where, lambda slices: urls(slices, source.port))
    # It is read again with each watch: it rarely changes.
    pool = client.CustomObjectsApi(connection).get_namespaced_custom_object(
        *(POOL_GROUP, POOL_VERSION, where["namespace"], POOLS, source.name),
        _request_timeout=(ANSWER_S, ANSWER_S),
    )
    labels = pool["spec"]["selector"]["matchLabels"]
    ports = [int(it["number"]) for it in pool["spec"]["targetPorts"]]
    where["label_selector"] = ",".join(f"{name}={value}" for name, value in labels.items())
    lists = client.CoreV1Api(connection).list_namespaced_pod
    return _Objects(lists, where, lambda pods: pod_urls(pods, ports))


def _list_and_watch(source: Endpoints | Pool) -> Iterator[frozenset[str]]:
    """The same in this thread."""
    objects = _objects(source)
    from kubernetes.watch import Watch

    listed = objects.lists(**objects.where, _request_timeout=(ANSWER_S, ANSWER_S))
    found = {one.metadata.name: one for one in listed.items}
    yield objects.urls(found.values())
    for event in Watch().stream(
        objects.lists,
        **objects.where,
        resource_version=listed.metadata.resource_version,
        timeout_seconds=WATCH_S,
        _request_timeout=(ANSWER_S, WATCH_S + ANSWER_S),
    ):
        if not event:  # an empty line
            continue
        one = event["object"]
        if event["type"] == "DELETED":
            found.pop(one.metadata.name, None)
        else:
            found[one.metadata.name] = one
        yield objects.urls(found.values())


def pod_urls(pods: Collection[Any], ports: Collection[int]) -> frozenset[str]:
    """The base URLs of the pods to use, one for each port: pods that are ready and not about to
    end.
    """
    hosts = [it.status.pod_ip for it in pods if not it.metadata.deletion_timestamp and _ready(it)]
    return frozenset(
        f"http://{f'[{host}]' if ':' in host else host}:{port}" for host in hosts for port in ports
    )


def _ready(pod: Any) -> bool:
    conditions = pod.status.conditions or ()
    ready = any(it.type == "Ready" and it.status == "True" for it in conditions)
    return bool(ready and pod.status.pod_ip)


def urls(slices: Collection[Any], port: str | int | None) -> frozenset[str]:
    """The base URLs of the endpoints to use. Raises ValueError when none of them has the port.

    A pod may be in several slices: of several Services, and with an address of each family. It is
    one replica all the same, by its IPv4 address if it has one.
    """
    by_pod: dict[str, str] = {}
    used = [
        (endpoint, one.ports or [])
        for one in sorted(slices, key=lambda one: str(one.address_type))
        for endpoint in one.endpoints or []
        if _in_use(endpoint)
    ]
    for endpoint, ports in used:
        if number := _port(ports, port):
            host = endpoint.addresses[0]
            pod = endpoint.target_ref and endpoint.target_ref.uid
            by_pod.setdefault(
                pod or host, f"http://{f'[{host}]' if ':' in host else host}:{number}"
            )
    if used and not by_pod:
        names = sorted({str(one.name or one.port) for _, ports in used for one in ports})
        raise ValueError(
            f"the endpoints have the ports {names}, not {port or 'one to use'}; `port` in the URL "
            "should name one"
        )
    return frozenset(by_pod.values())


def _port(ports: Collection[Any], wanted: str | int | None) -> int | None:
    if isinstance(wanted, int):
        return wanted
    numbers = {one.name: one.port for one in ports if one.port and one.protocol in (None, "TCP")}
    if wanted is None:
        return numbers.get("http", next(iter(numbers.values()), None))
    return numbers.get(wanted)


def _in_use(endpoint: Any) -> bool:
    """Whether an endpoint is ready or serving, and not about to end. A missing `ready` means
    yes.
    """
    state = endpoint.conditions
    return state is None or (
        not state.terminating and (state.ready is not False or bool(state.serving))
    )


def _reason(error: Exception) -> str:
    """The fault, in the same words each time; an answer's headers would differ."""
    status = getattr(error, "status", None)
    if not status:
        return f"{type(error).__name__}: {error}"
    try:
        message = json.loads(error.body)["message"]  # type: ignore[attr-defined]
    except (TypeError, ValueError, KeyError):
        message = error.reason  # type: ignore[attr-defined]
    return f"the API server answers {status}: {message}"
