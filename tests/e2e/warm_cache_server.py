# SPDX-License-Identifier: Apache-2.0
"""`serve`, with a cache server that takes no time to import: for many restarts in little time.

    python tests/e2e/warm_cache_server.py serve

The cache server's program is replaced by a client of a process that has imported everything. That
forks, and the fork runs our program with the client's arguments, variables and standard streams. It
ends with the client; the client is killed when it ends.
"""

import array
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

CLIENT = """#!{python} -ES
import array, json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as it:
    it.connect({path!r})
    it.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
    it.sendall(json.dumps([sys.argv[3:], dict(os.environ)]).encode() + b"\\n")
    it.recv(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def serve() -> None:
    from serving.kv_cache import server

    with tempfile.TemporaryDirectory() as folder:
        path, program = f"{folder}/warm", Path(folder, "client")
        program.write_text(CLIENT.format(python=sys.executable, path=path))
        program.chmod(0o755)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        command = [sys.executable, __file__, "warm", str(listener.fileno())]
        subprocess.Popen(command, pass_fds=[listener.fileno()])
        listener.close()
        setattr(server, "sys", SimpleNamespace(executable=str(program)))  # noqa: B010
        server.LONGEST_PAUSE_S = server.FIRST_PAUSE_S
        runpy.run_module("serving", run_name="__main__")


def warm(listener: socket.socket) -> None:
    import serving.kv_cache.lmcache.__main__  # noqa: F401  # this takes the time

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        client, _ = listener.accept()
        if not os.fork():
            listener.close()
            run(client)
        client.close()


def run(client: socket.socket) -> None:
    from serving.kv_cache.lmcache.__main__ import run

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    files = array.array("i")
    _, ancillary, _, _ = client.recvmsg(1, socket.CMSG_LEN(3 * files.itemsize))
    files.frombytes(ancillary[0][2])
    for number, file in enumerate(files):
        os.dup2(file, number)
    sys.stdin = os.fdopen(0)
    arguments, environ = json.loads(client.makefile().readline())
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["lmcache", *arguments]
    threading.Thread(target=lambda: (client.recv(1), os._exit(1)), daemon=True).start()
    try:
        run()
    finally:
        os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "warm":
        warm(socket.socket(fileno=int(sys.argv[2])))
    serve()
