# SPDX-License-Identifier: Apache-2.0
"""Make a tiny random Whisper, for tests: its transcripts are nonsense, and always the same for the
same sound. It is kept in the user's cache.
"""

import os
from pathlib import Path

from tests.support.models.cache import cache, kept
from tests.support.models.tiny import make as make_text_model

NAME = "tiny-whisper-1"  # change the number when the model changes
SECONDS = 30
"""The length of a piece of sound in seconds, as in all of Whisper: vLLM cuts longer ones."""
POSITIONS = 64
"""The maximum of generated tokens, including the control tokens at the start."""
_CONTROL = ("<|startoftranscript|>", "<|translate|>", "<|transcribe|>", "<|prev|>")
_TIMES = ("<|notimestamps|>", *(f"<|{step * 0.02:.2f}|>" for step in range(SECONDS * 50 + 1)))


def write(folder: Path) -> None:
    import torch
    from transformers import (
        AutoTokenizer,
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizerFast,
    )
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    text = AutoTokenizer.from_pretrained(make_text_model())
    tokenizer = WhisperTokenizerFast(
        tokenizer_object=text.backend_tokenizer,
        bos_token="</s>",
        eos_token="</s>",
        unk_token="</s>",
    )
    languages = [f"<|{code}|>" for code in LANGUAGES]
    tokenizer.add_special_tokens({"additional_special_tokens": [*_CONTROL, *languages, *_TIMES]})
    WhisperProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    end = tokenizer.convert_tokens_to_ids("</s>")
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_target_positions=POSITIONS,
        init_std=0.5,  # so that the sound decides
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=tokenizer.convert_tokens_to_ids(_CONTROL[0]),
    )
    model = WhisperForConditionalGeneration(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig.from_model_config(config)
    model.save_pretrained(folder)


def make() -> Path:
    return kept(cache() / NAME, write)


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    print(make())
