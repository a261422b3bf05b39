# SPDX-License-Identifier: Apache-2.0
"""Documents in canonical order on the real engine: the answer is that of a client who sends them in
the order that the answer names, and another order finds the whole prompt in the cache.
"""

import itertools
import json

import pytest

CHAT = "/v1/chat/completions"
ORDER = "X-Slipway-Document-Order"
CONSENT = {"document_order": "canonical"}
QUESTION = {"role": "user", "content": "Which of them is the shortest?"}


def answered(server, stream, body):
    """The tokens of the prompt and of the answer, how many were cached, and the named order."""
    more = {"stream": stream, "stream_options": {"include_usage": True}} if stream else {}
    asked = {"max_tokens": 12, "temperature": 0, "return_token_ids": True, **more, **body}
    answer = server.client.post(CHAT, json=asked)
    assert answer.status_code == 200, answer.text
    if stream:
        events = [it.removeprefix("data: ") for it in answer.text.strip().split("\n\n")[:-1]]
    else:
        events = [answer.text]
    found = [json.loads(it) for it in events]
    choices = [it["choices"][0] for it in found if it["choices"]]
    tokens = [*itertools.chain.from_iterable(it.get("token_ids") or () for it in choices)]
    prompt = next(it["prompt_token_ids"] for it in found if it.get("prompt_token_ids"))
    cached = (found[-1]["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return (prompt, tokens), cached, answer.headers.get(ORDER)


def in_documents(name, texts):
    return {"messages": [QUESTION], "documents": [{"text": f"{name} {it}"} for it in texts]}


def in_parts(name, texts):
    parts = [{"type": "text", "text": f"{name} {it}", "orderable": True} for it in texts]
    question = {"type": "text", "text": QUESTION["content"]}
    return {"messages": [{"role": "user", "content": [*parts, question]}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("made", [in_documents, in_parts])
def test_an_answer_is_exact_for_the_order_that_it_names(server, made, stream):
    name = f"{made.__name__} {stream}"
    texts = [f"{word} " * 150 for word in ("red", "green", "blue", "white")]
    first, _, named = answered(server, stream, made(name, texts) | CONSENT)
    served = [texts[int(at)] for at in named.split(",")]
    for permuted in (texts[::-1], texts[1:] + texts[:1]):
        again, cached, order = answered(server, stream, made(name, permuted) | CONSENT)
        assert [permuted[int(at)] for at in order.split(",")] == served
        assert again == first
        assert cached > 0.7 * len(first[0])
    # A salt, so that the whole prompt is computed again.
    plain, cached, order = answered(server, stream, {**made(name, served), "cache_salt": "other"})
    assert plain == first
    assert (cached, order) == (0, None)
    assert len(first[1]) == 12
