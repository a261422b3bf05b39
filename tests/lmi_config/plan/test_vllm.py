# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest

from lmi_config.options.settings import SettingsError, read
from lmi_config.plan.devices import parallelism
from lmi_config.plan.vllm import arguments, batch, environment, lora_modules, options
from tests.lmi_config.examples import machine
from tests.lmi_config.examples import model as model_facts

CPU = machine()
GPU = machine(gpus=4)
SMALL_SHM = {"shm": 64 << 20}
MANY_CPUS = machine(cpus=tuple(range(8)))


def command(environ, here, model="m", derived=()):
    settings = read(environ)
    spread = parallelism.decide(settings, here, model_facts())
    found = options(settings, here, spread, dict(derived))
    return arguments({**found, "model": model})


def test_the_whole_command_line_on_gpus():
    environ = {
        "OPTION_MODEL_ID": "org/model",
        "OPTION_MAX_MODEL_LEN": "8k",
        "OPTION_MAX_ROLLING_BATCH_SIZE": "64",
        "OPTION_DTYPE": "fp16",
        "OPTION_GPU_MEMORY_UTILIZATION": "0.8",
        "OPTION_TRUST_REMOTE_CODE": "true",
        "OPTION_ENABLE_CHUNKED_PREFILL": "false",
        "OPTION_SEED": "-1",
        "OPTION_IGNORE_PATTERNS": "a,b",
    }
    assert command(environ, GPU, "/somewhere", {"speculative_config": {"a": 1}}) == [
        "--model=/somewhere",
        "--served-model-name",
        "org/model",
        "lmi",
        "--tensor-parallel-size=4",
        "--dtype=float16",
        "--trust-remote-code",
        "--gpu-memory-utilization=0.8",
        "--max-model-len=8000",
        "--max-num-seqs=64",
        "--enable-prompt-tokens-details",
        "--no-enable-chunked-prefill",
        "--ignore-patterns",
        "a",
        "b",
        "--seed=-1",
        '--speculative-config={"a":1}',
    ]


@pytest.mark.parametrize(
    ("environ", "here", "expected"),
    [
        ({}, CPU, ["--tensor-parallel-size=1", "--enforce-eager"]),
        ({"OPTION_TENSOR_PARALLEL_DEGREE": "2"}, CPU, ["--tensor-parallel-size=2"]),
        ({}, GPU, ["--tensor-parallel-size=4"]),
        ({"OPTION_PIPELINE_PARALLEL_DEGREE": "2"}, GPU, ["--tensor-parallel-size=2"]),
        ({"OPTION_PIPELINE_PARALLEL_SIZE": "2"}, GPU, ["--pipeline-parallel-size=2"]),
        ({"OPTION_TENSOR_PARALLEL_DEGREE": "8", "OPTION_NNODES": "2"}, GPU, ["--nnodes=2"]),
        ({"OPTION_ENABLE_LORA": "true"}, CPU, ["--enable-lora"]),
        ({}, CPU, ["--distributed-executor-backend=uni"]),
        ({}, dataclasses.replace(MANY_CPUS, shm=64 << 20), ["--distributed-executor-backend=uni"]),
        (
            {"OPTION_DISTRIBUTED_EXECUTOR_BACKEND": "mp"},
            machine(**SMALL_SHM),
            ["--distributed-executor-backend=mp"],
        ),
        ({"OPTION_ENFORCE_EAGER": "false"}, CPU, ["--no-enforce-eager"]),
        ({"OPTION_ENABLE_LORA": "true"}, GPU, ["--enable-lora", "--max-loras=4"]),
        ({"OPTION_ENABLE_LORA": "true"}, GPU, ["--enable-lora"]),
        ({"OPTION_ENABLE_LORA": "true", "OPTION_MAX_LORAS": "9"}, GPU, ["--max-loras=9"]),
        ({"OPTION_TASK": "text-embedding"}, GPU, ["--runner=pooling", "--convert=embed"]),
        ({"OPTION_KV_TRANSFER_CONFIG": '{"a": [1]}'}, GPU, ['--kv-transfer-config={"a":[1]}']),
        ({"OPTION_QUANTIZE": "awq"}, GPU, ["--quantization=awq"]),
        ({"OPTION_CPU_OFFLOAD_GB_PER_GPU": "2"}, GPU, ["--cpu-offload-gb=2.0"]),
    ],
)
def test_the_command_for_options_and_a_machine(environ, here, expected):
    assert set(expected) <= set(command(environ, here))


