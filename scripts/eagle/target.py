# SPDX-License-Identifier: Apache-2.0
"""The model that a draft is trained for: frozen, with the hidden states that vLLM hands on."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from scripts.eagle.options import Refused

GENERATED_AT_ONCE = 64


class Target:
    """A frozen Llama, and what vLLM hands on of it to a draft.

    layers: of the hidden states for EAGLE-3, where 0 is what goes into the first decoder layer and
    n what comes out of the nth, by vLLM's count in vllm/model_executor/models/llama.py.
    """

    def __init__(self, folder: Path, eagle3: bool, device: str = "auto") -> None:
        self.folder, self.config = folder, configuration(folder)
        self.eagle3 = eagle3
        self.layers = read_layers(self.config.num_hidden_layers) if eagle3 else []
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = device
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
    def write_on(self, prompts: Tensor, length: int) -> Tensor:
        """The prompts, [N, P], with what the target writes greedily after them: [N, length].

        It does not stop at a token that ends a text: see `counted`.
        """
        written = []
        for ids in prompts.split(GENERATED_AT_ONCE):
            ids = new = ids.to(self.device)
            past = None
            while ids.shape[1] < length:
                out = self.model(new, past_key_values=past, use_cache=True, logits_to_keep=1)
                past, new = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
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
