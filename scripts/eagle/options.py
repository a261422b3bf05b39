# SPDX-License-Identifier: Apache-2.0
"""What a training can be asked for, without what it takes to train."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

METHODS = ("eagle", "eagle3")


class Refused(ValueError):
    """What cannot be done as requested. The message says why, and what would do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a draft is trained. Lengths are in tokens; see the command line for what each means."""

    method: str
    text: Sequence[Path] = ()
    steps: int = 300
    length: int = 128
    prompt: int = 32
    batch: int = 8
    lr: float = 1e-3
    draft_vocab: int | None = None
    speculators: bool = False
    seed: int = 0
    depth: int = 3
    generated: bool = False
    loss_temperature: float = 1.0
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise Refused(f"the method is {self.method!r}, but has to be {' or '.join(METHODS)}")
        if self.method == "eagle" and (self.speculators or self.draft_vocab):
            raise Refused(
                "vLLM 0.32 knows a reduced vocabulary and the format of speculators for EAGLE-3 "
                "drafts only; set --method eagle3"
            )
        if min(self.steps, self.batch, self.depth, self.prompt) < 1:
            raise Refused("--steps, --batch, --depth and --prompt have to be 1 or more")
        if self.length < self.prompt + self.depth + 1:
            wanted = self.prompt + self.depth + 1
            raise Refused(f"--length is {self.length}, but has to be {wanted} for this --prompt")
