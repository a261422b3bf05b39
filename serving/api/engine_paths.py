# SPDX-License-Identifier: Apache-2.0
"""The engine's own paths, OpenAI's and Anthropic's."""

from handlers import openai
from serving.api.sessions import Sessions
from serving.inference.pipeline import Pipeline
from serving.inference.request import ClientRequest, HttpCall, inference_request
from serving.protocol import AUDIO_PATHS


class OpenAI:
    """Answers the engine's own paths."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def answer(self, call: HttpCall, pipeline: Pipeline) -> None:
        async def answer(client: ClientRequest) -> None:
            await self._sessions.join(client, pipeline)
            await answer_path(client, call.scope["path"], pipeline)

        async with pipeline.admit(call) as client:
            await pipeline.answer_once(client, call.receive, answer)


async def answer_path(client: ClientRequest, path: str, pipeline: Pipeline) -> None:
    """Answer a client's whole request as the engine's path does."""
    form = await pipeline.form(client, path) if path in AUDIO_PATHS else None
    background = client.record.caller.background
    if background:
        client.admitted.release_place()  # interactive requests have the places
    request = inference_request(
        *(client, pipeline.adapters),
        parse=openai.on(path),
        form=form,
        refusable=not background,
        background=background,
    )
    await pipeline.run(request)
