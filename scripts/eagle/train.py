"""Train an EAGLE or EAGLE-3 draft for a Llama model, as a folder that vLLM 0.32 loads.

The target is frozen and its hidden states are computed as they are needed. The draft's forward pass
is that of vllm/model_executor/models/llama_eagle.py and llama_eagle3.py, and it is trained as it is
used: for --depth tokens it goes on from its own hidden states, as EAGLE-3's training-time test does
(arXiv:2503.01840). At the end, what it would have had accepted is counted on held-out prompts, by
vLLM's rule for greedy requests.

The library speculators 0.9 is what drafts for large models are trained with. It is not used here
because it trains no EAGLE-1, only on GPUs, from hidden states that a second vLLM server writes, and
wants torchvision, torchaudio and an older fsspec beside vLLM.

A run that was cut off goes on from its last checkpoint when it is started again with the same
arguments; on one machine, the same arguments and files make the same weights.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.utils import logging

from scripts.models import tiny
from scripts.models.cache import cache, kept, say

METHODS = ("eagle", "eagle3")
POSITIONS = 5
"""Tokens that are drafted at once when acceptance is counted, where --depth is not more."""
HELD_OUT = 32
GENERATED_AT_ONCE = 64
EARLIER_COUNTS_MORE = 0.8
"""The weight of a drafted token's loss over the one before: it counts only if that was accepted."""
WARM_UP = 0.05
"""The part of all steps in which the learning rate rises."""
SMALL = 1e-3
"""The deviation of weights that begin at random; more drowns what a draft begins with."""
CHECKPOINT_S, PROGRESS_S = 60, 5
NOTES = "training.json"
SCRATCH = "training"
# The tiny model is random: its logits hardly differ, what it writes is not like any other text, and
# large steps forget what a draft begins with. One thread is as fast as two for matrices so small.
TINY: Mapping[str, Any] = {
    "generated": True,
    "steps": 75,
    "length": 64,
    "lr": 1e-4,
    "loss_temperature": 0.05,
    "threads": 1,
}


class Refused(ValueError):
    """What cannot be done as it was asked for. The message says why, and what would do."""


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
    temperature: float = 0.0
    loss_temperature: float = 1.0
    device: str = "auto"
    threads: int | None = None

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
        if self.length < self.prompt + self.positions + 1:
            wanted = self.prompt + self.positions + 1
            raise Refused(f"--length is {self.length}, but has to be {wanted} for this --prompt")

    @property
    def positions(self) -> int:
        return max(self.depth, POSITIONS)

    def where(self) -> str:
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"


# --- the target ---


