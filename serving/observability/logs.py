# SPDX-License-Identifier: Apache-2.0
"""The log, without secrets: one JSON object per line, or readable text on a terminal."""

import asyncio
import contextlib
import functools
import json
import logging
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from select import PIPE_BUF
from typing import Any, TextIO

import msgspec

from lmi_config.options.parsers import LOG_LEVELS
from serving.observability.redaction import hide, leave_out, plain, redacted

MAX_REPEATS = 30
"""Most times that the same line is written in a minute."""
_MINUTE = 60.0

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that is being answered. All lines that are written meanwhile have it."""


def _stamp(seconds: float) -> str:
    """Return a time in UTC, in ISO 8601."""
    whole = int(seconds)
    return f"{_second(whole)}.{int(1000 * (seconds - whole)):03d}Z"


@functools.lru_cache(maxsize=1)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


class JsonFormatter(logging.Formatter):
    """Writes a record as a JSON object.

    Its keys are the time (UTC, ISO 8601), level, logger and message, the process if it is not the
    server's, the copy of the model if there are several, the request's id, and the keys of the
    call's `extra={"facts": …}`.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _stamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _of_all
        if record.processName != "MainProcess":
            line["process"] = record.processName
        if request := REQUEST_ID.get():
            line["request_id"] = request
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(plain(line))


_of_all: dict[str, int | str] = {}
"""Fields that every line of this process has."""


class TextFormatter(logging.Formatter):
    """Writes the same for people. `extra={"text": …}` of a call replaces its message."""

    def format(self, record: logging.LogRecord) -> str:
        said = "".join(f" {name} {value}:" for name, value in _of_all.items())
        return f"{_stamp(record.created)}{said} {self.body(record)}"

    def body(self, record: logging.LogRecord) -> str:
        """Return a record without its time."""
        text = getattr(record, "text", "") or self._in_full(record)
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if record.levelno != logging.INFO:
            text = f"{record.levelname}: {text}"
        return _CONTROL.sub(lambda it: f"\\x{ord(it[0]):02x}", redacted(text)).replace("\n", _NEXT)

    def _in_full(self, record: logging.LogRecord) -> str:
        """Return the message with all facts, and with the name of a logger that is not ours."""
        facts = dict(getattr(record, "facts", {}))
        if request := REQUEST_ID.get():
            facts["request_id"] = request
        exception = facts.pop("exception", "")
        ours = record.name.startswith("serving")
        whole = record.getMessage() if ours else f"{record.name}: {record.getMessage()}"
        words = [whole, *(f"{key}={value}" for key, value in facts.items())]
        return " ".join(words) + (f"\n{exception}" if exception else "")


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, which could change a terminal's state, or overwrite its text."""
_NEXT = "\n    "
"""The indentation of a record's further lines, so that none looks like a separate record."""
_DIGITS = re.compile(r"\d+")


class Handler(logging.StreamHandler[TextIO]):
    """Writes each line at most MAX_REPEATS times a minute, and then the number of its repeats."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter) -> None:
        super().__init__(stream)
        self.setFormatter(formatter)
        self.addFilter(leave_out)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._until = 0.0
        self._waiting: list[bytes] = []
        self._size = 0  # bytes of the waiting lines
        self._turn: asyncio.AbstractEventLoop | None = None  # the loop that will write it

    def emit(self, record: logging.LogRecord) -> None:
        if record.created >= self._until:
            self.report_repeats()
            self._until = record.created + _MINUTE
        # Lines of other processes have no template: lines that differ only in numbers are equal.
        template = str(record.msg) if record.args else _DIGITS.sub("", str(record.msg))
        if template == "%s":
            template = record.getMessage()
        key = record.name, template[:80]
        self._counts[key] += 1
        if self._counts[key] <= MAX_REPEATS:
            self.put(record)

    def put(self, record: logging.LogRecord) -> None:
        """Write a record, even if it is a repetition."""
        self.write_waiting()
        super().emit(record)

    def reach(self, done: float, total: float) -> None:
        """Show the progress of the step that was last logged as busy. Does nothing here."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Do nothing: there is no other place to write to, and standard error leads back to us."""

    def flush(self) -> None:
        self.write_waiting()
        with contextlib.suppress(OSError):
            super().flush()

    def write_waiting(self) -> None:
        """Write the lines that wait for the end of the event loop's iteration."""
        assert self.lock
        with self.lock:
            lines, self._waiting, self._size, self._turn = self._waiting, [], 0, None
            if not lines:
                return
            try:
                self.stream.buffer.write(b"".join(lines))
                self.stream.buffer.flush()
            except OSError:  # the reader has gone
                pass

    def write_soon(self, line: bytes) -> None:
        """Write a formatted line, together with the other lines of this iteration of the event
        loop. A system call for each line would cost more than the rest of its work.

        At most PIPE_BUF bytes wait, because a pipe writes that many bytes atomically.
        """
        assert self.lock
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        with self.lock:
            if self._size + len(line) > PIPE_BUF:
                self.write_waiting()
            self._waiting.append(line)
            self._size += len(line)
            if not loop:
                self.write_waiting()
            elif self._turn is not loop:
                self._turn = loop
                loop.call_soon(self.write_waiting)

    def report_repeats(self) -> None:
        """Write how often each line was left out in the last minute."""
        counts, self._counts = self._counts, Counter()
        for (name, template), count in counts.items():
            if count > MAX_REPEATS:
                facts = {"suppressed": count - MAX_REPEATS, "like": template}
                values = {"name": name, "msg": "the same came again and again", "facts": facts}
                self.put(make_record(logging.WARNING, values))


