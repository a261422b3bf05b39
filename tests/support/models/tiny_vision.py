# SPDX-License-Identifier: Apache-2.0
"""Make tiny random vision-language models (Idefics3's shape, and PaliGemma's), for tests. They are
kept in the user's cache.
"""

from pathlib import Path

from tests.support.models.cache import cache, kept
from tests.support.models.tiny import make as make_text_model

NAME = "tiny-vision-1"  # change the number when the models change
RENAMED = "tiny-paligemma-1"
SIDE, PATCH, SCALE = 32, 8, 2
TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
SEEING: dict[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}
WRITING: dict[str, int] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
"""Configuration of the language part of both models."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}</s>{% endfor %}"
)


def write(folder: Path) -> None:
    import torch
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessor,
        Idefics3Processor,
        LlamaConfig,
    )

    tokenizer = AutoTokenizer.from_pretrained(make_text_model())
    tokenizer.add_special_tokens({"additional_special_tokens": [*TOKENS]})
    images = Idefics3ImageProcessor(
        size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}, do_image_splitting=False
    )
    processor = Idefics3Processor(
        images,
        tokenizer,
        image_seq_len=(SIDE // PATCH // SCALE) ** 2,
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(folder)
    torch.manual_seed(0)
    config = Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids(TOKENS[0]),
        scale_factor=SCALE,
        pad_token_id=1,
        vision_config=SEEING,
        text_config=LlamaConfig(vocab_size=len(tokenizer), **WRITING).to_dict(),
    )
    Idefics3ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)


def make() -> Path:
    return kept(cache() / NAME, write)


def write_renamed(folder: Path) -> None:
    """A model whose files, transformers and vLLM each name the modules differently."""
    import torch
    from transformers import (
        AutoTokenizer,
        GemmaConfig,
        PaliGemmaConfig,
        PaliGemmaForConditionalGeneration,
        PaliGemmaProcessor,
        SiglipImageProcessor,
        SiglipVisionConfig,
    )

    tokenizer = AutoTokenizer.from_pretrained(make_text_model())
    images = SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
    images.image_seq_length = (SIDE // PATCH) ** 2
    PaliGemmaProcessor(images, tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = PaliGemmaConfig(
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=256,
        hidden_size=256,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        vision_config=SiglipVisionConfig(
            **SEEING, projection_dim=256, vision_use_head=False
        ).to_dict(),
        text_config=GemmaConfig(vocab_size=len(tokenizer), head_dim=64, **WRITING).to_dict(),
    )
    PaliGemmaForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)


def make_renamed() -> Path:
    return kept(cache() / RENAMED, write_renamed)
