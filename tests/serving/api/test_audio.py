# SPDX-License-Identifier: Apache-2.0
"""Transcriptions and translations: forms, the length of sounds, and the request to the engine."""

import io
import wave
from typing import Any

import pytest

from serving.engine.base import Call
from serving.engine.speech import sound
from serving.protocol import AUDIO_PATHS, TRANSCRIPTIONS
from serving.router.routes import Route as Routed
from serving.router.routes import route_of
from tests.fake_engine import whole
from tests.serving.conftest import running

pytestmark = pytest.mark.anyio


def wav(seconds=1, rate=1000, channels=1):
    file = io.BytesIO()
    with wave.open(file, "wb") as it:
        it.setparams((channels, 2, rate, 0, "NONE", ""))
        it.writeframes(bytes(2 * rate * channels * seconds))
    return file.getvalue()


@pytest.fixture(scope="module")
async def served(anyio_backend):
    """A server with a speech model, whose engine returns the form that it got."""

    def repeat(call: Call) -> dict[str, Any]:
        return {"path": call.path, "fields": call.request, "size": len(call.file or b"")}

    async with running(max_request_size=1_000_000, max_audio_seconds=100) as it:
        it.engine.hears = True
        it.engine.answers |= dict.fromkeys(AUDIO_PATHS, whole(repeat))
        yield it


async def post(served, path=TRANSCRIPTIONS, file=None, **fields):
    files = {"file": ("a.wav", wav() if file is None else file)}
    return await served.client.post(path, data=fields, files=files)


async def test_forms_reach_the_engine(served):
    for path in AUDIO_PATHS:
        more = {"timestamp_granularities[]": ["word", "segment"], "prompt": "Zürich"}
        answer = (await post(served, path, model=served.settings.model_names[0], **more)).json()
        assert answer["path"] == path
        assert answer["size"] == len(wav())
        assert answer["fields"] == {"model": served.settings.model_names[0], **more}
        assert route_of(b"POST", path) is Routed.INFERENCE
    salted = (await post(served, cache_salt="mine")).json()["fields"]
    assert salted.keys() == {"cache_salt"}
    assert salted["cache_salt"] != "mine"
    assert (await post(served, "/invocations")).json()["path"] == TRANSCRIPTIONS
    for path in AUDIO_PATHS:
        routed = await served.client.post(
            "/invocations",
            files={"file": wav()},
            headers={"X-Amzn-SageMaker-Custom-Attributes": f"route={path}"},
        )
        assert routed.json()["path"] == path


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"file": b"GIF89a"}, "no sound that is known here; send WAV"),
        ({"file": b"fLaC"}, "begins like FLAC"),
        ({"file": b"\x1a\x45\xdf\xa3"}, "it needs PyAV"),
        ({"file": wav(101)}, "lasts 101 s, and may last 100 s"),
        ({"file": wav(rate=500)}, "it has 500 Hz"),
        ({"file": wav(channels=9)}, "and 9 channels"),
        ({"model": ["a", "b"]}, "model is repeated"),
        ({"prompt": "a" * 70_000}, "at most 65536 bytes"),
        ({f"field{n}": "a" for n in range(80)}, "at most 64 fields"),
        ({"vllm_xargs": "{}"}, "not for clients"),
        ({"kv_transfer_params": "{}"}, "not for clients"),
        ({"adapters": "none"}, "LoRA is not enabled"),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
async def test_what_is_refused(served, fields, told):
    answer = await post(served, **fields)
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


async def test_no_file_can_add_a_field(served):
    inner = (
        b'\r\n--a\r\nContent-Disposition: form-data; name="cache_salt"\r\n\r\nother\r\n--a--\r\n'
    )
    file = wav() + inner
    assert (await post(served, file=file)).json()["fields"] == {}


async def test_a_model_that_does_not_hear_says_so(shared):
    for path in AUDIO_PATHS:
        answer = await post(shared, path)
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == f"the model does not answer {path}"


async def test_a_long_sound_takes_the_places_of_several(served):
    """The engine works on each of its pieces."""
    queue = served.pipeline._queue
    before = queue.room
    turns = []

    inner = queue.turn

    async def turn(lane, sequences, *more):
        turns.append(sequences)
        return await inner(lane, sequences, *more)

    queue.turn = turn
    try:
        assert (await post(served, file=wav(95))).status_code == 200
        assert (await post(served, file=wav(1))).status_code == 200
    finally:
        del queue.turn
    assert turns == [4, 1]
    assert queue.room == before


def test_what_is_decoded_has_the_limit_too():
    long = wav(11, rate=8000)
    with pytest.raises(sound.SoundError, match="may last 10 s"):
        sound.load(io.BytesIO(long), sr=16_000, max_duration_s=10)
    samples, rate = sound.load(io.BytesIO(long), sr=16_000, max_duration_s=11)
    assert (len(samples), rate) == (11 * 16_000, 16_000)
    with pytest.raises(sound.SoundError, match="begins like MP3"):
        sound.seconds(b"ID3" + bytes(1000), 10)
