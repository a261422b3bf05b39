# SPDX-License-Identifier: Apache-2.0
"""Every option, declared once: its names, reader, default, section and help.

`OPTION_*` and the `SERVING_*`, `SAGEMAKER_*` and `HF_*` names beside it are the vocabulary of
Amazon SageMaker's LMI container, which took some from Hugging Face's Text Generation Inference.
Every vLLM option that is not declared here can be given under its own name as `OPTION_<NAME>`;
`vllm_options.json` lists them. Names without effect are in `ignored.py`.
"""

import dataclasses
import enum
import functools
import ipaddress
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lmi_config.options.ignored import REFUSED, REMOVED, UNUSED
from lmi_config.options.parsers import (
    Reader,
    adapter_list,
    address,
    amount,
    at_most,
    boolean,
    cache_source,
    choice,
    compilation,
    copies,
    counts,
    degree,
    dtype,
    entry_point,
    fraction,
    https_url,
    integer,
    inverted,
    json_object,
    key,
    kind,
    log_level,
    long_key,
    mebibytes,
    model_len,
    models,
    one_of,
    rate,
    replicas,
    repos,
    routed_paths,
    size,
    some_of,
    store,
    strictness,
    switch,
    task,
    text,
    words,
)

PREFIX = "OPTION_"
VLLM_PREFIX = "SM_VLLM_"
"""The prefix of AWS's own vLLM container, before the name of a vLLM option."""

SELF_SIGNED = "self-signed"
"""The value for a certificate that is generated at the start."""
MODEL_STORE = "/opt/ml/model"
"""The folder that SageMaker puts a model into before it starts the container. Slipway never writes
to it."""

REQUIREMENTS = "DISALLOW_REQUIREMENTS_TXT"
PICKLE_FILES = "DISALLOW_PICKLE_FILES"
REMOTE_CODE = "DISALLOW_TRUST_REMOTE_CODE"
SCRIPTS = "DISALLOW_CUSTOM_INFERENCE_SCRIPTS"
TEMPLATE = "DISALLOW_CHAT_TEMPLATE"
"""These are the controls of SageMaker's secure mode."""

SAGEMAKER_WHOLE_S, SAGEMAKER_STREAM_S = 55, 470
"""Under SageMaker's limits, 60 s for a whole answer and 8 min for a stream, with time to tell."""

LORA_DEFAULTS: Mapping[str, Any] = {"max_loras": 4, "max_lora_rank": 16}
"""LMI's values for vLLM when `enable_lora` is on; vLLM's own defaults are 1 and 16."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's choices of max_lora_rank."""
LOAD_FORMATS = (
    *("auto", "hf", "dummy", "fastsafetensors", "instanttensor", "ipc_cache", "mistral"),
    *("modelexpress", "npcache", "pt", "runai_streamer", "runai_streamer_sharded", "safetensors"),
    *("sharded_state", "tensorizer"),
)
"""vLLM's choices of load_format (vllm/model_executor/model_loader)."""
GPU_MEMORY_UTILIZATION = 0.92
"""vLLM's default of gpu_memory_utilization."""
KV_ON_CPU = 4 * 1024**3
"""The most that the engine's KV cache takes without a GPU where nothing sizes it, in bytes."""
SPECULATIVE_TOKENS = 3
"""Tokens that a draft proposes where neither the operator nor the draft says how many."""


class Section(enum.Enum):
    """A part of the reference page, in the page's order, by its heading."""

    MODEL = "Model"
    SERVER = "Server"
    DEVICES = "Devices and memory"
    BATCHING = "Batching"
    BATCHES = "Files and batches"
    KV_TIERS = "KV cache tiers"
    SPECULATION = "Speculative decoding"
    LORA = "LoRA adapters"
    ROUTER = "Router"
    ACCESS = "Keys, limits and TLS"
    SECURE = "Secure mode"
    CONFIGURATION = "Configuration itself"


_OF_ENGINE = (Section.DEVICES, Section.BATCHING, Section.KV_TIERS, Section.SPECULATION)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """The declaration of one option.

    names: environment variables that set it; the first one that is set wins.
    converted: names with another unit, each with its own reader. They come last, except
    SAGEMAKER_* names, which come first.
    vllm: the vLLM option that it sets. `OPTION_<VLLM>` and `SM_VLLM_<VLLM>` are then further names,
    and must agree with the others.
    default_text: the value without the option, if `default` does not show it.
    secret: true if no log and no plan may show its value.
    untrusted: true if a file in an untrusted channel may set it in secure mode. Such an option
    neither runs code, nor uses another path or host, nor lets clients do so.
    """

    names: tuple[str, ...]
    read: Reader
    section: Section
    help: str
    vllm: str | None = None
    converted: Mapping[str, Reader] = dataclasses.field(default_factory=dict)
    default: Any = None
    default_text: str | None = None
    secret: bool = False
    untrusted: bool = False

    @property
    def name(self) -> str:
        """The name to show: LMI's, if there are several."""
        return next((name for name in self.names if name.startswith(PREFIX)), self.names[0])

    @property
    def all_names(self) -> tuple[str, ...]:
        return (*self.names, *self.converted)


def _option(read: Reader, *names: str, default: Any = None, **about: Any) -> Any:
    """A field of Settings. about: as for Option."""
    option = Option(names=names, read=read, default=default, **about)
    return dataclasses.field(default=default, metadata={"option": option})


