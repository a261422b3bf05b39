# SPDX-License-Identifier: Apache-2.0
"""Names on the wire, of `serve` and of `route`: headers, in the case in which ASGI and the router
compare them, and paths.

Sources: Amazon SageMaker's runtime API (InvokeEndpoint) and its container contract, OpenAI's API,
and Slipway's own.
"""

import re
from collections.abc import Iterable

REQUEST_ID = b"x-request-id"
INFERENCE_ID = b"x-amzn-sagemaker-inference-id"
ADAPTER_ID = b"x-amzn-sagemaker-adapter-identifier"
ADAPTER_IN_QUERY = "adapter"
ADAPTER_ALIAS = b"x-amzn-sagemaker-adapter-alias"
SESSION_ID = b"x-amzn-sagemaker-session-id"
NEW_SESSION_ID = b"x-amzn-sagemaker-new-session-id"
CLOSED_SESSION_ID = b"x-amzn-sagemaker-closed-session-id"
SAGEMAKER = b"x-amzn-sagemaker-"
"""What all of SageMaker's begin with."""
CUSTOM_ATTRIBUTES = b"x-amzn-sagemaker-custom-attributes"
CUSTOM_ROUTE = "route="
"""The custom attribute by which AWS's vLLM image is asked for another path than /invocations."""
ANTHROPIC_VERSION = b"anthropic-version"
"""Every request of Anthropic's clients has it."""
VLLM_SESSION_ID = b"x-session-id"
"""What vLLM calls a conversation."""

DESTINATION = b"x-gateway-destination-endpoint"
"""Where a gateway sends a request, by its endpoint picker's word: IP:PORT[,IP:PORT ...]."""
DESTINATION_SUBSET = "x-gateway-destination-endpoint-subset"
DESTINATION_SERVED = "x-gateway-destination-endpoint-served"
BILLING = "x-anthropic-billing-header"
"""A system prompt of Claude Code's begins with it and a text that is another one in every request.
vLLM leaves that out.
"""
OBJECTIVE = b"x-gateway-inference-objective"
"""Names the InferenceObjective of a request, which says how important it is."""

FORMATTED = b"x-slipway-formatted"
"""A stream has it that a model.py has made, or whose prompt it has."""
HELD_MS = b"x-slipway-held-ms"
"""Milliseconds that a router held a request until a server had room for it."""
IGNORED = b"x-slipway-ignored"
"""Names the keys of a request that had no effect on its answer."""
ROUTE = b"x-slipway-route"
"""Asks a router, by any value, why it chose the replica that answers; the answer says so."""

AUTHORIZATION = b"authorization"
API_KEY = b"x-api-key"
"""In which Anthropic's clients send a key."""
IDENTITY = b"x-slipway-identity"
"""Says who sends a request: a router's, signed with the secret that it shares with its servers. A
client's own goes nowhere.
"""
CHALLENGE = b"x-slipway-challenge"
"""By which a router asks /ping whether a server has their secret."""
INTRODUCTION = b"x-slipway-introduction"
"""The server's answer to that, which says its name."""

TRACEPARENT = b"traceparent"
TRACE_CONTEXT = (TRACEPARENT, b"tracestate")
"""W3C's trace context, level 1."""

RATE_LIMIT = b"x-ratelimit-"
"""What OpenAI's headers of limits begin with."""

PING = "/ping"
HEALTH = "/health"
"""What vLLM's own server calls /ping, and load balancers before vLLM's image ask."""
PROBES = (PING, HEALTH)
METRICS = "/metrics"
SERVER_METRICS = "/server/metrics"
"""What LMI calls /metrics."""
SERVER_LOGGING = "/server/logging"
MANAGEMENT = ("/models", "/workflows")
MANAGED = ("/models/{model}", "/workflows/{model}")
"""LMI's management API."""
HANDLER = b"handler"
"""By this LMI's server tells its Python side which function is meant. It is no client's to send."""
REPLICAS = "/replicas"
UI = "/ui"
UI_STATUS = f"{UI}/status"
"""The page for people, and what it shows that nothing else says. The page itself holds nothing."""
LIVE = "/livez"
"""Whether a router works, whatever its replicas do."""
ROUTER_PROBES = (*PROBES, LIVE)
INVOCATIONS = (
    *("/invocations", "/predictions"),
    *("/predictions/{model}", "/models/{model}/invoke"),
)
"""The paths of LMI's that are one: the last two are those of its server and of SageMaker's
multi-model endpoints.
"""
ADAPTERS = ("/adapters", "/models/{model}/adapters")


