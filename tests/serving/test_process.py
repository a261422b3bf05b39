# SPDX-License-Identifier: Apache-2.0
"""Signals, orphans and children that have ended: real processes."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from serving import process
from serving.process import StopSignals

ROOT = Path(__file__).parents[2]


@pytest.mark.anyio
async def test_a_second_signal_hurries():
    signals = StopSignals()
    signals.listen(signal.SIGTERM)
    stop = asyncio.create_task(signals.stop())
    hurry = asyncio.create_task(signals.hurry())
    await asyncio.sleep(0)
    assert not stop.done()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(stop, 15)
    assert not hurry.done()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(hurry, 15)


ENDING_WITH_ITS_PARENT = """
import os, signal, sys, time
from serving.process import end_with_parent

parent = os.getpid()
child = os.fork()
if child:
    time.sleep(float(sys.argv[1]))
    print(child, flush=True)
    os._exit(0)
time.sleep(float(sys.argv[2]))
end_with_parent(signal.SIGKILL, parent)
time.sleep(60)
"""


@pytest.mark.parametrize(("parent_s", "child_s"), [(0.5, 0), (0, 0.5)])
def test_a_child_ends_with_its_parent_even_where_that_has_ended_before(parent_s, child_s):
    """The child also has the pipe, so the pipe ends when both have ended."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDING_WITH_ITS_PARENT, str(parent_s), str(child_s)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.stderr == ""
    psutil.wait_procs([*_known(int(ended.stdout))], timeout=10)
    assert not [child for child in _known(int(ended.stdout)) if child.status() != "zombie"]


def _known(number):
    with contextlib.suppress(psutil.NoSuchProcess):
        yield psutil.Process(number)


def test_what_has_ended_need_not_be_killed():
    """A child of the engine's may end after it was listed and before it is killed."""
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    listed = [psutil.Process(child.pid) for child in children]
    children[0].kill()
    children[0].wait()
    process.kill(listed)
    assert children[1].wait(10) == -signal.SIGKILL


REAPING = """
import asyncio, multiprocessing, os, subprocess
import psutil, uvloop
from serving import process

async def main():
    process.REAP_S = 0.2
    process.adopt_orphans()
    reaping = asyncio.create_task(process.reap())
    ours = multiprocessing.get_context("spawn").Process(target=os._exit, args=(7,))
    ours.start()
    shell = await asyncio.create_subprocess_exec("sh", "-c", "exit 5")
    orphans = "for i in 1 2 3; do sleep 600 >/dev/null 2>&1 & echo $!; done"
    orphans = subprocess.run(["sh", "-c", orphans], capture_output=True, text=True, check=True)
    orphans = [psutil.Process(int(number)) for number in orphans.stdout.split()]
    assert {orphan.ppid() for orphan in orphans} == {os.getpid()}
    for orphan in orphans:
        orphan.kill()
    while any(orphan.is_running() for orphan in orphans):
        await asyncio.sleep(0.1)
    assert not reaping.done()
    print(ours.exitcode, await shell.wait())

uvloop.run(main())
"""


def test_adopted_children_are_waited_for_and_no_others():
    ended = subprocess.run(
        [sys.executable, "-c", REAPING],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (ended.stdout, ended.stderr) == ("7 5\n", "")


BODIES = """
import resource, sys
from serving.process import keep_freed_memory
keep_freed_memory(int(sys.argv[1]), 1024 * 1024)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for number in range(50):
    if number == 1:
        before = faults()
    bodies = [b"1" * 300_000 for _ in range(8)]
    del bodies
print(faults() - before)
"""


def test_freed_memory_is_used_again():
    """Each page that was returned to the kernel costs a page fault."""

    def faults(size):
        command = [sys.executable, "-c", BODIES, str(size)]
        return int(subprocess.run(command, capture_output=True, check=True, cwd=ROOT).stdout)

    assert faults(32 * 1024 * 1024) < 1000 < faults(128 * 1024)


STRETCHED = """
import sys, psutil
from serving.process import keep_freed_memory
keep_freed_memory(32 * 1024 * 1024, int(sys.argv[1]))
kept = []
for number in range(20):
    bodies = []
    for _ in range(10):
        bodies.append(b"1" * 4_000_000)
        kept.append(b"1" * 1000)
(heap,) = [it for it in psutil.Process().memory_maps(grouped=False) if it.path == "[heap]"]
start, end = (int(it, 16) for it in heap.addr.split("-"))
print(end - start)
"""


def test_large_blocks_do_not_stretch_a_heap():
    def heap(largest):
        command = [sys.executable, "-c", STRETCHED, str(largest)]
        return int(subprocess.run(command, capture_output=True, check=True, cwd=ROOT).stdout)

    assert heap(1024 * 1024) < 0.5 * heap(32 * 1024 * 1024)


PEAKS = """
import sys, threading, psutil
from serving.process import return_freed_memory
if sys.argv[1:]:
    return_freed_memory(int(sys.argv[1]))
kept = []

def peak():
    small = [b"1" * 100_000 for _ in range(200)]
    large = [b"1" * 2_000_000 for _ in range(10)]
    kept.append(b"1" * 110_000)
    del small, large

turns = [threading.Event() for _ in range(9)]

def turn(number):
    turns[number].wait()
    for _ in range(3):
        peak()
    turns[number + 1].set()
    turns[-1].wait()

threads = [threading.Thread(target=turn, args=(number,)) for number in range(8)]
for it in threads:
    it.start()
turns[0].set()
turns[-1].wait()
print(psutil.Process().memory_info().rss)
"""


def test_a_peak_of_each_thread_does_not_stay_allocated():
    def resident(*words):
        command = [sys.executable, "-c", PEAKS, *words]
        return int(subprocess.run(command, capture_output=True, check=True, cwd=ROOT).stdout)

    assert resident(str(256 * 1024)) < 0.5 * resident()


BURST = """
import asyncio, sys, psutil
from serving import process
process.RETURN_S = 0.1
process.return_freed_memory(256 * 1024)

async def main():
    bodies = [b"1" * 100_000 for _ in range(1000)]
    kept = bodies[::50]
    del bodies
    before = psutil.Process().memory_info().rss
    task = asyncio.create_task(process.return_heaps())
    while before - psutil.Process().memory_info().rss < 50_000_000:
        await asyncio.sleep(0.1)

asyncio.run(main())
"""


def test_free_memory_below_used_blocks_is_returned():
    subprocess.run([sys.executable, "-c", BURST], cwd=ROOT, check=True, timeout=300)