def make_record(level: int, values: Mapping[str, Any]) -> logging.LogRecord:
    """Make a record that this process did not log itself. values: its further fields."""
    return logging.makeLogRecord(
        {"levelno": level, "levelname": logging.getLevelName(level), **values}
    )


_handler: Handler | None = None


def configure(environ: Mapping[str, str]) -> None:
    """Send our log, and the log of libraries that use Python's logging, to standard error."""
    hide(environ)
    set_format("auto")
    logging.captureWarnings(True)
    set_level("info")


def set_format(name: str) -> None:
    """Write lines in the format `name`, a value of OPTION_LOG_FORMAT."""
    global _handler
    terminal = sys.stderr.isatty()
    if name == "json" or (name == "auto" and not terminal):
        _handler = Handler(sys.stderr, JsonFormatter())
    elif terminal:
        from serving.observability.terminal import Terminal

        _handler = Terminal(sys.stderr)
    else:
        _handler = Handler(sys.stderr, TextFormatter())
    logging.getLogger().handlers = [_handler]


def flush() -> None:
    """Write the lines that wait for the end of the event loop's iteration."""
    if _handler:
        _handler.write_waiting()


os.register_at_fork(before=flush)  # otherwise the child could write the lines again


def reach(done: float, total: float) -> None:
    """Report the progress of the step that was last logged as busy, in any unit."""
    if _handler:
        _handler.reach(done, total)


def process_handler() -> Handler:
    """Return the handler of this process: the server's, or a similar one in a process of vLLM's.
    vLLM finds this function by vllm_logging.json.
    """
    global _handler
    if not _handler:
        hide(os.environ)
        _handler = Handler(sys.stderr, JsonFormatter())
        logging.captureWarnings(True)
        set_level(os.environ.get("VLLM_LOGGING_LEVEL", "info"))
    return _handler


_access = logging.getLogger("serving.access")
_encode = msgspec.json.Encoder().encode


class RequestLine(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The fields of a request's line, in order. ms: from its head to the end of its answer."""

    request_id: str
    method: str
    path: str
    status: int
    ms: float


def milliseconds(seconds: float) -> float:
    """Return milliseconds, to a tenth. round() takes several times as long."""
    return int(10_000 * seconds + 0.5) / 10


def access(line: RequestLine) -> None:
    """Write the line of a request, which must have no secret in it.

    It bypasses Python's logging, whose cost is noticeable in a small request.
    """
    if not _access.isEnabledFor(logging.INFO):
        return
    if not _handler or not isinstance(_handler.formatter, JsonFormatter):
        facts = msgspec.to_builtins(line)
        del facts["request_id"]
        _access.info("request", extra={"facts": facts, "text": _access_text(facts)})
        return
    _handler.write_soon(b"%b%b\n" % (_access_head(int(1000 * time.time())), _encode(line)[1:]))


def name_server(**which: int | str) -> None:
    """Add to every line which of several servers in a container this is: a copy, or a model."""
    _of_all.update(which)
    _access_head.cache_clear()


@functools.lru_cache(maxsize=1)
def _access_head(ms: int) -> bytes:
    """Return the beginning of a request's line. ms: milliseconds since 1970."""
    said = {"level": "info", "logger": _access.name, "message": "request", **_of_all}
    return b'{"time":"%b",%b,' % (_stamp(ms / 1000).encode(), _encode(said)[1:-1])


def _access_text(facts: Mapping[str, Any]) -> str:
    """Return a request's line for people."""
    shown = dict(facts)
    head = f"{shown.pop('method')} {shown.pop('path')} {shown.pop('status')}, {shown.pop('ms')} ms"
    return " ".join([head, *(f"{key}={value}" for key, value in shown.items())])


def engine_environment(environ: Mapping[str, str], level: str) -> dict[str, str]:
    """Return variables that make vLLM's processes log as we do. The operator's values take
    precedence.
    """
    wanted = {
        "VLLM_LOGGING_LEVEL": level.upper(),
        "PYTHONUNBUFFERED": "1",  # otherwise their output would arrive late
    }
    if environ.get("VLLM_CONFIGURE_LOGGING", "1") != "0":
        wanted["VLLM_LOGGING_CONFIG_PATH"] = str(Path(__file__).with_name("vllm_logging.json"))
    return {name: value for name, value in wanted.items() if name not in environ}


def set_level(level: str) -> None:
    """Write lines of this level and above. Libraries' lines are always written from warnings on."""
    for name in ("serving", "vllm"):
        logging.getLogger(name).setLevel(level.upper())


def step_level(steps: int) -> None:
    """Make the log quieter by `steps` levels, or louder if the number is negative."""
    ours = logging.getLogger("serving")
    index = LOG_LEVELS.index(logging.getLevelName(ours.level).lower()) + steps
    level = LOG_LEVELS[min(max(index, 0), len(LOG_LEVELS) - 1)]
    set_level(level)
    ours.log(ours.level, "the log's level is %s now", level)  # always shown, at its own level
