# SPDX-License-Identifier: Apache-2.0
"""Names on the wire, of `serve` and of `route`: paths, and headers in the lower case that ASGI and
the router compare.

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
"""The prefix of all SageMaker headers."""
CUSTOM_ATTRIBUTES = b"x-amzn-sagemaker-custom-attributes"
CUSTOM_ROUTE = "route="
"""The custom attribute that asks AWS's vLLM image for a path other than /invocations."""
ANTHROPIC_VERSION = b"anthropic-version"
"""Every request of Anthropic's clients has it."""
VLLM_SESSION_ID = b"x-session-id"
"""vLLM's id of a conversation, and OpenCode's."""
CLAUDE_SESSION_ID = b"x-claude-code-session-id"
CLAUDE_AGENT_ID = b"x-claude-code-agent-id"
"""Claude Code's id of a sub-agent. A sub-agent has a separate conversation."""
CONVERSATIONS = (
    b"x-dynamo-session-id",
    *(CLAUDE_AGENT_ID, CLAUDE_SESSION_ID),
    *(b"thread-id", b"session-id", b"session_id"),
    *(VLLM_SESSION_ID, b"x-session-affinity", b"x-litellm-session-id"),
)
"""Headers with a conversation's id, in their order of precedence: of Dynamo, Claude Code, Codex and
pi, vLLM, AIPerf, and LiteLLM with OpenHands.
"""
PARENTS = (
    *(b"x-dynamo-parent-session-id", b"x-claude-code-parent-agent-id"),
    *(b"x-codex-parent-thread-id", b"x-parent-session-id"),
)
"""Headers with the id of the conversation that began this one: of the same, and OpenCode."""
FINALS = (b"x-dynamo-session-final", b"x-slipway-session-final")
"""Headers with the value `true` for the last turn of a conversation."""
CACHE = b"x-slipway-cache"
"""With any value, asks for the server's reading of the hints about caches; the answer has it in the
same header.
"""
DOCUMENT_ORDER = b"x-slipway-document-order"
"""In an answer: the order of the request's documents that was served (cache_hints/documents.py)."""

DESTINATION = b"x-gateway-destination-endpoint"
"""The replica that the endpoint picker chose for the gateway: IP:PORT[,IP:PORT ...]."""
DESTINATION_SUBSET = "x-gateway-destination-endpoint-subset"
DESTINATION_SERVED = "x-gateway-destination-endpoint-served"
BILLING = "x-anthropic-billing-header"
"""Claude Code's system prompts begin with it, and with a text that differs in every request. vLLM
removes that text.
"""
OBJECTIVE = b"x-gateway-inference-objective"
"""Names the InferenceObjective of a request, which sets its priority."""

FORMATTED = b"x-slipway-formatted"
"""Marks a stream whose prompt or events a model.py has formatted."""
HELD_MS = b"x-slipway-held-ms"
"""Milliseconds that a router held a request until a server had room for it."""
SLO_TTFT_MS = b"x-slipway-slo-ttft-ms"
"""A request's objective for the time to the first token, in milliseconds, for a router."""
IGNORED = b"x-slipway-ignored"
"""Names the keys of a request that had no effect on its answer."""
ROUTE = b"x-slipway-route"
"""With any value, asks a router why it chose the replica. The answer has the reason in it."""

AUTHORIZATION = b"authorization"
API_KEY = b"x-api-key"
"""Anthropic's clients send a key in it."""
IDENTITY = b"x-slipway-identity"
"""Names the sender of a request. A router signs it with the secret that it shares with its servers.
A router removes a client's own header.
"""
CHALLENGE = b"x-slipway-challenge"
"""A router's challenge to /ping: does the server have their secret?"""
INTRODUCTION = b"x-slipway-introduction"
"""The server's answer to the challenge, with its name."""

TRACEPARENT = b"traceparent"
TRACE_CONTEXT = (TRACEPARENT, b"tracestate")
"""W3C's trace context, level 1."""

RATE_LIMIT = b"x-ratelimit-"
"""The prefix of OpenAI's headers of limits."""

