# SPDX-License-Identifier: Apache-2.0
"""What windows lose of a tier's hits with vLLM's hybrid manager on, against the manager off.

With it on, blocks that have left a window are freed, and the chunks that held them are never
stored; with it off, layers with windows keep all, and so does a tier. On a CPU, with the copying
that GPUs have (the cache server copies, a block of 32 in a chunk of 128), a tiny random model with
windows in two of three layers, and prompts of 1, 4 and 16 windows that are computed in steps of 512
tokens, several at once:

    eviction    the engine has lost the prompts, the tier has what was stored
    restart     the tier had lost all while the engine had it; the prompts were asked again, and
                then the engine lost them too
    again       the same once more: what was computed anew is stored

Each prompt is asked with another end. Printed are the tokens from the tier, of those that could
have come from there, and the share that is lost with the manager on. Every answer is compared with
one that nothing can hit; one that differs is a fault, and the exit code is 1.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from scripts.harness import ports
from scripts.models import tiny_attention
from scripts.models.tiny import VOCABULARY

BLOCK, CHUNK = 32, 128
LENGTHS = (1, 4, 16)
"""Of prompts, in windows."""
CASES = ("eviction", "restart", "again")
STEP = 512
PROMPTS = 4
END = 40
"""Tokens after a prompt, which differ each time."""
NEAR = 1e-3
OWN = "vllm:prefix_cache_hits"
"""Of the engine's own cache: in the case "restart" it has to have the prompts."""
STORED_S = 1.0
"""For what was stored to be there."""
ARMS = ("off", "on")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def tokens(count: int, seed: object) -> list[int]:
    drawn = random.Random(str(seed))
    return [drawn.randrange(2, VOCABULARY) for _ in range(count)]


