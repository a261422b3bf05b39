# SPDX-License-Identifier: Apache-2.0
"""vLLM's paths for models that hear (0.32), with sound that is read within limits, and tenants that
share no caches.
"""

import uuid
from contextvars import ContextVar
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import State
from vllm.entrypoints.speech_to_text.base import serving
from vllm.entrypoints.speech_to_text.transcription.api_router import create_transcriptions
from vllm.entrypoints.speech_to_text.translation.api_router import create_translations

from serving.engine.speech import sound
from serving.protocol import TRANSCRIPTIONS, TRANSLATIONS

_SALT: ContextVar[str | None] = ContextVar("salt", default=None)
"""Of the request whose prompts are made."""


def attach(app: FastAPI) -> None:
    serving.load_audio = sound.load
    for path, endpoint in (
        (TRANSCRIPTIONS, create_transcriptions),
        (TRANSLATIONS, create_translations),
    ):
        app.add_api_route(path, endpoint, methods=["POST"])


def keep_tenants_apart(state: State) -> None:
    """Have a request's salt decide which cached blocks and encoded sounds it finds.

    vLLM's requests for speech have no cache_salt, and their sounds are named by their content.
    """
    for name in ("openai_serving_transcription", "openai_serving_translation"):
        handler = getattr(state, name)
        handler.model_cls = _salting(handler.model_cls)
        handler.__class__ = _salted(type(handler))


def _salted(handler_class: Any) -> Any:
    class Salted(handler_class):  # type: ignore[misc]  # vLLM is not type-checked
        async def _preprocess_speech_to_text(self, request: Any, *rest: Any, **more: Any) -> Any:
            before = _SALT.set((request.model_extra or {}).get("cache_salt"))
            try:
                return await super()._preprocess_speech_to_text(request, *rest, **more)
            finally:
                _SALT.reset(before)

    return Salted


def _salting(model_class: Any) -> Any:
    class Salting(model_class):  # type: ignore[misc]  # vLLM is not type-checked
        @classmethod
        def get_generation_prompt(cls, *rest: Any, **more: Any) -> Any:
            return _with_salt(super().get_generation_prompt(*rest, **more))

        @classmethod
        def get_language_detection_prompt(cls, *rest: Any, **more: Any) -> Any:
            return _with_salt(super().get_language_detection_prompt(*rest, **more))

    return Salting


def _with_salt(prompt: Any) -> Any:
    """A prompt whose sound has a name of its own, and whose blocks have the salt."""
    if salt := _SALT.get():
        heard = prompt.get("encoder_prompt", prompt)
        heard["multi_modal_uuids"] = {"audio": [uuid.uuid4().hex]}
        heard["cache_salt"] = prompt.get("decoder_prompt", prompt)["cache_salt"] = salt
    return prompt
