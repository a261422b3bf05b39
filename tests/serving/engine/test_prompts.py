# SPDX-License-Identifier: Apache-2.0
"""Tokenization without transformers, if the tokens are the same."""

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vllm.tokenizers.hf import get_cached_tokenizer, maybe_make_thread_pool

from scripts.models import tiny
from serving.engine.texts.prompts import plain_tokenizer


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny.make())


def test_a_tokenizer_as_vllm_has_it_is_used(tokenizer):
    found = maybe_make_thread_pool(get_cached_tokenizer(tokenizer))
    plain = plain_tokenizer(found)
    assert plain.encode("The import").ids == found("The import")["input_ids"]


def test_another_class_is_not_used(tokenizer):
    class OfAModel(PreTrainedTokenizerFast):  # type: ignore[misc]
        """A class of remote code."""

    assert plain_tokenizer(OfAModel(tokenizer_object=tokenizer.backend_tokenizer)) is None
    assert plain_tokenizer(None) is None


def test_a_tokenizer_that_would_cut_or_split_differently_is_not_used(tokenizer):
    tokenizer.backend_tokenizer.enable_truncation(5)
    assert plain_tokenizer(tokenizer) is None
    tokenizer.backend_tokenizer.no_truncation()
    assert plain_tokenizer(tokenizer)
    tokenizer.split_special_tokens = True
    assert plain_tokenizer(tokenizer) is None
