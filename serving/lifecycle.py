"""The life of a server: starting → ready → draining → stopped, and failed from anywhere.

Everything that changes or reads the stage goes through this file, and so does what /ping says.
"""

import enum
import time
from collections.abc import Callable

from serving.errors import NotReady

# SageMaker and Kubernetes kill 30 s after SIGTERM: 25 to finish requests, the rest to stop.
DRAIN_S = 25.0

# What the process exits with; 0 when it was asked to stop.
DIED = 1
START_FAILED = 3


class Stage(enum.StrEnum):
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

# What is noted at the start → its name as a step; all else tells of the model being fetched.
_STEPS = {
    "importing vLLM": "importing",
    "waiting for the cache server": "cache_server",
    "loading the model": "loading",
    "preparing the API": "preparing",
    "warming up": "warming_up",
}


class Lifecycle:
    """Where the server is in its life. `detail` says what it is doing there, or why it failed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._stepped = clock()
        self._step = "beginning"
        self.steps: dict[str, float] = {}
        """Seconds that each step of the start took, in their order."""
        self.stage = Stage.STARTING
        self.detail = "beginning"

    def enter(self, stage: Stage, detail: str = "") -> None:
        """Go on to another stage. Raises RuntimeError when no path leads there from here."""
        if stage not in _NEXT[self.stage]:
            raise RuntimeError(f"cannot go from {self.stage} to {stage}")
        if self.stage is Stage.STARTING:
            self._end_step("")
        self.stage = stage
        self.detail = detail

    def note(self, detail: str) -> None:
        """Say what is being done within the present stage."""
        self._end_step(_STEPS.get(detail, "fetching"))
        self.detail = detail

    def _end_step(self, following: str) -> None:
        now = self._clock()
        self.steps[self._step] = self.steps.get(self._step, 0.0) + now - self._stepped
        self._step, self._stepped = following, now

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
