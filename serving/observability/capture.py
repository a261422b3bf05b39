# SPDX-License-Identifier: Apache-2.0
"""Everything that this process and its children write becomes lines of the log.

vLLM's processes log in our form (vllm_logging.json), LMCache and others as they like. What they
wrote of errors last is kept, for why the server ends.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from serving.lifecycle import SHUTDOWN
from serving.observability.logs import make_record, process_handler, reach

MAX_TRACEBACK = 500
"""Lines of a traceback that are one line of the log."""
MAX_LINE = 256 * 1024
"""Characters; CloudWatch takes no more bytes. What is longer comes in pieces."""
MAX_DEPTH = 20
"""Lists and objects within each other in a line of our own form; a deeper one is logged as text."""
MAX_BAR = 300
"""Characters of a progress bar."""
PIPE = 1024**2
"""Bytes that wait while this process is busy; more hold up who writes."""


_listeners: list[Callable[[logging.LogRecord], object]] = []


def listen(listener: Callable[[logging.LogRecord], object]) -> None:
    """Have a function called with each record of another process, in the thread that reads them."""
    _listeners.append(listener)


@contextlib.contextmanager
def capture_output() -> Iterator[None]:
    """Make lines of the log of everything that this process and its children write.

    They write to a pipe that a thread reads. Afterwards only the log itself is written: the process
    is about to end, and threads that notice have nothing to add to its last line.
    """
    handler = process_handler()
    outputs = sys.stdout.fileno(), sys.stderr.fileno()
    reading, writing = os.pipe()
    with contextlib.suppress(OSError):  # more than the system lets us have
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE)
    real = os.fdopen(os.dup(outputs[1]), "w", encoding="utf-8", errors="backslashreplace")
    handler.setStream(real)
    for output in outputs:
        os.dup2(writing, output)
    os.close(writing)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    thread = threading.Thread(target=_read, args=(reading, handler.handle), daemon=True)
    thread.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for output in outputs:
            os.dup2(nowhere, output)
        os.close(nowhere)
        thread.join(SHUTDOWN.log)
        handler.report_repeats()


def _read(pipe: int, handle: Callable[[logging.LogRecord], object]) -> None:
    parser = _Parser()
    # A line ends with "\n" or, where a progress bar overwrites it, with "\r".
    with open(pipe, encoding="utf-8", errors="replace", newline="") as lines:
        while line := lines.readline(MAX_LINE):
            if line.endswith("\r"):
                if found := _BAR.search(line[:MAX_BAR]):
                    reach(int(found["done"]), int(found["total"]))
                continue
            _log(parser.parse, line, handle)
    _log(lambda _: parser.end(), "", handle)


def _log(
    parse: Callable[[str], Iterator[logging.LogRecord]],
    line: str,
    handle: Callable[[logging.LogRecord], object],
) -> None:
    """Log the records of a line, or the bare line where that fails: whoever can write to the pipe
    must not end the thread that reads it, or all who write later block or fail.
    """
    try:
        for record in parse(line):
            _remember_cause(record)
            for listener in _listeners:
                listener(record)
            if record.levelno >= logging.getLogger("serving").level:
                handle(record)
    except Exception:
        with contextlib.suppress(Exception):
            handle(make_record(logging.INFO, {"name": "output", "msg": line.rstrip()}))


_BAR = re.compile(r"\d+%.*\| (?P<done>\d+)/(?P<total>\d+) \[")  # tqdm's
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_FORMS = (  # in which others write their level and name
    re.compile(r"\[[^]]*\] LMCache (?P<level>\w+): (?P<message>.*)"),  # lmcache/logging.py
    re.compile(r"(?P<level>[A-Z]+):(?P<logger>[\w.]+):(?P<message>.*)"),  # logging.basicConfig()
    re.compile(r"(?:\[rank\d+\]:)?\[?(?P<level>[IWEF])\d{4} [\d:.]+ +(?P<message>.*)"),  # glog
)
_LETTERS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Failed|Killed)\b(?::|$)")


class _Parser:
    """Makes records of lines that others wrote. A traceback becomes one record."""

    def __init__(self) -> None:
        self._traceback: list[str] = []
        self._room = 0  # characters that the traceback may yet take

    def parse(self, line: str) -> Iterator[logging.LogRecord]:
        text = _COLOUR.sub("", line).rstrip()
        if self._traceback:
            self._traceback.append(text[: self._room])
            self._room -= min(len(text), self._room)
            more = self._room and len(self._traceback) < MAX_TRACEBACK
            if text.startswith((" ", "\t")) and more:
                return
            yield from self.end()
        elif text.startswith(_TRACEBACK):
            self._traceback, self._room = [text[:MAX_LINE]], MAX_LINE
        elif text:
            yield _of_our_form(text) or _of_another_form(text)

    def end(self) -> Iterator[logging.LogRecord]:
        """The record of a traceback that is not closed yet, where there is one."""
        lines, self._traceback = self._traceback, []
        if lines:
            facts = {"exception": "\n".join(lines)}
            yield make_record(logging.ERROR, {"name": "output", "msg": lines[-1], "facts": facts})


def _of_our_form(text: str) -> logging.LogRecord | None:
    """The record of a line that one of vLLM's processes wrote through our formatter."""
    if not text.startswith('{"time": "'):
        return None
    try:
        line = json.loads(text)
        level = logging.getLevelNamesMapping()[line.pop("level").upper()]
        values = {"name": line.pop("logger"), "msg": line.pop("message")}
        line.pop("time")
    except (ValueError, LookupError, AttributeError, RecursionError):
        return None
    values["processName"] = line.pop("process", "MainProcess")
    if not all(isinstance(value, str) for value in values.values()) or _deeper(line, MAX_DEPTH):
        return None
    return make_record(level, values | {"facts": line})


