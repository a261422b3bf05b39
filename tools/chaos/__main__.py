# SPDX-License-Identifier: Apache-2.0
"""Faults under load: counts lost and wrong answers, and growing processes. All should be 0.

Two servers run a tiny model with KV cache tiers, adapters and a formatter. They share a Valkey
behind a proxy (or HyperPod's tiered storage: its stand-in), and a router runs in front of them.
While mixed traffic goes on, faults come one after the other in a random order:

- engine processes, the cache server and the shared store are killed or hang
- tiered storage reports wrong places
- a server is asked to stop
- the network to the store hangs
- a disk is full

During all of it adapters are registered, updated and deleted, and clients send garbage or leave in
the middle. In the end all processes are asked to stop under load. Ended processes are started
again, as Docker or Kubernetes would do.

Prompts are greedy, in float32. Their answers are recorded before, from a server without other load.
A wrong answer, or one of another request or adapter, is therefore detected. The printed ledger has
the end of each request. The exit code is 0 if no answer was lost or wrong, no error came without
its fault, and neither memory nor file descriptors grew.

--copies N runs one server with N copies of the model. It kills a copy, an engine, the router, and
all of them. If the router ends, connections of clients are cut.
--prefill lets the first server compute long prompts of the others, so that faults come in between.
--soak keeps the same traffic going without faults, and prints the growth of memory in an hour.
--hostile adds clients that attack the servers and the router (hostile/clients.py), and a second
router whose replicas, store and files are hostile (hostile/gate.py). With --soak it prints the
growth.
"""

import argparse
import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tools.chaos.faults import FAULTS, OF_COPIES, Faults
from tools.chaos.hostile.assault import Assault
from tools.chaos.ledger import GROWS_SHARE, Ledger, Sample, grown, shares, slopes, table
from tools.chaos.users import Users
from tools.chaos.world import World, say, until

WARM_S = 15.0
"""Seconds of traffic before the first quiet moment, and after the last fault."""
IDLE_S = 80.0
"""Longer than the life of silent connections, which attacks leave behind."""
ROUND_S = 180.0
"""Seconds of attacks between two quiet moments of --soak."""
SOAK_WARM_S = 600.0
"""Seconds of --soak with attacks before growth counts."""


class Chaos:
    """One run: the world, its users, and the faults."""

    def __init__(
        self, options: argparse.Namespace, folder: Path, closing: contextlib.ExitStack
    ) -> None:
        self.options = options
        self.ledger = Ledger()
        self.world = World(
            servers=options.servers,
            copies=options.copies,
            store=options.store,
            prefill=options.prefill,
            hostile=options.hostile,
            folder=folder,
            ledger=self.ledger,
            closing=closing,
        )
        self.users = Users(self.world, self.ledger, options.seed)
        self.compared = ""
        self.prefills: dict[str, int] = {}

    async def start(self) -> None:
        """Start all of it, and record the right answers."""
        began = time.monotonic()
        await self.world.start()
        different = await self.users.record()
        say(f"{len(self.users.known)} answers are known, {different} of them different", began)

    async def run(self) -> None:
        """Traffic and faults, for as long as asked, then the end."""
        options, users = self.options, self.users
        async with asyncio.TaskGroup() as tasks:
            keeping = [tasks.create_task(it.keep()) for it in self.world.programs]
            traffic = [tasks.create_task(it) for it in users.acting(options.users)]
            if options.hostile and options.soak:
                await self.world.fill()
            users.going.set()
            await asyncio.sleep(WARM_S)
            before = await self.quiet()
            users.going.set()
            if options.hostile:
                await self._hostile()
            elif options.soak:
                await self._soak()
            else:
                faults = Faults(self.world, self.ledger, options.seed)
                await faults.run(options.faults, options.minutes)
            before_the_end = await self.world.prefills()
            await asyncio.sleep(WARM_S)
            after = await self.quiet()
            self.prefills = await self.world.prefills()
            if options.prefill and not handed_over(self.prefills) > handed_over(before_the_end):
                self.ledger.problems.append("prompts are not handed over any more")
            if not (options.hostile and options.soak):  # it has its own limit, of an hour's growth
                share = 0 if options.hostile else GROWS_SHARE
                self.ledger.problems += grown(before, after, share)
            users.going.set()
            await asyncio.sleep(2)
            say("asking all to stop, under load")
            await self._stop()
            for task in (*traffic, *keeping):
                task.cancel()
        self.compared = table(before, after)

    async def _stop(self) -> None:
        """One server, as in a rolling update, then the router, then the rest."""
        first, *rest = self.world.servers
        if self.world.copies:
            self.users.client.stopped_at = time.monotonic()
        await first.stop_at_last()
        await asyncio.sleep(1)
        if self.world.copies:
            await self.users.pause()
            return
        self.users.client.stopped_at = time.monotonic()
        await self.world.router.stop_at_last()
        gate = [self.world.gate] if self.world.gate else []
        await asyncio.gather(*(it.stop_at_last() for it in (*rest, *gate)))
        await self.users.pause()

    async def quiet(self) -> dict[str, Sample]:
        """Let all requests end, check that they have left no trace, and measure."""
        await self.users.pause()
        await self.users.client.close()
        if not await until(self.world.idle, 20):
            self.ledger.problems.append("in quiet, requests are still under way somewhere")
        await asyncio.sleep(3)
        return self.world.samples()

    async def _hostile(self) -> None:
        """Have clients attack for as long as asked. --soak: traffic alternates with quiet moments
        that measure memory, files and tasks.
        """
        options, ledger = self.options, self.ledger
        ended = time.monotonic() + 60 * options.minutes
        warm = time.monotonic() + min(SOAK_WARM_S, 30 * options.minutes)
        times: list[float] = []
        series: dict[str, list[Sample]] = {}
        async with Assault(self.world, self.users, options.seed, ledger) as assault:
            while (left := ended - time.monotonic()) > 0:
                await assault.run(min(ROUND_S, left) if options.soak else left)
                if not options.soak:
                    break
                await asyncio.sleep(IDLE_S)
                samples = await self.quiet()
                self.users.going.set()
                say("; ".join(_told(name, it) for name, it in sorted(samples.items())))
                if time.monotonic() > warm:
                    times.append(time.monotonic())
                    for name, sample in samples.items():
                        series.setdefault(name, []).append(sample)
        print(f"\n{assault.text()}", flush=True)
        if options.soak and len(times) > 3:
            text, problems = shares(times, series)
            print(f"\n{text}", flush=True)
            ledger.problems += problems
        await asyncio.sleep(IDLE_S)

    async def _soak(self) -> None:
        """Measure for as long as asked."""
        ended = time.monotonic() + 60 * self.options.minutes
        times: list[float] = []
        series: dict[str, list[Sample]] = {}
        while time.monotonic() < ended:
            times.append(time.monotonic())
            for name, sample in self.world.samples().items():
                series.setdefault(name, []).append(sample)
            await asyncio.sleep(2)
        print(f"\n{slopes(times, series)}")

    async def close(self) -> None:
        await self.users.client.close()
        await self.world.aside.close()


