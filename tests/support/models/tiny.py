# SPDX-License-Identifier: Apache-2.0
"""Make a tiny random Llama with a tokenizer and a chat template, for tests and benchmarks.

It answers nonsense, always the same nonsense to the same greedy prompt, and costs next to nothing:
4 layers, hidden size 256, 4,096 tokens, bf16. The folder is kept in the user's cache.
"""

import os
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

from tests.support.models.cache import cache, kept

NAME = "tiny-llama-1"  # change the number when the model changes
VOCABULARY = 4096
POSITIONS = 8192
LONG_NAME = "tiny-llama-long-1"
LONG_POSITIONS = 16_384
SHARDS_NAME = "tiny-llama-shards-1"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write(
    folder: Path,
    *,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    positions: int = POSITIONS,
    file: str = "1GB",
) -> None:
    """heads: the number of heads; each has 64 of the hidden size. file: most of a file's bytes."""
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
        hidden_size=64 * heads,
        intermediate_size=128 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size=file)


def make() -> Path:
    return kept(cache() / NAME, write)


def make_long() -> Path:
    """A model of one layer for prompts of 16,384 tokens: with four layers, attention over such
    prompts takes ten times as long without a GPU.
    """
    made = partial(write, layers=1, heads=2, kv_heads=2, positions=LONG_POSITIONS)
    return kept(cache() / LONG_NAME, made)


def make_shards() -> Path:
    """A model of 46 MB in several files with an index."""
    made = partial(write, layers=8, heads=8, kv_heads=4, file="8MB")
    return kept(cache() / SHARDS_NAME, made)


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    print(make())
