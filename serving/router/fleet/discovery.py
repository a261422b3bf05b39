# SPDX-License-Identifier: Apache-2.0
"""Discovery of replicas: a list, a watched file, or Kubernetes' endpoints or pods."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from lmi_config.options.parsers import is_address, replica, replica_source
from serving.follow import FaultLog, changes, content
from serving.router.fleet.kubernetes import endpoints

log = logging.getLogger(__name__)


async def discovered(where: str) -> AsyncGenerator[frozenset[str]]:
    """Yields the base URLs of the replicas (scheme, host, port; no trailing slash), now and after
    each change. Ends only for a list, which never changes.

    where: any value that `values.replicas` accepts. For Kubernetes, endpoints that are ready or
    still serve count; endpoints that are terminating do not. The port is `?port=`, or else the port
    named `http`, or else the first; a number is the pods' port, not the Service's. For an
    InferencePool, its ready pods count, at the pool's ports.

    While a file or Kubernetes cannot be read, the replicas stay unchanged. The first URLs come
    after the first successful read. Each new reason is logged. Raises ValueError if `where` is none
    of these.
    """
    source = replica_source(where)
    if isinstance(source, frozenset):
        yield source
        return
    last = None
    if isinstance(source, Path):
        faults = FaultLog("the replicas", source, "replicas")
        sets = changes(lambda: content(source).decode(), listed, faults)
    else:
        sets = endpoints(source)
    async with aclosing(sets):
        async for urls in sets:
            if urls != last:
                yield urls
            last = urls


def listed(text: str) -> frozenset[str]:
    """The replicas in a file: a URL a line, comments after `#`. Raises ValueError for others."""
    urls = set()
    for number, line in enumerate(text.splitlines(), 1):
        if address := line.partition("#")[0].strip():
            try:
                urls.add(replica(address))
            except ValueError as error:
                raise ValueError(f"line {number} should be {error}") from None
    return frozenset(urls)


async def addresses(sets: AsyncGenerator[frozenset[str]]) -> AsyncGenerator[frozenset[str]]:
    """The replica URLs with an IP address, which gateways need; others are logged."""
    warned: set[str] = set()
    async with aclosing(sets):
        async for urls in sets:
            named = frozenset(it for it in urls if not is_address(it))
            for url in sorted(named - warned):
                log.error("%s is left out: gateways take IP addresses, and no names", url)
            warned |= named
            yield urls - named
