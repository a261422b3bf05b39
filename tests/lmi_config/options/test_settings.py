# SPDX-License-Identifier: Apache-2.0
import contextlib
import dataclasses
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_config.options.declared import (
    OPTIONS,
    VLLM_SECRET,
    VLLM_UNTRUSTED,
    Settings,
    vllm_options,
)
from lmi_config.options.ignored import REFUSED, REMOVED, UNUSED
from lmi_config.options.settings import SettingsError, read

TRACES, PROTOCOL = "otlp_traces_endpoint", "OTEL_EXPORTER_OTLP_PROTOCOL"


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({}, "model_id", "/opt/ml/model"),
        ({"OPTION_MODEL_ID": "a/b"}, "model_id", "a/b"),
        ({"OPTION_MODEL": "a/b"}, "model_id", "a/b"),
        ({"HF_MODEL_ID": "h", "OPTION_MODEL_ID": "o"}, "model_id", "h"),
        ({"HF_MODEL_ID": "", "OPTION_MODEL_ID": "o"}, "model_id", "o"),
        ({}, "port", 8080),
        ({"OPTION_PORT": "81", "SAGEMAKER_BIND_TO_PORT": "82"}, "port", 82),
        ({"SERVING_MAX_REQUEST_SIZE": "100"}, "max_request_size", 100),
        ({}, "tensor_parallel_degree", "max"),
        ({"OPTION_TENSOR_PARALLEL_DEGREE": "MAX"}, "tensor_parallel_degree", "max"),
        ({"SM_NUM_GPUS": "2", "TENSOR_PARALLEL_DEGREE": "4"}, "tensor_parallel_degree", 4),
        ({"OPTION_TENSOR_PARALLEL_SIZE": "4"}, "tensor_parallel_degree", 4),
        ({"OPTION_MAX_MODEL_LEN": " 8192 "}, "max_model_len", 8192),
        ({"OPTION_MAX_MODEL_LEN": "8k"}, "max_model_len", 8000),
        ({"OPTION_MAX_MODEL_LEN": "8K"}, "max_model_len", 8192),
        ({"OPTION_MAX_MODEL_LEN": "1.5k"}, "max_model_len", 1500),
        ({"OPTION_KV_DISK_SIZE": "4GB"}, "kv_disk_size", 4 * 10**9),
        ({"OPTION_KV_DISK_SIZE": "1.5 GiB"}, "kv_disk_size", 3 * 2**29),
        ({"OPTION_KV_DISK_SIZE": "4gb"}, "kv_disk_size", 4 * 10**9),
        ({"HF_TASK": "Image-Text-To-Text"}, "task", "text-generation"),
        ({"HF_TASK": "sentence-similarity"}, "task", "feature-extraction"),
        ({"HF_TASK": "text-ranking"}, "task", "classify"),
        ({"HF_TASK": "text-to-image", "DJL_ENTRY_POINT": "model.py"}, "task", "text-to-image"),
        ({"HF_TASK": "conversational", "OPTION_ENTRYPOINT": "model.py"}, "task", "text-generation"),
        ({"OPTION_MAX_MODEL_LEN": "auto"}, "max_model_len", -1),
        ({"OPTION_DTYPE": "bf16"}, "dtype", "bfloat16"),
        ({"OPTION_ENFORCE_EAGER": "True"}, "enforce_eager", True),
        ({"OPTION_ENFORCE_EAGER": "0"}, "enforce_eager", False),
        ({"OPTION_MAX_ROLLING_BATCH_SIZE": "64"}, "max_rolling_batch_size", 64),
        ({}, "log_level", "info"),
        ({"OPTION_LOG_LEVEL": "WARNING"}, "log_level", "warning"),
        ({"SERVING_ERROR_RATE_MODEL": "10"}, "error_rate_model", (10, 60)),
        ({"SERVING_ERROR_RATE_ANY": "5/PT30S"}, "error_rate_any", (5, 30)),
        ({"SERVING_ERROR_RATE_WLM": "5/PT1H"}, "error_rate_wlm", (5, 3600)),
        ({"SERVING_ERROR_RATE_SERVER": "1/P2D"}, "error_rate_server", (1, 172_800)),
        ({}, "otlp_traces_endpoint", None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, TRACES, "http://c:4317"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/", PROTOCOL: "http/protobuf"},
            TRACES,
            "http://c:4318/v1/traces",
        ),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318",
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t:4318/v1/traces",
                PROTOCOL: "http/protobuf",
            },
            TRACES,
            "http://t:4318/v1/traces",
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_SDK_DISABLED": "true"},
            TRACES,
            None,
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_TRACES_EXPORTER": "none"},
            TRACES,
            None,
        ),
        (
            {"OPTION_MAX_ROLLING_BATCH_SIZE": "64", "OPTION_MAX_NUM_SEQS": "64"},
            "max_rolling_batch_size",
            64,
        ),
        ({"OPTION_SERVED_MODEL_NAME": "a, b"}, "model_names", ("a", "b")),
        ({"OPTION_SERVED_MODEL_NAME": '["a", "b"]'}, "model_names", ("a", "b")),
        ({"OPTION_MODEL_ID": "org/name"}, "model_names", ("org/name", "lmi")),
        (
            {"OPTION_MODEL_ID": "org/name", "OPTION_ENDPOINT_NAME": "mine"},
            "model_names",
            ("org/name", "lmi", "mine"),
        ),
        (
            {"OPTION_MODEL_ID": "/models/name/"},
            "model_names",
            ("name", "lmi", "/models/name", "/models/name/"),
        ),
        ({}, "model_names", ("model", "lmi", "/opt/ml/model")),
        ({"OPTION_MODEL_ID": "s3://b/p/name"}, "model_names", ("name", "lmi", "s3://b/p/name")),
        ({"OPTION_MAX_NUM_BATCHED_TOKENS": "4k"}, "max_rolling_batch_prefill_tokens", 4000),
        ({"OPTION_SEED": "7"}, "engine", {"seed": 7}),
        ({"OPTION_ENABLE_PREFIX_CACHING": "false"}, "engine", {"enable_prefix_caching": False}),
        ({"OPTION_DISABLE_LOG_STATS": "false"}, "engine", {}),
        ({"OPTION_KV_TRANSFER_CONFIG": '{"a": 1}'}, "kv_transfer_config", {"a": 1}),
        # as a shell or a YAML file breaks it
        (
            {"OPTION_SPECULATIVE_CONFIG": '{\n  "method": "ngram"\n}\n'},
            "speculative_config",
            {"method": "ngram"},
        ),
        ({"OPTION_KV_EVENTS_CONFIG": '{"a": 1}'}, "engine", {"kv_events_config": '{"a": 1}'}),
        # AWS's own vLLM container
        ({"SM_VLLM_MODEL": "a/b", "SM_VLLM_SEED": "7"}, "model_id", "a/b"),
        ({"SM_VLLM_SEED": "7"}, "engine", {"seed": 7}),
        # AWS's vLLM container makes bare flags of these.
        ({"SM_VLLM_ENFORCE_EAGER": ""}, "enforce_eager", True),
        ({"SM_VLLM_NO_ENABLE_PREFIX_CACHING": " "}, "engine", {"enable_prefix_caching": False}),
        ({"SM_VLLM_ENABLE_LORA": ""}, "enable_lora", True),
        ({"SM_VLLM_SEED": "", "OPTION_ENFORCE_EAGER": ""}, "engine", {}),
        ({"SM_VLLM_PORT": "81"}, "port", 81),
        ({"SM_VLLM_MAX_MODEL_LEN": "5"}, "max_model_len", 5),
        # text generation inference
        ({"HF_MODEL_QUANTIZE": "awq"}, "quantize", "awq"),
        ({"HF_MODEL_QUANTIZE": "awq", "OPTION_QUANTIZE": "gptq"}, "quantize", "gptq"),
        ({"HF_MODEL_TRUST_REMOTE_CODE": "true"}, "trust_remote_code", True),
        ({"MAX_CONCURRENT_REQUESTS": "7"}, "job_queue_size", 7),
        ({"MAX_CONCURRENT_REQUESTS": "7", "SERVING_JOB_QUEUE_SIZE": "8"}, "job_queue_size", 8),
        ({"MAX_BATCH_PREFILL_TOKENS": "4096"}, "max_rolling_batch_prefill_tokens", 4096),
        ({"MAX_BATCH_SIZE": "16"}, "max_rolling_batch_size", 16),
        ({"ENABLE_CUDA_GRAPHS": "true"}, "enforce_eager", False),
        ({"ENABLE_CUDA_GRAPHS": "true", "OPTION_ENFORCE_EAGER": "true"}, "enforce_eager", True),
        ({"CUDA_MEMORY_FRACTION": "0.8"}, "gpu_memory_utilization", 0.8),
        # SageMaker
        ({"SAGEMAKER_MAX_PAYLOAD_IN_MB": "5"}, "max_request_size", 5 * 1024**2),
        (
            {"SAGEMAKER_MAX_PAYLOAD_IN_MB": "5", "SAGEMAKER_MAX_REQUEST_SIZE": "6"},
            "max_request_size",
            6,
        ),
        (
            {"SAGEMAKER_MAX_PAYLOAD_IN_MB": "5", "SERVING_MAX_REQUEST_SIZE": "6"},
            "max_request_size",
            5 * 1024**2,
        ),
        (
            {"SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "9", "OPTION_PREDICT_TIMEOUT": "8"},
            "predict_timeout",
            9,
        ),
        ({"PREDICT_TIMEOUT": "9"}, "predict_timeout", 9),
        ({"SAGEMAKER_STARTUP_TIMEOUT": "9"}, "model_loading_timeout", 9),
        ({"MODEL_LOADING_TIMEOUT": "9"}, "model_loading_timeout", 9),
        # LMI
        ({"OPTION_CPU_OFFLOAD_GB_PER_GPU": "1.5"}, "cpu_offload_gb_per_gpu", 1.5),
        ({"PIPELINE_PARALLEL_DEGREE": "2"}, "pipeline_parallel_degree", 2),
        ({"HF_REVISION": "v1"}, "revision", "v1"),
        ({"HF_TASK": "text-embedding"}, "task", "text-embedding"),
        ({"OPTION_LMCACHE_AUTO_CONFIG": "True"}, "lmcache_auto_config", True),
        ({"OPTION_ENTRYPOINT": "djl_python.huggingface"}, "entry_point", "djl_python.huggingface"),
        ({"LMCACHE_CHUNK_SIZE": "8"}, "lmcache", {"LMCACHE_CHUNK_SIZE": "8"}),
        ({"PATH": "/bin", "OTHER_OPTION_X": "1"}, "engine", {}),
    ],
)
def test_an_option_is_read(environ, field, value):
    assert getattr(read(environ), field) == value


