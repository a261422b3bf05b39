# SPDX-License-Identifier: Apache-2.0
"""Options under the names of other servers: a name that would change the answers is refused, and a
name without effect is noted.
"""

import dataclasses
import json
from pathlib import Path

import pytest

from lmi_config.options.declared import OPTIONS, vllm_options
from lmi_config.options.ignored import REFUSED, REMOVED, UNUSED
from lmi_config.options.settings import SettingsError, read, vllm_environment

LISTED = json.loads(Path("lmi_config/options/vllm_options.json").read_text())
DECLARED = {option.vllm for option in OPTIONS.values()}


def refused(environ):
    with pytest.raises(SettingsError) as found:
        read(environ)
    return "\n".join(found.value.faults)


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({"OPTION_max_model_len": "55"}, "max_model_len", 55),
        ({"OPTION_entryPoint": "model.py"}, "entry_point", "model.py"),
        ({"OPTION_entrypoint": "model.py"}, "entry_point", "model.py"),
        ({"OPTION_tensor_parallel_degree": "2"}, "tensor_parallel_degree", 2),
        ({"OPTION_seed": "7"}, "engine", {"seed": 7}),
        ({"OPTION_max_num_seqs": "7"}, "max_rolling_batch_size", 7),
        ({"OPTION_my_own": "x"}, "own", {"my_own": "x"}),
        ({"SM_VLLM_max_model_len": "55"}, "max_model_len", 55),
        ({"SM_VLLM_Max_Model_Len": "55"}, "max_model_len", 55),
        ({"SM_VLLM_TASK": "embed"}, "task", "embed"),
        ({"SM_VLLM_task": "embedding"}, "task", "embed"),
        ({"SM_VLLM_LMCACHE_AUTO_CONFIG": "true"}, "lmcache_auto_config", True),
        ({"SM_VLLM_QUANTIZE": "fp8"}, "quantize", "fp8"),
        ({"OPTION_max_model_len": "55", "OPTION_MAX_MODEL_LEN": "55"}, "max_model_len", 55),
    ],
)
def test_a_name_is_read_as_lmi_and_awss_container_read_it(environ, field, value):
    found = read(environ)
    assert getattr(found, field) == value
    assert field in ("own", "engine") or found.origins[field] == next(iter(environ))


@pytest.mark.parametrize(
    ("environ", "fault"),
    [
        ({"OPTION_entryPoint": "evil.py"}, "OPTION_entryPoint='evil.py': should be model.py"),
        ({"OPTION_EntryPoint": "model.py"}, "did you mean OPTION_ENTRYPOINT?"),
        ({"OPTION_Max_Model_Len": "55"}, "did you mean OPTION_MAX_MODEL_LEN?"),
        ({"OPTION_maxModelLen": "55"}, "did you mean OPTION_MAX_MODEL_LEN?"),
        ({"OPTION_Seed": "55"}, "did you mean OPTION_SEED?"),
        ({"OPTION_max_model_len": "5", "OPTION_MAX_MODEL_LEN": "6"}, "to different values"),
        ({"SM_VLLM_TASK": "embed", "OPTION_TASK": "classify"}, "to different values"),
        ({"OPTION_entryPoint": "djl_python.tensorrt_llm"}, "chooses TensorRT-LLM"),
        ({"OPTION_root_path": "/a"}, "OPTION_root_path: vLLM has this option, but"),
    ],
)
def test_another_case_is_no_name_of_lmis(environ, fault):
    assert fault in refused(environ)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("OPTIONS_MAX_MODEL_LEN", "OPTION_MAX_MODEL_LEN"),
        ("OPTOIN_SEED", "OPTION_SEED"),
        ("SERVINGS_JOB_QUEUE_SIZE", "SERVING_JOB_QUEUE_SIZE"),
        ("SAGMAKER_BIND_TO_PORT", "SAGEMAKER_BIND_TO_PORT"),
        ("SAGE_MAKER_MAX_REQUEST_SIZE", "SAGEMAKER_MAX_REQUEST_SIZE"),
        ("SM_VLM_SEED", "SM_VLLM_SEED"),
        ("SMVLLM_MAX_MODEL_LEN", "SM_VLLM_MAX_MODEL_LEN"),
    ],
)
def test_a_mistyped_prefix_stops_the_start(name, meant):
    assert f"{name} is unknown and has no effect; did you mean {meant}?" in refused({name: "1"})
    (note,) = read({name: "1", "OPTION_STRICT": "false"}).notes
    assert f"did you mean {meant}?" in note


