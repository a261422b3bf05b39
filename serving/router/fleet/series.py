# SPDX-License-Identifier: Apache-2.0
"""The series of a container's copies, beside those of its router. Nothing outside the container can
ask the copies themselves.
"""

import asyncio
import re
from collections.abc import Mapping

import aiohttp

from serving.protocol import METRICS
from serving.router.fleet.health import LARGEST_METRICS, Asking, read
from serving.router.fleet.replicas import Replica, ReplicaPool

COPY = "copy"
"""The label that says whose series it is."""
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(\{)?")
_SUFFIXES = ("_total", "_created", "_bucket", "_count", "_sum", "_info")


async def of_copies(
    pool: ReplicaPool, asking: Asking, numbers: Mapping[str, int]
) -> dict[str, str]:
    """Each copy's series, by its number, in Prometheus' text. Copies that do not answer are left
    out: `slipway_copies_ready` says how many are ready. numbers: the copies' by their addresses.
    """
    ready = sorted((it for it in pool.ready if it.name in numbers), key=lambda it: numbers[it.name])
    async with asking.session() as client:
        texts = await asyncio.gather(*(_ask(it, asking, client) for it in ready))
    return {
        str(numbers[it.name]): text
        for it, text in zip(ready, texts, strict=True)
        if text is not None
    }


async def _ask(replica: Replica, asking: Asking, client: aiohttp.ClientSession) -> str | None:
    try:
        headers = asking.headers(replica, METRICS)
        async with client.get(replica.name + METRICS, headers=headers) as answer:
            body = await read(answer, LARGEST_METRICS)
            return body.decode(errors="replace") if answer.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None


def merged(own: str, copies: Mapping[str, str]) -> str:
    """All series as one text. A family's lines stand together, with one HELP and one TYPE; a copy's
    samples get a label with its number. Nothing is summed: most of them are no sums.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for number, text in (("", own), *copies.items()):
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                _, kind, name, *_ = line.split(" ", 3)
                if kind in ("HELP", "TYPE"):
                    family = name
                    described = heads.setdefault(family, [])
                    if not any(it.startswith(f"# {kind} ") for it in described):
                        described.append(line)
            elif line and (found := _SAMPLE.match(line)):
                if not _of(found[1], family):
                    family = found[1]
                samples.setdefault(family, []).append(_labelled(line, found, number))
    lines = []
    for family, values in samples.items():
        lines += [*heads.get(family, ()), *values]
    return "".join(f"{line}\n" for line in lines)


def _of(sample: str, family: str) -> bool:
    """Whether a sample belongs to a family."""
    return sample == family or any(sample == family + suffix for suffix in _SUFFIXES)


def _labelled(line: str, found: "re.Match[str]", number: str) -> str:
    if not number:
        return line
    name, rest = found[1], line[found.end() :]
    if not found[2]:
        return f'{name}{{{COPY}="{number}"}}{rest}'
    comma = "" if rest.startswith("}") else ","
    return f'{name}{{{COPY}="{number}"{comma}{rest}'