def _pattern(paths: Iterable[str]) -> str:
    return "|".join(re.sub("{[^}]*}", "[^/]+", path) for path in paths)


INVOCATIONS_PATH = _pattern(INVOCATIONS)
ADAPTERS_PATH = _pattern(ADAPTERS)
MANAGEMENT_PATH = _pattern((*MANAGEMENT, *MANAGED, SERVER_LOGGING))
MANAGED_PATH = _pattern(MANAGED)
"""The same as regular expressions."""
OPENAI = "/v1/"
"""What all of OpenAI's begin with."""
CHAT_COMPLETIONS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
"""Both Anthropic's."""
AGENTS_PATHS = (RESPONSES, MESSAGES, COUNT_TOKENS)
"""Those whose streams have named events."""
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
AUDIO_PATHS = (TRANSCRIPTIONS, TRANSLATIONS)
"""Those that take forms with a file."""
RERANK, SCORE = "/rerank", "/score"
RERANK_PATHS = (RERANK, "/v1/rerank", "/v2/rerank")
"""Jina's and Cohere's, which are the same."""
SCORE_PATHS = (SCORE, "/v1/score")
PAIRS_PATHS = (*RERANK_PATHS, *SCORE_PATHS)
"""Those that compare texts."""
CLASSIFY = "/classify"
POOLING = "/pooling"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
TOKENIZER_PATHS = (TOKENIZE, DETOKENIZE)
NOT_GENERATED = frozenset(
    (COUNT_TOKENS, EMBEDDINGS, CLASSIFY, POOLING, *PAIRS_PATHS, *TOKENIZER_PATHS)
)
"""Those whose answers no model that generates would write, and whose texts no KV cache has."""
UNFORMATTED_PATHS = (
    *(*AGENTS_PATHS, *AUDIO_PATHS),
    *(*PAIRS_PATHS, CLASSIFY, POOLING, *TOKENIZER_PATHS),
)
"""Those whose shapes no formatter of a model.py knows."""
ENGINE_PATHS = (CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS, *UNFORMATTED_PATHS)
"""The engine's own paths that are answered. No other path of the engine's is reachable."""
OTHERS_PATHS = (
    # OpenAI's
    *("/v1/audio/speech", "/v1/images/generations", "/v1/images/edits", "/v1/images/variations"),
    "/v1/moderations",
    # vLLM's
    *("/v1/completions/render", "/v1/chat/completions/render", "/inference/v1/generate"),
    *("/v1/chat/completions/batch", "/v2/embed", "/generative_scoring"),
    # SGLang's and Text Generation Inference's
    *("/generate", "/generate_stream", "/encode", "/v1/tokenize", "/v1/detokenize"),
    *("/v1/classify", "/chat_tokenize"),
    # Text Embeddings Inference's
    *("/embed", "/embed_all", "/embed_sparse", "/embeddings", "/predict", "/similarity", "/decode"),
    # llama.cpp's
    *("/completion", "/completions", "/chat/completions", "/infill", "/embedding"),
    *("/apply-template", "/reranking", "/v1/reranking"),
    # Ollama's
    *("/api/generate", "/api/chat", "/api/embed", "/api/embeddings"),
)
"""Inference paths of other servers, which a router passes on and `serve` does not have."""
MODELS = "/v1/models"
FILES = "/v1/files"
BATCHES = "/v1/batches"
BATCH_ENDPOINTS = (CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS, RESPONSES)
"""Whose requests the lines of a batch may be."""
KV_EVENT_SOURCES = "/kv_event_sources"
EXECUTION_PARAMETERS = "/execution-parameters"


def is_api(path: str) -> bool:
    """Whether a path is of one of the engine's APIs."""
    return path.startswith(OPENAI) or path in ENGINE_PATHS


def shown(name: bytes) -> str:
    """A header's name as it is written for people: X-Amzn-SageMaker-Session-Id."""
    return name.decode().title().replace("Sagemaker", "SageMaker")
