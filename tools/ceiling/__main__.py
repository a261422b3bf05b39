# SPDX-License-Identifier: Apache-2.0
"""The capacity of the server in front of an engine that computes nothing, in requests and tokens.

Plain vLLM and Slipway run the same engine core, vLLM's own with its scheduler and sockets. An
executor without a model (engine.py) replaces vLLM's: it returns the first token at once, and others
at 50 tokens/s. Rounds of load go to the arms in turn, and each round's figure is compared with
plain vLLM's of the same round. The output has medians over the rounds and, in brackets, quartiles.
CPU is that of the serving process, in user and kernel, and of a model.py's process; the CPU of the
engine and the load does not count. If they share the machine's cores, rates depend on all of them,
and CPU only on the server. "Events" are a stream's events per token: vLLM joins tokens when the
server does not keep up. "One core" is the number of streams at that rate that one core can serve,
by the CPU time of a token. The search for the knee increases the number of streams until the server
does not keep up.

With --before, a checkout of another version is measured in the same rounds. vLLM's front end in
Rust is measured if there is one: the program that --rust names, or that of the installed vLLM
(only its wheel for CUDA has one). --soak only sends this many streams to Slipway and prints its
memory.
"""

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import psutil

from tests.support.harness.closed_loop import Failed
from tests.support.harness.process import Program
from tests.support.harness.stats import cpu_ratio, paired, print_changes, rate_ratio, spread
from tools.ceiling.arms import ARMS, RUST_ARMS, SLIPWAY, Arm, again, completion, rust, servers
from tools.ceiling.load import Round, measured

Rounds = dict[str, list[Round]]

CONCURRENCY, REQUESTS = 32, 640
STREAMS, TOKENS = 64, 128
STEP_MS = 20.0  # engine.py's
KNEE = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
KEEPS_UP = 0.8
"""A server keeps up if it delivers at least this share of the offered tokens. Events are no
measure: vLLM joins tokens after each hiccup of the machine.
"""


def compare(
    found: dict[str, Program], arms: list[Arm], rounds: int, tokens: int, connections: int, n: int
) -> Rounds:
    """tokens: of each stream; 0 for requests of one token."""
    rows: Rounds = {arm.name: [] for arm in arms}
    for number in range(-1, rounds):  # the first warms up and is not counted
        # Every other round the other way about, so that none is always first.
        for arm in arms if number % 2 else reversed(arms):
            body = arm.body(tokens or 1, bool(tokens))
            one = once(found[arm.server], arm, body, tokens, connections, n)
            if number >= 0:
                rows[arm.name].append(one)
    return rows


def once(
    server: Program, arm: Arm, body: dict[str, object], tokens: int, connections: int, n: int
) -> Round:
    try:
        return measured(server, arm.path, body, tokens, connections, n, arm.key)
    except (Failed, TimeoutError) as error:
        sys.exit(f"{arm.name}: {error or 'an answer never came'}")


def report(title: str, unit: str, arms: list[Arm], rows: Rounds) -> None:
    print(f"\n{title}")
    columns = [f"{unit}s/s", "ratio", f"CPU µs/{unit}", "CPU ratio", "p50 ms", "RSS MB"]
    if unit == "token":
        columns += ["events/token", "one core"]
    print(f"{'':36}" + "".join(f"{column:>25}" for column in columns))
    for arm in arms:
        row, base = rows[arm.name], rows[arm.base]
        cells = [
            spread([it.rate for it in row], ".0f"),
            spread(paired(rate_ratio, row, base), ".3f"),
            spread([1e6 * it.cpu for it in row], ".1f"),
            spread(paired(cpu_ratio, row, base), ".3f"),
            spread([1e3 * it.p50 for it in row], ".1f"),
            f"{max(it.memory for it in row) / 1e6:.0f}",
        ]
        if unit == "token":
            cells.append(spread([it.events for it in row], ".2f"))
            cells.append(spread([STEP_MS / 1000 / it.cpu for it in row], ".0f"))
        print(f"{arm.name:36}" + "".join(f"{cell:>25}" for cell in cells), flush=True)
    print_changes(rows)