@pytest.mark.parametrize(
    ("environ", "whole", "stream"),
    [
        ({}, None, None),
        ({"SAGEMAKER_SAFE_PORT_RANGE": "9000-9999"}, 55, 470),
        ({"SAGEMAKER_BIND_TO_PORT": "8081"}, 55, 470),
        ({"SAGEMAKER_SAFE_PORT_RANGE": "9000-9999", "OPTION_PREDICT_TIMEOUT": "900"}, 900, 900),
        ({"SAGEMAKER_SAFE_PORT_RANGE": "9000-9999", "SAGEMAKER_BATCH": "true"}, None, None),
        ({"OPTION_PREDICT_TIMEOUT": "9"}, 9, 9),
    ],
)
def test_how_long_answers_may_take(environ, whole, stream):
    found = read(environ)
    assert (found.whole_timeout, found.stream_timeout) == (whole, stream)


NINES = "9" * 400
UNKNOWN = "(OPTION_STRICT=false ignores unknown options)"


@pytest.mark.parametrize(
    ("environ", "fault"),
    [
        (
            {"OPTION_MAX_MODEL_LEN": "abc"},
            "OPTION_MAX_MODEL_LEN='abc': "
            'should be a number of tokens, like 8192 or 8k, or "auto"',
        ),
        (
            {"OPTION_MAX_MODLE_LEN": "5"},
            "OPTION_MAX_MODLE_LEN: no such option; did you mean OPTION_MAX_MODEL_LEN? " + UNKNOWN,
        ),
        (
            {"OPTION_QQQQ": "5", "OPTION_STRICT": "true"},
            "OPTION_QQQQ: no such option " + UNKNOWN,
        ),
        (
            {"SAGEMAKER_BIND_TO_PORT": "99999"},
            "SAGEMAKER_BIND_TO_PORT='99999': should be a whole number, at least 1, at most 65535",
        ),
        (
            {"OPTION_GPU_MEMORY_UTILIZATION": "90"},
            "OPTION_GPU_MEMORY_UTILIZATION='90': "
            "should be a number above 0 and at most 1, like 0.9",
        ),
        (
            {"TENSOR_PARALLEL_DEGREE": "0"},
            "TENSOR_PARALLEL_DEGREE='0': should be a whole number, at least 1, or \"max\"",
        ),
        (
            {"OPTION_TRUST_REMOTE_CODE": "yes"},
            "OPTION_TRUST_REMOTE_CODE='yes': should be true or false",
        ),
        (
            {"OPTION_SCHEDULING_POLICY": "lifo"},
            "OPTION_SCHEDULING_POLICY='lifo': should be one of fcfs, priority",
        ),
        (
            {"OPTION_SPECULATIVE_CONFIG": "{"},
            "OPTION_SPECULATIVE_CONFIG='{': should be JSON (Expecting property name enclosed in "
            "double quotes: line 1 column 2 (char 1))",
        ),
        (
            {"OPTION_MAX_ROLLING_BATCH_SIZE": "64", "OPTION_MAX_NUM_SEQS": "32"},
            "OPTION_MAX_ROLLING_BATCH_SIZE='64' and OPTION_MAX_NUM_SEQS='32' set the same option "
            "to different values; keep one",
        ),
        (
            {"OPTION_HOST": "everywhere"},
            "OPTION_HOST='everywhere': should be an address, like 127.0.0.1, 0.0.0.0 or ::",
        ),
        (
            {"OPTION_ADAPTER_LIST": "https://host/list"},
            "OPTION_ADAPTER_LIST=(hidden): should be a folder, s3://bucket/prefix, or "
            "valkey://host:6379",
        ),
        (
            {"OPTION_ROOT_PATH": "/a"},
            "OPTION_ROOT_PATH: vLLM has this option, but its own HTTP server is not used: Slipway "
            "answers HTTP itself",
        ),
        (
            {"OPTION_MAX_LORA_RANK": "24"},
            "OPTION_MAX_LORA_RANK='24': should be one of 1, 8, 16, 32, 64, 128, 256, 320, 512",
        ),
        ({"OPTION_SERVED_MODEL_NAME": "[1"}, None),
        ({"OPTION_SPECULATIVE_CONFIG": "[" * 100_000}, None),
        (
            {"OPTION_SPECULATIVE_CONFIG": "[1]"},
            "OPTION_SPECULATIVE_CONFIG='[1]': should be a JSON object, like {\"a\": 1}",
        ),
        (
            {"SM_VLLM_MAX_MODLE_LEN": "5"},
            "SM_VLLM_MAX_MODLE_LEN: no such option; did you mean OPTION_MAX_MODEL_LEN? " + UNKNOWN,
        ),
        (
            {"OPTION_SEED": "1", "SM_VLLM_SEED": "2"},
            "OPTION_SEED='1' and SM_VLLM_SEED='2' set the same option to different values; "
            "keep one",
        ),
        (
            {"OPTION_KV_L2_URL": "redis://:hush@h", "SM_VLLM_HF_TOKEN": "x", "OPTION_PORT": "no"},
            "OPTION_PORT='no': should be a whole number, at least 1, at most 65535",
        ),
        (
            {"OPTION_ENTRYPOINT": "mine.py"},
            "OPTION_ENTRYPOINT='mine.py': should be model.py, as which to name a file of your own, "
            "beside serving.properties or the model's files, or one of LMI's own handlers, like "
            "djl_python.lmi_vllm.vllm_async_service",
        ),
        (
            {"OPTION_CPU_OFFLOAD_GB_PER_GPU": "-5"},
            "OPTION_CPU_OFFLOAD_GB_PER_GPU='-5': should be a number, at least 0",
        ),
        ({"OPTION_NNODES": "0"}, "OPTION_NNODES='0': should be a whole number, at least 1"),
        (
            {"OPTION_SERVED_MODEL_NAME": ","},
            "OPTION_SERVED_MODEL_NAME=',': should be at least one word",
        ),
        (
            {"OPTION_NUM_SPECULATIVE_TOKENS": "0"},
            "OPTION_NUM_SPECULATIVE_TOKENS='0': should be a whole number, at least 1",
        ),
        (
            {"OPTION_KV_DISK_SIZE": "4 boxes"},
            "OPTION_KV_DISK_SIZE='4 boxes': should be a whole number, or one with a suffix: 8k and "
            "8kB are 8,000, 8K and 8KiB are 8,192",
        ),
        ({"OPTION_KV_DISK_SIZE": NINES + "kB"}, f"OPTION_KV_DISK_SIZE='{NINES}kB': should be less"),
        ({"OPTION_MAX_MODEL_LEN": NINES + "k"}, f"OPTION_MAX_MODEL_LEN='{NINES}k': should be less"),
    ],
)
def test_a_fault_names_the_value_and_what_would_do(environ, fault):
    with pytest.raises(SettingsError) as refused:
        read(environ)
    assert len(refused.value.faults) == 1
    if fault:
        assert refused.value.faults[0] == fault


