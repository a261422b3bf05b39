# SPDX-License-Identifier: Apache-2.0
"""Counts the hits of a tier that windows lose with vLLM's hybrid manager on, compared with it off.

With it on, blocks that have left a window are freed, and chunks that held them are never stored.
With it off, layers with windows keep all KV, and the tier also does. vLLM's scheduler, Slipway's
connector and LMCache's server run here; only the model is missing. The server copies KV, as on
GPUs: a chunk of 128 tokens has blocks of 32. Windows have 128 tokens, and two of three layers have
one. Prompts of 1, 4 and 16 windows are computed in steps of 512 tokens, four at once. The cases:

    eviction    the engine has lost the prompts, the tier has the stored chunks.
    restart     the tier had lost all KV while the engine had it; the prompts were repeated, and
                then the engine also lost them.
    again       the same once more: the KV that was computed again is stored.

Each repeat of a prompt has another end. The program prints the number of tokens from the tier, the
number that could have come from there, and the share that the manager loses.
"""

import sys
import uuid
from collections.abc import Iterator, Mapping

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import Request

from tests.serving.engine.painted import Painted, full, window
from tests.serving.engine.test_kv_connector import Server

WINDOW, BLOCK, CHUNK, STEP = 128, 32, 128, 512
PROMPTS, END = 4, 40
LENGTHS = (1, 4, 16)
"""Lengths of the prompts, in windows."""
CASES = ("eviction", "restart", "again")
ON: Mapping[str, KVCacheSpec] = {
    "full": full(BLOCK),
    "window": window(BLOCK, WINDOW),
    "other window": window(BLOCK, WINDOW),
}
OFF: Mapping[str, KVCacheSpec] = {"all": full(BLOCK)}
BLOCKS = 6000
"""Blocks of the engine's own cache: in the case "restart" it must still have all prompts."""


class Counting(Painted):
    """Counts the tokens that it loads, and those that it finds in its own cache."""

    def __init__(self, port: int, layers: Mapping[str, KVCacheSpec]) -> None:
        super().__init__(port, layers, gpu_way=True, blocks=BLOCKS, budget=STEP)
        self.hits = self.own = 0

    def compute(self, scheduled: SchedulerOutput) -> None:
        super().compute(scheduled)
        for it in scheduled.kv_connector_metadata.requests:
            if it.direction == "RETRIEVE":
                self.hits += it.op.end - it.op.start - it.op.skip_first_n_tokens

    def asked(self, length: int, end: int) -> int:
        """Send the prompts of a length, with this end, at once. Returns the number of tokens from
        the tier.
        """
        before = self.hits
        for number in range(PROMPTS):
            prompt = [number, *range(length - 1), *([end] * END)]
            sampling = SamplingParams(max_tokens=2, ignore_eos=True)
            request = Request(uuid.uuid4().hex, prompt, sampling, None, block_hasher=self._hasher)
            self.scheduler.add_request(request)
            self.own += self.scheduler.kv_cache_manager.get_computed_blocks(request)[1]
        self.idle()
        return self.hits - before


def measured(server: Server, layers: Mapping[str, KVCacheSpec], length: int) -> Iterator[int]:
    """The tokens from the tier in each of CASES. Raises AssertionError if a stored or loaded block
    was wrong, or if the engine had lost the prompts after the restart.
    """
    engine = Counting(server.port, layers)
    forget = engine.scheduler.reset_prefix_cache
    try:
        engine.asked(length, 1)
        assert forget()
        yield engine.asked(length, 2)
        server.forget()
        engine.own = 0
        assert engine.asked(length, 3) == 0
        assert engine.own == PROMPTS * length
        for end in (4, 5):
            assert forget()
            yield engine.asked(length, end)
        assert not engine.wrong
    finally:
        server.forget()
        engine.worker.shutdown()
        engine.scheduler.shutdown()


def main() -> None:
    server, lines = Server(CHUNK), []
    try:
        for times in LENGTHS:
            could = PROMPTS * times * WINDOW
            found = ([*measured(server, it, times * WINDOW)] for it in (OFF, ON))
            for case, off, on in zip(CASES, *found, strict=True):
                lost = f"{1 - on / off:.0%}" if off else "-"
                lines.append((f"{times} windows", case, f"{could:,}", f"{off:,}", f"{on:,}", lost))
    finally:
        server.kill()
    for line in [("prompt", "after", "could hit", "off", "on", "lost"), *lines]:
        sys.stdout.write("".join(f"{cell:>12}" for cell in line) + "\n")


if __name__ == "__main__":
    main()
