"""Our log: one JSON object a line, or readable text on a terminal."""

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

from lmi_config.settings import secret

_SHORTEST = 8  # characters of a secret; shorter ones would make holes into harmless words
_secrets: re.Pattern[str] | None = None


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


def redacted(text: str) -> str:
    """The text without the values of secret environment variables. For what others wrote."""
    return _secrets.sub("[secret]", text) if _secrets else text


def configure(environ: Mapping[str, str]) -> None:
    """Send our log to standard error, and leave vLLM's, which configures itself, alone."""
    global _secrets
    values = {environ[name] for name in environ if secret(name) and len(environ[name]) >= _SHORTEST}
    _secrets = re.compile("|".join(map(re.escape, sorted(values)))) if values else None
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
