# SPDX-License-Identifier: Apache-2.0
"""The private names of vLLM's speech that serving/engine/speech/transcription.py uses."""

from serving.engine.patches.frontend.context import Context
from serving.patching.patch import SERVER, Name, Patch

_SERVING = "vllm.entrypoints.speech_to_text.base.serving"


def _hears(context: Context) -> bool:
    return bool(getattr(context.state, "openai_serving_transcription", None))


SALTS = Patch(
    name="speech_salts",
    process=SERVER,
    names=(
        Name(
            f"{_SERVING}:SpeechToTextBaseServing",
            has=("model_cls",),
            says=(
                "self.model_cls.get_generation_prompt(",
                "self.model_cls.get_language_detection_prompt(",
            ),
        ),
    ),
    does="Separates cached blocks and encoded sounds by the request's salt.",
    why="vLLM's requests for speech have no cache_salt, and sounds are named by their content.",
    without="tenants would share cached sounds",
    closed=True,
    needed=_hears,
)
LIMITS = Patch(
    name="sound_limits",
    process=SERVER,
    names=(Name(f"{_SERVING}:load_audio"), Name(f"{_SERVING}:", says=("= load_audio(",))),
    does="Limits the length and size of decoded sound.",
    why="vLLM takes a whole file's samples into memory.",
    without="a small file could become unlimited sound",
    closed=True,
    needed=_hears,
)