PING = "/ping"
HEALTH = "/health"
"""The name of /ping in vLLM's server. Load balancers of vLLM's image ask it."""
PROBES = (PING, HEALTH)
METRICS = "/metrics"
SERVER_METRICS = "/server/metrics"
"""LMI's name of /metrics."""
SERVER_LOGGING = "/server/logging"
MANAGEMENT = ("/models", "/workflows")
MANAGED = ("/models/{model}", "/workflows/{model}")
"""LMI's management API."""
HANDLER = b"handler"
"""LMI's server passes the name of a handler's function in it. Clients must not send it."""
REPLICAS = "/replicas"
UI = "/ui"
UI_STATUS = f"{UI}/status"
"""The web page, and the path that it reads its data from. The page itself has no data."""
LIVE = "/livez"
"""Whether a router works, whatever the state of its replicas."""
ROUTER_PROBES = (*PROBES, LIVE)
INVOCATIONS = (
    *("/invocations", "/predictions"),
    *("/predictions/{model}", "/models/{model}/invoke"),
)
"""LMI's paths for one and the same operation. The last two are those of LMI's server and of
SageMaker's multi-model endpoints.
"""
ADAPTERS = ("/adapters", "/models/{model}/adapters")
KV_SESSION = "/kv_sessions/{id}"
KV_PREFETCH = f"{KV_SESSION}/prefetch"
"""A conversation's KV in the tiers, and its way into memory."""


def _pattern(paths: Iterable[str]) -> str:
    return "|".join(re.sub("{[^}]*}", "[^/]+", path) for path in paths)


INVOCATIONS_PATH = _pattern(INVOCATIONS)
ADAPTERS_PATH = _pattern(ADAPTERS)
MANAGEMENT_PATH = _pattern((*MANAGEMENT, *MANAGED, SERVER_LOGGING))
MANAGED_PATH = _pattern(MANAGED)
KV_SESSION_PATH = _pattern((KV_SESSION,))
KV_PREFETCH_PATH = _pattern((KV_PREFETCH,))
"""The same as regular expressions."""
OPENAI = "/v1/"
"""The prefix of OpenAI's paths."""
CHAT_COMPLETIONS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
"""Both Anthropic's."""
AGENTS_PATHS = (RESPONSES, MESSAGES, COUNT_TOKENS)
"""Paths whose streams have named events."""
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
AUDIO_PATHS = (TRANSCRIPTIONS, TRANSLATIONS)
"""Paths that accept forms with a file."""
RERANK, SCORE = "/rerank", "/score"
RERANK_PATHS = (RERANK, "/v1/rerank", "/v2/rerank")
"""Jina's and Cohere's paths, for the same operation."""
SCORE_PATHS = (SCORE, "/v1/score")
PAIRS_PATHS = (*RERANK_PATHS, *SCORE_PATHS)
"""Paths that compare texts."""
CLASSIFY = "/classify"
POOLING = "/pooling"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
TOKENIZER_PATHS = (TOKENIZE, DETOKENIZE)
NOT_GENERATED = frozenset(
    (COUNT_TOKENS, EMBEDDINGS, CLASSIFY, POOLING, *PAIRS_PATHS, *TOKENIZER_PATHS)
)
"""Paths that generate no text, and whose texts are in no KV cache."""
UNFORMATTED_PATHS = (
    *(*AGENTS_PATHS, *AUDIO_PATHS),
    *(*PAIRS_PATHS, CLASSIFY, POOLING, *TOKENIZER_PATHS),
)
"""Paths whose formats no formatter of a model.py knows."""
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
"""Inference paths of other servers. A router passes them on; `serve` does not have them."""
MODELS = "/v1/models"
FILES = "/v1/files"
BATCHES = "/v1/batches"
BATCH_ENDPOINTS = (CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS, RESPONSES)
"""Paths of the requests in a batch's lines."""
KV_EVENT_SOURCES = "/kv_event_sources"
EXECUTION_PARAMETERS = "/execution-parameters"


def is_api(path: str) -> bool:
    """Whether a path belongs to one of the engine's APIs."""
    return path.startswith(OPENAI) or path in ENGINE_PATHS


def shown(name: bytes) -> str:
    """Return a header's name in its usual case: X-Amzn-SageMaker-Session-Id."""
    return name.decode().title().replace("Sagemaker", "SageMaker")
