# SPDX-License-Identifier: Apache-2.0
"""Make a tiny random cross-encoder, a BERT with one score, for tests: the shape of most rerankers.

Its scores mean nothing, and are always the same for the same pair.
"""

import os
from pathlib import Path
from pydoc_data.topics import topics

from tests.support.models.cache import cache, kept

NAME = "tiny-reranker-1"  # change the number when the model changes
VOCABULARY = 2048
POSITIONS = 512


def write(folder: Path) -> None:
    import torch
    from tokenizers import (
        Tokenizer,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        topics.values(),  # Python's own documentation: English that every machine has
        trainers.WordPieceTrainer(
            vocab_size=VOCABULARY, special_tokens=special, show_progress=False
        ),
    )
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=POSITIONS,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.5,  # so that scores differ
        num_labels=1,
    )
    BertForSequenceClassification(config).to(torch.bfloat16).save_pretrained(folder)


def make() -> Path:
    return kept(cache() / NAME, write)


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    print(make())
