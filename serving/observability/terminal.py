# SPDX-License-Identifier: Apache-2.0
"""The log on a terminal: lines in colour, and a progress bar for the current step of the start."""

import contextlib
import logging
import re
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from serving.observability.logs import Handler, TextFormatter

_STYLES = {"DEBUG": "dim", "WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}

# Libraries' warnings that mean nothing to an operator. On CPUs vLLM runs eagerly, without Triton
# and in our process, and torch replaces oneDNN if needed. vLLM logs the type of Mamba's cache for
# models without Mamba. A client's error has a line of ours. vLLM warns of each process that it
# ends. Deprecation warnings are for developers.
_HARMLESS = re.compile(
    "|".join(
        (
            r"Triton (is not|not)|requires Triton",
            r"Enforce eager set",
            r"Inductor compilation was disabled",
            r"(libtcmalloc|libiomp) is not found",
            r"OMP_NUM_THREADS=\d+ is set; leaving Torch threads",
            r"Selected CPU core number",
            r"Reset SSM cache type to float32",
            r"The global random seed is set to",
            r"NUMA binding: Using MEMBIND",
            r"(Future|Deprecation)Warning: ",
            r"KVConnectorBase_V1\. This API is experimental",
            r"has no lookup ipc key, skipping touch",
            r"Failed to create oneDNN linear, fallback to torch linear",
            r"^Error with model error=ErrorInfo\(",
            r"^\[shutdown\] .*force killing",
        )
    )
)


class Terminal(Handler):
    """Writes lines for people through rich, which supports terminals and NO_COLOR.

    A record with `extra={"busy": True}` is shown as a bar instead of a line, until a record with
    False. Libraries' lines are shown from warnings on, unless the level is debug.
    """

    def __init__(self, stream: TextIO) -> None:
        self._text = TextFormatter()
        super().__init__(stream, self._text)
        self._console = Console(file=stream, highlight=False)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            # Printed text must become redacted lines of the log, and not go around it.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=None)

    def setStream(self, stream: TextIO) -> TextIO | None:  # noqa: N802 - logging's name
        self._console.file = stream
        return super().setStream(stream)

    def emit(self, record: logging.LogRecord) -> None:
        if _is_shown(record):
            super().emit(record)

    def put(self, record: logging.LogRecord) -> None:
        body = self._text.body(record)
        with contextlib.suppress(OSError):  # the terminal has gone
            if getattr(record, "busy", False):
                self._bar.start()
                self._bar.update(self._task, description=body, total=None, completed=0)
                return
            if getattr(record, "busy", None) is False:
                self._bar.stop()
            at = time.strftime("%H:%M:%S", time.localtime(record.created))
            style = _STYLES.get(record.levelname, "")
            self._console.print(Text.assemble((at, "dim"), "  ", (body, style)), soft_wrap=True)

    def reach(self, done: float, total: float) -> None:
        self._bar.update(self._task, completed=done, total=total)


def _is_shown(record: logging.LogRecord) -> bool:
    """Whether a record is shown on the terminal."""
    if record.name.startswith("serving") or logging.getLogger("serving").level <= logging.DEBUG:
        return True
    return record.levelno >= logging.WARNING and not _HARMLESS.search(record.getMessage())
