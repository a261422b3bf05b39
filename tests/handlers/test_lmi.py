# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers import lmi
from handlers.records import FormatError, Step


def call(**body):
    return lmi.parse(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, {}),
        ({"parameters": None}, {}),
        ({"parameters": {"max_new_tokens": 5}}, {"max_tokens": 5}),
        ({"parameters": {"truncate": 7}}, {"truncate_prompt_tokens": 7}),
        ({"parameters": {"ignore_eos_token": True}}, {"ignore_eos": True}),
        ({"parameters": {"do_sample": False, "temperature": 0.7}}, {"temperature": 0}),
        ({"parameters": {"do_sample": True, "temperature": 0.7}}, {"temperature": 0.7}),
        ({"parameters": {"do_sample": True}}, {}),
        ({"parameters": {"stop_sequences": ["a"]}}, {"stop": ["a"]}),
        ({"parameters": {"stop": "a", "stop_sequences": ["b"]}}, {"stop": ["a", "b"]}),
        (
            {"parameters": {"top_k": 3, "min_p": 0.1, "seed": 4}},
            {"top_k": 3, "min_p": 0.1, "seed": 4},
        ),
        ({"parameters": {"temperature": None}}, {}),
        # As pydantic reads them for LMI.
        ({"parameters": {"max_new_tokens": "5", "seed": 4.0}}, {"max_tokens": 5, "seed": 4}),
        ({"parameters": {"do_sample": 0}}, {"temperature": 0}),
        ({"parameters": {"do_sample": "false", "details": "false"}}, {"temperature": 0}),
        ({"parameters": {"watermark": True, "best_of": 2, "typical_p": 0.9}}, {}),
        ({"parameters": {"return_full_text": True}}, {}),
        ({"parameters": {"details": True}}, {"logprobs": 0, "return_token_ids": True}),
        (
            {"parameters": {"details": True, "decoder_input_details": True}},
            {"logprobs": 0, "return_token_ids": True, "prompt_logprobs": 0},
        ),
        ({"parameters": {"decoder_input_details": True}}, {}),
        ({"stream": True}, {"logprobs": 0, "return_token_ids": True, "stream": True}),
        ({"model": "m"}, {"model": "m"}),
    ],
)
def test_a_request_becomes_a_completion(body, expected):
    made = call(inputs="hello", **body)
    assert made.path == "/v1/completions"
    assert made.body == {"prompt": "hello", "max_tokens": 30} | expected


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ({"inputs": 5}, "$.inputs"),
        ({"inputs": ["a", 5]}, "$.inputs"),
        ({"inputs": "a", "parameters": []}, "$.parameters"),
        ({"inputs": "a", "parameters": {"max_new_tokens": "x"}}, "$.max_new_tokens"),
        ({"inputs": "a", "parameters": {"do_sample": "x"}}, "$.do_sample"),
        ({"inputs": "a", "stream": "maybe"}, "$.stream"),
        ({"inputs": ["a"], "stream": True}, "a list of inputs cannot be streamed"),
        ({"inputs": "a", "stream": True, "parameters": {"n": 2}}, "cannot be streamed"),
        ({"inputs": "a", "parameters": {"n": 2}}, "n above 1 needs details"),
    ],
)
def test_a_wrong_request_is_refused_by_name(body, fault):
    with pytest.raises(FormatError) as refused:
        call(**body)
    assert fault in str(refused.value)


YES = [True, 1, 1.0, "1", *["true", "t", "yes", "y", "on", "TRUE", "Yes"]]
NO = [False, 0, 0.0, "0", *["false", "f", "no", "n", "off", "FALSE", "No"]]


@pytest.mark.parametrize(
    ("value", "meant"), [(it, True) for it in YES] + [(it, False) for it in NO]
)
def test_what_pydantic_reads_as_true_or_false(value, meant):
    assert call(inputs="a", stream=value).body.get("stream", False) is meant
    parameters = dict.fromkeys(("details", "do_sample", "return_full_text"), value)
    found = call(inputs="a", parameters=parameters)
    assert found.reply._parameters.details is meant
    assert ("temperature" in found.body) is not meant
    body = json.dumps({"inputs": ["a"], "adapters": ["x"], "stream": value}).encode()
    if meant:
        with pytest.raises(FormatError, match="cannot be streamed"):
            lmi.split(body, 1)
    else:
        assert len(lmi.split(body, 1)) == 1


