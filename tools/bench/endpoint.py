# SPDX-License-Identifier: Apache-2.0
"""Steady load on any OpenAI-compatible endpoint: time to the first token, tokens/s and price.

Several client processes play users. Each user asks for streamed chat completions, one after the
other (--concurrency). With --rate, requests come at random times at that rate, and are timed from
their scheduled time. A request is a document and a question about it. The share --shared of the
requests is about one of --documents documents, the others are about documents that never repeat. A
document is its name and many repetitions of "hi", about one token each.

With --workload a file describes the load, in AIPerf's vocabulary (docs/guides/tuning.md lists its
keys), level by level. `vllm bench serve` then sends the load and measures. --slo-ttft-ms and
--slo-itl-ms are the objectives of its goodput: requests/s that met both. Its ITL is each answer's
average.

A second URL gets the same load after the first, and its figures are also printed as multiples of
the first's. Each URL has separate documents.

TTFT, ITL and tokens/s count requests that begin after --warm-up seconds. TTFT: seconds until the
first text. ITL: ms between two events of a stream. tokens/s: tokens of answers, by the endpoint's
own count if it reports one. cached: prompt tokens that the endpoint reports as cached. $/M tokens:
$ for a million tokens of answers, from all machines' price per hour. The exit code is 1 when a
request failed. One request goes before all others; if it fails, the endpoint gets no load.

The key in the environment variable OPENAI_API_KEY is sent, if set. Use other machines for clients
than for servers; a client process handles some thousand tokens/s.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import MappingProxyType

import aiohttp

from lmi_config.options.parsers import amount, positive
from serving.tune import load as of_vllm
from serving.tune import workload
from serving.tune.load import LoadError, Measured, Objectives
from serving.tune.workload import Level, Workload, WorkloadError

STARTED_S = 120.0
"""Within which all client processes have started."""
AFTER_FAULT_S = 0.2
"""Pause of users after a failed request, which may have failed at once."""
TOLD = 200
"""Characters of an endpoint's error."""
TEXT = ("content", "reasoning", "reasoning_content")


class Failed(Exception):
    """A request without a whole answer. status: the answer's, where it was another than 200."""

    def __init__(self, reason: str, status: int = 200) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Load:
    """The load on one URL. rate: requests/s; None for users who wait for answers, as many as
    concurrency. shared: of requests. run: what sets documents apart from another run's.
    """

    url: str
    model: str
    context: int
    documents: int
    shared: float
    output: int
    concurrency: int
    rate: float | None
    warm_up: float
    duration: float
    processes: int
    timeout: float
    ignore_eos: bool
    seed: int
    run: str

    def body(self, rng: random.Random) -> bytes:
        name = f"{rng.getrandbits(64):x}"
        document = rng.randrange(self.documents) if rng.random() < self.shared else name
        text = f"{self.run} {document}" + " hi" * self.context + f"\nWhat is {name}?"
        asked = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.output,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(asked | ({"ignore_eos": True} if self.ignore_eos else {})).encode()


@dataclass
class Found:
    """The measurements of one process, or of all. requests: all; faults: failed ones, by message.
    ttfts, gaps: seconds, of requests after the warm-up. tokens: of answers, that came between the
    warm-up and the end. prompt, cached: tokens; cached is None where the endpoint does not say.
    """

    requests: int = 0
    ttfts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: float = 0.0
    prompt: int = 0
    cached: int | None = None
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Found") -> None:
        self.requests += other.requests
        self.ttfts += other.ttfts
        self.gaps += other.gaps
        self.tokens += other.tokens
        self.prompt += other.prompt
        if other.cached is not None:
            self.cached = (self.cached or 0) + other.cached
        self.faults += other.faults


@dataclass
class Answer:
    """times: of each event with text. usage: the endpoint's, {} where it reports none. route: the
    router's reason for its choice, if it was asked.
    """

    times: list[float]
    usage: dict[str, object]
    route: str = ""


