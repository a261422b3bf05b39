# SPDX-License-Identifier: Apache-2.0
import asyncio
import copy
import datetime
import importlib
import io
import json
import pickle
import struct
import subprocess
import sys
import types
import unittest.mock
from typing import Any

import numpy as np
import PIL.Image
import pytest

import handlers.djl_python
from handlers import decorators, djl_python
from handlers.djl_python import encode_decode, np_util, request_io
from handlers.djl_python.async_utils import (
    create_non_stream_output,
    create_stream_chunk_output,
    handle_streaming_response,
)
from handlers.djl_python.inputs import Input
from handlers.djl_python.outputs import Output
from handlers.djl_python.response import Response


@pytest.fixture(autouse=True)
def alias(monkeypatch):
    monkeypatch.setitem(sys.modules, "djl_python", handlers.djl_python)


def model_py(text, **attributes):
    module: Any = types.ModuleType("model")
    vars(module).update(attributes)
    exec(text, vars(module))
    return module


def formatter(module, kind):
    function = decorators.marked(module, kind)
    assert function
    return function


# Files as LMI's users write them.

FORMATTERS = """
import json
import logging

from djl_python import Input
from djl_python.encode_decode import decode
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import TextGenerationOutput, output_formatter
from djl_python.request_io import TextInput


class MyRequestInput(TextInput):
    trace_id: str


@input_formatter
def rename(decoded_payload: dict, tokenizer=None, **kwargs) -> dict:
    return {"inputs": decoded_payload.pop("inputPrompt"), "parameters": {"max_new_tokens": 5}}


@output_formatter
def name_the_maker(output, **kwargs):
    if hasattr(output, "model_dump"):
        output.processed_by = "base"
        return output
    if isinstance(output, str) and output.startswith("data: "):
        if output.strip() != "data: [DONE]":
            data = json.loads(output[6:])
            data["processed_by"] = "base"
            return f"data: {json.dumps(data)}"
    return output
"""

SHAPES = """
from djl_python.output_formatter import output_formatter

@output_formatter
def shape(output):
    if hasattr(output, "choices") and len(output.choices) > 0:
        first = output.choices[0]
        text = first.text if hasattr(first, "text") else first.message.content
        return {"generated_text": text, "model": output.model}
    return {"other": True}
"""

HANDLER = """
from djl_python import Input, Output
from djl_python.async_utils import create_non_stream_output, handle_streaming_response
from djl_python.encode_decode import decode


async def handle(inputs: Input) -> Output:
    raw_request = inputs.get_batches()[0]
    payload = decode(raw_request, raw_request.get_property("Content-Type"))
    model = inputs.get_properties().get("model_id", "gpt2")
    if payload.get("stream"):
        return handle_streaming_response(words(payload["inputs"]), lambda word: (word, word == "b"))
    return create_non_stream_output({"text": payload["inputs"], "model": model})


async def words(text):
    for word in text.split():
        yield word
"""

REST = """
from djl_python.input_parser import init_handler, input_formatter, prediction_handler
from djl_python.output_formatter import RequestOutput, output_formatter
import djl_python

@init_handler
def load(model_dir, **kwargs): ...

@prediction_handler
def predict(data, model): ...
"""

COMPLETION: dict[str, Any] = {
    "id": "cmpl-1",
    "model": "base",
    "choices": [{"index": 0, "text": "é", "stop_reason": None}],
    "usage": {"total_tokens": 3},
}
CHAT = {"model": "base", "choices": [{"message": {"role": "assistant", "content": "hello"}}]}