class Target:
    """A frozen Llama, and what vLLM hands of it to a draft.

    layers: of the hidden states for EAGLE-3, where 0 is what goes into the first decoder layer and
    n what comes out of the nth, by vLLM's count in vllm/model_executor/models/llama.py.
    """

    def __init__(self, folder: Path, options: Options) -> None:
        self.folder, self.config = folder, configuration(folder)
        self.eagle3 = options.method == "eagle3"
        self.layers = read_layers(self.config.num_hidden_layers) if self.eagle3 else []
        vocabulary = self.config.vocab_size
        if not 0 < (options.draft_vocab or vocabulary) <= vocabulary:
            raise Refused(
                f"--draft-vocab is {options.draft_vocab}, but the model has {vocabulary} tokens"
            )
        self.device = options.where()
        # 16-bit arithmetic is slow on CPUs, and the weights are the same numbers in 32 bits.
        dtype = torch.float32 if self.device == "cpu" else "auto"
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model = model.to(self.device).eval().requires_grad_(False)
        self.embed = self.model.model.embed_tokens
        self.head = self.model.lm_head.weight

    def stops(self) -> Tensor:
        """The ids of the tokens that end a text."""
        ids = self.config.eos_token_id
        return torch.tensor([] if ids is None else ids, device=self.device).view(-1)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def look(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """What the target makes of texts: its features and its logits, for each token of `ids`.

        ids: [B, L]. Features: [B, L, H] after the last norm for EAGLE, [B, L, 3 H] for EAGLE-3.
        """
        seen = self.model.model(input_ids=ids, use_cache=False, output_hidden_states=self.eagle3)
        last = seen.last_hidden_state
        read = [seen.hidden_states[layer] for layer in self.layers]
        features = torch.cat(read, -1) if read else last
        return features.float(), self.model.lm_head(last).float()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def write_on(self, prompts: Tensor, length: int, temperature: float, seed: int) -> Tensor:
        """The prompts, [N, P], with what the target writes after them: [N, length].

        It does not stop at a token that ends a text: see `counted`.
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        written = []
        for ids in prompts.split(GENERATED_AT_ONCE):
            ids = new = ids.to(self.device)
            past = None
            while ids.shape[1] < length:
                out = self.model(new, past_key_values=past, use_cache=True, logits_to_keep=1)
                past, logits = out.past_key_values, out.logits[:, -1].float()
                if temperature:
                    chances = (logits / temperature).softmax(-1)
                    new = torch.multinomial(chances, 1, generator=generator)
                else:
                    new = logits.argmax(-1, keepdim=True)
                ids = torch.cat([ids, new], -1)
            written.append(ids)
        return torch.cat(written)


def configuration(folder: Path) -> Any:
    file = folder / "config.json"
    if not file.is_file():
        raise Refused(f"{file} is not there; name the folder of a model in Hugging Face's format")
    kind = json.loads(file.read_text()).get("model_type")
    if kind != "llama":
        raise Refused(
            f"{file}: model_type is {kind!r}, and drafts are made for Llama's architecture alone; "
            "name a model with model_type llama"
        )
    return LlamaConfig.from_pretrained(folder)


def read_layers(layers: int) -> list[int]:
    """Three layers for EAGLE-3 to read, of a target that has `layers`.

    vLLM's own choice where that names three. It hands over a layer that is named twice only once,
    which is what becomes of its choice for small models.
    """
    if layers < 3:
        raise Refused(
            f"the model has {layers} layers, and EAGLE-3 reads the hidden states of three; set "
            "--method eagle"
        )
    chosen = sorted({2, layers // 2, layers - 3})
    return chosen if len(chosen) == 3 else [layers - 3, layers - 2, layers - 1]


# --- the draft ---


class Attention(nn.Module):  # type: ignore[misc]  # torch is not type-checked
    """Llama's attention, for drafts of several tokens after each token of a text at once."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        self.size = config.head_dim
        self.copies = config.num_attention_heads // config.num_key_value_heads
        queries, keys = (
            heads * self.size for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(
        self, states: Tensor, rotary: tuple[Tensor, Tensor], past: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """states: [B, T, width], one draft for each of T tokens. past: of earlier steps; grows.

        A draft sees the first step up to its own token, which is made of the target's features, and
        of the later steps only what is its own: one key each.
        """
        queries, keys, values = (
            linear(states).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *rotary)
        past.append(
            (
                keys.repeat_interleave(self.copies, 1),
                values.repeat_interleave(self.copies, 1),
            )
        )
        (first_keys, first_values), *own = past
        length = states.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=states.device).triu(1)
        scores = [(queries @ first_keys.mT).masked_fill(later, -torch.inf)]
        scores += [(queries * own_keys).sum(-1, keepdim=True) for own_keys, _ in own]
        weights = (torch.cat(scores, -1) / self.size**0.5).softmax(-1)
        mixed = weights[..., :length] @ first_values
        for number, (_, own_values) in enumerate(own, start=length):
            mixed = mixed + weights[..., number : number + 1] * own_values
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):  # type: ignore[misc]  # torch is not type-checked
    """A draft's only layer. In EAGLE there is no norm before it, EAGLE-3 has one for each input."""

    def __init__(self, config: Any, eagle3: bool) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, 2 * hidden if eagle3 else hidden)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps)
        if eagle3:
            self.input_layernorm = LlamaRMSNorm(hidden, eps)
            self.hidden_norm = LlamaRMSNorm(hidden, eps)


