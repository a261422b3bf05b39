"""OpenAI completions and chat: the engine's own formats, so bodies and answers pass untouched."""

from handlers.records import EngineCall


def completions(body: bytes) -> EngineCall:
    return EngineCall("/v1/completions", body)


def chat(body: bytes) -> EngineCall:
    return EngineCall("/v1/chat/completions", body)