def test_formatters_run():
    module = model_py(FORMATTERS)
    read = formatter(module, "input_formatter")
    write = formatter(module, "output_formatter")
    assert (read.__name__, write.__name__) == ("rename", "name_the_maker")
    assert read({"inputPrompt": "a"}, tokenizer=None)["inputs"] == "a"
    whole = json.loads(write(Response(COMPLETION)).model_dump_json())
    assert whole == COMPLETION | {"processed_by": "base"}
    assert json.loads(write('data: {"a": 1}\n\n')[6:]) == {"a": 1, "processed_by": "base"}
    assert write("data: [DONE]\n\n") == "data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (COMPLETION, {"generated_text": "é", "model": "base"}),
        (CHAT, {"generated_text": "hello", "model": "base"}),
        ({"error": {"message": "no", "code": 400}}, {"other": True}),
        ({"choices": []}, {"other": True}),
    ],
)
def test_an_output_formatter_tells_answers_apart(answer, expected):
    shape = formatter(model_py(SHAPES), "output_formatter")
    assert shape(Response(answer)) == expected


def test_a_handler_runs():
    handle = model_py(HANDLER).handle
    request = Input(
        {"content-type": "application/json", "model_id": "m"}, b'{"inputs": "a b c", "stream": 0}'
    )
    output = asyncio.run(handle(request))
    assert isinstance(output, Output)
    assert (output.code, json.loads(output.body)) == (200, {"text": "a b c", "model": "m"})
    assert output.body.endswith(b"\n")

    async def streamed():
        body = b'{"inputs": "a b c", "stream": true}'
        stream = await handle(Input({"content-type": "application/json"}, body))
        return [(piece.body, piece.last) async for piece in stream]

    assert asyncio.run(streamed()) == [(b"a\n", False), (b"b\n", True)]


def test_the_rest_imports():
    module = model_py(REST)
    assert decorators.marked(module, "init_handler") is module.load
    assert decorators.marked(module, "prediction_handler") is module.predict
    assert decorators.marked(module, "input_formatter") is None
    assert module.djl_python.Input is Input


def test_both_names_are_one_package():
    package = importlib.import_module("djl_python")
    for name in ("inputs", "outputs", "response", "async_utils", "request_io", "pair_list"):
        module = importlib.import_module(f"djl_python.{name}")
        assert module is importlib.import_module(f"handlers.djl_python.{name}")
        assert module is getattr(package, name)


def test_nothing_large_is_imported():
    code = """if True:
        import sys
        import handlers.djl_python
        print(*{"numpy", "PIL", "torch", "vllm", "transformers"} & set(sys.modules))
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_what_is_not_there_is_named():
    with pytest.raises(ModuleNotFoundError, match=r"djl_python\.huggingface"):
        model_py("from djl_python.huggingface import HuggingFaceService")


# Decorators.


@pytest.mark.parametrize(
    "kind", ["input_formatter", "output_formatter", "prediction_handler", "init_handler"]
)
def test_a_decorator_only_marks(kind):
    def function(): ...

    assert getattr(decorators, kind)(function) is function
    module = model_py("", given=function)
    assert decorators.marked(module, kind) is function
    others = {"input_formatter", "output_formatter", "prediction_handler", "init_handler"} - {kind}
    assert [decorators.marked(module, other) for other in others] == [None] * 3


def test_the_first_by_name_wins():
    module = model_py("""
from djl_python.input_parser import input_formatter

@input_formatter
def b(payload): ...

@input_formatter
def a(payload): ...

