"""Where the replicas are: a list, a file that is watched, or the endpoints that Kubernetes knows.

In Kubernetes the router needs the verbs `list` and `watch` on `endpointslices` in the API group
`discovery.k8s.io`.
"""

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from lmi_config.values import Endpoints, replica, replica_source
from serving.threads import in_thread

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between two looks at a file."""
ANSWER_S = 5.0  # for the API server to connect, and for the next bytes of a list to come
WATCH_S = 60  # after this the API server ends a watch; a connection that died shows by then
PAUSE_S = 1.0
"""From one list to the next, at least. It doubles while Kubernetes cannot be asked."""
LONGEST_PAUSE_S = 30.0


async def discovered(where: str) -> AsyncGenerator[frozenset[str]]:
    """The base URLs of the replicas (scheme, host, port; no trailing slash), now and each time they
    change. Ends only for a list, which never changes.

    where: what `values.replicas` accepts. Of Kubernetes' endpoints it takes those that are ready or
    still serve, but none that are terminating. Without `?port=` it is the port named `http`, or
    else the first; a number is the pods' port, not the Service's.

    While a file or Kubernetes cannot be read, the replicas stay as they were; nothing is yielded
    before it could be read once. Each new reason is logged. Raises ValueError when `where` is none
    of these.
    """
    source = replica_source(where)
    if isinstance(source, frozenset):
        yield source
        return
    last = None
    looks = _listed(source) if isinstance(source, Path) else _endpoints(source)
    async with aclosing(looks):
        async for found in looks:
            if found != last:
                yield found
            last = found


class _Told:
    """Logs what keeps a source from being read: each reason once, until it can be read again."""

    def __init__(self, source: object) -> None:
        self._source = source
        self._reason: str | None = None

    def fault(self, reason: str) -> None:
        if reason != self._reason:
            log.error("the replicas stay as they were, %s: %s", self._source, reason)
        self._reason = reason

    def fine(self) -> None:
        if self._reason:
            log.warning("the replicas are read from %s again", self._source)
        self._reason = None


def listed(content: str) -> frozenset[str]:
    """The replicas in a file: a URL a line, comments after `#`. Raises ValueError for others."""
    found = set()
    for number, line in enumerate(content.splitlines(), 1):
        if address := line.partition("#")[0].strip():
            try:
                found.add(replica(address))
            except ValueError as error:
                raise ValueError(f"line {number} should be {error}") from None
    return frozenset(found)


async def _listed(file: Path) -> AsyncGenerator[frozenset[str]]:
    """A file's replicas, at each look.

    We read it again and again rather than have its changes told, by inotify: that follows the file
    that was there at first, not the path, where Kubernetes swaps a link two folders up and editors
    put a new file in place; and file systems on a network tell nothing. It is a few lines.
    """
    told = _Told(file)
    before = None
    while True:
        try:
            content = await in_thread(file.read_text)
            # A file that is being written may be seen empty or cut off. Two looks agree on it less
            # often.
            if before in (None, content):
                found = listed(content)
                told.fine()
                yield found
            before = content
        except (OSError, ValueError) as error:
            told.fault(str(error))
        await asyncio.sleep(LOOK_S)


async def _endpoints(source: Endpoints) -> AsyncGenerator[frozenset[str]]:
    """The endpoints that Kubernetes has, whenever it tells of a change, and once a minute.

    The client's own informer does the same, but asks again at once and for ever when it is refused.
    """
    told = _Told(f"EndpointSlices with {source.selector}")
    pause = PAUSE_S
    while True:
        began = time.monotonic()
        try:
            async with aclosing(_watched(source)) as sets:
                async for found in sets:
                    yield found
        except Exception as error:  # of the client's, of urllib3's and of credential plugins
            if getattr(error, "status", None) != 410:  # what we saw last is too old to go on from
                told.fault(_reason(error))
                pause = min(pause * 2, LONGEST_PAUSE_S)
        else:
            # Not as soon as there is a list: a role may allow lists and no watches.
            told.fine()
            pause = PAUSE_S
        await asyncio.sleep(began + pause - time.monotonic())


async def _watched(source: Endpoints) -> AsyncGenerator[frozenset[str]]:
    """The endpoints as a list and then a watch show them, until the watch ends.

    The client is synchronous, so it works in a thread. When we are not listened to any more that
    ends with its watch, or with the process.
    """
    loop = asyncio.get_running_loop()
    told: asyncio.Queue[frozenset[str] | Exception | None] = asyncio.Queue()

    def tell(what: frozenset[str] | Exception | None) -> None:
        with suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(told.put_nowait, what)

    def run() -> None:
        try:
            for found in _asked(source):
                tell(found)
            tell(None)
        except Exception as error:
            tell(error)

    threading.Thread(target=run, name="endpoints", daemon=True).start()
    while (found := await told.get()) is not None:
        if isinstance(found, Exception):
            raise found
        yield found


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


def _asked(source: Endpoints) -> Iterator[frozenset[str]]:
    api, namespace = _client()
    from kubernetes.watch import Watch

    asked = {"namespace": source.namespace or namespace, "label_selector": source.selector}
    there = api.list_namespaced_endpoint_slice(**asked, _request_timeout=(ANSWER_S, ANSWER_S))
    slices = {one.metadata.name: one for one in there.items}
    yield urls(slices.values(), source.port)
    for event in Watch().stream(
        api.list_namespaced_endpoint_slice,
        **asked,
        resource_version=there.metadata.resource_version,
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
    found: dict[str, str] = {}
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
            found.setdefault(pod or host, f"http://{f'[{host}]' if ':' in host else host}:{number}")
    if used and not found:
        there = sorted({str(one.name or one.port) for _, ports in used for one in ports})
        raise ValueError(f"the endpoints have the ports {there}, not {port or 'one to use'}")
    return frozenset(found.values())


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
    """What went wrong, in the same words each time. An answer's headers are not."""
    status = getattr(error, "status", None)
    if not status:
        return f"{type(error).__name__}: {error}"
    try:
        message = json.loads(error.body)["message"]  # type: ignore[attr-defined]
    except (TypeError, ValueError, KeyError):
        message = error.reason  # type: ignore[attr-defined]
    return f"the API server answers {status}: {message}"
