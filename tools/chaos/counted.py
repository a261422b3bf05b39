# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.chaos.counted ARGUMENTS`: run a module as `python ARGUMENTS` would, and write
how many tasks of asyncio are not done to the file that TASKS_FILE names, every second.
"""

import asyncio
import contextlib
import os
import runpy
import sys
import threading
import time
from pathlib import Path

TASKS_FILE = "CHAOS_TASKS_FILE"


def count(file: Path) -> None:
    told = file.with_suffix(".new")
    while True:
        with contextlib.suppress(RuntimeError):  # one came or went meanwhile
            told.write_text(f"{not_done()}")
            told.rename(file)
        time.sleep(1)


def not_done() -> int:
    """The tasks that are not done. No variable keeps the list while `count` sleeps: the set of all
    tasks is weak, and the list would keep each task that is done, with all that its frames hold.
    """
    return sum(not it.done() for it in [*asyncio.tasks._all_tasks])  # type: ignore[attr-defined]


def main() -> None:
    _, _, module, *arguments = sys.argv[1:]  # -P -m MODULE …, as entrypoint.sh has it
    if file := os.environ.pop(TASKS_FILE, ""):
        threading.Thread(target=count, args=(Path(file),), daemon=True).start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
