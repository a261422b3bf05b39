# SPDX-License-Identifier: Apache-2.0
"""Make a tiny random Llama with a tokenizer and a chat template, for tests and benchmarks.

It answers nonsense, always the same nonsense to the same greedy prompt, and costs next to nothing:
4 layers, hidden size 256, 4,096 tokens, bf16. The folder is kept in the user's cache.
"""

import json
import os
import shutil
from pathlib import Path
from pydoc_data.topics import topics

from scripts.models.cache import cache, kept

NAME = "tiny-llama-1"  # a new number when what is made changes
VOCABULARY = 4096
POSITIONS = 8192
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        topics.values(),  # Python's own documentation: English that every machine has
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def stretch(folder: Path, positions: int) -> None:
    """Write the same model for longer prompts. Positions are rotations, which have no weights."""
    shutil.copytree(make(), folder)
    config = folder / "config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "max_position_embeddings": positions})
    )


def make(positions: int = POSITIONS) -> Path:
    """The model's folder. positions: tokens of its longest prompt and answer together."""
    if positions == POSITIONS:
        return kept(cache() / NAME, write)
    return kept(cache() / f"{NAME}-{positions}", lambda folder: stretch(folder, positions))


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    print(make())
