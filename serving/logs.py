"""Our log: one JSON object a line, or readable text on a terminal, without secrets.

`folded` makes lines of it of everything that this process and its children write: vLLM's processes
log in the same form (vllm_logging.json), LMCache and others as they like.
"""

import contextlib
import fcntl
import functools
import json
import logging
import os
import re
import sys
import threading
import time
import urllib.parse
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

import msgspec

from lmi_config.settings import secret
from lmi_config.values import LOG_LEVELS

_SHORTEST = 8  # characters of a secret; shorter ones would make holes into harmless words
_OFTEN = 30  # times that the same line is written in a minute
_MINUTE = 60.0
_LONGEST_TRACEBACK = 500  # lines
_LONGEST_LINE = 256 * 1024  # bytes; CloudWatch takes no more. What is longer comes in pieces
_PIPE = 1024**2  # bytes that wait while this process is busy; more hold up who writes
_DRAIN_S = 1.0  # for what children wrote last, once they have ended

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that is being answered; every line that is written meanwhile has it."""

_HIDDEN = "[secret]"
_SECRETS = re.compile(
    r"([Bb]earer(?:\s+|%20))[^\s\"',}]+"
    r"|sagemaker-api-key-[\w+/=.~%-]+"
    r"|hf_[A-Za-z0-9]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|((?::|%3A)//?)[^\s/:\"']{0,200}(?::|%3A)[^\s/]{1,500}(?=@|%40)"  # of a URL
    r"|(X-Amz-(?:Signature|Security-Token)(?:=|%3D))[^&\s\"']+"
)
_values: re.Pattern[str] | None = None


def redacted(text: str) -> str:
    """The text without the values of secret environment variables, and what looks like one."""
    if _values:
        text = _values.sub(_HIDDEN, text)
    return _SECRETS.sub(rf"\1\2\3{_HIDDEN}", text)


def _hide(environ: Mapping[str, str]) -> None:
    """Have `redacted` know the values of secret variables, also as Python, JSON and URLs write
    them, and each line of those that have several.
    """
    global _values
    shown: set[str] = set()
    for name, value in environ.items():
        for text in {value, *value.splitlines()} if secret(name) else ():
            shown |= {
                text,
                repr(text)[1:-1],
                repr(text + "'\"")[1:-4],
                ascii(text)[1:-1],
                json.dumps(text)[1:-1],
                json.dumps(text, ensure_ascii=False)[1:-1],
                urllib.parse.quote(text),
                urllib.parse.quote(text, safe=""),
                urllib.parse.quote_plus(text),
            }
    # The longest first: one secret may be the beginning of another.
    found = sorted((it for it in shown if len(it) >= _SHORTEST), key=len, reverse=True)
    _values = re.compile("|".join(map(re.escape, found))) if found else None


def _plain(value: Any) -> Any:
    """The value as JSON has it, without secrets."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {redacted(str(key)): _plain(it) for key, it in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(it) for it in value]
    return redacted(str(value))


def _stamp(seconds: float) -> str:
    """A time in UTC, as ISO 8601 has it."""
    whole = int(seconds)
    return f"{_second(whole)}.{int(1000 * (seconds - whole)):03d}Z"


@functools.lru_cache(maxsize=1)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


class JsonFormatter(logging.Formatter):
    """time (UTC, ISO 8601), level, logger, message, the process where it is not the server's, the
    request's id, and the call's `extra={"facts": …}`.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _stamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.processName != "MainProcess":
            line["process"] = record.processName
        if request := REQUEST_ID.get():
            line["request_id"] = request
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(_plain(line))


class _TextFormatter(logging.Formatter):
    """The same for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        facts = dict(getattr(record, "facts", {}))
        if request := REQUEST_ID.get():
            facts["request_id"] = request
        text = " ".join([super().format(record), *(f"{key}={facts[key]}" for key in facts)])
        return redacted(text)


_DIGITS = re.compile(r"\d+")