class Client:
    """One process's part of a load."""

    def __init__(self, load: Load, number: int) -> None:
        self._load, self._number = load, number
        self.found = Found()

    async def run(self) -> None:
        load, timeout = self._load, aiohttp.ClientTimeout(total=None, sock_read=self._load.timeout)
        headers = _headers()
        connector = aiohttp.TCPConnector(limit=0)
        self._began = time.monotonic()
        async with (
            aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            if load.rate is not None:
                await self._arrivals(session, group, load.rate / load.processes)
            for user in range(self._number, load.concurrency, load.processes):
                group.create_task(self._user(session, random.Random(f"{load.seed} {user}")))

    async def _user(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        while (now := time.monotonic()) < self._began + self._load.duration:
            if not await self._request(session, self._load.body(rng), now):
                await asyncio.sleep(AFTER_FAULT_S)

    async def _arrivals(
        self, session: aiohttp.ClientSession, group: asyncio.TaskGroup, rate: float
    ) -> None:
        rng = random.Random(f"{self._load.seed} {self._number}")
        at = self._began + rng.expovariate(rate)
        while at < self._began + self._load.duration:
            body = self._load.body(rng)
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            group.create_task(self._request(session, body, at))
            at += rng.expovariate(rate)

    async def _request(self, session: aiohttp.ClientSession, body: bytes, at: float) -> bool:
        """One request, which should begin at that time. Whether it was answered."""
        found = self.found
        since, until = self._began + self._load.warm_up, self._began + self._load.duration
        found.requests += 1
        try:
            answer = await ask(session, self._load.url, body)
        except (Failed, aiohttp.ClientError, TimeoutError, OSError) as error:
            found.faults[str(error) or type(error).__name__] += 1
            return False
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            found.faults[f"events that are none of a chat completion: {error!r}"] += 1
            return False
        times, usage = answer.times, answer.usage
        tokens = usage.get("completion_tokens")
        each = tokens / len(times) if isinstance(tokens, int) else 1
        found.tokens += each * sum(since <= it < until for it in times)
        if at >= since:
            found.ttfts.append(times[0] - at)
            found.gaps += [later - early for early, later in itertools.pairwise(times)]
            self._count_prompt(usage)
        return True

    def _count_prompt(self, usage: dict[str, object]) -> None:
        prompt, details = usage.get("prompt_tokens"), usage.get("prompt_tokens_details")
        if isinstance(prompt, int) and isinstance(details, dict):
            self.found.prompt += prompt
            cached = details.get("cached_tokens") or 0
            self.found.cached = (self.found.cached or 0) + int(cached)


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Answer:
    """Raises Failed, and aiohttp's errors."""
    times: list[float] = []
    usage: dict[str, object] = {}
    posted = session.post(f"{url}/v1/chat/completions", data=body, headers=headers)
    async with posted as response:
        await _require_ok(response)
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                if not times and not usage.get("completion_tokens"):
                    raise Failed("an answer without any text")
                times = times or [time.monotonic()]  # its tokens had no text
                return Answer(times, usage, response.headers.get("x-slipway-route", ""))
            event = json.loads(data)
            if not isinstance(event, dict) or "choices" not in event:
                raise Failed(f"in a stream: {data[:TOLD].decode(errors='replace')}")
            usage = event.get("usage") or usage
            deltas = [choice["delta"] for choice in event["choices"]]
            if any(delta.get(name) for delta in deltas for name in TEXT):
                times.append(time.monotonic())
    raise Failed("a stream that ended before [DONE]")


async def _require_ok(response: aiohttp.ClientResponse) -> None:
    """Raises Failed."""
    if response.status != 200:
        text = (await response.content.read(TOLD)).decode(errors="replace")
        raise Failed(f"HTTP {response.status}: {' '.join(text.split())}", response.status)


def work(load: Load, number: int, start: Barrier, result: Connection) -> None:
    """One client process."""
    client = Client(load, number)
    start.wait(STARTED_S)
    asyncio.run(client.run())
    result.send(client.found)


def measure(load: Load) -> Found:
    """Put the load on its URL, from its processes."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(load.processes)
    ends, processes = [], []
    for number in range(load.processes):
        end, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(load, number, start, theirs), daemon=True)
        process.start()
        theirs.close()
        ends.append(end)
        processes.append(process)
    found = Found()
    for end in ends:
        found.add(end.recv())
    for process in processes:
        process.join()
    return found


def _headers() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )


_HINTS = {
    401: "OPENAI_API_KEY has to be a key of this endpoint",
    403: "OPENAI_API_KEY has to be a key that may do this",
    404: "a URL is what stands before /v1, and --model is a name that its /v1/models lists",
}


async def listed(url: str) -> str:
    """The first model that an endpoint lists. Raises Failed."""
    async with _session(30) as session, session.get(f"{url}/v1/models") as response:
        await _require_ok(response)
        found = await response.json(content_type=None)
        if not found["data"]:
            raise Failed("it lists none")
        return str(found["data"][0]["id"])


async def first(url: str, path: str, body: dict[str, object], timeout: float) -> None:
    """One request, whatever it is answered. Raises Failed."""
    asked = {**body, "max_tokens": 1}
    async with _session(timeout) as session, session.post(url + path, json=asked) as response:
        await _require_ok(response)


def _session(timeout: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        headers=_headers(), timeout=aiohttp.ClientTimeout(total=None, sock_read=timeout)
    )


FIRST: dict[str, tuple[str, dict[str, object]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
}


def choose_model(url: str, named: str | None, kind: str, timeout: float) -> str:
    """The model that is named, or the first that the endpoint lists. Exits with the reason if it
    does not answer.
    """
    path, body = FIRST[kind]
    where = "/v1/models"
    try:
        model = named or asyncio.run(listed(url))
        where = f"{path}, for the model {model}"
        asyncio.run(first(url, path, {"model": model, **body}, timeout))
        return model
    except Failed as error:
        why, hint = str(error), _HINTS.get(error.status, "")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        why, hint = str(error) or type(error).__name__, "is the URL right?"
    except (ValueError, LookupError, TypeError):
        why, hint = "is no list of models", "is the URL right?"
    if not hint and where == "/v1/models":
        hint = "name the model with --model"
    sys.exit(f"{url}{where}: {why}" + (f"; {hint}" if hint else ""))


Figures = dict[str, float | None]
COLUMNS = {
    "TTFT P50 s": ".3f",
    "P90 s": ".3f",
    "ITL P50 ms": ".1f",
    "P90 ms": ".1f",
    "tokens/s": ",.1f",
    "$/M tokens": ".3f",
    "cached": ".0%",
}


def figures(found: Found, seconds: float, price_per_hour: float | None) -> Figures:
    """Figures by column; None for unknown figures."""
    rate = found.tokens / seconds
    known = found.cached is not None and found.prompt
    return {
        "TTFT P50 s": _percentile(found.ttfts, 50),
        "P90 s": _percentile(found.ttfts, 90),
        "ITL P50 ms": _percentile([gap * 1e3 for gap in found.gaps], 50),
        "P90 ms": _percentile([gap * 1e3 for gap in found.gaps], 90),
        "tokens/s": rate,
        "$/M tokens": _per_million(rate, price_per_hour),
        "cached": (found.cached or 0) / found.prompt if known else None,
    }


def _percentile(values: Sequence[float], share: int) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1]


MEASURED: dict[str, str] = {
    "TTFT P50 ms": ".1f",
    "P99 ms": ".1f",
    "ITL P50 ms": ".1f",
    "ITL P99 ms": ".1f",
    "tokens/s": ",.1f",
    "goodput/s": ",.2f",
    "$/M tokens": ".3f",
}
"""Columns of a workload's levels."""


def of_level(found: Measured, price_per_hour: float | None) -> Figures:
    """Figures by column; None for unknown figures."""
    times = (found.ttft_p50, found.ttft_p99, found.itl_p50, found.itl_p99)
    figures = (*times, found.tokens, found.goodput, _per_million(found.tokens, price_per_hour))
    return dict(zip(MEASURED, figures, strict=True))


def _per_million(tokens: float, price_per_hour: float | None) -> float | None:
    """$ for a million tokens, at this many tokens per second."""
    if price_per_hour is None or not tokens:
        return None
    return price_per_hour / 3600 / tokens * 1e6


def row(name: str, cells: Sequence[str]) -> str:
    return f"{name:34}" + "".join(f"{cell:>12}" for cell in cells)


def cells(figures: Figures, columns: Mapping[str, str]) -> list[str]:
    return [
        "-" if (value := figures[name]) is None else f"{value:{form}}"
        for name, form in columns.items()
    ]


def ratios(one: Figures, base: Figures) -> list[str]:
    """Each figure ÷ the base's."""
    pairs = [(one[name], base[name]) for name in base]
    return [f"{it / of:.2f}" if it is not None and of else "-" for it, of in pairs]


def count(text: str) -> int:
    """8000, or 8k for the same. Raises ValueError."""
    number = int(text.removesuffix("k")) * (1000 if text.endswith("k") else 1)
    if number < 1:
        raise ValueError
    return number


def price(text: str) -> float:
    """Raises ValueError."""
    return amount(text)


def share(text: str) -> float:
    """Raises ValueError."""
    if not 0 <= float(text) <= 1:
        raise ValueError
    return float(text)


OF_STEADY = (
    *("context", "documents", "shared", "output", "concurrency", "rate", "warm_up"),
    *("duration", "processes", "ignore_eos", "seed"),
)
"""A workload's keys → their meaning here."""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", nargs="+", help="one or two, like http://host:8080")
    parser.add_argument("--model", help="its name (default: the first that the URL lists)")
    parser.add_argument("--workload", type=Path, metavar="FILE", help="the load, in AIPerf's names")
    objective = "ms to the first token, for the goodput of a workload"
    parser.add_argument("--slo-ttft-ms", type=count, help=objective)
    parser.add_argument("--slo-itl-ms", type=count, help="the same, between an answer's tokens")
    parser.add_argument("--context", type=count, default=8000, help="tokens of a document: 8k")
    parser.add_argument("--documents", type=count, default=50, help="that are shared")
    parser.add_argument("--shared", type=share, default=0.9, help="of requests: 0 to 1")
    parser.add_argument("--output", type=count, default=100, help="tokens of an answer")
    parser.add_argument("--ignore-eos", action="store_true", help="vLLM's: no shorter answers")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--concurrency", type=count, default=16, help="users (default: 16)")
    pace.add_argument("--rate", type=positive, help="requests/s, whatever the answers take")
    parser.add_argument("--duration", type=positive, default=60.0, help="s, with the warm-up")
    parser.add_argument("--warm-up", type=price, help="s (default: a fifth of the duration)")
    parser.add_argument("--processes", type=count, default=4, help="of clients")
    parser.add_argument("--timeout", type=positive, default=600.0, help="s without a byte")
    prices = "$ of all machines behind a URL; two for two URLs"
    parser.add_argument("--price-per-hour", type=price, nargs="+", help=prices)
    parser.add_argument("--seed", type=int, default=0, help="of the order of documents")
    options = parser.parse_args()
    if len(options.url) > 2:
        parser.error("one or two URLs")
    for url in options.url:
        if not url.startswith(("http://", "https://")):
            parser.error(f"{url}: a URL begins with http:// or https://")
    if options.workload:
        for name in OF_STEADY:
            if getattr(options, name) != parser.get_default(name):
                parser.error(f"--{name.replace('_', '-')}: --workload says what the load is")
    elif options.slo_ttft_ms or options.slo_itl_ms:
        parser.error("--slo-ttft-ms and --slo-itl-ms: are for the goodput of a --workload")
    if options.warm_up is None:
        options.warm_up = options.duration / 5
    if options.warm_up >= options.duration:
        parser.error(f"--warm-up {options.warm_up:g}: takes less than --duration")
    if options.price_per_hour and len(options.price_per_hour) not in (1, len(options.url)):
        parser.error("--price-per-hour: one price, or one for each URL")
    return options


def main() -> None:
    options = parsed()
    urls = [it.rstrip("/").removesuffix("/v1") for it in options.url]
    prices: list[float | None] = options.price_per_hour or [None]
    prices = prices * len(urls) if len(prices) == 1 else prices
    if options.workload:
        faults = measure_workload(options, urls, prices)
    else:
        faults = measure_steady(options, urls, prices)
    if faults:
        sys.exit("\n".join(["not all requests were answered:", *faults]))


def _by_vllm(
    asked: Workload, level: Level, url: str, model: str, objectives: Objectives, seed: int
) -> Measured:
    """Raises LoadError."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        words = of_vllm.command(
            *(asked, level),
            url=url,
            model=model,
            tokenizer=asked.tokenizer or model,
            seed=seed,
            objectives=objectives,
            result=result,
        )
        return of_vllm.run(words, level, result=result, log=log, key=None)


def measure_workload(
    options: argparse.Namespace, urls: list[str], prices: list[float | None]
) -> list[str]:
    """Put a workload on each URL, and print the figures of vLLM's benchmark. Returns the
    failures.
    """
    try:
        asked = workload.read(options.workload)
    except WorkloadError as error:
        sys.exit(str(error))
    objectives = Objectives(options.slo_ttft_ms, options.slo_itl_ms)
    seed = time.time_ns() % 2**31 if asked.seed is None else asked.seed
    models = [
        choose_model(url, options.model or asked.model, asked.endpoint, options.timeout)
        for url in urls
    ]
    if not asked.tokenizer and not all("/" in it for it in models):
        sys.exit(
            f"{options.workload}: tokenizer: is missing, and {models[0]} is no hub id; name a "
            "folder or a hub id: prompts are made of its tokens"
        )
    print(row("", ["requests", *MEASURED]), flush=True)
    faults = []
    for number, level in enumerate(asked.levels):
        print(level, flush=True)
        measured: list[Figures] = []
        for place, (url, model, price) in enumerate(zip(urls, models, prices, strict=True)):
            try:
                found = _by_vllm(asked, level, url, model, objectives, seed + 2 * number + place)
            except LoadError as error:
                faults.append(f"{url}, {level}: {error}")
                continue
            measured.append(of_level(found, price))
            print(row(url, [f"{found.requests:,}", *cells(measured[-1], MEASURED)]), flush=True)
        if len(measured) == 2:
            print(row("second ÷ first", ["", *ratios(measured[1], measured[0])]), flush=True)
        if faults:
            break  # a heavier load would fail as well
    return faults


def measure_steady(
    options: argparse.Namespace, urls: list[str], prices: list[float | None]
) -> list[str]:
    """Put the steady load on each URL, and print the measurements. Returns the failures."""
    models = [choose_model(url, options.model, "chat", options.timeout) for url in urls]
    pace = f"{options.concurrency} users"
    if options.rate is not None:
        pace, options.concurrency = f"{options.rate:g} requests/s", 0
    print(
        f"documents of about {options.context:,} tokens, {options.shared:.0%} of requests about "
        f"{options.documents}; {options.output} out; {pace}, {options.processes} processes; "
        f"{options.duration:g} s, of which {options.warm_up:g} s warm-up"
    )
    print(row("", ["requests", "failed", *COLUMNS]), flush=True)
    measured: list[Figures] = []
    faults = []
    for place, (url, model, price) in enumerate(zip(urls, models, prices, strict=True)):
        run = f"{time.time_ns():x}{place}"
        load = Load(
            url,
            model,
            run=run,
            timeout=options.timeout,
            **{name: getattr(options, name) for name in OF_STEADY},
        )
        found = measure(load)
        measured.append(figures(found, load.duration - load.warm_up, price))
        counts = [f"{found.requests:,}", f"{found.faults.total():,}"]
        print(row(url, [*counts, *cells(measured[-1], COLUMNS)]), flush=True)
        faults += [f"{url}: {times} x {what}" for what, times in found.faults.most_common(5)]
        if not found.ttfts:
            faults.append(f"{url}: none was answered that began after the warm-up")
    if len(measured) == 2:
        print(row("second ÷ first", ["", "", *ratios(measured[1], measured[0])]))
    return faults


if __name__ == "__main__":
    main()
