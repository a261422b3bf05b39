# SPDX-License-Identifier: Apache-2.0
"""Options in files, and the folder they are in, through settings.read() as the server does it."""

import contextlib
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmi_config.options import arguments
from lmi_config.options.declared import OPTIONS, vllm_options
from lmi_config.options.settings import SettingsError, read
from tools.generate import options_page


def store(folder, **files):
    """A model store with these files; "a__b" is b in the folder a."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_yaml", ".yaml").replace("_p", ".p")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"SERVING_MODEL_STORE": str(folder)}


LMI = """
# as it was for LMI
engine=Python
option.model_id=org/model
option.entryPoint=djl_python.lmi_vllm.vllm_async_service
option.tensor_parallel_degree=max
option.max_rolling_batch_size=64
option.rolling_batch=vllm
option.lmcache_auto_config=true
option.speculative_config={"method":"eagle3","model":"org/draft", \\
    "num_speculative_tokens":4}
job_queue_size=50
minWorkers=1
"""


def test_a_serving_properties_of_lmis_is_read_as_it_is(tmp_path):
    found = read(store(tmp_path, serving_properties=LMI))
    assert found.model_id == "org/model"
    assert found.tensor_parallel_degree == "max"
    assert found.max_rolling_batch_size == 64
    assert found.lmcache_auto_config is True
    assert found.job_queue_size == 50
    assert found.speculative_config == {
        "method": "eagle3",
        "model": "org/draft",
        "num_speculative_tokens": 4,
    }
    assert found.model_folder == tmp_path
    assert found.origins["max_rolling_batch_size"] == (
        "serving.properties: option.max_rolling_batch_size"
    )
    assert found.notes == (
        "accepted, but without effect here: serving.properties: option.rolling_batch, "
        "serving.properties: engine (vLLM is the only engine); serving.properties: minWorkers "
        "(all copies start at once, and OPTION_COPIES or SERVING_MAX_WORKERS limits them)",
    )


YAML = """
model_id: org/yaml
max_model_len: 8k
enforce_eager: true
served_model_name: [a, b]
speculative_config:
  method: ngram
  num_speculative_tokens: 3
