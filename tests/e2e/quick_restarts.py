# SPDX-License-Identifier: Apache-2.0
"""`serve` whose cache server is restarted at once whenever it has ended: many restarts take little
time.
"""

import runpy

from serving.kv_cache import cache_server as server

server.LONGEST_PAUSE_S = server.FIRST_PAUSE_S
runpy.run_module("serving", run_name="__main__", alter_sys=True)
