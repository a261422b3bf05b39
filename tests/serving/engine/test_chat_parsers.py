# SPDX-License-Identifier: Apache-2.0
"""vLLM has the parsers that a plan may choose, and each of them starts if its tokens exist."""

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from vllm.parser import ParserManager

from lmi_config.facts import chat

RULES = [("tools", rule) for rule in chat._TOOLS] + [
    ("reasoning", rule) for rule in chat._REASONING
]

PIECES = ("Ġ</", "</", "think", ">")
"""How OLMo 3's tokenizer writes the end of a thought."""


@pytest.mark.parametrize(
    ("kind", "rule"),
    [(kind, rule) for kind, rule in RULES if rule.parser],
    ids=lambda it: it if isinstance(it, str) else it.parser,
)
def test_a_chosen_parser_starts(kind, rule):
    """A parser whose tokens are missing would stop the server's start."""
    tokens = ("<s>", *PIECES, *rule.tokens)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<s>")),
        chat_template="".join(rule.marks),
    )
    parser = ParserManager.get_parser(
        tool_parser_name=rule.parser if kind == "tools" else None,
        reasoning_parser_name=rule.parser if kind == "reasoning" else None,
        enable_auto_tools=kind == "tools",
        is_harmony=rule.types == ("gpt_oss",),
    )
    assert parser
    ParserManager.validate_parser_tokenizer(parser, tokenizer, rule.parser, rule.parser, "a model")
