"""Every option, declared once: names, what it takes, default, where it goes, what it is for.

`OPTION_*` and the `SERVING_*`, `SAGEMAKER_*`, `HF_*` names beside it are the vocabulary of Amazon
SageMaker's LMI container, which took some from Hugging Face's text generation inference server.
Every command-line option of vLLM that is not declared here can be given by its own name as
`OPTION_<NAME>`; `vllm_options.json` lists them. Names that do nothing here are in `unused.py`.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lmi_config.options.ignored import REFUSED, UNUSED
from lmi_config.options.parsers import (
    Reader,
    address,
    amount,
    boolean,
    choice,
    degree,
    dtype,
    entry_point,
    fraction,
    integer,
    inverted,
    json_object,
    kind,
    log_level,
    mebibytes,
    model_len,
    one_of,
    rate,
    replicas,
    size,
    some_of,
    text,
    words,
)

PREFIX = "OPTION_"
VLLM_PREFIX = "SM_VLLM_"
"""Of the names that AWS's own vLLM container takes: this, and the name of a vLLM option."""

MODEL_STORE = "/opt/ml/model"
"""Where SageMaker puts a model before it starts the container. It is never written to."""

REQUIREMENTS = "DISALLOW_REQUIREMENTS_TXT"
PICKLE_FILES = "DISALLOW_PICKLE_FILES"
REMOTE_CODE = "DISALLOW_TRUST_REMOTE_CODE"
SCRIPTS = "DISALLOW_CUSTOM_INFERENCE_SCRIPTS"
TEMPLATE = "DISALLOW_CHAT_TEMPLATE"
"""These are the controls of SageMaker's secure mode."""

SAGEMAKER_WHOLE_S, SAGEMAKER_STREAM_S = 55, 470
"""Under SageMaker's limits, 60 s for a whole answer and 8 min for a stream, with time to tell."""

