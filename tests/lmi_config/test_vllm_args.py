import pytest

from lmi_config.machine import Machine
from lmi_config.settings import SettingsError, read
from lmi_config.vllm_args import arguments, environment

GIB = 1024**3
CPU = Machine(cpus=(0, 1, 4, 5), memory=24 * GIB, gpus=0)
GPU = Machine(cpus=tuple(range(16)), memory=128 * GIB, gpus=4)


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
    assert arguments(read(environ), GPU) == [
        "--model=org/model",
        "--served-model-name",
        "org/model",
        "lmi",
        "--tensor-parallel-size=4",
        "--max-model-len=8000",
        "--max-num-seqs=64",
        "--dtype=float16",
        "--gpu-memory-utilization=0.8",
        "--trust-remote-code",
        "--no-enable-chunked-prefill",
        "--ignore-patterns",
        "a",
        "b",
        "--seed=-1",
    ]


@pytest.mark.parametrize(
    ("environ", "machine", "expected"),
    [
        ({}, CPU, "--tensor-parallel-size=1"),
        ({"OPTION_TENSOR_PARALLEL_DEGREE": "2"}, CPU, "--tensor-parallel-size=2"),
        ({"OPTION_PIPELINE_PARALLEL_SIZE": "2"}, GPU, "--tensor-parallel-size=2"),
        ({"OPTION_TENSOR_PARALLEL_DEGREE": "8", "OPTION_NNODES": "2"}, GPU, "--nnodes=2"),
        ({}, CPU, "--enforce-eager"),
        ({"OPTION_ENFORCE_EAGER": "false"}, CPU, "--no-enforce-eager"),
        ({}, CPU, f"--kv-cache-memory-bytes={4 * GIB}"),
        ({"OPTION_TENSOR_PARALLEL_DEGREE": "2"}, CPU, f"--kv-cache-memory-bytes={2 * GIB}"),
        (
            {},
            Machine(cpus=(0,), memory=2 * GIB, gpus=0),
            f"--kv-cache-memory-bytes={GIB // 2}",
        ),
        ({"OPTION_KV_CACHE_MEMORY_BYTES": "1G"}, CPU, f"--kv-cache-memory-bytes={GIB}"),
    ],
)
def test_what_the_machine_adds(environ, machine, expected):
    assert expected in arguments(read(environ), machine)


@pytest.mark.parametrize(
    ("degree", "machine", "fault"),
    [
        ("5", CPU, "needs 5 CPUs, but this machine shows 4; use at most 4, or max"),
        ("8", GPU, "needs 8 GPUs, but this machine shows 4; use at most 4, or max"),
    ],
)
def test_more_ranks_than_devices_are_refused(degree, machine, fault):
    with pytest.raises(SettingsError, match=fault):
        arguments(read({"OPTION_TENSOR_PARALLEL_DEGREE": degree}), machine)


@pytest.mark.parametrize(
    ("environ", "machine", "expected"),
    [
        ({}, GPU, {}),
        ({}, CPU, {"TORCHDYNAMO_DISABLE": "1"}),
        ({"OPTION_ENFORCE_EAGER": "false"}, CPU, {}),
        (
            {"OPTION_TENSOR_PARALLEL_DEGREE": "2"},
            CPU,
            {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0,1|4,5"},
        ),
        (
            {"OPTION_TENSOR_PARALLEL_DEGREE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
            CPU,
            {"TORCHDYNAMO_DISABLE": "1"},
        ),
    ],
)
def test_the_engines_environment(environ, machine, expected):
    always = {"VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    assert environment(read(environ), machine, environ) == always | expected