_STATUS = integer(400, 599)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The operator's options, parsed and validated. `settings.read()` makes it."""

    model_id: str = _option(
        text,
        "HF_MODEL_ID",
        "OPTION_MODEL_ID",
        section=Section.MODEL,
        default=MODEL_STORE,
        vllm="model",
        help="The model: a local folder, an `s3://` prefix or a Hugging Face hub id.",
    )
    revision: str | None = _option(
        text,
        "HF_REVISION",
        "OPTION_REVISION",
        section=Section.MODEL,
        vllm="revision",
        default_text="the default branch",
        help="Branch, tag or commit of a hub model.",
    )
    task: str = _option(
        task,
        "HF_TASK",
        "OPTION_TASK",
        section=Section.MODEL,
        untrusted=True,
        default="auto",
        help="The model's task, also under the hub's and older vLLM's names. `auto` and unknown "
        "tasks follow the model. `text-embedding` and `feature-extraction` make embeddings with "
        "a generative model; `score` and `reward` use the model's own task.",
    )
    served_model_name: tuple[str, ...] = _option(
        words,
        "OPTION_SERVED_MODEL_NAME",
        section=Section.MODEL,
        untrusted=True,
        default=(),
        default_text="the hub id or the folder's name, `lmi`, and the folder or prefix itself",
        vllm="served_model_name",
        help="Model names that requests may use. Answers and metrics show the first one.",
    )
    endpoint_name: str | None = _option(
        text,
        "OPTION_ENDPOINT_NAME",
        section=Section.MODEL,
        default_text="none",
        help="An additional model name: the SageMaker endpoint's, which OpenAI clients send as "
        "`model`.",
    )
    models: Mapping[str, Mapping[str, str]] | None = _option(
        models,
        "OPTION_MODELS",
        section=Section.MODEL,
        default_text="one model",
        help="Several models, as JSON, or as `models:` in the file of `OPTION_CONFIG_FILE`: name → "
        "options (docs/guides/several_models.md). A model is loaded at its first request.",
    )
    multi_model: bool = _option(
        boolean,
        "SAGEMAKER_MULTI_MODEL",
        section=Section.MODEL,
        default=False,
        help="Start without a model: SageMaker's calls to `/models` load and unload models.",
    )
    models_memory: int | None = _option(
        size,
        "OPTION_MODELS_MEMORY",
        section=Section.MODEL,
        default_text="the free memory",
        help="Memory of the container for all of several models that run, in bytes, such as 24G.",
    )
    model_roots: tuple[str, ...] = _option(
        words,
        "OPTION_MODEL_ROOTS",
        section=Section.MODEL,
        default=("/opt/ml/models",),
        help="Comma-separated folders that models of calls to `/models` may be in.",
    )
    normalize: bool = _option(
        boolean,
        "OPTION_NORMALIZE",
        section=Section.MODEL,
        untrusted=True,
        default=True,
        help="Normalise embeddings of `inputs` to length 1.",
    )
    dtype: str = _option(
        dtype,
        "OPTION_DTYPE",
        section=Section.MODEL,
        untrusted=True,
        default="auto",
        vllm="dtype",
        help="Data type of the weights and activations: auto, fp32, fp16, bf16.",
    )
    quantize: str | None = _option(
        text,
        "OPTION_QUANTIZE",
        "HF_MODEL_QUANTIZE",
        section=Section.MODEL,
        untrusted=True,
        vllm="quantization",
        default_text="the model's own",
        help="Quantisation of the weights: awq or gptq for files with that quantisation, "
        "fp8_per_tensor to quantise at the start, or another method of vLLM.",
    )
    load_format: str = _option(
        choice(*LOAD_FORMATS),
        "OPTION_LOAD_FORMAT",
        section=Section.MODEL,
        untrusted=True,
        default="auto",
        vllm="load_format",
        help="Load format of the weights; with GPUs, the plan decides by default. `dummy` makes "
        "random weights, for benchmarks.",
    )
    trust_remote_code: bool = _option(
        boolean,
        "OPTION_TRUST_REMOTE_CODE",
        "HF_MODEL_TRUST_REMOTE_CODE",
        section=Section.MODEL,
        default=False,
        vllm="trust_remote_code",
        help="Run Python code that comes with the model.",
    )
    download_dir: str | None = _option(
        text,
        "SERVING_DOWNLOAD_DIR",
        section=Section.MODEL,
        vllm="download_dir",
        default_text="`/tmp/slipway/models` for S3, `HF_HOME` for the hub",
        help="The folder for models from S3.",
    )
    cache_folder: str | None = _option(
        text,
        "OPTION_CACHE_FOLDER",
        section=Section.MODEL,
        default_text="beside the downloads, if those are on a volume, else none",
        help="The folder that keeps compiled graphs, kernels and profiles, so that the next start "
        "does not make them again. No other user may be able to write to it.",
    )
    cache_source: str | None = _option(
        cache_source,
        "OPTION_CACHE_SOURCE",
        section=Section.MODEL,
        help="An archive of such a folder on S3 with its digest, `s3://bucket/name.tgz#sha256=…`, "
        "which fills an empty OPTION_CACHE_FOLDER (/tmp/slipway/compiled without the option).",
    )
    cache_size: int = _option(
        size,
        "OPTION_CACHE_SIZE",
        section=Section.MODEL,
        default=20 * 1024**3,
        help="Most bytes that the folder of OPTION_CACHE_FOLDER keeps, like 20G. Files of other "
        "versions and GPUs go first, the least recently used first.",
    )
    entry_point: str | None = _option(
        entry_point,
        "OPTION_ENTRYPOINT",
        "DJL_ENTRY_POINT",
        section=Section.MODEL,
        untrusted=True,
        help="`model.py`, which is always used if it exists, or one of LMI's handlers "
        "(`djl_python.*`), which mean Slipway itself. Other values are refused.",
    )

    port: int = _option(
        integer(1, 65535),
        "SAGEMAKER_BIND_TO_PORT",
        "OPTION_PORT",
        section=Section.SERVER,
        default=8080,
        vllm="port",
        help="The port to listen on.",
    )
    host: str = _option(
        address,
        "OPTION_HOST",
        section=Section.SERVER,
        default="127.0.0.1",
        vllm="host",
        help="The address to listen on: 127.0.0.1 accepts connections from this machine only, "
        "0.0.0.0 accepts all IPv4 connections, `::` also IPv6. The image sets 0.0.0.0.",
    )
    cors_allowed_origin: tuple[str, ...] = _option(
        words,
        "SERVING_CORS_ALLOWED_ORIGIN",
        section=Section.SERVER,
        default=(),
        default_text="the server's own",
        help="Comma-separated origins whose web pages may call, like `https://app.example`; `*` "
        "allows all.",
    )
    ui: bool | None = _option(
        boolean,
        "OPTION_UI",
        section=Section.SERVER,
        default_text="true on a loopback address, except in secure mode",
        help="Serve a page for browsers at `/ui` with the start, the plan, requests, latencies, "
        "adapters, replicas and a chat (docs/guides/ui.md).",
    )
    max_request_size: int = _option(
        integer(low=1),
        "SAGEMAKER_MAX_REQUEST_SIZE",
        "SERVING_MAX_REQUEST_SIZE",
        section=Section.SERVER,
        default=64 * 1024**2,
        converted={"SAGEMAKER_MAX_PAYLOAD_IN_MB": mebibytes},
        help="The largest request body in bytes; a larger one gets 413.",
    )
    job_queue_size: int = _option(
        integer(low=1),
        "SERVING_JOB_QUEUE_SIZE",
        "MAX_CONCURRENT_REQUESTS",
        section=Section.SERVER,
        untrusted=True,
        default=1000,
        help="Maximum number of requests that wait for the engine; further requests get 503 at "
        "once.",
    )
    predict_timeout: int | None = _option(
        integer(low=1),
        "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS",
        "OPTION_PREDICT_TIMEOUT",
        "PREDICT_TIMEOUT",
        "SERVING_PREDICT_TIMEOUT",
        "SAGEMAKER_MODEL_SERVER_TIMEOUT",
        section=Section.SERVER,
        untrusted=True,
        default_text=f"none; on SageMaker real-time endpoints {SAGEMAKER_WHOLE_S}, and "
        f"{SAGEMAKER_STREAM_S} for streams",
        help="Request deadline in seconds, including the time in the queue "
        "(docs/explanation/overload.md).",
    )
    throttle_error_http_code: int | None = _option(
        _STATUS,
        "SERVING_THROTTLE_ERROR_HTTP_CODE",
        section=Section.SERVER,
        default_text="503",
        help="Status of a request that is rejected because the queue is full or it would miss its "
        "deadline; 429 is the usual alternative.",
    )
    wlm_error_http_code: int | None = _option(
        _STATUS,
        "SERVING_WLM_ERROR_HTTP_CODE",
        section=Section.SERVER,
        default_text="503",
        help="Status while the server starts and stops.",
    )
    timeout_http_code: int | None = _option(
        _STATUS,
        "SERVING_TIMEOUT_HTTP_CODE",
        section=Section.SERVER,
        default_text="504",
        help="Status of a request that exceeded its deadline.",
    )
    bad_request_http_code: int | None = _option(
        _STATUS,
        "SERVING_BAD_REQUEST_HTTP_CODE",
        section=Section.SERVER,
        default_text="424 on `/invocations`, else 400",
        help="Status of a request that is malformed or cannot be served.",
    )
    server_error_http_code: int | None = _option(
        _STATUS,
        "SERVING_SERVER_ERROR_HTTP_CODE",
        section=Section.SERVER,
        default_text="500",
        help="Status of a failure in the engine or the server.",
    )
    model_loading_timeout: int | None = _option(
        integer(low=1),
        "SAGEMAKER_STARTUP_TIMEOUT",
        "OPTION_MODEL_LOADING_TIMEOUT",
        "MODEL_LOADING_TIMEOUT",
        section=Section.SERVER,
        untrusted=True,
        default_text="none",
        help="Start timeout in seconds; a server that is not ready by then exits.",
    )

    log_level: str = _option(
        log_level,
        "OPTION_LOG_LEVEL",
        section=Section.SERVER,
        default="info",
        help="Minimum log level: `debug`, `info`, `warning`, `error` or `critical`. At run time "
        "SIGUSR1 makes the log one level more verbose, SIGUSR2 one level less.",
    )
    log_format: str = _option(
        choice("auto", "json", "text"),
        "OPTION_LOG_FORMAT",
        section=Section.SERVER,
        default="auto",
        help="`json`: one JSON object per line; `text`: lines for people. `auto` is text on a "
        "terminal, with colour and a progress bar, and JSON everywhere else.",
    )
    otlp_traces_endpoint: str | None = _option(
        text,
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        section=Section.SERVER,
        default_text="`OTEL_EXPORTER_OTLP_ENDPOINT`, or no traces",
        vllm="otlp_traces_endpoint",
        help="The OTLP endpoint for traces of `serve`, its engine and `route`. `OTEL_SERVICE_NAME` "
        "and the SDK's other variables also work; the default protocol is `grpc`, the "
        "alternative `http/protobuf`.",
    )
    error_rate_wlm: tuple[int, int] | None = _option(
        rate,
        "SERVING_ERROR_RATE_WLM",
        section=Section.SERVER,
        default_text="none",
        help="Limit on the rate of requests rejected for lack of capacity, such as `10/PT1M`; "
        "while it is exceeded, `/ping` answers 503.",
    )
    error_rate_server: tuple[int, int] | None = _option(
        rate,
        "SERVING_ERROR_RATE_SERVER",
        section=Section.SERVER,
        default_text="none",
        help="The same for requests that failed in Slipway itself.",
    )
    error_rate_model: tuple[int, int] | None = _option(
        rate,
        "SERVING_ERROR_RATE_MODEL",
        section=Section.SERVER,
        default_text="none",
        help="The same for requests that failed in the engine or in a `model.py`, or timed out.",
    )
    error_rate_any: tuple[int, int] | None = _option(
        rate,
        "SERVING_ERROR_RATE_ANY",
        section=Section.SERVER,
        default_text="none",
        help="The same for all of these together.",
    )
    slo_ttft_ms: int | None = _option(
        integer(low=1),
        "OPTION_SLO_TTFT_MS",
        section=Section.SERVER,
        default_text="none",
        help="Objective for the time to first token, in milliseconds; `slipway_slo_requests_total` "
        "counts requests that meet or miss it, and `route` chooses servers by it "
        "(docs/guides/routing.md).",
    )
    slo_itl_ms: int | None = _option(
        integer(low=1),
        "OPTION_SLO_ITL_MS",
        section=Section.SERVER,
        default_text="none",
        help="Objective for the mean inter-token latency of an answer, in milliseconds.",
    )
    fail_fast: bool = _option(
        boolean,
        "SERVING_FAIL_FAST",
        section=Section.SERVER,
        default=False,
        help="Exit if an error rate is exceeded, or if one of several copies of the model "
        "ends. If the engine of the only copy dies, the server always exits.",
    )
    default_accept: str = _option(
        text,
        "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT",
        section=Section.SERVER,
        untrusted=True,
        default="application/json",
        help="Default `Accept` of requests to `/invocations`; with `text/event-stream`, "
        "streams are SSE events.",
    )
    allowed_media_domains: tuple[str, ...] = _option(
        words,
        "OPTION_ALLOWED_MEDIA_DOMAINS",
        section=Section.SERVER,
        default=(),
        vllm="allowed_media_domains",
        help="Comma-separated hosts that images and other media of chats may be fetched from; "
        "`*` is every host with a public address. `data:` URLs are always allowed.",
    )
    max_audio_seconds: int = _option(
        integer(low=1),
        "OPTION_MAX_AUDIO_SECONDS",
        section=Section.SERVER,
        default=1500,
        help="Maximum duration of an audio file, in seconds, for transcription, translation and "
        "chats. Processing 1,500 s takes about 0.2 GB.",
    )
    trust_request_internals: bool = _option(
        boolean,
        "OPTION_TRUST_REQUEST_INTERNALS",
        section=Section.SERVER,
        default=False,
        help="Let requests set internal parameters of the engine: `kv_transfer_params`, "
        "`ec_transfer_params`, `vllm_xargs`. Only for servers that only a trusted proxy can "
        "reach, as in disaggregated prefill.",
    )
    enable_tokenize: bool | None = _option(
        boolean,
        "OPTION_ENABLE_TOKENIZE",
        section=Section.SERVER,
        default_text="true; false in secure mode",
        help="Answer `/tokenize` and `/detokenize`, which reveal the model's vocabulary and chat "
        "template to clients.",
    )
    enable_stateful_sessions: bool = _option(
        boolean,
        "OPTION_ENABLE_STATEFUL_SESSIONS",
        "SAGEMAKER_ENABLE_STATEFUL_SESSIONS",
        section=Section.SERVER,
        untrusted=True,
        default=True,
        help="Answer SageMaker's session calls, and refuse requests with unknown sessions.",
    )
    sessions_path: str = _option(
        text,
        "OPTION_SESSIONS_PATH",
        section=Section.SERVER,
        default="/tmp/slipway/sessions",
        help="The folder of the sessions.",
    )
    sessions_expiration: int = _option(
        integer(low=1),
        "OPTION_SESSIONS_EXPIRATION",
        section=Section.SERVER,
        untrusted=True,
        default=1200,
        help="Seconds that a session lives after its last use.",
    )
    max_sessions: int = _option(
        integer(low=1),
        "OPTION_MAX_SESSIONS",
        section=Section.SERVER,
        untrusted=True,
        default=10_000,
        help="Maximum number of sessions. A further session replaces the oldest one that was never "
        "used, otherwise the least recently used one.",
    )
    formatter_timeout: int = _option(
        integer(low=1),
        "OPTION_FORMATTER_TIMEOUT",
        section=Section.SERVER,
        untrusted=True,
        default=30,
        help="Timeout in seconds of one call of a formatter in a `model.py`; "
        "`OPTION_PREDICT_TIMEOUT` applies to custom handlers.",
    )
    formatter_memory: int = _option(
        size,
        "OPTION_FORMATTER_MEMORY",
        section=Section.SERVER,
        default=4 * 1024**3,
        help="Memory limit of a `model.py` process with formatters, in bytes, such as 4G; 0 "
        "removes the limit.",
    )

    tensor_parallel_degree: int | Literal["max"] = _option(
        degree,
        "OPTION_TENSOR_PARALLEL_DEGREE",
        "TENSOR_PARALLEL_DEGREE",
        "SM_NUM_GPUS",
        "NUM_SHARD",
        section=Section.DEVICES,
        untrusted=True,
        default="max",
        vllm="tensor_parallel_size",
        help="Devices for one copy of the model. `max`: as many of the visible GPUs as divide the "
        "attention heads and the vocabulary; 1 without GPUs.",
    )
    pipeline_parallel_degree: int = _option(
        integer(low=1),
        "OPTION_PIPELINE_PARALLEL_DEGREE",
        "PIPELINE_PARALLEL_DEGREE",
        section=Section.DEVICES,
        untrusted=True,
        default=1,
        vllm="pipeline_parallel_size",
        help="Pipeline stages of the layers, each on separate devices.",
    )
    copies: int | Literal["auto"] = _option(
        copies,
        "OPTION_COPIES",
        section=Section.DEVICES,
        untrusted=True,
        default="auto",
        default_text="auto: visible GPUs, divided by the two above; 1 without GPUs",
        converted={
            "SAGEMAKER_NUM_MODEL_WORKERS": at_most,
            "SERVING_MAX_WORKERS": at_most,
            "SERVING_GPU_MAX_WORKERS": at_most,
        },
        help="Copies of the model in this container, each on separate devices, behind a router "
        "that the container starts. LMI's names are upper limits of `auto`.",
    )
    copies_least: int = _option(
        integer(low=1),
        "OPTION_COPIES_LEAST",
        section=Section.DEVICES,
        default=1,
        help="With several copies: after all copies have been ready once, the number of ready "
        "copies that `/ping` needs for 200.",
    )
    gpu_memory_utilization: float | None = _option(
        fraction,
        "OPTION_GPU_MEMORY_UTILIZATION",
        "CUDA_MEMORY_FRACTION",
        section=Section.DEVICES,
        untrusted=True,
        vllm="gpu_memory_utilization",
        default_text=f"vLLM's, {GPU_MEMORY_UTILIZATION}",
        help="Share of each GPU's memory that vLLM may use.",
    )
    kv_cache_memory_bytes: int | None = _option(
        size,
        "OPTION_KV_CACHE_MEMORY_BYTES",
        section=Section.DEVICES,
        untrusted=True,
        vllm="kv_cache_memory_bytes",
        default_text="the rest of the GPU's share; without a GPU the memory that fits, at most "
        f"{KV_ON_CPU >> 30} GiB",
        help="KV cache memory of one rank in the engine, in bytes. Without a GPU, vLLM's own "
        "variable `VLLM_CPU_KVCACHE_SPACE` has the same effect, in GiB.",
    )
    cpu_offload_gb_per_gpu: float | None = _option(
        amount,
        "OPTION_CPU_OFFLOAD_GB_PER_GPU",
        section=Section.DEVICES,
        untrusted=True,
        vllm="cpu_offload_gb",
        default_text="0",
        help="Part of each GPU's weights to keep in CPU memory, in GiB.",
    )
    enforce_eager: bool | None = _option(
        boolean,
        "OPTION_ENFORCE_EAGER",
        section=Section.DEVICES,
        untrusted=True,
        vllm="enforce_eager",
        converted={"ENABLE_CUDA_GRAPHS": inverted},
        default_text="true without a GPU, else false",
        help="Run the model without compiling it: starts sooner, runs slower.",
    )

    max_model_len: int | None = _option(
        model_len,
        "OPTION_MAX_MODEL_LEN",
        section=Section.BATCHING,
        untrusted=True,
        vllm="max_model_len",
        default_text="the model's own",
        help="Maximum length of a prompt and its answer together, in tokens.",
    )
    max_rolling_batch_size: int | None = _option(
        integer(low=1),
        "OPTION_MAX_ROLLING_BATCH_SIZE",
        "MAX_BATCH_SIZE",
        section=Section.BATCHING,
        untrusted=True,
        vllm="max_num_seqs",
        default_text="vLLM's own",
        help="Maximum number of sequences in a batch.",
    )
    max_rolling_batch_prefill_tokens: int | None = _option(
        size,
        "OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS",
        "MAX_BATCH_PREFILL_TOKENS",
        section=Section.BATCHING,
        untrusted=True,
        vllm="max_num_batched_tokens",
        default_text="vLLM's own",
        help="Maximum number of tokens in one step of the engine, for prompts and answers "
        "together.",
    )
    batch_folder: str | None = _option(
        text,
        "OPTION_BATCH_FOLDER",
        section=Section.BATCHES,
        default_text="there are none",
        help="The folder for files and batches; it enables `/v1/files` and `/v1/batches`. Servers "
        "may share it; on a router, it states that they do (docs/guides/batches.md).",
    )
    batch_concurrency: int | None = _option(
        integer(low=1),
        "OPTION_BATCH_CONCURRENCY",
        section=Section.BATCHES,
        default_text="half of the engine's concurrent sequences",
        help="Maximum number of batch lines in flight, for all batches together.",
    )
    batch_file_size: int = _option(
        size,
        "OPTION_BATCH_FILE_SIZE",
        section=Section.BATCHES,
        default=200 * 1000**2,
        help="The largest file in bytes; a larger one gets 413.",
    )
    batch_files: int = _option(
        integer(low=1),
        "OPTION_BATCH_FILES",
        section=Section.BATCHES,
        default=1000,
        help="Maximum number of files, and of batches; half of it for one tenant. One more "
        "gets 413.",
    )
    batch_storage: int = _option(
        size,
        "OPTION_BATCH_STORAGE",
        section=Section.BATCHES,
        default=10 * 1000**3,
        help="Maximum size of the folder in bytes; half of it for one tenant. A larger file gets "
        "413, and a batch that reaches the limit fails and keeps its answers.",
    )
    batch_retention: int = _option(
        integer(low=60),
        "OPTION_BATCH_RETENTION",
        section=Section.BATCHES,
        default=30 * 24 * 3600,
        help="Lifetime of files, and of batches after their end, in seconds.",
    )

    lmcache_auto_config: bool = _option(
        boolean,
        "OPTION_LMCACHE_AUTO_CONFIG",
        section=Section.KV_TIERS,
        untrusted=True,
        default=False,
        help="Keep KV caches in CPU memory and on disk, sized for the container.",
    )
    lmcache_config_file: str | None = _option(
        text,
        "OPTION_LMCACHE_CONFIG_FILE",
        "LMCACHE_CONFIG_FILE",
        section=Section.KV_TIERS,
        help="An LMCache configuration file, absolute or in the model's folder; `LMCACHE_*` "
        "variables override it. Slipway translates it to flags of LMCache's server.",
    )
    kv_l2_url: str | None = _option(
        text,
        "OPTION_KV_L2_URL",
        section=Section.KV_TIERS,
        secret=True,
        help="A store that several servers share: `redis://` or `host:6379`, `rediss://`, "
        "`valkey://`, `valkeys://`, `s3://bucket`, `file:///folder`, `tieredstorage://`.",
    )
    kv_disk_path: str = _option(
        text,
        "OPTION_KV_DISK_PATH",
        section=Section.KV_TIERS,
        default="/tmp/lmcache",
        help="The folder of the disk tier, on this machine's own disk.",
    )
    kv_l1_size: int | None = _option(
        size,
        "OPTION_KV_L1_SIZE",
        section=Section.KV_TIERS,
        default_text="the rest of the memory",
        help="CPU memory for KV caches, in bytes, such as 20g. With 0, memory is only a small "
        "buffer for the disk or the shared store.",
    )
    kv_disk_size: int | None = _option(
        size,
        "OPTION_KV_DISK_SIZE",
        section=Section.KV_TIERS,
        default_text="the free space, less a margin",
        help="Size of the disk tier in bytes, like 200G; 0 disables it.",
    )
    kv_tiers_verify: int = _option(
        integer(low=0),
        "OPTION_KV_TIERS_VERIFY",
        section=Section.KV_TIERS,
        default=0,
        help="Verify one in this many tier hits, 0 for none. The engine computes the first token "
        "from the loaded KV and from none, one request at a time, and only while it is not "
        "full. After 3 differences in 20 verifications, the tiers are switched off. Requests "
        "with media, embedding models and classifiers are not verified.",
    )
    kv_tiers_verify_top: float = _option(
        amount,
        "OPTION_KV_TIERS_VERIFY_TOP",
        section=Section.KV_TIERS,
        default=0.5,
        help="A first token differs if the most probable token is another one, and its log "
        "probability differs by more than this.",
    )
    kv_tiers_verify_any: float = _option(
        amount,
        "OPTION_KV_TIERS_VERIFY_ANY",
        section=Section.KV_TIERS,
        default=2.0,
        help="A first token also differs if the log probability of any of the 20 most probable "
        "tokens differs by more than this.",
    )
    kv_retention: int = _option(
        integer(0, 86_400),
        "OPTION_KV_RETENTION_S",
        section=Section.KV_TIERS,
        default=3600,
        help="The most seconds that the tiers prefer the KV of a paused conversation to other KV, "
        "whatever lifetime a request names (docs/guides/agents.md). With 0 they evict the least "
        "recently used KV.",
    )
    cache_salt_header: str | None = _option(
        text,
        "OPTION_CACHE_SALT_HEADER",
        section=Section.KV_TIERS,
        help="A request header that names the tenant. A gateway must set it and replace the "
        "client's own; a request with two such headers is refused. Requests share KV "
        "caches, in the engine and in all tiers, only within a tenant. A body's "
        "`cache_salt` separates them further.",
    )
    kv_transfer_config: Mapping[str, Any] | None = _option(
        json_object,
        "OPTION_KV_TRANSFER_CONFIG",
        section=Section.KV_TIERS,
        vllm="kv_transfer_config",
        help="vLLM's own connector configuration, passed on unchanged; Slipway then manages no KV "
        "cache tiers. With OPTION_SERVER_ROLE, NixlConnector fetches the KV that a `prefill` "
        "server computed. LMI's manual mode, `LMCacheConnectorV1` with `kv_both`, means the "
        "tiers of LMCache's configuration (docs/guides/kv_cache.md).",
    )

    speculative_config: Mapping[str, Any] | None = _option(
        json_object,
        "OPTION_SPECULATIVE_CONFIG",
        section=Section.SPECULATION,
        vllm="speculative_config",
        help="vLLM's configuration of speculative decoding. Without a `method`, the draft's own "
        "files decide.",
    )
    speculative_draft_model: str | None = _option(
        text,
        "OPTION_SPECULATIVE_DRAFT_MODEL",
        section=Section.SPECULATION,
        vllm="spec_model",
        help="The draft: a local folder, an `s3://` prefix or a hub id. Its files determine its "
        "method (EAGLE, EAGLE-3, draft model, ...).",
    )
    num_speculative_tokens: int | None = _option(
        integer(low=1),
        "OPTION_NUM_SPECULATIVE_TOKENS",
        section=Section.SPECULATION,
        untrusted=True,
        vllm="spec_tokens",
        default_text=f"the draft's own, or {SPECULATIVE_TOKENS}",
        help="Tokens that the draft proposes in each step.",
    )

    enable_lora: bool = _option(
        boolean,
        "OPTION_ENABLE_LORA",
        section=Section.LORA,
        untrusted=True,
        default=False,
        vllm="enable_lora",
        help="Serve LoRA adapters.",
    )
    max_loras: int | None = _option(
        integer(low=1),
        "OPTION_MAX_LORAS",
        section=Section.LORA,
        untrusted=True,
        vllm="max_loras",
        default_text=str(LORA_DEFAULTS["max_loras"]),
        help="Maximum number of adapters in one batch, each with a slot in the engine's memory.",
    )
    max_lora_rank: int | None = _option(
        one_of(*LORA_RANKS),
        "OPTION_MAX_LORA_RANK",
        section=Section.LORA,
        untrusted=True,
        vllm="max_lora_rank",
        default_text=str(LORA_DEFAULTS["max_lora_rank"]),
        help=f"The largest rank of an adapter: {', '.join(map(str, LORA_RANKS[:-1]))} or "
        f"{LORA_RANKS[-1]}.",
    )
    max_cpu_loras: int | None = _option(
        integer(low=1),
        "OPTION_MAX_CPU_LORAS",
        section=Section.LORA,
        untrusted=True,
        vllm="max_cpu_loras",
        default_text="as `max_loras`",
        help="Maximum number of adapters in CPU memory, including those in the engine's slots.",
    )
    max_adapters: int = _option(
        integer(low=1),
        "OPTION_MAX_ADAPTERS",
        section=Section.LORA,
        untrusted=True,
        default=10_000,
        help="Maximum number of registered adapters. Most of them stay on disk until they are "
        "used.",
    )
    lmi_preload: bool = _option(
        boolean,
        "OPTION_LMI_PRELOAD",
        section=Section.LORA,
        default=False,
        help="Load adapters at registration, as LMI does, unless `preload=false`. If false, the "
        "first request loads an adapter, unless `preload=true`.",
    )
    adapters: str = _option(
        text,
        "OPTION_ADAPTERS",
        section=Section.LORA,
        default="adapters",
        help="A folder whose subfolders are registered as adapters at the start; relative to the "
        "folder of `serving.properties`, otherwise to the model's.",
    )
    adapter_roots: tuple[str, ...] = _option(
        words,
        "OPTION_ADAPTER_ROOTS",
        section=Section.LORA,
        default=("/opt/ml/models", "/opt/ml/model"),
        help="Comma-separated folders that adapters may be in, besides the model's and that of "
        "`serving.properties`.",
    )
    adapter_buckets: tuple[str, ...] = _option(
        words,
        "OPTION_ADAPTER_BUCKETS",
        section=Section.LORA,
        default=(),
        help="Comma-separated S3 buckets whose adapters may be registered.",
    )
    adapter_repos: tuple[str, ...] = _option(
        repos,
        "OPTION_ADAPTER_REPOS",
        section=Section.LORA,
        default=(),
        help="Comma-separated repositories of the Hugging Face hub whose adapters may be "
        "registered: `org/name`, or `org/*` for all of an organisation.",
    )
    adapter_list: str | None = _option(
        adapter_list,
        "OPTION_ADAPTER_LIST",
        section=Section.LORA,
        secret=True,
        help="One list of adapters for all servers of a model: a folder on a shared volume, "
        "`s3://bucket/prefix`, or `valkey://host:6379/0` with a separate database. An adapter "
        "registered on one server is registered on all, including those that start later.",
    )
    adapter_disk: int = _option(
        size,
        "OPTION_ADAPTER_DISK",
        section=Section.LORA,
        default=20 * 10**9,
        help="Disk space for adapters from S3, the hub and archives, in bytes, such as 20g.",
    )

    adapter_code: bool | None = _option(
        boolean,
        "OPTION_ADAPTER_CODE",
        section=Section.LORA,
        default_text="true; false in secure mode",
        help="Run the `model.py` of adapters, isolated from the server and its secrets "
        "(docs/explanation/security.md). If false, adapters with a `model.py` are refused.",
    )

    router_replicas: str | None = _option(
        replicas,
        "OPTION_ROUTER_REPLICAS",
        section=Section.ROUTER,
        help="Servers behind `route`: comma-separated URLs, `file:///path` with one per line, "
        "`kubernetes://NAMESPACE/LABELS?port=PORT` with labels of EndpointSlices, or "
        "`inferencepool://NAMESPACE/NAME`.",
    )
    routing_strategy: str = _option(
        choice("prefixaware", "kvaware", "session", "roundrobin"),
        "OPTION_ROUTING_STRATEGY",
        section=Section.ROUTER,
        default="prefixaware",
        help="The strategy of `route` for choosing a server. `kvaware` needs OPTION_KV_EVENTS=true "
        "on the servers, and OPTION_MODEL_ID on the router, for the tokenizer.",
    )
    session_key: str | None = _option(
        text,
        "OPTION_SESSION_KEY",
        "SESSION_KEY",
        section=Section.ROUTER,
        default_text="the ids that agents send, or `user_id`, `user` in the body",
        help="The header, or key of a JSON body, that names the conversation of a request, for the "
        "`session` strategy and for KV events. X-Amzn-SageMaker-Session-Id always names one.",
    )
    router_processes: int = _option(
        integer(1, 64),
        "OPTION_ROUTER_PROCESSES",
        section=Section.ROUTER,
        default=1,
        help="Number of `route` processes. They share the port and their state.",
    )
    router_paths: tuple[str, ...] = _option(
        routed_paths,
        "OPTION_ROUTER_PATHS",
        section=Section.ROUTER,
        default=(),
        default_text="the paths of Slipway and of other public servers (docs/guides/routing.md)",
        help="More paths that `route` forwards to one of its servers, for POST, comma-separated: "
        "complete paths, and prefixes with `/*` at the end, such as `/segment,/custom/*`.",
    )
    router_objectives: str | None = _option(
        text,
        "OPTION_ROUTER_OBJECTIVES",
        section=Section.ROUTER,
        help="A YAML file with InferenceObjectives of Gateway API's inference extension. A request "
        "names one in X-Gateway-Inference-Objective and gets its priority "
        "(docs/guides/gateway_api.md).",
    )
    epp: bool = _option(
        boolean,
        "OPTION_EPP",
        section=Section.ROUTER,
        default=False,
        help="Also act as an endpoint picker for a gateway that implements Gateway API's inference "
        "extension (docs/guides/gateway_api.md).",
    )
    epp_port: int = _option(
        integer(1, 65535),
        "OPTION_EPP_PORT",
        section=Section.ROUTER,
        default=9002,
        help="The gRPC port of the endpoint picker.",
    )
    epp_certificate: str | None = _option(
        text,
        "OPTION_EPP_CERTIFICATE",
        section=Section.ROUTER,
        default_text="no TLS",
        help="PEM file with the endpoint picker's certificate, for gateways that want TLS; "
        f"reloaded when it changes. Or `{SELF_SIGNED}`, for gateways that do not verify it.",
    )
    epp_private_key: str | None = _option(
        text,
        "OPTION_EPP_PRIVATE_KEY",
        section=Section.ROUTER,
        help="PEM file with the private key of that certificate.",
    )
    router_first_byte_timeout: int = _option(
        integer(low=1),
        "OPTION_ROUTER_FIRST_BYTE_TIMEOUT",
        section=Section.ROUTER,
        default=600,
        help="Timeout in seconds until an answer begins; a non-streamed answer must be complete by "
        "then.",
    )
    router_idle_timeout: int = _option(
        integer(low=1),
        "OPTION_ROUTER_IDLE_TIMEOUT",
        section=Section.ROUTER,
        default=300,
        help="Idle timeout between bytes of an answer, in seconds.",
    )
    router_hold: int = _option(
        integer(0, 3600),
        "OPTION_ROUTER_HOLD_S",
        section=Section.ROUTER,
        default=0,
        help="Seconds that `route` holds a request for text while no server is ready, or all are "
        "full (docs/guides/routing.md). With 0 it never does. Above 0, `/ping` answers 200 also "
        "without a ready server, because requests then wait for one; with copies in one "
        "container it does not.",
    )
    server_role: str = _option(
        choice("both", "prefill", "decode"),
        "OPTION_SERVER_ROLE",
        section=Section.ROUTER,
        default="both",
        help="The server's part of a request behind `route`: `prefill` computes long prompts "
        "for the `decode` servers, which load them from the shared KV store "
        "(OPTION_KV_L2_URL), or fetch them with vLLM's NixlConnector "
        "(OPTION_KV_TRANSFER_CONFIG).",
    )
    router_prefill_tokens: int = _option(
        integer(low=1),
        "OPTION_ROUTER_PREFILL_TOKENS",
        section=Section.ROUTER,
        default=4096,
        help="A prompt with at least this many tokens that the `decode` server has not cached is "
        "first computed on a `prefill` server. Needs OPTION_ROUTER_SECRET.",
    )
    router_access_log: bool = _option(
        boolean,
        "OPTION_ROUTER_ACCESS_LOG",
        section=Section.ROUTER,
        default=True,
        help="Log a line for each request that `route` sends to a server (docs/reference/logs.md).",
    )
    router_continue_streams: bool = _option(
        boolean,
        "OPTION_ROUTER_CONTINUE_STREAMS",
        section=Section.ROUTER,
        default=False,
        help="Let another replica complete a stream whose replica fails: greedy or seeded "
        "chats and completions, without tools and log probabilities.",
    )
    kv_events: bool = _option(
        boolean,
        "OPTION_KV_EVENTS",
        section=Section.ROUTER,
        default=False,
        help="Publish changes of the engine's KV cache for a router with `kvaware`. Anyone who "
        "reaches the ports can read prompts: keep them inside the cluster.",
    )
    kv_events_port: int = _option(
        integer(1, 65534),
        "OPTION_KV_EVENTS_PORT",
        section=Section.ROUTER,
        default=5557,
        help="The port of these events; the next port has their log. Each data parallel rank "
        "has two ports: first come the event ports of all ranks, then the log ports.",
    )

    api_key: str | None = _option(
        key,
        "OPTION_API_KEY",
        "VLLM_API_KEY",
        "SM_VLLM_API_KEY",
        section=Section.ACCESS,
        secret=True,
        default_text="no key is needed",
        help="The key of all clients, as `Authorization: Bearer KEY` or `x-api-key`, without admin "
        "rights (docs/guides/access.md).",
    )
    api_keys_file: str | None = _option(
        text,
        "OPTION_API_KEYS_FILE",
        section=Section.ACCESS,
        help="A YAML or JSON file with hashes of keys, each with its name, tenant and limits; "
        "reloaded when it changes. `python -m serving keys new NAME` makes a key.",
    )
    jwt_issuer: str | None = _option(
        text,
        "OPTION_JWT_ISSUER",
        section=Section.ACCESS,
        default_text="tokens are not accepted",
        help="Accept JSON web tokens of this issuer: their `iss`, an `https://` URL with OpenID "
        "discovery.",
    )
    jwt_audience: tuple[str, ...] = _option(
        words,
        "OPTION_JWT_AUDIENCE",
        section=Section.ACCESS,
        default=(),
        help="Comma-separated names of this server at the issuer; a token's `aud` must have one of "
        "them. OPTION_JWT_ISSUER needs it.",
    )
    jwt_jwks_url: str | None = _option(
        https_url,
        "OPTION_JWT_JWKS_URL",
        section=Section.ACCESS,
        default_text="from the issuer's discovery",
        help="The URL of the issuer's public keys.",
    )
    jwt_tenant_claim: str = _option(
        text,
        "OPTION_JWT_TENANT_CLAIM",
        section=Section.ACCESS,
        default="sub",
        help="The claim of a token that names its tenant. Users must not be able to choose it.",
    )
    admin_api_key: str | None = _option(
        key,
        "OPTION_ADMIN_API_KEY",
        section=Section.ACCESS,
        secret=True,
        default_text="with keys, only those with `admin: true` in the file",
        help="The key for `/adapters`, `/models`, `/metrics`, `/replicas` and all other paths "
        "except inference. Alone, it closes these paths and leaves inference open.",
    )
    router_secret: str | None = _option(
        long_key,
        "OPTION_ROUTER_SECRET",
        section=Section.ACCESS,
        secret=True,
        help="A secret of at least 32 characters that `route` and its servers share. The router "
        "sends the caller's identity to the servers, and they answer only the router and their "
        "own keys.",
    )
    router_replica_key: str | None = _option(
        key,
        "OPTION_ROUTER_REPLICA_KEY",
        section=Section.ACCESS,
        secret=True,
        default_text="OPTION_ADMIN_API_KEY or OPTION_API_KEY",
        help="The key for `route`'s own requests for models and metrics to servers without "
        "OPTION_ROUTER_SECRET, such as vLLM's own. Clients' requests keep the clients' keys.",
    )
    limits_url: str | None = _option(
        store,
        "OPTION_LIMITS_URL",
        section=Section.ACCESS,
        secret=True,
        default_text="each process counts separately",
        help="The store that counts limits of keys for several processes and servers: "
        "`valkey://` or `redis://HOST:6379`, with TLS `valkeys://` or `rediss://`.",
    )
    tls_cert_file: str | None = _option(
        text,
        "OPTION_TLS_CERT_FILE",
        section=Section.ACCESS,
        default_text="no TLS",
        help="The certificate chain of `serve` or `route`, in PEM; reloaded when it changes.",
    )
    tls_key_file: str | None = _option(
        text,
        "OPTION_TLS_KEY_FILE",
        section=Section.ACCESS,
        help="The private key of the certificate, in PEM and without a password.",
    )
    tls_client_ca_file: str | None = _option(
        text,
        "OPTION_TLS_CLIENT_CA_FILE",
        section=Section.ACCESS,
        default_text="clients need no certificate",
        help="Certificate authorities of clients, in PEM. Clients must show a certificate, "
        "also for health checks.",
    )
    router_ca_file: str | None = _option(
        text,
        "OPTION_ROUTER_CA_FILE",
        section=Section.ACCESS,
        default_text="the system's",
        help="Certificate authorities, in PEM, of `https://` servers in OPTION_ROUTER_REPLICAS.",
    )

    secure_mode: bool = _option(
        boolean,
        "SAGEMAKER_SECURE_MODE",
        section=Section.SECURE,
        default=False,
        help="Enforce the security controls (docs/explanation/security.md). SageMaker sets "
        "this and the next two options; files cannot set them.",
    )
    security_controls: tuple[str, ...] = _option(
        some_of(REQUIREMENTS, PICKLE_FILES, REMOTE_CODE, SCRIPTS, TEMPLATE),
        "SAGEMAKER_SECURITY_CONTROLS",
        section=Section.SECURE,
        default=(),
        help="Comma-separated controls: `DISALLOW_REQUIREMENTS_TXT`, `DISALLOW_PICKLE_FILES`, "
        "`DISALLOW_TRUST_REMOTE_CODE`, `DISALLOW_CUSTOM_INFERENCE_SCRIPTS`, "
        "`DISALLOW_CHAT_TEMPLATE`.",
    )
    untrusted_channels: tuple[str, ...] = _option(
        words,
        "SAGEMAKER_UNTRUSTED_CHANNELS",
        section=Section.SECURE,
        default=(),
        help="Comma-separated untrusted folders.",
    )

    config_file: str | None = _option(
        text,
        "OPTION_CONFIG_FILE",
        vllm="config",
        section=Section.CONFIGURATION,
        default_text="`slipway.yaml` in the model's folder",
        help="A YAML file with options, as vLLM's own `--config`. If `SM_VLLM_CONFIG` names it, "
        "other variables take precedence.",
    )
    model_store: str = _option(
        text,
        "SERVING_MODEL_STORE",
        section=Section.CONFIGURATION,
        default=MODEL_STORE,
        help="The folder to search for a model, `serving.properties` and `slipway.yaml`.",
    )
    strict: bool | Literal["auto"] = _option(
        strictness,
        "OPTION_STRICT",
        section=Section.CONFIGURATION,
        default="auto",
        default_text="`auto`; `true` in secure mode",
        help="Unknown names that stop the start. `auto`: clearly mistyped names, and all unknown "
        "names on the command line and in `slipway.yaml`; others get a warning. `true`: all. "
        "`false`: none.",
    )

    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """vLLM options given under their own names, uninterpreted: name → value."""
    own: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    """Unknown `OPTION_*` that a model.py may read: name → value."""
    model_folder: Path | None = None
    """The folder of the deployment's files: option files, model.py, adapters."""
    lmcache: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """`LMCACHE_*` variables, unchanged."""
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Field, or name of a vLLM option → the name that set it. Missing fields have their default."""
    files: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    """Field, name of a vLLM option or LMCACHE_* variable → the file that set it."""
    notes: tuple[str, ...] = ()
    """Notes for the operator about the options, one sentence each."""
    interactive: bool = False
    """Whether SageMaker's time limits for answers apply."""

    @property
    def tokenizes(self) -> bool:
        """Whether clients may use the model's tokenizer."""
        return not self.secure_mode if self.enable_tokenize is None else self.enable_tokenize

    @property
    def on_loopback(self) -> bool:
        """Whether connections are accepted from this machine only."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def serves_ui(self) -> bool:
        """Whether there is a page for browsers."""
        return self.on_loopback and not self.secure_mode if self.ui is None else self.ui

    @property
    def runs_adapter_code(self) -> bool:
        """Whether adapters may have a model.py."""
        return not self.secure_mode if self.adapter_code is None else self.adapter_code

    @property
    def whole_timeout(self) -> int | None:
        """Time limit of a non-streamed answer, in seconds."""
        return self.predict_timeout or (SAGEMAKER_WHOLE_S if self.interactive else None)

    @property
    def stream_timeout(self) -> int | None:
        """Time limit of a stream, in seconds."""
        return self.predict_timeout or (SAGEMAKER_STREAM_S if self.interactive else None)

    @property
    def properties(self) -> Mapping[str, str]:
        """The options as LMI passes them to handlers, under their names in `serving.properties`."""
        ours = {name: getattr(self, name) for name, it in OPTIONS.items() if not it.secret}
        values = {**self.own, **ours, **self.engine}
        return {
            name: value if isinstance(value, str) else json.dumps(value, default=list)
            for name, value in values.items()
            if value is not None
        }

    @property
    def for_engine(self) -> tuple[str, ...]:
        """The options given for vLLM and its KV cache tiers, under the names that set them."""
        return tuple(
            sorted(
                name
                for field, name in self.origins.items()
                if field in self.engine or OPTIONS[field].section in _OF_ENGINE
            )
        )

    @functools.cached_property
    def model_names(self) -> tuple[str, ...]:
        """Model names that requests may use; answers show the first one."""
        endpoint = (self.endpoint_name,) if self.endpoint_name else ()
        if self.served_model_name:
            return (*self.served_model_name, *endpoint)
        path = self.model_id.rstrip("/") or "/"
        name = path
        if path.startswith("s3://"):
            name = path.rpartition("/")[2]
        elif path.startswith((".", "/", "~")) or Path(path).is_dir():
            name = Path(path).absolute().name
        folder = self.model_folder
        if folder and folder.is_relative_to(self.model_store):
            # As in LMI: the only folder in a store names the model.
            name = next(iter(folder.relative_to(self.model_store).parts), name)
        # Plain vLLM accepts its model's path as a name, so clients may ask for it.
        return (*dict.fromkeys((name, "lmi", path, self.model_id)), *endpoint)

    def named(self, option: str) -> str:
        """The operator's name for a field or a vLLM option that is set; otherwise its variable."""
        return self.origins.get(option, PREFIX + option.upper())

    @functools.cached_property
    def names_in_paths(self) -> tuple[str, ...]:
        """Model names in paths: LMI's spelling, which its lists show first, and the unchanged
        names.
        """
        spelled = (re.sub(r"\W", "_", name, flags=re.ASCII) for name in self.model_names)
        return tuple(dict.fromkeys((*spelled, *self.model_names)))