@pytest.mark.parametrize("count", [0, 1, 4, 8])
def test_max_is_every_gpu_or_one_without(count):
    environ = {"OPTION_TENSOR_PARALLEL_DEGREE": "max"}
    expected = f"--tensor-parallel-size={count or 1}"
    assert expected in command(environ, machine(gpus=count))


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({"OPTION_PIPELINE_PARALLEL_DEGREE": "2"}, 2),
        ({"OPTION_DATA_PARALLEL_SIZE": "4"}, 1),
        ({"OPTION_DATA_PARALLEL_SIZE": "8", "OPTION_DATA_PARALLEL_SIZE_LOCAL": "2"}, 2),
        ({"OPTION_TENSOR_PARALLEL_DEGREE": "16", "OPTION_NNODES": "4"}, 16),
        ({"OPTION_PIPELINE_PARALLEL_DEGREE": "2", "OPTION_NNODES": "2"}, 4),
        (
            {
                "OPTION_TENSOR_PARALLEL_DEGREE": "8",
                "OPTION_PIPELINE_PARALLEL_DEGREE": "2",
                "OPTION_DISTRIBUTED_EXECUTOR_BACKEND": "ray",
            },
            8,
        ),
    ],
)
def test_tensor_parallel_goes_with_the_other_kinds(environ, size):
    assert f"--tensor-parallel-size={size}" in command(environ, machine(gpus=4))


@pytest.mark.parametrize(
    ("environ", "here", "fault"),
    [
        (
            {"OPTION_TENSOR_PARALLEL_DEGREE": "8"},
            CPU,
            "OPTION_TENSOR_PARALLEL_DEGREE=8: needs 8 CPUs, but this machine shows 4; use at most "
            "4, or max",
        ),
        (
            {"TENSOR_PARALLEL_DEGREE": "8"},
            GPU,
            "TENSOR_PARALLEL_DEGREE=8: needs 8 GPUs, but this machine shows 4; use at most 4, or "
            "max",
        ),
        (
            {"OPTION_TENSOR_PARALLEL_DEGREE": "4", "OPTION_DATA_PARALLEL_SIZE": "2"},
            GPU,
            "OPTION_TENSOR_PARALLEL_DEGREE=4: needs 8 GPUs, but this machine shows 4; use at most "
            "2, or max",
        ),
        (
            {"OPTION_PIPELINE_PARALLEL_DEGREE": "8"},
            GPU,
            "OPTION_PIPELINE_PARALLEL_DEGREE=8: needs 8 GPUs, but this machine shows 4",
        ),
        (
            {"OPTION_DATA_PARALLEL_SIZE": "5"},
            GPU,
            "OPTION_DATA_PARALLEL_SIZE=5: needs 5 GPUs, but this machine shows 4",
        ),
    ],
)
def test_more_ranks_than_devices_are_refused(environ, here, fault):
    with pytest.raises(SettingsError) as error:
        command(environ, here)
    assert str(error.value).endswith(fault)


@pytest.mark.parametrize(
    ("environ", "here", "expected"),
    [
        ({}, GPU, {"HF_HUB_OFFLINE": "1"}),
        ({"OPTION_TRUST_REMOTE_CODE": "true"}, GPU, {}),
        ({"OPTION_TOKENIZER": "org/tokenizer"}, GPU, {}),
        ({"HF_HUB_OFFLINE": "0"}, GPU, {}),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            },
            GPU,
            {
                "HF_HUB_OFFLINE": "1",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
                "OTEL_SERVICE_NAME": "slipway",
            },
        ),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317",
                "OTEL_RESOURCE_ATTRIBUTES": "service.name=mine",
            },
            GPU,
            {"HF_HUB_OFFLINE": "1", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"},
        ),
        (
            {"SAGEMAKER_SAFE_PORT_RANGE": "5001-5009"},
            GPU,
            {"HF_HUB_OFFLINE": "1", "VLLM_PORT": "5004"},
        ),
        ({}, MANY_CPUS, {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}),
        ({"OPTION_ENFORCE_EAGER": "false"}, MANY_CPUS, {"HF_HUB_OFFLINE": "1"}),
        (
            {"OPTION_TENSOR_PARALLEL_DEGREE": "2"},
            CPU,
            {
                "HF_HUB_OFFLINE": "1",
                "TORCHDYNAMO_DISABLE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "0,1|4,5",
            },
        ),
        (
            {"OPTION_TENSOR_PARALLEL_DEGREE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
            CPU,
            {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"},
        ),
        ({}, machine(gpus=4, **SMALL_SHM), {"HF_HUB_OFFLINE": "1"}),
        (
            {},
            CPU,
            {
                "HF_HUB_OFFLINE": "1",
                "TORCHDYNAMO_DISABLE": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "OMP_NUM_THREADS": "3",
            },
        ),
        (
            {"OMP_NUM_THREADS": "2"},
            machine(**SMALL_SHM),
            {
                "HF_HUB_OFFLINE": "1",
                "TORCHDYNAMO_DISABLE": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            },
        ),
    ],
)
def test_the_engines_environment(environ, here, expected):
    always = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        **{"VLLM_MAX_AUDIO_DECODE_DURATION_S": "1500", "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": "64"},
    }
    on_cpu = {} if here.gpus else {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256"}
    spread = parallelism.decide(read(environ), here, model_facts())
    assert environment(read(environ), here, spread, environ) == always | on_cpu | expected


@pytest.mark.parametrize(
    ("environ", "origin"),
    [
        ({"OPTION_SERVED_MODEL_NAME": "x,--trust-remote-code"}, "OPTION_SERVED_MODEL_NAME"),
        ({"OPTION_SERVED_MODEL_NAME": '["-x"]'}, "OPTION_SERVED_MODEL_NAME"),
        ({"OPTION_ENDPOINT_NAME": "--middleware=a.b"}, "OPTION_SERVED_MODEL_NAME"),
        ({"OPTION_MODEL_ID": "/models/--port=1"}, "OPTION_SERVED_MODEL_NAME"),
        ({"OPTION_ALLOWED_MEDIA_DOMAINS": "a,-b"}, "OPTION_ALLOWED_MEDIA_DOMAINS"),
        ({"SM_VLLM_COLLECT_DETAILED_TRACES": "-x"}, "SM_VLLM_COLLECT_DETAILED_TRACES"),
    ],
)
def test_no_value_becomes_an_option(environ, origin):
    with pytest.raises(SettingsError, match=rf"{origin}: '-.*' begins with a dash"):
        command(environ, machine())


@pytest.mark.parametrize(
    ("environ", "needed"),
    [
        ({"OPTION_ENABLE_AUTO_TOOL_CHOICE": "true"}, "OPTION_TOOL_CALL_PARSER"),
        ({"OPTION_ENABLE_LOG_OUTPUTS": "true"}, "OPTION_ENABLE_LOG_REQUESTS"),
    ],
)
def test_what_vllm_refuses_without_another_option_is_refused_by_the_plan(environ, needed):
    name = next(iter(environ))
    with pytest.raises(SettingsError, match=f"{name}: vLLM refuses it without {needed}"):
        command(environ, machine())


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317", "vLLM's traces need"),
        ("OPTION_SLO_TTFT_MS", "500", "OPTION_SLO_TTFT_MS needs"),
        ("OPTION_SLO_ITL_MS", "50", "OPTION_SLO_ITL_MS needs"),
    ],
)
def test_what_needs_statistics_is_refused_without_them(name, value, fault):
    with pytest.raises(SettingsError, match=f"OPTION_DISABLE_LOG_STATS: {fault}"):
        command({"OPTION_DISABLE_LOG_STATS": "true", name: value}, machine())