@pytest.mark.parametrize("value", ["", "maybe", 2, -1, 0.5, "2", " true", [], {}, [True]])
def test_streams_and_details_that_pydantic_refuses(value):
    with pytest.raises(FormatError, match="stream"):
        call(inputs="a", stream=value)
    with pytest.raises(FormatError, match="details"):
        call(inputs="a", parameters={"details": value or []})


def choice(text, ids=None, tokens=None, finish=None, stop=None, index=0, **more):
    """A choice as vLLM answers it, whole or in a chunk."""
    logprobs = {"tokens": tokens, "token_logprobs": [-0.5] * len(tokens)} if tokens else None
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish,
        "stop_reason": stop,
        "token_ids": ids,
        "prompt_token_ids": None,
    } | more


def whole(made, *choices):
    return json.loads(made.reply.whole(json.dumps({"choices": choices}).encode()))


def token(number, text):
    return {"id": number, "text": text, "logprob": -0.5, "log_prob": -0.5}


def test_without_details_the_answer_is_the_text():
    assert whole(call(inputs="a"), choice("b", finish="stop")) == {"generated_text": "b"}


def test_the_full_text_begins_with_the_prompt():
    made = call(inputs="a", parameters={"return_full_text": True})
    assert whole(made, choice("b", finish="stop")) == {"generated_text": "ab"}


def test_a_list_of_inputs_gets_a_list_of_answers_in_order():
    made = call(inputs=["a", "b"])
    answer = whole(made, choice("2", index=1), choice("1", index=0))
    assert answer == [{"generated_text": "1"}, {"generated_text": "2"}]


def test_the_details():
    made = call(inputs="a", parameters={"details": True, "seed": 3})
    assert whole(
        made, choice("bc", [7, 8], ["b", "c"], finish="length", prompt_token_ids=[1, 2, 3])
    ) == {
        "generated_text": "bc",
        "details": {
            "finish_reason": "length",
            "generated_tokens": 2,
            "seed": 3,
            "tokens": [token(7, "b"), token(8, "c")],
            "prefill": [],
            "input_length": 3,
        },
    }


def test_the_prompts_own_tokens():
    made = call(inputs="ab", parameters={"details": True, "decoder_input_details": True})
    answer = whole(
        made,
        choice(
            "c",
            [7],
            ["c"],
            finish="length",
            prompt_token_ids=[4, 5],
            prompt_logprobs=[None, {"5": {"logprob": -2.0, "decoded_token": "b"}}],
        ),
    )
    assert answer["details"]["prefill"] == [
        {"id": 4, "text": None, "logprob": None, "log_prob": None},
        {"id": 5, "text": "b", "logprob": -2.0, "log_prob": -2.0},
    ]


def test_several_sequences_are_in_the_details_of_the_first():
    made = call(inputs=["a", "b"], parameters={"details": True, "n": 2})
    choices = [
        choice(str(place), [place], [str(place)], "length", index=place) for place in range(4)
    ]
    first, second = whole(made, *choices)
    assert [first["generated_text"], second["generated_text"]] == ["0", "2"]
    assert [other["generated_text"] for other in second["details"]["best_of_sequences"]] == ["3"]


@pytest.mark.parametrize(
    ("finish", "stop", "expected"),
    [
        ("length", None, "length"),
        ("stop", None, "eos_token"),
        ("stop", "END", "stop_sequence"),
        ("stop", 5, "stop_sequence"),  # asked for in stop_token_ids
        ("stop", 6, "eos_token"),  # one more end-of-sequence token of the model's
        ("abort", None, "abort"),
    ],
)
def test_the_finish_reason(finish, stop, expected):
    made = call(inputs="a", parameters={"details": True, "stop_token_ids": [5]})
    answer = whole(made, choice("b", [7], ["b"], finish, stop))
    assert answer["details"]["finish_reason"] == expected


def stream(made, *choices):
    lines: list[bytes] = []
    for each in choices:
        made.steps.step(step(each), before=b"", after=b"\n", write=lines.append)
    return [json.loads(line) for line in b"".join(lines).splitlines()]