def _told(name: str, it: Sample) -> str:
    return f"{name}: {it.memory:.1f} MiB, {it.files} files, {it.tasks} tasks"


def handed_over(prefills: Mapping[str, int]) -> int:
    """Prompts that one server has computed and another has answered."""
    return prefills.get("handed_over", 0)


async def chaos(options: argparse.Namespace, folder: Path) -> bool:
    """Whether everything was right."""
    task = asyncio.current_task()
    assert task
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.ExitStack() as closing:
        run = Chaos(options, folder, closing)
        try:
            await run.start()
            await run.run()
        finally:
            await run.close()
            run.world.look_into_logs()
            print("\n" + run.ledger.text(), flush=True)
    print("\n" + run.compared)
    if options.prefill:
        found = ", ".join(f"{count} {end}" for end, count in run.prefills.items())
        print(f"\nprompts for another server: {found or 'none'}")
    return run.ledger.good


_ALL = FAULTS | OF_COPIES


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/dev chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="faults:\n" + "\n".join(f"  {name}: {it[1]}" for name, it in _ALL.items()),
    )
    parser.add_argument("--minutes", type=float, default=5, help="of faults, or of soaking")
    parser.add_argument("--soak", action="store_true", help="no faults; print slopes")
    parser.add_argument("--hostile", action="store_true", help="no faults, but hostile clients")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and of the faults' order")
    parser.add_argument("--servers", type=int, default=2, help="2 or more")
    parser.add_argument("--copies", type=int, default=0, help="of the model, in one server")
    parser.add_argument(
        "--store", choices=("valkey", "tieredstorage"), default="valkey", help="that they share"
    )
    parser.add_argument(
        "--prefill", action="store_true", help="the first computes the others' long prompts"
    )
    parser.add_argument("--users", type=int, default=8, help="who ask at the same time")
    parser.add_argument("--faults", nargs="+", choices=_ALL, default=[], metavar="FAULT")
    parser.add_argument("--logs", type=Path, help="a folder for the logs, which are else removed")
    options = parser.parse_args()
    known = OF_COPIES if options.copies else FAULTS
    options.faults = [it for it in options.faults or known if it in known]
    if options.copies and (options.prefill or options.hostile):
        parser.error("--copies goes with neither --prefill nor --hostile")
    if options.store != "tieredstorage":
        options.faults = [it for it in options.faults if it != "store-lies"]
    if options.prefill and options.hostile:
        parser.error("with --prefill the servers answer nobody but the router")
    if options.servers < 2:
        parser.error("with one server there is nobody to answer while it starts again")
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        try:
            good = asyncio.run(chaos(options, Path(folder)))
        except asyncio.CancelledError:
            print("interrupted")
            return 130
        finally:
            if options.logs:
                options.logs.mkdir(parents=True, exist_ok=True)
                for log in Path(folder).glob("*.log"):
                    shutil.copy(log, options.logs)
    print("\nall was as it should be" if good else "\nnot all was as it should be")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