@pytest.mark.parametrize(
    ("environ", "note"),
    [
        ({"VLM_WORKER_MULTIPROC_METHOD": "fork"}, "did you mean VLLM_WORKER_MULTIPROC_METHOD?"),
        ({"SERVINGS_MIN_WORKERS": "1"}, "did you mean SERVING_MIN_WORKERS?"),
        ({"VLLM_ATTENTION_BACKEND": "TORCH_SDPA"},
         "VLLM_ATTENTION_BACKEND: this vLLM does not read this variable; set "
         "OPTION_ATTENTION_BACKEND"),
        ({"VLLM_USE_V1": "0"}, "VLLM_USE_V1: this vLLM does not read this variable"),
        ({"VLLM_LOGING_LEVEL": "DEBUG"}, "did you mean VLLM_LOGGING_LEVEL?"),
        ({"OPTION_ENV": "VLLM_USE_V1=0"}, "(set its values as variables of the container)"),
        ({"OPTION_TASK": "summarization"}, "OPTION_TASK: 'summarization' is no task of vLLM's: the "
         "model does its own, as with auto"),
        ({"HF_TASK": "question-answering"}, "HF_TASK: 'question-answering' is no task"),
        ({"HF_TASK": "something"}, "HF_TASK: 'something' is no task"),
        ({"SAGEMAKER_MAX_PAYLOAD_IN_MB": "abc"}, "SAGEMAKER_MAX_PAYLOAD_IN_MB='abc': should be a "
         "whole number, at least 1; it is ignored"),
    ],
)  # fmt: skip
def test_options_without_effect_are_noted(environ, note):
    (found,) = read(environ).notes
    assert note in found


def test_after_a_wrong_limit_of_sagemakers_the_next_counts():
    found = read({"SAGEMAKER_MAX_PAYLOAD_IN_MB": "0", "SERVING_MAX_REQUEST_SIZE": "5"})
    assert found.max_request_size == 5


@pytest.mark.parametrize(
    "name",
    [
        *("VLLM_API_KEY", "VLLM_PORT", "VLLM_LOGGING_LEVEL", "VLLM_USE_MODELSCOPE"),
        *("VLLM_SERVICE_HOST", "VLLM_PORT_8000_TCP_ADDR", "OPTIONS_SERVICE_PORT"),
        *("SERVICE_PORT", "CACHE_POLICY", "LLM_SEED", "SERVICE_NAME", "OPTIONAL_SEED"),
    ],
)
def test_foreign_and_used_variables_are_not_noted(name):
    assert read({name: "12345678"}).notes == ()
    assert read({"OPTIONS_PORT": "tcp://10.0.0.1:80"}).notes == ()


@pytest.mark.parametrize(
    ("task", "read_as"),
    [("embedding", "embed"), ("score", "score"), ("reward", "reward"),
     ("transcription", "text-generation"), ("auto", "auto"), ("summarization", "auto")],
)  # fmt: skip
def test_older_vllms_tasks(task, read_as):
    assert read({"OPTION_TASK": task}).task == read_as


@pytest.mark.parametrize("task", ["embd", "text-embeding", "clasify", "fill-mask", "text-to-image"])
def test_a_task_that_would_become_another_is_refused(task):
    assert f"OPTION_TASK='{task}': should be one of" in refused({"OPTION_TASK": task})


