# SPDX-License-Identifier: Apache-2.0
"""The life of a server: starting → ready → draining → stopped, and failed from anywhere.

Only this module changes the stage, and decides the answer of /ping.
"""

import enum
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from serving.errors import NotReady

GRACE_S = 30.0
"""Seconds from SIGTERM until SageMaker and Kubernetes kill the process."""


class Shutdown(NamedTuple):
    """The limits of a shutdown's steps, which follow each other, in seconds."""

    drain: float = 23.0
    """Requests finish."""
    farewell: float = 1.0
    """Unfinished requests are answered with an error."""
    settle: float = 0.2
    """The last lines of dead processes are read."""
    engine: float = 3.5
    """Handlers, the engine's processes and the cache server end by themselves."""
    connections: int = 1
    """Connections are closed."""
    traces: float = 0.3
    """Spans are sent."""
    log: float = 0.5
    """The children's last output is logged."""


SHUTDOWN = Shutdown()


class Stage(enum.StrEnum):
    """A server's stage, as /ping shows it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


_NEXT = {
    Stage.STARTING: {Stage.READY, Stage.STOPPED, Stage.FAILED},
    Stage.READY: {Stage.DRAINING, Stage.FAILED},
    Stage.DRAINING: {Stage.STOPPED, Stage.FAILED},
    Stage.STOPPED: set[Stage](),
    Stage.FAILED: set[Stage](),
}

_PING_STATUS = {Stage.READY: 200, Stage.FAILED: 500}  # 503 in every other stage


class Step(enum.StrEnum):
    """A step of the start, by its name in `slipway_start_seconds`."""

    sentence: str
    """The step's text for /ping and the log. In FETCHING the source gives its own text."""

    def __new__(cls, name: str, sentence: str = "") -> "Step":
        step = str.__new__(cls, name)
        step._value_ = name
        step.sentence = sentence
        return step

    PLANNING = "planning"
    """Before there is a server: Python starts, and reads the options and the machine."""
    BEGINNING = "beginning", "beginning"
    FETCHING = "fetching"
    IMPORTING = "importing", "importing vLLM"
    CACHE_SERVER = "cache_server", "waiting for the cache server"
    LOADING = "loading", "loading the model"
    PREPARING = "preparing", "preparing the API"
    WARMING_UP = "warming_up", "warming up"


class Note(Protocol):
    """Notes the current step of the start, for people who wait."""

    def __call__(self, step: Step, text: str = "") -> None:
        """text: replaces the step's sentence."""


class Lifecycle:
    """The server's stage, and the steps of its start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._step_began = clock()
        self._step = Step.BEGINNING
        self.steps: dict[Step, float] = {}
        """Seconds that each finished step of the start took, in order."""
        self.stage = Stage.STARTING
        self.detail = Step.BEGINNING.sentence
        """The server's activity in this stage, or why it failed."""

    def enter(self, stage: Stage, detail: str = "") -> None:
        """Enter another stage. Raises RuntimeError if it cannot follow the current stage."""
        if stage not in _NEXT[self.stage]:
            raise RuntimeError(f"cannot go from {self.stage} to {stage}")
        if self.stage is Stage.STARTING:
            self._end_step()
        self.stage = stage
        self.detail = detail

    def note(self, step: Step, text: str = "") -> None:
        """Begin a step of the start. text: replaces the step's sentence."""
        self._end_step()
        self._step = step
        self.detail = text or step.sentence

    @property
    def progress(self) -> dict[Step, float]:
        """Seconds that each step of the start has taken so far, also the current one."""
        if self.stage is not Stage.STARTING:
            return self.steps
        since = self._clock() - self._step_began
        return self.steps | {self._step: self.steps.get(self._step, 0.0) + since}

    def _end_step(self) -> None:
        now = self._clock()
        self.steps[self._step] = self.steps.get(self._step, 0.0) + now - self._step_began
        self._step_began = now

    @property
    def elapsed(self) -> float:
        """Seconds since the server began."""
        return self._clock() - self._began

    def require_ready(self) -> None:
        """Raise NotReady unless requests may be served."""
        if self.stage is not Stage.READY:
            detail = f": {self.detail}" if self.stage is Stage.STARTING else ""
            raise NotReady(f"the server is {self.stage}{detail}")

    def ping(self) -> tuple[int, dict[str, object]]:
        """Return the status and JSON body of /ping's answer."""
        answer: dict[str, object] = {"status": self.stage, "elapsed_s": round(self.elapsed, 1)}
        if self.detail:
            answer["detail"] = self.detail
        return _PING_STATUS.get(self.stage, 503), answer