class Handler(logging.StreamHandler[TextIO]):
    """Writes each line at most _OFTEN times a minute; then how often more it came."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter) -> None:
        super().__init__(stream)
        self.setFormatter(formatter)
        self._seen: Counter[tuple[str, str]] = Counter()
        self._until = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if record.created >= self._until:
            self.tell_repeated()
            self._until = record.created + _MINUTE
        # Lines of others have no template: those that differ in numbers are the same.
        template = str(record.msg) if record.args else _DIGITS.sub("", str(record.msg))
        if template == "%s":
            template = record.getMessage()
        key = record.name, template[:80]
        self._seen[key] += 1
        if self._seen[key] <= _OFTEN:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Do nothing: there is nowhere left to tell it, and standard error leads back to us."""

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()

    def write(self, line: bytes) -> None:
        """Write a line that is one already."""
        assert self.lock
        with self.lock, contextlib.suppress(OSError):  # nobody reads it any more
            self.stream.buffer.write(line)
            self.stream.buffer.flush()

    def tell_repeated(self) -> None:
        """Say what was left out in the last minute."""
        seen, self._seen = self._seen, Counter()
        for (name, template), count in seen.items():
            if count > _OFTEN:
                facts = {"suppressed": count - _OFTEN, "like": template}
                told = {"name": name, "msg": "the same came again and again", "facts": facts}
                super().emit(record(logging.WARNING, told))


def record(level: int, values: Mapping[str, Any]) -> logging.LogRecord:
    """A record of what was not logged here. values: name, msg, and what else a record has."""
    return logging.makeLogRecord(
        {"levelno": level, "levelname": logging.getLevelName(level), **values}
    )


_handler: Handler | None = None


def configure(environ: Mapping[str, str]) -> None:
    """Send our log and what others log through Python to standard error."""
    global _handler
    _hide(environ)
    formatter = _TextFormatter() if sys.stderr.isatty() else JsonFormatter()
    _handler = Handler(sys.stderr, formatter)
    logging.getLogger().handlers = [_handler]
    logging.captureWarnings(True)
    set_level("info")


def engine_handler() -> Handler:
    """The handler for vllm_logging.json: ours, or in one of vLLM's own processes one like it."""
    global _handler
    if not _handler:
        _hide(os.environ)
        _handler = Handler(sys.stderr, JsonFormatter())
        logging.captureWarnings(True)
        set_level(os.environ.get("VLLM_LOGGING_LEVEL", "info"))
    return _handler


_access = logging.getLogger("serving.access")


def access(request: str, facts: dict[str, Any]) -> None:
    """Write the line of a request, whose id and facts have nothing secret in them.

    By hand: what logging does for a line shows in what a small request costs.
    """
    if not _access.isEnabledFor(logging.INFO):
        return
    if not _handler or not isinstance(_handler.formatter, JsonFormatter):
        _access.info("request", extra={"facts": facts})
        return
    line: dict[str, Any] = {
        "time": _stamp(time.time()),
        "level": "info",
        "logger": _access.name,
        "message": "request",
        "request_id": request,
    }
    _handler.write(msgspec.json.encode(line | facts) + b"\n")


def for_engine(environ: Mapping[str, str], level: str) -> dict[str, str]:
    """Variables that make vLLM's processes log as we do, unless the operator has it otherwise."""
    wanted = {
        "VLLM_LOGGING_LEVEL": level.upper(),
        "PYTHONUNBUFFERED": "1",  # or what they print would come late
    }
    if environ.get("VLLM_CONFIGURE_LOGGING", "1") != "0":
        wanted["VLLM_LOGGING_CONFIG_PATH"] = str(Path(__file__).with_name("vllm_logging.json"))
    return {name: value for name, value in wanted.items() if name not in environ}


def set_level(level: str) -> None:
    """Write lines of this level and above; of libraries warnings and above, at whatever level."""
    for name in ("serving", "vllm"):
        logging.getLogger(name).setLevel(level.upper())


def shift_level(steps: int) -> None:
    """Be so many levels quieter, or louder where it is negative."""
    ours = logging.getLogger("serving")
    at = LOG_LEVELS.index(logging.getLevelName(ours.level).lower()) + steps
    level = LOG_LEVELS[min(max(at, 0), len(LOG_LEVELS) - 1)]
    set_level(level)
    ours.log(ours.level, "the log's level is %s now", level)  # who asked wants to see it


@contextlib.contextmanager
def folded() -> Iterator[None]:
    """Make lines of the log of everything that this process and its children write.

    They write to a pipe that a thread reads. Afterwards only the log itself is written: the process
    is about to end, and threads that notice have nothing to add to its last line.
    """
    assert _handler
    outputs = sys.stdout.fileno(), sys.stderr.fileno()
    reading, writing = os.pipe()
    with contextlib.suppress(OSError):  # more than the system lets us have
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE)
    real = os.fdopen(os.dup(outputs[1]), "w", encoding="utf-8", errors="backslashreplace")
    _handler.setStream(real)
    for output in outputs:
        os.dup2(writing, output)
    os.close(writing)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    thread = threading.Thread(target=_read, args=(reading, _handler.handle), daemon=True)
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
        thread.join(_DRAIN_S)
        _handler.tell_repeated()