def knee(found: dict[str, Program], arms: list[Arm]) -> None:
    print(f"\nstreams of {1000 / STEP_MS:.0f} tokens/s, ever more at once")
    print(
        f"{'':36}"
        + "".join(f"{column:>15}" for column in ("streams", "tokens/s", "cores", "events/token"))
    )
    for arm in arms:
        for streams in KNEE:
            body = arm.body(TOKENS, True)
            it = once(found[arm.server], arm, body, TOKENS, streams, streams)
            cells = (f"{streams}", f"{it.rate:.0f}", f"{it.busy:.2f}", f"{it.events:.2f}")
            print(f"{arm.name:36}" + "".join(f"{cell:>15}" for cell in cells), flush=True)
            if it.rate < KEEPS_UP * streams * 1000 / STEP_MS:
                break


def soak(found: dict[str, Program], arms: list[Arm], streams: int) -> None:
    """Memory after each twentieth of this many streams of 8 tokens, over all arms in turn."""
    share = max(streams // 20, 64)
    for number in range(20):
        arm = arms[number % len(arms)]
        it = once(found[SLIPWAY], arm, arm.body(8, True), 8, 64, share)
        print(
            f"{(number + 1) * share:>9} streams, {arm.name:30} {it.memory / 1e6:8.1f} MB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--scale", type=float, default=1.0, help="of the requests in a round")
    parser.add_argument("--arms", nargs="*", help="words: arms with one of them, beside vLLM's")
    parser.add_argument("--loads", nargs="*", default=["requests", "streams", "knee"])
    parser.add_argument("--before", type=Path, help="a checkout to measure as well")
    parser.add_argument("--rust", type=Path, help="vLLM's front end in Rust (vllm-rs)")
    parser.add_argument("--soak", type=int, help="streams to send to Slipway")
    parser.add_argument("--options", nargs="*", default=[], help="OPTION_…=… of all servers")
    options = parser.parse_args()

    front_end = rust(options.rust)
    if not front_end:
        print("no arm in Rust: the installed vLLM has no vllm-rs, and --rust names none")
    arms = [*ARMS, *(RUST_ARMS if front_end else ()), *(again(ARMS) if options.before else ())]
    if options.arms:
        wanted = [arm for arm in arms if any(word in arm.name for word in options.arms)]
        bases = {arm.base for arm in wanted}
        bases |= {arm.base for arm in arms if arm.name in bases}
        arms = [arm for arm in arms if arm in wanted or arm.name in bases]
    if options.soak:
        arms = [arm for arm in arms if arm.server == SLIPWAY]
    print(f"{psutil.cpu_count()} CPUs; arms: {', '.join(arm.name for arm in arms)}", flush=True)

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        names = {arm.server for arm in arms}
        more = dict(option.split("=", 1) for option in options.options)
        found = servers(stack, Path(folder), names, options.before, more, front_end)
        if options.soak:
            soak(found, arms, options.soak)
            return
        if "requests" in options.loads:
            n = max(int(REQUESTS * options.scale), 2 * CONCURRENCY)
            rows = compare(found, arms, options.rounds, 0, CONCURRENCY, n)
            report(f"requests of 1 token, concurrency {CONCURRENCY}", "request", arms, rows)
        if "streams" in options.loads:
            rows = compare(found, arms, options.rounds, TOKENS, STREAMS, STREAMS)
            title = f"{STREAMS} streams of {TOKENS} tokens, {1000 / STEP_MS:.0f} each second"
            report(title, "token", arms, rows)
        if "knee" in options.loads:
            knee(found, [arm for arm in arms if arm.body is completion])


if __name__ == "__main__":
    main()
