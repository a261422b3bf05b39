# SPDX-License-Identifier: Apache-2.0
"""A speech model on the real engine: transcriptions and translations, whole and streamed."""

import io
import json

import numpy as np
import pytest
import soundfile

from serving.protocol import AUDIO_PATHS, TRANSCRIPTIONS
from tests.e2e.conftest import serving
from tests.e2e.test_security import Pings
from tests.support.models import tiny_whisper

RATE = 16_000


def sound(seconds=2.0, kind="WAV", hertz=440, rate=RATE, channels=1, subtype=None):
    time = np.arange(int(seconds * rate)) / rate
    tone = 0.3 * np.sin(2 * np.pi * hertz * time)
    file = io.BytesIO()
    soundfile.write(file, np.stack([tone] * channels, axis=1), rate, format=kind, subtype=subtype)
    return file.getvalue()


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    environ = {
        "OPTION_MODEL_ID": str(tiny_whisper.make()),
        "OPTION_KV_CACHE_MEMORY_BYTES": "64M",
        "OPTION_MAX_NUM_SEQS": "8",
        "OPTION_MAX_AUDIO_SECONDS": "90",
        "OPTION_CACHE_SALT_HEADER": "X-Tenant",
        "OPTION_DTYPE": "float32",
    }
    with serving(tmp_path_factory.mktemp("hearing") / "log", **environ) as it:
        it.ready()
        yield it


def post(served, file, path=TRANSCRIPTIONS, headers=None, **fields):
    fields = {"language": "en", "temperature": "0", **fields}
    fields = {name: value for name, value in fields.items() if value}
    files = {"file": ("a.wav", file)} if file is not None else None
    return served.client.post(path, data=fields, files=files, headers=headers)


def text(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["text"]


def test_what_is_heard_is_written_down(hearing):
    for path in AUDIO_PATHS:
        assert text(post(hearing, sound(), path))
    once = text(post(hearing, sound()))
    assert text(post(hearing, sound())) == once
    assert text(post(hearing, sound(hertz=3000))) != once
    answer = post(hearing, sound()).json()
    assert answer["usage"] == {"type": "duration", "seconds": 2}
    assert text(post(hearing, sound(), language=None)) is not None  # the model detects the language


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("WAV", {"rate": 48_000, "channels": 2}),
        ("WAV", {"rate": 8_000, "subtype": "ULAW"}),
        ("FLAC", {}),
        ("OGG", {"rate": 44_100}),
        ("OGG", {"subtype": "OPUS", "rate": 48_000}),
        ("MP3", {"rate": 44_100}),
    ],
)
def test_kinds_of_files(hearing, kind, more):
    assert text(post(hearing, sound(kind=kind, **more)))


def test_long_sound_is_cut_into_pieces(hearing):
    answer = post(hearing, sound(80, kind="FLAC"), response_format="verbose_json")
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["duration"] == pytest.approx(80)
    assert max(it["end"] for it in body["segments"]) > 60


def test_streams(hearing):
    whole = text(post(hearing, sound()))
    with hearing.client.stream(
        "POST",
        TRANSCRIPTIONS,
        data={"language": "en", "temperature": "0", "stream": "true", "stream_include_usage": "1"},
        files={"file": sound()},
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, end = [line[6:] for line in answer.iter_lines() if line]
    assert end == "[DONE]"
    chunks = [json.loads(event) for event in events]
    heard = "".join(it["choices"][0]["delta"]["content"] for it in chunks if it["choices"])
    assert heard.strip() == whole.strip()
    assert chunks[-1]["usage"]["completion_tokens"] > 0


def test_the_openai_client(hearing):
    audio = hearing.openai.audio
    found = audio.transcriptions.create(model="lmi", file=("a.flac", sound(kind="FLAC")))
    assert found.text
    with pytest.deprecated_call():  # the client's maker expects the timestamps elsewhere
        assert audio.translations.create(model="lmi", file=("a.wav", sound())).text
    events = audio.transcriptions.create(model="lmi", file=("a.wav", sound()), stream=True)
    assert len(list(events)) > 1


def test_invocations_take_the_same_form(hearing):
    answer = post(hearing, sound(), "/invocations")
    assert text(answer) == text(post(hearing, sound()))
    refused = post(hearing, b"no sound", "/invocations")
    assert refused.status_code == 424
    assert "WAV" in refused.json()["error"]


def test_what_is_refused(hearing):
    bomb = sound(3600, kind="FLAC", hertz=0, rate=8_000)
    assert len(bomb) < 1_000_000
    for file, told, more in (
        (None, "file", {}),
        (b"", "no sound that is known", {}),
        (b"RIFF\0\0\0\0WAVE", "begins like WAV", {}),
        (b"\0\0\0\x20ftypM4A ", "PyAV", {}),
        (sound(100), "lasts 100 s, and may last 90 s", {}),
        (bomb, "lasts 3600 s, and may last 90 s", {}),
        (sound(0.1)[:-100], None, {}),
        (sound(), "does not exist", {"model": "other"}),
        (sound(), "response_format", {"response_format": "srt"}),
        (sound(), "not for clients", {"vllm_xargs": '{"a": 1}'}),
        (sound(), "temperature", {"temperature": "hot"}),
    ):
        answer = post(hearing, file, **more)
        if told is None:
            assert answer.status_code in (200, 400)
            continue
        assert answer.status_code in (400, 404), (told, answer.text)
        assert told in answer.json()["error"]["message"]
    answer = hearing.client.post("/v1/chat/completions", json={"messages": []})
    assert answer.status_code == 404


def test_a_header_that_lies_gets_no_more_time(hearing):
    """Decoded seconds also count: here a FLAC declares a length of zero."""
    lying = bytearray(sound(100, kind="FLAC"))
    lying[21] &= 0xF0
    lying[22:26] = bytes(4)
    answer = post(hearing, bytes(lying))
    assert answer.status_code == 400
    assert "may last 90 s" in answer.json()["error"]["message"]


def test_tenants_share_no_sounds(hearing):
    def hits(tenant):
        before = hearing.metric("vllm:mm_cache_hits_total")
        assert text(post(hearing, sound(hertz=777), headers={"X-Tenant": tenant}))
        post(hearing, sound(), headers={"X-Tenant": tenant})
        return hearing.metric("vllm:mm_cache_hits_total") - before

    assert [hits("a"), hits("b")] == [0, 0]


def test_a_large_file_holds_nobody_up(hearing):
    large = sound(89, rate=96_000, channels=2)
    assert len(large) > 30_000_000
    with Pings(hearing.url) as pings:
        assert text(post(hearing, large))
    assert pings.slowest < 2


def test_through_the_router(hearing, tmp_path):
    """The router passes forms on unread, with every strategy."""
    expected = text(post(hearing, sound()))
    options = {
        "OPTION_ROUTER_REPLICAS": hearing.url,
        "OPTION_ROUTING_STRATEGY": "kvaware",
        "OPTION_MODEL_ID": str(tiny_whisper.make()),
    }
    with serving(tmp_path / "log", "./entrypoint.sh", "route", **options) as routed:
        routed.ready()
        assert text(post(routed, sound())) == expected
        assert text(post(routed, sound(), "/invocations")) == expected
        found = routed.openai.audio.transcriptions.create(
            model="lmi", file=("a.wav", sound()), language="en", stream=True
        )
        assert len(list(found)) > 1
        refused = post(routed, sound(100))
        assert refused.status_code == 400
