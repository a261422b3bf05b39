# SPDX-License-Identifier: Apache-2.0
"""vLLM's requests to speech-to-text models (0.32): sound is read within limits, and tenants share
no caches.
"""

import io
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import UploadFile
from vllm.entrypoints.speech_to_text.base import serving
from vllm.entrypoints.speech_to_text.base.utils import read_upload_with_limit
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest

from serving.engine.speech import sound


def limit() -> None:
    """Limit the reading of all sound from now on."""
    serving.load_audio = sound.load


def transcription(fields: Mapping[str, Any], file: bytes) -> Any:
    """vLLM's model of a form. Raises pydantic.ValidationError."""
    return TranscriptionRequest.model_validate(_with_file(fields, file))


def translation(fields: Mapping[str, Any], file: bytes) -> Any:
    """The same of one to translate."""
    return TranslationRequest.model_validate(_with_file(fields, file))


def _with_file(fields: Mapping[str, Any], file: bytes) -> dict[str, Any]:
    return {**fields, "file": UploadFile(io.BytesIO(file), size=len(file))}


async def transcribe(handler: Any, request: Any, raw: Any) -> Any:
    """Let vLLM's object answer. handler: a copy for this request (calls.RequestStandIn.own)."""
    content = await read_upload_with_limit(request.file)
    return await _salted(handler, raw.call.salt).create_transcription(content, request, raw)


async def translate(handler: Any, request: Any, raw: Any) -> Any:
    """The same for a translation."""
    content = await read_upload_with_limit(request.file)
    return await _salted(handler, raw.call.salt).create_translation(content, request, raw)


def _salted(handler: Any, salt: str | None) -> Any:
    """Let a request's salt decide which cached blocks and encoded sounds it finds.

    vLLM's requests for speech have no cache_salt, and their sounds are named by their content.
    """
    if salt:
        handler.model_cls = _Salting(handler.model_cls, salt)
    return handler


class _Salting:
    """A model's class, for the requests of one salt."""

    def __init__(self, model_class: Any, salt: str) -> None:
        self._model_class = model_class
        self._salt = salt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model_class, name)

    def get_generation_prompt(self, *rest: Any, **more: Any) -> Any:
        return self._with_salt(self._model_class.get_generation_prompt(*rest, **more))

    def get_language_detection_prompt(self, *rest: Any, **more: Any) -> Any:
        return self._with_salt(self._model_class.get_language_detection_prompt(*rest, **more))

    def _with_salt(self, prompt: Any) -> Any:
        """A prompt with a unique name for its sound, and with the salt for its blocks."""
        heard = prompt.get("encoder_prompt", prompt)
        heard["multi_modal_uuids"] = {"audio": [uuid.uuid4().hex]}
        heard["cache_salt"] = prompt.get("decoder_prompt", prompt)["cache_salt"] = self._salt
        return prompt
