# SPDX-License-Identifier: Apache-2.0
"""The tokens that a step of the engine yields with each method of speculation.

The same prompts go greedily, one after the other or several at a time, to a server for each method
and each number k of proposed tokens, set by Slipway's options. A step that proposes k tokens yields
1 plus the accepted ones; position p counts as accepted if all positions before it were. The figures
are vLLM's own counters. On a CPU, only these figures are meaningful, because a draft costs more
there than it saves. With a GPU, the output also has the rate, as a ratio to the rate without
speculation in the same run.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import httpx

from lmi_config.facts import machine
from tests.support.harness import metrics
from tests.support.harness.process import SERVE, Program
from tests.support.models import tiny

PROMPTS, PROMPT_LENGTH = 16, 200  # how many, and characters
NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}


class Figures(NamedTuple):
    """drafts: steps that proposed; positions: accepted tokens by position; rate: tokens/s."""

    drafts: float
    positions: tuple[float, ...]
    rate: float

    @property
    def per_step(self) -> float:
        return 1 + sum(self.positions) / self.drafts if self.drafts else 1.0


def drafted(path: str | None, k: int) -> dict[str, str]:
    """The options. path: of the draft, or None for n-grams of the prompt."""
    if path is None:
        return {"OPTION_SPECULATIVE_CONFIG": json.dumps(NGRAM | {"num_speculative_tokens": k})}
    return {"OPTION_SPECULATIVE_DRAFT_MODEL": path, "OPTION_NUM_SPECULATIVE_TOKENS": str(k)}


def measured(
    environ: Mapping[str, str], prompts: list[str], tokens: int, concurrencies: list[int]
) -> dict[int, Figures]:
    """By how many requests are in flight: the figures of one server."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Program(*SERVE, environ=environ, log=Path(folder, "log")) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        server.ready()
        return {each: _round(client, prompts, tokens, each) for each in concurrencies}


def _round(client: httpx.Client, prompts: list[str], tokens: int, concurrency: int) -> Figures:
    """Each prompt once, or often enough to keep this many in flight."""

    def ask(prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"a request failed: {answer.status_code} {answer.text[:300]}")

    asked = prompts * -(-concurrency // len(prompts))
    before = counters(client)
    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(ask, asked))
    took = time.perf_counter() - began
    after = counters(client)
    found = {name: after[name] - before.get(name, 0) for name in after}
    positions = [name for name in found if name.isdigit()]
    return Figures(
        found.get("drafts", 0),
        tuple(found[name] for name in sorted(positions, key=int)),
        len(asked) * tokens / took,
    )


def counters(client: httpx.Client) -> dict[str, float]:
    """vLLM's counts: `drafts`, and accepted tokens under each position's number."""
    text = client.get("/metrics").text
    positions = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    accepted = {it.labels["position"]: it.value for it in metrics.samples(text, positions)}
    return {"drafts": metrics.total(text, "vllm:spec_decode_num_drafts_total"), **accepted}


def texts(files: list[Path]) -> list[str]:
    """Beginnings of texts, evenly taken from the files or from Python's own documentation."""
    text = "\n".join(file.read_text("utf-8", "replace") for file in files) if files else None
    pieces = [text[at:] for at in range(0, len(text), len(text) // PROMPTS)] if text else None
    found = pieces or [value.strip() for _, value in sorted(topics.items()) if len(value) > 1000]
    return [piece[:PROMPT_LENGTH] for piece in found][:PROMPTS]


def row(
    name: str, k: int | None, concurrency: int, found: Figures, plain: Figures, on_gpu: bool
) -> str:
    positions = " ".join(f"{count / found.drafts:.2f}" for count in found.positions if found.drafts)
    rate = f"{found.rate / plain.rate:>8.2f}" if on_gpu else ""
    return f"{name:14}{k or '':>3}{concurrency:>10}{found.per_step:>13.2f}{rate}  {positions}"


def plot(path: Path, found: Mapping[str, Mapping[int, Figures]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, by_k in found.items():
        axes.plot([*by_k], [it.per_step for it in by_k.values()], marker="o", label=name)
    axes.set_xlabel("proposed tokens")
    axes.set_ylabel("tokens per step of the engine")
    axes.set_ylim(bottom=1)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def methods(options: argparse.Namespace) -> Iterator[tuple[str, str | None]]:
    yield "ngram", None
    if options.draft:
        yield from (tuple(named.split("=", 1)) for named in options.draft)
    elif options.model is None:
        yield "draft model", str(tiny.make())  # the model itself: all is accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="instead of a tiny random one")
    parser.add_argument("--draft", action="append", metavar="NAME=FOLDER", help="may be repeated")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="where prompts come from")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--k", type=int, nargs="*", default=[1, 2, 3, 4, 5, 6, 7])
    parser.add_argument(
        "--concurrency", type=int, nargs="*", default=[1], metavar="N", help="requests at a time"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    here = machine.look({}, "/tmp")
    base = {
        "OPTION_MODEL_ID": options.model or str(tiny.make()),
        "OPTION_MAX_MODEL_LEN": "2048",
    }
    if not here.gpus:
        base["OPTION_KV_CACHE_MEMORY_BYTES"] = "512M"
    prompts = texts(options.text)
    print(f"{len(here.cpus)} CPUs, {len(here.gpus)} GPUs; {len(prompts)} prompts", flush=True)
    plain = measured(base, prompts, options.tokens, options.concurrency)
    ratio = "    rate ÷" if here.gpus else ""
    print(f"{'':14}{'k':>3}{'in flight':>10}{'tokens/step':>13}{ratio}  accepted at each position")
    for each, figures in plain.items():
        print(row("none", None, each, figures, figures, bool(here.gpus)), flush=True)
    found: dict[str, dict[int, Figures]] = {}
    for name, path in methods(options):
        for k in options.k:
            by_load = measured(
                base | drafted(path, k), prompts, options.tokens, options.concurrency
            )
            for each, figures in by_load.items():
                label = name if len(by_load) == 1 else f"{name}, {each} in flight"
                found.setdefault(label, {})[k] = figures
                print(row(name, k, each, figures, plain[each], bool(here.gpus)), flush=True)
    if options.plot:
        plot(options.plot, found)


if __name__ == "__main__":
    main()
