# SPDX-License-Identifier: Apache-2.0
"""Names that are known and do nothing here, or are refused, each with the reason."""

from collections.abc import Mapping

_JAVA = "there is no Java server"
_BATCHING = "vLLM batches requests itself, in one copy of the model"
_ENGINES = "vLLM is the only engine"
_WORKER = "there is no separate Python worker"
_GONE = "vLLM has no such option any more"
_FORMATS = "the body and `Accept` decide on the answer's format"
_LATER = "Slipway does not act on it yet"

UNUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "JAVA_OPTS",
            "SAGEMAKER_MODEL_SERVER_VMARGS",
            "SERVING_JVM_OPTIONS",
            "SERVING_NUMBER_OF_NETTY_THREADS",
            "SERVING_NETTY_CLIENT_THREADS",
            "SERVING_PLUGIN_FOLDER",
            "SERVING_PREFER_DIRECT_BUFFER",
        ),
        _JAVA,
    ),
    **dict.fromkeys(
        (
            "SAGEMAKER_NUM_MODEL_WORKERS",
            "SERVING_BATCH_SIZE",
            "SERVING_LOAD_ON_DEVICES",
            "SERVING_MAX_BATCH_DELAY",
            "SERVING_MAX_IDLE_TIME",
            "SERVING_MAX_WORKERS",
            "SERVING_MIN_WORKERS",
            "SERVING_RESERVED_MEMORY_MB",
            "SERVING_RETRY_THRESHOLD",
        ),
        _BATCHING,
    ),
    **dict.fromkeys(
        (
            "OPTION_ASYNC_MODE",
            "OPTION_ENGINE",
            "OPTION_MPI_MODE",
            "OPTION_ROLLING_BATCH",
            "SERVING_ENGINE",
            "SERVING_FEATURES",
        ),
        _ENGINES,
    ),
    **dict.fromkeys(
        (
            "OPTION_DEVICE_MAP",
            "OPTION_ENABLE_VENV",
            "OPTION_ENV",
            "OPTION_HANDLER",
            "OPTION_LOW_CPU_MEM_USAGE",
            "OPTION_PARALLEL_LOADING",
            "OPTION_PYTHONEXECUTABLE",
            "OPTION_PYTHON_EXECUTABLE",
        ),
        _WORKER,
    ),
    **dict.fromkeys(
        (
            "OPTION_ENABLE_REASONING",
            "OPTION_LONG_LORA_SCALING_FACTORS",
            "OPTION_LORA_EXTRA_VOCAB_SIZE",
            "OPTION_SWAP_SPACE",
            "OPTION_USE_V2_BLOCK_MANAGER",
        ),
        _GONE,
    ),
    **dict.fromkeys(
        (
            "OPTION_BEDROCK_COMPAT",
            "OPTION_ENABLE_STREAMING",
            "OPTION_OUTPUT_FORMATTER",
            "OPTION_TGI_COMPAT",
        ),
        _FORMATS,
    ),
    **dict.fromkeys(
        (
            "OPTION_SESSIONS_S3URL",
            "SAGEMAKER_HEALTH_CHECK_OVERRIDE",
            "SERVING_ALLOW_MULTI_STATUS",
            "SERVING_CHUNKED_READ_TIMEOUT",
            "SERVING_REQUEST_ID_HEADER_KEY",
        ),
        _LATER,
    ),
    **dict.fromkeys(
        ("SERVING_CORS_ALLOWED_HEADERS", "SERVING_CORS_ALLOWED_METHODS"),
        "all that the API has are allowed to SERVING_CORS_ALLOWED_ORIGIN",
    ),
    "SAGEMAKER_MULTI_MODEL": "one server serves one model",
    "SERVING_HEALTH_CHECK_OVERRIDE": "/ping always fails when the engine does",
    "SERVING_LOAD_MODELS": "one server serves one model",
    "SERVING_MODEL_URL_PATTERN": "one server serves one model",
    "SERVING_WAIT_MODEL_LOADING": "/ping answers 503 until the model is ready",
}
"""LMI's names that are accepted and do nothing: name → why."""

# vLLM options that belong to its own HTTP server, which Slipway replaces.
_HTTP = "its own HTTP server is not used: Slipway answers HTTP itself"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "allow_credentials",
            "allowed_headers",
            "allowed_methods",
            "allowed_origins",
            "api_key",
            "api_server_count",
            "config",
            "data_parallel_supervisor_port",
            "disable_access_log_for_endpoints",
            "disable_fastapi_docs",
            "disable_uvicorn_access_log",
            "dp_supervisor_probe_failure_threshold",
            "dp_supervisor_probe_interval_s",
            "dp_supervisor_probe_timeout_s",
            "enable_offline_docs",
            "enable_request_id_headers",
            "enable_ssl_refresh",
            "grpc",
            "grpc_port",
            "h11_max_header_count",
            "h11_max_incomplete_event_size",
            "headless",
            "middleware",
            "root_path",
            "ssl_ca_certs",
            "ssl_cert_reqs",
            "ssl_certfile",
            "ssl_ciphers",
            "ssl_keyfile",
            "uds",
            "uvicorn_log_level",
        ),
        _HTTP,
    ),
    "spec_method": "OPTION_SPECULATIVE_CONFIG takes the method",
    "shutdown_timeout": "Slipway drains requests itself, within 23 seconds of SIGTERM",
}
"""vLLM options that cannot be given, each with the reason."""
