# SPDX-License-Identifier: Apache-2.0
"""Adapters whose code harms its server."""

from pathlib import Path

from tests.support.models import tiny_lora

HARM = {
    "floods-frames": "[os.write(number, struct.pack('<I', 3) + b'abc') for _ in range(10**6)]",
    "sends-lists": "send(b'\\x93\\x02\\xa4done\\xdd\\x00\\x40\\x00\\x00' + b'\\x90' * 2**22)",
    "prints": "[os.write(1, b'x\\n' * 30000) for _ in range(10**4)]",
    "prints-odd-lines": "[os.write(1, LINE * 500) for _ in range(200)]",
    "forks": "[os.fork() or time.sleep(30) or os._exit(0) for _ in range(20)]",
    "leaves-children": "os.fork() or (os.setsid(), time.sleep(60)); os._exit(1)",
    "takes-memory": "bytearray(2**40)",
    "exits": "os._exit(3)",
    "stops-itself": "os.kill(os.getpid(), 19)",
}
"""The harm that the code of adapters does, by name."""
HARMING = """
import os, struct, sys, time
from djl_python.output_formatter import output_formatter
number = int(sys.argv[1])
LINE = b'{"time": "", "level": "error", "logger": [], "message": {}}\\n'

def send(body):
    os.set_blocking(number, True)
    body = struct.pack("<I", len(body)) + body
    while body:
        body = body[os.write(number, body):]

@output_formatter
def harm(answer):
    HARM
    return answer
"""


def hostile_code(folder: Path) -> list[Path]:
    """Adapters whose code harms its server."""
    found = []
    for seed, (name, harm) in enumerate(HARM.items(), 31):
        found.append(tiny_lora.write(folder / name, seed))
        (found[-1] / "model.py").write_text(HARMING.replace("HARM", harm))
    return found