def test_all_faults_are_told_at_once():
    with pytest.raises(SettingsError) as refused:
        read({"OPTION_MAX_MODEL_LEN": "abc", "OPTION_MAX_MODLE_LEN": "5"})
    assert len(refused.value.faults) == 2
    assert str(refused.value).startswith("2 options cannot be used:\n  OPTION_MAX_MODEL_LEN='abc'")


def test_a_secret_is_not_shown():
    with pytest.raises(SettingsError) as refused:
        read({"OPTION_API_KEY": "hush", "OPTION_NUM_TOKENS": "hush"})
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("name", ["OPTION_API_KEY", "VLLM_API_KEY", "SM_VLLM_API_KEY"])
def test_the_key_by_its_names(name):
    assert read({name: "0123456789"}).api_key == "0123456789"
    assert "api_key" not in read({name: "0123456789"}).properties


def test_without_strictness_an_unknown_option_only_warns():
    settings = read({"OPTION_STRICT": "false", "OPTION_MAX_MODLE_LEN": "5"})
    assert settings.notes == (
        "OPTION_MAX_MODLE_LEN is not known: only a model.py can use it; did you mean "
        "OPTION_MAX_MODEL_LEN?",
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("OPTION_MAX_MODLE_LEN", "OPTION_MAX_MODEL_LEN"),
        ("OPTION_MAXMODEL_LEN", "OPTION_MAX_MODEL_LEN"),
        ("OPTION_GPU_MEMORY_UTILISATION", "OPTION_GPU_MEMORY_UTILIZATION"),
        ("SM_VLLM_ENFORCE_EAGAR", "OPTION_ENFORCE_EAGER"),
    ],
)
def test_what_is_surely_mistyped_stops_the_start(name, meant):
    with pytest.raises(SettingsError, match=f"{name}: no such option; did you mean {meant}"):
        read({name: "1"})


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("OPTION_OF_MY_HANDLER", "OPTION_OF_MY_HANDLER is not known: only a model.py can use it"),
        (
            "OPTION_MAX_BATCHED_TOKENS",
            "OPTION_MAX_BATCHED_TOKENS is not known: only a model.py can use it; did you mean "
            "OPTION_MAX_NUM_BATCHED_TOKENS?",
        ),
        (
            "OPTION_MAX_INPUT_LEN",
            "OPTION_MAX_INPUT_LEN has no effect here: set OPTION_MAX_MODEL_LEN, for prompt and "
            "answer together",
        ),
        ("OPTION_MIN_LORAS", "OPTION_MIN_LORAS is not known"),
    ],
)
def test_what_nobody_knows_is_told_and_refused_only_on_demand(name, note):
    assert read({name: "1"}).notes[0].startswith(note)
    if "is not known" in note:
        for stricter in ({"OPTION_STRICT": "true"}, {"SAGEMAKER_SECURE_MODE": "true"}):
            with pytest.raises(SettingsError, match=f"{name}: no such option"):
                read({name: "1", **stricter})


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({"SM_VLLM_NO_ENABLE_PREFIX_CACHING": "true"}, "enable_prefix_caching", False),
        ({"SM_VLLM_NO_ENABLE_PREFIX_CACHING": "false"}, "enable_prefix_caching", True),
        ({"OPTION_LIMIT_MM_PER_PROMPT": "image=2"}, "limit_mm_per_prompt", '{"image": 2}'),
        (
            {"OPTION_LIMIT_MM_PER_PROMPT": "image=4, video=0"},
            "limit_mm_per_prompt",
            '{"image": 4, "video": 0}',
        ),
    ],
)
def test_vllms_options_as_others_write_them(environ, field, value):
    assert read(environ).engine[field] == value


