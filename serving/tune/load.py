# SPDX-License-Identifier: Apache-2.0
"""A workload's load on an endpoint, generated and measured by `vllm bench serve`. It comes with
vLLM, so its definitions of TTFT and goodput are those of published results.
"""

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.observability.redaction import redacted
from serving.process import begin
from serving.protocol import CHAT_COMPLETIONS, COMPLETIONS
from serving.tune.workload import Level, Workload, spread

_PATHS = {"chat": ("openai-chat", CHAT_COMPLETIONS), "completions": ("openai", COMPLETIONS)}
_TOLD = 300
"""Most characters of an error."""


class LoadError(Exception):
    """A load could not be measured. The message says why."""


@dataclass(frozen=True)
class Objectives:
    """Latency targets in milliseconds, or None. ttft: to the first token. itl: between two tokens
    of an answer, on average; vLLM's benchmark calls it TPOT.
    """

    ttft: int | None
    itl: int | None

    def excess(self, found: "Measured") -> float:
        """Return the largest ratio of a 99th percentile to its objective. Up to 1 all objectives
        are met. 0 without objectives.
        """
        pairs = ((found.ttft_p99, self.ttft), (found.itl_p99, self.itl))
        return max((value / wanted for value, wanted in pairs if wanted), default=0.0)


@dataclass(frozen=True)
class Measured:
    """The results of a level. Percentiles are in milliseconds. itl: percentiles of the answers'
    averages. tokens: generated tokens per second. goodput: requests/s that met the objectives; None
    without objectives.
    """

    level: str
    requests: int
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    tokens: float
    goodput: float | None = None


def command(
    workload: Workload,
    level: Level,
    *,
    url: str,
    model: str,
    tokenizer: str,
    seed: int,
    objectives: Objectives,
    result: Path,
    remote_code: bool = False,
) -> list[str]:
    """Return the command line that generates the load on the server at `url`.

    result: the file that it writes. seed: the seed of the prompts. Two loads with the same seed
    have the same prompts, so the second one finds them cached.
    """
    backend, path = _PATHS[workload.endpoint]
    words: dict[str, Any] = {
        "backend": backend,
        "endpoint": path,
        "base-url": url,
        "model": model,
        "tokenizer": tokenizer,
        "num-prompts": workload.requests(level),
        "num-warmups": workload.warm_ups(level),
        "seed": seed,
        "percentile-metrics": "ttft,tpot",
        "metric-percentiles": "50,99",
        "result-dir": result.parent,
        "result-filename": result.name,
        **_prompts(workload),
    }
    if level.users:
        words["max-concurrency"] = level.users
    if level.rate is not None:
        words["request-rate"] = level.rate
    found = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    found += [part for name, value in words.items() for part in (f"--{name}", str(value))]
    found += ["--save-result", "--save-detailed", "--disable-tqdm", "--ignore-eos"]
    if url.startswith("https:"):
        found.append("--insecure")  # the server's certificate is for another name than its address
    if remote_code:
        found.append("--trust-remote-code")
    limits = {"ttft": objectives.ttft, "tpot": objectives.itl}
    if wanted := [f"{name}:{value}" for name, value in limits.items() if value]:
        found += ["--goodput", *wanted]
    return found


def _prompts(workload: Workload) -> dict[str, Any]:
    if workload.prefixes:
        return {
            "dataset-name": "prefix_repetition",
            "prefix-repetition-num-prefixes": workload.prefixes,
            "prefix-repetition-prefix-len": workload.prefix,
            "prefix-repetition-suffix-len": workload.input,
            "prefix-repetition-output-len": workload.output,
        }
    ratios = {
        "input": round(spread(workload.input, workload.input_stddev), 6),
        "output": round(spread(workload.output, workload.output_stddev), 6),
    }
    return {
        "dataset-name": "random",
        "random-input-len": workload.input,
        "random-output-len": workload.output,
        "random-range-ratio": json.dumps(ratios),
    }


def run(words: list[str], level: Level, *, result: Path, log: Path, key: str | None) -> Measured:
    """Run a command of command(). Returns its results. log: gets its output. key: the endpoint's
    API key.

    Raises LoadError.
    """
    result.unlink(missing_ok=True)
    environ = {**os.environ, **({"OPENAI_API_KEY": key} if key else {})}
    with log.open("ab") as output:
        start = output.tell()
        process = begin(words, environ, output)
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    try:
        raw = json.loads(result.read_bytes())
    except (OSError, ValueError):
        said = log.read_bytes()[start:].decode(errors="replace")
        by = f"vllm bench serve with the tokenizer {words[words.index('--tokenizer') + 1]}"
        raise LoadError(f"{by}: {_reason(said, code)}") from None
    finally:
        result.unlink(missing_ok=True)  # it contains the answers' texts
    return measured(raw, level)


def _reason(said: str, code: int) -> str:
    """Return the exception that a program ended with, or its exit code."""
    errors = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception)\b.*", said, re.MULTILINE)
    return redacted(errors[-1])[:_TOLD] if errors else f"exit code {code}"


def measured(raw: Mapping[str, Any], level: Level) -> Measured:
    """Return the results in a load's file. Raises LoadError if requests failed."""
    if failed := raw["failed"]:
        why = next((it for it in raw.get("errors", ()) if it), "no reason given")
        told = redacted(" ".join(str(why).split()))[:_TOLD]
        if told == "Bad Request":  # vLLM's benchmark has no more details about a refusal
            told += ", as of a prompt and answer that are too long for the model"
        raise LoadError(f"{failed} of {failed + raw['completed']} requests failed: {told}")
    return Measured(
        level=str(level),
        requests=raw["completed"],
        ttft_p50=raw["p50_ttft_ms"],
        ttft_p99=raw["p99_ttft_ms"],
        itl_p50=raw["p50_tpot_ms"],
        itl_p99=raw["p99_tpot_ms"],
        tokens=raw["output_throughput"],
        goodput=raw["request_goodput"],
    )
