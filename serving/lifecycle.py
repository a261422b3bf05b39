# SPDX-License-Identifier: Apache-2.0
"""The life of a server: starting → ready → draining → stopped, and failed from anywhere.

Everything that changes or reads the stage goes through this file, and so does what /ping says.
"""

import enum
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from serving.errors import NotReady

GRACE_S = 30.0
"""SageMaker and Kubernetes kill so long after SIGTERM."""


class Shutdown(NamedTuple):
    """Seconds that each step of an orderly end may take, one after the other."""

    drain: float = 23.0
    """Requests finish."""
    farewell: float = 1.0
    """Answers are written to those that did not."""
    settle: float = 0.2
    """The last lines of processes that have died are read."""
    engine: float = 3.5
    """Handlers, the engine's processes and the cache server end by themselves."""
    connections: int = 1
    """Connections are closed."""
    traces: float = 0.3
    """Spans are sent."""
    log: float = 0.5
    """What children wrote last is logged."""


SHUTDOWN = Shutdown()


class Stage(enum.StrEnum):
    """Where a server is in its life, as /ping says it."""

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
    """What /ping and the log say meanwhile; of FETCHING the source says what, and how much."""

    def __new__(cls, name: str, sentence: str = "") -> "Step":
        step = str.__new__(cls, name)
        step._value_ = name
        step.sentence = sentence
        return step

    PLANNING = "planning"
    """Before there is a server: Python starts, options and the machine are looked at."""
    BEGINNING = "beginning", "beginning"
    FETCHING = "fetching"
    IMPORTING = "importing", "importing vLLM"
    CACHE_SERVER = "cache_server", "waiting for the cache server"
    LOADING = "loading", "loading the model"
    PREPARING = "preparing", "preparing the API"
    WARMING_UP = "warming_up", "warming up"


class Note(Protocol):
    """Takes down what the start is busy with, for people who wait."""

    def __call__(self, step: Step, text: str = "") -> None:
        """text: more than the step's own sentence."""


class Lifecycle:
    """Where the server is in its life."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._step_began = clock()
        self._step = Step.BEGINNING
        self.steps: dict[Step, float] = {}
        """Seconds that each step of the start took, in their order."""
        self.stage = Stage.STARTING
        self.detail = Step.BEGINNING.sentence
        """What the server is doing in this stage, or why it failed."""

    def enter(self, stage: Stage, detail: str = "") -> None:
        """Go on to another stage. Raises RuntimeError when no path leads there from here."""
        if stage not in _NEXT[self.stage]:
            raise RuntimeError(f"cannot go from {self.stage} to {stage}")
        if self.stage is Stage.STARTING:
            self._end_step()
        self.stage = stage
        self.detail = detail

    def note(self, step: Step, text: str = "") -> None:
        """Go on to a step of the start. text: more than the step's own sentence."""
        self._end_step()
        self._step = step
        self.detail = text or step.sentence

    @property
    def progress(self) -> dict[Step, float]:
        """Seconds that each step of the start has taken so far, also the one under way."""
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
        """The status and JSON body that /ping answers with now."""
        answer: dict[str, object] = {"status": self.stage, "elapsed_s": round(self.elapsed, 1)}
        if self.detail:
            answer["detail"] = self.detail
        return _PING_STATUS.get(self.stage, 503), answer
