"""Our log: one JSON object a line, or readable text on a terminal."""

import json
import logging
import sys
import time
from typing import Any


class _JsonFormatter(logging.Formatter):
    """time (UTC, ISO 8601), level, logger, message, and the call's `extra={"facts": …}`."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _TextFormatter(logging.Formatter):
    """The same for people."""

    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", {})
        return " ".join([super().format(record), *(f"{key}={facts[key]}" for key in facts)])


def configure() -> None:
    """Send our log to standard error, and leave vLLM's, which configures itself, alone."""
    handler = logging.StreamHandler(sys.stderr)
    if sys.stderr.isatty():
        handler.setFormatter(_TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    else:
        handler.setFormatter(_JsonFormatter())
    ours = logging.getLogger("serving")
    ours.handlers = [handler]
    ours.setLevel(logging.INFO)
    ours.propagate = False
    logging.captureWarnings(True)
    warned = logging.getLogger("py.warnings")
    warned.handlers = [handler]
