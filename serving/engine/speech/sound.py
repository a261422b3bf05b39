# SPDX-License-Identifier: Apache-2.0
"""Files with sound: their duration, and their samples, within limits.

libsndfile reads them a block at a time and soxr converts them to the model's sampling rate. No file
therefore needs more memory than its longest allowed sound. vLLM (0.32) reads all samples of a file
at once, at the file's rate, and trusts the header for their number. MP4 and WebM need PyAV, which
is FFmpeg: 107 MB with encoders under the GPL, so it is in no lock.
"""

import contextlib
import importlib.util
import io
from collections.abc import Iterator
from typing import Any

MINIMUM_HZ, MAXIMUM_HZ = 1_000, 192_000
CHANNELS = 8
KINDS = "WAV, FLAC, MP3 or Ogg"
WINDOW_S = 30
"""Seconds of sound that Whisper takes at once. Longer sound is cut into pieces of this length."""
MP4 = "MP4, M4A or WebM"
BYTES_PER_S = 4_000  # 32 kbit/s
_BLOCK = 64 * 1024  # samples of each channel


class SoundError(ValueError):
    """Sound that cannot be heard. The message is meant for the client."""


def too_long(seconds: float, longest: int) -> SoundError:
    return SoundError(
        f"file: the sound lasts {seconds:.0f} s, and may last {longest} s; send it in pieces "
        "(OPTION_MAX_AUDIO_SECONDS sets the limit)"
    )


def seconds(data: bytes, longest: int) -> float:
    """The duration of a file in seconds, by its header; takes a few milliseconds.

    longest: the longest allowed duration in seconds. Raises SoundError if the file is longer, or of
    an unknown kind.
    """
    if _kind(data) == MP4:
        found = _seconds_of_container(data)
    else:
        with _opened(data) as file:
            found = file.frames / file.samplerate
    if found > longest:
        raise too_long(found, longest)
    return found


def load(file: io.BytesIO, *, sr: int, max_duration_s: int, **_: object) -> tuple[Any, int]:
    """A replacement of vLLM's load_audio(): the samples of a file, in one channel at the rate `sr`.

    max_duration_s: the longest allowed duration in seconds, whatever the header says. Raises
    SoundError.
    """
    import numpy as np
    import soundfile
    import soxr

    data = file.getvalue()
    if _kind(data) == MP4:
        return _loaded_from_container(data, sr, max_duration_s)
    with _opened(data) as sound:
        rate = sound.samplerate
        resample = soxr.ResampleStream(rate, sr, 1, dtype="float32") if rate != sr else None
        parts, frames = [], 0
        while True:
            try:
                block = sound.read(_BLOCK, dtype="float32", always_2d=True)
            except soundfile.LibsndfileError:
                raise SoundError(
                    f"file: the sound is broken after {frames / rate:.1f} s: is it whole?"
                ) from None
            frames += len(block)
            if frames > max_duration_s * rate:
                raise too_long(frames / rate, max_duration_s)
            mono = block.mean(axis=1, dtype="float32")
            ended = len(block) < _BLOCK
            parts.append(resample.resample_chunk(mono, last=ended) if resample else mono)
            if ended:
                break
    if not frames:
        raise SoundError("file: there is no sound in it; send a recording")
    return np.concatenate(parts), sr


@contextlib.contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """The file, open. Raises SoundError."""
    import soundfile

    kind = _kind(data)
    if not kind:
        raise SoundError(f"file: it is no sound that is known here; send {KINDS}")
    try:
        sound = soundfile.SoundFile(io.BytesIO(data))
    except soundfile.LibsndfileError:
        raise SoundError(f"file: it begins like {kind}, and cannot be read: is it whole?") from None
    with sound:
        rate, channels = sound.samplerate, sound.channels
        if not MINIMUM_HZ <= rate <= MAXIMUM_HZ or channels > CHANNELS:
            raise SoundError(
                f"file: it has {rate} Hz and {channels} channels; it should have "
                f"{MINIMUM_HZ} to {MAXIMUM_HZ} Hz, and at most {CHANNELS} channels"
            )
        yield sound


def _kind(data: bytes) -> str:
    """The kind of a file, by its first bytes. libsndfile reads some thirty kinds; strangers' files
    reach only the code for these few.
    """
    if data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE":
        return "WAV"
    if data[:4] == b"fLaC":
        return "FLAC"
    if data[:4] == b"OggS":
        return "Ogg"
    if data[:3] == b"ID3" or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2):
        return "MP3"
    if data[4:8] == b"ftyp" or data[:4] == b"\x1a\x45\xdf\xa3":
        return MP4
    return ""


def _require_av() -> None:
    if not importlib.util.find_spec("av"):
        raise SoundError(
            f"file: this server reads {KINDS}; for {MP4} it needs PyAV: `pip install av==18.1.0`"
        )


def _seconds_of_container(data: bytes) -> float:
    """The duration in the header. A header without one, as in browsers' recordings, gives an
    estimate: the size divided by the usual bit rate.
    """
    _require_av()
    import av

    try:
        with av.open(io.BytesIO(data)) as container:
            duration = container.duration
    except av.error.FFmpegError:
        raise SoundError(f"file: it begins like {MP4}, and cannot be read: is it whole?") from None
    return duration / 1_000_000 if duration else len(data) / BYTES_PER_S


def _loaded_from_container(data: bytes, rate: int, longest: int) -> tuple[Any, int]:
    _require_av()
    from vllm.multimodal.media.audio import load_audio_pyav

    found: tuple[Any, int] = load_audio_pyav(io.BytesIO(data), sr=rate, max_duration_s=longest)
    return found
