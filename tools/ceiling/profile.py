# SPDX-License-Identifier: Apache-2.0
"""The CPU time of the serving process by function: py-spy's samples on the ceiling bench.

One arm after the other gets load for --seconds while py-spy samples the serving process a hundred
times a second. The output has, in per cent, the functions with most samples in themselves (self),
and those with most samples including their callees. --folded keeps the samples as stacks, for flame
graphs.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from tests.support.harness.process import Program
from tools.ceiling.arms import ARMS, servers
from tools.ceiling.load import measured


def functions(folded: str) -> tuple[Counter[str], Counter[str], int]:
    """Samples by the function they were in, by the functions they were below, and all of them."""
    own: Counter[str] = Counter()
    below: Counter[str] = Counter()
    total = 0
    for line in folded.splitlines():
        stack, _, number = line.rpartition(" ")
        frames = [frame.rsplit(":", 1)[0].rstrip(")") for frame in stack.split(";")]
        own[frames[-1]] += int(number)
        for frame in {*frames}:
            below[frame] += int(number)
        total += int(number)
    return own, below, total


def record(py_spy: str, server: Program, seconds: float, file: Path) -> "subprocess.Popen[bytes]":
    command = [py_spy, "record", "--format", "raw", "--rate", "100", "--duration", f"{seconds:.0f}"]
    command += ["--output", str(file), "--pid", str(server.own.pid)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--py-spy", required=True, help="its command")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--arms", nargs="*", default=["/"], help="words: arms with one of them")
    parser.add_argument("--loads", nargs="*", default=["requests", "streams"])
    parser.add_argument("--folded", type=Path, help="a folder for the stacks")
    parser.add_argument("--lines", type=int, default=25)
    options = parser.parse_args()
    arms = [arm for arm in ARMS if any(word in arm.name for word in options.arms)]
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = options.folded or Path(temporary)
        folder.mkdir(exist_ok=True)
        found = servers(stack, Path(temporary), {arm.server for arm in arms}, None)
        for arm in arms:
            for load in options.loads:
                tokens, connections = (128, 64) if load == "streams" else (0, 32)
                body = arm.body(tokens or 1, bool(tokens))
                server = found[arm.server]
                measured(server, arm.path, body, tokens, connections, connections)
                file = folder / f"{arm.name.replace('/', '-').replace(' ', '')}-{load}.folded"
                spy = record(options.py_spy, server, options.seconds, file)
                end, units, cpu = time.monotonic() + options.seconds, 0, 0.0
                while time.monotonic() < end:
                    n = connections if tokens else 320
                    it = measured(server, arm.path, body, tokens, connections, n)
                    units, cpu = units + n * (tokens or 1), cpu + it.cpu * n * (tokens or 1)
                spy.wait()
                own, below, total = functions(file.read_text())
                print(f"\n{arm.name}, {load}: CPU {1e6 * cpu / units:.0f} µs, {total} samples")
                for title, counted in (("self", own), ("with what it calls", below)):
                    print(f"  {title}")
                    for name, number in counted.most_common(options.lines):
                        print(f"    {100 * number / total:5.1f}%  {name}", flush=True)


if __name__ == "__main__":
    main()