SERVING_JOB_QUEUE_SIZE: 7
seed: 5
dtype:
"""


def test_yaml_holds_values_of_any_kind(tmp_path):
    found = read(store(tmp_path, slipway_yaml=YAML))
    assert found.model_id == "org/yaml"
    assert found.max_model_len == 8000
    assert found.enforce_eager is True
    assert found.model_names == ("a", "b")
    assert found.speculative_config == {"method": "ngram", "num_speculative_tokens": 3}
    assert found.job_queue_size == 7
    assert found.engine == {"seed": 5}
    assert found.dtype == "auto"
    assert found.origins["seed"] == "slipway.yaml: seed"


@pytest.mark.parametrize(
    ("files", "environ", "model"),
    [
        ({"serving_properties": "option.model_id=p"}, {"HF_MODEL_ID": "h"}, "p"),
        ({"serving_properties": "option.model_id=p"}, {"OPTION_MODEL_ID": "o"}, "p"),
        ({"serving_properties": "\ufeffoption.model_id=p"}, {"OPTION_MODEL_ID": "o"}, "p"),
        ({"serving_properties": "option.dtype=auto"}, {"OPTION_MODEL_ID": "o"}, "o"),
        (
            {"serving_properties": "option.dtype=auto"},
            {"OPTION_MODEL_ID": "o", "HF_MODEL_ID": "h"},
            "h",
        ),
        ({"serving_properties": "option.model_id=p", "slipway_yaml": "model_id: y"}, {}, "y"),
    ],
)
def test_a_file_comes_before_the_environment(tmp_path, files, environ, model):
    assert read({**store(tmp_path, **files), **environ}).model_id == model


def test_what_a_file_overrides_is_told(tmp_path):
    environ = store(tmp_path, serving_properties="option.max_model_len=1")
    found = read(environ | {"OPTION_MAX_MODEL_LEN": "2"})
    assert found.notes == (
        "OPTION_MAX_MODEL_LEN is set, but serving.properties: option.max_model_len comes first",
    )


def test_sagemakers_variables_come_before_a_file(tmp_path):
    environ = store(tmp_path, serving_properties="option.predict_timeout=1")
    found = read(environ | {"SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "2"})
    assert found.predict_timeout == 2


def test_a_config_file_is_read_from_anywhere(tmp_path):
    (tmp_path / "mine.yml").write_text("max_model_len: 5")
    assert read({"OPTION_CONFIG_FILE": str(tmp_path / "mine.yml")}).max_model_len == 5


def test_vllms_own_config_file_comes_after_what_is_said_beside_it(tmp_path):
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "model: org/model\ntensor-parallel-size: 2\nmax-model-len: 5\nseed: 7\n"
        "served-model-name: [one, two]\nspeculative-config:\n  method: ngram\n"
    )
    asked = {"SM_VLLM_MAX_MODEL_LEN": "9", "SM_VLLM_SERVED_MODEL_NAME": "three"}
    found = read({"SM_VLLM_CONFIG": str(file), **asked})
    assert (found.model_id, found.tensor_parallel_degree) == ("org/model", 2)
    assert (found.max_model_len, found.served_model_name) == (9, ("three",))
    assert (found.engine["seed"], found.speculative_config) == (7, {"method": "ngram"})
    argued = arguments.read("serve", ["--config", str(file), "--max-model-len", "11"])
    assert (read({}, argued).max_model_len, read({}, argued).engine["seed"]) == (11, 7)
    file.write_text("max-model-length: 5")
    with pytest.raises(SettingsError, match=r"vllm\.yaml: max-model-length: no such option"):
        read({"SM_VLLM_CONFIG": str(file)})


def test_options_in_a_local_models_own_folder_are_read(tmp_path):
    store(tmp_path / "model", serving_properties="option.max_model_len=5")
    found = read({"OPTION_MODEL_ID": str(tmp_path / "model")})
    assert (found.max_model_len, found.model_folder) == (5, tmp_path / "model")


@pytest.mark.parametrize(
    ("files", "model"),
    [
        (["config.json"], "."),
        (["config.json", "sub/x"], "."),
        (["only/config.json"], "only"),
        (["only/deeper/config.json"], "only/deeper"),
        ([".hidden", "only/config.json"], "."),
        (["adapters/a/adapter_config.json"], "."),
    ],
)
def test_the_store_is_a_model_or_holds_one(tmp_path, files, model):
    environ = store(tmp_path, **{name.replace("/", "__"): "" for name in files})
    assert read(environ).model_id == str(tmp_path / model)


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({"mine__serving.properties": "option.model_id=org/x"}, ("mine", "lmi", "org/x")),
        ({"mine__config.json": ""}, ("mine", "lmi", "{store}/mine")),
        ({"mine__deeper__config.json": ""}, ("mine", "lmi", "{store}/mine/deeper")),
        ({"serving.properties": "option.model_id=org/x"}, ("org/x", "lmi")),
        (
            {"mine__serving.properties": "option.served_model_name=other"},
            ("other",),
        ),
    ],
)
def test_the_only_folder_in_a_store_names_the_model(tmp_path, files, names):
    expected = tuple(name.format(store=tmp_path) for name in names)
    assert read(store(tmp_path, **files)).model_names == expected


def test_an_empty_store_is_no_model(tmp_path):
    found = read({"SERVING_MODEL_STORE": str(tmp_path)})
    assert (found.model_id, found.model_folder) == ("/opt/ml/model", None)


BAD_PROPERTIES = "serving.properties: "


@pytest.mark.parametrize(
    ("files", "environ", "fault"),
    [
        (
            {"a__x": "", "b__x": ""},
            {},
            "holds several models (a, b); name one with OPTION_MODEL_ID",
        ),
        ({"a.tar.gz": ""}, {}, "a model must be a folder; unpack the archive"),
        (
            {"serving_properties": "option.max_modle_len=1"},
            {},
            "serving.properties: option.max_modle_len: no such option; did you mean "
            "OPTION_MAX_MODEL_LEN?",
        ),
        (
            {"serving_properties": "option.max_model_len=x"},
            {},
            "serving.properties: option.max_model_len = 'x': should be a number of tokens",
        ),
        ({"slipway_yaml": "no_such_setting: 1"}, {}, "no_such_setting: no such option"),
        (
            {"serving_properties": "option.seed=1\noption.seed=2"},
            {},
            "option.seed is given twice, with different values; keep one",
        ),
        ({"serving_properties": "a=\\u12"}, {}, "Invalid \\u escape sequence"),
        (
            {"serving_properties": "option.max_rolling_batch_size=64"},
            {"OPTION_MAX_NUM_SEQS": "32"},
            "serving.properties: option.max_rolling_batch_size = '64' and "
            "OPTION_MAX_NUM_SEQS='32' set the same option to different values",
        ),
        ({"slipway_yaml": "a: [1"}, {}, "slipway.yaml: not YAML in line 1"),
        ({"slipway_yaml": "a: !!bool b"}, {}, "not YAML: a value is not of its type"),
        ({"slipway_yaml": "a: !!timestamp b"}, {}, "not YAML: a value is not of its type"),
        ({"slipway_yaml": "a: !!int b"}, {}, "not YAML: a value is not of its type"),
        (
            {"slipway_yaml": "a: \a"},
            {},
            "not YAML at position 3: control characters are not allowed",
        ),
        ({"slipway_yaml": "[" * 5000}, {}, "slipway.yaml: not YAML"),
        ({"slipway_yaml": "a: 1\n---\na: 2"}, {}, "slipway.yaml: not YAML of one document"),
        ({"slipway_yaml": "- a"}, {}, "should have lines like `max_model_len: 8192`"),
        ({"slipway_yaml": "1: 2"}, {}, "should have lines like `max_model_len: 8192`"),
        ({"slipway_yaml": "seed: 1\nseed: 2"}, {}, "not YAML in line 2: `seed` is given twice"),
        ({"slipway_yaml": "seed: 2026-01-01"}, {}, "like a date"),
        ({"slipway_yaml": "seed: {}"}, {}, "slipway.yaml: seed = '{}': should be a whole number"),
        ({"slipway_yaml": "seed: !!python/object:os.system 1"}, {}, "not YAML"),
        ({}, {"OPTION_CONFIG_FILE": "/nowhere.yaml"}, "/nowhere.yaml: No such file or directory"),
    ],
)
def test_a_bad_file_is_told_with_its_name(tmp_path, files, environ, fault):
    with pytest.raises(SettingsError) as refused:
        read({**store(tmp_path, **files), **environ})
    assert len(refused.value.faults) == 1
    assert fault in refused.value.faults[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.text(string.printable) | st.text(), st.sampled_from(["p", "y"]))
def test_any_file_gives_settings_or_the_one_error(tmp_path, text, kind):
    name = "slipway.yaml" if kind == "y" else "serving.properties"
    with contextlib.suppress(SettingsError, UnicodeEncodeError):
        (tmp_path / name).write_text(text)
        read({"SERVING_MODEL_STORE": str(tmp_path), "OPTION_STRICT": "false"})


def test_the_list_of_options_is_fresh():
    assert options_page.PATH.read_text() == "".join(options_page.lines()), "run scripts/check --fix"


def test_the_list_of_options_has_every_name():
    text = options_page.PATH.read_text()
    names = {name for option in OPTIONS.values() for name in option.all_names}
    assert [name for name in sorted(names | vllm_options().keys()) if f"`{name}`" not in text] == []


def test_what_is_nobodys_option_is_for_a_model_py(tmp_path):
    """LMI's handlers get every option of serving.properties, by the name it is written with."""
    (tmp_path / "serving.properties").write_text(
        "option.promptPrefix=say\noption.max_model_len=5\noption.max_new_tokens=7\nminWorkers=1\n"
    )
    environ = {
        "SERVING_MODEL_STORE": str(tmp_path),
        "OPTION_MODEL_ID": "org/name",
        "OPTION_MY_OWN_SWITCH": "on",
        "OPTION_STRICT": "false",
    }
    found = read(environ)
    own = {"promptPrefix": "say", "max_new_tokens": "7", "my_own_switch": "on"}
    assert found.own == own
    assert own.items() <= found.properties.items()
    assert found.properties["max_model_len"] == "5"
    assert "say" not in repr(found)
