# SPDX-License-Identifier: Apache-2.0
"""Train an EAGLE or EAGLE-3 draft for a Llama model, as a folder that vLLM 0.32 loads.

A draft is trained as it is used: for `depth` tokens it goes on from its own hidden states, as
EAGLE-3's training-time test does (arXiv:2503.01840), and its distributions are to become the
target's. On one machine the same arguments and files make the same weights.
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoTokenizer

from scripts.eagle.draft import Draft, write
from scripts.eagle.options import Options, Refused
from scripts.eagle.target import Target
from scripts.models import tiny
from scripts.models.cache import cache, kept, say

EARLIER_COUNTS_MORE = 0.8
"""The weight of a drafted token's loss over the one before: it counts only if that was accepted."""
WARM_UP = 0.05
"""The part of all steps in which the learning rate rises."""
PROGRESS_S = 5
# The tiny model is random: its logits hardly differ, what it writes is not like any other text, and
# large steps forget what a draft begins with.
TINY: Mapping[str, Any] = {
    "generated": True,
    "steps": 75,
    "length": 64,
    "lr": 1e-4,
    "loss_temperature": 0.05,
}


def train(folder: Path, out: Path, **options: Any) -> Path:
    """Train a draft for the model in `folder` and write it to `out`. options: of `Options`."""
    asked = Options(**options)
    if out.exists() and any(out.iterdir()):
        raise Refused(f"{out} is not empty; name another folder")
    target = Target(folder, asked.method == "eagle3", asked.device)
    vocabulary = target.config.vocab_size
    if not 0 < (asked.draft_vocab or vocabulary) <= vocabulary:
        raise Refused(
            f"--draft-vocab is {asked.draft_vocab}, but the model has {vocabulary} tokens"
        )
    rows = texts(AutoTokenizer.from_pretrained(folder), target, asked)
    torch.manual_seed(asked.seed)
    draft = Draft(target, most_frequent(rows, asked.draft_vocab, vocabulary, target.device))
    fit(draft, rows, asked)
    write(out, draft, asked.speculators, asked.depth)
    return out


def make(method: str, **more: Any) -> Path:
    """A draft for the tiny model, trained once, in the user's cache. more: as in train()."""

    def write_tiny(folder: Path) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as fast as two for matrices so small
        try:
            train(tiny.make(), folder, method=method, **{**TINY, **more})
        finally:
            torch.set_num_threads(threads)

    suffix = "".join(f"-{name}-{value}" for name, value in sorted(more.items()))
    name = f"tiny-{method}{suffix}-2"  # a new number when what is made changes
    return kept(cache() / name, write_tiny)


# The text.


def texts(tokenizer: Any, target: Target, options: Options) -> Tensor:
    """What to train on, shuffled: [N, L]. Pieces of the text, or what the target writes after some.

    Python's own documentation, which every machine has, where no files are given.
    """
    first = torch.tensor(tokenizer("").input_ids, dtype=torch.long)  # before every text, or empty
    size = options.length - len(first)
    pieces = []
    for text in [file.read_text() for file in options.text] or [*topics.values()]:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        pieces += [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
    if not pieces:
        raise Refused(f"the text is too short: --length {options.length} takes {size} tokens of it")
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(options.seed))
    rows = torch.tensor(pieces)[order]
    if options.generated:
        size = options.prompt - len(first)
        rows = rows[:, : rows.shape[1] // size * size].reshape(-1, size)
        rows = rows[: options.steps * options.batch]
    rows = torch.cat([first.expand(len(rows), -1), rows], -1)
    if options.generated:
        say(f"the target writes {len(rows)} texts of {options.length} tokens")
        rows = target.write_on(rows, options.length).cpu()
    return rows


def most_frequent(rows: Tensor, wanted: int | None, vocabulary: int, device: str) -> Tensor | None:
    """The ids of the most frequent tokens, where the draft is to have fewer than the target."""
    if wanted is None or wanted == vocabulary:
        return None
    counts = torch.bincount(rows.flatten(), minlength=vocabulary)
    frequent = counts.sort(descending=True, stable=True).indices[:wanted]
    return frequent.sort().values.to(device)


def counted(ids: Tensor, prompt: int, stops: Tensor) -> Tensor:
    """After which tokens the target's guess is of interest: booleans, [B, L].

    prompt: so many tokens are not the target's own. Nor is what follows the end of its text.
    """
    own = torch.arange(ids.shape[1], device=ids.device) >= prompt
    ended = (torch.isin(ids, stops) & own).cumsum(-1) > 0
    return ~ended & (own | own.roll(-1))


# The training.


def fit(draft: Draft, rows: Tensor, options: Options) -> None:
    optimizer = torch.optim.AdamW(draft.parameters(), options.lr, (0.9, 0.95), weight_decay=0)
    began = shown = time.monotonic()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * rate(step, options.steps)
        ids = rows[of_step(step, len(rows), options)].to(draft.target.device)
        loss, right = losses(draft, ids, options)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        now = time.monotonic()
        if now - shown > PROGRESS_S or step + 1 == options.steps:
            shown, pace = now, (now - began) / (step + 1)
            shares = ", ".join(f"{each:.2f}" for each in right)
            done = f"step {step + 1}/{options.steps}"
            say(f"{done}: loss {loss:.3f}, right {shares}, {pace:.2f} s each")


def rate(step: int, steps: int) -> float:
    """The learning rate's course, from 0 to 1: up in a straight line, and down to 0 as a cosine."""
    rising = (step + 1) / max(1, WARM_UP * steps)
    falling = 0.5 + 0.5 * math.cos(math.pi * step / steps)
    return min(1.0, rising) * falling


def of_step(step: int, rows: int, options: Options) -> Tensor:
    """The rows of a step's batch. Each epoch has an order of its own."""
    chosen = []
    for number in range(step * options.batch, (step + 1) * options.batch):
        epoch, at = divmod(number, rows)
        generator = torch.Generator().manual_seed(options.seed + epoch)
        chosen.append(torch.randperm(rows, generator=generator)[at])
    return torch.stack(chosen)


def losses(draft: Draft, ids: Tensor, options: Options) -> tuple[Tensor, list[float]]:
    """The loss of a batch, and the share of right guesses at each step.

    A loss temperature below 1 sharpens the draft's and the target's distributions, so that the best
    tokens, which greedy requests are accepted by, weigh more.
    """
    target = draft.target
    features, logits = target.look(ids)
    best = logits.argmax(-1)
    wanted = torch.ones_like(ids, dtype=torch.bool)
    if options.generated:
        wanted = counted(ids, options.prompt, target.stops())
    if draft.kept is not None:  # what it cannot guess teaches it nothing
        wanted &= torch.isin(best, draft.kept)
        logits = logits[..., draft.kept]
    total, right = torch.zeros((), device=ids.device), []
    for step, states in enumerate(draft(ids, features[:, :-1], options.depth)):
        mask = wanted[:, 1 + step :]
        states = states[:, : mask.shape[1]][mask]
        guessed, wished = (
            each / options.loss_temperature
            for each in (draft.logits(states), logits[:, 1 + step :][mask])
        )
        count = max(1, len(wished))  # a reduced vocabulary may leave none
        loss = functional.cross_entropy(guessed, wished.softmax(-1), reduction="sum") / count
        total = total + EARLIER_COUNTS_MORE**step * loss
        right.append((guessed.argmax(-1) == wished.argmax(-1)).sum().item() / count)
    return total, right
