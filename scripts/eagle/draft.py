# SPDX-License-Identifier: Apache-2.0
"""EAGLE and EAGLE-3 drafts as vLLM 0.32 runs them, and the folders that it loads.

The forward pass is that of vllm/model_executor/models/llama_eagle.py and llama_eagle3.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from scripts.eagle.target import Target

SMALL = 1e-3
"""The deviation of weights that begin at random; more drowns what a draft begins with."""


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


def draft_config(target: Any) -> Any:
    """The configuration of a draft's layer: the target's, for one layer without biases."""
    told = target.to_dict() | {
        "num_hidden_layers": 1,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**told)


def write(folder: Path, draft: Draft, speculators: bool, depth: int) -> None:
    """Write the folder that vLLM loads. Tensors are in the target's dtype.

    speculators: an EAGLE-3 draft as the library speculators 0.9 saves it, which also says how many
    tokens to draft (depth); or else as EAGLE's authors do.
    """
    target = draft.target
    dtype = getattr(torch, str(target.config.dtype or "bfloat16").removeprefix("torch."))
    tensors = {name: weight.to(dtype) for name, weight in draft.state_dict().items()}
    if not draft.eagle3 or speculators:
        tensors["embed_tokens.weight"] = target.embed.weight.to(dtype)
    else:
        tensors = {name.replace("layers.0.", "midlayer."): each for name, each in tensors.items()}
    if draft.kept is not None:
        vocabulary = target.config.vocab_size
        tensors["d2t"] = draft.kept - torch.arange(len(draft.kept), device=target.device)
        tensors["t2d"] = torch.isin(torch.arange(vocabulary, device=target.device), draft.kept)
    whole = {name: each.detach().cpu().contiguous() for name, each in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # a server may run as another user
    config = _config(draft, depth if speculators else None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _config(draft: Draft, depth: int | None) -> dict[str, Any]:
    """config.json. depth: in speculators' format, with so many tokens to draft."""
    target = draft.target
    layer: dict[str, Any] = draft_config(target.config).to_dict()
    layer |= {"architectures": ["LlamaForCausalLM"]}
    if not draft.eagle3:
        return layer
    reads = {
        "draft_vocab_size": draft.lm_head.out_features,
        "eagle_aux_hidden_state_layer_ids": target.layers,
    }
    if depth is None:
        return layer | reads | {"architectures": ["LlamaForCausalLMEagle3"]}
    verifier = {"name_or_path": str(target.folder), "architectures": target.config.architectures}
    return reads | {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "norm_before_residual": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "dtype": layer["dtype"],
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depth}],
            "verifier": verifier,
        },
    }