def Z(payload): ...
""")
    assert decorators.marked(module, "input_formatter") is module.a


def test_an_imported_function_counts():
    other = model_py(FORMATTERS)
    module = model_py("", read=other.rename)
    assert decorators.marked(module, "input_formatter") is other.rename


def test_objects_that_have_every_attribute_are_not_marked():
    class Failing:
        def __call__(self): ...

        def __getattr__(self, name):
            raise RuntimeError("not installed")

    module = model_py("", mock=unittest.mock.MagicMock(), failing=Failing(), number=1)
    assert decorators.marked(module, "output_formatter") is None


# Input.


def test_input_properties_go_by_any_case():
    request = Input({"X-Amzn-SageMaker-Session-Id": "1", "tensor_parallel_degree": "2"})
    properties = request.get_properties()
    assert request.get_property("x-amzn-sagemaker-session-id") == "1"
    assert request.get_property("absent") is None
    assert request.contains_property("Tensor_Parallel_Degree")
    assert not request.contains_property("absent")
    assert "x-amzn-SAGEMAKER-session-id" in properties
    assert properties["TENSOR_PARALLEL_DEGREE"] == "2"
    assert properties.get("Absent", "x") == "x"
    assert dict(properties) == {"X-Amzn-SageMaker-Session-Id": "1", "tensor_parallel_degree": "2"}
    with pytest.raises(KeyError):
        properties["absent"]
    properties["x-amzn-sagemaker-session-id"] = "3"
    assert len(properties) == 2


def test_input_content():
    request = Input({}, b'{"a": "\xc3\xa9"}')
    assert request.get_batches() == [request]
    assert (request.is_batch(), request.get_batch_size(), request.is_empty()) == (False, 1, False)
    assert request.get_as_bytes() == request.get_as_bytes("data") == b'{"a": "\xc3\xa9"}'
    assert request.get_as_string() == '{"a": "é"}'
    assert request.get_as_json() == {"a": "é"}
    assert request.get_content().get_keys() == ["data"]
    assert request.contains_key("data")
    assert not request.contains_key("seed")
    with pytest.raises(KeyError, match="seed"):
        request.get_as_string("seed")


def test_an_input_without_content():
    request = Input()
    assert request.is_empty()
    assert request.get_as_bytes() is None
    assert request.get_data() is None
    with pytest.raises(ValueError, match="Expecting value"):
        request.get_as_json()


def image():
    file = io.BytesIO()
    PIL.Image.new("RGB", (3, 2)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("content_type", "body", "expected"),
    [
        ("application/json; charset=utf-8", b"[1]", [1]),
        ("text/plain", b"a", "a"),
        ("application/octet-stream", b"\xff", b"\xff"),
        ("tensor/ndlist", np_util.to_nd_list(np.array([1.5])), [np.array([1.5])]),
    ],
)
def test_input_data_is_what_the_content_type_says(content_type, body, expected):
    assert Input({"content-type": content_type}, body).get_data() == expected


def test_input_csv():
    assert Input({}, b"a,b\n1,2\n").get_as_csv() == [{"a": "1", "b": "2"}]


# Bodies.


def npz(*arrays):
    file = io.BytesIO()
    np.savez(file, *arrays)
    return file.getvalue()


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content_type", "body", "expected"),
    [
        (None, b'{"inputs": "a"}', {"inputs": "a"}),
        (None, b"a", {"inputs": "a"}),
        (None, b"", {"inputs": ""}),
        (None, b"\xff\xfe\x00\x00", {"inputs": b"\xff\xfe\x00\x00"}),
        ("application/json", b'{"messages": []}', {"messages": []}),
        ("application/json; charset=utf-8", b"[1]", [1]),
        ("text/csv", b"inputs,n\na,1\nb,2\n", {"inputs": ["a", "b"]}),
        (
            "text/csv",
            b"question,context\nq,c\n",
            {"inputs": [{"question": "q", "context": "c"}]},
        ),
        ("text/plain; charset=utf-8", b"a", {"inputs": ["a"]}),
        ("audio/wav", b"RIFF", {"inputs": b"RIFF"}),
        ("application/x-www-form-urlencoded", b"a=1&b=2", {"inputs": "a=1&b=2"}),
        ("application/octet-stream", b"\xff", {"inputs": b"\xff"}),
    ],
)
def test_decode(content_type, body, expected):
    decoded = encode_decode.decode(Input({}, body), content_type)
    assert decoded == expected


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("tensor/npz", npz([1, 2])),
        ("application/x-npy", npy([1, 2])),
        ("tensor/ndlist", np_util.to_nd_list(np.array([1, 2]))),
    ],
)
def test_decode_arrays(content_type, body):
    [array] = encode_decode.decode(Input({}, body), content_type)["inputs"]
    assert array.tolist() == [1, 2]


def test_decode_image():
    assert encode_decode.decode(Input({}, image()), "image/png")["inputs"].size == (3, 2)


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{"),
        ("application/json", b"\xff"),
        ("application/json", b""),
        ("text/csv", b"a,b\n1,2\n"),
        ("text/csv", b"inputs\n"),
        ("text/csv", b""),
        ("text/plain", b"\xff"),
        ("tensor/npz", b"PK broken"),
        ("tensor/ndlist", b"\0\0\0\1none"),
    ],
)
def test_decode_refuses(content_type, body):
    with pytest.raises(ValueError, match=r"."):
        encode_decode.decode(Input({}, body), content_type)


@pytest.mark.parametrize(
    ("accept", "prediction", "expected", "content_type"),
    [
        (None, {"a": "é"}, '{"a": "é"}'.encode(), "application/json"),
        ("application/json, text/csv", [1], b"[1]", "application/json"),
        ("*/*", np.array([1, 2]), b"[1, 2]", "application/json"),
        ("text/csv", [{"a": 1, "b": "x"}], b"a,b\r\n1,x\r\n", "text/csv"),
        ("text/csv", [], b"\r\n", "text/csv"),
        ("tensor/ndlist", [np.array([1])], np_util.to_nd_list(np.array([1])), "tensor/ndlist"),
    ],
)
def test_encode(accept, prediction, expected, content_type):
    output = Output()
    encode_decode.encode(output, prediction, accept)
    assert (output.body, output.properties["content-type"]) == (expected, content_type)


def test_encode_npz():
    output = Output()
    encode_decode.encode(output, [np.array([1, 2])], "tensor/npz")
    assert [it.tolist() for it in Input({}, output.body).get_as_npz()] == [[1, 2]]
    assert output.properties == {"Content-Type": "tensor/npz"}


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="float32").reshape(2, 3),
        np.array([True, False]),
        np.array(7, dtype="int64"),
        np.zeros((0, 4), dtype="uint8"),
        np.array([1.5, -2.0], dtype=">f2"),
    ],
)
def test_an_nd_list_comes_back(array):
    [first, second] = np_util.from_nd_list(np_util.to_nd_list([array, array]))
    np.testing.assert_array_equal(first, array)
    np.testing.assert_array_equal(second, array)
    assert first.dtype == array.dtype.newbyteorder("<")


def nd_list(name, order):
    """One array, 1.5 and -2 in a row, encoded by hand from the format's description, not by our
    code.
    """

    def text(value):
        return struct.pack(">h", len(value)) + value.encode()

    return b"".join(
        (
            struct.pack(">i", 1),
            text("NDAR") + struct.pack(">i", 3),
            b"\1" + text(name) if name else b"\0",
            text("default") + text("FLOAT32"),
            struct.pack(">iqq", 2, 1, 2),
            struct.pack(">i", 2) + "??".encode("utf-16-be"),
            order.encode() + struct.pack(">i", 8) + struct.pack(f"{order}ff", 1.5, -2),
        )
    )


@pytest.mark.parametrize(("name", "order"), [("", "<"), ("name", ">")])
def test_an_nd_list_as_djl_writes_it(name, order):
    [array] = np_util.from_nd_list(nd_list(name, order))
    assert array.tolist() == [[1.5, -2]]
    assert np_util.to_nd_list(array) == nd_list("", "<")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"NDAR", b"NDXX"),
        (b"\0\0\0\3", b"\0\0\0\2"),
        (b"FLOAT64", b"PHANTOM"),
        (struct.pack(">iq", 1, 2), struct.pack(">iq", 2**31 - 1, 2)),
        (struct.pack(">iq", 1, 2), struct.pack(">iq", 1, 3)),
    ],
)
def test_a_broken_nd_list_is_refused(old, new):
    encoded = np_util.to_nd_list(np.array([1.0, 2.0]))
    assert old in encoded
    with pytest.raises(ValueError, match=r"."):
        np_util.from_nd_list(encoded.replace(old, new, 1))


# Output.


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (Output(), b""),
        (Output().add("é"), "é".encode()),
        (Output().add(b"\xff"), b"\xff"),
        (Output().add(bytearray(b"a")), b"a"),
        (Output().add({"a": None}), b'{"a": null}'),
        (Output().add([1, "é"]), '[1, "é"]'.encode()),
        (Output().add(Response({"a": 1})), b'{"a": 1}'),
        (Output().add_as_json("a"), b'"a"'),
        (Output().add_as_json({"a": np.float32(0.5), "b": np.array([1])}), b'{"a": 0.5, "b": [1]}'),
        (Output().add_as_json([1], key="data", batch_index=0), b"[1]"),
        (Output().add("other", key="log").add("data", key="data"), b"data"),
        (Output().add("first").add("second"), b"first"),
        (Output().add_as_numpy(np_list=[np.array([1])]), np_util.to_nd_list(np.array([1]))),
    ],
)
def test_output_body(output, expected):
    assert (output.code, output.message, output.body) == (200, "OK", expected)


def test_output_says_a_date():
    output = Output().add({"at": datetime.datetime(2026, 1, 2, 3, 4, 5)})
    assert output.body == b'{"at": "2026-01-02 03:04:05"}'


@pytest.mark.parametrize(
    ("value", "error"), [(object(), TypeError), ({"a": float("nan")}, ValueError)]
)
def test_output_refuses_what_is_not_json(value, error):
    with pytest.raises(error):
        Output().add(value)


def test_output_head():
    output = Output(code=201, message="made").add_property("x-a", 1).add_property("X-A", "2")
    assert (output.code, output.message, output.properties) == (201, "made", {"x-a": "2"})
    output.set_code(202).set_message("taken")
    assert (output.code, output.message) == (202, "taken")


def test_output_error():
    output = Output().add("half an answer").error("no model")
    assert output.code == 424
    assert json.loads(output.body) == {
        "code": 424,
        "message": "invoke handler failure",
        "error": "no model",
    }
    assert output.properties == {"Content-Type": "application/json"}
    assert Output().error("busy", code=503, message="later").code == 503


@pytest.mark.parametrize(
    ("given", "code", "body"),
    [
        ({"data": {"a": "é"}}, 200, '{"a": "é"}'.encode()),
        ({"data": "text"}, 200, b"text"),
        ({"data": [1]}, 200, b"[1]"),
        ({"data": Response({"a": 1})}, 200, b'{"a": 1}'),
        ({"data": {"a": 1}, "code": 201}, 201, b'{"a": 1}'),
        ({"data": "", "error": "no"}, 424, b'{"code": 424, "error": "no"}'),
        ({"data": "", "error": "no", "code": 400}, 400, b'{"code": 400, "error": "no"}'),
        ({"data": {"why": "x"}, "error": "no", "code": 400}, 400, b'{"why": "x"}'),
        ({"data": ""}, 200, b""),
    ],
)
def test_create_output(given, code, body):
    whole = create_non_stream_output(**given)
    assert (whole.code, whole.body) == (code, body and body + b"\n")
    assert whole.properties == {"Content-Type": "application/json"}
    chunk = create_stream_chunk_output(**given, last_chunk=True)
    assert (chunk.code, chunk.body) == (code, body and body + b"\n")
    assert chunk.properties == {"Content-Type": "application/jsonlines"}
    assert chunk.last
    assert not create_stream_chunk_output(given["data"], False).last


def test_create_output_with_headers():
    output = create_non_stream_output("a", {"content-type": "text/plain", "x-a": 1})
    assert output.properties == {"Content-Type": "text/plain", "x-a": "1"}


async def chunks():
    for chunk in ("a", "b", "c"):
        yield chunk


def streamed(*args, **kwargs):
    async def collect():
        return [
            (it.code, it.body, it.last)
            async for it in handle_streaming_response(chunks(), *args, **kwargs)
        ]

    return asyncio.run(collect())


def test_handle_streaming_response():
    assert streamed(lambda chunk, mark: ({chunk: mark}, chunk == "b"), mark=1) == [
        (200, b'{"a": 1}\n', False),
        (200, b'{"b": 1}\n', True),
    ]


def test_handle_streaming_response_with_history():
    def join(chunk, history):
        history.append(chunk)
        return "".join(history), chunk == "c", history

    bodies = [body for _, body, _ in streamed(join, accumulate_chunks=True)]
    assert bodies == [b"a\n", b"ab\n", b"abc\n"]


def test_handle_streaming_response_tells_a_failure(caplog):
    def fail(chunk):
        if chunk == "b":
            raise RuntimeError("no b")
        return chunk, False

    assert streamed(fail) == [
        (200, b"a\n", False),
        (424, b'{"code": 424, "error": "no b"}\n', True),
    ]
    assert "no b" in caplog.text


# Records.


def test_records():
    assert request_io.TextInput().parameters == {}
    assert request_io.TextInput(3, input_text="a").request_id == 3
    output = request_io.TextGenerationOutput(
        sequences={0: request_io.Sequence([request_io.Token(1, "a")], finish_reason="length")}
    )
    assert output.sequences[output.best_sequence_index].tokens[0].text == "a"
    assert isinstance(output, request_io.RequestOutput)


def test_pair_list():
    pairs = djl_python.PairList()
    assert pairs.is_empty()
    pairs.add("a", 1)
    pairs.add(value=2)
    assert (pairs.size(), pairs.get("a"), pairs.get(None), pairs.get("b")) == (2, 1, 2, None)
    assert (pairs.key_at(1), pairs.value_at(1)) == (None, 2)
    assert (pairs.get_keys(), pairs.get_values()) == (["a", None], [1, 2])


# Response.


def test_response_reads_as_an_object_and_as_a_dict():
    answer = Response(COMPLETION)
    assert answer.choices[0].text == answer["choices"][0]["text"] == "é"
    assert (answer.model, answer.usage.total_tokens, answer.choices[0].stop_reason) == (
        "base",
        3,
        None,
    )
    assert Response(CHAT).choices[0].message.content == "hello"
    assert isinstance(answer, dict)
    assert answer == COMPLETION
    assert not hasattr(answer.choices[0], "message")
    assert hasattr(answer.usage, "model_dump")
    with pytest.raises(AttributeError, match="'delta'"):
        answer.choices[0].delta  # noqa: B018


def test_response_takes_attributes_on_any_level():
    answer = Response(COMPLETION)
    answer.processed_by = "x"
    answer["also"] = {"deep": [1]}
    answer.choices[0].text = "new"
    answer.choices[0].score = 0.5
    answer.usage.cost = None
    answer.choices.append({"text": "second"})
    del answer.id
    assert (
        json.loads(answer.model_dump_json())
        == answer.model_dump()
        == {
            "model": "base",
            "choices": [
                {"index": 0, "text": "new", "stop_reason": None, "score": 0.5},
                {"text": "second"},
            ],
            "usage": {"total_tokens": 3, "cost": None},
            "processed_by": "x",
            "also": {"deep": [1]},
        }
    )
    assert COMPLETION["choices"][0]["text"] == "é"
    with pytest.raises(AttributeError, match="'id'"):
        del answer.id


def test_response_shares_what_is_set():
    notes: list[str] = []
    answer = Response({})
    answer.notes = notes
    notes.append("later")
    assert answer.model_dump() == {"notes": ["later"]}


def test_response_dumps():
    answer = Response({"a": None, "b": [{"c": None, "d": "é"}], "e": 1})
    plain = answer.model_dump()
    assert type(plain) is dict
    assert type(plain["b"][0]) is dict
    assert answer.model_dump(mode="json", exclude_none=True) == {"b": [{"d": "é"}], "e": 1}
    assert answer.model_dump(exclude={"a", "b"}) == {"e": 1}
    assert answer.model_dump_json(exclude={"a", "e"}) == '{"b": [{"c": null, "d": "é"}]}'
    assert answer.model_dump_json(indent=1, exclude={"a", "b"}) == '{\n "e": 1\n}'
    assert json.loads(json.dumps(answer)) == answer
    with pytest.raises(TypeError, match="include"):
        answer.model_dump_json(include={"a"})


def test_response_refuses_to_send_what_is_not_json():
    answer = Response({})
    answer.score = float("inf")
    with pytest.raises(ValueError, match="JSON"):
        answer.model_dump_json()
    answer.score = np.float32(0.5)
    assert answer.model_dump_json() == '{"score": 0.5}'
    answer.score = object()
    with pytest.raises(TypeError, match="object"):
        answer.model_dump_json()


@pytest.mark.parametrize("name", ["items", "keys", "values", "get", "copy", "pop", "model_dump"])
def test_a_name_of_a_method_is_an_item_too(name):
    answer = Response({name: 1, "below": {name: [2]}})
    assert callable(getattr(answer, name))
    assert answer[name] == 1
    setattr(answer, name, 3)
    assert json.loads(answer.model_dump_json()) == {name: 3, "below": {name: [2]}}
    assert json.loads(json.dumps(answer)) == {name: 3, "below": {name: [2]}}


@pytest.mark.parametrize(
    "copied", [copy.copy, Response.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]
)
def test_response_copies(copied):
    answer = Response(COMPLETION)
    twin = copied(answer)
    assert twin == answer
    assert isinstance(twin, Response)
    twin.model = "other"
    assert answer.model == "base"
    shallow = copied in (copy.copy, Response.copy)
    assert (twin.choices is answer.choices) is shallow
    twin.choices[0].text = "new"
    assert (answer.choices[0].text == "new") is shallow


# The rest of the package.


def test_pair_lists_are_made_of_others():
    pairs = djl_python.PairList(keys=["a"], values=[1])
    pairs.add(pair=("c", 3))
    pairs.add("b", 2, index=1)
    pairs.add("none", None)
    pairs.add_all(djl_python.PairList(pair_map={"d": 4}))
    pairs.add_all(None)
    assert (pairs.get_keys(), pairs.get_values()) == (["a", "b", "c", "d"], [1, 2, 3, 4])
    assert djl_python.PairList(pair_list=[("a", 1), ("a", 2)]).get_values() == [1, 2]
    with pytest.raises(ValueError, match="2 keys and 1 values"):
        djl_python.PairList(["a", "b"], [1])


def test_binary_encode():
    """Expected by the format's description: DJL's own reader reads this."""
    encoded = Output.binary_encode({"data": "é", "last": True})
    assert bytes(encoded) == b"".join(
        (
            struct.pack(">h", 2),
            *(struct.pack(">i", len(it)) + it for it in (b"data", "é".encode(), b"last", b"True")),
        )
    )
    message = bytearray()
    Output.write_utf8(message, None)
    assert message == b"\xff" * 4
    output = Output().add(encoded)
    assert (output.body, output.last, output.code) == ("é".encode(), True, 200)
    failed = Output().add(Output.binary_encode({"data": "", "last": True, "error": "why"}))
    assert (failed.code, failed.body) == (424, b'{"code": 424, "error": "why"}\n')


def test_finalize():
    called: list[tuple[Any, ...]] = []
    output = Output().finalize(lambda *args: called.append(args), 1, 2)
    output.execute_finalize()
    assert called == [(1, 2)]
    assert Output().execute_finalize() is None


def test_the_text_of_inputs_and_outputs():
    assert json.loads(str(Output().add("a", key="data"))) == {
        "code": 200,
        "message": "OK",
        "properties": {},
        "content": {"data": "bytes"},
    }
    assert str(Input({"a": "1"}, b"x")) == "properties: {'a': '1'}\ndata: b'x'"


def test_a_sequence_is_read_token_by_token():
    output = request_io.TextGenerationOutput(1, request_io.TextInput(tgi_compat=True))
    output.set_next_token(request_io.Token(1, "a", -0.5))
    last = request_io.Token(2, "b", special_token=True)
    output.set_next_token(last, is_last_token=True, finish_reason="length")
    output.set_next_top_tokens([last], 0)
    sequence = output.sequences[output.best_sequence_index]
    read = []
    while sequence.has_next_token():
        token, index, first, end = sequence.get_next_token()
        read.append((token and token.text, index, first, end))
    assert read == [("a", 0, True, False), ("b", 1, False, True)]
    assert sequence.get_next_token() == (None, 0, False, False)
    assert (sequence.get_last_token(), sequence.finish_reason) == (last, "length")
    assert sequence.get_next_top_tokens() == [last]
    assert sequence.get_next_top_tokens() is None
    assert output.get_tokens_as_dict() == [
        {"id": 1, "text": "a", "logprob": -0.5},
        {"id": 2, "text": "b", "logprob": None, "special": True},
    ]
    assert last.as_dict() == {"id": 2, "text": "b", "log_prob": None, "special_token": True}


def test_rolling_batchs_attributes_are_explained():
    with pytest.raises(AttributeError, match="rolling batch has it, and this is vLLM's answer"):
        Response(COMPLETION).sequences  # noqa: B018


def test_csv_without_headers():
    numbers = encode_decode.decode(Input({}, b"1,2\n3,4\n"), "text/csv", require_csv_headers=False)
    assert numbers.tolist() == [[1, 2], [3, 4]]
    with pytest.raises(ValueError, match="should be a number"):
        encode_decode.decode(Input({}, b"1,a\n"), "text/csv", require_csv_headers=False)


class Model:
    """The methods of a transformers model that StreamingUtils calls."""

    device = "cpu"

    def generate(self, input_ids, streamer, max_new_tokens=3, **parameters):
        if parameters.get("fail"):
            raise RuntimeError("no memory")
        streamer.put(input_ids)
        for step in range(max_new_tokens):
            streamer.put(np.array([step, step + 1]))
        streamer.end()


class Tokenizer:
    pad_token = None
    eos_token = "<end>"

    def __call__(self, inputs, padding, return_tensors):
        assert self.pad_token == "<end>"
        rows = np.array([[len(it)] * 2 for it in inputs])

        class Tokens(dict[str, Any]):
            def to(self, device):
                return self

        return Tokens(input_ids=rows)

    def decode(self, row, skip_special_tokens):
        return " ".join(map(str, row))


def test_streaming_utils():
    from handlers.djl_python.streaming_utils import StreamingUtils

    steps = StreamingUtils.get_stream_generator("Accelerate")
    found = list(steps(Model(), Tokenizer(), ["a", "bb"], "cpu", max_new_tokens=2))
    assert found == [["0", "1"], ["1", "2"]]
    whole = StreamingUtils.use_hf_default_streamer(Model(), Tokenizer(), ["a", "b"], None)
    assert next(whole) == ["1 1", "1 1"]
    assert next(whole) == ["0", "1"]
    failed = StreamingUtils.use_hf_default_streamer(Model(), Tokenizer(), ["a"], None, fail=True)
    assert list(failed) == ["no memory"]
    with pytest.raises(ValueError, match="'DeepSpeed' cannot stream here"):
        StreamingUtils.get_stream_generator("DeepSpeed")