def test_lmis_options_that_mean_nothing_here_are_told_in_one_sentence():
    settings = read(
        {
            "OPTION_ROLLING_BATCH": "vllm",
            "OPTION_ASYNC_MODE": "true",
            "JAVA_OPTS": "-Xmx1g",
            "SERVING_MIN_WORKERS": "1",
            "SERVING_SERVICE_HOST": "10.0.0.1",  # Kubernetes sets it for a service "serving"
        }
    )
    assert settings.notes == (
        "accepted, but without effect here: JAVA_OPTS (there is no Java server); "
        "OPTION_ASYNC_MODE, OPTION_ROLLING_BATCH (vLLM is the only engine); "
        "SERVING_MIN_WORKERS (all copies start at once, and OPTION_COPIES or SERVING_MAX_WORKERS "
        "limits them)",
    )


def test_what_does_not_count_is_told():
    settings = read({"OPTION_PORT": "81", "SAGEMAKER_BIND_TO_PORT": "82"})
    assert settings.notes == ("OPTION_PORT is set, but SAGEMAKER_BIND_TO_PORT comes first",)


def test_a_name_that_no_file_can_have_is_told():
    with pytest.raises(SettingsError, match="File name too long"):
        read({"OPTION_MODEL_ID": "x" * 5000})