class Draft(nn.Module):  # type: ignore[misc]  # torch is not type-checked
    """EagleLlamaForCausalLM or Eagle3LlamaForCausalLM of vLLM, without the target's embeddings.

    kept: the ids of the tokens that it can guess, in order; None for all. An EAGLE draft uses the
    target's head.
    """

    def __init__(self, target: Target, kept: Tensor | None = None) -> None:
        super().__init__()
        config, self.target = draft_config(target.config), target
        self.eagle3, self.kept = target.eagle3, kept
        self.rotary = LlamaRotaryEmbedding(config)
        hidden = config.hidden_size
        self.fc = nn.Linear(len(target.layers) * hidden or 2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Layer(config, target.eagle3)])
        if target.eagle3:
            self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
            self.lm_head = nn.Linear(hidden, len(self._rows(target.head)), bias=False)
        self._begin(target)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _begin(self, target: Target) -> None:
        """Begin as a draft that says again what the target has just said.

        EAGLE hands on the target's last state, to which its layer adds nothing yet. EAGLE-3 goes on
        from the last layer that it reads with the target's last layer, norm and head.
        """
        hidden, last = self.fc.out_features, target.model.model.layers[-1].state_dict()
        nn.init.normal_(self.fc.weight, std=SMALL)
        self.fc.weight[:, -hidden:] += torch.eye(hidden)
        for name, weight in self.layers[0].named_parameters():
            if name == "hidden_norm.weight":
                weight.copy_(last["input_layernorm.weight"])
            elif name != "input_layernorm.weight":
                beside = weight.shape[-1] - last[name].shape[-1]  # what reads the token, in EAGLE-3
                weight.normal_(std=SMALL)
                weight[..., beside:] = last[name]
        if self.eagle3:
            self.lm_head.weight.copy_(self._rows(target.head))
            self.norm.weight.copy_(target.model.model.norm.weight)
        else:
            nn.init.zeros_(self.layers[0].self_attn.o_proj.weight)
            nn.init.zeros_(self.layers[0].mlp.down_proj.weight)
        self.to(target.device)

    def _rows(self, head: Tensor) -> Tensor:
        return head if self.kept is None else head[self.kept]

    def forward(self, ids: Tensor, features: Tensor, depth: int) -> Iterator[Tensor]:
        """For each of `depth` drafted tokens, what goes into the head: [B, T, H].

        ids: [B, T + 1], a text; features: [B, T, …], the target's of all but its last token. The
        draft after token t has the target's features of it and is given token t + 1; its next step
        is at position t + 1 and is given token t + 2, as if that had been drafted and accepted. The
        last drafts soon run out of text and are then given token 0.
        """
        past: list[tuple[Tensor, Tensor]] = []
        hidden = self.fc(features) if self.eagle3 else features
        for step in range(depth):
            inputs = functional.pad(ids[:, 1 + step :], (0, step))
            embeds = self.target.embed(inputs).float()
            positions = torch.arange(inputs.shape[1], device=ids.device)[None] + step
            states, hidden = self._step(embeds, hidden, self.rotary(embeds, positions), past)
            yield states

    def _step(
        self,
        embeds: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        past: list[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """What goes into the head, and what goes into the next step."""
        layer = self.layers[0]
        if self.eagle3:
            inputs = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], -1)
        else:
            inputs = hidden = self.fc(torch.cat([embeds, hidden], -1))
        hidden = hidden + layer.self_attn(inputs, rotary, past)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.norm(hidden) if self.eagle3 else hidden, hidden

    def logits(self, states: Tensor) -> Tensor:
        """[…, H] → [..., tokens that it can guess]"""
        if self.eagle3:
            return self.lm_head(states)
        head = self.target.head
        return functional.linear(states.to(head.dtype), head).float()

    def tokens(self, guesses: Tensor) -> Tensor:
        """Indices of its own vocabulary → ids of the target's."""
        return guesses if self.kept is None else self.kept[guesses]


def draft_config(target: Any) -> Any:
    """The configuration of a draft's layer: the target's, for one layer without biases."""
    told = target.to_dict() | {
        "num_hidden_layers": 1,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**told)


# --- text ---


