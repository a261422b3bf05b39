# SPDX-License-Identifier: Apache-2.0
"""The engine's own paths, OpenAI's and Anthropic's."""

from handlers import openai
from serving.api.sessions import Sessions
from serving.inference.pipeline import Pipeline
from serving.inference.request import (
    SSE,
    ClientRequest,
    HttpCall,
    InferenceRequest,
    adapter_named,
)
from serving.protocol import AUDIO_PATHS


class OpenAI:
    """Answers the engine's own paths."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def answer(self, call: HttpCall, pipeline: Pipeline) -> None:
        async def answer(client: ClientRequest) -> None:
            await self._run(client, pipeline)

        async with pipeline.received(call) as client:
            await pipeline.answer_once(client, call.receive, answer)

    async def _run(self, client: ClientRequest, pipeline: Pipeline) -> None:
        scope = client.scope
        path = scope["path"]
        form = await pipeline.form(client, path) if path in AUDIO_PATHS else None
        fields = client.fields()
        background = client.record.caller.background
        if background:
            client.admitted.go()  # interactive requests have the places
        request = InferenceRequest(
            client=client,
            adapter=adapter_named(client, fields, pipeline.adapters),
            send=await self._sessions.joined(client),
            cancellation=client.admitted,
            body=client.body,
            fields=fields,
            framing=SSE,
            begun=client.admitted.go,
            parse=openai.on(scope["path"]),
            form=form,
            refusable=not background,
            background=background,
            writer=client.writer,
        )
        await pipeline.run(request)
