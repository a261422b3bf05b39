# SPDX-License-Identifier: Apache-2.0
"""Known names without effect, removed names, and refused names, each with the reason."""

from collections.abc import Mapping

_JAVA = "there is no Java server"
_BATCHING = "vLLM batches requests itself"
_COPIES = "all copies start at once, and OPTION_COPIES or SERVING_MAX_WORKERS limits them"
_ENGINES = "vLLM is the only engine"
_WORKER = "there is no separate Python worker"
_GONE = "vLLM has no such option any more"
_FORMATS = "the body and `Accept` decide on the answer's format"

UNUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "DEFAULT_JVM_OPTS",
            "JAVA_OPTS",
            "SAGEMAKER_MODEL_SERVER_VMARGS",
            "SERVING_JVM_OPTIONS",
            "SERVING_NUMBER_OF_NETTY_THREADS",
            "SERVING_APPLICATION",
            "SERVING_BLOCK_FACTORY",
            "SERVING_NETTY_CLIENT_THREADS",
            "SERVING_OPTS",
            "SERVING_PLUGIN_FOLDER",
            "SERVING_PREFER_DIRECT_BUFFER",
            "SERVING_TRANSLATOR_FACTORY",
        ),
        _JAVA,
    ),
    **dict.fromkeys(
        (
            "OPTION_BATCH_SIZE",
            "OPTION_USE_PASSIVE_WORKERS",
            "OPTION_WAITING_STEPS",
            "SAGEMAKER_MODEL_SERVER_WORKERS",
            "SERVING_BATCH_SIZE",
            "SERVING_GPU_REQUIRED_MEMORY_MB",
            "SERVING_GPU_RESERVED_MEMORY_MB",
            "SERVING_LOAD_ON_DEVICE",
            "SERVING_LOAD_ON_DEVICES",
            "SERVING_MAX_BATCH_DELAY",
            "SERVING_MAX_DYNAMIC_BATCH_SIZE",
            "SERVING_REQUIRED_MEMORY_MB",
            "SERVING_RESERVED_MEMORY_MB",
            "SERVING_RETRY_THRESHOLD",
            "SERVING_USE_PASSIVE_WORKERS",
            "SERVING_WORKERS",
        ),
        _BATCHING,
    ),
    **dict.fromkeys(
        (
            "SERVING_CPU_MAX_WORKERS",
            "SERVING_CPU_MIN_WORKERS",
            "SERVING_GPU_MIN_WORKERS",
            "SERVING_MAX_IDLE_TIME",
            "SERVING_MIN_WORKERS",
        ),
        _COPIES,
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
            "OPTION_HANDLER",
            "OPTION_HANDLE",
            "OPTION_IS_PEFT_MODEL",
            "OPTION_LOW_CPU_MEM_USAGE",
            "OPTION_PARALLEL_LOADING",
            "OPTION_PYTHONEXECUTABLE",
            "OPTION_PYTHON_EXECUTABLE",
        ),
        _WORKER,
    ),
    **dict.fromkeys(
        (
            "OPTION_DISABLE_ASYNC_OUTPUT_PROC",
            "OPTION_ENABLE_PROMPT_ADAPTER",
            "OPTION_LONG_LORA_SCALING_FACTORS",
            "OPTION_LORA_EXTRA_VOCAB_SIZE",
            "OPTION_MAX_PROMPT_ADAPTERS",
            "OPTION_MAX_PROMPT_ADAPTER_TOKEN",
            "OPTION_MULTI_STEP_STREAM_OUTPUTS",
            "OPTION_NUM_LOOKAHEAD_SLOTS",
            "OPTION_NUM_SCHEDULER_STEPS",
            "OPTION_PREEMPTION_MODE",
            "OPTION_QUANTIZATION_PARAM_PATH",
            "OPTION_SCHEDULER_DELAY_FACTOR",
            "OPTION_TOKENIZER_POOL_SIZE",
            "OPTION_TOKENIZER_POOL_TYPE",
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
            "OPTION_RECORD_ACCEPTANCE_RATE",
            "SERVING_LOG_REQUEST_METRIC",
            "SERVING_METRIC_DIMENSION",
            "SERVING_METRICS_AGGREGATION",
        ),
        "/metrics always has these series",
    ),
    "OPTION_ENV": "set its values as variables of the container",
    "OPTION_SESSIONS_S3URL": "OPTION_SESSIONS_PATH may be a disk that servers share",
    "SERVING_ALLOW_MULTI_STATUS": "/ping answers 200 or 503, for the one model",
    "SERVING_CHUNKED_READ_TIMEOUT": "OPTION_PREDICT_TIMEOUT bounds an answer as a whole",
    "SERVING_REQUEST_ID_HEADER_KEY": (
        "X-Amzn-SageMaker-Inference-Id and X-Request-Id name a request in the log"
    ),
    **dict.fromkeys(
        ("SAGEMAKER_HEALTH_CHECK_OVERRIDE", "SERVING_HEALTH_CHECK_OVERRIDE"),
        "/ping always fails when the engine does",
    ),
    **dict.fromkeys(
        ("SERVING_CORS_ALLOWED_HEADERS", "SERVING_CORS_ALLOWED_METHODS"),
        "all that the API has are allowed to SERVING_CORS_ALLOWED_ORIGIN",
    ),
    **dict.fromkeys(
        ("OPTION_MODEL_NAME", "OPTION_MODELNAME", "SERVING_MODEL_NAME"),
        "OPTION_SERVED_MODEL_NAME names the model",
    ),
    **dict.fromkeys(
        (
            "SAGEMAKER_ENV",
            "SAGEMAKER_MODULE_NAME",
            "SAGEMAKER_PROGRAM",
            "SAGEMAKER_SUBMIT_DIRECTORY",
        ),
        "they are the SageMaker toolkits'; your own code is a model.py beside the model",
    ),
    **dict.fromkeys(
        ("MODEL_CACHE_ROOT", "SAGEMAKER_ENABLE_CLOUDWATCH_METRICS", "SAGEMAKER_REGION"),
        "the SageMaker toolkits look at it, and no part of this server",
    ),
    "DJL_OFFLINE": "HF_HUB_OFFLINE=1 keeps the hub from being asked",
    "SAGEMAKER_CONTAINER_LOG_LEVEL": "OPTION_LOG_LEVEL sets the log's level",
    "OPTION_ENTRY_POINT": "OPTION_ENTRYPOINT names it",
    "OPTION_DEFAULT_ACCEPT": "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT is the default of `Accept`",
    "OPTION_MODEL_DIR": "it is where the files of the model are found to be",
    "SERVING_LOAD_MODELS": "OPTION_MODELS names several models",
    "SERVING_MODEL_URL_PATTERN": "OPTION_MODEL_ROOTS names the folders of models",
    "SERVING_WAIT_MODEL_LOADING": "/ping answers 503 until the model is ready",
}
"""LMI's names that are accepted but have no effect: name → the reason."""

