# SPDX-License-Identifier: Apache-2.0
"""Texts whose parameters are known have the prompts, errors and parameters of sampling that vLLM
makes, without its renderer of requests.
"""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.renderers.hf import HfRenderer
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tokenizers.hf import get_cached_tokenizer

from serving.engine.texts.chats import Chats
from serving.engine.texts.completions import Completions
from serving.engine.texts.prompts import Prompts
from serving.engine.texts.request_models import RequestModels, are_texts, is_text
from tests.support.models import tiny

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),
]

LONGEST = 64
CHATML = (
    "{% for it in messages %}{{ '<|im_start|>' + it.role + '\\n' + it.content | trim }}<|im_end|>"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ bos_token }}{% for it in messages %}[INST] {{ it.content }} [/INST]{% endfor %}"
)
IN_PARTS = (
    "{% for it in messages %}{% for part in it.content %}{{ part.text }}{% endfor %}{% endfor %}"
)
TEMPLATES = {"tiny": tiny.CHAT_TEMPLATE, "chatml": CHATML, "strict": STRICT, "parts": IN_PARTS}


def sentencepiece() -> PreTrainedTokenizerFast:
    """A tokenizer as Llama's first ones: spaces are marked, and unknown bytes are tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{it:02X}>" for it in range(256)), "▁", *"abcdeIhmport"]
    pieces += ["▁T", "he", "▁The", "▁i", "mp", "or"]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "T"), ("h", "e"), ("▁T", "he"), ("▁", "i"), ("m", "p"), ("o", "r")]
    vocabulary |= {"T": len(vocabulary), "i": len(vocabulary) + 1}
    made = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def wordpiece() -> PreTrainedTokenizerFast:
    """A tokenizer as BERT's: without cases, and with tokens at both ends."""
    words = ["[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz", "the", "import", "##s"]
    made = Tokenizer(
        models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", 1), ("[SEP]", 2)]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=made, cls_token="[CLS]", sep_token="[SEP]")


TOKENIZERS = {
    "byte-level": lambda: AutoTokenizer.from_pretrained(tiny.make()),
    "sentencepiece": sentencepiece,
    "wordpiece": wordpiece,
}
TEXTS = (
    "The import statement is",
    " a  b\n",
    "é ☃ 𝄞",
    "<s>[INST]</s><|im_end|>",
    "a " * 70,
    "x" * 900,
)
OF_BOTH: tuple[dict[str, Any], ...] = (
    *({}, {"max_tokens": 3, "temperature": 0}, {"max_tokens": 100}, {"echo": True}, {"n": 2}),
    *({"echo": True, "return_token_ids": True}, {"truncate_prompt_tokens": 2}),
    *({"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 2, "truncation_side": "left"}),
    *({"truncate_prompt_tokens": 100}, {"add_special_tokens": True}, {"add_special_tokens": False}),
    *({"cache_salt": "s"}, {"return_token_offsets": True}, {"unknown": 5}, {"user": "a"}),
)
OF_TEXT: tuple[dict[str, Any], ...] = ({"suffix": "b"}, {"suffix": "b", "echo": True})
OF_CHAT: tuple[dict[str, Any], ...] = (
    *({"add_generation_prompt": False}, {"chat_template": "x"}, {"reasoning_effort": "low"}),
    {"add_generation_prompt": False, "continue_final_message": True},
    {"add_generation_prompt": False, "continue_final_message": True, "echo": True},
    *({"include_reasoning": False}, {"max_completion_tokens": 100}),
)


def chat(*texts: str, first: str = "user") -> list[dict[str, Any]]:
    roles = itertools.chain([first], itertools.cycle(["assistant", "user"]))
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


MESSAGES = (
    *(chat(it) for it in TEXTS),
    *(chat(*TEXTS[:3]), chat(*TEXTS[:2], first="system"), chat("be brief", first="system")),
    chat("x-anthropic-billing-header: cch=1\nbe brief", "a", first="system"),
    chat("x-anthropic-billing-header: cch=1", "a", first="system"),
)


def path_of(kind: Any, tokenizer: Any, template: str | None = None, parser: Any = None) -> Any:
    """Completions or Chats, as far as prompts need it."""
    hf = SimpleNamespace(model_type="llama")
    config: Any = SimpleNamespace(
        **dict.fromkeys(("enable_prompt_embeds", "is_encoder_decoder", "trust_remote_code"), False),
        **dict.fromkeys(
            ("multimodal_config", "encoder_config", "revision", "tokenizer_revision"), None
        ),
        **dict.fromkeys(("code_revision", "renderer_num_workers"), 1),
        **dict.fromkeys(("model", "tokenizer"), "no such model"),
        **{"supports_multimodal_inputs": False, "hf_config": hf, "max_model_len": LONGEST},
    )
    config.get_vocab_size = lambda: len(tokenizer)
    whole: Any = SimpleNamespace(
        model_config=config, parallel_config=SimpleNamespace(_api_process_rank=0)
    )
    vllms = OnlineRenderer(
        *(config, HfRenderer(whole, get_cached_tokenizer(tokenizer))),
        request_logger=None,
        chat_template=template,
        chat_template_content_format="auto",
    )
    vllms.parser = parser
    found = object.__new__(kind)
    found.config, found._prompts, found._defaults = config, Prompts(vllms, at_once=True), {}
    found._renderer, found._forced = vllms, None
    known = {Completions: (CompletionRequest, "prompt", is_text)}
    found.requests = RequestModels(*known.get(kind, (ChatCompletionRequest, "messages", are_texts)))
    return found


async def outcome(work: Any) -> Any:
    """A rendered request without its time, or the error."""
    try:
        found = await work
    except Exception as error:
        return type(error), str(error)
    if isinstance(found, ErrorResponse):
        return found.model_dump()
    conversation, prompts = found
    return conversation, [{**it, "arrival_time": None} for it in prompts]


async def ours(path: Any, values: dict[str, Any]) -> tuple[Any, Any]:
    request, known = path.requests.of(values, 1)
    return await outcome(path._rendered(SimpleNamespace(size=1), request, known)), known


async def compare(path: Any, kind: Any, values: list[dict[str, Any]]) -> int:
    """Compare all of these requests with vLLM's. Returns how many took the shortcut."""
    vllms, short = TypeAdapter(kind).validate_python, 0
    for number, given in enumerate(values * 2):
        try:
            request = vllms(given, from_attributes=True)
        except Exception:
            return 0  # vLLM's model refuses these parameters
        renderer = path._prompts.renderer(10**6)
        theirs = await outcome(path.render(request, renderer))
        found, known = await ours(path, given)
        assert found == theirs, (number, given)
        short += bool(known and known.text)
    return short


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
async def test_completions_have_vllms_prompts(tokenizer):
    path, short = path_of(Completions, TOKENIZERS[tokenizer]()), 0
    for more in (*OF_BOTH, *OF_TEXT):
        short += await compare(path, CompletionRequest, [{"prompt": it, **more} for it in TEXTS])
    assert short > 50


@pytest.mark.parametrize(
    ("tokenizer", "template"),
    [
        *(("byte-level", "tiny"), ("byte-level", "strict")),
        *(("sentencepiece", "chatml"), ("wordpiece", "parts")),
    ],
)
async def test_chats_have_vllms_prompts(tokenizer, template):
    path, short = path_of(Chats, TOKENIZERS[tokenizer](), TEMPLATES[template]), 0
    for more in (*OF_BOTH, *OF_CHAT):
        values = [{"messages": it, **more} for it in MESSAGES]
        short += await compare(path, ChatCompletionRequest, values)
    assert short > 50


async def test_without_a_template_a_chat_has_vllms_error():
    path = path_of(Chats, sentencepiece())
    assert not await compare(path, ChatCompletionRequest, [{"messages": chat("a")}] * 3)


async def test_a_parser_may_change_the_request_so_vllm_renders_it():
    class Parser:
        """Changes each request."""

        tool_parser_cls = reasoning_parser_cls = None
        always_adjust_request = True

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def adjust_request(self, request: Any) -> Any:
            request.skip_special_tokens = False
            return request

    path = path_of(Chats, sentencepiece(), CHATML, Parser)
    for _ in range(4):
        request, known = path.requests.of({"messages": chat("a")}, 1)
        await path._rendered(SimpleNamespace(size=1), request, known)
        assert request.skip_special_tokens is False
        assert not (known and known.text)


async def test_another_prompt_than_vllms_is_never_used(monkeypatch):
    path = path_of(Completions, sentencepiece())
    process = path._prompts._short.renderer.at_once.process_for_engine
    wrong = [[7]]
    monkeypatch.setattr(
        path._prompts._short.renderer.at_once,
        "process_for_engine",
        lambda *it, **more: process(*it, **more) | {"prompt_token_ids": wrong[0]},
    )
    for _ in range(4):
        request, known = path.requests.of({"prompt": "a"}, 1)
        call = SimpleNamespace(size=10**6)  # vLLM's renderer has no double
        _, (prompt,) = await path._rendered(call, request, known)
        assert prompt["prompt_token_ids"] != wrong[0]
    assert known.is_compared
    assert not known.text


async def test_a_prompt_has_its_own_salt():
    path = path_of(Completions, sentencepiece())
    for _ in range(4):
        for salt in ("of one tenant", "of another", None):
            more = {"cache_salt": salt} if salt else {}
            (_, (prompt,)), known = await ours(path, {"prompt": "a", **more})
            assert prompt.get("cache_salt") == salt
    assert known.text


async def test_requests_share_no_parameters_of_sampling():
    path = path_of(Completions, sentencepiece())
    for _ in range(2):
        await ours(path, {"prompt": "a", "temperature": 0})
    request, known = path.requests.of({"prompt": "a", "temperature": 0}, 1)

    def make() -> Any:
        return request.to_sampling_params(3, {"stop_token_ids": [5]})

    first, second = known.sampling(3, make), known.sampling(3, make)
    assert first == second == make()
    for name in first.__struct_fields__:
        mine, theirs = getattr(first, name), getattr(second, name)
        assert mine is not theirs or not hasattr(mine, "__dict__") or hasattr(mine, "value"), name
        assert mine is not theirs or not isinstance(mine, list | set | dict), name
    # as vLLM's engine client does with a shallow copy
    clone = first.clone()
    clone.update_from_generation_config({"eos_token_id": [7, 8]}, 7)
    clone._all_stop_token_ids.add(9)
    for values in (clone.stop_token_ids, clone.stop, clone.bad_words):
        values.append(10)
    assert known.sampling(3, make) == second == make()
    assert known.sampling(4, lambda: request.to_sampling_params(4, {})).max_tokens == 4
    assert known.sampling(3, make).max_tokens == 3