@contextlib.contextmanager
def cache_server(port: int, http: int, folder: Path) -> Iterator[None]:
    command = [
        *(str(Path(sys.executable).with_name("lmcache")), "server", "--host=127.0.0.1"),
        *(f"--port={port}", "--http-host=127.0.0.1", f"--http-port={http}"),
        *(f"--prometheus-port={ports.free()}", f"--chunk-size={CHUNK}", "--l1-size-gb=1"),
        *("--eviction-policy=LRU", "--no-l1-use-lazy", "--supported-transfer-mode=auto"),
    ]
    with (folder / "lmcache.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"http://127.0.0.1:{http}/healthcheck").raise_for_status()
                break
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit((folder / "lmcache.log").read_text()[-3000:])
            time.sleep(0.5)
        yield
    finally:
        server.terminate()
        server.wait(30)


class Engine:
    """vLLM with Slipway's connector. The cache server is on these ports."""

    def __init__(self, window: int, manager: str, port: int, http: int) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        longest = max(LENGTHS) * window + 2 * END
        connector = KVTransferConfig(
            kv_connector="FaultTolerantConnector",
            kv_connector_module_path="serving.engine.kv_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": port,
                "lmcache.mp.mq_timeout": 5.0,
                "lmcache.mp.heartbeat_interval": 2.0,
                "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            },
        )
        self._llm: Any = LLM(
            model=str(tiny_attention.make("windows_and_full", window=window)),
            dtype="float32",
            max_model_len=longest + BLOCK,
            max_num_seqs=PROMPTS,
            max_num_batched_tokens=STEP,
            block_size=BLOCK,
            num_gpu_blocks_override=3 * PROMPTS * (longest // BLOCK + 2),
            enable_prefix_caching=True,
            enforce_eager=True,
            disable_log_stats=False,
            disable_hybrid_kv_cache_manager=manager == "off",
            kv_transfer_config=connector,
        )
        self._http = http
        self._salts = itertools.count()

    def hits(self, series: str = "vllm:external_prefix_cache_hits") -> int:
        """Tokens from the tier, or of another series."""
        return sum(it.value for it in self._llm.get_metrics() if it.name == series)

    def ask(self, prompts: Sequence[list[int]], *, cold: bool = False) -> list[dict[int, float]]:
        """Of each prompt, at once: the most likely tokens' log probabilities, the first one's."""
        from vllm import SamplingParams

        asked = [
            {"prompt_token_ids": it, **({"cache_salt": f"{next(self._salts)}"} if cold else {})}
            for it in prompts
        ]
        wanted = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=5)
        answers = self._llm.generate(asked, wanted, use_tqdm=False)
        time.sleep(STORED_S)
        firsts = (it.outputs[0].logprobs[0] for it in answers)
        return [{token: it.logprob for token, it in first.items()} for first in firsts]

    def lose(self) -> None:
        """The engine's own cache, which it keeps while anything is stored from it."""
        while not self._llm.reset_prefix_cache():
            self.ask([tokens(2, next(self._salts))])

    def end(self) -> None:
        """While the cache server is there: vLLM's processes wait for it."""
        self._llm.llm_engine.engine_core.shutdown()

    def lose_tier(self) -> None:
        url = f"http://127.0.0.1:{self._http}/cache/clear"
        httpx.post(url, json={}, timeout=10).raise_for_status()


def measured(engine: Engine, length: int) -> Iterator[dict[str, Any]]:
    """What each case gives for prompts of so many tokens, and faults."""
    prompts = [tokens(length, (length, number)) for number in range(PROMPTS)]

    def again(name: str) -> dict[str, Any]:
        before, own = engine.hits(), engine.hits(OWN)
        asked = [it + tokens(END, (name, length)) for it in prompts]
        got = engine.ask(asked)
        hits, own = engine.hits() - before, engine.hits(OWN) - own
        right = engine.ask(asked, cold=True)
        wrong = sum(
            max(abs(one.get(token, -99) - logprob) for token, logprob in other.items()) > NEAR
            for one, other in zip(got, right, strict=True)
        )
        return {"length": length, "case": name, "hits": hits, "own": own, "wrong": wrong}

    engine.ask([it + tokens(END, "first") for it in prompts])
    engine.lose()
    yield again("eviction")
    engine.lose_tier()
    filled = again("the engine has it")
    engine.lose()
    found = again("restart")
    yield {**found, "own": filled["own"], "wrong": found["wrong"] + filled["wrong"]}
    engine.lose()
    yield again("again")


def one_arm(window: int, manager: str) -> None:
    """Print a line of JSON for each case. In a process of its own: vLLM leaves much behind."""
    port, http = ports.free(), ports.free()
    with tempfile.TemporaryDirectory() as folder, cache_server(port, http, Path(folder)):
        engine = Engine(window, manager, port, http)
        for times in LENGTHS:
            for found in measured(engine, times * window):
                say(json.dumps({"window": window, "windows": times, **found}))
        engine.end()


def run_arm(window: int, manager: str) -> list[dict[str, Any]]:
    quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_KVCACHE_SPACE": "1"}
    quiet |= {"PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.e2e.window_hits"]
    command += ["--windows", str(window), "--arm", manager]
    ended = subprocess.run(
        command, env={**os.environ, **quiet}, capture_output=True, text=True, check=False
    )
    lines = [it for it in ended.stdout.splitlines() if it.startswith('{"window"')]
    if ended.returncode or len(lines) != len(LENGTHS) * len(CASES):
        sys.exit(f"{ended.stderr[-4000:]}\n{ended.stdout}")
    return [json.loads(it) for it in lines]


COLUMNS = ("window", "prompt", "after", "could hit", "off", "on", "lost", "wrong")


def rows(off: Sequence[dict[str, Any]], on: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """A row for each case, and one for all of them."""
    total = {"could": 0, "off": 0, "on": 0, "wrong": 0}
    for one, other in zip(off, on, strict=True):
        could = PROMPTS * (one["length"] // CHUNK) * CHUNK
        wrong = one["wrong"] + other["wrong"]
        for name, value in zip(total, (could, one["hits"], other["hits"], wrong), strict=True):
            total[name] += value
        where = (str(one["window"]), f"{one['windows']} windows", one["case"])
        yield [*where, *_counts(could, one["hits"], other["hits"], wrong)]
    yield ["", "", "all", *_counts(*total.values())]


def _counts(could: int, off: int, on: int, wrong: int) -> list[str]:
    lost = f"{1 - on / off:.0%}" if off else "-"
    return [f"{could:,}", f"{off:,}", f"{on:,}", lost, str(wrong)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, nargs="+", default=[128], help="tokens of a window")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        one_arm(options.windows[0], options.arm)
        return
    say("".join(f"{cell:>12}" for cell in COLUMNS))
    faults = 0
    for window in options.windows:
        off, on = (run_arm(window, it) for it in ARMS)
        for row in rows(off, on):
            say("".join(f"{cell:>12}" for cell in row))
        faults += sum(it["wrong"] for it in (*off, *on))
        if any(it["case"] == "restart" and not it["own"] for it in (*off, *on)):
            sys.exit("after a restart the engine did not have the prompts: it says nothing of that")
    if faults:
        sys.exit(f"{faults} answers differ from those that nothing could hit")


if __name__ == "__main__":
    main()
