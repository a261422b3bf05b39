# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' endpoints as replicas.

The router needs the verbs `list` and `watch` on `endpointslices` in the API group
`discovery.k8s.io`.
"""

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from lmi_config.options.parsers import Endpoints
from serving.follow import FaultLog

ANSWER_S = 5.0
"""For the API server to connect, and for the next bytes of a list to come."""
WATCH_S = 60
"""After this the API server ends a watch; a connection that died shows by then."""
PAUSE_S = 1.0
"""From one list to the next, at least. It doubles while Kubernetes cannot be asked."""
LONGEST_PAUSE_S = 30.0


async def endpoints(source: Endpoints) -> AsyncGenerator[frozenset[str]]:
    """The URLs of the endpoints, whenever Kubernetes reports a change, and once a minute.

    The client's own informer does the same, but asks again at once and for ever when it is refused.
    """
    faults = FaultLog("the replicas", f"EndpointSlices with {source.selector}")
    pause = PAUSE_S
    while True:
        began = time.monotonic()
        try:
            async with aclosing(_watched(source)) as sets:
                async for current in sets:
                    yield current
        except Exception as error:  # of the client's, of urllib3's and of credential plugins
            if getattr(error, "status", None) != 410:  # what we saw last is too old to go on from
                faults.failed(_reason(error))
                pause = min(pause * 2, LONGEST_PAUSE_S)
        else:
            # Not as soon as there is a list: a role may allow lists and no watches.
            faults.recovered()
            pause = PAUSE_S
        await asyncio.sleep(began + pause - time.monotonic())


async def _watched(source: Endpoints) -> AsyncGenerator[frozenset[str]]:
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
        except Exception as error:
            put(error)

    threading.Thread(target=run, name="endpoints", daemon=True).start()
    while (item := await queue.get()) is not None:
        if isinstance(item, Exception):
            raise item
        yield item


def _client() -> tuple[Any, str]:
    """The API of EndpointSlices, and our own namespace.

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
    return client.DiscoveryV1Api(client.ApiClient(configuration)), namespace


def _list_and_watch(source: Endpoints) -> Iterator[frozenset[str]]:
    """The same in this thread."""
    api, namespace = _client()
    from kubernetes.watch import Watch

    where = {"namespace": source.namespace or namespace, "label_selector": source.selector}
    listed = api.list_namespaced_endpoint_slice(**where, _request_timeout=(ANSWER_S, ANSWER_S))
    slices = {one.metadata.name: one for one in listed.items}
    yield urls(slices.values(), source.port)
    for event in Watch().stream(
        api.list_namespaced_endpoint_slice,
        **where,
        resource_version=listed.metadata.resource_version,
        timeout_seconds=WATCH_S,
        _request_timeout=(ANSWER_S, WATCH_S + ANSWER_S),
    ):
        if not event:  # an empty line
            continue
        one = event["object"]
        if event["type"] == "DELETED":
            slices.pop(one.metadata.name, None)
        else:
            slices[one.metadata.name] = one
        yield urls(slices.values(), source.port)


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
        raise ValueError(f"the endpoints have the ports {names}, not {port or 'one to use'}")
    return frozenset(by_pod.values())


def _port(ports: Collection[Any], wanted: str | int | None) -> int | None:
    if isinstance(wanted, int):
        return wanted
    numbers = {one.name: one.port for one in ports if one.port and one.protocol in (None, "TCP")}
    if wanted is None:
        return numbers.get("http", next(iter(numbers.values()), None))
    return numbers.get(wanted)


def _in_use(endpoint: Any) -> bool:
    """Ready, where nothing said means yes; or serving; and not about to end."""
    state = endpoint.conditions
    return state is None or (
        not state.terminating and (state.ready is not False or bool(state.serving))
    )


def _reason(error: Exception) -> str:
    """What went wrong, in the same words each time: an answer's headers would differ."""
    status = getattr(error, "status", None)
    if not status:
        return f"{type(error).__name__}: {error}"
    try:
        message = json.loads(error.body)["message"]  # type: ignore[attr-defined]
    except (TypeError, ValueError, KeyError):
        message = error.reason  # type: ignore[attr-defined]
    return f"the API server answers {status}: {message}"