def _read(pipe: int, handle: Callable[[logging.LogRecord], object]) -> None:
    reader = _Reader()
    with open(pipe, "rb") as lines:
        while line := lines.readline(_LONGEST_LINE):
            for found in reader.line(line.decode(errors="replace")):
                if found.levelno >= logging.getLogger("serving").level:
                    handle(found)
    for found in reader.end():
        handle(found)


_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_FORMS = (  # how others write their level and name
    re.compile(r"\[[^]]*\] LMCache (?P<level>\w+): (?P<message>.*)"),  # lmcache/logging.py
    re.compile(r"(?P<level>[A-Z]+):(?P<logger>[\w.]+):(?P<message>.*)"),  # logging.basicConfig()
    re.compile(r"(?:\[rank\d+\]:)?\[?(?P<level>[IWEF])\d{4} [\d:.]+ +(?P<message>.*)"),  # glog
)
_LETTERS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Failed|Killed)\b(?::|$)")


class _Reader:
    """Lines that others wrote → records. A traceback becomes one record."""

    def __init__(self) -> None:
        self._traceback: list[str] = []

    def line(self, line: str) -> Iterator[logging.LogRecord]:
        text = _COLOUR.sub("", line).rstrip().rpartition("\r")[2]  # a progress bar's last state
        if self._traceback:
            self._traceback.append(text)
            if text.startswith((" ", "\t")) and len(self._traceback) < _LONGEST_TRACEBACK:
                return
            yield from self.end()
        elif text.startswith(_TRACEBACK):
            self._traceback = [text]
        elif text:
            yield _ours(text) or _others(text)

    def end(self) -> Iterator[logging.LogRecord]:
        lines, self._traceback = self._traceback, []
        if lines:
            facts = {"exception": "\n".join(lines)}
            yield _told(record(logging.ERROR, {"name": "output", "msg": lines[-1], "facts": facts}))


def _ours(text: str) -> logging.LogRecord | None:
    """A line that one of vLLM's processes wrote through our formatter."""
    if not text.startswith('{"time": "'):
        return None
    try:
        line = json.loads(text)
        level = logging.getLevelNamesMapping()[line.pop("level").upper()]
        found = {"name": line.pop("logger"), "msg": line.pop("message")}
        line.pop("time")
    except (ValueError, LookupError, AttributeError, RecursionError):
        return None
    found["processName"] = line.pop("process", "MainProcess")
    return _told(record(level, found | {"facts": line}))


def _others(text: str) -> logging.LogRecord:
    level, name, message = logging.INFO, "output", text
    for form in _FORMS:
        if match := form.match(text):
            named = _LETTERS.get(match["level"], match["level"])
            level = logging.getLevelNamesMapping().get(named, logging.INFO)
            name = match.groupdict().get("logger") or ("lmcache" if "LMCache" in text else name)
            message = match["message"]
            break
    else:
        if _RAISED.match(text):
            level = logging.ERROR
    return _told(record(level, {"name": name, "msg": message}))


_SHOWN = 50
_causes: deque[tuple[float, str]] = deque(maxlen=_SHOWN)


def _told(record: logging.LogRecord) -> logging.LogRecord:
    """The record, once it has been looked at for why a process may have ended."""
    exception = getattr(record, "facts", {}).get("exception")
    if isinstance(exception, str):
        _causes.append((time.monotonic(), _raised(exception)))
    elif record.levelno >= logging.ERROR:
        _causes.append((time.monotonic(), record.getMessage()))
    return record


def _raised(shown: str) -> str:
    """What a formatted traceback says was raised first: its own first cause's message."""
    first = shown.partition("\n\n")[0]
    lines = first.splitlines()
    at = max((i for i, line in enumerate(lines) if _RAISED.match(line)), default=len(lines) - 1)
    return " ".join(" ".join(lines[at:]).split())


def causes(seconds: float) -> list[str]:
    """What other processes told of errors in the last seconds, the first of them first."""
    since = time.monotonic() - seconds
    return [text for at, text in _causes.copy() if at >= since]