OPTIONS: Mapping[str, Option] = {
    field.name: field.metadata["option"]
    for field in dataclasses.fields(Settings)
    if "option" in field.metadata
}
"""Settings field → its declaration."""


def sections() -> Mapping[Section, list[Option]]:
    """The options of each section, in the order of the reference page."""
    found: dict[Section, list[Option]] = {section: [] for section in Section}
    for option in OPTIONS.values():
        found[option.section].append(option)
    return found


VLLM_SECRET = frozenset(("hf_token",))
"""vLLM's own options whose values may be in no log and no plan."""
VLLM_UNTRUSTED = frozenset(
    (
        *("block_size", "disable_log_stats", "disable_sliding_window", "enable_auto_tool_choice"),
        *("enable_chunked_prefill", "enable_expert_parallel", "enable_prefix_caching"),
        *("kv_cache_dtype", "limit_mm_per_prompt", "reasoning_parser", "seed", "tokenizer_mode"),
        "tool_call_parser",
    )
)
"""vLLM's own options that a file in an untrusted channel may set in secure mode."""


@functools.cache
def _listed() -> Mapping[str, Any]:
    rows: Mapping[str, Any] = json.loads(Path(__file__).with_name("vllm_options.json").read_text())
    return rows


@functools.cache
def vllm_options() -> Mapping[str, Reader]:
    """vLLM's own options that are passed on: name → reader."""
    declared = {option.vllm for option in OPTIONS.values()}
    declared |= {flag(name)[2:].replace("-", "_") for it in OPTIONS.values() for name in it.names}
    found = {
        name: kind(row["kind"], tuple(row.get("choices", ())))
        for name, row in _listed().items()
        if name not in declared | REFUSED.keys() and PREFIX + name.upper() not in REMOVED
    }
    positive = {name: integer(low=1) for name in ("nnodes", "data_parallel_size")}
    written = {"compilation_config": compilation, "limit_mm_per_prompt": counts}
    return {**found, **positive, **written}