DOCUMENTED = (
    *("engine", "load_on_devices", "translatorFactory", "job_queue_size", "batch_size"),
    *("max_batch_delay", "max_idle_time", "log_request_metric", "metrics_aggregation"),
    *("minWorkers", "maxWorkers", "gpu.minWorkers", "gpu.maxWorkers", "cpu.minWorkers"),
    *("cpu.maxWorkers", "required_memory_mb", "gpu.required_memory_mb", "reserved_memory_mb"),
    *("gpu.reserved_memory_mb", "retry_threshold", "max_dynamic_batch_size", "blockFactory"),
    *("option.modelName", "option.pythonExecutable", "option.handler", "option.parallel_loading"),
    *("option.enable_venv", "option.rolling_batch", "option.unroll", "option.max_num_sequences"),
    *("option.env", "option.log_request_metric", "option.max_output_size", "option.mpi_mode"),
    *("application", "option.mapLocation", "option.extraFiles"),
)
"""Names in serving.properties, from DJL Serving's and LMI's documentation (configurations_model.md;
the properties that LMI's secure mode allows in untrusted channels).
"""


@pytest.mark.parametrize("name", DOCUMENTED)
def test_lmis_documented_names_do_not_stop_a_start_in_secure_mode(name, tmp_path):
    value = "Python" if name == "engine" else "1"
    (tmp_path / "serving.properties").write_text(f"{name}={value}\n")
    secure = {"SAGEMAKER_SECURE_MODE": "true"}
    notes = read({"SERVING_MODEL_STORE": str(tmp_path), **secure}).notes
    assert not [it for it in notes if "is not known" in it]


@pytest.mark.parametrize("name", ["OPTION_ENTRYPOINT", "DJL_ENTRY_POINT", "OPTION_entryPoint"])
def test_the_deployments_own_model_by_its_path(name, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    store = {"SERVING_MODEL_STORE": str(tmp_path)}
    for path in (tmp_path / "model.py", f"file://{tmp_path}/model.py", "./model.py"):
        assert read({**store, name: str(path)}).entry_point == "model.py"
    for path in (tmp_path / "code" / "model.py", "code/model.py", "/elsewhere/model.py"):
        assert "beside serving.properties or the model's files" in refused(
            {**store, name: str(path)}
        )


def test_every_option_of_vllm_is_served_refused_or_without_effect():
    """Options of vLLM's HTTP server that are passed on are read by the parts of it that run
    here.
    """
    from vllm.entrypoints.launchers import cli_args

    removed = {it.removeprefix("OPTION_").lower() for it in (*REMOVED, *UNUSED)}
    served = DECLARED | vllm_options().keys() | {"spec_model", "spec_tokens"}
    flags = {"config", "api_key", "log_level"}  # options of ours by their own names
    assert LISTED.keys() == (LISTED.keys() & (served | REFUSED.keys() | removed | flags))
    assert not served & (REFUSED.keys() | removed)
    frontend = {it.name for it in dataclasses.fields(cli_args.FrontendArgs)}
    root = Path(cli_args.__file__).parent.parent
    used = "".join((root / file).read_text() for file in USED)
    passed_on = frontend & vllm_options().keys() - {*USED_BY_FUNCTIONS}
    assert [it for it in sorted(passed_on) if it not in used] == []


USED = (
    "generate/api_router.py",
    "launchers/api_server/app_state.py",
    "openai/chat_completion/api_router.py",
    "pooling/factories.py",
    "speech_to_text/factories.py",
)
"""The files of vLLM's HTTP server that serving/engine/vllm.py uses."""
USED_BY_FUNCTIONS = {
    "cohere_format": "resolve_default_chat_template_kwargs",
    "log_config_file": "configure_logging_from_args",
    "tool_parser_plugin": "ToolParserManager.import_tool_parser",
}


def test_vllms_variables_are_listed():
    assert {"VLLM_LOGGING_LEVEL", "VLLM_CPU_KVCACHE_SPACE", "VLLM_API_KEY"} <= vllm_environment()