def _deeper(value: Any, depth: int) -> bool:
    """Whether more than so many lists and objects are within each other."""
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list) and (not depth or any(_deeper(it, depth - 1) for it in value))


def _of_another_form(text: str) -> logging.LogRecord:
    level, name, message = logging.INFO, "output", text
    for form in _FORMS:
        if match := form.match(text):
            level_name = _LETTERS.get(match["level"], match["level"])
            level = logging.getLevelNamesMapping().get(level_name, logging.INFO)
            name = match.groupdict().get("logger") or ("lmcache" if "LMCache" in text else name)
            message = match["message"]
            break
    else:
        if _RAISED.match(text):
            level = logging.ERROR
    return make_record(level, {"name": name, "msg": message})


_FATAL = re.compile(
    r"encountered a fatal error|failed to start|WorkerProc (?:failed|hit an exception)"
)
"""What vLLM's processes say beside the exception that ends them. Others are of one request."""
_causes: deque[tuple[float, bool, str]] = deque(maxlen=50)


def causes(seconds: float) -> list[str]:
    """What other processes wrote of errors in the last seconds: what ended them before what did
    not, and else the first first.
    """
    since = time.monotonic() - seconds
    found = [(fatal, text) for at, fatal, text in _causes.copy() if at >= since]
    return [text for _, text in sorted(found, key=lambda it: not it[0])]


def _remember_cause(record: logging.LogRecord) -> None:
    """Keep what may be why a process has ended."""
    exception, message = getattr(record, "facts", {}).get("exception"), record.getMessage()
    if isinstance(exception, str):
        fatal = bool(_FATAL.search(message))
        _causes.append((time.monotonic(), fatal, _first_raised(exception)))
    elif record.levelno >= logging.ERROR:
        _causes.append((time.monotonic(), False, message))


def _first_raised(text: str) -> str:
    """What a formatted traceback says was raised first: its own first cause's message."""
    lines = text.partition("\n\n")[0].splitlines()
    at = max((i for i, line in enumerate(lines) if _RAISED.match(line)), default=len(lines) - 1)
    return " ".join(" ".join(lines[at:]).split())
