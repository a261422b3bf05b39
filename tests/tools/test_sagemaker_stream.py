# SPDX-License-Identifier: Apache-2.0
"""The client helper, with any division of any events, directly and through boto3."""

import contextlib
import json
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3
import pytest
from botocore.config import Config
from hypothesis import given
from hypothesis import strategies as st

from examples.sagemaker.stream import StreamError, events
from tests.fuzzing import examples

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
OBJECTS = st.dictionaries(TEXTS, TEXTS | st.none() | st.integers(), max_size=3).filter(
    lambda it: not it.get("error")
)


def sse(found, end="\n", more="") -> bytes:
    events = [f"{more}data: {json.dumps(it, ensure_ascii=False)}{end}{end}" for it in found]
    return "".join(events).encode()


def json_lines(found) -> bytes:
    return "".join(f"{json.dumps(it, ensure_ascii=False)}\n" for it in found).encode()


def cut(data: bytes, places) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {len(data)})
    return [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]


CUTS = st.lists(st.integers(0, 10_000), max_size=30)


@examples(200)
@given(st.lists(OBJECTS), CUTS, st.sampled_from(["\n", "\r\n"]), st.sampled_from(["", ": hm\n"]))
def test_any_cut_of_server_sent_events(found, places, end, more):
    for ending in (b"", b"data: [DONE]" + 2 * end.encode(), b"data: [DONE]"):
        assert [*events(cut(sse(found, end, more) + ending, places))] == found


@examples(200)
@given(st.lists(OBJECTS), CUTS)
def test_any_cut_of_json_lines(found, places):
    whole = json_lines(found)
    assert [*events(cut(whole, places))] == found
    assert [*events(cut(whole.removesuffix(b"\n"), places))] == found


@examples(200)
@given(st.lists(OBJECTS, min_size=1), st.booleans(), st.integers(0, 10_000))
def test_a_stream_that_is_cut_off_is_told(found, lines, place):
    frame = json_lines if lines else sse
    left = frame(found)[:place]
    wholes = [frame(found[:count]) for count in range(len(found) + 1)]
    whole = left in wholes or (lines and left + b"\n" in wholes)
    told: list[object] = []
    with contextlib.nullcontext() if whole else pytest.raises(StreamError, match="in the middle"):
        told += events([left])
    assert told == found[: len(told)]


def test_every_byte_by_itself():
    found = [{"text": "naïve 漢字 🎈"}] * 3
    assert [*events([bytes([it]) for it in sse(found)])] == found


def test_text_that_is_no_json():
    assert [*events([b"data: two\ndata:  lines\n\n", b"one\n"])] == ["two\n lines", "one"]


@pytest.mark.parametrize(
    ("line", "message", "code"),
    [
        (b'{"code":424,"error":"too long"}\n', "too long", 424),
        (b'data: {"error":{"message":"it broke","code":500}}\n\n', "it broke", 500),
    ],
)
def test_an_error_in_the_stream_is_raised(line, message, code):
    found = events([json_lines([{"a": 1}]), line])
    assert next(found) == {"a": 1}
    with pytest.raises(StreamError, match=message) as raised:
        next(found)
    assert raised.value.code == code


def test_other_libraries_events():
    failure = {"ModelStreamError": {"Message": "slow", "ErrorCode": "StreamBroken"}}
    with pytest.raises(StreamError, match="ModelStreamError: slow") as raised:
        [*events([{"PayloadPart": {"Bytes": b"{}\n"}}, failure])]
    assert raised.value.code == "StreamBroken"


def test_what_is_none_of_ours_is_raised_as_it_is():
    def broken() -> Iterator[bytes]:
        yield b"{}\n"
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        [*events(broken())]


# application/vnd.amazon.eventstream: lengths of the whole and of the headers and their CRC32, all
# big-endian; headers (length of the name, name, 7 for a string, its length, it); payload; CRC32.
def message(payload: bytes, **headers: str) -> bytes:
    head = b""
    for name, value in headers.items():
        key, text = f":{name.replace('_', '-')}".encode(), value.encode()
        head += bytes([len(key)]) + key + b"\x07" + len(text).to_bytes(2, "big") + text
    prelude = (len(head) + len(payload) + 16).to_bytes(4, "big") + len(head).to_bytes(4, "big")
    whole = prelude + zlib.crc32(prelude).to_bytes(4, "big") + head + payload
    return whole + zlib.crc32(whole).to_bytes(4, "big")


def part(data: bytes) -> bytes:
    return message(data, message_type="event", event_type="PayloadPart")


def failed(kind: str, **body: str) -> bytes:
    return message(json.dumps(body).encode(), message_type="exception", exception_type=kind)


class Runtime(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    pieces: list[bytes] = []  # noqa: RUF012 - set by each test

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "application/vnd.amazon.eventstream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for piece in [*self.pieces, b""]:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def runtime():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Runtime)
    thread = threading.Thread(target=server.serve_forever, args=[0.05])
    thread.start()
    client = boto3.client(
        "sagemaker-runtime",
        region_name="us-east-1",
        endpoint_url=f"http://127.0.0.1:{server.server_port}",
        aws_access_key_id="id",
        aws_secret_access_key="secret",
        config=Config(retries={"total_max_attempts": 1}),
    )

    def ask(*pieces: bytes) -> Iterator[object]:
        Runtime.pieces = [it for it in pieces if it]
        answer = client.invoke_endpoint_with_response_stream(EndpointName="x", Body=b"{}")
        with contextlib.closing(answer["Body"]) as body:
            yield from events(body)

    yield ask
    client.close()
    server.shutdown()
    thread.join()
    server.server_close()


@examples(20)
@given(found=st.lists(OBJECTS), places=CUTS, lines=st.booleans())
def test_through_boto3(runtime, found, places, lines):
    whole = json_lines(found) if lines else sse(found)
    assert [*runtime(*(part(it) for it in cut(whole, places)))] == found


@pytest.mark.parametrize("kind", ["ModelStreamError", "InternalStreamFailure"])
def test_the_platforms_failures_through_boto3(runtime, kind):
    found = runtime(part(b'{"a": 1}\n{"b"'), failed(kind, Message="it broke", ErrorCode="x"))
    assert next(found) == {"a": 1}
    with pytest.raises(StreamError, match=f"{kind}: it broke") as raised:
        next(found)
    assert raised.value.code == kind


def test_a_stream_that_breaks_off_through_boto3(runtime):
    with pytest.raises(StreamError, match="in the middle of an event"):
        [*runtime(part(b'data: {"a": 1}\n\ndata: {"a'))]