LORA_DEFAULTS: Mapping[str, Any] = {"max_loras": 4, "max_lora_rank": 16}
"""What LMI gives vLLM when `enable_lora` is on and nothing else is said; vLLM's own is 1 and 16."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """What is known of one option.

    names: environment variables that set it; the first that is set wins.
    others: names that say it in other units, each with its own reader; they come last, except
    SAGEMAKER_* ones, which come first.
    vllm: the vLLM option it becomes. `OPTION_<VLLM>` and `SM_VLLM_<VLLM>` are then names as well,
    and must agree with the others.
    otherwise: what holds when it is not set, where the default does not tell.
    secret: whether its value may be in no log and no plan.
    """

    names: tuple[str, ...]
    read: Reader
    help: str
    vllm: str | None
    others: Mapping[str, Reader]
    default: Any
    otherwise: str | None
    secret: bool
    heading: str | None


def _option(
    read: Reader,
    *names: str,
    help: str,
    default: Any = None,
    otherwise: str | None = None,
    vllm: str | None = None,
    others: Mapping[str, Reader] | None = None,
    secret: bool = False,
    heading: str | None = None,
) -> Any:
    about = Option(
        names=names,
        read=read,
        help=help,
        vllm=vllm,
        others=others or {},
        default=default,
        otherwise=otherwise,
        secret=secret,
        heading=heading,
    )
    return dataclasses.field(default=default, metadata={"option": about})


_STATUS = integer(400, 599)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the operator asked for, read and checked. `settings.read()` makes it."""

    model_id: str = _option(
        text,
        "HF_MODEL_ID",
        "OPTION_MODEL_ID",
        heading="Model",
        default=MODEL_STORE,
        vllm="model",
        help="The model: a local folder, an `s3://` prefix or a Hugging Face hub id.",
    )
    revision: str | None = _option(
        text,
        "HF_REVISION",
        "OPTION_REVISION",
        vllm="revision",
        otherwise="the default branch",
        help="Branch, tag or commit of a hub model.",
    )
    task: str = _option(
        choice(
            "auto",
            "text-generation",
            "generate",
            "text-embedding",
            "embed",
            "feature-extraction",
            "classify",
        ),
        "HF_TASK",
        "OPTION_TASK",
        default="auto",
        help="What the model is for; `auto` asks the model. `text-embedding` and "
        "`feature-extraction` make embeddings of a model that generates.",
    )
    served_model_name: tuple[str, ...] = _option(
        words,
        "OPTION_SERVED_MODEL_NAME",
        default=(),
        otherwise="the hub id or the folder's name, and `lmi`",
        vllm="served_model_name",
        help="Names that requests may give as `model`. The first stands in answers and metrics.",
    )
    endpoint_name: str | None = _option(
        text,
        "OPTION_ENDPOINT_NAME",
        otherwise="none",
        help="One more such name: that of the SageMaker endpoint, which OpenAI clients give there.",
    )
    normalize: bool = _option(
        boolean,
        "OPTION_NORMALIZE",
        default=True,
        help="Scale embeddings that `inputs` asks for to the length 1.",
    )
    dtype: str = _option(
        dtype,
        "OPTION_DTYPE",
        default="auto",
        vllm="dtype",
        help="Data type of the weights and activations: auto, fp32, fp16, bf16.",
    )
    quantize: str | None = _option(
        text,
        "OPTION_QUANTIZE",
        "HF_MODEL_QUANTIZE",
        vllm="quantization",
        otherwise="what the model's own files say",
        help="How weights are quantised: awq, gptq, fp8, bitsandbytes and what else vLLM knows.",
    )
    load_format: str = _option(
        text,
        "OPTION_LOAD_FORMAT",
        default="auto",
        vllm="load_format",
        help="How weights are loaded; `dummy` makes random ones, for benchmarks.",
    )
    trust_remote_code: bool = _option(
        boolean,
        "OPTION_TRUST_REMOTE_CODE",
        "HF_MODEL_TRUST_REMOTE_CODE",
        default=False,
        vllm="trust_remote_code",
        help="Run Python code that comes with the model.",
    )
    download_dir: str | None = _option(
        text,
        "SERVING_DOWNLOAD_DIR",
        vllm="download_dir",
        otherwise="`/tmp/slipway/models` for S3, `HF_HOME` for the hub",
        help="Where models from S3 are kept.",
    )
    entry_point: str | None = _option(
        entry_point,
        "OPTION_ENTRYPOINT",
        "DJL_ENTRY_POINT",
        help="`model.py`, which is used wherever it is found, or one of LMI's handlers "
        "(`djl_python.*`), which are Slipway itself. Others are refused.",
    )

    port: int = _option(
        integer(1, 65535),
        "SAGEMAKER_BIND_TO_PORT",
        "OPTION_PORT",
        heading="Server",
        default=8080,
        vllm="port",
        help="The port to listen on.",
    )
    host: str = _option(
        address,
        "OPTION_HOST",
        default="127.0.0.1",
        vllm="host",
        help="The address to listen on: 127.0.0.1 is reached from this machine alone, 0.0.0.0 are "
        "all addresses, `::` also those of IPv6. The image sets it to 0.0.0.0.",
    )
    cors_allowed_origin: tuple[str, ...] = _option(
        words,
        "SERVING_CORS_ALLOWED_ORIGIN",
        default=(),
        otherwise="the server's own",
        help="Origins, separated by commas, whose web pages may call, like `https://app.example`; "
        "`*` are all.",
    )
    max_request_size: int = _option(
        integer(low=1),
        "SAGEMAKER_MAX_REQUEST_SIZE",
        "SERVING_MAX_REQUEST_SIZE",
        default=64 * 1024**2,
        others={"SAGEMAKER_MAX_PAYLOAD_IN_MB": mebibytes},
        help="The largest request body in bytes; a larger one is answered 413.",
    )
    job_queue_size: int = _option(
        integer(low=1),
        "SERVING_JOB_QUEUE_SIZE",
        "MAX_CONCURRENT_REQUESTS",
        default=1000,
        help="Requests that may wait for the engine, beside those it works on; one more is "
        "answered 503 at once.",
    )
    predict_timeout: int | None = _option(
        integer(low=1),
        "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS",
        "OPTION_PREDICT_TIMEOUT",
        "PREDICT_TIMEOUT",
        otherwise="none; on SageMaker 55, and 470 for streams, but for batch transform",
        help="Seconds after which a request is ended with an error, for which it also may wait; "
        "docs/explanation/overload.md.",
    )
    throttle_error_http_code: int | None = _option(
        _STATUS,
        "SERVING_THROTTLE_ERROR_HTTP_CODE",
        otherwise="503",
        help="The status that tells a client that the queue is full, or that its request would "
        "wait for too long; 429 is the other usual one.",
    )
    wlm_error_http_code: int | None = _option(
        _STATUS,
        "SERVING_WLM_ERROR_HTTP_CODE",
        otherwise="503",
        help="The status while the server starts and stops.",
    )
    timeout_http_code: int | None = _option(
        _STATUS,
        "SERVING_TIMEOUT_HTTP_CODE",
        otherwise="504",
        help="The status of a request that took longer than it may.",
    )
    bad_request_http_code: int | None = _option(
        _STATUS,
        "SERVING_BAD_REQUEST_HTTP_CODE",
        otherwise="424 on `/invocations`, else 400",
        help="The status of a request that cannot be understood or done.",
    )
    server_error_http_code: int | None = _option(
        _STATUS,
        "SERVING_SERVER_ERROR_HTTP_CODE",
        otherwise="500",
        help="The status of a failure of the engine's or the server's.",
    )
    model_loading_timeout: int | None = _option(
        integer(low=1),
        "SAGEMAKER_STARTUP_TIMEOUT",
        "OPTION_MODEL_LOADING_TIMEOUT",
        "MODEL_LOADING_TIMEOUT",
        otherwise="none",
        help="Seconds after which a start that is not ready has failed.",
    )

    log_level: str = _option(
        log_level,
        "OPTION_LOG_LEVEL",
        default="info",
        help="The least that is logged: `debug`, `info`, `warning`, `error` or `critical`. At run "
        "time SIGUSR1 makes the log louder by one of these steps, SIGUSR2 quieter.",
    )
    log_format: str = _option(
        choice("auto", "json", "text"),
        "OPTION_LOG_FORMAT",
        default="auto",
        help="`json`: one JSON object per line; `text`: lines for people. `auto` is text on a "
        "terminal, with colour and a progress bar, and JSON everywhere else.",
    )
    otlp_traces_endpoint: str | None = _option(
        text,
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        otherwise="`OTEL_EXPORTER_OTLP_ENDPOINT`, or no traces",
        vllm="otlp_traces_endpoint",
        help="Where OpenTelemetry traces go. `OTEL_SERVICE_NAME` and the SDK's other variables "
        "work too; the protocol is `grpc` unless they say `http/protobuf`.",
    )
    error_rate_wlm: tuple[int, int] | None = _option(
        rate,
        "SERVING_ERROR_RATE_WLM",
        otherwise="none",
        help="Requests that found no room, as `10/PT1M`; after more of them than that `/ping` "
        "answers 503, until it is less again.",
    )
    error_rate_server: tuple[int, int] | None = _option(
        rate,
        "SERVING_ERROR_RATE_SERVER",
        otherwise="none",
        help="The same for requests that failed in Slipway itself.",
    )
    error_rate_model: tuple[int, int] | None = _option(
        rate,
        "SERVING_ERROR_RATE_MODEL",
        otherwise="none",
        help="The same for requests that failed in the engine or in a `model.py`, or took too "
        "long.",
    )
    error_rate_any: tuple[int, int] | None = _option(
        rate,
        "SERVING_ERROR_RATE_ANY",
        otherwise="none",
        help="The same for all of these together.",
    )
    fail_fast: bool = _option(
        boolean,
        "SERVING_FAIL_FAST",
        default=False,
        help="End the server where an error rate is exceeded. When its engine dies, it always "
        "ends.",
    )
    default_accept: str = _option(
        text,
        "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT",
        default="application/json",
        help="What counts as `Accept` on `/invocations` where a client sends none; "
        "`text/event-stream` makes streams server-sent events.",
    )
    allowed_media_domains: tuple[str, ...] = _option(
        words,
        "OPTION_ALLOWED_MEDIA_DOMAINS",
        default=(),
        vllm="allowed_media_domains",
        help="Hosts, parted by commas, from which images and other media of chats may be fetched. "
        "`data:` URLs are always allowed.",
    )
    trust_request_internals: bool = _option(
        boolean,
        "OPTION_TRUST_REQUEST_INTERNALS",
        default=False,
        help="Let requests set what reaches the engine's internals: `kv_transfer_params`, "
        "`ec_transfer_params`, `vllm_xargs`. Only for servers that nobody but a trusted proxy "
        "reaches, as in disaggregated prefill.",
    )
    enable_stateful_sessions: bool = _option(
        boolean,
        "OPTION_ENABLE_STATEFUL_SESSIONS",
        "SAGEMAKER_ENABLE_STATEFUL_SESSIONS",
        default=True,
        help="Answer SageMaker's session calls, and refuse requests with unknown sessions.",
    )
    sessions_path: str = _option(
        text,
        "OPTION_SESSIONS_PATH",
        default="/tmp/slipway/sessions",
        help="The folder where sessions are kept.",
    )
    sessions_expiration: int = _option(
        integer(low=1),
        "OPTION_SESSIONS_EXPIRATION",
        default=1200,
        help="Seconds that a session lives after its last use.",
    )
    max_sessions: int = _option(
        integer(low=1),
        "OPTION_MAX_SESSIONS",
        default=10_000,
        help="Sessions that are remembered. One more takes the place of the oldest that was never "
        "used, or else of the one that was not used for longest.",
    )
    formatter_timeout: int = _option(
        integer(low=1),
        "OPTION_FORMATTER_TIMEOUT",
        default=30,
        help="Seconds that one call of a formatter in a `model.py` may take; "
        "`OPTION_PREDICT_TIMEOUT` is for custom handlers.",
    )
    formatter_memory: int = _option(
        size,
        "OPTION_FORMATTER_MEMORY",
        default=4 * 1024**3,
        help="Bytes of memory that the process of a `model.py` with formatters may take, like 4G; "
        "0 sets no limit.",
    )

    tensor_parallel_degree: int | Literal["max"] = _option(
        degree,
        "OPTION_TENSOR_PARALLEL_DEGREE",
        "TENSOR_PARALLEL_DEGREE",
        "SM_NUM_GPUS",
        heading="Devices and memory",
        default="max",
        vllm="tensor_parallel_size",
        help="Devices that one copy of the model is spread over. `max`: every visible GPU, or 1 "
        "without GPUs.",
    )
    pipeline_parallel_degree: int = _option(
        integer(low=1),
        "OPTION_PIPELINE_PARALLEL_DEGREE",
        "PIPELINE_PARALLEL_DEGREE",
        default=1,
        vllm="pipeline_parallel_size",
        help="Stages that the layers are spread over, each on its own devices.",
    )
    gpu_memory_utilization: float | None = _option(
        fraction,
        "OPTION_GPU_MEMORY_UTILIZATION",
        "CUDA_MEMORY_FRACTION",
        vllm="gpu_memory_utilization",
        otherwise="vLLM's, 0.92",
        help="Share of each GPU's memory that vLLM may use.",
    )
    kv_cache_memory_bytes: int | None = _option(
        size,
        "OPTION_KV_CACHE_MEMORY_BYTES",
        vllm="kv_cache_memory_bytes",
        otherwise="what is left of the GPU's share; without a GPU what fits, at most 4 GiB",
        help="Memory of one rank's KV cache in the engine, in bytes. Without a GPU vLLM's own "
        "variable `VLLM_CPU_KVCACHE_SPACE` does the same, in GiB.",
    )
    cpu_offload_gb_per_gpu: float | None = _option(
        amount,
        "OPTION_CPU_OFFLOAD_GB_PER_GPU",
        vllm="cpu_offload_gb",
        otherwise="0",
        help="GiB of each GPU's weights that are kept in CPU memory.",
    )
    enforce_eager: bool | None = _option(
        boolean,
        "OPTION_ENFORCE_EAGER",
        vllm="enforce_eager",
        others={"ENABLE_CUDA_GRAPHS": inverted},
        otherwise="true without a GPU, else false",
        help="Run the model without compiling it: starts sooner, runs slower.",
    )

    max_model_len: int | None = _option(
        model_len,
        "OPTION_MAX_MODEL_LEN",
        heading="Batching",
        vllm="max_model_len",
        otherwise="the model's own",
        help="Longest prompt and answer together, in tokens.",
    )
    max_rolling_batch_size: int | None = _option(
        integer(low=1),
        "OPTION_MAX_ROLLING_BATCH_SIZE",
        "MAX_BATCH_SIZE",
        vllm="max_num_seqs",
        otherwise="vLLM's own",
        help="Sequences that are generated at the same time.",
    )
    max_rolling_batch_prefill_tokens: int | None = _option(
        size,
        "OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS",
        "MAX_BATCH_PREFILL_TOKENS",
        vllm="max_num_batched_tokens",
        otherwise="vLLM's own",
        help="Tokens that are computed in one step, prompts and answers together.",
    )

    lmcache_auto_config: bool = _option(
        boolean,
        "OPTION_LMCACHE_AUTO_CONFIG",
        heading="KV cache tiers",
        default=False,
        help="Keep KV caches in CPU memory and on disk, as large as the container allows.",
    )
    lmcache_config_file: str | None = _option(
        text,
        "OPTION_LMCACHE_CONFIG_FILE",
        "LMCACHE_CONFIG_FILE",
        help="A configuration file of LMCache's, absolute or in the model's folder; `LMCACHE_*` "
        "variables override it. It is translated to the flags of LMCache's server.",
    )
    kv_l2_url: str | None = _option(
        text,
        "OPTION_KV_L2_URL",
        secret=True,
        help="A store that instances share: `redis://`, `rediss://`, `valkey://`, `valkeys://`, "
        "`s3://bucket`, `file:///folder`, `tieredstorage://host:port`.",
    )
    kv_disk_path: str = _option(
        text,
        "OPTION_KV_DISK_PATH",
        default="/tmp/lmcache",
        help="The folder of the disk tier, on this machine's own disk.",
    )
    kv_disk_size: int | None = _option(
        size,
        "OPTION_KV_DISK_SIZE",
        otherwise="what is free, but for a margin",
        help="Bytes of the disk tier, like 200G; 0 leaves it out.",
    )
    cache_salt_header: str | None = _option(
        text,
        "OPTION_CACHE_SALT_HEADER",
        help="A request header that names a tenant, which a gateway sets in the place of the "
        "client's own; twice, it is refused. Requests share KV caches, the engine's own and all "
        "tiers, only with requests of the same tenant. A body's `cache_salt` separates them "
        "further.",
    )
    kv_transfer_config: Mapping[str, Any] | None = _option(
        json_object,
        "OPTION_KV_TRANSFER_CONFIG",
        vllm="kv_transfer_config",
        help="vLLM's own connector configuration, passed on as it is; Slipway then manages no KV "
        "cache tiers. LMI's manual mode, `LMCacheConnectorV1` with `kv_both` and nothing else, is "
        "taken as a wish for the tiers that LMCache's configuration names.",
    )

    speculative_config: Mapping[str, Any] | None = _option(
        json_object,
        "OPTION_SPECULATIVE_CONFIG",
        heading="Speculative decoding",
        vllm="speculative_config",
        help="vLLM's configuration of speculative decoding. A `method` that is left out is read "
        "from the draft's own files.",
    )
    speculative_draft_model: str | None = _option(
        text,
        "OPTION_SPECULATIVE_DRAFT_MODEL",
        vllm="spec_model",
        help="The draft: a local folder, an `s3://` prefix or a hub id. Its method (EAGLE, "
        "EAGLE-3, draft model, ...) is read from its own files.",
    )
    num_speculative_tokens: int | None = _option(
        integer(low=1),
        "OPTION_NUM_SPECULATIVE_TOKENS",
        vllm="spec_tokens",
        otherwise="the draft's own, or 3",
        help="Tokens that the draft proposes in each step.",
    )

    enable_lora: bool = _option(
        boolean,
        "OPTION_ENABLE_LORA",
        heading="LoRA adapters",
        default=False,
        vllm="enable_lora",
        help="Serve LoRA adapters.",
    )
    max_loras: int | None = _option(
        integer(low=1),
        "OPTION_MAX_LORAS",
        vllm="max_loras",
        otherwise="4",
        help="Adapters that one batch may mix, each with a slot in the engine's memory.",
    )
    max_lora_rank: int | None = _option(
        one_of(1, 8, 16, 32, 64, 128, 256, 320, 512),
        "OPTION_MAX_LORA_RANK",
        vllm="max_lora_rank",
        otherwise="16",
        help="The largest rank of an adapter: 1, 8, 16, 32, 64, 128, 256, 320 or 512.",
    )
    max_cpu_loras: int | None = _option(
        integer(low=1),
        "OPTION_MAX_CPU_LORAS",
        vllm="max_cpu_loras",
        otherwise="as `max_loras`",
        help="Adapters that are kept in CPU memory, those in the engine's slots among them.",
    )
    max_adapters: int = _option(
        integer(low=1),
        "OPTION_MAX_ADAPTERS",
        default=10_000,
        help="Adapters that can be registered. Most of them wait on disk until they are used.",
    )
    adapter_roots: tuple[str, ...] = _option(
        words,
        "OPTION_ADAPTER_ROOTS",
        default=("/opt/ml/models", "/opt/ml/model"),
        help="Folders, parted by commas, under which adapters may be, besides the model's own.",
    )
    adapter_buckets: tuple[str, ...] = _option(
        words,
        "OPTION_ADAPTER_BUCKETS",
        default=(),
        help="S3 buckets, parted by commas, whose adapters may be registered.",
    )
    adapter_disk: int = _option(
        size,
        "OPTION_ADAPTER_DISK",
        default=20 * 10**9,
        help="Bytes that the files of adapters from S3 and archives may take, like 20g.",
    )

    adapter_code: bool | None = _option(
        boolean,
        "OPTION_ADAPTER_CODE",
        otherwise="true; false in secure mode",
        help="Run the `model.py` of adapters, apart from the server and its secrets "
        "(docs/explanation/security.md). Where it is false, an adapter that has one is refused.",
    )

    router_replicas: str | None = _option(
        replicas,
        "OPTION_ROUTER_REPLICAS",
        heading="Router",
        help="The servers that `route` stands before: URLs parted by commas, `file:///path` with "
        "one in each line, or `kubernetes://NAMESPACE/LABELS?port=PORT`, labels of EndpointSlices.",
    )
    routing_strategy: str = _option(
        choice("prefixaware", "kvaware", "session", "roundrobin"),
        "OPTION_ROUTING_STRATEGY",
        default="prefixaware",
        help="How `route` chooses a server for a request. `kvaware` needs OPTION_KV_EVENTS=true on "
        "the servers, and OPTION_MODEL_ID here, for the tokenizer.",
    )
    session_key: str | None = _option(
        text,
        "OPTION_SESSION_KEY",
        "SESSION_KEY",
        otherwise="the header X-Session-Id, or `session_id`, `user_id`, `user` in the body",
        help="The header, or key of a JSON body, that names a session for the `session` strategy. "
        "X-Amzn-SageMaker-Session-Id always does.",
    )
    router_processes: int = _option(
        integer(1, 64),
        "OPTION_ROUTER_PROCESSES",
        default=1,
        help="Processes of `route` on its port, which tell each other what they do.",
    )
    router_first_byte_timeout: int = _option(
        integer(low=1),
        "OPTION_ROUTER_FIRST_BYTE_TIMEOUT",
        default=600,
        help="Seconds that a server may take until its answer begins, for which answers that are "
        "not streamed have to be whole.",
    )
    router_idle_timeout: int = _option(
        integer(low=1),
        "OPTION_ROUTER_IDLE_TIMEOUT",
        default=300,
        help="Seconds that an answer may stand still.",
    )
    kv_events: bool = _option(
        boolean,
        "OPTION_KV_EVENTS",
        default=False,
        help="Publish what enters and leaves the engine's KV cache, for a router's `kvaware` "
        "strategy. Whoever reaches the ports can read prompts: keep them inside the cluster.",
    )
    kv_events_port: int = _option(
        integer(1, 65534),
        "OPTION_KV_EVENTS_PORT",
        default=5557,
        help="The port of these events; their log is on the next one. Each data parallel rank has "
        "two ports of its own: all ranks' events come first, then all logs.",
    )

    secure_mode: bool = _option(
        boolean,
        "SAGEMAKER_SECURE_MODE",
        heading="Secure mode",
        default=False,
        help="Refuse what the controls forbid (docs/explanation/security.md). SageMaker sets this "
        "and the next two; no file can.",
    )
    security_controls: tuple[str, ...] = _option(
        some_of(REQUIREMENTS, PICKLE_FILES, REMOTE_CODE, SCRIPTS, TEMPLATE),
        "SAGEMAKER_SECURITY_CONTROLS",
        default=(),
        help="What is forbidden, parted by commas: `DISALLOW_REQUIREMENTS_TXT`, "
        "`DISALLOW_PICKLE_FILES`, `DISALLOW_TRUST_REMOTE_CODE`, "
        "`DISALLOW_CUSTOM_INFERENCE_SCRIPTS`, `DISALLOW_CHAT_TEMPLATE`.",
    )
    untrusted_channels: tuple[str, ...] = _option(
        words,
        "SAGEMAKER_UNTRUSTED_CHANNELS",
        default=(),
        help="The folders, parted by commas, whose files nobody vouches for.",
    )

    config_file: str | None = _option(
        text,
        "OPTION_CONFIG_FILE",
        heading="Configuration itself",
        otherwise="`slipway.yaml` in the model's folder",
        help="A YAML file with options.",
    )
    model_store: str = _option(
        text,
        "SERVING_MODEL_STORE",
        default=MODEL_STORE,
        help="The folder where a model, `serving.properties` and `slipway.yaml` are looked for.",
    )
    strict: bool = _option(
        boolean,
        "OPTION_STRICT",
        default=True,
        help="Refuse to start when an option's name is not known; false only warns.",
    )

    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """vLLM options given by their own names, read but not interpreted: name → value."""
    model_folder: Path | None = None
    """The folder with what belongs to the deployment: option files, model.py, adapters."""
    lmcache: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """`LMCACHE_*` variables, as they came."""
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Field, or name of a vLLM option → the name it was given by. What is not here is default."""
    files: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    """Field, name of a vLLM option or LMCACHE_* variable → the file it was given in."""
    notes: tuple[str, ...] = ()
    """What the operator should know of the options given: a sentence each."""
    interactive: bool = False
    """Whether SageMaker's limits to the time of an answer hold."""

    @property
    def runs_adapter_code(self) -> bool:
        """Whether adapters may have a model.py."""
        return not self.secure_mode if self.adapter_code is None else self.adapter_code

    @property
    def whole_timeout(self) -> int | None:
        """Seconds that an answer which is not streamed may take."""
        return self.predict_timeout or (SAGEMAKER_WHOLE_S if self.interactive else None)

    @property
    def stream_timeout(self) -> int | None:
        """Seconds that a stream may take."""
        return self.predict_timeout or (SAGEMAKER_STREAM_S if self.interactive else None)

    @property
    def properties(self) -> Mapping[str, str]:
        """The options as LMI tells its handlers of them, by their names in `serving.properties`."""
        values = {name: getattr(self, name) for name in OPTIONS} | dict(self.engine)
        return {
            name: value if isinstance(value, str) else json.dumps(value, default=list)
            for name, value in values.items()
            if value is not None
        }

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that requests may give as `model`; the first stands in answers."""
        endpoint = (self.endpoint_name,) if self.endpoint_name else ()
        if self.served_model_name:
            return (*self.served_model_name, *endpoint)
        if self.model_id.startswith("s3://"):
            return (self.model_id.rstrip("/").rsplit("/", 1)[1], "lmi", *endpoint)
        local = self.model_id.startswith((".", "/", "~")) or Path(self.model_id).is_dir()
        name = Path(self.model_id).absolute().name if local else self.model_id
        return (name, "lmi", *endpoint)


OPTIONS: Mapping[str, Option] = {
    field.name: field.metadata["option"]
    for field in dataclasses.fields(Settings)
    if "option" in field.metadata
}
"""Settings field → what is declared of it."""


@functools.cache
def vllm_options() -> Mapping[str, Reader]:
    """vLLM's own options that are passed on: name → reader."""
    declared = {option.vllm for option in OPTIONS.values()}
    listed = json.loads(Path(__file__).with_name("vllm_options.json").read_text())
    found = {
        name: kind(row["kind"], tuple(row.get("choices", ())))
        for name, row in listed.items()
        if name not in declared and name not in REFUSED
    }
    return {**found, **{name: integer(low=1) for name in ("nnodes", "data_parallel_size")}}


@functools.cache
def flags() -> Mapping[str, tuple[str, Reader | None]]:
    """Flag → the variable that means the same, and its reader; None where it does nothing."""
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
    return found


def flag(name: str) -> str:
    """The flag that means the same as a variable: its name without the prefix of whose it is."""
    bare = re.sub(r"^(OPTION|SERVING|SAGEMAKER)_", "", name)
    return "--" + bare.lower().replace("_", "-")


def names_option(name: str) -> bool:
    """Whether a handler would take a property of this name for an option, be it set or not.

    A client's header by such a name would otherwise stand in the place of what is not set.
    """
    return name.lower().removeprefix("option.") in _properties()


@functools.cache
def _properties() -> frozenset[str]:
    names = {it for option in OPTIONS.values() for it in (option.vllm, *option.names) if it}
    spelled = {name.removeprefix(PREFIX).lower() for name in names}
    return frozenset({*OPTIONS, *spelled, *vllm_options(), "model_dir"})