def test_every_option_tells_where_it_was_given():
    environ = {"SM_NUM_GPUS": "1", "SM_VLLM_MAX_NUM_SEQS": "2", "OPTION_SEED": "3"}
    assert read(environ).origins == {
        "tensor_parallel_degree": "SM_NUM_GPUS",
        "max_rolling_batch_size": "SM_VLLM_MAX_NUM_SEQS",
        "seed": "OPTION_SEED",
    }


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        read({}).port = 1  # type: ignore[misc]


@pytest.mark.parametrize(("name", "instead"), REMOVED.items())
def test_a_removed_option_is_accepted_and_says_what_to_do_instead(name, instead):
    known = {it for option in OPTIONS.values() for it in option.all_names}
    known |= {f"OPTION_{it.upper()}" for it in vllm_options()}
    assert name not in known
    assert {*re.findall(r"OPTION_\w+", instead)} <= known
    for written in (name, name.replace("OPTION_", "SM_VLLM_")):
        assert read({written: "1"}).notes == (f"{written} has no effect here: {instead}",)


@pytest.mark.parametrize(
    ("environ", "engine"),
    [
        ({"OPTION_ROLLING_BATCH": "trtllm"}, "TensorRT-LLM"),
        ({"OPTION_ENTRYPOINT": "djl_python.tensorrt_llm"}, "TensorRT-LLM"),
        ({"OPTION_ROLLING_BATCH": "neuron"}, "Neuron"),
        ({"DJL_ENTRY_POINT": "djl_python.transformers_neuronx"}, "Neuron"),
        ({"OPTION_ENGINE": "DeepSpeed"}, "DeepSpeed"),
    ],
)
@pytest.mark.parametrize("strict", ["true", "false"])
def test_an_option_that_chooses_another_engine_stops_the_start(environ, engine, strict):
    with pytest.raises(SettingsError) as refused:
        read({**environ, "OPTION_STRICT": strict})
    (fault,) = refused.value.faults
    assert fault.startswith(f"{next(iter(environ))}=")
    assert f"chooses {engine}, but Slipway only runs vLLM; remove it" in fault
    assert f"use LMI's container with {engine}" in fault