def vllm_knows(name: str) -> tuple[str, ...]:
    """vLLM's own words for the values of an option that accepts further ones."""
    return tuple(_listed()[name]["known"])


@functools.cache
def flags() -> Mapping[str, tuple[str, Reader | None]]:
    """Flag → the variable of the same option, and its reader; None if the flag has no effect."""
    found: dict[str, tuple[str, Reader | None]] = {
        flag(name): (name, None) for name in UNUSED if name.startswith(PREFIX)
    }
    for name, read in vllm_options().items():
        found[flag(name)] = (PREFIX + name.upper(), read)
    for option in OPTIONS.values():
        ours = [name for name in option.names if name.startswith(PREFIX)]
        if option.vllm:
            ours.append(PREFIX + option.vllm.upper())
        for name in ours or option.names[:1]:
            found[flag(name)] = (name, option.read)
    for name, row in _listed().items():
        read = kind(row["kind"], tuple(row.get("choices", ())))
        found.setdefault(flag(name), (PREFIX + name.upper(), read))  # refused, or does nothing
        if short := row.get("short"):
            found[short] = found[flag(name)]
    return {**found, "-O": found["--optimization-level"]}


def is_switch(name: str) -> bool:
    """Whether a variable, by its OPTION_ name, is on or off."""
    _, read = flags().get(flag(name), ("", None))
    return read in (boolean, switch)


@functools.cache
def vllm_flags() -> frozenset[str]:
    """vLLM's own flags, in their long form."""
    return frozenset(map(flag, _listed()))


def flag(name: str) -> str:
    """The flag of a variable: its name without its owner's prefix."""
    bare = re.sub(r"^(OPTION|SERVING|SAGEMAKER)_", "", name)
    return "--" + bare.lower().replace("_", "-")


def names_option(name: str) -> bool:
    """Whether a handler would take a property of this name for an option, be it set or not.

    Otherwise a client's header of such a name would replace an option that is not set.
    """
    return name.lower().removeprefix("option.") in _properties()


@functools.cache
def _properties() -> frozenset[str]:
    names = {it for option in OPTIONS.values() for it in (option.vllm, *option.names) if it}
    spelled = {name.removeprefix(PREFIX).lower() for name in names}
    return frozenset({*OPTIONS, *spelled, *vllm_options(), "model_dir"})
