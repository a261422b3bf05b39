import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_config.options import OPTIONS, REFUSED, Settings, vllm_options
from lmi_config.settings import SettingsError, read


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
        ({"OPTION_MAX_MODEL_LEN": "auto"}, "max_model_len", -1),
        ({"OPTION_DTYPE": "bf16"}, "dtype", "bfloat16"),
        ({"OPTION_ENFORCE_EAGER": "True"}, "enforce_eager", True),
        ({"OPTION_ENFORCE_EAGER": "0"}, "enforce_eager", False),
        ({"OPTION_MAX_ROLLING_BATCH_SIZE": "64"}, "max_rolling_batch_size", 64),
        (
            {"OPTION_MAX_ROLLING_BATCH_SIZE": "64", "OPTION_MAX_NUM_SEQS": "64"},
            "max_rolling_batch_size",
            64,
        ),
        ({"OPTION_SERVED_MODEL_NAME": "a, b"}, "model_names", ("a", "b")),
        ({"OPTION_SERVED_MODEL_NAME": '["a", "b"]'}, "model_names", ("a", "b")),
        ({"OPTION_MODEL_ID": "org/name"}, "model_names", ("org/name", "lmi")),
        ({"OPTION_MODEL_ID": "/models/name/"}, "model_names", ("name", "lmi")),
        ({"OPTION_MAX_NUM_BATCHED_TOKENS": "4k"}, "engine", {"max_num_batched_tokens": 4000}),
        ({"OPTION_ENABLE_PREFIX_CACHING": "false"}, "engine", {"enable_prefix_caching": False}),
        ({"OPTION_DISABLE_LOG_STATS": "false"}, "engine", {}),
        ({"OPTION_KV_TRANSFER_CONFIG": '{"a": 1}'}, "engine", {"kv_transfer_config": '{"a": 1}'}),
        ({"PATH": "/bin", "OTHER_OPTION_X": "1"}, "engine", {}),
    ],
)
def test_an_option_is_read(environ, field, value):
    assert getattr(read(environ), field) == value


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
        ({"OPTION_QQQQ": "5"}, "OPTION_QQQQ: no such option " + UNKNOWN),
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
            {"OPTION_HOST": "::1"},
            "OPTION_HOST: vLLM has this option, but its own HTTP server is not used: Slipway "
            "answers HTTP itself",
        ),
        ({"OPTION_SERVED_MODEL_NAME": "[1]"}, None),
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


def test_without_strictness_an_unknown_option_only_warns():
    with pytest.warns(UserWarning, match="OPTION_MAX_MODLE_LEN.*did you mean"):
        read({"OPTION_STRICT": "false", "OPTION_MAX_MODLE_LEN": "5"})


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        read({}).port = 1  # type: ignore[misc]


def test_every_declared_vllm_option_exists():
    import json
    from pathlib import Path

    listed = json.loads(Path("lmi_config/vllm_options.json").read_text())
    assert {option.vllm for option in OPTIONS.values() if option.vllm} <= listed.keys()
    assert REFUSED.keys() <= listed.keys()


NAMES = sorted(
    {name for option in OPTIONS.values() for name in option.names}
    | {f"OPTION_{name.upper()}" for name in vllm_options()}
)
VALUES = (
    st.sampled_from(["", "1", "-1", "0.5", "true", "max", "{}", "[1]", "x,y", "8k"]) | st.text()
)


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8))
def test_any_environment_gives_settings_or_the_one_error(environ):
    with contextlib.suppress(SettingsError):
        assert isinstance(read(environ), Settings)