@pytest.mark.parametrize("kind", ["TOOL_CALL", "REASONING"])
def test_a_parser_that_vllm_does_not_have_is_refused_by_the_plan(kind):
    environ = {f"OPTION_{kind}_PARSER": "qwen"}
    with pytest.raises(SettingsError, match=f"OPTION_{kind}_PARSER='qwen': .*, mistral, "):
        command(environ, machine())
    plugin = {f"OPTION_{kind.removesuffix('_CALL')}_PARSER_PLUGIN": "/a/plugin.py"}
    assert any("parser=qwen" in it for it in command(environ | plugin, machine()))


def test_an_empty_list_is_no_argument():
    assert not any(
        "domains" in it for it in command({"SM_VLLM_ALLOWED_MEDIA_DOMAINS": "[]"}, machine())
    )


@pytest.mark.parametrize(
    ("environ", "here", "heard", "expected"),
    [
        ({}, CPU, 1500, {"max_num_batched_tokens": 4096}),
        ({}, CPU, 6000, {"max_num_batched_tokens": 6000}),
        ({}, CPU, None, {}),
        ({}, GPU, 1500, {}),
        ({"OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS": "2000"}, CPU, 1500, {}),
    ],
)
def test_a_step_has_room_for_a_sound(environ, here, heard, expected):
    assert batch(read(environ), here, dataclasses.replace(model_facts(), heard=heard)) == expected


LORA = {"OPTION_ENABLE_LORA": "true"}


@pytest.mark.parametrize(
    ("modules", "more", "fault"),
    [
        ("a", LORA, "write name=path"),
        ("a=", LORA, "write name=path"),
        ("=/a", LORA, "write name=path"),
        ('{"name": "a"}', LORA, "write name=path"),
        ('{"name": 5, "path": "/a"}', LORA, "write name=path"),
        ('{"name": "a", "path": "/a", "rank": 8}', LORA, "write name=path"),
        ("a=owner/adapter", LORA, "OPTION_ADAPTER_REPOS=owner/adapter"),
        ("a=hf://owner/adapter@v1", LORA, "OPTION_ADAPTER_REPOS=owner/adapter"),
        ("a=owner/adapter", {**LORA, "OPTION_ADAPTER_REPOS": "other/*"}, "OPTION_ADAPTER_REPOS"),
        ('[{"name": "a", "path": "/a"}, {"name": "a", "path": "/b"}]', LORA, "names 'a' twice"),
        ("a=/a", {}, "OPTION_ENABLE_LORA"),
    ],
)
def test_lora_modules_that_cannot_be_registered_are_refused_by_the_plan(modules, more, fault):
    with pytest.raises(SettingsError, match=fault):
        lora_modules(read({"OPTION_LORA_MODULES": modules, **more}))