_EACH_REQUEST = (
    "give it in each request; OPTION_OVERRIDE_GENERATION_CONFIG sets defaults for all of them"
)
_LENGTH = "set OPTION_MAX_MODEL_LEN, for prompt and answer together"
_NGRAM = (
    'set OPTION_SPECULATIVE_CONFIG={"method":"ngram","num_speculative_tokens":3,'
    '"prompt_lookup_max":4}'
)
_NEURON = "it is Neuron's, which Slipway does not run; remove it"
_TRTLLM = "it is TensorRT-LLM's, which Slipway does not run; remove it"
_OTHERS = "it is another framework's, which Slipway does not run; remove it"
_QUANTIZING = "nothing is quantised at the start; give a quantised model"
_PARTITION = "models are not partitioned ahead; remove it"

REMOVED: Mapping[str, str] = {
    "OPTION_CUDA_GRAPH_SIZES": "set OPTION_CUDAGRAPH_CAPTURE_SIZES",
    "OPTION_DEVICE": "the image decides: there is one for CPUs and one for GPUs",
    "OPTION_DISABLE_LOG_REQUESTS": "requests are logged with OPTION_ENABLE_LOG_REQUESTS=true only",
    "OPTION_DISABLE_MM_PREPROCESSOR_CACHE": "set OPTION_MM_PROCESSOR_CACHE_GB=0",
    "OPTION_DRAFT_MODEL_TP_SIZE": (
        'set draft_tensor_parallel_size in OPTION_SPECULATIVE_CONFIG, as {"model":"...",'
        '"num_speculative_tokens":3,"draft_tensor_parallel_size":1}'
    ),
    "OPTION_ENABLE_MULTIMODAL_ENCODER_DATA_PARALLEL": "set OPTION_MM_ENCODER_TP_MODE=data",
    "OPTION_ENABLE_REASONING": "OPTION_REASONING_PARSER alone switches it on",
    "OPTION_GUIDED_DECODING_BACKEND": (
        'set OPTION_STRUCTURED_OUTPUTS_CONFIG={"backend":"xgrammar"}'
    ),
    "OPTION_OVERRIDE_POOLER_CONFIG": "set OPTION_POOLER_CONFIG",
    "OPTION_POOLING": 'set OPTION_POOLER_CONFIG={"pooling_type":"CLS"}, or another type',
    "OPTION_RERANKING": "a model that ranks is known by its files, and answers on /v1/rerank",
    **dict.fromkeys(
        ("OPTION_DRAFT_MODEL_ID", "OPTION_SPECULATIVE_MODEL"), "set OPTION_SPECULATIVE_DRAFT_MODEL"
    ),
    "OPTION_SWAP_SPACE": "OPTION_LMCACHE_AUTO_CONFIG=true keeps KV caches in CPU memory",
    **dict.fromkeys(
        ("OPTION_ENGINE_USE_RAY", "OPTION_WORKER_USE_RAY"),
        "set OPTION_DISTRIBUTED_EXECUTOR_BACKEND=ray",
    ),
    **dict.fromkeys(
        ("OPTION_LOAD_IN_4BIT", "OPTION_LOAD_IN_8BIT"), "set OPTION_QUANTIZE=bitsandbytes"
    ),
    **dict.fromkeys(
        ("OPTION_MAX_CONTEXT_LEN_TO_CAPTURE", "OPTION_MAX_SEQ_LEN_TO_CAPTURE"),
        "CUDA graphs are limited by batch: set OPTION_MAX_CUDAGRAPH_CAPTURE_SIZE",
    ),
    **dict.fromkeys(("OPTION_NGRAM_PROMPT_LOOKUP_MAX", "OPTION_NGRAM_PROMPT_LOOKUP_MIN"), _NGRAM),
    **dict.fromkeys(
        ("OPTION_ROPE_SCALING", "OPTION_ROPE_THETA"),
        'set OPTION_HF_OVERRIDES={"rope_parameters":{...}}',
    ),
    **dict.fromkeys(
        ("OPTION_MAX_DRAFT_LEN", "OPTION_SPEC_LENGTH", "OPTION_SPECULATIVE_LENGTH"),
        "set OPTION_NUM_SPECULATIVE_TOKENS",
    ),
    **dict.fromkeys(
        (
            "OPTION_DO_SAMPLE",
            "OPTION_MAX_NEW_TOKENS",
            "OPTION_MAX_TOKENS",
            "OPTION_REPETITION_PENALTY",
            "OPTION_STOP_SEQUENCE",
            "OPTION_STOP_SEQUENCES",
            "OPTION_TEMPERATURE",
            "OPTION_TOP_K",
            "OPTION_TOP_P",
        ),
        _EACH_REQUEST,
    ),
    **dict.fromkeys(
        (
            "OPTION_CONTEXT_LENGTH",
            "OPTION_MAX_INPUT_LEN",
            "OPTION_MAX_INPUT_LENGTH",
            "OPTION_MAX_INPUT_TOKENS",
            "OPTION_MAX_OUTPUT_LEN",
            "OPTION_MAX_OUTPUT_SIZE",
            "OPTION_MAX_SEQ_LEN",
            "OPTION_MAX_TOTAL_TOKENS",
            "OPTION_N_POSITIONS",
        ),
        _LENGTH,
    ),
    "OPTION_MAX_NUM_SEQUENCES": "set OPTION_MAX_ROLLING_BATCH_SIZE",
    "OPTION_ENABLE_KV_CACHE_REUSE": "set OPTION_ENABLE_PREFIX_CACHING",
    "OPTION_KV_CACHE_FREE_GPU_MEM_FRACTION": "set OPTION_GPU_MEMORY_UTILIZATION",
    "OPTION_MAX_NUM_TOKENS": "set OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS",
    **dict.fromkeys(
        (
            "OPTION_BAICHUAN_MODEL_VERSION",
            "OPTION_BATCH_SCHEDULER_POLICY",
            "OPTION_CHATGLM_MODEL_VERSION",
            "OPTION_DECODING_STRATEGY",
            "OPTION_ENABLE_TRT_OVERLAP",
            "OPTION_GPT_MODEL_VERSION",
            "OPTION_LOGITS_DTYPE",
            "OPTION_MAX_BEAM_WIDTH",
            "OPTION_MULTI_BLOCK_MODE",
            "OPTION_MULTI_QUERY_MODE",
            "OPTION_NUM_CHECKPOINT_WORKERS",
            "OPTION_NUM_ENGINE_WORKERS",
            "OPTION_PAGED_ATTENTION",
            "OPTION_ROTARY_BASE",
            "OPTION_ROTARY_DIM",
            "OPTION_ROTARY_SCALING_FACTOR",
            "OPTION_ROTARY_SCALING_TYPE",
            "OPTION_SMOOTHQUANT_ALPHA",
            "OPTION_SMOOTHQUANT_PER_CHANNEL",
            "OPTION_SMOOTHQUANT_PER_TOKEN",
            "OPTION_TOKENS_PER_BLOCK",
            "OPTION_TRTLLM_CHECKPOINT_PATH",
            "OPTION_USE_CUSTOM_ALL_REDUCE",
            "OPTION_USE_FP8_CONTEXT_FMHA",
            "OPTION_USE_FUSED_MLP",
        ),
        _TRTLLM,
    ),
    **dict.fromkeys(
        (
            "OPTION_AMP",
            "OPTION_ATTENTION_LAYOUT",
            "OPTION_COLLECTIVES_LAYOUT",
            "OPTION_COMPILED_GRAPH_PATH",
            "OPTION_CONTEXT_LENGTH_ESTIMATE",
            "OPTION_DRAFT_MODEL_COMPILED_PATH",
            "OPTION_ENABLE_MIXED_PRECISION_ACCUMULATION",
            "OPTION_ENABLE_SATURATE_INFINITY",
            "OPTION_FUSE_QKV",
            "OPTION_GROUP_QUERY_ATTENTION",
            "OPTION_LOAD_SPLIT_MODEL",
            "OPTION_NEURON_OPTIMIZE_LEVEL",
            "OPTION_ON_DEVICE_EMBEDDING",
            "OPTION_OVERRIDE_NEURON_CONFIG",
            "OPTION_SPLIT_MODEL_PATH",
            "OPTION_UNROLL",
        ),
        _NEURON,
    ),
    **dict.fromkeys(
        (
            "OPTION_CHECKPOINT",
            "OPTION_ENABLE_CUDA_GRAPH",
            "OPTION_EXTRAFILES",
            "OPTION_MAPLOCATION",
            "OPTION_MAX_SPARSITY",
            "OPTION_MAX_SPLITS",
            "OPTION_MODEL_FORMAT",
            "OPTION_SKOPS_TRUSTED_TYPES",
            "OPTION_TRITON_MODE",
            "OPTION_TRUST_INSECURE_MODEL_FILES",
            "OPTION_USE_STABLE_DIFFUSION",
        ),
        _OTHERS,
    ),
    **dict.fromkeys(
        (
            "OPTION_AWQ_BLOCK_SIZE",
            "OPTION_AWQ_CALIB_SIZE",
            "OPTION_AWQ_FORMAT",
            "OPTION_AWQ_IGNORE_LAYERS",
            "OPTION_AWQ_MM_VERSION",
            "OPTION_AWQ_WEIGHT_BIT_WIDTH",
            "OPTION_AWQ_ZERO_POINT",
            "OPTION_CALIB_BATCH_SIZE",
            "OPTION_CALIB_SIZE",
            "OPTION_FP8_IGNORE",
            "OPTION_FP8_SCHEME",
            "OPTION_Q_FORMAT",
        ),
        _QUANTIZING,
    ),
    **dict.fromkeys(("OPTION_LOAD_BY_SHARD", "OPTION_SAVE_MP_CHECKPOINT_PATH"), _PARTITION),
    **dict.fromkeys(
        (
            "OPTION_DISABLE_ACCESS_LOG_FOR_ENDPOINTS",
            "OPTION_DISABLE_UVICORN_ACCESS_LOG",
            "OPTION_UVICORN_LOG_LEVEL",
        ),
        "Slipway has its own log, and OPTION_LOG_LEVEL sets its level",
    ),
    **dict.fromkeys(
        (
            "OPTION_DP_SUPERVISOR_PROBE_FAILURE_THRESHOLD",
            "OPTION_DP_SUPERVISOR_PROBE_INTERVAL_S",
            "OPTION_DP_SUPERVISOR_PROBE_TIMEOUT_S",
        ),
        "vLLM's supervisor of data-parallel servers is not used",
    ),
    **dict.fromkeys(
        ("OPTION_DISABLE_FASTAPI_DOCS", "OPTION_ENABLE_OFFLINE_DOCS"),
        "there are no such pages",
    ),
    **dict.fromkeys(
        ("OPTION_H11_MAX_HEADER_COUNT", "OPTION_H11_MAX_INCOMPLETE_EVENT_SIZE"),
        "Slipway has its own limits of requests' heads",
    ),
    "OPTION_API_SERVER_COUNT": "one process answers HTTP; the router spreads load over servers",
    "OPTION_ENABLE_REQUEST_ID_HEADERS": "every answer has X-Request-Id",
    "OPTION_ENABLE_SSL_REFRESH": "TLS certificates are always read again when they change",
    "OPTION_SHUTDOWN_TIMEOUT": "requests are drained within 23 seconds of SIGTERM",
    "OPTION_HUGGINGFACE_TOKEN": "set HF_TOKEN",
    "OPTION_S3URL": "set OPTION_MODEL_ID to it",
}
"""Accepted names of LMI's and of older versions of vLLM: name → the alternative."""

# vLLM options that belong to its own HTTP server, which Slipway replaces.
_HTTP = "its own HTTP server is not used: Slipway answers HTTP itself"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "allow_credentials",
            "allowed_headers",
            "allowed_methods",
            "allowed_origins",
            "data_parallel_supervisor_port",
            "grpc",
            "grpc_port",
            "headless",
            "middleware",
            "root_path",
            "ssl_ca_certs",
            "ssl_cert_reqs",
            "ssl_certfile",
            "ssl_ciphers",
            "ssl_keyfile",
            "uds",
        ),
        _HTTP,
    ),
    "enable_server_load_tracking": (
        "Slipway has no /load; slipway_requests_in_flight on /metrics has the number"
    ),
    "enable_tokenizer_info_endpoint": (
        "Slipway has no /tokenizer_info; /tokenize and /detokenize answer"
    ),
    **dict.fromkeys(
        ("enable_scale_out", "tokens_only"),
        "Slipway has no paths for tokens instead of text; OPTION_SERVER_ROLE splits prefill "
        "from decoding",
    ),
    "spec_method": "OPTION_SPECULATIVE_CONFIG takes the method",
}
"""vLLM options that cannot be set, each with the reason."""