def step(choice):
    """Return a choice of an event as a step."""
    logprobs, prompt = choice["logprobs"] or {}, choice["prompt_token_ids"]
    return Step(
        choice["text"],
        choice["token_ids"] or (),
        logprobs.get("tokens", ()),
        logprobs.get("token_logprobs", ()),
        choice["finish_reason"],
        choice["stop_reason"],
        prompt and len(prompt),
    )


def test_a_stream_has_a_line_for_each_token_and_ends_with_the_whole():
    made = call(inputs="a", stream=True, parameters={"details": True, "seed": 1})
    first, second = stream(
        made,
        choice("b", [7], ["b"], prompt_token_ids=[1, 2]),
        choice("c", [8], ["c"], "stop"),
    )
    assert first == {"index": 0, "token": token(7, "b"), "generated_text": None, "details": None}
    assert second == {
        "index": 0,
        "token": token(8, "c"),
        "generated_text": "bc",
        "details": {
            "finish_reason": "eos_token",
            "seed": 1,
            "generated_tokens": 2,
            "input_length": 2,
        },
    }


def test_without_details_a_stream_ends_with_the_text_alone():
    made = call(inputs="a", stream=True, parameters={"return_full_text": True})
    (line,) = stream(made, choice("b", [7], ["b"], "length"))
    assert (line["generated_text"], line["details"]) == ("ab", None)


@pytest.mark.parametrize(
    ("text", "tokens", "expected"),
    [
        ("bc", ["b", "c"], ["b", "c"]),
        ("b c", ["b", " c"], ["b", " c"]),
        ("bc", ["bc", "END"], ["bc", ""]),  # a stop sequence was cut off
        ("b", ["bc", "d"], ["b", ""]),
        ("é", ["�", "�"], ["", "é"]),  # two halves of a character
        ("held back", ["x"], ["held back"]),
    ],
)
def test_the_tokens_texts_join_to_the_text(text, tokens, expected):
    made = call(inputs="a", stream=True)
    lines = stream(made, choice(text, list(range(len(tokens))), tokens, "stop"))
    assert [line["token"]["text"] for line in lines] == expected


def test_a_last_chunk_without_tokens_still_ends_the_stream():
    made = call(inputs="a", stream=True)
    lines = stream(made, choice("b", [7], ["b"]), choice("", [], [], "abort"))
    assert lines[-1]["generated_text"] == "b"


@given(
    st.lists(st.tuples(st.text(max_size=4), st.lists(st.text(max_size=3), max_size=4)), min_size=1)
)
def test_whatever_the_chunks_the_lines_join_to_the_whole(chunks):
    made = call(inputs="a", stream=True)
    choices = [choice(text, list(range(len(tokens))), tokens or None) for text, tokens in chunks]
    choices[-1]["finish_reason"] = "length"
    lines = stream(made, *choices)
    assert "".join(line["token"]["text"] for line in lines) == lines[-1]["generated_text"]
    assert lines[-1]["generated_text"] == "".join(text for text, _ in chunks)


@pytest.mark.parametrize(
    ("body", "expected", "ignored"),
    [
        ({"temperature": 0, "max_tokens": 2}, {"temperature": 0, "max_tokens": 2}, ()),
        ({"max_new_tokens": 3, "do_sample": False}, {"max_tokens": 3, "temperature": 0}, ()),
        ({"logprobs": True}, {"max_tokens": 30}, ("logprobs",)),
        ({"n": 3, "details": True}, {"max_tokens": 30}, ("details", "n")),
        ({"parameters": {"max_tokens": 3}, "max_new_tokens": 9}, {"max_tokens": 3}, (
            "max_new_tokens",
        )),
        ({"parameters": {"watermark": True, "odd": 1}}, {"max_tokens": 30, "odd": 1}, (
            "odd", "watermark"
        )),
        ({"messages": [], "made up": None}, {"max_tokens": 30}, ("made up", "messages")),
        ({"stream": False, "model": None, "cache_salt": None}, {"max_tokens": 30}, ()),
    ],
)  # fmt: skip
def test_what_stands_beside_the_inputs(body, expected, ignored):
    call = lmi.parse(json.dumps({"inputs": "a", **body}).encode())
    assert call.body == {"prompt": "a", **expected}
    assert sorted(call.ignored) == [*ignored]
