# SPDX-License-Identifier: Apache-2.0
"""Turns all output of this process and its children into lines of the log.

vLLM's processes log in our format (vllm_logging.json); LMCache and others use their own formats.
Their last errors are kept to explain why the server ends.
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
"""Most lines of a traceback in one line of the log."""
MAX_LINE = 256 * 1024
"""Most characters of a line. CloudWatch takes at most as many bytes. Longer lines are split."""
MAX_DEPTH = 20
"""Most nested lists and objects in a line of our format. A deeper line is logged as text."""
MAX_BAR = 300
"""Most characters of a progress bar."""
PIPE = 1024**2
"""Bytes that may wait while this process is busy. Writers of more block."""


_listeners: list[Callable[[logging.LogRecord], object]] = []


def listen(listener: Callable[[logging.LogRecord], object]) -> None:
    """Let a function be called with each record of another process, in the thread that reads
    them.
    """
    _listeners.append(listener)


@contextlib.contextmanager
def capture_output() -> Iterator[None]:
    """Turn all output of this process and its children into lines of the log.

    They write to a pipe that a thread reads. After the block only the log is written: the process
    is about to end, and output of other threads is dropped.
    """
    handler = process_handler()
    outputs = sys.stdout.fileno(), sys.stderr.fileno()
    reading, writing = os.pipe()
    with contextlib.suppress(OSError):  # the system's limit may be lower
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
    # A line ends with "\n", or with "\r" if a progress bar overwrites it.
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
    """Log the records of a line, or the line itself if that fails. No line may end the thread that
    reads the pipe, or all later writers would block or fail.
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
_FORMS = (  # other libraries' formats of level, name and message
    re.compile(r"\[[^]]*\] LMCache (?P<level>\w+): (?P<message>.*)"),  # lmcache/logging.py
    re.compile(r"(?P<level>[A-Z]+):(?P<logger>[\w.]+):(?P<message>.*)"),  # logging.basicConfig()
    re.compile(r"(?:\[rank\d+\]:)?\[?(?P<level>[IWEF])\d{4} [\d:.]+ +(?P<message>.*)"),  # glog
)
_USUAL = re.compile(r"Session \S+ has no lookup ipc key")
"""LMCache warns so when a request ends that looked nothing up, such as one of a short prompt."""
_LETTERS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Failed|Killed)\b(?::|$)")


class _Parser:
    """Parses other processes' lines into records. A traceback becomes one record."""

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
        """Yield the record of an unfinished traceback, if there is one."""
        lines, self._traceback = self._traceback, []
        if lines:
            facts = {"exception": "\n".join(lines)}
            yield make_record(logging.ERROR, {"name": "output", "msg": lines[-1], "facts": facts})


def _of_our_form(text: str) -> logging.LogRecord | None:
    """Return the record of a line in our formatter's format, from vLLM's processes, or None."""
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
    """Whether more than `depth` lists and objects are nested."""
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
            if _USUAL.match(message):
                level = logging.DEBUG
            break
    else:
        if _RAISED.match(text):
            level = logging.ERROR
    return make_record(level, {"name": name, "msg": message})


_FATAL = re.compile(
    r"encountered a fatal error|failed to start|WorkerProc (?:failed|hit an exception)"
)
"""Messages of vLLM's processes with the exception that ends them. Other exceptions concern one
request.
"""
_causes: deque[tuple[float, bool, str]] = deque(maxlen=50)


def causes(seconds: float) -> list[str]:
    """Return other processes' errors of the last seconds: fatal errors first, then by age, oldest
    first.
    """
    since = time.monotonic() - seconds
    found = [(fatal, text) for at, fatal, text in _causes.copy() if at >= since]
    return [text for _, text in sorted(found, key=lambda it: not it[0])]


def _remember_cause(record: logging.LogRecord) -> None:
    """Keep a record's error, which may be the reason why a process ends."""
    exception, message = getattr(record, "facts", {}).get("exception"), record.getMessage()
    if isinstance(exception, str):
        fatal = bool(_FATAL.search(message))
        _causes.append((time.monotonic(), fatal, _first_raised(exception)))
    elif record.levelno >= logging.ERROR:
        _causes.append((time.monotonic(), False, message))


def _first_raised(text: str) -> str:
    """Return the message of the first exception in a formatted traceback with several."""
    lines = text.partition("\n\n")[0].splitlines()
    at = max((i for i, line in enumerate(lines) if _RAISED.match(line)), default=len(lines) - 1)
    return " ".join(" ".join(lines[at:]).split())