def test_another_engine_is_refused_from_a_file_too(tmp_path):
    written = "engine=DeepSpeed\noption.rolling_batch=deepspeed\n"
    (tmp_path / "serving.properties").write_text(written)
    with pytest.raises(SettingsError) as refused:
        read({"SERVING_MODEL_STORE": str(tmp_path)})
    assert [fault.partition(":")[0] for fault in refused.value.faults] == ["serving.properties"] * 2
    assert "engine = 'DeepSpeed': chooses DeepSpeed" in str(refused.value)


@pytest.mark.parametrize("batching", ["vllm", "lmi-dist", "auto", "disable"])
def test_ways_to_choose_vllm_are_accepted(batching):
    environ = {"OPTION_ENGINE": "MPI", "OPTION_MPI_MODE": "true", "OPTION_ROLLING_BATCH": batching}
    assert "vLLM is the only engine" in read(environ).notes[-1]
    assert read({"OPTION_ENGINE": "Python", "OPTION_ROLLING_BATCH": "auto"}).notes


def test_the_level_of_compilation_is_its_mode_by_now():
    found = read({"OPTION_COMPILATION_CONFIG": '{"level": 3, "cache_dir": "/tmp"}'}).engine
    assert json.loads(found["compilation_config"]) == {"mode": 3, "cache_dir": "/tmp"}
    same = read({"OPTION_COMPILATION_CONFIG": '{"mode": 0}'}).engine
    assert same["compilation_config"] == '{"mode": 0}'