def passages(tokenizer: Any, options: Options) -> tuple[Tensor, Tensor]:
    """The text in pieces of `length` tokens, shuffled: those to train on, and those held out."""
    size = options.length - len(beginning(tokenizer))
    rows = []
    for text in texts(options.text):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        rows += [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
    held = min(HELD_OUT, len(rows) // 4)
    if not held:
        wanted = f"4 times {size} tokens"
        raise Refused(f"the text is too short: --length {options.length} takes {wanted} of it")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(options.seed))
    shuffled = torch.tensor(rows)[order]
    return shuffled[held:], shuffled[:held]


def prompts(tokenizer: Any, pieces: Tensor, options: Options) -> Tensor:
    """The pieces in parts of `prompt` tokens, whole ones: [N, P]."""
    size = options.prompt - len(beginning(tokenizer))
    parts = pieces[:, : pieces.shape[1] // size * size].reshape(-1, size)
    return begun(tokenizer, parts)


def beginning(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text, which is a model's first token or nothing."""
    ids: list[int] = tokenizer("").input_ids
    return ids


def begun(tokenizer: Any, rows: Tensor) -> Tensor:
    first = torch.tensor(beginning(tokenizer), dtype=torch.long)
    return torch.cat([first.expand(len(rows), -1), rows], -1)


def texts(files: Sequence[Path]) -> list[str]:
    """Python's own documentation, which every machine has, where no files are given."""
    return [file.read_text() for file in files] or [*topics.values()]


def counted(ids: Tensor, prompt: int, stops: Tensor) -> Tensor:
    """After which tokens the target's guess is of interest: booleans, [B, L].

    prompt: so many tokens are not the target's own. Nor is what follows the end of its text.
    """
    own = torch.arange(ids.shape[1], device=ids.device) >= prompt
    ended = (torch.isin(ids, stops) & own).cumsum(-1) > 0
    return ~ended & (own | own.roll(-1))


# --- training ---


class Training:
    """A run: what it was asked for, the target, and what is kept in its folder meanwhile."""

    def __init__(self, folder: Path, out: Path, options: Options) -> None:
        self.options, self.out, self.folder = options, out, folder
        self.scratch = out / SCRATCH
        self.notes = noted(folder, options)

    def run(self) -> dict[str, Any]:
        """Train, or go on, and write the draft. Returns the notes of the run, with its counts."""
        found = self._found()
        if "acceptance" in found:
            say(f"{self.out}: finished before; --evaluate counts again")
            return found
        target = Target(self.folder, self.options)
        pieces = passages(self._tokenizer(), self.options)[0]
        self.scratch.mkdir(parents=True, exist_ok=True)
        write_json(self.out / NOTES, self.notes)
        rows = self._rows(target, pieces)
        torch.manual_seed(self.options.seed)
        draft = Draft(target, self._kept(target, rows))
        self._train(target, draft, rows)
        write_draft(self.out, draft, self.options)
        notes = {**self.notes, "acceptance": self._count(target)}
        write_json(self.out / NOTES, notes)
        shutil.rmtree(self.scratch)
        return notes

    def again(self) -> dict[str, Any]:
        """The counts of a finished run, made anew."""
        if "acceptance" not in self._found():
            raise Refused(f"{self.out} has no finished draft; train it without --evaluate first")
        return {**self.notes, "acceptance": self._count(Target(self.folder, self.options))}

    def _count(self, target: Target) -> dict[str, Any]:
        """Of the draft as it was written, with numbers as short as the target's."""
        counts: dict[str, Any] = evaluate(
            read_draft(self.out, target), self._held_out(target), self.options
        )
        return counts

    def _found(self) -> dict[str, Any]:
        """The notes of an earlier run of the same kind in the folder; empty where there is none."""
        file = self.out / NOTES
        if not file.exists():
            if self.out.exists() and any(self.out.iterdir()):
                raise Refused(f"{self.out} has files of something else in it; name another folder")
            return {}
        found: dict[str, Any] = json.loads(file.read_text())
        others = [name for name, value in self.notes.items() if found.get(name) != value]
        if others:
            told = ", ".join(f"{name} {found.get(name)}" for name in others)
            raise Refused(f"{self.out} is of a run with {told}; repeat these, or name another")
        return found

    def _held_out(self, target: Target) -> Tensor:
        """What the target writes greedily after the prompts that are held out: [N, L]."""
        options, tokenizer = self.options, self._tokenizer()
        pieces = passages(tokenizer, options)[1]
        first = prompts(tokenizer, pieces[:, : options.prompt], options)
        return target.write_on(first, options.length, 0, options.seed)

    def _rows(self, target: Target, pieces: Tensor) -> Tensor:
        """What to train on: [N, L]. The target's own text is written once, and kept for later."""
        options, tokenizer = self.options, self._tokenizer()
        file = self.scratch / "rows.safetensors"
        if not options.generated:
            return begun(tokenizer, pieces)
        if not file.exists():
            first = prompts(tokenizer, pieces, options)[: options.steps * options.batch]
            say(f"the target writes {len(first)} texts of {options.length} tokens")
            began = time.monotonic()
            rows = target.write_on(first, options.length, options.temperature, options.seed)
            say(f"written in {time.monotonic() - began:.0f} s")
            write_tensors(file, {"rows": rows})
        return load_file(file)["rows"]

    def _tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.folder)

    def _kept(self, target: Target, rows: Tensor) -> Tensor | None:
        """The most frequent tokens, where the draft is to have fewer than the target: ids."""
        wanted, vocabulary = self.options.draft_vocab, target.config.vocab_size
        if wanted is None or wanted == vocabulary:
            return None
        counts = torch.bincount(rows.flatten(), minlength=vocabulary)
        frequent = counts.sort(descending=True, stable=True).indices[:wanted]
        return frequent.sort().values.to(target.device)

    def _train(self, target: Target, draft: Draft, rows: Tensor) -> None:
        options = self.options
        optimizer = torch.optim.AdamW(draft.parameters(), options.lr, (0.9, 0.95), weight_decay=0)
        begun = self._restore(draft, optimizer)
        began = saved = told = time.monotonic()
        for step in range(begun, options.steps):
            for group in optimizer.param_groups:
                group["lr"] = options.lr * rate(step, options.steps)
            ids = rows[of_step(step, len(rows), options)].to(target.device)
            loss, right = losses(target, draft, ids, options)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimizer.step()
            now = time.monotonic()
            if now - told > PROGRESS_S or step + 1 == options.steps:
                told, pace = now, (now - began) / (step + 1 - begun)
                shares = ", ".join(f"{each:.2f}" for each in right)
                done = f"step {step + 1}/{options.steps}"
                say(f"{done}: loss {loss:.3f}, right {shares}, {pace:.2f} s each")
            if now - saved > CHECKPOINT_S:
                self._save(draft, optimizer, step + 1)
                saved = time.monotonic()

    def _save(self, draft: Draft, optimizer: Any, steps: int) -> None:
        state = {"steps": steps, "draft": draft.state_dict(), "optimizer": optimizer.state_dict()}
        scratch = self.scratch / "new"
        torch.save(state, scratch)
        scratch.replace(self.scratch / "checkpoint")

    def _restore(self, draft: Draft, optimizer: Any) -> int:
        """The number of steps that were done before."""
        file = self.scratch / "checkpoint"
        if not file.exists():
            return 0
        state = torch.load(file, map_location=self.options.where(), weights_only=True)
        draft.load_state_dict(state["draft"])
        optimizer.load_state_dict(state["optimizer"])
        steps: int = state["steps"]
        say(f"going on after step {steps}")
        return steps


def noted(folder: Path, options: Options) -> dict[str, Any]:
    """What has to be the same for a run to go on."""
    asked = dataclasses.asdict(options)
    for name in ("device", "text", "threads"):
        del asked[name]
    words = "\0".join(texts(options.text)).encode()
    digest = hashlib.sha256(words).hexdigest()[:16]
    return {"target": str(folder.resolve()), "text": digest, **asked}


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


def losses(
    target: Target, draft: Draft, ids: Tensor, options: Options
) -> tuple[Tensor, list[float]]:
    """The loss of a batch, and the share of right guesses at each step.

    The draft's distributions are to become the target's. A loss temperature below 1 sharpens both,
    so that the best tokens, which greedy requests are accepted by, weigh more.
    """
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


@torch.no_grad()  # type: ignore[untyped-decorator]
def evaluate(draft: Draft, rows: Tensor, options: Options) -> dict[str, Any]:
    """What vLLM would accept of the draft's tokens while the target writes `rows` greedily.

    rows: [N, L], each a prompt and the target's text. Returned are the number of drafts, the share
    of them accepted at each position (as vllm:spec_decode_num_accepted_tokens_per_pos over
    vllm:spec_decode_num_drafts), and the tokens that a step of the target makes with them.
    """
    target, positions = draft.target, options.positions
    drafts, accepted = 0, torch.zeros(positions, dtype=torch.long)
    for ids in rows.split(options.batch):
        ids = ids.to(target.device)
        features, logits = target.look(ids)
        alive = counted(ids, options.prompt, target.stops())
        runs = accepted_runs(draft, ids, features, logits.argmax(-1), positions)
        for run, living in zip(runs.tolist(), alive.tolist(), strict=True):
            after = options.prompt - 1
            # A draft that would go beyond the text is left out, since nothing tells what it gets.
            while after + positions < len(living) and living[after + positions]:
                drafts += 1
                accepted[: run[after]] += 1
                after += run[after] + 1
    shares = [round(each / max(1, drafts), 3) for each in accepted.tolist()]
    return {"drafts": drafts, "accepted": shares, "tokens_per_step": round(1 + sum(shares), 2)}


def accepted_runs(
    draft: Draft, ids: Tensor, features: Tensor, best: Tensor, positions: int
) -> Tensor:
    """How many tokens are accepted of a draft after each token of a text: [B, L - 1].

    best: [B, L], the target's next token after each. Where the text is what the target writes, a
    draft's token that is accepted is the text's, so one pass over the text is all of its drafts.
    """
    good = torch.ones_like(ids[:, 1:], dtype=torch.bool)
    runs = torch.zeros_like(ids[:, 1:])
    for step, states in enumerate(draft(ids, features[:, :-1], positions)):
        guesses = draft.tokens(draft.logits(states).argmax(-1))
        good = good & (guesses == functional.pad(best[:, 1 + step :], (0, step), value=-1))
        runs += good
    return runs


# --- files ---


def write_draft(out: Path, draft: Draft, options: Options) -> None:
    """Write the folder that vLLM loads. Tensors are in the target's dtype."""
    target = draft.target
    dtype = getattr(torch, str(target.config.dtype or "bfloat16").removeprefix("torch."))
    tensors = {name: weight.to(dtype) for name, weight in draft.state_dict().items()}
    if not draft.eagle3:
        tensors["embed_tokens.weight"] = target.embed.weight.to(dtype)
    elif not options.speculators:
        tensors = {name.replace("layers.0.", "midlayer."): each for name, each in tensors.items()}
    if draft.kept is not None:
        vocabulary = target.config.vocab_size
        tensors["d2t"] = draft.kept - torch.arange(len(draft.kept), device=target.device)
        tensors["t2d"] = torch.isin(torch.arange(vocabulary, device=target.device), draft.kept)
    write_tensors(out / "model.safetensors", tensors)
    write_json(out / "config.json", written_config(draft, options))


def written_config(draft: Draft, options: Options) -> dict[str, Any]:
    target = draft.target
    layer: dict[str, Any] = draft_config(target.config).to_dict()
    layer |= {"architectures": ["LlamaForCausalLM"]}
    if not draft.eagle3:
        return layer
    reads = {
        "draft_vocab_size": draft.lm_head.out_features,
        "eagle_aux_hidden_state_layer_ids": target.layers,
    }
    if not options.speculators:
        return layer | reads | {"architectures": ["LlamaForCausalLMEagle3"]}
    verifier = {"name_or_path": str(target.folder), "architectures": target.config.architectures}
    proposal = {"proposal_type": "greedy", "speculative_tokens": options.depth}
    return reads | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "norm_before_residual": False,
        "transformer_layer_config": layer,
        "dtype": layer["dtype"],
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
    }


def read_draft(out: Path, target: Target) -> Draft:
    tensors = load_file(out / "model.safetensors", device=target.device)
    offsets = tensors.pop("d2t", None)
    kept = None if offsets is None else offsets + torch.arange(len(offsets), device=target.device)
    for name in ("t2d", "embed_tokens.weight"):
        tensors.pop(name, None)
    draft = Draft(target, kept)
    draft.load_state_dict(
        {name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()}
    )
    return draft


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    whole = {name: each.detach().cpu().contiguous() for name, each in tensors.items()}
    scratch = file.with_name(file.name + ".new")
    save_file(whole, scratch, metadata={"format": "pt"})
    scratch.chmod(0o644)  # a server may run as another user
    scratch.replace(file)


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    scratch = file.with_name(file.name + ".new")
    scratch.write_text(json.dumps(content, indent=2) + "\n")
    scratch.replace(file)


# --- what is called ---


def train(target: Path, out: Path, **options: Any) -> Path:
    """Train a draft for the model in `target` and write it to `out`. options: of `Options`."""
    run(Training(target, out, Options(**options)), evaluated=False)
    return out


def run(training: Training, evaluated: bool) -> dict[str, Any]:
    """The notes of the run, or those of a finished one with new counts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(training.options.threads or threads)
    try:
        return training.again() if evaluated else training.run()
    finally:
        torch.set_num_threads(threads)


def make(method: str, **more: Any) -> Path:
    """A draft for the tiny model, trained once, in the user's cache. more: as in train()."""

    def write(folder: Path) -> None:
        train(tiny.make(), folder, method=method, **TINY, **more)

    told = "".join(f"-{name}-{value}" for name, value in sorted(more.items()))
    name = f"tiny-{method}{told}-1"  # a new number when what is made changes
    return kept(cache() / name, write)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("target", type=Path, metavar="TARGET", help="the model's folder")
    add("out", type=Path, metavar="OUT", help="the draft's folder")
    add("--method", choices=METHODS, required=True)
    add("--text", type=Path, nargs="+", metavar="FILE", help="Python's documentation by default")
    add("--steps", type=int, metavar="N")
    add("--length", type=int, metavar="L", help="tokens of each text, with the prompt")
    add("--prompt", type=int, metavar="L", help="tokens that the target goes on from")
    add("--batch", type=int, metavar="B", help="texts in a step")
    add("--lr", type=float, metavar="X")
    add("--draft-vocab", type=int, metavar="N", help="guess only the N most frequent tokens")
    add("--speculators", action="store_true", help="write the format of the speculators library")
    add("--seed", type=int, metavar="S")
    add("--depth", type=int, metavar="K", help="tokens that it is trained to guess in a row")
    add("--generated", action="store_true", help="train on what the target writes after the text")
    add("--temperature", type=float, metavar="T", help="that the target writes with; 0 is greedy")
    add(
        "--loss-temperature", type=float, metavar="T", help="of the distributions that are compared"
    )
    add("--threads", type=int, metavar="N", help="of CPUs; torch's own choice by default")
    add("--device", metavar="NAME", help="like cpu or cuda:1")
    add("--evaluate", action="store_true", help="only count again for a finished draft")
    return parser


def main() -> None:
    asked = vars(arguments().parse_args())
    target, out, evaluated = (asked.pop(name) for name in ("target", "out", "evaluate"))
    given = {name: value for name, value in asked.items() if value is not None}
    try:
        counts = run(Training(target, out, Options(**given)), evaluated)["acceptance"]
    except (Refused, OSError) as error:
        sys.exit(f"train_eagle: {error}")
    print(f"{counts['drafts']} drafts on held-out prompts; accepted at each position:")
    print(", ".join(f"{share:.3f}" for share in counts["accepted"]))
    print(f"tokens for each step of the target: {counts['tokens_per_step']}")


if __name__ == "__main__":
    main()
