# SPDX-License-Identifier: Apache-2.0
"""`serve` with several copies. While the file STORES_HALT exists, a copy halts during a store: it
has reserved memory of the cache server, and has neither written nor committed. The file `at` beside
it has the id of the halted process.

The cache server forgets silent workers after 30 s, LMCache's minimum, instead of 120 s.
"""

import functools
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from lmi_config.plan import kv_tiers
from serving.copies import __main__ as child
from serving.copies import supervisor
from serving.copies.part import take
from serving.engine.patches.engine_core import kv_copy

HALT = Path(os.environ["STORES_HALT"])
REAP_S = 30
_right, _arguments = kv_copy.copy, kv_tiers.server_arguments


@functools.wraps(_right)
def copy(*arguments: Any, **more: Any) -> None:
    to_chunks = more["to_chunks"] if "to_chunks" in more else arguments[7]
    if to_chunks and HALT.exists():
        HALT.with_name("at").write_text(str(os.getpid()))
        time.sleep(10_000)
    _right(*arguments, **more)


def server_arguments(*arguments: Any, **more: Any) -> list[str]:
    return [*_arguments(*arguments, **more), f"--worker-reap-timeout-seconds={REAP_S}"]


kv_copy.copy = copy
kv_tiers.server_arguments = server_arguments
supervisor.supervise.__defaults__ = ((sys.executable, __file__),)

if __name__ == "__main__":
    if sys.argv[1] == "serve":
        runpy.run_module("serving", run_name="__main__", alter_sys=True)
    os._exit(child.run(take(int(sys.argv[1])), child.be))