def test_a_list_is_read_as_awss_container_reads_it():
    # deep-learning-containers, scripts/docker/vllm/sagemaker_args.py (Apache-2.0)
    one, two = '{"name": "a", "path": "/a"}', '{"name": "b", "path": "/b"}'
    for written in (f"[{one}, {two}]", f"{one} {two}", f"{one}{two}"):
        assert read({"SM_VLLM_LORA_MODULES": written}).engine["lora_modules"] == (one, two)
    assert read({"SM_VLLM_LORA_MODULES": one}).engine["lora_modules"] == (one,)
    sizes = read({"SM_VLLM_CUDAGRAPH_CAPTURE_SIZES": "[1, 2, 4]"})
    assert sizes.engine["cudagraph_capture_sizes"] == ("1", "2", "4")
    with pytest.raises(SettingsError, match="should be JSON"):
        read({"SM_VLLM_LORA_MODULES": f"{one} b=/b"})


def test_every_declared_vllm_option_exists():
    import json
    from pathlib import Path

    listed = json.loads(Path("lmi_config/options/vllm_options.json").read_text())
    assert {option.vllm for option in OPTIONS.values() if option.vllm} <= listed.keys()
    assert REFUSED.keys() <= listed.keys()
    assert vllm_options().keys() >= VLLM_SECRET | VLLM_UNTRUSTED


NAMES = sorted(
    {name for option in OPTIONS.values() for name in option.all_names}
    | {f"OPTION_{name.upper()}" for name in vllm_options()}
    | {f"SM_VLLM_{name.upper()}" for name in vllm_options()}
    | UNUSED.keys()
)
VALUES = (
    st.sampled_from(["", "1", "-1", "0.5", "true", "max", "{}", "[1]", "x,y", "8k"]) | st.text()
)


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8))
def test_any_environment_gives_settings_or_the_one_error(environ):
    with contextlib.suppress(SettingsError):
        assert isinstance(read(environ), Settings)


def test_none_of_the_toolkits_variables_is_passed_over_in_silence():
    """The variables of AWS's samples for HyperPod and SageMaker: each is used or noted."""
    noted = {
        "DJL_OFFLINE": "true",
        "MODEL_CACHE_ROOT": "/opt/ml/model",
        "SAGEMAKER_CONTAINER_LOG_LEVEL": "20",
        "SAGEMAKER_ENV": "1",
        "SAGEMAKER_MODEL_SERVER_WORKERS": "1",
        "SAGEMAKER_PROGRAM": "inference.py",
        "SAGEMAKER_REGION": "us-east-1",
        "SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/model/code",
    }
    found = read({"NUM_SHARD": "2", "SAGEMAKER_MODEL_SERVER_TIMEOUT": "3600", **noted})
    assert (found.tensor_parallel_degree, found.predict_timeout) == (2, 3600)
    (note,) = found.notes
    assert note.startswith("accepted, but without effect here: ")
    assert [name for name in noted if name not in note] == []
